"""Submodules by the reference's paths: what is found there is what the root has."""

from __future__ import annotations

import importlib
import sys
import types

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.parity.layers import ref
from tests.parity.programs import Lines


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


lines = Lines()
lines(
    "used",
    lambda lib: {"x": jnp.arange(24).reshape(2, 3, 4), "flip": lib.nn.recurrent.flip_sequences},
    """
    [lib.nn.linear.canonicalize_padding(p, 2) for p in ("SAME", 1, (1, 2), [(0, 1), 3])]
    lib.nn.linear.canonicalize_padding((1, 2, 3), 2)
    lib.nn.linear.canonicalize_padding(None, 2)
    lib.nn.linear.canonicalize_padding(1.5, 2)
    lib.module.first_from(None, False, True, error_msg="which?")
    flip(x, None, num_batch_dims=1, time_major=False)
    flip(x, jnp.array([2, 3]), num_batch_dims=1, time_major=False)
    flip(x, jnp.array([1, 2, 2]), num_batch_dims=1, time_major=True)
    flip(x, jnp.array([[1, 2, 4], [3, 0, 2]]), num_batch_dims=2, time_major=False)
    lib.nn.recurrent.modified_orthogonal(jax.random.key(0), (3, 4), jnp.float32)
    lib.nn.recurrent.modified_orthogonal(jax.random.key(0), (3, 4), jnp.bfloat16)
    """,
)


test_line = lines.test()
