"""Dropout: masks, modes and sources of keys; every rate is a probability."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.nn.attention import dot_product_attention_weights


def test_the_stream_is_forked_when_the_layer_is_made():
    rngs, x = nnx.Rngs(0, dropout=1), jnp.ones(64)
    layer = nnx.Dropout(0.5, rngs=rngs)
    assert not (layer(x) == layer(x)).all()
    assert (rngs.dropout.count.value, layer.rngs.count.value) == (1, 2)
    assert isinstance(nnx.Dropout(0.5, rngs=rngs.dropout).rngs, nnx.RngStream)


def test_a_key_given_in_the_call_goes_first():
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    x = jnp.ones(32)
    key = nnx.Rngs(dropout=9).dropout()
    expected = np.where(jax.random.bernoulli(key, 0.5, (32,)), 2.0, 0.0)
    for source in (key, nnx.Rngs(dropout=9), nnx.Rngs(dropout=9).dropout):
        np.testing.assert_array_equal(layer(x, rngs=source), expected)
    assert layer.rngs.count.value == 0
    traced = jax.jit(lambda rate: nnx.Dropout(rate)(x, rngs=key))(0.5)
    np.testing.assert_array_equal(traced, expected)


def test_modes_come_from_the_call_then_from_the_layer():
    x = jnp.ones(64)
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    assert (layer(x, deterministic=True) == 1).all()
    layer.eval()
    assert layer.deterministic is True and (layer(x) == 1).all()
    assert not (layer(x, deterministic=False) == 1).all()
    assert layer.set_view(deterministic=False) is None and layer.deterministic is False
    layer.set_view()
    assert layer.deterministic is False


RNGS, KEY = nnx.Rngs(0), jax.random.key(0)
QKV = [jnp.ones((1, 2, 1, 4))] * 3
attend = functools.partial(nnx.dot_product_attention, *QKV, dropout_rng=KEY)
rotated = functools.partial(
    nnx.dot_product_attention_with_rope, *QKV, rope=nnx.RoPE(), dropout_rng=KEY
)
weights = functools.partial(dot_product_attention_weights, *QKV[1:], dropout_rng=KEY)
adapt = functools.partial(nnx.lora.inject, rank=1, rngs=RNGS)
multi = functools.partial(nnx.MultiHeadAttention, 2, 4, rngs=RNGS)
RATES = [  # everything that takes a rate: the names it says, how it is made, whether one is allowed
    ("Dropout: `rate`", lambda rate: nnx.Dropout(rate, rngs=RNGS), True),
    ("MultiHeadAttention: `dropout_rate`", lambda rate: multi(dropout_rate=rate), False),
    ("dot_product_attention: `dropout_rate`", lambda rate: attend(dropout_rate=rate), False),
    ("dot_product_attention: `dropout_rate`", lambda rate: rotated(dropout_rate=rate), False),
    ("dot_product_attention_weights: `dropout_rate`", lambda r: weights(dropout_rate=r), False),
    ("lora.inject: `dropout`", lambda r: adapt(nnx.Linear(2, 2, rngs=RNGS), ..., dropout=r), False),
]


@pytest.mark.parametrize("says, make, one", RATES, ids=[says for says, *_ in RATES])
def test_a_rate_is_a_probability(says, make, one):
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
