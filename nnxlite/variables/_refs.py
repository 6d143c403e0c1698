"""Array references: arrays that can be written in place and shared, JAX's own `Ref`.

A reference may be wherever an array may: in an attribute, in a plain container, inside a
Variable (`ref=True`).  Two places that hold one reference share its content, inside transforms too.
"""

from __future__ import annotations

import typing as tp

import jax.numpy as jnp

from nnxlite._jax import Ref, is_ref, new_ref

ArrayRef = Ref
"""The class of array references; `isinstance(x, ArrayRef)` is true for traced ones as well."""


def array_ref(value: tp.Any) -> tp.Any:
    """A fresh array reference with the content of an array or a number.

    Reading and writing go through indexing: `ref[...]`, `ref[0] = 1.0`.

    Args:
        value: an array or a number.

    Returns:
        A reference of the same shape and dtype.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> ref = nnx.array_ref(jnp.zeros(2))
    >>> ref[0] = 1.0
    >>> ref[...]
    Array([1., 0.], dtype=float32)
    """
    return new_ref(jnp.asarray(value))


def is_array_ref(value: tp.Any) -> bool:
    """Whether a value is an array reference.

    Args:
        value: anything.

    Returns:
        A bool.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.is_array_ref(nnx.array_ref(1.0)), nnx.is_array_ref(jnp.array(1.0))
    (True, False)
    """
    return is_ref(value)
