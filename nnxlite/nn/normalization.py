"""Normalisation of activations: `BatchNorm`, `LayerNorm`, `RMSNorm`, `GroupNorm`, `InstanceNorm`.

All five compute the moments (mean and variance) of the input over some axes, and apply a learned scale
and bias to every feature: y = (x - mean) / sqrt(var + epsilon) * scale + bias.  Their moments are of:

    LayerNorm      the features of one example
    RMSNorm        the same, assuming a mean of zero
    GroupNorm      the positions of one example, and the features of one group
    InstanceNorm   the positions of one example, for each feature separately
    BatchNorm      all examples and positions, for each feature alone; outside training, running averages

These are the *reduction axes*.  Moments are float32 or better, whatever the dtype of the input.  Scale
and bias run along the *feature axes*.  With `axis_name` the moments are those of the data of all devices
on the named axis; a `mask` excludes elements from the moments (not from the result).  Without any
element the mean is 0 and the variance 1, and running averages do not change.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
from jax import lax

from nnxlite.nn import _common, initializers
from nnxlite.nn._common import NO_METADATA, Arguments, Axes, Metadata
from nnxlite.nn._normalizing import (
    Count,
    abs_squared,
    absolute,
    all_but,
    check_features,
    checked_mask,
    groups_of,
    number_of,
    reduction_axes_of_groups,
    unless_of_none,
    updated,
)
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn, canonicalize_dtype, default_promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.objects._module import Module, layer_name
from nnxlite.objects._rngs import Rngs
from nnxlite.variables._kinds import BatchStat, Param

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]


class _Normalization(Module):
    """What all normalisations share: their attributes, and how their parameters are made."""

    scale: Param[jax.Array] | None
    num_features: int
    epsilon: float
    dtype: Dtype | None
    param_dtype: Dtype
    use_scale: bool
    axis_name: str | None
    axis_index_groups: tp.Any
    use_fast_variance: bool
    promote_dtype: PromoteDtypeFn

    def _nnx_set_up(self, arguments: Arguments, *without: str) -> None:
        """Make scale and bias, and set all other attributes but those named in `without`."""
        values = arguments.values
        shape = (values["num_features"],)
        self.scale = arguments.parameter("scale", shape)
        if "use_bias" in values:
            self.bias = arguments.parameter("bias", shape)
        names = [n for n in ("axis", "feature_axes", "reduction_axes") if n in values]
        axes = {name: _common.without_numpy(values[name]) for name in names}
        arguments.set_attributes(*without, **axes)


class _WithBias(_Normalization):
    """One that has a bias, or the choice of one."""

    bias: Param[jax.Array] | None
    use_bias: bool


def _normalized_by_itself(
    layer: tp.Any,
    x: jax.Array,
    reduction_axes: Axes,
    mask: tp.Any,
    bias: Param[jax.Array] | None = None,
    centred: bool = True,
    feature_axes: Axes | None = None,
) -> jax.Array:
    """The input normalised by its own moments over some axes."""
    x = jnp.asarray(x)
    feature_axes = absolute(layer, x, layer.feature_axes if feature_axes is None else feature_axes)
    parameters = (_common.value_of(layer.scale), _common.value_of(bias))
    check_features(layer, x, feature_axes, *parameters)
    axes = absolute(layer, x, reduction_axes)
    x, scale, bias_value = layer.promote_dtype((x, *parameters), dtype=layer.dtype)
    mean, var = moments(layer, x, axes, checked_mask(layer, mask, x.shape), centred)
    return normalized(layer, x, mean, var, feature_axes, scale, bias_value)


def moments(
    layer: tp.Any,
    x: jax.Array,
    axes: tuple[int, ...],
    mask: jax.Array | None,
    centred: bool = True,
    count: Count | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over `axes`, which are kept with size one; the mean is 0 unless `centred`.

    The fast variance, E|x|^2 - |E x|^2, reads the input once and needs one communication between
    devices; it loses digits if the mean is much larger than the deviation.
    """
    x = _common.wide(x)
    count = number_of(layer, x.shape, axes, mask) if count is None else count
    name, groups = layer.axis_name, layer.axis_index_groups

    def means(*arrays: jax.Array) -> list[jax.Array]:
        """Over `axes`, and over the devices on the named axis; the mean of no elements is 0.

        With a mask, devices may count different numbers of elements: sums and counts are added up.
        """
        if name is None or mask is None:
            each = tuple(jnp.mean(a, axes, where=mask, keepdims=True) for a in arrays)
            each = each if name is None else lax.pmean(each, name, axis_index_groups=groups)
        else:
            sums = tuple(jnp.sum(a, axes, where=mask, keepdims=True) for a in arrays)
            each = tuple(a / count for a in lax.psum(sums, name, axis_index_groups=groups))
        return [unless_of_none(mean, count, 0) for mean in each]

    if not centred:
        (var,) = means(abs_squared(x))
        mean = jnp.zeros_like(var)
    elif layer.use_fast_variance:
        mean, square = means(x, abs_squared(x))
        var = jnp.maximum(0.0, square - abs_squared(mean))
    else:
        (mean,) = means(x)
        (var,) = means(abs_squared(x - mean))
    return mean, unless_of_none(var, count, 1)


