"""Modes reach every layer of a model that has one; dropout with its keys and rates."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.nn.attention import dot_product_attention_weights
from tests.nn.catalogue import LAYERS

MODES = ("deterministic", "use_running_average")


def modes(model):
    return {
        (*path, mode): getattr(node, mode)
        for path, node in nnx.iter_graph(model)
        for mode in MODES
        if isinstance(node, nnx.Module) and hasattr(node, mode)
    }


def modes_in_text(model):
    return re.findall(rf"\b(?:{'|'.join(MODES)})=(\w+)", repr(model))


def variables(model):
    is_variable = lambda x: isinstance(x, nnx.Variable)
    return jax.tree.leaves(nnx.state(model), is_leaf=is_variable)


@pytest.mark.parametrize("name", LAYERS)
def test_modes_reach_every_layer_and_are_seen_in_the_text(name):
    model = nnx.Dict(blocks=nnx.List([LAYERS[name].make(nnx.Rngs(0))]))
    paths = modes(model)
    for change, value in ((model.eval, True), (model.train, False)):
        change()
        assert modes(model) == dict.fromkeys(paths, value)
        assert modes_in_text(model) == [str(value)] * len(paths)

    seen = nnx.view(model, **dict.fromkeys({path[-1] for path in paths}, True))
    assert modes(seen) == dict.fromkeys(paths, True)
    assert modes_in_text(seen) == ["True"] * len(paths)
    assert modes(model) == dict.fromkeys(paths, False)
    assert all(a is b for a, b in zip(variables(model), variables(seen), strict=True))


# A decoding step and a record are written in every mode; SpectralNorm divides its weights again.
@pytest.mark.parametrize("name", ["Sequential", "BatchNorm", "MultiHeadAttention", "Dropout"])
def test_a_model_that_does_not_train_is_a_function(name):
    row = LAYERS[name]
    layer, run, x = row.make(nnx.Rngs(0)), row.run, row.x
    trained = run(layer, x)
    left = jax.tree.leaves(nnx.state(layer))
    layer.eval()
    y = run(layer, x)
    np.testing.assert_array_equal(run(layer, x), y)
    assert all(a is b for a, b in zip(jax.tree.leaves(nnx.state(layer)), left, strict=True))
    assert not np.array_equal(y, trained)
    layer.train()
    run(layer, x)
    assert any(a is not b for a, b in zip(jax.tree.leaves(nnx.state(layer)), left, strict=True))


# Dropout ----------------------------------------------------------------------------------------


def test_the_stream_is_forked_when_the_layer_is_made():
    rngs, x = nnx.Rngs(0, dropout=1), jnp.ones(64)
    layer = nnx.Dropout(0.5, rngs=rngs)
    assert not (layer(x) == layer(x)).all()
    assert (rngs.dropout.count.value, layer.rngs.count.value) == (1, 2)
    assert isinstance(nnx.Dropout(0.5, rngs=rngs.dropout).rngs, nnx.RngStream)


def test_a_key_given_in_the_call_goes_first():
    """That sources and modes are taken as in the reference, random layers show beside it."""
    layer, x, key = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), jnp.ones(32), jax.random.key(0)
    expected = np.where(jax.random.bernoulli(key, 0.5, (32,)), 2.0, 0.0)
    np.testing.assert_array_equal(layer(x, rngs=key), expected)
    assert layer.rngs.count.value == 0
    traced = jax.jit(lambda rate: nnx.Dropout(rate)(x, rngs=key))(0.5)
    np.testing.assert_array_equal(traced, expected)
    layer.set_view(deterministic=True)
    assert layer.set_view() is None and layer.deterministic is True


RNGS, KEY = nnx.Rngs(0), jax.random.key(0)
QKV = [jnp.ones((1, 2, 1, 4))] * 3
attend = functools.partial(nnx.dot_product_attention, *QKV, dropout_rng=KEY)
rotated = functools.partial(
    nnx.dot_product_attention_with_rope, *QKV, rope=nnx.RoPE(), dropout_rng=KEY
)
weights = functools.partial(dot_product_attention_weights, *QKV[1:], dropout_rng=KEY)
adapt = functools.partial(nnx.lora.inject, rank=1, rngs=RNGS)
multi = functools.partial(nnx.MultiHeadAttention, 2, 4, rngs=RNGS)
RATES = {  # everything that takes a rate
    "Dropout: `rate`": lambda rate: nnx.Dropout(rate, rngs=RNGS),
    "MultiHeadAttention: `dropout_rate`": lambda rate: multi(dropout_rate=rate),
    "dot_product_attention: `dropout_rate`": lambda rate: attend(dropout_rate=rate),
    "dot_product_attention: `dropout_rate`, rotated": lambda rate: rotated(dropout_rate=rate),
    "dot_product_attention_weights: `dropout_rate`": lambda rate: weights(dropout_rate=rate),
    "lora.inject: `dropout`": lambda rate: adapt(nnx.Linear(2, 2, rngs=RNGS), ..., dropout=rate),
}


@pytest.mark.parametrize("name", RATES)
def test_a_rate_is_a_probability(name):
    (says, _, _), make, one = name.partition(","), RATES[name], name.startswith("Dropout")
    wrong = [-0.5, 1.5, float("nan"), float("inf"), np.float32(-0.1), jnp.array(np.nan)]
    wrong += [] if one else [1, 1.0, True]
    text = f"^{says} must be a probability in the range .0, 1"
    for rate in (*wrong, "0.5", None, [0.1, 0.2]):
        kind = ValueError if any(rate is x for x in wrong) else TypeError
        with pytest.raises(kind, match=text):
            make(rate)
    for rate in (0, 0.0, 0.5, np.float32(0.25), jnp.array(0.25), *([1, 1.0] if one else [])):
        make(rate)


def test_a_rate_that_is_set_later_is_looked_at_in_the_call():
    dropout, attention = nnx.Dropout(0.5, rngs=RNGS), multi(dropout_rate=0.5, decode=False)
    dropout.rate = attention.dropout_rate = 1.5
    attention.deterministic = False
    for layer in (dropout, attention):
        with pytest.raises(ValueError, match="must be a probability in the range"):
            layer(jnp.ones((1, 2, 4)))
