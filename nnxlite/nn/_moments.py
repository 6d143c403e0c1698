"""Mean and variance of activations, and running averages, for the layers that normalise by them."""

from __future__ import annotations

import math
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnxlite.nn._common import broadcastable, broadcasts_to
from nnxlite.nn.dtypes import canonicalize_dtype
from nnxlite.objects._scopes import layer_name

Count = int | jax.Array

# These functions read public attributes of a layer only: `nnx.LayerNorm.__call__(other, x)` works for
# any object that has the same attributes.


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
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    count = number_of(layer, x.shape, axes, mask) if count is None else count
    if not centred:
        (var,) = _means(layer, (_abs_squared(x),), axes, mask, count)
        return jnp.zeros_like(var), _unless_of_none(var, count, 1)
    if layer.use_fast_variance:
        mean, square = _means(layer, (x, _abs_squared(x)), axes, mask, count)
        var = jnp.maximum(0.0, square - _abs_squared(mean))
        return mean, _unless_of_none(var, count, 1)
    (mean,) = _means(layer, (x,), axes, mask, count)
    (var,) = _means(layer, (_abs_squared(x - mean),), axes, mask, count)
    return mean, _unless_of_none(var, count, 1)


def _unless_of_none(moment: jax.Array, count: Count, default: float) -> jax.Array:
    """The moment, or `default` where it was computed from no elements: the result stays finite."""
    if isinstance(count, jax.Array):
        return jnp.where(count > 0, moment, default)
    return jnp.full_like(moment, default) if is_zero(count) else moment


def is_zero(count: tp.Any) -> bool:
    """Whether a size is zero; a symbolic one is at least one."""
    return isinstance(count, int) and count == 0


def number_of(
    layer: tp.Any, shape: tuple[int, ...], axes: tuple[int, ...], mask: jax.Array | None
) -> Count:
    """How many elements the moments are of: without a mask, on each device; with one, on all."""
    if mask is None:
        return math.prod(shape[axis] for axis in axes)
    count = jnp.sum(jnp.broadcast_to(mask, shape), axes, dtype=jnp.int32, keepdims=True)
    if layer.axis_name is None:
        return count
    return lax.psum(count, layer.axis_name, axis_index_groups=layer.axis_index_groups)


def _means(
    layer: tp.Any,
    arrays: tuple[jax.Array, ...],
    axes: tuple[int, ...],
    mask: jax.Array | None,
    count: Count,
) -> tp.Sequence[jax.Array]:
    """The mean of each array over `axes`, and over the devices on the named axis; of no elements, 0.

    With a mask, devices may count different numbers of elements, so that the mean of their means
    would be wrong: sums and counts are added up, then divided.
    """
    name, groups = layer.axis_name, layer.axis_index_groups
    if name is None or mask is None:
        means = tuple(jnp.mean(a, axes, where=mask, keepdims=True) for a in arrays)
        means = means if name is None else lax.pmean(means, name, axis_index_groups=groups)
    else:
        sums = tuple(jnp.sum(a, axes, where=mask, keepdims=True) for a in arrays)
        means = tuple(a / count for a in lax.psum(sums, name, axis_index_groups=groups))
    return tuple(_unless_of_none(mean, count, 0) for mean in means)


def _abs_squared(x: jax.Array) -> jax.Array:
    """|x|^2, real also for complex x."""
    if np.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


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
        factor = factor * broadcastable(scale, along)
    y = y * factor
    if bias is not None:
        y = y + broadcastable(bias, along)
    return jnp.asarray(y, canonicalize_dtype(x, scale, bias, dtype=layer.dtype))


def checked_mask(layer: tp.Any, mask: tp.Any, shape: tuple[int, ...]) -> jax.Array | None:
    """The mask, which must broadcast to the shape of the input."""
    if mask is None:
        return None
    mask = jnp.asarray(mask, dtype=bool)
    if not broadcasts_to(mask.shape, shape):
        raise ValueError(
            f"{layer_name(layer)} got a mask of shape {mask.shape}, which does not broadcast "
            f"to its input of shape {shape}."
        )
    return mask


def wide(average: jax.Array) -> jax.Array:
    """A running average in float32 or better."""
    return average.astype(jnp.promote_types(average.dtype, jnp.float32))


def updated(average: jax.Array, moment: jax.Array, momentum: float, count: Count) -> jax.Array:
    """A running average updated with the moment of a batch, in its dtype.

    The moment of no elements leaves it as it was.
    """
    moment = moment.reshape(average.shape)
    new = lax.stop_gradient(momentum * average + (1 - momentum) * moment)
    new = new if np.iscomplexobj(new) else new.astype(average.dtype)
    if isinstance(count, jax.Array):
        return jnp.where(count.reshape(average.shape) > 0, new, lax.stop_gradient(average))
    return average if is_zero(count) else new