def normalized(
    layer: tp.Any,
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    feature_axes: tuple[int, ...],
    scale: jax.Array | None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """(x - mean) / sqrt(var + epsilon) * scale + bias; the moments have as many axes as `x`."""
    along = tuple(n if axis in feature_axes else 1 for axis, n in enumerate(x.shape))
    y = x - mean
    factor = lax.rsqrt(var + layer.epsilon)
    if scale is not None:
        factor = factor * _common.broadcastable(scale, along)
    y = y * factor
    if bias is not None:
        y = y + _common.broadcastable(bias, along)
    return jnp.asarray(y, canonicalize_dtype(x, scale, bias, dtype=layer.dtype))


class BatchNorm(_WithBias):
    """Batch normalisation (Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167).

    In training (`use_running_average=False`) the moments are those of the batch, and the running
    averages `mean` and `var` (`BatchStat`, float32, also where they were cast before) are updated
    with them: `average = momentum * average + (1 - momentum) * moment`.  Otherwise the running
    averages are used as the moments, and nothing is written.

    Args:
        num_features: size of the input along `axis`.
        use_running_average: the mode; None leaves it to the call.
        axis: the feature axis; the moments are computed over all others.
        momentum: weight of the old value in a running average.
        epsilon: added to the variance.
        dtype: dtype of the result; None: what input and parameters promote to.
        param_dtype: dtype of scale and bias.
        use_bias, use_scale: whether there are a bias and a scale.
        bias_init, scale_init: their initializers.
        axis_name: a named axis (of `vmap`, `shard_map`, `pmap`) to compute the moments over as well.
        axis_index_groups: groups of indices along the named axis that each have their own moments.
        use_fast_variance: compute the variance as E|x|^2 - |E x|^2, in one pass.
        promote_dtype: casts input, scale and bias to the dtype of the computation; it is given the
            averages, too, since they count in the choice of that dtype.
        rngs: the stream "params" is drawn once for the scale, then once for the bias.
        bias_metadata, scale_metadata: metadata of the two parameters.

    >>> import jax.numpy as jnp, nnxlite as nnx
    >>> norm = nnx.BatchNorm(2, momentum=0.9, rngs=nnx.Rngs(0))
    >>> x = jnp.array([[1.0, 10.0], [3.0, 30.0]])
    >>> print(norm(x).round(2))
    [[-1. -1.]
     [ 1.  1.]]
    >>> print(norm.mean.value)
    [0.2 2. ]
    >>> norm.eval()
    >>> print(norm(x).shape, norm.mean.value)
    (2, 2) [0.2 2. ]
    """

    use_running_average: bool | None
    axis: tp.Any
    momentum: float

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        axis_name: str | None = None,
        axis_index_groups: tp.Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ) -> None:
        arguments = Arguments(self, locals())
        self.mean = BatchStat(jnp.zeros((num_features,), jnp.float32))
        self.var = BatchStat(jnp.ones((num_features,), jnp.float32))
        self._nnx_set_up(arguments)

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """The normalised input, of the same shape.

        Args:
            x: the input, `num_features` long along `axis`.
            use_running_average: the mode of this call; by default that of the layer.
            mask: broadcasts to the shape of `x`; False excludes an element from the moments.

        Raises:
            ValueError: if the mode is set nowhere, or the mask does not broadcast.
            TypeError: for another number of features.
            IndexError: if the input does not have the axis.
        """
        x = jnp.asarray(x)
        use_running_average = _common.resolve_mode(
            self, "use_running_average", use_running_average, self.use_running_average
        )
        feature_axes = absolute(self, x, self.axis)
        average, spread = self.mean.get_value(), self.var.get_value()
        if not use_running_average:  # a running average in bfloat16 stops moving on the way
            average, spread = _common.wide(average), _common.wide(spread)
        arrays = (average, spread, _common.value_of(self.scale), _common.value_of(self.bias))
        check_features(self, x, feature_axes, *arrays)
        x, _, _, scale, bias = self.promote_dtype((x, *arrays), dtype=self.dtype)
        if use_running_average:  # in float32 even if `x` is not, like the moments of a batch
            along = [n if axis in feature_axes else 1 for axis, n in enumerate(x.shape)]
            exact = (a.astype(jnp.promote_types(a.dtype, x.dtype)) for a in (average, spread))
            mean, var = (a.reshape(along) for a in exact)
        else:
            mask, axes = checked_mask(self, mask, x.shape), all_but(x, feature_axes)
            count = number_of(self, x.shape, axes, mask)
            mean, var = moments(self, x, axes, mask, count=count)
            self.mean.set_value(updated(average, mean, self.momentum, count))
            self.var.set_value(updated(spread, var, self.momentum, count))
        return normalized(self, x, mean, var, feature_axes, scale, bias)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Set the mode; None leaves it unchanged.

        Args:
            use_running_average: normalise by the running averages, and do not update them.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average


