"""Initializers: JAX's own names, and the two that complete them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx

OWN = {"Initializer", "zeros_init", "ones_init"}
JAXS = sorted(
    name
    for name, value in vars(nnx.initializers).items()
    if callable(value) and name[0] != "_" and name not in OWN
)


@pytest.mark.parametrize("name", JAXS)
def test_initializers_are_jaxs_own(name):
    assert getattr(nnx.initializers, name) is getattr(jax.nn.initializers, name)


@pytest.mark.parametrize(("name", "value"), [("zeros_init", 0), ("ones_init", 1)])
def test_constants_take_shape_and_dtype(name, value):
    made = getattr(nnx.initializers, name)()(jax.random.key(0), (2, 3), jnp.bfloat16)
    assert (made.shape, made.dtype) == ((2, 3), jnp.bfloat16)
    assert (made == value).all()
