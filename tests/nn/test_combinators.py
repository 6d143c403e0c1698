"""Sequential, MLP and Identity."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import normal


@pytest.mark.parametrize("given", [list, tuple, nnx.List])
def test_layers_in_one_list_are_told_how_to_be_passed(given):
    layers = [nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu]
    with pytest.raises(TypeError, match=r"one by one: nnx\.Sequential\(\*layers\)"):
        nnx.Sequential(given(layers))(jnp.ones(2))
    model = nnx.Sequential(*given(layers))
    assert model(jnp.ones(2)).shape == (3,) and list(model) == list(model.layers) == layers


def test_identity_gives_its_input_back():
    layer = nnx.Identity(3, "ignored", rngs=nnx.Rngs(0))
    x = object()
    assert layer(x, 1, key=2) is x
    assert nnx.to_flat_state(nnx.state(layer)).paths == ()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_mlp_is_its_linears_in_order(depth):
    options = {"activation": nnx.PReLU(0.2), "final_activation": nnx.softmax, "dtype": "bfloat16"}
    mlp = nnx.MLP(3, 2, 8, depth, use_bias=False, **options, rngs=nnx.Rngs(0))
    rngs, x = nnx.Rngs(0), normal(5, 3)
    linear, y = functools.partial(nnx.Linear, dtype="bfloat16", rngs=rngs), x
    for rows in [3, 8, 8][:depth]:
        y = mlp.activation(linear(rows, 8, use_bias=False)(y))
    last = linear(8 if depth else 3, 2)
    np.testing.assert_array_equal(mlp(x), nnx.softmax(last(y)))
    assert [layer.bias is None for layer in mlp.layers] == [True] * depth + [False]
    assert nnx.MLP(3, 2, 8, 1, use_final_bias=False, rngs=rngs).layers[-1].bias is None
    assert ("activation", "negative_slope") in nnx.to_flat_state(nnx.state(mlp)).paths
