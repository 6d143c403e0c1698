"""A few results by hand, and from NumPy's own statistics."""

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx


def test_running_averages_after_three_batches():
    norm = nnx.BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))
    for batch in ([1.0, 3.0], [2.0, 2.0], [0.0, 8.0]):
        norm(jnp.array(batch)[:, None])
    # means 2, 2, 4 and (population) variances 1, 0, 16, from 0 and 1
    assert norm.mean.value.tolist() == [((0 + 2) / 2 + 2) / 4 + 4 / 2]
    assert norm.var.value.tolist() == [(((1 + 1) / 2 + 0) / 2 + 16) / 2]


@pytest.mark.parametrize("masked", [False, True])
def test_welford_over_batches_is_the_variance_of_numpy(masked):
    rng = np.random.default_rng(0)
    metric, seen = nnx.metrics.Welford(), []
    for size in (1, 7, 0, 30):
        values = rng.normal(size=size) + 1e3
        mask = rng.random(size) < 0.5 if masked else np.ones(size, bool)
        metric.update(values=jnp.asarray(values, jnp.float32), **({"mask": mask} if masked else {}))
        seen += np.asarray(values, np.float32)[mask].astype(float).tolist()
    result = metric.compute()
    np.testing.assert_allclose(result.mean, np.mean(seen), rtol=1e-6)
    np.testing.assert_allclose(result.standard_deviation, np.std(seen, ddof=0), rtol=1e-4)
    error = np.std(seen) / np.sqrt(len(seen))
    np.testing.assert_allclose(result.standard_error_of_mean, error, rtol=1e-4)


def test_a_schedule_is_read_at_the_number_of_updates():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 6)
    model = nnx.Dict(w=nnx.Param(jnp.zeros(())))
    optimizer = nnx.Optimizer(model, optax.sgd(schedule), wrt=nnx.Param)
    rates = []
    for _ in range(6):
        before = float(model.w.value)
        optimizer.update(model, {"w": jnp.ones(())})
        rates.append(before - float(model.w.value))
    cosine = [(1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]
    np.testing.assert_allclose(rates, [0.0, 0.5, *cosine], atol=1e-6)


def test_an_average_forgets_by_its_decay():
    model = nnx.Dict(w=nnx.Param(jnp.zeros(())))
    ema = nnx.EMA(model, 0.9)
    for step in range(1, 6):
        model.w.value = jnp.ones(())
        ema.update(model)
        # From zero; divided by this number, the average would have no bias.
        np.testing.assert_allclose(ema.params["w"].value, 1 - 0.9**step, rtol=1e-6)


def test_samplers_leave_what_sorting_says():
    rng = np.random.default_rng(0)
    for size, k, p in itertools.product((1, 2, 9), (1, 3, 20), (0.0, 0.3, 0.9, 1.0)):
        logits = rng.normal(size=size).astype(np.float32) * 3
        probabilities = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum()
        order = np.argsort(-logits)
        best = set(order[:k].tolist())
        before = np.cumsum(probabilities[order]) - probabilities[order]
        nucleus = {int(order[0]), *order[before < p - 1e-6].tolist()}
        likely = set(np.flatnonzero(probabilities >= p * probabilities.max() - 1e-9).tolist())
        for left, expected in (
            (nnx.sampling.top_k(logits, k), best),
            (nnx.sampling.top_p(jnp.asarray(logits), p), nucleus),
            (nnx.sampling.min_p(jnp.asarray(logits), p), likely),
        ):
            kept = set(np.flatnonzero(np.isfinite(left)).tolist())
            if p < 1 or expected is not nucleus:
                assert kept == expected
            np.testing.assert_array_equal(np.asarray(left)[list(kept)], logits[list(kept)])


def test_a_beam_search_as_wide_as_the_tree_finds_the_best():
    table = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)

    class Chain(nnx.Module):
        def __init__(self):
            self.table = nnx.Param(jnp.asarray(table))

        def __call__(self, tokens):
            return self.table[tokens]

    log_probs = table - np.log(np.exp(table).sum(-1, keepdims=True))
    scores = {}
    for path in itertools.product(range(3), repeat=3):
        steps = zip((1, *path), path)
        scores[path] = sum(float(log_probs[a, b]) for a, b in steps)
    beams = nnx.generate(Chain(), [1], 3, beams=9)
    best = sorted(scores, key=scores.get, reverse=True)[:9]
    assert [tuple(tokens) for tokens in beams.lists()] == best
    np.testing.assert_allclose(beams.scores, [scores[path] for path in best], rtol=1e-5)
