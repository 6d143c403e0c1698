"""Processes that are killed, that run out of space, and that go on where another one stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import xla_flags

ROOT = Path(__file__).parents[2]


def python(*args: object, devices: int = 1, **options) -> str:
    """The output of a Python process, which has to succeed."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": xla_flags(devices),
    }
    done = subprocess.run(
        [sys.executable, *map(str, args)], env=env, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_fifty_killed_processes_never_cost_the_last_good_checkpoint(tmp_path):
    inside, _ = python(ROOT / "tests/checkpoint/crash.py", tmp_path, 50, 0).split(maxsplit=1)
    assert int(inside) > 25


FULL_DISK = """
import resource, signal, sys
import numpy as np
import nnxlite as nnx

folder, managed = sys.argv[1], sys.argv[2] == "True"
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
small, large = ({"w": nnx.Param(np.ones(n, "f") * n)} for n in (10, 1_000_000))
if managed:
    manager = nnx.checkpoint.Manager(folder, keep=1)
    save = lambda step, w: (manager.save(step, w=w), manager.wait())
    load = lambda w: manager.restore(w=w)
else:
    save = lambda step, w: nnx.checkpoint.save(folder + "/c", w=w, overwrite=True)
    load = lambda w: nnx.checkpoint.restore(folder + "/c", w=w)
save(1, small)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    save(2, {"w": nnx.Param(np.random.default_rng(0).normal(size=1_000_000))})
except Exception as error:
    print("refused:", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
target = {"w": nnx.Param(np.zeros(10, "f"))}
load(target)
assert target["w"].tolist() == [10.0] * 10
save(3, large)
print("done")
"""


@pytest.mark.parametrize("managed", [False, True])
def test_a_full_disk_costs_nothing_but_the_new_checkpoint(tmp_path, managed):
    output = python("-c", FULL_DISK, tmp_path, managed, timeout=120)
    assert "refused: The checkpoint could not be written into " in output
    assert "those that are there are as they were." in output and "File too large" in output
    assert output.endswith("done\n") and not list(tmp_path.glob("*tmp*"))


RESUME = """
import hashlib, sys
import jax, numpy as np
import nnxlite as nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.checkpoint.models import batch, bits, build, step

folder, start = sys.argv[1], int(sys.argv[2])
mesh = jax.make_mesh((len(jax.devices()),), ("data",), (jax.sharding.AxisType.Auto,))
over_data, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
model, optimizer = build(start)  # other parameters in each process
items = dict(model=model, optimizer=optimizer, metrics=nnx.MultiMetric(loss=nnx.metrics.Average("loss")))
for item in items.values():
    nnx.update(item, jax.device_put(nnx.state(item), replicated))
if start:
    assert nnx.checkpoint.restore(folder, **items, cast=None).values["position"] == start
for position in range(start, 4):
    if position == 2 != start:
        nnx.checkpoint.save(folder, **items, position=position)
    step(*items.values(), jax.device_put(batch(position), over_data))
print(hashlib.sha256(repr(sorted(bits(*items.values()).items())).encode()).hexdigest())
"""


def test_a_new_process_on_eight_devices_goes_on_bit_for_bit(tmp_path):
    whole = python("-c", RESUME, tmp_path / "c", 0, devices=8)
    assert python("-c", RESUME, tmp_path / "c", 2, devices=8) == whole
