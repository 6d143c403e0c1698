"""Train on the devices of several processes, with each process loading its own rows.

The same script runs alone, in several processes of one machine, and on several machines; the losses
are the same. A reader of scanned digits (scikit-learn has them) is trained twice: replicated on all
devices, each with a part of the batch ("data"), and with parameters and optimizer spread over them
("fsdp"). All processes save a checkpoint of the second one, and restore it into the first.

Result: at least 97 % of the test scans are read right, and as many after the restore; with `--quick`,
at least 90 %.

    python examples/multihost.py --quick
    python examples/multihost.py --processes 4 --quick
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import optax
from _common import options
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits

import nnxlite as nnx

BATCH, TESTED = 64, 320


class Network(nnx.Module):
    """Three layers, with noise that is the same on any number of processes."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 256, rngs=rngs)
        self.second = nnx.Linear(256, 256, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.second(nnx.relu(self.first(x))))
        return self.last(self.dropout(x))


def build() -> tuple[Network, nnx.Optimizer]:
    model = Network(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)


@nnx.jit
def train_step(model: Network, optimizer: nnx.Optimizer, batch: dict) -> jax.Array:
    def loss_of(model: Network) -> jax.Array:
        logits = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def evaluate(model: Network, accuracy: nnx.metrics.Accuracy, batch: dict) -> None:
    accuracy.update(logits=model(batch["x"]), labels=batch["y"])


class Data:
    """The scans; each process keeps those rows of a batch that its devices have."""

    def __init__(self, over: NamedSharding):
        pixels, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))  # the same in all processes
        self.x = (pixels[order] / 16).astype(np.float32)
        self.y = labels[order].astype(np.int32)
        self.over = over
        self.mine = nnx.distributed.local_rows(over, BATCH)

    def batch(self, rows: np.ndarray) -> dict:
        """The global batch with these rows, of which this process reads its own."""
        rows = rows[self.mine]
        local = {"x": self.x[rows], "y": self.y[rows]}
        return nnx.distributed.to_global(local, self.over, size=BATCH)

    def training(self, step: int) -> dict:
        return self.batch(
            np.random.default_rng(step).integers(TESTED, len(self.y), BATCH),
        )

    def accuracy(self, model: Network) -> float:
        model.eval()
        accuracy = nnx.metrics.Accuracy()
        for first in range(0, TESTED, BATCH):
            evaluate(model, accuracy, self.batch(np.arange(first, first + BATCH)))
        model.train()
        return float(accuracy.compute())


def train(plan: nnx.Plan, mesh: jax.sharding.Mesh, data: Data, steps: int):
    """Model and optimizer after training, with the losses."""
    model, optimizer = nnx.init_sharded(build, mesh, plan)
    # One step at a time: virtual devices of a CPU share threads, and collectives of two steps could mix.
    numbers = track(
        range(steps), "training", console=Console(stderr=True), disable=jax.process_index() > 0
    )
    losses = [float(train_step(model, optimizer, data.training(step))) for step in numbers]
    return model, optimizer, losses


def start(count: int, arguments: list[str]) -> int:
    """Run this script in several processes of this machine; the first status that is not 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    known = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
    environments = [{**os.environ, **known, "JAX_PROCESS_ID": str(i)} for i in range(count)]
    command = [sys.executable, __file__, *arguments]
    processes = [subprocess.Popen(command, env=env) for env in environments]
    return next(filter(None, [process.wait() for process in processes]), 0)


def main() -> None:
    chosen = options(__doc__, processes="start so many on this machine")
    if chosen.processes:
        rest = ["--out", str(chosen.out)] + ["--quick"] * chosen.quick
        sys.exit(start(chosen.processes, rest))
    nnx.distributed.initialize()  # before anything uses a device; alone, it does nothing
    first = jax.process_index() == 0

    def say(text: str) -> None:
        if first:  # what all processes have worked out, once
            print(text)

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    data = Data(NamedSharding(mesh, P("data")))
    print(
        f"process {jax.process_index()} of {jax.process_count()}: {jax.local_device_count()} of "
        f"{jax.device_count()} devices, rows {data.mine[0]} to {data.mine[-1]} of {BATCH}"
    )
    steps = 60 if chosen.quick else 600
    plans = {"data": nnx.Plan(data="data"), "fsdp": nnx.Plan(fsdp="data")}
    for name, plan in plans.items():
        begin = time.perf_counter()
        model, optimizer, losses = train(plan, mesh, data, steps)
        say(
            f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f} in {steps} steps, "
            f"{data.accuracy(model):.1%} of {TESTED} test scans right, "
            f"{time.perf_counter() - begin:.1f} s"
        )
    path = chosen.out / "multihost"
    nnx.checkpoint.save(path, model=model, optimizer=optimizer, step=steps, overwrite=True)
    restored, _ = nnx.init_sharded(build, mesh, plans["data"])
    report = nnx.checkpoint.restore(path, model=restored, optimizer=optimizer, step=0)
    say(
        f"saved by {jax.process_count()} processes, restored on one copy each: "
        f"{len(report.restored)} arrays, {data.accuracy(restored):.1%} right"
    )


if __name__ == "__main__":
    main()
