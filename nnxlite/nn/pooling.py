"""Pooling: each window over the spatial axes becomes one number.

Inputs have the layout `(*batch, *spatial, features)` with as many spatial axes as `window_shape`
and any number of batch axes, none included.  Padding is "SAME", "SAME_LOWER", "VALID", or numbers as in
a `Conv`; padded elements never win a maximum or minimum.
"""

from __future__ import annotations

import math
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

from nnxlite.nn._common import Padding, padding_of, wide, without_numpy

__all__ = ["avg_pool", "max_pool", "min_pool", "pool"]

Shape = tp.Sequence[int]


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
        padding: "SAME", "SAME_LOWER", "VALID", a number, or a number or pair for each spatial axis.

    Returns:
        An array with the axes of `inputs`, the spatial ones shorter.

    Raises:
        TypeError: if window_shape or strides is not a sequence of positive numbers.
        ValueError: if they differ in length, `inputs` has too few axes, or the padding is none of these.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> from jax import lax
    >>> nnx.pool(jnp.arange(1.0, 5.0)[:, None], 1.0, lax.mul, (2,), None, "VALID")[:, 0].tolist()
    [2.0, 6.0, 12.0]
    """
    x = jnp.asarray(inputs)
    window = _per_axis("window_shape", window_shape)
    steps = (1,) * len(window) if strides is None else _per_axis("strides", strides)
    batch = x.ndim - len(window) - 1
    if batch < 0 or len(steps) != len(window):
        raise ValueError(
            f"Pooling with the window {window} expects as many strides, and an input of shape "
            f"(*batch, *spatial, features) with {len(window)} spatial axes; got the strides {steps} "
            f"and an input of shape {x.shape}."
        )
    pads = padding_of("Pooling", padding, ("SAME", "SAME_LOWER", "VALID"), len(window))
    if not isinstance(pads, str):
        pads = ((0, 0),) * batch + pads + ((0, 0),)
    ones = (1,) * batch
    return lax.reduce_window(x, init, reduce_fn, (*ones, *window, 1), (*ones, *steps, 1), pads)


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
        padding: "SAME", "SAME_LOWER", "VALID", a number, or a number or pair for each spatial axis.
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
    x = wide(inputs)

    def total(x: jax.Array) -> jax.Array:
        return pool(x, x.dtype.type(0), lax.add, window_shape, strides, padding)

    mean = total(x) / (math.prod(window_shape) if count_include_pad else total(jnp.ones_like(x)))
    return mean.astype(inputs.dtype) if inexact else mean


def max_pool(
    inputs: jax.Array, window_shape: Shape, strides: Shape | None = None, padding: Padding = "VALID"
) -> jax.Array:
    """The maximum of each window.

    Args:
        inputs: array of shape (*batch, *spatial, features).
        window_shape: size of the window along each spatial axis.
        strides: steps between windows along each spatial axis; None for one.
        padding: "SAME", "SAME_LOWER", "VALID", a number, or a number or pair for each spatial axis.

    Returns:
        An array with the axes of `inputs`, the spatial ones shorter.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> nnx.max_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,))[:, 0].tolist()
    [1.0, 3.0]
    """
    return _pool_of(inputs, lax.max, window_shape, strides, padding)


def min_pool(
    inputs: jax.Array, window_shape: Shape, strides: Shape | None = None, padding: Padding = "VALID"
) -> jax.Array:
    """The minimum of each window.

    Args:
        inputs: array of shape (*batch, *spatial, features).
        window_shape: size of the window along each spatial axis.
        strides: steps between windows along each spatial axis; None for one.
        padding: "SAME", "SAME_LOWER", "VALID", a number, or a number or pair for each spatial axis.

    Returns:
        An array with the axes of `inputs`, the spatial ones shorter.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> nnx.min_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,))[:, 0].tolist()
    [0.0, 2.0]
    """
    return _pool_of(inputs, lax.min, window_shape, strides, padding)


def _pool_of(inputs: tp.Any, extreme: tp.Any, *window: tp.Any) -> jax.Array:
    """The maximum or minimum of each window, beginning with the value of the dtype that never wins."""
    x, sign = jnp.asarray(inputs), 1 if extreme is lax.min else -1
    start: tp.Any = sign * np.inf
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        limits = (0, 1) if x.dtype == bool else (jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max)
        start = limits[sign > 0]
    # A constant that is not traced: `reduce_window` needs its value.
    return pool(x, x.dtype.type(start), extreme, *window)


def _per_axis(name: str, values: tp.Any) -> tuple[int, ...]:
    """One size for each spatial axis; symbolic sizes of arrays are sizes too."""
    given = without_numpy(values)
    if isinstance(given, tp.Sequence) and not isinstance(given, str):
        sizes = [isinstance(n, int | np.integer) or is_symbolic_dim(n) for n in given]
        if all(sizes) and all(n > 0 for n in given):
            return tuple(given)
    raise TypeError(
        f"Pooling needs `{name}` as a sequence with a positive number for each spatial axis, such "
        f"as (2, 2); got {values!r}."
    )
