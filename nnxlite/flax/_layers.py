"""Functions of Flax's layers that other packages import for layers of their own."""

from __future__ import annotations

import collections.abc
import types
import typing as tp

import jax
import jax.numpy as jnp

from nnxlite.nn import _normalizing, conv, normalization

Axes = int | tp.Sequence[int]


def _as_tuple(x: Axes) -> tuple[int, ...]:
    return tuple(x) if isinstance(x, collections.abc.Iterable) else (x,)


def _canonicalize_axes(rank: int, axes: Axes) -> tuple[int, ...]:
    """Axes as non-negative numbers, each once."""
    return tuple({rank + axis if axis < 0 else axis for axis in _as_tuple(axes)})


def _compute_stats(
    x: jax.Array,
    axes: Axes,
    dtype: tp.Any,
    axis_name: str | None = None,
    axis_index_groups: tp.Any = None,
    use_mean: bool = True,
    use_fast_variance: bool = True,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over some axes, in float32 or better."""
    layer = types.SimpleNamespace(axis_name=axis_name, axis_index_groups=axis_index_groups)
    layer.use_fast_variance = use_fast_variance
    x = jnp.asarray(x)
    x = x.astype(jnp.promote_types(x.dtype if dtype is None else dtype, jnp.float32))
    at = _canonicalize_axes(x.ndim, axes)
    mean, var = normalization.moments(layer, x, at, mask, use_mean)
    return jnp.squeeze(mean, at), jnp.squeeze(var, at)


def _normalize(
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    reduction_axes: Axes,
    feature_axes: Axes,
    dtype: tp.Any,
    epsilon: float,
) -> jax.Array:
    """`x` with mean zero and variance one, times `scale`, plus `bias`."""
    at = _canonicalize_axes(x.ndim, reduction_axes)
    along = _canonicalize_axes(x.ndim, feature_axes)
    layer = types.SimpleNamespace(epsilon=epsilon, dtype=dtype)
    mean, var = jnp.expand_dims(mean, at), jnp.expand_dims(var, at)
    return normalization.normalized(layer, x, mean, var, along, scale, bias)


def _l2_normalize(x: jax.Array, axis: tp.Any = None, eps: float = 1e-12) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).sum(axis=axis, keepdims=True) + eps)


NAMES = {
    "nn.linear": {
        "_canonicalize_tuple": _as_tuple,
        "_conv_dimension_numbers": lambda input_shape: conv._dimension_numbers(len(input_shape)),
        "_normalize_axes": lambda axes, ndim: tuple(sorted(ax + ndim * (ax < 0) for ax in axes)),
    },
    "nn.normalization": {
        "_abs_sq": _normalizing.abs_squared,
        "_canonicalize_axes": _canonicalize_axes,
        "_compute_stats": _compute_stats,
        "_l2_normalize": _l2_normalize,
        "_normalize": _normalize,
    },
}
