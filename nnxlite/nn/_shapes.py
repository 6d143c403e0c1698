"""Whether shapes broadcast: checks that come before a computation."""

from __future__ import annotations

import jax.numpy as jnp

Shape = tuple[int, ...]


def broadcast_together(one: Shape, other: Shape) -> bool:
    """Whether arrays of the two shapes broadcast.

    >>> from nnxlite.nn._shapes import broadcast_together
    >>> broadcast_together((3, 1), (4,)), broadcast_together((3,), (4,))
    (True, False)
    """
    try:
        jnp.broadcast_shapes(one, other)
    except ValueError:
        return False
    return True


def broadcasts_to(shape: Shape, full: Shape) -> bool:
    """Whether an array of the one shape broadcasts to the other.

    >>> from nnxlite.nn._shapes import broadcasts_to
    >>> broadcasts_to((3, 1), (3, 4)), broadcasts_to((3, 4), (3, 1))
    (True, False)
    """
    return broadcast_together(shape, full) and jnp.broadcast_shapes(shape, full) == full
