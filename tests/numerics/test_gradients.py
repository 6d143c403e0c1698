"""Gradients of all parameters and inputs against central differences in float64.

A sample of the cases of each family goes through one transform.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.numerics import checks
from tests.numerics.cases import FAMILIES

SAMPLES = {
    "linear": ("remat", 2),
    "convolutions": ("vmap", 5),
    "pools": ("a loop", 6),
    "norms": ("scan", 9),
    "attention": ("vmap", 7),
    "recurrence": ("scan", 5),
}


@pytest.mark.parametrize("family", SAMPLES)
def test_gradients_are_the_limits_of_differences(family):
    route, every = SAMPLES[family]
    with jax.enable_x64(True):
        result = checks.gradients_in_double(list(FAMILIES[family]())[::every], route)
    assert result.compared and result.wrong == []


@pytest.mark.parametrize("family, every", [("linear", 9), ("norms", 21), ("attention", 21)])
def test_gradients_of_gradients(family, every):
    with jax.enable_x64(True):
        cases = list(FAMILIES[family]())[::every]
        assert checks.gradients_in_double(cases, "a loop", order=2).wrong == []


def test_a_rule_of_custom_vjp_with_the_true_derivative_changes_nothing():
    @nnx.custom_vjp
    def square(layer, x):
        return layer(x) ** 2

    def backward(saved, g):
        (layer, x), (_, d) = saved, g
        y = layer(x)
        _, pull = nnx.vjp(lambda layer, x: layer(x), layer, x)
        return pull(2 * y * d)

    square.defvjp(lambda layer, x: (square(layer, x), (layer, x)), backward)
    layer, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.arange(6.0).reshape(2, 3)
    ours = nnx.grad(lambda layer, x: square(layer, x).sum(), argnums=(0, 1))(layer, x)
    plain = nnx.grad(lambda layer, x: (layer(x) ** 2).sum(), argnums=(0, 1))(layer, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
