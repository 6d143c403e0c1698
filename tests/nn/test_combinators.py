"""Sequential, MLP and Identity."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import normal


def test_sequential_calls_one_after_the_other():
    rngs = nnx.Rngs(0)
    first, last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
    model = nnx.Sequential(first, nnx.relu, last)
    x = normal(5, 3)
    np.testing.assert_array_equal(model(x), last(nnx.relu(first(x))))
    assert list(model) == [first, nnx.relu, last]
    assert [path for path, _ in nnx.to_flat_state(nnx.state(model))] == [
        ("layers", 0, "bias"),
        ("layers", 0, "kernel"),
        ("layers", 2, "bias"),
        ("layers", 2, "kernel"),
    ]


def test_options_go_to_those_who_have_them():
    model = nnx.Sequential(lambda x: x, nnx.Dropout(0.5), nnx.relu)
    x = jnp.ones(32)
    key = jax.random.key(0)
    np.testing.assert_array_equal(model(x, rngs=key), nnx.Dropout(0.5)(x, rngs=key))
    assert nnx.Sequential(max, lambda x, **options: (x, options))(1, 2, z=3) == (2, {"z": 3})


def test_identity_gives_its_input_back():
    layer = nnx.Identity(3, "ignored", rngs=nnx.Rngs(0))
    x = object()
    assert layer(x, 1, key=2) is x
    assert nnx.to_flat_state(nnx.state(layer)).paths == ()


def by_hand(mlp, x):
    for layer in list(mlp.layers)[:-1]:
        x = mlp.activation(layer(x))
    return mlp.final_activation(mlp.layers[-1](x))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_mlp_is_its_layers_in_order(depth):
    mlp = nnx.MLP(
        3, 2, 8, depth, activation=nnx.tanh, final_activation=nnx.softmax, rngs=nnx.Rngs(0)
    )
    x = normal(5, 3)
    assert [layer.kernel.shape for layer in mlp.layers] == [
        (8 if i else 3, 2 if i == depth else 8) for i in range(depth + 1)
    ]
    np.testing.assert_array_equal(mlp(x), by_hand(mlp, x))


def test_mlp_draws_as_its_linears_one_by_one():
    mlp = nnx.MLP(3, 2, 8, 1, rngs=nnx.Rngs(0))
    rngs = nnx.Rngs(0)
    first, last = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
    np.testing.assert_array_equal(mlp.layers[0].kernel.value, first.kernel.value)
    np.testing.assert_array_equal(mlp.layers[1].kernel.value, last.kernel.value)


def test_mlp_biases_are_chosen_apart():
    mlp = nnx.MLP(3, 2, 8, 2, use_bias=False, rngs=nnx.Rngs(0))
    assert [layer.bias is None for layer in mlp.layers] == [True, True, False]
    mlp = nnx.MLP(3, 2, 8, 2, use_final_bias=False, rngs=nnx.Rngs(0))
    assert [layer.bias is None for layer in mlp.layers] == [False, False, True]


@pytest.mark.parametrize("norm", [nnx.LayerNorm, nnx.BatchNorm])
def test_mlp_normalises_its_hidden_layers(norm):
    mlp = nnx.MLP(3, 2, 8, 2, norm=norm, rngs=nnx.Rngs(0))
    assert [type(n) for n in mlp.norms] == [norm, norm]
    first = nnx.relu(mlp.norms[0](mlp.layers[0](normal(5, 3))))
    second = nnx.relu(mlp.norms[1](mlp.layers[1](first)))
    np.testing.assert_allclose(mlp(normal(5, 3)), mlp.layers[2](second), rtol=1e-5, atol=1e-5)


def test_mlp_drops_out_when_it_trains():
    mlp = nnx.MLP(3, 2, 64, 2, dropout_rate=0.5, rngs=nnx.Rngs(0))
    x = normal(5, 3)
    assert not (mlp(x) == mlp(x)).all()
    assert (mlp(x, deterministic=True) == by_hand(mlp, x)).all()
    key = nnx.Rngs(dropout=4)
    np.testing.assert_array_equal(mlp(x, rngs=nnx.clone(key)), mlp(x, rngs=nnx.clone(key)))
    mlp.eval()
    assert (mlp(x) == by_hand(mlp, x)).all()


def test_mlp_without_dropout_needs_no_stream_for_it():
    mlp = nnx.MLP(3, 2, 8, 1, rngs=nnx.Rngs(params=0))
    assert mlp.dropout is None
    with pytest.raises(KeyError, match="dropout"):
        nnx.MLP(3, 2, 8, 1, dropout_rate=0.1, rngs=nnx.Rngs(params=0))


def test_mlp_trains_an_activation_that_learns():
    mlp = nnx.MLP(3, 2, 8, 2, activation=nnx.PReLU(0.2), rngs=nnx.Rngs(0))
    assert ("activation", "negative_slope") in nnx.to_flat_state(nnx.state(mlp)).paths
    np.testing.assert_array_equal(mlp(normal(5, 3)), by_hand(mlp, normal(5, 3)))


@pytest.mark.parametrize("given", [list, tuple, nnx.List])
def test_layers_in_one_list_are_told_how_to_be_passed(given):
    layers = [nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu]
    with pytest.raises(TypeError, match=r"one by one: nnx\.Sequential\(\*layers\)"):
        nnx.Sequential(given(layers))(jnp.ones(2))
    assert nnx.Sequential(*given(layers))(jnp.ones(2)).shape == (3,)