class LayerNorm(_WithBias):
    """Layer normalisation (Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450).

    Args:
        num_features: size of the input along the feature axes (the product of several).
        epsilon: added to the variance.
        dtype: dtype of the result; None: what input and parameters promote to.
        param_dtype: dtype of scale and bias.
        use_bias, use_scale: whether there are a bias and a scale.
        bias_init, scale_init: their initializers.
        reduction_axes: the axes over which the moments are computed.
        feature_axes: the axes along which scale and bias run.
        axis_name: a named axis (of `vmap`, `shard_map`, `pmap`) to compute the moments over as
            well, for features that are distributed over devices.
        axis_index_groups: groups of indices along the named axis that each have their own moments.
        use_fast_variance: compute the variance as E|x|^2 - |E x|^2, in one pass.
        promote_dtype: casts input, scale and bias to the dtype of the computation.
        rngs: the stream "params" is drawn once for the scale, then once for the bias.
        bias_metadata, scale_metadata: metadata of the two parameters.

    >>> import jax.numpy as jnp, nnxlite as nnx
    >>> norm = nnx.LayerNorm(3, rngs=nnx.Rngs(0))
    >>> print(norm(jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])).round(3))
    [[-1.225  0.     1.225]
     [-1.225  0.     1.225]]
    """

    reduction_axes: tp.Any
    feature_axes: tp.Any

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: tp.Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ) -> None:
        self._nnx_set_up(Arguments(self, locals()))

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """The normalised input, of the same shape.

        Args:
            x: the input, `num_features` long along the feature axes.
            mask: broadcasts to the shape of `x`; False excludes an element from the moments.

        Raises:
            ValueError: if the mask does not broadcast.
            TypeError: for another number of features than that of scale and bias.
            IndexError: if the input does not have such an axis.
        """
        return _normalized_by_itself(self, x, self.reduction_axes, mask, self.bias)


