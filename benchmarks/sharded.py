"""A training step on eight devices: what the engine adds, what it weighs, what compilation takes.

All of this runs in a process of its own, as a process has its devices for life. The process that
measures asks for one sample after the other, so that the contenders take turns in one process here, too.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import time
import typing as tp
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.harness import (
    Budget,
    Calls,
    Once,
    Pace,
    Sampler,
    case,
    compiles,
    sample_without_collector,
)
from benchmarks.loops import by_hand
from benchmarks.models import WIDTH, library, train_body, with_adam
from benchmarks.stages import entered

DEVICES = 8
BLOCKS = 4
LAYERS = 48
COUNTS = (1, 2, 4, 8)
FLAG = f"--xla_force_host_platform_device_count={DEVICES}"


# In the process with eight devices -----------------------------------------------------------------


def mesh_of(devices: int) -> Mesh:
    """A mesh of the first devices, with one axis."""
    return jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def training(
    name: str, plan: str = "fsdp", devices: int = DEVICES
) -> tuple[tp.Any, tuple[tp.Any, ...], tuple[jax.Array, jax.Array]]:
    """Body, objects and data of a step; data are divided, and with the plan "fsdp" kernels, too."""
    nnx = library(name)
    mesh = mesh_of(devices)
    divided = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())

    def placed(x: jax.Array) -> jax.Array:
        return jax.device_put(x, divided if x.ndim == 2 and plan == "fsdp" else whole)

    objects = with_adam(nnx, BLOCKS)
    if name == "nnxlite":
        axes = {"data": "data", "fsdp": "data" if plan == "fsdp" else None}
        nnx.shard(objects, mesh, nnx.Plan(**axes, min_size=WIDTH * WIDTH))
    else:
        nnx.update(objects, jax.tree.map(placed, nnx.state(objects)))
    batch = jnp.ones((4 * DEVICES, WIDTH)), jnp.zeros((4 * DEVICES, WIDTH))
    return train_body(nnx), objects, jax.device_put(batch, divided)


def limit(plan: str = "fsdp") -> Calls:
    """The step under `jax.jit`, on leaves with the same shardings."""
    body, objects, data = training("nnxlite", plan)
    step, leaves = by_hand(library("nnxlite"), body, objects)
    return Calls(lambda: jax.block_until_ready(step(leaves, *data)))


def ours(name: str, plan: str = "fsdp") -> Calls:
    """The step under `nnx.jit`."""
    body, objects, data = training(name, plan)
    step = library(name).jit(body)
    return Calls(lambda: jax.block_until_ready(step(*objects, *data)))


def engine(devices: int) -> Calls:
    """All that is done for a call besides the program: its leaves are found, what it wrote is stored."""
    body, objects, data = training("nnxlite", devices=devices)
    step = library("nnxlite").jit(body)
    for _ in range(3):
        step(*objects, *data)
    inputs, call = entered(step, *objects, *data)
    compiled = step._compiled
    written = compiled.jitted(*compiled.groups(call, inputs.leaves))

    def run() -> object:
        inputs, call = entered(step, *objects, *data)
        compiled.groups(call, inputs.leaves)
        return compiled.finish(inputs, written)

    return Calls(run)


# Compilation


@dataclass
class Seldom:
    """`run` takes so long that it runs a few times only, and further samples are these again."""

    run: tp.Callable[[], object]
    times: int = 3
    seconds: list[float] = field(default_factory=list)
    samples: int = 0

    def warm(self, pace: Pace) -> None:
        for _ in range(self.times):
            start = time.perf_counter()
            self.run()
            self.seconds.append(time.perf_counter() - start)

    def sample(self) -> float:
        self.samples += 1
        return self.seconds[self.samples % self.times]


def decoder(nnx: tp.Any, scanned: bool) -> tp.Any:
    """Residual perceptrons, a list of them or a stack."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.relu(self.up(x)))

    class Layers(nnx.Module):
        def __init__(self, rngs):
            if scanned:
                keys = jax.random.split(rngs.params(), LAYERS)
                self.layers = nnx.vmap(lambda key: Layer(nnx.Rngs(key)))(keys)
            else:
                self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

        def __call__(self, x):
            if scanned:
                body = lambda x, layer: layer(x)
                return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
            for layer in self.layers:
                x = layer(x)
            return x

    return Layers(nnx.Rngs(0))


def divided_like(mesh: Mesh, tree: tp.Any) -> tp.Any:
    """Kernels along an axis of features, all else whole."""

    def placed(x: jax.Array) -> jax.Array:
        last = x.ndim >= 2 and x.shape[-1] >= WIDTH and x.shape[-2] >= WIDTH
        spec = PartitionSpec(*(None,) * (x.ndim - 1), "data") if last else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(placed, tree)


def compiling(name: str, scanned: bool) -> Seldom:
    """Trace, lower and compile a training step of many layers under `nnx.jit`."""
    nnx, mesh = library(name), mesh_of(DEVICES)
    model = decoder(nnx, scanned)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    objects = model, optimizer
    nnx.update(objects, divided_like(mesh, nnx.state(objects)))
    x = jax.device_put(jnp.ones((4 * DEVICES, WIDTH)), NamedSharding(mesh, PartitionSpec("data")))

    def run() -> None:
        body = train_body(nnx)
        step = nnx.jit(
            lambda *args: body(*args)
        )  # another function each time, which is traced again
        jax.clear_caches()
        step.lower(*objects, x, x).compile()

    return Seldom(run)


