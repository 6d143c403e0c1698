"""Pooling: each window over the spatial axes becomes one number.

Inputs have the layout `(*batch, *spatial, features)` with as many spatial axes as `window_shape`
and any number of batch axes, none included.  Padding is "SAME", "VALID", or a pair of counts for
each spatial axis; padded elements never win a maximum or minimum.
"""

from __future__ import annotations

import math
import typing as tp

import jax
import jax.numpy as jnp
from jax import lax

from nnxlite.nn._common import without_numpy

Shape = tp.Sequence[int]
Padding = str | tp.Sequence[tuple[int, int]]


def pool(
    inputs: jax.Array,
    init: tp.Any,
    reduce_fn: tp.Callable[[tp.Any, tp.Any], tp.Any],
    window_shape: Shape,
    strides: Shape | None,
    padding: Padding,
) -> jax.Array:
    """Reduce each window of `inputs` with an associative function of two arguments.

    Args:
        inputs: array of shape (*batch, *spatial, features).
        init: the initial value, neutral for `reduce_fn`.
        reduce_fn: such as `jax.lax.add`; JAX can differentiate `add`, `max` and `min`.
        window_shape: size of the window along each spatial axis.
        strides: steps between windows along each spatial axis; None for one.
        padding: "SAME", "VALID", or a pair of counts for each spatial axis.

    Returns:
        An array with the axes of `inputs`, the spatial ones shorter.

    Raises:
        TypeError: if window_shape, strides or padding is not a sequence.
        ValueError: if they differ in length, or `inputs` has too few axes.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> from jax import lax
    >>> nnx.pool(jnp.arange(1.0, 5.0)[:, None], 1.0, lax.mul, (2,), None, "VALID")[:, 0].tolist()
    [2.0, 6.0, 12.0]
    """
    inputs = jnp.asarray(inputs)
    window = _per_axis("window_shape", window_shape)
    steps = (1,) * len(window) if strides is None else _per_axis("strides", strides)
    if len(steps) != len(window):
        raise ValueError(
            f"Pooling needs a stride for each axis of the window: strides {steps} and window "
            f"{window} differ in length."
        )
    batch = inputs.ndim - len(window) - 1
    if batch < 0:
        raise ValueError(
            f"Pooling with the window {window} expects an input of shape (*batch, *spatial, "
            f"features) with {len(window)} spatial axes, got {inputs.shape}."
        )
    dims = (*(1,) * batch, *window, 1)
    strides_of_all = (*(1,) * batch, *steps, 1)
    pads: str | tuple[tuple[int, int], ...]
    if isinstance(padding, str):
        pads = padding
    else:
        pads = ((0, 0),) * batch + _pairs(padding, window) + ((0, 0),)
    return lax.reduce_window(inputs, init, reduce_fn, dims, strides_of_all, pads)


def avg_pool(
    inputs: jax.Array,
    window_shape: Shape,
    strides: Shape | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """The mean of each window.

    Args:
        inputs: array of shape (*batch, *spatial, features).
        window_shape: size of the window along each spatial axis.
        strides: steps between windows along each spatial axis; None for one.
        padding: "SAME", "VALID", or a pair of counts for each spatial axis.
        count_include_pad: whether padded zeros count as elements of the mean.

    Returns:
        An array with the axes of `inputs`, the spatial ones shorter; floating for integers. Sums are
        taken in float32 or better.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> nnx.avg_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,))[:, 0].tolist()
    [0.5, 2.5]
    """
    inputs = jnp.asarray(inputs)
    inexact = jnp.issubdtype(inputs.dtype, jnp.inexact)
    # Sums of small dtypes would overflow, or lose digits.
    x = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))

    def total(x: jax.Array) -> jax.Array:
        return pool(x, _number(x, 0), lax.add, window_shape, strides, padding)

    mean = total(x) / (math.prod(window_shape) if count_include_pad else total(jnp.ones_like(x)))
    return mean.astype(inputs.dtype) if inexact else mean


def max_pool(
    inputs: jax.Array,
    window_shape: Shape,
    strides: Shape | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """The maximum of each window.

    Args:
        inputs: array of shape (*batch, *spatial, features).
        window_shape: size of the window along each spatial axis.
        strides: steps between windows along each spatial axis; None for one.
        padding: "SAME", "VALID", or a pair of counts for each spatial axis.

    Returns:
        An array with the axes of `inputs`, the spatial ones shorter.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> nnx.max_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,))[:, 0].tolist()
    [1.0, 3.0]
    """
    inputs = jnp.asarray(inputs)
    return pool(inputs, _extreme(inputs, least=True), lax.max, window_shape, strides, padding)


def min_pool(
    inputs: jax.Array,
    window_shape: Shape,
    strides: Shape | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """The minimum of each window.

    Args:
        inputs: array of shape (*batch, *spatial, features).
        window_shape: size of the window along each spatial axis.
        strides: steps between windows along each spatial axis; None for one.
        padding: "SAME", "VALID", or a pair of counts for each spatial axis.

    Returns:
        An array with the axes of `inputs`, the spatial ones shorter.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> nnx.min_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,))[:, 0].tolist()
    [0.0, 2.0]
    """
    inputs = jnp.asarray(inputs)
    return pool(inputs, _extreme(inputs, least=False), lax.min, window_shape, strides, padding)


def _per_axis(name: str, values: tp.Any) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, tp.Iterable):
        raise TypeError(
            f"Pooling needs `{name}` as a sequence with a number for each spatial axis, such as "
            f"(2, 2); got {values!r}."
        )
    return tuple(values)


def _pairs(padding: tp.Any, window: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    pairs = _per_axis("padding", without_numpy(padding))
    for pair in pairs:
        if not isinstance(pair, tp.Sequence) or len(pair) != 2:
            raise TypeError(
                f"Pooling needs `padding` as 'SAME', 'VALID', or a pair (before, after) for each "
                f"spatial axis; got {padding!r}."
            )
    if len(pairs) != len(window):
        raise ValueError(
            f"Pooling needs a pair of paddings for each axis of the window: padding {padding} and "
            f"window {window} differ in length."
        )
    return tp.cast(tuple[tuple[int, int], ...], tuple(tuple(tp.cast(tp.Any, p)) for p in pairs))


def _number(inputs: jax.Array, value: tp.Any) -> tp.Any:
    """A constant in the dtype of the input; not traced, since `reduce_window` needs its value."""
    return inputs.dtype.type(value)


def _extreme(inputs: jax.Array, least: bool) -> tp.Any:
    """The least (or greatest) value of the input's dtype."""
    dtype = inputs.dtype
    if jnp.issubdtype(dtype, jnp.bool_):
        return _number(inputs, not least)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return _number(inputs, limits.min if least else limits.max)
    return _number(inputs, -jnp.inf if least else jnp.inf)
