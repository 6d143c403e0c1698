"""A training step on eight devices, in a process of its own, as a process has its devices for life.

The process that measures asks for one sample after the other, so that the contenders take turns in one
process here, too.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import typing as tp
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.harness import Budget, Calls, Pace, case, compiles, sample_without_collector
from benchmarks.loops import by_hand
from benchmarks.models import WIDTH, library, train_body, with_adam

DEVICES = 8
BLOCKS = 4
FLAG = f"--xla_force_host_platform_device_count={DEVICES}"


# In the process with eight devices -----------------------------------------------------------------


def training(name: str) -> tuple[tp.Any, tuple[tp.Any, ...], tuple[jax.Array, jax.Array]]:
    """Body, objects and data of a step; parameters are on all devices, kernels and data divided."""
    nnx = library(name)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    divided = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())

    def placed(x: jax.Array) -> jax.Array:
        return jax.device_put(x, divided if x.ndim == 2 else whole)

    objects = with_adam(nnx, BLOCKS)
    state = nnx.state(objects)
    nnx.update(objects, jax.tree.map(placed, state))
    data = placed(jnp.ones((4 * DEVICES, WIDTH))), placed(jnp.zeros((4 * DEVICES, WIDTH)))
    return train_body(nnx), objects, data


def limit() -> Calls:
    """The step under `jax.jit`, on leaves with the same shardings."""
    body, objects, data = training("nnxlite")
    step, leaves = by_hand(library("nnxlite"), body, objects)
    return Calls(lambda: jax.block_until_ready(step(leaves, *data)))


def ours(name: str) -> Calls:
    """The step under `nnx.jit`."""
    body, objects, data = training(name)
    step = library(name).jit(body)
    return Calls(lambda: jax.block_until_ready(step(*objects, *data)))


CONTENDERS = {
    # The first, since importing Flax changes settings of JAX, after which everything compiles again.
    "flax": functools.partial(ours, "flax"),
    "limit": limit,
    "nnxlite": functools.partial(ours, "nnxlite"),
}


def serve() -> None:
    """Answer each line of the input, `warm NAME ROUNDS BATCH CALLS` or `sample NAME`."""
    contenders: dict[str, Calls] = {}
    for line in sys.stdin:
        action, name, *pace = line.split()
        before = compiles.value
        try:
            if action == "warm":
                contenders[name] = CONTENDERS[name]()
                contenders[name].warm(Pace(int(pace[0]), float(pace[1]), int(pace[2])))
                answer = "0 0"
            else:
                seconds = sample_without_collector(contenders[name])
                answer = f"{seconds} {compiles.value - before}"
        except Exception as error:  # the other contenders go on
            missing = isinstance(error, ModuleNotFoundError)
            answer = f"{'missing' if missing else 'failed'} {error.name if missing else error!r}"
        print(" ".join(answer.split()), flush=True)


# In the process that measures ----------------------------------------------------------------------


@functools.cache
def process() -> subprocess.Popen[str]:
    """The process with eight devices; it ends with this one."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}"
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sharded"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    atexit.register(child.kill)
    return child


class Elsewhere:
    """A contender in the process with eight devices."""

    def __init__(self, name: str) -> None:
        self.name = name

    def warm(self, pace: Pace) -> None:
        self._ask(f"warm {self.name} {pace.rounds} {pace.batch} {pace.warm_calls}")

    def sample(self) -> float:
        seconds, compiled = self._ask(f"sample {self.name}")
        compiles.value += int(compiled)
        return float(seconds)

    def _ask(self, line: str) -> list[str]:
        child = process()
        assert child.stdin is not None and child.stdout is not None
        print(line, file=child.stdin, flush=True)
        kind, rest = child.stdout.readline().split(maxsplit=1)
        if kind == "missing":
            raise ModuleNotFoundError(rest, name=rest.strip())
        if kind == "failed":
            raise RuntimeError(rest.strip())
        return [kind, rest]


@case("loops", f"sharded training step, {DEVICES} devices", Budget(1.1, "limit"))
def sharded():
    """Adam on a stack of blocks whose kernels, and the data, are divided among eight devices."""
    return {name: functools.partial(Elsewhere, name) for name in CONTENDERS}


if __name__ == "__main__":
    serve()
