"""Submodules by the reference's paths: what is found there is what the root has."""

from __future__ import annotations

import importlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.layers import ref

import nnxlite as nnx  # isort: skip


def public_names() -> list[tuple[str, str]]:
    """Every (submodule, name) of the reference that is a public name of both roots."""
    found = []
    for full, module in sorted(sys.modules.items()):
        path = full.removeprefix(f"{ref.__name__}.")
        if path == full or not isinstance(module, types.ModuleType):
            continue
        for name in dir(module):
            value = getattr(module, name)
            own = getattr(value, "__module__", None) == full
            if own and hasattr(nnx, name) and value is vars(ref).get(name):
                found.append((path, name))
    return found


@pytest.mark.parametrize("path, name", public_names())
def test_the_name_is_found_by_the_path(path, name):
    assert getattr(importlib.import_module(f"nnxlite.{path}"), name) is getattr(nnx, name)
    found = nnx
    for part in path.split("."):
        found = getattr(found, part)
    assert getattr(found, name) is getattr(nnx, name)


@pytest.mark.parametrize("padding", ["SAME", 1, (1, 2), [(0, 1), 3], (1, 2, 3), None, 1.5])
def test_padding_is_canonical_as_in_the_reference(padding):
    results = []
    for lib in (nnx, ref):
        try:
            results.append(lib.nn.linear.canonicalize_padding(padding, 2))
        except ValueError as error:
            assert "adding" in str(error) and repr(padding) in str(error)
            results.append(ValueError)
    assert results[0] == results[1]


def test_the_first_of_several_flags():
    for lib in (nnx, ref):
        first_from = importlib.import_module(f"{lib.__name__}.module").first_from
        assert first_from(None, False, True, error_msg="which?") is False
        for args in ((), (None, None)):
            with pytest.raises(ValueError, match=r"^which\?$"):
                first_from(*args, error_msg="which?")


BORROWED = {
    "module": "first_from iter_children split_state State",
    "nn.attention": "default_kernel_init first_from LinearGeneral",
    "nn.linear": "default_kernel_init default_bias_init default_embed_init first_from",
    "nn.normalization": "first_from",
    "nn.recurrent": "default_kernel_init default_bias_init Linear",
    "nn.stochastic": "first_from",
}


@pytest.mark.parametrize("path", BORROWED)
def test_what_layers_of_ones_own_borrow(path):
    for lib in (nnx, ref):
        module = importlib.import_module(f"{lib.__name__}.{path}")
        assert all(callable(getattr(module, name)) for name in BORROWED[path].split())


def test_what_recurrent_networks_use_is_found_by_the_path():
    x = jnp.arange(24).reshape(2, 3, 4)
    for lengths, batch, time_major in (
        (None, 1, False),
        (jnp.array([2, 3]), 1, False),
        (jnp.array([1, 2, 2]), 1, True),
        (jnp.array([[1, 2, 4], [3, 0, 2]]), 2, False),
    ):
        ours, theirs = (
            lib.nn.recurrent.flip_sequences(x, lengths, num_batch_dims=batch, time_major=time_major)
            for lib in (nnx, ref)
        )
        np.testing.assert_array_equal(ours, theirs)
    for dtype in (jnp.float32, jnp.bfloat16):
        ours, theirs = (
            lib.nn.recurrent.modified_orthogonal(jax.random.key(0), (3, 4), dtype)
            for lib in (nnx, ref)
        )
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
