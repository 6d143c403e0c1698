"""Samplers: what they leave, what they draw, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.3, 0.15, 0.05]))
sampling = nnx.sampling
left = lambda logits: np.flatnonzero(np.isfinite(np.asarray(logits))).tolist()


def test_greedy_and_temperature_and_equal_logits():
    assert left(sampling.top_k(jnp.array([1.0, 2.0, 1.0]), 2)) == [0, 1, 2]
    assert int(sampling.greedy(LOGITS)) == 1
    np.testing.assert_allclose(sampling.temperature(LOGITS, 2.0), LOGITS / 2)


@pytest.mark.parametrize(
    ("choose", "number", "expected"),
    [
        (sampling.top_k, 1, [1]),
        (sampling.top_k, 2, [1, 2]),
        (sampling.top_k, 99, [0, 1, 2, 3, 4]),
        (sampling.top_p, 0.6, [1, 2]),
        (sampling.top_p, 0.0, [1]),
        (sampling.top_p, 1.0, [0, 1, 2, 3, 4]),
        (sampling.min_p, 0.3, [1, 2, 3]),
        (sampling.min_p, 0.0, [0, 1, 2, 3, 4]),
    ],
)
def test_what_each_function_leaves_of_each_row(choose, number, expected):
    one, other = jax.jit(choose, static_argnums=1)(jnp.stack([LOGITS, LOGITS[::-1]]), number)
    assert left(one) == expected and left(other[::-1]) == expected


def test_a_sampler_draws_from_what_is_left():
    keys = jax.random.split(jax.random.key(0), 2000)
    draw = jax.jit(lambda sampler: jax.vmap(sampler, (None, 0))(LOGITS, keys))
    counts = np.bincount(draw(nnx.Sampler()), minlength=5) / 2000
    np.testing.assert_allclose(counts, np.exp(LOGITS), atol=0.04)
    assert set(np.unique(draw(nnx.Sampler(top_k=np.int64(3), top_p=0.5)))) == {1, 2}
    assert set(np.unique(draw(nnx.Sampler(min_p=0.3)))) == {1, 2, 3}
    assert set(np.unique(draw(nnx.Sampler(temperature=0)))) == {1}
    assert set(np.unique(draw(nnx.Sampler(temperature=0.01)))) == {1}


def test_numbers_of_a_sampler_are_operands():
    traces = []

    @jax.jit
    def draw(sampler, key):
        traces.append(sampler.top_k)
        return sampler(LOGITS, key)

    for sampler in (nnx.Sampler(0.5, 2, 0.9), nnx.Sampler(0.0, 2, 0.1), nnx.Sampler(0.0, 3, 0.1)):
        draw(sampler, jax.random.key(0))
    assert traces == [2, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, r"temperature is -1\.0; it must be a finite number from 0 up"),
        ({"temperature": float("nan")}, r"temperature is nan; it must be a finite number from 0"),
        ({"top_k": 0}, "top_k is 0; it must be a whole number from 1 up, or None"),
        ({"top_k": True}, "top_k is True; it must be a whole number from 1 up, or None"),
        ({"top_k": 2.5}, r"top_k is 2\.5; it must be a whole number from 1 up, or None"),
        ({"top_p": 90}, "top_p is 90; it must be a number from 0 to 1, or None"),
        ({"min_p": -0.1}, r"min_p is -0\.1; it must be a number from 0 to 1, or None"),
    ],
)
def test_settings_that_mean_nothing(settings, message):
    with pytest.raises(ValueError, match=f"^Sampler: {message}"):
        nnx.Sampler(**settings)


def test_probabilities_of_half_precision_add_up_in_float32():
    """In bfloat16 sums have three digits, and those of many equal tokens stop growing at 1/2."""
    equal = jnp.zeros(4096, jnp.bfloat16).at[:2048].set(4.0)
    assert left(sampling.top_p(equal, 0.9)) == [*range(2048)]
    logits = -jnp.arange(64, dtype=jnp.bfloat16) / 8
    for p in (0.3, 0.6, 0.9, 0.99, 0.999):
        wanted = left(sampling.top_p(logits.astype(jnp.float32), p))
        assert left(sampling.top_p(logits, p)) == wanted
