"""What the layers of `normalization` check, count and average; the arithmetic is there."""

from __future__ import annotations

import math
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnxlite.nn._common import Axes, as_tuple, broadcasts_to
from nnxlite.objects._module import layer_name

Count = int | jax.Array

# These functions read public attributes of a layer only: `nnx.LayerNorm.__call__(other, x)` works for
# any object that has the same attributes.


def unless_of_none(moment: jax.Array, count: Count, default: float) -> jax.Array:
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


def abs_squared(x: jax.Array) -> jax.Array:
    """|x|^2, real also for complex x."""
    if np.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


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


def absolute(layer: tp.Any, x: jax.Array, axes: Axes) -> tuple[int, ...]:
    """Axes of `x` as ascending non-negative numbers."""
    chosen = as_tuple(axes)
    for axis in chosen:
        if not -x.ndim <= axis < x.ndim:
            raise IndexError(
                f"{layer_name(layer)} works along axis {axis}, and its input of shape "
                f"{x.shape} has {x.ndim} dimension(s)."
            )
    return tuple(sorted({axis % x.ndim for axis in chosen}))


def check_features(
    layer: tp.Any, x: jax.Array, feature_axes: tuple[int, ...], *arrays: jax.Array | int | None
) -> None:
    """Raise TypeError unless the input has as many features as the arrays of the layer, or a number.

    Those count, not `num_features`: a layer may get parameters of another size after it is made.
    """
    features = math.prod(x.shape[axis] for axis in feature_axes)
    for array in arrays:
        expected = getattr(array, "size", array)
        if expected is not None and features != expected:
            raise TypeError(
                f"{layer_name(layer)} was made for {expected} feature(s), and its input of shape "
                f"{x.shape} has {features} along axes {feature_axes}."
            )


def all_but(x: jax.Array, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis not in axes)


def reduction_axes_of_groups(layer: tp.Any, x: jax.Array) -> tuple[int, ...]:
    """The reduction axes of an input, the last one (the features of a group) at the end."""
    if x.ndim < 2:
        raise ValueError(
            f"{layer_name(layer)} takes examples along the first axis and features along "
            f"the last, and its input has shape {x.shape}."
        )
    if layer.reduction_axes is None:
        return tuple(range(1, x.ndim))
    axes = absolute(layer, x, layer.reduction_axes)
    if x.ndim - 1 not in axes:
        raise ValueError(
            f"{layer_name(layer)} takes its moments over a group of features, so reduction_axes "
            f"must name the last axis; they are {layer.reduction_axes}, for an input "
            f"of shape {x.shape}."
        )
    return axes


def groups_of(num_features: int, num_groups: int | None, group_size: int | None) -> tuple[int, int]:
    """Number and size of the groups, from the one of the two that is given."""
    if (num_groups is None) == (group_size is None):
        raise ValueError(
            "GroupNorm: Either `num_groups` or `group_size` should be specified; got "
            f"num_groups={num_groups}, group_size={group_size}. To give group_size, pass "
            "num_groups=None with it: the default of num_groups is 32."
        )
    name, given = ("num_groups", num_groups) if group_size is None else ("group_size", group_size)
    if not given or given < 0 or num_features % given:
        wrong = (
            f"Number of groups ({given}) does not divide the number of channels ({num_features})"
            if group_size is None
            else f"Number of features ({num_features}) is not multiple of the group size ({given})"
        )
        raise ValueError(f"GroupNorm: {wrong}: {name}={given} makes no equal groups.")
    other = num_features // given
    return (given, other) if group_size is None else (other, given)
