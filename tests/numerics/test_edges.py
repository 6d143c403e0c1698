"""Large, tiny, infinite and undefined numbers, empty axes, and the moments of what is random."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import normal


def finite(tree):
    return all(np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(tree))


NORMS = {
    "LayerNorm": lambda **o: nnx.LayerNorm(4, **o, rngs=nnx.Rngs(0)),
    "RMSNorm": lambda **o: nnx.RMSNorm(4, **o, rngs=nnx.Rngs(0)),
    "GroupNorm": lambda **o: nnx.GroupNorm(4, 2, **o, rngs=nnx.Rngs(0)),
    "InstanceNorm": lambda **o: nnx.InstanceNorm(4, **o, rngs=nnx.Rngs(0)),
    "BatchNorm": lambda **o: nnx.BatchNorm(4, **o, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", NORMS)
def test_constant_rows_single_elements_and_small_numbers_have_finite_gradients(name):
    norm = NORMS[name]()

    @nnx.jit
    def both(norm, x):
        run = lambda norm, x: (norm(x) ** 2).sum()
        return norm(x), nnx.grad(run, argnums=(0, 1))(norm, x)

    for x in (jnp.full((2, 3, 4), 7.0), jnp.zeros((1, 1, 4)), jnp.full((1, 1, 4), 1e-30)):
        assert finite(both(norm, x))


@pytest.mark.parametrize("name", NORMS)
def test_a_large_mean_of_float16_is_no_problem(name):
    """Squares of 30,000 overflow in float16; the moments are in float32."""
    x = jnp.asarray(30000 + 64 * np.sign(normal(8, 3, 4)), jnp.float16)
    assert finite(NORMS[name](dtype=jnp.float16, use_fast_variance=False)(x))


def test_nan_stays_in_its_example():
    x = jnp.asarray(normal(2, 3, 4)).at[0].set(jnp.nan)
    layers = {
        "LayerNorm": NORMS["LayerNorm"](),
        "GroupNorm": NORMS["GroupNorm"](),
        "Conv": nnx.Conv(4, 4, 3, rngs=nnx.Rngs(0)),
        "attention": nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0)),
        "RNN": nnx.RNN(nnx.GRUCell(4, 4, rngs=nnx.Rngs(0))),
        "Linear": nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
    }
    for name, layer in layers.items():
        y = np.asarray(layer(x))
        assert np.isnan(y[0]).any(), name
        assert np.isfinite(y[1]).all(), name


@pytest.mark.parametrize("name", NORMS)
def test_what_a_mask_leaves_out_of_the_moments_may_be_nan(name):
    x = jnp.asarray(normal(2, 3, 4)).at[:, 2].set(jnp.nan)
    mask = jnp.ones((2, 3, 1), bool).at[:, 2].set(False)
    assert np.isfinite(NORMS[name]()(x, mask=mask)[:, :2]).all()


def test_masked_keys_have_no_gradient():
    x = jnp.asarray(normal(2, 4, 1, 4))
    mask = jnp.array([[True, True, False, False], [False] * 4])[:, None, None]
    loss = lambda key: (nnx.dot_product_attention(x, key, x, mask=mask) ** 2).sum()
    gradient = jax.grad(loss)(x)
    assert np.isfinite(gradient).all()
    assert not gradient[0, 2:].any() and not gradient[1].any() and gradient[0, :2].any()


def test_lengths_of_zero_leave_padding_without_a_gradient():
    cell = nnx.LSTMCell(4, 3, rngs=nnx.Rngs(0))
    rnn = nnx.RNN(cell, return_carry=True, reverse=True, rngs=False)
    lengths = jnp.array([0, 2])
    loss = lambda x: rnn(x, seq_lengths=lengths)[0][1].sum()
    gradient = jax.grad(loss)(jnp.asarray(normal(2, 3, 4)) * 1e30)
    assert np.isfinite(gradient).all() and not gradient[0].any() and not gradient[1, 2:].any()


def test_sequences_without_positions():
    x = jnp.zeros((2, 0, 4))
    rnn = nnx.RNN(nnx.GRUCell(4, 3, rngs=nnx.Rngs(0)), return_carry=True)
    carry, y = rnn(x)
    assert y.shape == (2, 0, 3) and not carry.any()
    layer = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    assert layer(x).shape == x.shape
    y = nnx.dot_product_attention(jnp.ones((1, 2, 1, 4)), x[:1, :, None], x[:1, :, None])
    assert y.shape == (1, 2, 1, 4) and not y.any()


def test_integers_bools_and_complex_numbers():
    linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    x = np.array([[1, 0, 2], [0, 1, 0]])
    np.testing.assert_array_equal(linear(jnp.asarray(x)), linear(jnp.asarray(x, jnp.float32)))
    np.testing.assert_array_equal(
        linear(jnp.asarray(x > 0)), linear(jnp.asarray(x > 0, jnp.float32))
    )
    z = jnp.asarray(x + 1j)
    np.testing.assert_allclose(linear(z), linear(z.real) + 1j * linear(z.imag), rtol=1e-5)
    for name in ("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm"):
        z = jnp.asarray(normal(5, 3, 4) + 1j * normal(5, 3, 4, seed=1))
        axes = {"LayerNorm": (2,), "RMSNorm": (2,), "BatchNorm": (0, 1)}.get(name)
        if axes is None:
            assert finite(jnp.abs(NORMS[name]()(z)))
            continue
        mean = 0 if name == "RMSNorm" else np.mean(z, axes, keepdims=True)
        spread = np.sqrt((np.abs(z - mean) ** 2).mean(axes, keepdims=True) + 1e-6)
        np.testing.assert_allclose(NORMS[name](epsilon=1e-6)(z), (z - mean) / spread, rtol=1e-4)


# Random numbers ------------------------------------------------------------------------------

DEVIATIONS = 5
"""How many standard deviations of the sample a moment may be off: about one in two million."""


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_as_many_as_its_rate_says_and_keeps_the_mean(rate):
    size = 40_000
    y = np.asarray(nnx.Dropout(rate, rngs=nnx.Rngs(0))(jnp.ones(size)))
    share = (y == 0).mean()
    assert abs(share - rate) < DEVIATIONS * np.sqrt(rate * (1 - rate) / size)
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-6)
    # Neighbours are independent.
    dropped = (y == 0) - rate
    correlation = (dropped[1:] * dropped[:-1]).mean() / (rate * (1 - rate))
    assert abs(correlation) < DEVIATIONS / np.sqrt(size)


def test_kernels_of_several_axes_count_their_inputs():
    """The variance is one over the inputs of an output: 30 here, in each layer."""
    layers = (
        nnx.Linear(30, 400, rngs=nnx.Rngs(0)),
        nnx.LinearGeneral((5, 6), (20, 20), axis=(-2, -1), rngs=nnx.Rngs(1)),
        nnx.Conv(10, 400, (3,), rngs=nnx.Rngs(2)),
        nnx.Conv(20, 400, (3,), feature_group_count=2, rngs=nnx.Rngs(3)),
    )
    for layer in layers:
        kernel = layer.kernel[...]
        assert abs(float(kernel.var()) * 30 - 1) < DEVIATIONS * np.sqrt(2 / kernel.size)
        assert not layer.bias.value.any()
    embed = nnx.Embed(400, 30, rngs=nnx.Rngs(0)).embedding[...]
    assert abs(float(embed.var()) * 30 - 1) < DEVIATIONS * np.sqrt(2 / embed.size)


def test_samplers_draw_with_the_probabilities_of_the_logits():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    keys, draws = jax.random.split(jax.random.key(0), 20_000), 20_000
    logits = jnp.log(jnp.asarray(probabilities))
    draw = jax.jit(jax.vmap(lambda sampler, key: sampler(logits, key), in_axes=(None, 0)))
    for temperature in (1.0, 0.5):
        tokens = np.asarray(draw(nnx.Sampler(temperature=temperature), keys))
        wanted = probabilities ** (1 / temperature)
        wanted /= wanted.sum()
        shares = np.bincount(tokens, minlength=4) / draws
        assert (np.abs(shares - wanted) < DEVIATIONS * np.sqrt(wanted * (1 - wanted) / draws)).all()
