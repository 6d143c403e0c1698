"""Real processes: arrays, agreement, training, checkpoints on other numbers of processes, deaths."""

import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

import nnxlite as nnx
from tests.distributed.starting import ended, run, start
from tests.distributed.training import build, mesh_of, train

pytest.importorskip("orbax.checkpoint")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder that two processes have written into, and what each has reported."""
    folder = tmp_path_factory.mktemp("saved")
    run(2, 2, HERE / "two.py", folder)
    return folder, [json.loads((folder / f"report{index}.json").read_text()) for index in range(2)]


@pytest.fixture(scope="module")
def alone():
    """The losses of five steps in this process."""
    mesh = mesh_of(4)
    return train(mesh, build(mesh, 0), range(5))


def test_a_failure_in_one_process_is_one_in_all(saved):
    zero, one = saved[1]
    assert zero["agreed"] == "ProcessError: reading: process 1 failed: KeyError: 'column'"
    assert one["agreed"] == "KeyError: 'column'"
    assert zero["late"].startswith(
        "TimeoutError: end of epoch: 1 of 2 processes came within 0.2 s; not there: 1. Each of them"
    )


def test_training_is_that_of_one_process(saved, alone):
    for report in saved[1]:
        np.testing.assert_allclose(report["losses"], alone[:3], rtol=1e-5)
        assert report["metric"] == pytest.approx(np.mean(alone[:3]), rel=1e-5)
        model, state, table, optimizer, rngs = report["texts"]
        assert "value=Array(shape=(8, 16), dtype=float32)" in model
        assert "value=Array(shape=(8, 16), dtype=float32)" in state
        assert "float32[8,16]" in table and "mu=" in optimizer and "RngKey" in rngs


def test_what_cannot_be_saved_by_all_is_refused_by_all(saved):
    zero, one = saved[1]
    assert zero["info"] == one["info"] == 3
    assert zero["again"].startswith("FileExistsError: ")
    assert one["again"].startswith("FileExistsError: ") and "process 0 failed" in one["again"]
    for report in (zero, one):
        assert "'seen' is on no mesh of all processes, and differs: in p" in report["differs"]
        assert "'seen' is on no mesh of all processes, and differs: in p" in report["shape"]
        assert "'far' has no shard on this process; a checkpoint needs" in report["far"]
        assert "it is not saved, in process 1 Python int 1. A checkpoint" in report["lacks"]
        assert "'first.kernel' is spread over several processes. Gather it" in report["weights"]
    assert not (saved[0] / "none").exists() and not (saved[0] / "w.safetensors").exists()


def test_a_full_disk_of_one_process_costs_only_the_new_checkpoint(saved):
    folder, (zero, one) = saved
    for key in ("full", "full behind"):
        assert one[key].startswith("CheckpointError: The checkpoint could not be written into ")
        assert "File too large" in one[key] or "failed" in one[key]
        assert zero[key].startswith("CheckpointError: The checkpoint could not be written into ")
        assert "process 1 failed" in zero[key]
    assert zero["next"] and zero["steps"] == one["steps"] == [3]
    left = [path.name for path in folder.rglob("*tmp*")]
    assert left == []


def test_four_processes_go_on_where_two_have_stopped(saved, alone):
    folder, _ = saved
    shutil.copytree(folder / "good", folder / "damaged")
    about = folder / "damaged/nnxlite/metadata"
    about.write_text(about.read_text()[:-9])
    run(4, 1, HERE / "restoring.py", folder)
    reports = [json.loads((folder / f"restored{index}.json").read_text()) for index in range(4)]
    for report in reports:
        np.testing.assert_allclose(report["losses"], alone[3:], rtol=1e-5)
        assert report["step"] == 3
        assert "damaged: nnxlite/metadata is damaged (JSONDecodeError: " in report["damaged"]
    assert "MismatchError" in reports[0]["mismatch"]
    assert "CheckpointError: nnx.checkpoint.restore: " in reports[1]["mismatch"]
    assert "process 0 failed: MismatchError" in reports[1]["mismatch"]
    for index, report in enumerate(reports):
        if index < 3:
            assert report["uneven"].startswith(
                "CheckpointError: 'model.first.kernel' was saved as float32[8,16], which "
            )
            assert "Restore on a mesh of a size that divides it" in report["uneven"]
    assert "'model.first.kernel' has no shard on process" in reports[3]["uneven"]


def test_one_process_goes_on_where_two_have_stopped(saved, alone):
    mesh = mesh_of(2)
    items = build(mesh, 1)
    assert nnx.checkpoint.restore(saved[0] / "good", **items, step=0).values["step"] == 3
    np.testing.assert_allclose(train(mesh, items, range(3, 5)), alone[3:], rtol=1e-5)


def test_a_signal_to_some_processes_saves_and_stops_all(saved):
    """One that stopped by itself left the others waiting in their next collective operation."""
    zero, one = ({key: report[key] for key in ("struck", "free", "data")} for report in saved[1])
    assert zero == one and zero["data"]
    struck = zero["struck"]
    assert struck["interrupted"] and struck["steps"] == [struck["done"]]
    assert 2 < struck["done"] < 100
    assert zero["free"] == {"interrupted": False, "done": 3, "steps": [3], "handlers": True}


DYING = """
import os, sys, threading, signal
import nnxlite as nnx
import jax
from tests.distributed.training import build, join, mesh_of, train
join(heartbeat_timeout_seconds=6, shutdown_timeout_seconds=6)
folder = sys.argv[1]
mesh = mesh_of(2)
items = build(mesh, 0)
train(mesh, items, range(1))
nnx.checkpoint.save(folder, **items, step=1)
train(mesh, items, range(1, 2))
if jax.process_index() == 1:
    import orbax.checkpoint as ocp  # it dies when it is to write its part
    ocp.PyTreeCheckpointHandler.save = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
nnx.checkpoint.save(folder, **items, step=2, overwrite=True)
"""


def test_a_process_that_is_killed_while_saving_ends_all_and_costs_no_checkpoint(tmp_path, alone):
    """JAX's heartbeats end the others."""
    processes = start(2, 1, "-c", DYING, tmp_path / "last")
    errors = ended(processes, 120)
    assert processes[1].returncode == -signal.SIGKILL
    assert processes[0].returncode != 0
    assert re.search(r"unhealthy|not there: 1|heartbeat", errors[0]), errors[0][-3000:]
    mesh = mesh_of(4)
    items = build(mesh, 1)
    assert nnx.checkpoint.restore(tmp_path / "last", **items, step=0).values["step"] == 1
    np.testing.assert_allclose(train(mesh, items, range(1, 2)), alone[1:2], rtol=1e-5)