class RMSNorm(_Normalization):
    """Root mean square normalisation (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).

    A `LayerNorm` that assumes a mean of zero and has no bias: `y = x / sqrt(E|x|^2) * scale`.

    Args:
        num_features: size of the input along the feature axes (the product of several).
        epsilon: added to the mean square.
        dtype: dtype of the result; None: what input and scale promote to.
        param_dtype: dtype of the scale.
        use_scale: whether there is a scale.
        scale_init: its initializer.
        reduction_axes: the axes over which the mean square is computed.
        feature_axes: the axes along which the scale runs.
        axis_name: a named axis (of `vmap`, `shard_map`, `pmap`) to compute the mean square over as
            well.
        axis_index_groups: groups of indices along the named axis that each have their own
            mean square.
        use_fast_variance: has no effect, as no mean is subtracted.
        promote_dtype: casts input and scale to the dtype of the computation.
        rngs: the stream "params" is drawn once.
        scale_metadata: metadata of the scale.

    >>> import jax.numpy as jnp, nnxlite as nnx
    >>> norm = nnx.RMSNorm(2, rngs=nnx.Rngs(0))
    >>> norm(jnp.array([[3.0, 4.0]])).shape
    (1, 2)
    """

    reduction_axes: tp.Any
    feature_axes: tp.Any

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: tp.Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        rngs: Rngs,
        scale_metadata: Metadata = NO_METADATA,
    ) -> None:
        self._nnx_set_up(Arguments(self, locals()))

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """The normalised input, of the same shape.

        Args:
            x: the input, `num_features` long along the feature axes.
            mask: broadcasts to the shape of `x`; False excludes an element from the mean square.

        Raises:
            ValueError: if the mask does not broadcast.
            TypeError: for another number of features than that of the scale.
            IndexError: if the input does not have such an axis.
        """
        return _normalized_by_itself(self, x, self.reduction_axes, mask, centred=False)


class GroupNorm(_WithBias):
    """Group normalisation (Wu and He 2018, https://arxiv.org/abs/1803.08494).

    The features, along the last axis, are divided into groups of neighbours; each group of each
    example has its own moments.

    Args:
        num_features: size of the input along its last axis.
        num_groups: number of groups; None if `group_size` is given.
        group_size: number of features in one group, instead of `num_groups`.
        epsilon: added to the variance.
        dtype: dtype of the result; None: what input and parameters promote to.
        param_dtype: dtype of scale and bias.
        use_bias, use_scale: whether there are a bias and a scale.
        bias_init, scale_init: their initializers.
        reduction_axes: the axes over which the moments are computed, which include the last one
            (within a group); by default all but the first.
        axis_name: a named axis (of `vmap`, `shard_map`, `pmap`) to compute the moments over as well.
        axis_index_groups: groups of indices along the named axis that each have their own moments.
        use_fast_variance: compute the variance as E|x|^2 - |E x|^2, in one pass.
        promote_dtype: casts input, scale and bias to the dtype of the computation.
        rngs: the stream "params" is drawn once for the scale, then once for the bias.
        bias_metadata, scale_metadata: metadata of the two parameters.

    Raises:
        ValueError: if both or neither of `num_groups` and `group_size` are given, or the one given
            does not divide `num_features`.

    >>> import jax.numpy as jnp, nnxlite as nnx
    >>> norm = nnx.GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))
    >>> print(norm(jnp.array([[1.0, 3.0, 10.0, 30.0]])).round(3))
    [[-1.  1. -1.  1.]]
    """

    reduction_axes: tp.Any

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes | None = None,
        axis_name: str | None = None,
        axis_index_groups: tp.Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ) -> None:
        arguments = Arguments(self, locals())
        self.feature_axis = -1
        self.num_groups, self.group_size = groups_of(num_features, num_groups, group_size)
        self._nnx_set_up(arguments, "num_features", "num_groups", "group_size")

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """The normalised input, of the same shape.

        Args:
            x: the input, examples along its first axis and features along its last.
            mask: broadcasts to the shape of `x`; False excludes an element from the moments.

        Raises:
            ValueError: if the input has one dimension only, the reduction axes do not include the
                last, or the mask does not broadcast.
            TypeError: for another number of features.
            IndexError: if the input does not have such an axis.
        """
        x = jnp.asarray(x)
        axes = reduction_axes_of_groups(self, x)
        check_features(self, x, (x.ndim - 1,), self.num_groups * self.group_size)
        mask = checked_mask(self, mask, x.shape)
        if mask is not None and mask.ndim:
            groups = (self.num_groups, self.group_size) if mask.shape[-1] > 1 else (1, 1)
            mask = mask.reshape(*mask.shape[:-1], *groups)
        grouped = x.reshape(*x.shape[:-1], self.num_groups, self.group_size)
        axes = (*axes[:-1], x.ndim)
        y = _normalized_by_itself(self, grouped, axes, mask, self.bias, feature_axes=(-2, -1))
        return y.reshape(x.shape)


