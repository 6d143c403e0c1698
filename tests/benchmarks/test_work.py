"""What the benchmarks hold against each other does the same work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from benchmarks import growth, initialise, layers, memory, sharded, transforms
from benchmarks.harness import CASES, Pace
from benchmarks.models import dense_chain, dense_leaves, transformer


def values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def by_size(arrays):
    """Arrays in an order that does not depend on how a tree lists them."""
    return sorted(arrays, key=lambda a: (a.shape, float(a.sum())))


EVERY = transforms.WORKS + transforms.OUTSIDE + transforms.INSIDE


@pytest.mark.parametrize("work", EVERY, ids=lambda work: work.name)
def test_a_transform_gives_what_jax_gives_on_flat_leaves(work):
    expected = values(work.limit(dense_leaves())())
    found = values(work.objects(nnx, dense_chain(nnx)))
    assert len(found) == len(expected)
    for mine, theirs in zip(by_size(found), by_size(expected)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_decoding_step_writes_its_cache():
    layer, step, args = layers.decoding(nnx)
    for _ in range(2):  # the cache is rewound: the benchmark may take any number of steps
        nnx.jit(step)(layer, *args)
        assert layer.cache_index.value == 1
        filled = np.asarray(layer.cached_key.value).any(axis=(0, 2, 3))
        assert filled[0] and not filled[1:].any()


@pytest.mark.parametrize("work", growth.WORKS)
def test_every_work_of_growth_runs_on_small_sizes(work):
    for kind in growth.GROWTHS:
        sampler = growth.WORKS[work](kind, 2)
        sampler.warm(Pace(batch=0, warm_calls=2))
        assert sampler.sample() > 0


def test_bytes_of_objects_are_those_that_are_kept():
    kept = memory.allocated(lambda: bytearray(10_000), count=5)
    apart = memory.allocated(lambda: len(bytearray(10_000)), count=5)
    halves = memory.allocated(lambda: bytearray(10_000), count=5, units=2)
    for sampler in (kept, apart, halves):
        sampler.warm(Pace())
    assert 10_000 < kept.sample() < 10_200
    assert apart.sample() < 100
    assert 5_000 < halves.sample() < 5_100


def test_the_peak_of_a_donated_step_has_no_second_copy():
    x = jnp.zeros(1000)
    assert memory.peak(jax.jit(lambda x: x + 1), x) == 8_000
    assert memory.peak(jax.jit(lambda x: x + 1, donate_argnums=0), x) == 4_000


def test_the_model_drawn_by_hand_has_the_parameters_of_the_model():
    by_hand = initialise.drawing(layers=1)(jax.random.key(0))
    params = jax.tree.leaves(nnx.state(transformer(nnx, 1), nnx.Param))
    assert sorted(a.shape for a in by_hand) == sorted(a.shape for a in params)


def test_the_sharded_step_gives_what_jax_gives(monkeypatch):
    monkeypatch.setattr(sharded, "BLOCKS", 1)
    limit, ours = sharded.limit(), sharded.ours("nnxlite")
    for _ in range(3):
        loss = ours.run()
        assert loss.sharding.num_devices == sharded.DEVICES
        np.testing.assert_allclose(loss, limit.run(), rtol=1e-6)


def test_every_case_names_its_contenders_and_its_budgets_are_of_them():
    for case in CASES:
        contenders = case.build()
        for budget in case.budgets:
            assert {budget.subject, budget.of or budget.subject} <= contenders.keys(), case.name
