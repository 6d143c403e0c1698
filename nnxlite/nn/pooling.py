"""Pooling: each window over the spatial axes becomes one number.

Inputs have the layout `(*batch, *spatial, features)` with as many spatial axes as `window_shape`
and any number of batch axes, none included.  Padding is "SAME", "SAME_LOWER", "VALID", or a pair of
counts for each spatial axis; padded elements never win a maximum or minimum.
"""

from __future__ import annotations

import math
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

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
        padding: "SAME", "SAME_LOWER", "VALID", or a pair of counts for each spatial axis.

    Returns:
        An array with the axes of `inputs`, the spatial ones shorter.

    Raises:
        TypeError: if `inputs` is not an array, window_shape or strides is not a sequence of positive
            numbers, or padding is not one of pairs.
        ValueError: if they differ in length, `inputs` has too few axes, or the name of a padding is
            unknown.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> from jax import lax
    >>> nnx.pool(jnp.arange(1.0, 5.0)[:, None], 1.0, lax.mul, (2,), None, "VALID")[:, 0].tolist()
    [2.0, 6.0, 12.0]
    """
    inputs = _array(inputs)
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
        pads = _named(padding)
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
        padding: "SAME", "SAME_LOWER", "VALID", or a pair of counts for each spatial axis.
        count_include_pad: whether padded zeros count as elements of the mean.

    Returns:
        An array with the axes of `inputs`, the spatial ones shorter; floating for integers. Sums are
        taken in float32 or better.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> nnx.avg_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,))[:, 0].tolist()
    [0.5, 2.5]
    """
    inputs = _array(inputs)
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
        padding: "SAME", "SAME_LOWER", "VALID", or a pair of counts for each spatial axis.

    Returns:
        An array with the axes of `inputs`, the spatial ones shorter.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> nnx.max_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,))[:, 0].tolist()
    [1.0, 3.0]
    """
    inputs = _array(inputs)
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
        padding: "SAME", "SAME_LOWER", "VALID", or a pair of counts for each spatial axis.

    Returns:
        An array with the axes of `inputs`, the spatial ones shorter.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> nnx.min_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,))[:, 0].tolist()
    [0.0, 2.0]
    """
    inputs = _array(inputs)
    return pool(inputs, _extreme(inputs, least=False), lax.min, window_shape, strides, padding)


NAMES: tp.Final = ("SAME", "SAME_LOWER", "VALID")
"""The paddings that have a name."""


def _array(inputs: tp.Any) -> jax.Array:
    if inputs is None or isinstance(inputs, str):
        raise TypeError(f"Pooling needs `inputs` as an array, got {inputs!r}.")
    return jnp.asarray(inputs)


def _per_axis(name: str, values: tp.Any) -> tuple[int, ...]:
    given = without_numpy(values)
    if isinstance(given, str) or not isinstance(given, tp.Iterable):
        numbers = None
    else:
        numbers = tuple(given)
    if numbers is None or not all(_is_size(n) and n > 0 for n in numbers):
        raise TypeError(
            f"Pooling needs `{name}` as a sequence with a positive number for each spatial axis, such "
            f"as (2, 2); got {values!r}."
        )
    return numbers


def _named(padding: str) -> str:
    if padding.upper() not in NAMES:
        raise ValueError(
            f"Pooling: Invalid padding format: {padding!r}, should be one of {', '.join(NAMES)}, or a "
            "pair (before, after) for each spatial axis."
        )
    return padding


def _pairs(padding: tp.Any, window: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    given = without_numpy(padding)
    pairs = tuple(given) if isinstance(given, tp.Iterable) else (given,) * len(window)
    if not isinstance(given, tp.Iterable) or not all(map(_is_pair, pairs)):
        zero = (0, 0)
        meant = tuple(p if _is_pair(p) else (p, p) if isinstance(p, int) else zero for p in pairs)
        raise TypeError(
            f"Pooling needs `padding` as {', '.join(map(repr, NAMES))}, or a pair (before, after) for "
            f"each spatial axis, such as {meant}; got {padding!r}."
        )
    if len(pairs) != len(window):
        raise ValueError(
            f"Pooling needs a pair of paddings for each axis of the window: padding {padding} and "
            f"window {window} differ in length."
        )
    return tuple((before, after) for before, after in pairs)


def _is_pair(value: tp.Any) -> bool:
    """Whether a value is a pair of whole numbers."""
    if not isinstance(value, tp.Sequence) or isinstance(value, str) or len(value) != 2:
        return False
    return all(map(_is_size, value))


def _is_size(value: tp.Any) -> bool:
    """Whether a value is a whole number, or the symbolic size of an array."""
    return isinstance(value, int | np.integer) or is_symbolic_dim(value)


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
