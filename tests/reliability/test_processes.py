"""Objects, definitions, states and compiled functions that go to other processes, and come back."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import typing as tp
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.reliability import other_process
from tests.reliability.other_process import form, go_on, make, train_step

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def environment(**names: str) -> tp.Iterator[None]:
    """Environment variables for processes that are started in the block."""
    before = dict(os.environ)
    os.environ.update(names)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def payload() -> bytes:
    model, optimizer = make()
    train_step(model, optimizer, jnp.ones((4, 2)))
    rngs = nnx.Rngs(7, noise=8)
    rngs.noise()
    return pickle.dumps((model, nnx.state(optimizer), *nnx.split(model), rngs, train_step))


@pytest.fixture(scope="module")
def there() -> tp.Iterator[tuple[bytes, dict[str, tp.Any]]]:
    """What was sent to a spawned process with another hash seed, and what it made of it."""
    context = multiprocessing.get_context("spawn")
    sent = payload()
    with environment(PYTHONHASHSEED="12345"), ProcessPoolExecutor(1, mp_context=context) as pool:
        yield sent, pool.submit(go_on, sent).result(timeout=300)


def test_the_hash_seed_is_another_one(there):
    assert there[1]["hash seed"] != hash("text")


def test_a_definition_is_the_one_of_the_other_process(there):
    """Equal, the same object, of the same hash; for the model that came and for one made there."""
    facts = there[1]
    assert facts["own graphdef"] and facts["same object"] and facts["hash"]
    assert facts["of a new model"] and facts["merged"]


def test_the_other_process_computes_the_same(there):
    """Order of paths, random keys, losses, number of traces, and the trained model."""
    sent, facts = there
    here = go_on(sent)
    assert {k: v for k, v in here.items() if k not in ("hash seed", "back", "traces")} == {
        k: v for k, v in facts.items() if k not in ("hash seed", "back", "traces")
    }
    assert here["traces"] == 0  # compiled when it was sent
    assert facts["traces"] == 1


def test_what_comes_back_is_as_if_it_had_stayed(there):
    """Definitions are interned again, decorated functions are the functions themselves."""
    sent, facts = there
    model, moments, graphdef, state, rngs, step = pickle.loads(facts["back"])
    optimizer = other_process.adam(model)
    nnx.update(optimizer, moments)
    assert step is train_step
    assert graphdef == nnx.graphdef(model) and graphdef.structure is nnx.graphdef(model).structure
    assert form(model) == facts["form"] == form(nnx.merge(graphdef, state))
    before = len(other_process.traces)
    step(model, optimizer, jnp.ones((4, 2)))
    assert len(other_process.traces) == before
    assert int(rngs.noise.count.value) == 4


def test_a_pool_maps_a_compiled_function():
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        models = [nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(2)]
        results = [*pool.map(pooled, models, [jnp.ones((1, 2))] * 2)]
    for model, result in zip(models, results):
        assert jnp.array_equal(result, model(jnp.ones((1, 2))))


@nnx.jit
def pooled(model: nnx.Linear, x: jax.Array) -> jax.Array:
    return model(x)


def run(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.reliability.other_process", name],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_does_not_inherit_a_lock():
    done = run("in_a_child_of_a_fork")
    assert done.returncode == 0, done.stderr
