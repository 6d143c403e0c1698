"""Processes that are killed, and that run out of space."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import xla_flags

ROOT = Path(__file__).parents[2]


def python(*args, timeout=None):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(1)}
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_fifty_killed_processes_never_cost_the_last_good_checkpoint(tmp_path):
    inside, _ = python(ROOT / "tests/checkpoint/crash.py", tmp_path, 50, 0).split(maxsplit=1)
    assert int(inside) > 25


FULL_DISK = """
import resource, signal, sys
import numpy as np
import nnxlite as nnx

path, manager = sys.argv[1] + "/c", nnx.checkpoint.Manager(sys.argv[1] + "/run", keep=1)
plain = lambda step, w: nnx.checkpoint.save(path, w=w, overwrite=True)
managed = lambda step, w: (manager.save(step, w=w), manager.wait())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
for save, folder in ((plain, path), (managed, manager.directory / "1")):
    save(1, nnx.Param(np.ones(10, "f")))
    limit(100_000)
    try:
        save(2, nnx.Param(np.random.default_rng(0).normal(size=1_000_000)))
    except Exception as error:
        print("refused:", error)
    limit(resource.RLIM_INFINITY)
    target = nnx.Param(np.zeros(10, "f"))
    nnx.checkpoint.restore(folder, w=target)
    assert target.tolist() == [1.0] * 10
    save(3, nnx.Param(np.ones(1_000_000, "f")))
"""


def test_a_full_disk_costs_nothing_but_the_new_checkpoint(tmp_path):
    refusals = python("-c", FULL_DISK, tmp_path, timeout=120).splitlines()
    assert len(refusals) == 2
    for text in refusals:
        assert text.startswith("refused: The checkpoint could not be written into ")
        assert "those that are there are as they were." in text and "File too large" in text
    assert not list(tmp_path.rglob("*tmp*"))
