"""Loss scaling: training in float16 without gradients that vanish or overflow.

float16 has a small range: gradients below about 6e-8 become zero.  Multiplying the loss by a scale
makes all gradients larger; dividing them by it afterwards, in float32, restores them.  As the right
scale changes during training, `DynamicLossScale` adapts it: it halves when a gradient is not finite
(that step is skipped) and doubles after many finite steps (P. Micikevicius et al.,
"Mixed precision training", 2018).

A skipped step leaves everything as it was.  `step` restores parameters and optimizer.  The forward pass
has written by then, the averages of a BatchNorm for example, so `value_and_grad` restores that.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite.graph._functional import state as state_of
from nnxlite.graph._walk import iter_graph
from nnxlite.objects._pytree import Pytree
from nnxlite.training._leaves import flatten, read, wide_dtype, write_together
from nnxlite.training.optimizer import ModelAndOptimizer, Optimizer, refuse_swapped, trained_by
from nnxlite.transforms._derivatives import value_and_aux
from nnxlite.transforms._grad import value_and_grad
from nnxlite.variables._variable import Variable, is_variable

__all__ = ["DynamicLossScale", "LossScaleState", "StaticLossScale", "all_finite"]

T = tp.TypeVar("T")


class LossScaleState(Variable[T]):
    """A Variable that belongs to a loss scale.

    >>> import nnxlite as nnx
    >>> isinstance(nnx.StaticLossScale(2.0).scale_value, nnx.LossScaleState)
    True
    """


def all_finite(tree: tp.Any) -> jax.Array:
    """Whether every floating-point leaf of a tree is finite: a bool of shape `()`.

    Args:
        tree: any pytree; Python's numbers count, leaves of other dtypes do not.

    Returns:
        A bool array of shape `()`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> bool(nnx.all_finite({"a": jnp.ones(2), "b": jnp.array(jnp.inf)}))
    False
    """
    # NumPy for its arrays and for numbers: in JAX's float32, a large number of Python is not finite.
    finite = [
        (jnp if isinstance(x, jax.Array) else np).isfinite(x).all()
        for x in filter(_is_float, jax.tree.leaves(tree))
    ]
    return jnp.array([True, *finite]).all()


class StaticLossScale(Pytree):
    """A constant loss scale; 1 turns scaling off.

    Args:
        scale: a positive number.

    Attributes:
        scale_value: `LossScaleState`, float32, the present scale.

    Raises:
        ValueError: if `scale` is not positive.

    >>> import nnxlite as nnx
    >>> float(nnx.StaticLossScale(128.0).scale_value[...])
    128.0
    """

    def __init__(self, scale: float = 1.0) -> None:
        _check_positive("scale", scale)
        self.scale_value = LossScaleState(jnp.asarray(scale, jnp.float32))

    def scale(self, loss: T) -> T:
        """The loss (or any tree) times the scale, in its own dtype.

        Args:
            loss: a floating-point array, or a tree of some.
        """
        factor = self.scale_value.value

        def scaled(x: tp.Any) -> tp.Any:
            return x * factor.astype(jnp.result_type(x)) if _is_float(x) else x

        return jax.tree.map(scaled, loss)

    def unscale(self, grads: T) -> T:
        """The gradients divided by the scale, in float32 if they are of lower precision.

        Args:
            grads: a tree of floating-point arrays.
        """
        inverse = 1.0 / self.scale_value.value
        wide = lambda g: jnp.asarray(g).astype(wide_dtype(g))
        return jax.tree.map(lambda g: wide(g) * inverse if _is_float(g) else g, grads)

    def adjust(self, finite: jax.Array) -> None:
        """Adjust the scale to whether the latest gradients were finite; here it is constant.

        Args:
            finite: a bool of shape `()`, as of `all_finite`.
        """

    def value_and_grad(
        self, f: tp.Callable[..., tp.Any], *, argnums: tp.Any = 0, has_aux: bool = False
    ) -> tp.Callable[..., tuple[tp.Any, tp.Any]]:
        """As `nnx.value_and_grad`, with gradients of the scaled loss, as `step` takes them.

        The value is the loss itself. Where a gradient is not finite, so that `step` skips the update,
        the Variables that `f` has written in its arguments (averages of a BatchNorm, counts, metrics)
        are restored. `nnx.value_and_grad` of a loss times `scale` does not restore them.

        Args:
            f: the loss function, which knows nothing of the scale.
            argnums, has_aux: as for `nnx.value_and_grad`.

        >>> import nnxlite as nnx, optax
        >>> model, scale = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), nnx.DynamicLossScale(2.0**15)
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        >>> loss, grads = scale.value_and_grad(lambda m: m.bias.sum() + 1.0)(model)
        >>> float(loss), float(grads["bias"][0]), bool(scale.step(optimizer, model, grads))
        (1.0, 32768.0, True)
        """

        @functools.wraps(f)
        def scaled(*args: tp.Any, **kwargs: tp.Any) -> tp.Any:
            result = f(*args, **kwargs)
            loss, aux = value_and_aux(result, f) if has_aux else (result, None)
            return self.scale(loss), (loss, aux)

        differentiate = value_and_grad(scaled, argnums=argnums, has_aux=True)

        @functools.wraps(f)
        def call(*args: tp.Any, **kwargs: tp.Any) -> tuple[tp.Any, tp.Any]:
            variables = [v for _, v in iter_graph((args, kwargs)) if is_variable(v)]
            before = [read(v) for v in variables]
            (_, (loss, aux)), grads = differentiate(*args, **kwargs)
            finite = all_finite(self.unscale(grads))
            write_together(
                (variable, _select(finite, new, old))
                for variable, new, old in zip(variables, map(read, variables), before, strict=True)
                if new is not old and _same_forms(new, old)
            )
            return ((loss, aux) if has_aux else loss), grads

        return call

    def step(self, optimizer: Optimizer[tp.Any], *args: tp.Any, **kwargs: tp.Any) -> jax.Array:
        """Update with scaled gradients, unless one is not finite, and adjust the scale.

        Args:
            optimizer: an `Optimizer` or `ModelAndOptimizer`.
            *args: the arguments of its `update`, the last of which are the gradients of the scaled loss.
            **kwargs: further arguments of its `update`.

        Returns whether the gradients were finite, a bool of shape `()`. If not, parameters and
        optimizer are unchanged; `value_and_grad` has restored what the forward pass had written. The
        state of the optimizer keeps its dtypes.
        """
        *model, grads = args
        if model:
            refuse_swapped(model[0], grads)
        grads = self.unscale(grads)
        finite = all_finite(grads)
        target = optimizer.model if isinstance(optimizer, ModelAndOptimizer) else model[0]
        params = state_of(target, trained_by(optimizer.wrt))
        leaves = [v for v in flatten((params, state_of(optimizer)))[0] if is_variable(v)]
        before = [read(v) for v in leaves]
        tp.cast(tp.Any, optimizer).update(*model, grads, **kwargs)
        write_together(
            (variable, _select(finite, _in_dtypes_of(old, read(variable)), old))
            for variable, old in zip(leaves, before, strict=True)
        )
        self.adjust(finite)
        return finite


class DynamicLossScale(StaticLossScale):
    """A loss scale that falls when gradients overflow and otherwise rises from time to time.

    Args:
        scale: the first scale.
        period: number of consecutive finite steps after which the scale is multiplied by `factor`.
        factor: the factor by which the scale changes; more than 1.
        smallest: lower bound of the scale.

    Attributes:
        scale_value: `LossScaleState`, float32, the present scale.
        good_steps: `LossScaleState`, int32, the finite steps since the scale last changed.

    Raises ValueError if an argument is not positive, or `factor` is not more than 1.

    >>> import nnxlite as nnx, jax.numpy as jnp, optax
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    >>> loss_scale = nnx.DynamicLossScale(2.0**15)
    >>> @nnx.jit
    ... def train_step(model, optimizer, loss_scale, x):
    ...     loss, grads = loss_scale.value_and_grad(lambda model: model(x).sum())(model)
    ...     return loss_scale.step(optimizer, model, grads)
    >>> bool(train_step(model, optimizer, loss_scale, jnp.ones((1, 2))))
    True
    >>> bool(train_step(model, optimizer, loss_scale, jnp.full((1, 2), jnp.inf)))
    False
    >>> float(loss_scale.scale_value.value), int(optimizer.step.value)
    (16384.0, 1)
    """

    def __init__(
        self,
        scale: float = 2.0**15,
        *,
        period: int = 2000,
        factor: float = 2.0,
        smallest: float = 1.0,
    ) -> None:
        super().__init__(scale)
        _check_positive("period", period)
        _check_positive("smallest", smallest)
        if not factor > 1:
            raise ValueError(f"factor must be more than 1, got {factor!r}.")
        self.period = period
        self.factor = factor
        self.smallest = smallest
        self.good_steps = LossScaleState(jnp.zeros((), jnp.int32))

    def adjust(self, finite: jax.Array) -> None:
        """Lower, raise or keep the scale, given whether the latest gradients were finite.

        Args:
            finite: a bool of shape `()`, as of `all_finite`.
        """
        scale = self.scale_value.value
        good = self.good_steps.value + 1
        full = good >= self.period
        raised = scale * self.factor
        raised = jnp.where(full & (raised <= _LARGEST), raised, scale)
        lowered = jnp.maximum(scale / self.factor, self.smallest)
        self.scale_value.value = jnp.where(finite, raised, lowered)
        self.good_steps.value = jnp.where(finite & ~full, good, 0)


_LARGEST = 2.0**126
"""The inverse of a larger scale is not a normal number, and processors may take it for zero."""


def _is_float(value: tp.Any) -> bool:
    return wide_dtype(value) is not None


def _in_dtypes_of(old: tp.Any, new: tp.Any) -> tp.Any:
    """A value with the dtypes of another: gradients in float32 widen the moments of optax."""

    def cast(a: tp.Any, b: tp.Any) -> tp.Any:
        dtype = getattr(a, "dtype", None)
        return b if dtype is None or b.dtype == dtype else b.astype(dtype)

    return new if new is old else jax.tree.map(cast, old, new)


def _same_forms(one: tp.Any, other: tp.Any) -> bool:
    """Whether two values are arrays, or pytrees of some, of one structure and of the same shapes."""
    leaves, treedef = jax.tree.flatten(one)
    others, structure = jax.tree.flatten(other)
    return treedef == structure and all(
        hasattr(a, "dtype") and hasattr(b, "dtype") and a.shape == b.shape
        for a, b in zip(leaves, others)
    )


def _select(condition: jax.Array, new: tp.Any, old: tp.Any) -> tp.Any:
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), new, old)


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}.")
