"""Programs on several CPU devices are waited for, so that XLA's threads can serve those in flight."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import nnxlite as nnx
from nnxlite.transforms import _checks
from tests.conftest import xla_flags
from tests.sharding.meshes import mesh_of

ROWS, WHOLE = PartitionSpec("data"), PartitionSpec()


def step(model, x):
    model.value = model.value + 1.0
    return x * 2


def placed(spec=WHOLE):
    return NamedSharding(mesh_of(), spec)


# Each a function of a Variable and an array on eight devices.
PROGRAMS = {
    "jit": lambda: nnx.jit(step),
    "jit without a result": lambda: nnx.jit(lambda m, x: (step(m, x), None)[1]),
    "out_shardings": lambda: nnx.jit(step, out_shardings=placed(ROWS)),
    "in_shardings": lambda: nnx.jit(step, in_shardings=(placed(), placed(ROWS))),
    "donate": lambda: nnx.jit(step, donate="written"),
    "compiled": lambda: nnx.jit(step).lower(*arguments()).compile(),
    "filter_jit": lambda: nnx.filter_jit(step),
    "shard_map": lambda: nnx.shard_map(
        lambda m, x: x, mesh=mesh_of(), in_specs=(WHOLE, ROWS), out_specs=ROWS
    ),
    "pmap": lambda: nnx.pmap(lambda m, x: x + m[...], in_axes=(None, 0)),
}


def arguments(sharding=None):
    sharding = placed() if sharding is None else sharding
    rows = placed(ROWS) if isinstance(sharding, NamedSharding) else sharding
    variable = nnx.Variable(jax.device_put(jnp.zeros(()), sharding))
    return variable, jax.device_put(jnp.arange(8.0), rows)


@pytest.fixture
def waits(monkeypatch):
    seen = []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: seen.append(x) or x)
    return seen


@pytest.mark.parametrize("kind", PROGRAMS)
def test_each_fourth_program_on_several_cpu_devices_is_waited_for(kind, waits):
    program = PROGRAMS[kind]()
    variable, x = (nnx.Variable(0.0), jnp.arange(8.0)) if kind == "pmap" else arguments()
    for _ in range(12):
        program(variable, x)
    assert len(waits) == 12 // _checks.MOST_IN_FLIGHT
    assert all(len(leaf.devices()) == 8 for leaf in waits)


@pytest.mark.parametrize("kind", ["jit", "donate", "filter_jit"])
def test_programs_on_one_device_are_not(kind, waits):
    program, given = PROGRAMS[kind](), arguments(jax.devices("cpu")[3])
    for _ in range(12):
        program(*given)
    assert not waits


def test_without_several_devices_a_function_is_not_changed(monkeypatch, waits):
    monkeypatch.setattr(jax, "local_device_count", lambda backend: 1)
    jitted, filtered = (jit(lambda m, x: step(m, x)) for jit in (nnx.jit, nnx.filter_jit))
    variable, x = arguments()
    for _ in range(8):
        jitted(variable, x)
        filtered(variable, x)
    assert not waits

    def no_backend(backend):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_device_count", no_backend)
    assert not _checks.has_several_cpus()


UNREAD = """
import jax, numpy as np, nnxlite as nnx
mesh = nnx.make_mesh(data=8)
model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
layout = nnx.shard(model, mesh, "data")
@nnx.jit
def step(model, x):
    grads = nnx.grad(lambda m: ((m(x) - x) ** 2).mean())(model)
    model.kernel -= 1e-3 * grads["kernel"].value
x = layout.put(np.ones((64, 64), "float32"))
for _ in range(100):
    step(model, x)
print(float(model.kernel.value.sum()))
"""


def test_many_steps_whose_results_nobody_reads():
    """XLA ended the process after 40 seconds."""
    run = subprocess.run(
        [sys.executable, "-c", UNREAD],
        env={**os.environ, "XLA_FLAGS": xla_flags(8)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr[-1000:]
