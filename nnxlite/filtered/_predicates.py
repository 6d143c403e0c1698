"""Predicates of leaves, used as specs of which ones to trace or to differentiate."""

from __future__ import annotations

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

_ARRAYS = (jax.Array, np.ndarray, np.generic)
_SCALARS = (bool, int, float, complex)


def is_array(element: tp.Any) -> tp.TypeGuard[jax.Array | np.ndarray]:
    """Whether a leaf is an array: of JAX (traced or not) or of NumPy, NumPy scalars included.

    Args:
        element: a leaf.

    Returns:
        A bool.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.is_array(jnp.zeros(2)), nnx.is_array(1.0)
    (True, False)
    """
    return isinstance(element, _ARRAYS)


def only_arrays(leaves: tp.Sequence[tp.Any]) -> bool:
    """Whether all leaves are of classes of arrays; cheap for many leaves, as they have few classes."""
    return all(issubclass(kind, _ARRAYS) for kind in set(map(type, leaves)))


def are_arrays(leaves: tp.Sequence[tp.Any]) -> list[bool]:
    """`is_array` of each leaf; each class is checked once."""
    by_class = {kind: issubclass(kind, _ARRAYS) for kind in set(map(type, leaves))}
    return [by_class[type(leaf)] or is_array(leaf) for leaf in leaves]


def has_shape(element: tp.Any) -> bool:
    """Whether a leaf is an array or a `jax.ShapeDtypeStruct`."""
    return isinstance(element, (*_ARRAYS, jax.ShapeDtypeStruct))


def is_inexact_array(element: tp.Any) -> tp.TypeGuard[jax.Array | np.ndarray]:
    """Whether a leaf is an array of floating-point or complex numbers.

    Args:
        element: a leaf.

    Returns:
        A bool.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.is_inexact_array(jnp.zeros(2)), nnx.is_inexact_array(jnp.arange(2))
    (True, False)
    """
    return isinstance(element, _ARRAYS) and jnp.issubdtype(element.dtype, jnp.inexact)


def is_array_like(element: tp.Any) -> bool:
    """Whether JAX can make an array of a leaf: an array, a number, or an object with `__jax_array__`.

    Args:
        element: a leaf.

    Returns:
        A bool.

    >>> import nnxlite as nnx
    >>> nnx.is_array_like(1.0), nnx.is_array_like("one")
    (True, False)
    """
    return isinstance(element, (*_ARRAYS, *_SCALARS)) or _converts(element)


def _converts(element: tp.Any) -> bool:  # a tracer has the attribute, and None in it
    return callable(getattr(element, "__jax_array__", None)) and not isinstance(element, type)


def is_inexact_array_like(element: tp.Any) -> bool:
    """Whether JAX can make a floating-point or complex array of a leaf.

    Args:
        element: a leaf.

    Returns:
        A bool.

    >>> import nnxlite as nnx
    >>> nnx.is_inexact_array_like(1.0), nnx.is_inexact_array_like(1)
    (True, False)
    """
    if not isinstance(element, _ARRAYS) and _converts(element):
        element = element.__jax_array__()
    return isinstance(element, (float, complex)) or is_inexact_array(element)


@dataclasses.dataclass(frozen=True)
class if_array:
    """An axis for arrays, None for every other leaf; the default axes of `filter_vmap`.

    Args:
        axis: the axis of arrays.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.if_array(1)(jnp.zeros(2)), nnx.if_array(1)("name")
    (1, None)
    """

    axis: int

    def __call__(self, element: tp.Any) -> int | None:
        """The axis of one leaf.

        Args:
            element: a leaf.
        """
        return self.axis if is_array(element) else None
