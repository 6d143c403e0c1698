"""What the benchmarks hold against each other does the same work."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import nnxlite as nnx
from benchmarks import layers, tracing, transforms
from benchmarks.harness import CASES
from benchmarks.models import dense_chain, dense_leaves


def values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def by_size(arrays):
    """Arrays in an order that does not depend on how a tree lists them."""
    return sorted(arrays, key=lambda a: (a.shape, float(a.sum())))


@pytest.mark.parametrize("work", transforms.WORKS, ids=lambda work: work.name)
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


def test_every_tracing_round_traces_anew():
    sampler = tracing.traced("nnxlite", layers=1)
    traced = [sampler.run(sampler.prepare()) for _ in range(2)]
    assert all(len(t.jaxpr.eqns) > 100 for t in traced)
    assert traced[0].jaxpr is not traced[1].jaxpr


def test_every_case_names_its_contenders_and_its_budgets_are_of_them():
    for case in CASES:
        contenders = case.build()
        for budget in case.budgets:
            assert {budget.subject, budget.of or budget.subject} <= contenders.keys(), case.name
