"""Initializers: functions that make the first value of a parameter.

An initializer is called with a random key, a shape and a dtype, and returns an array of that shape
and dtype.  These are JAX's own (`jax.nn.initializers`), so that an initializer of any JAX library
works in any layer, and the other way round.  `zeros_init` and `ones_init` are made by a call, like
most others.

>>> import jax
>>> import nnxlite as nnx
>>> init = nnx.initializers.lecun_normal()
>>> init(jax.random.key(0), (3, 4)).shape
(3, 4)
"""

from __future__ import annotations

import typing as tp

import jax
from jax.nn.initializers import (
    constant,
    delta_orthogonal,
    glorot_normal,
    glorot_uniform,
    he_normal,
    he_uniform,
    kaiming_normal,
    kaiming_uniform,
    lecun_normal,
    lecun_uniform,
    normal,
    ones,
    orthogonal,
    truncated_normal,
    uniform,
    variance_scaling,
    xavier_normal,
    xavier_uniform,
    zeros,
)

__all__ = [
    "Initializer",
    "constant",
    "delta_orthogonal",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
    "kaiming_normal",
    "kaiming_uniform",
    "lecun_normal",
    "lecun_uniform",
    "normal",
    "ones",
    "ones_init",
    "orthogonal",
    "truncated_normal",
    "uniform",
    "variance_scaling",
    "xavier_normal",
    "xavier_uniform",
    "zeros",
    "zeros_init",
]


class Initializer(tp.Protocol):
    """A function `(key, shape, dtype)` that makes the first value of a parameter.

    It returns an array of the given shape and dtype, or a `VariableMetadata` that contains one (see
    `with_metadata`).

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> init: nnx.Initializer = nnx.initializers.normal(0.02)
    >>> init(jax.random.key(0), (2, 3), jnp.float32).shape
    (2, 3)
    """

    def __call__(self, key: jax.Array, shape: tp.Sequence[int], dtype: tp.Any = ..., /) -> tp.Any:
        """The value for one parameter.

        Args:
            key: a random key.
            shape: of the result.
            dtype: of the result.
        """
        ...


def zeros_init() -> jax.nn.initializers.Initializer:
    """The initializer that fills with zeros, whatever the key.

    Returns:
        An initializer `(key, shape, dtype)`.

    >>> import jax
    >>> import nnxlite as nnx
    >>> nnx.initializers.zeros_init()(jax.random.key(0), (2,)).tolist()
    [0.0, 0.0]
    """
    return zeros


def ones_init() -> jax.nn.initializers.Initializer:
    """The initializer that fills with ones, whatever the key.

    Returns:
        An initializer `(key, shape, dtype)`.

    >>> import jax
    >>> import nnxlite as nnx
    >>> nnx.initializers.ones_init()(jax.random.key(0), (2,)).tolist()
    [1.0, 1.0]
    """
    return ones