class InstanceNorm(_WithBias):
    """Instance normalisation (Ulyanov et al. 2016, https://arxiv.org/abs/1607.08022).

    Each example (along the first axis) and each feature has its own moments, computed over all
    other axes: over the positions of an image, say.

    Args:
        num_features: size of the input along the feature axes (the product of several).
        epsilon: added to the variance.
        dtype: dtype of the result; None: what input and parameters promote to.
        param_dtype: dtype of scale and bias.
        use_bias, use_scale: whether there are a bias and a scale.
        bias_init, scale_init: their initializers.
        feature_axes: the axes along which scale and bias run; not the first.
        axis_name: a named axis (of `vmap`, `shard_map`, `pmap`) to compute the moments over as well.
        axis_index_groups: groups of indices along the named axis that each have their own moments.
        use_fast_variance: compute the variance as E|x|^2 - |E x|^2, in one pass.
        promote_dtype: casts input, scale and bias to the dtype of the computation.
        rngs: the stream "params" is drawn once for the scale, then once for the bias.
        bias_metadata, scale_metadata: metadata of the two parameters.

    >>> import jax.numpy as jnp, nnxlite as nnx
    >>> norm = nnx.InstanceNorm(1, rngs=nnx.Rngs(0))
    >>> x = jnp.array([[[1.0], [3.0]], [[10.0], [30.0]]])
    >>> print(norm(x).squeeze().round(3))
    [[-1.  1.]
     [-1.  1.]]
    """

    feature_axes: tp.Any

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: tp.Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        rngs: Rngs,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ) -> None:
        self._nnx_set_up(Arguments(self, locals()))

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """The normalised input, of the same shape.

        Args:
            x: the input, examples along its first axis, `num_features` long along the feature axes.
            mask: broadcasts to the shape of `x`; False excludes an element from the moments.

        Raises:
            ValueError: if the first axis is a feature axis, or the mask does not broadcast.
            TypeError: for another number of features than that of scale and bias.
            IndexError: if the input does not have such an axis.
        """
        x = jnp.asarray(x)
        feature_axes = absolute(self, x, self.feature_axes)
        if 0 in feature_axes:
            raise ValueError(
                f"{layer_name(self)}: The channel axes cannot include the leading dimension, which "
                f"is the batch: feature_axes={self.feature_axes}, and the input has shape {x.shape}."
            )
        return _normalized_by_itself(self, x, all_but(x, (0, *feature_axes)), mask, self.bias)
