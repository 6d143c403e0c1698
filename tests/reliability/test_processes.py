"""Objects, definitions, states and compiled functions that go to other processes, and come back."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax
import pytest

import nnxlite as nnx
from tests.reliability import other_process
from tests.reliability.other_process import X, adam, form, go_on, make, pooled, train_step

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool():
    """A spawned process with another hash seed."""
    context = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as environment, ProcessPoolExecutor(1, context) as pool:
        environment.setenv("PYTHONHASHSEED", "12345")
        pool.submit(int).result(timeout=300)  # it is started now
        yield pool


def test_what_goes_to_another_process_is_the_same_there_and_comes_back(pool):
    """Order of paths, definitions, random keys, losses, number of traces, and the trained model."""
    model, optimizer = make()
    train_step(model, optimizer, X)
    rngs = nnx.Rngs(7, noise=8)
    rngs.noise()
    sent = pickle.dumps((model, nnx.state(optimizer), *nnx.split(model), rngs, train_step))
    there, own, back = pool.submit(go_on, sent).result(timeout=300)
    assert own == {"hash seed": own["hash seed"], "traces": 1} and own["hash seed"] != hash("text")
    for name in ("own graphdef", "same object", "hash", "of a new model", "merged"):
        assert there[name] is True, name
    here, own, _ = go_on(sent)
    assert here == there and own["traces"] == 0  # compiled when it was sent

    model, moments, graphdef, state, rngs, step = pickle.loads(back)
    optimizer = adam(model)
    nnx.update(optimizer, moments)
    assert step is train_step
    assert graphdef == nnx.graphdef(model) and graphdef.structure is nnx.graphdef(model).structure
    assert form(model) == there["form"] == form(nnx.merge(graphdef, state))
    before = len(other_process.traces)
    step(model, optimizer, X)
    assert len(other_process.traces) == before
    assert int(rngs.noise.count.value) == 4


def test_a_pool_maps_a_compiled_function(pool):
    models = [nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(2)]
    for model, result in zip(models, pool.map(pooled, models, [X] * 2)):
        assert jax.numpy.array_equal(result, model(X))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_does_not_inherit_a_lock():
    done = subprocess.run(
        [sys.executable, "-m", "tests.reliability.other_process"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
