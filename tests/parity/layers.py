"""Comparing a layer with the reference's: states bit for bit, results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

flax = pytest.importorskip("flax")
from flax import nnx as ref  # noqa: E402

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}
OLDER = tuple(map(int, flax.__version__.split(".")[:3])) < (0, 12, 12)
"""Whether the installed reference is older than the one we follow."""


def leaves(lib, state):
    """Path, kind and value of each leaf; plain arrays have the kind None."""
    found = []
    for path, leaf in lib.to_flat_state(state):
        if isinstance(leaf, lib.Variable):
            found.append((path, type(leaf).__name__, leaf.get_value()))
        else:
            found.append((path, None, leaf))
    return found


def bits(value):
    """A value for a comparison bit for bit."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value)


def assert_equal_results(ours, theirs, factor=1.0):
    """Equal shapes and dtypes, and values within `factor` times the tolerance of the dtype."""
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        tolerance = TOLERANCE[a.dtype.name] * factor
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * (np.abs(b).max() + 1))


def assert_equal_state(ours, theirs):
    """The same paths, kinds and dtypes, and the same values bit for bit."""
    for (path, kind, value), (path_, kind_, value_) in zip(
        leaves(nnx, nnx.state(ours)), leaves(ref, ref.state(theirs)), strict=True
    ):
        assert (path, kind, value.dtype) == (path_, kind_, value_.dtype)
        np.testing.assert_array_equal(bits(value), bits(value_))
