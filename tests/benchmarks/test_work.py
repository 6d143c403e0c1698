"""What the benchmarks hold against each other does the same work."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from benchmarks import growth, initialise, layers, memory, sharded, throughput, transforms
from benchmarks.harness import CASES, Pace
from benchmarks.models import dense_chain, dense_leaves, transformer


def by_size(tree):
    """Its arrays in an order that does not depend on how a tree lists them."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return sorted(arrays, key=lambda a: (a.shape, float(a.sum())))


EVERY = transforms.WORKS + transforms.OUTSIDE + transforms.INSIDE


@pytest.mark.parametrize("work", EVERY, ids=lambda work: work.name)
def test_a_transform_gives_what_jax_gives_on_flat_leaves(work):
    found = by_size(work.objects(nnx, dense_chain(nnx)))
    for mine, theirs in zip(found, by_size(work.limit(dense_leaves())()), strict=True):
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
    for sampler, low, high in ((kept, 10_000, 10_200), (apart, 0, 100)):
        sampler.warm(Pace())
        assert low <= sampler.sample() < high
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


@pytest.mark.parametrize("part", throughput.PARTS)
@pytest.mark.filterwarnings("ignore")  # of the peers
def test_a_quick_run_of_throughput_has_figures_that_agree(part, tmp_path):
    file = tmp_path / "figures.json"
    assert throughput.main(["--quick", "--rounds=2", f"--only={part}", f"--json={file}"]) == 0
    for figures in json.loads(file.read_text())["workloads"]:
        assert {"limit", "nnxlite"} <= figures["contenders"].keys()
        assert figures["failed"].keys() <= {"nnxlite, cudnn", "flax", "flax, by steps", "equinox"}


def test_no_contender_of_throughput_is_built_after_the_deadline(capsys):
    assert throughput.main(["--quick", "--only=small", "--seconds=0"]) == 1
    assert "no time was left for it" in capsys.readouterr().out
