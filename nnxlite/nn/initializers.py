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
from jax.nn.initializers import constant as constant
from jax.nn.initializers import delta_orthogonal as delta_orthogonal
from jax.nn.initializers import glorot_normal as glorot_normal
from jax.nn.initializers import glorot_uniform as glorot_uniform
from jax.nn.initializers import he_normal as he_normal
from jax.nn.initializers import he_uniform as he_uniform
from jax.nn.initializers import kaiming_normal as kaiming_normal
from jax.nn.initializers import kaiming_uniform as kaiming_uniform
from jax.nn.initializers import lecun_normal as lecun_normal
from jax.nn.initializers import lecun_uniform as lecun_uniform
from jax.nn.initializers import normal as normal
from jax.nn.initializers import ones as ones
from jax.nn.initializers import orthogonal as orthogonal
from jax.nn.initializers import truncated_normal as truncated_normal
from jax.nn.initializers import uniform as uniform
from jax.nn.initializers import variance_scaling as variance_scaling
from jax.nn.initializers import xavier_normal as xavier_normal
from jax.nn.initializers import xavier_uniform as xavier_uniform
from jax.nn.initializers import zeros as zeros


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
