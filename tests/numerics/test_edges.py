"""Large, tiny, infinite and undefined numbers, and empty axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import normal


def finite(tree):
    return all(np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(tree))


NORMS = {
    **dict.fromkeys((nnx.LayerNorm, nnx.RMSNorm, nnx.InstanceNorm, nnx.BatchNorm), (4,)),
    nnx.GroupNorm: (4, 2),
}


@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_numbers_that_are_odd(kind):
    """Constant rows, single elements and small numbers, large means, and what a mask leaves out."""
    make = functools.partial(kind, *NORMS[kind], rngs=nnx.Rngs(0))
    norm = make()

    @nnx.jit
    def both(norm, x, mask=None):
        run = lambda norm, x: (norm(x, mask=mask) ** 2).sum()
        return norm(x, mask=mask), nnx.grad(run, argnums=(0, 1))(norm, x)

    for x in (jnp.full((2, 3, 4), 7.0), jnp.zeros((1, 1, 4)), jnp.full((1, 1, 4), 1e-30)):
        assert finite(both(norm, x))
    x = jnp.asarray(normal(2, 3, 4))
    mask = jnp.ones((2, 3, 1), bool).at[:, 2].set(False)
    assert finite(both(norm, x.at[:, 2].set(jnp.nan), mask)[0][:, :2])
    for norm in (
        make(),
        make(use_fast_variance=False),
    ):  # an example of padding only is not magnified
        assert finite(both(norm, x, mask.at[1].set(False)))
        np.testing.assert_allclose(both(norm, x, mask & False)[0], x, rtol=1e-5)
    # Squares of 30,000 overflow in float16; the moments are in float32.
    large = jnp.asarray(30000 + 64 * np.sign(normal(8, 3, 4)), jnp.float16)
    assert finite(make(dtype=jnp.float16, use_fast_variance=False)(large))


def test_nan_stays_in_its_example():
    x, rngs = jnp.asarray(normal(2, 3, 4)).at[0].set(jnp.nan), nnx.Rngs(0)
    for layer in (
        nnx.LayerNorm(4, rngs=rngs),
        nnx.GroupNorm(4, 2, rngs=rngs),
        nnx.Conv(4, 4, 3, rngs=rngs),
        nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs),
        nnx.RNN(nnx.GRUCell(4, 4, rngs=rngs)),
        nnx.Linear(4, 4, rngs=rngs),
    ):
        y = np.asarray(layer(x))
        assert np.isnan(y[0]).any() and np.isfinite(y[1]).all(), layer


def test_what_is_masked_has_no_gradient():
    x = jnp.asarray(normal(2, 4, 1, 4))
    mask = jnp.array([[True, True, False, False], [False] * 4])[:, None, None]
    loss = lambda key: (nnx.dot_product_attention(x, key, x, mask=mask) ** 2).sum()
    gradient = jax.jit(jax.grad(loss))(x)
    assert finite(gradient) and gradient[0, :2].any()
    assert not gradient[0, 2:].any() and not gradient[1].any()
    cell = nnx.LSTMCell(4, 3, rngs=nnx.Rngs(0))
    rnn = nnx.RNN(cell, return_carry=True, reverse=True, rngs=False)
    loss = lambda x: rnn(x, seq_lengths=jnp.array([0, 2]))[0][1].sum()
    gradient = jax.jit(jax.grad(loss))(jnp.asarray(normal(2, 3, 4)) * 1e30)
    assert finite(gradient) and not gradient[0].any() and not gradient[1, 2:].any()


def test_sequences_without_positions():
    x = jnp.zeros((2, 0, 4))
    carry, y = nnx.RNN(nnx.GRUCell(4, 3, rngs=nnx.Rngs(0)), return_carry=True)(x)
    assert y.shape == (2, 0, 3) and not carry.any()
    layer = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    assert layer(x).shape == x.shape
    y = nnx.dot_product_attention(jnp.ones((1, 2, 1, 4)), x[:1, :, None], x[:1, :, None])
    assert y.shape == (1, 2, 1, 4) and not y.any()
