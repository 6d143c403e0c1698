"""The signature of an exported call: all that is stored as JSON, beside program and weights."""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite.serving import _trees


class Aval(tp.NamedTuple):
    """What a leaf of the arguments must be.

    Args:
        path: for messages.
        dtype: by name; that of keys is the name of their implementation, after "key:".
        shape: numbers, and names or expressions of dimensions that may vary.
    """

    path: str
    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class Signature(tp.NamedTuple):
    """All that is known about an exported call, beside its program and weights."""

    name: str
    parameters: tuple[str, ...]  # a name for each argument
    inputs: tuple[_trees.Structure, ...]
    avals: tuple[Aval, ...]
    outputs: _trees.Structure
    keys: dict[int, str]  # which leaves of the result are keys, and of which implementation
    weights: tuple[Aval, ...]
    donated: tuple[int, ...]  # numbers of leaves of the arguments
    platforms: tuple[str, ...]
    vjp_order: int


def is_key(x: tp.Any) -> bool:
    """Whether an array is of random keys."""
    return jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


def dtype_name(dtype: tp.Any) -> str:
    """The name of a dtype, as in `Aval.dtype`."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return f"key:{dtype._impl.name}"
    return np.dtype(dtype).name


def to_data(x: tp.Any) -> tp.Any:
    """An array; of keys, their data."""
    return jax.random.key_data(x) if is_key(x) else x


def from_data(x: tp.Any, dtype: str) -> tp.Any:
    """What `to_data` was given."""
    return jax.random.wrap_key_data(x, impl=dtype[4:]) if dtype.startswith("key:") else x