def compiling_by_hand(scanned: bool) -> Seldom:
    """The same step, written as functions of dictionaries of arrays."""
    mesh, transformation = mesh_of(DEVICES), optax.adam(1e-3)
    layer = {
        "up": jnp.ones((WIDTH, 4 * WIDTH)),
        "up_bias": jnp.zeros(4 * WIDTH),
        "down": jnp.ones((4 * WIDTH, WIDTH)),
        "down_bias": jnp.zeros(WIDTH),
    }
    layers: tp.Any = [layer] * LAYERS
    if scanned:
        layers = jax.tree.map(lambda x: jnp.stack([x] * LAYERS), layer)
    state = divided_like(mesh, (layers, transformation.init(layers)))
    x = jax.device_put(jnp.ones((4 * DEVICES, WIDTH)), NamedSharding(mesh, PartitionSpec("data")))

    def apply(layer, x):
        y = jax.nn.relu(x @ layer["up"] + layer["up_bias"].reshape(1, -1))
        return x + y @ layer["down"] + layer["down_bias"].reshape(1, -1)

    def loss_of(layers, x, y):
        if scanned:
            x = jax.lax.scan(lambda x, layer: (apply(layer, x), None), x, layers)[0]
        else:
            for layer in layers:
                x = apply(layer, x)
        return jnp.mean((x - y) ** 2)

    def step(state, x, y):
        layers, moments = state
        loss, grads = jax.value_and_grad(loss_of)(layers, x, y)
        updates, moments = transformation.update(grads, moments, layers)
        return loss, (optax.apply_updates(layers, updates), moments)

    def run() -> None:
        jax.clear_caches()
        jax.jit(lambda *args: step(*args)).lower(state, x, x).compile()

    return Seldom(run)


# Memory


def planned_bytes() -> float:
    """Bytes of model and optimizer on a device, by the plan."""
    nnx = library("nnxlite")
    objects = with_adam(nnx, BLOCKS)
    plan = nnx.Plan(data="data", fsdp="data", min_size=WIDTH * WIDTH)
    return nnx.plan_layout(objects, mesh_of(DEVICES), plan).bytes_per_device


def compiled_bytes() -> float:
    """Bytes of the arguments of a step on a device, without the data, by XLA."""
    body, objects, data = training("nnxlite")
    analysis = library("nnxlite").jit(body).lower(*objects, *data).compile().memory_analysis()
    return analysis.argument_size_in_bytes - sum(x.nbytes // DEVICES for x in data)


Build = tp.Callable[[], Sampler]

CASES: dict[str, dict[str, Build]] = {
    # The reference is the first, since importing it changes settings of JAX, after which everything
    # compiles again.
    plan: {
        "flax": functools.partial(ours, "flax", plan),
        "limit": functools.partial(limit, plan),
        "nnxlite": functools.partial(ours, "nnxlite", plan),
    }
    for plan in ("fsdp", "data")
}
CASES["engine"] = {f"{n}-devices": functools.partial(engine, n) for n in COUNTS}
CASES |= {
    form: {
        "flax": functools.partial(compiling, "flax", form == "scanned"),
        "limit": functools.partial(compiling_by_hand, form == "scanned"),
        "nnxlite": functools.partial(compiling, "nnxlite", form == "scanned"),
    }
    for form in ("unrolled", "scanned")
}
CASES["memory"] = {"plan": lambda: Once(planned_bytes), "XLA": lambda: Once(compiled_bytes)}


def serve() -> None:
    """Answer each line of the input, `warm CASE NAME ROUNDS BATCH CALLS` or `sample CASE NAME`."""
    contenders: dict[tuple[str, str], Sampler] = {}
    for line in sys.stdin:
        action, name, contender, *pace = line.split()
        key = name, contender
        before = compiles.value
        try:
            if action == "warm":
                contenders[key] = CASES[name][contender]()
                contenders[key].warm(Pace(int(pace[0]), float(pace[1]), int(pace[2])))
                answer = "0 0"
            else:
                seconds = sample_without_collector(contenders[key])
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

    def __init__(self, case: str, name: str) -> None:
        self.name = f"{case} {name}"

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


def contenders(name: str) -> dict[str, tp.Callable[[], Elsewhere]]:
    """Those of a case, each in the other process."""
    return {key: functools.partial(Elsewhere, name, key) for key in CASES[name]}


@case("loops", f"sharded training step, {DEVICES} devices", Budget(1.1, "limit"))
def sharded():
    """Adam on a stack of blocks whose kernels, and the data, are divided among eight devices."""
    return contenders("fsdp")


@case("sharded", f"training step, {DEVICES} devices, parameters on all", Budget(1.1, "limit"))
def data_parallel():
    """The same, with the data divided and nothing else."""
    return contenders("data")


@case("sharded", "work of the engine for a step", Budget(1.1, "1-devices", "8-devices"))
def work():
    """It handles arrays, however many devices each is on."""
    return contenders("engine")


@case("sharded", f"compile {LAYERS} layers, unrolled", Budget(1.1, "limit"))
def unrolled():
    """From Python to the program of eight devices, for a list of layers."""
    return contenders("unrolled")


@case("sharded", f"compile {LAYERS} layers, scanned", Budget(1.3, "limit"))
def scanned():
    """The same for a stack of layers, which is traced once."""
    return contenders("scanned")


@case("sharded", "state on a device", Budget(1.0, "plan", "XLA"), unit="bytes")
def memory():
    """What XLA needs for the arguments of a step is what the plan said."""
    return contenders("memory")


if __name__ == "__main__":
    serve()
