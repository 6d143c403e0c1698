"""Integers of NumPy and JAX are integers everywhere: argument numbers, axes, sizes, lengths."""

from __future__ import annotations

import typing as tp

import jax
import numpy as np
from jax.core import Tracer


def as_integer(value: tp.Any) -> tp.Any:
    """An integer of NumPy, or a concrete array of one integer, as an int; any other value unchanged.

    >>> from nnxlite._base.integers import as_integer
    >>> as_integer(np.uint8(3)), as_integer(np.array(3)), as_integer(None), as_integer(True)
    (3, 3, None, True)
    """
    if isinstance(value, (np.ndarray, jax.Array)):
        one = value.shape == () and not isinstance(value, Tracer)
        return int(value) if one and np.issubdtype(value.dtype, np.integer) else value
    return int(value) if isinstance(value, np.integer) else value


def as_integers(given: tp.Any) -> tuple[tp.Any, ...]:
    """None, one integer or name, or several, as a tuple."""
    given = as_integer(given)
    if given is None:
        return ()
    return (given,) if isinstance(given, (int, str)) else tuple(map(as_integer, given))
