"""Normalisation of weights: `SpectralNorm` and `WeightNorm`, wrappers around any module.

Such a wrapper contains a module and, for each weight that it normalises, values of its own: the
estimate of a singular vector, or a learned scale.  These are stored in a dict by the path of the
weight inside the wrapped module.  A call replaces each weight by its normalised form, *in place*,
and then calls the module.  The weight is not restored, so that afterwards the module contains what
it computed with; normalising it again in the next call changes it by rounding only.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
from jax import lax

from nnxlite._base.errors import path_text
from nnxlite._state._flat import to_flat_state
from nnxlite.filters import Filter, PathContains
from nnxlite.graph._functional import variables
from nnxlite.nn import initializers
from nnxlite.nn._common import KEYLESS, Axes, as_tuple, new_param, params_key, wide
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn, canonicalize_dtype, default_promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.objects._fields import data
from nnxlite.objects._module import Module, layer_name
from nnxlite.objects._pytree import Pytree
from nnxlite.objects._rngs import Rngs
from nnxlite.variables._kinds import BatchStat, Param
from nnxlite.variables._variable import Variable

__all__ = ["SpectralNorm", "WeightNorm"]

Path = tuple[tp.Any, ...]
Weights = list[tuple[Path, Variable[jax.Array]]]


class _WeightNormalization(Module):
    """A module whose weights are normalised before each call."""

    layer_instance: tp.Any

    def __init__(self, layer_instance: tp.Any) -> None:
        if not isinstance(layer_instance, Pytree):
            raise TypeError(
                f"{layer_name(self)} wraps a module and normalises the Variables in it; got "
                f"a value of type {type(layer_instance).__name__}."
            )
        self.layer_instance = layer_instance


def _weights(module: tp.Any, which: Filter) -> Weights:
    """The Variables of a module that a filter selects, with their paths, in path order."""
    return list(to_flat_state(variables(module, which, ...)[0]))


def _unit(x: jax.Array, axes: tuple[int, ...] | None, epsilon: float) -> jax.Array:
    """`x` divided by its Euclidean norm over some axes, in float32 or better."""
    x = wide(x)
    return x * lax.rsqrt(jnp.sum(x * x, axis=axes, keepdims=True) + epsilon)


class SpectralNorm(_WeightNormalization):
    """Spectral normalisation (Miyato et al. 2018, https://arxiv.org/abs/1802.05957).

    Divides each `Param` of two or more dimensions by an estimate of its largest singular value, as
    a matrix whose columns are the last axis.  The estimate comes from power iteration, which
    continues from the previous call; vector and value are stored in `batch_stats`, as `BatchStat`s
    under the path of the parameter and `"u"` or `"sigma"`.

    Args:
        layer_instance: the module to wrap.
        n_steps: steps of power iteration in one call; 0 leaves the parameters unchanged.
        epsilon: added to the squared norm of a vector.
        dtype: dtype that normalised parameters are rounded to; they are stored in their own.
        param_dtype: dtype of the estimates.
        error_on_non_matrix: raise an error for parameters of three or more dimensions.
        update_stats: whether calls store their estimates.  In `eval` mode
            (`use_running_average=True`) they do not.
        rngs: keys for the first vectors, from the stream "params".

    Raises:
        TypeError: if `layer_instance` is not a module.
        ValueError: for `n_steps` below zero, or because of `error_on_non_matrix`.

    >>> import jax.numpy as jnp, nnxlite as nnx
    >>> rngs = nnx.Rngs(0)
    >>> layer = nnx.SpectralNorm(nnx.Linear(3, 4, rngs=rngs), n_steps=50, rngs=rngs)
    >>> layer(jnp.ones((1, 3))).shape
    (1, 4)
    >>> print(jnp.linalg.norm(layer.layer_instance.kernel.value, 2).round(4))
    1.0
    """

    def __init__(
        self,
        layer_instance: tp.Any,
        *,
        n_steps: int = 1,
        epsilon: float = 1e-12,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        error_on_non_matrix: bool = False,
        update_stats: bool = True,
        rngs: Rngs,
    ) -> None:
        if n_steps < 0:
            raise ValueError(f"n_steps of SpectralNorm is a number of steps, not {n_steps}.")
        super().__init__(layer_instance)
        self.n_steps = n_steps
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.error_on_non_matrix = error_on_non_matrix
        self.use_running_average = not update_stats
        stats: dict[Path, BatchStat[jax.Array]] = {}
        for path, weight in _matrices(self) if n_steps else ():
            shape = (1, weight.shape[-1])
            stats[(*path, "u")] = new_param(
                self, rngs, initializers.normal(), shape, param_dtype, {}, BatchStat
            )
            stats[(*path, "sigma")] = BatchStat(jnp.ones((), param_dtype))
        self.batch_stats = data(stats)

    def __call__(self, x: tp.Any, update_stats: bool | None = None) -> tp.Any:
        """The result of the wrapped module, with normalised parameters.

        Args:
            x: the argument for the wrapped module.
            update_stats: whether this call stores its estimates; by default as the layer says.
        """
        if update_stats is None:
            update_stats = not self.use_running_average
        for path, weight in _matrices(self):
            if (*path, "u") in self.batch_stats:
                _divide_by_singular_value(self, path, weight, update_stats)
        return self.layer_instance(x)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Set the mode; None leaves it unchanged.

        Args:
            use_running_average: do not store new estimates.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average


def _matrices(layer: SpectralNorm) -> Weights:
    """The parameters to normalise."""
    matrices = [pair for pair in _weights(layer.layer_instance, Param) if pair[1].ndim > 1]
    for path, weight in matrices:
        if weight.ndim > 2 and layer.error_on_non_matrix:
            raise ValueError(
                f"SpectralNorm: Layer instance parameter is {weight.ndim}D but "
                f"error_on_non_matrix is True: {path_text(path)} of "
                f"{type(layer.layer_instance).__name__} has the shape {weight.shape}."
            )
    return matrices


def _divide_by_singular_value(
    layer: SpectralNorm, path: Path, weight: Variable[jax.Array], update_stats: bool
) -> None:
    """Divide a weight by its largest singular value, after some steps of power iteration."""
    stored_u, stored_sigma = layer.batch_stats[(*path, "u")], layer.batch_stats[(*path, "sigma")]
    value = weight.get_value()
    matrix, u = wide(value.reshape(-1, value.shape[-1])), wide(stored_u.get_value())
    v = u
    for _ in range(layer.n_steps):
        v = _unit(jnp.matmul(u, matrix.T), None, layer.epsilon)
        u = _unit(jnp.matmul(v, matrix), None, layer.epsilon)
    u, v = lax.stop_gradient((u, v))
    sigma = jnp.matmul(jnp.matmul(v, matrix), u.T)[0, 0]
    if update_stats:
        stored_u.set_value(u.astype(stored_u.dtype))
        stored_sigma.set_value(sigma.astype(stored_sigma.dtype))
    normalized = value / jnp.where(sigma != 0, sigma, 1)
    dtype = canonicalize_dtype(value, u, v, sigma, dtype=layer.dtype)
    weight.set_value(normalized.astype(dtype).astype(value.dtype))


class WeightNorm(_WeightNormalization):
    """Weight normalisation (Salimans and Kingma 2016, https://arxiv.org/abs/1602.07868).

    Gives every slice of a weight along its feature axes the Euclidean norm one, times a learned
    scale: direction and length are learned separately.  The scales are `Param`s, stored in `scales`
    under the path of the weight.

    If a scale is negative, the weight is stored without its sign, so that it keeps its direction
    from call to call: storing the product would flip it each time.

    Args:
        layer_instance: the module to wrap.
        feature_axes: the axes along which each slice has its own norm; None for one norm of the
            whole weight.
        use_scale: whether there are scales.
        scale_init: their initializer.
        epsilon: added to the squared norm.
        dtype: dtype that normalised weights are rounded to; they are stored in their own.
        param_dtype: dtype of the scales.
        variable_filter: which Variables of the module to normalise.
        promote_dtype: does the rounding.
        rngs: keys for `scale_init`, from the stream "params".

    Raises:
        TypeError: if `layer_instance` is not a module.
        IndexError: if a selected Variable does not have such an axis.

    >>> import jax.numpy as jnp, nnxlite as nnx
    >>> rngs = nnx.Rngs(0)
    >>> layer = nnx.WeightNorm(nnx.Linear(3, 4, rngs=rngs), rngs=rngs)
    >>> layer(jnp.ones((1, 3))).shape
    (1, 4)
    >>> print(jnp.linalg.norm(layer.layer_instance.kernel.value, axis=0).round(4))
    [1. 1. 1. 1.]
    """

    def __init__(
        self,
        layer_instance: tp.Any,
        *,
        feature_axes: Axes | None = -1,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        epsilon: float = 1e-12,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        variable_filter: Filter = PathContains("kernel"),  # noqa: B008 - a frozen value
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        rngs: Rngs,
    ) -> None:
        super().__init__(layer_instance)
        self.feature_axes = feature_axes
        self.use_scale = use_scale
        self.scale_init = scale_init
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.variable_filter = variable_filter
        self.promote_dtype = promote_dtype
        scales: dict[Path, Param[jax.Array]] | None = {} if use_scale else None
        for path, weight in _weights(layer_instance, variable_filter):
            axes = _feature_axes(self, path, weight)
            if scales is not None:
                shape = tuple(weight.shape[axis] for axis in axes)
                # As in the reference, a constant draws no key; later layers depend on that.
                key: tp.Any = None if scale_init in KEYLESS else params_key(self, rngs)
                scales[path] = Param(scale_init(key, shape, param_dtype))
        self.scales = data(scales)

    def __call__(self, x: tp.Any, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """The result of the wrapped module for these arguments, with normalised weights.

        Args:
            x, args, kwargs: arguments of the wrapped module.
        """
        stored = [
            (weight, _give_norm(self, path, weight))
            for path, weight in _weights(self.layer_instance, self.variable_filter)
        ]
        result = self.layer_instance(x, *args, **kwargs)
        for weight, value in stored:
            if value is not None:
                weight.set_value(value)
        return result


def _feature_axes(layer: WeightNorm, path: Path, weight: Variable[jax.Array]) -> tuple[int, ...]:
    """The feature axes of one weight as ascending non-negative numbers."""
    axes = () if layer.feature_axes is None else as_tuple(layer.feature_axes)
    for axis in axes:
        if not -weight.ndim <= axis < weight.ndim:
            raise IndexError(
                f"WeightNorm(feature_axes={layer.feature_axes}) names an axis that does not exist in "
                f"{path_text(path)} of {type(layer.layer_instance).__name__}, of shape "
                f"{weight.shape}. Select weights with variable_filter."
            )
    return tuple(sorted({axis % weight.ndim for axis in axes}))


def _give_norm(layer: WeightNorm, path: Path, weight: Variable[jax.Array]) -> jax.Array | None:
    """Write the normalised weight; returns the value to store after the call, None for the same."""
    value, features = weight.get_value(), _feature_axes(layer, path, weight)

    def rounded(normalized: jax.Array) -> jax.Array:
        (rounded,) = layer.promote_dtype((normalized,), dtype=layer.dtype)
        return rounded.astype(value.dtype)

    others = tuple(axis for axis in range(value.ndim) if axis not in features)
    unit = _unit(value, others, layer.epsilon)
    if layer.scales is None or path not in layer.scales:
        weight.set_value(rounded(unit))
        return None
    along = [n if axis in features else 1 for axis, n in enumerate(value.shape)]
    scale = jnp.asarray(layer.scales[path]).reshape(along)  # an array in old files of Flax
    used = rounded(unit * scale)
    weight.set_value(used)
    return jnp.where(scale > 0, used, jnp.where(scale < 0, -used, value))
