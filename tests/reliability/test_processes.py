"""Objects, definitions, states and compiled functions that go to other processes, and come back."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import nnxlite as nnx
from tests.reliability import other_process as other
from tests.reliability.other_process import X, form, go_on, train_step

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
    model, optimizer = other.make()
    train_step(model, optimizer, X)
    rngs = nnx.Rngs(7, noise=8)
    rngs.noise()
    sent = other.packed(model, optimizer, rngs, train_step)
    there, own, back = pool.submit(go_on, sent).result(timeout=300)
    assert own == {"hash seed": own["hash seed"], "traces": 1} and own["hash seed"] != hash("text")
    for name in ("own graphdef", "same object", "hash", "of a new model", "merged"):
        assert there[name] is True, name
    here, own, stayed = go_on(sent)
    assert here == there and own["traces"] == 0  # compiled when it was sent

    model, optimizer, graphdef, state, rngs, step = other.unpacked(back)
    assert step is train_step and int(rngs.noise.count.value) == 4
    assert graphdef == nnx.graphdef(model) and graphdef.structure is nnx.graphdef(model).structure
    assert form(model) == form(other.unpacked(stayed)[0]) == form(nnx.merge(graphdef, state))
    before = len(other.traces)
    step(model, optimizer, X)
    assert len(other.traces) == before


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
