"""Train on the devices of several processes, with each process loading its own rows.

The same script runs alone, in several processes of one machine, and on several machines; the losses are
the same. A reader of scanned digits (scikit-learn has them) is trained with parameters and optimizer
divided between all devices. All processes save a checkpoint, and restore it into a replicated model.

    pip install "nnxlite[examples,checkpoint]"
    python examples/multihost.py --quick
    python examples/multihost.py --processes 4 --quick

Result: at least 97 % of the test scans are read right, as after the restore; with `--quick`, 90 %.
"""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import optax
from _common import options
from jax.sharding import NamedSharding, PartitionSpec
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
def train_step(model: Network, optimizer: nnx.Optimizer, images, labels) -> jax.Array:
    def loss_fn(model: Network) -> jax.Array:
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def evaluate(model: Network, accuracy: nnx.metrics.Accuracy, images, labels) -> None:
    accuracy.update(logits=model(images), labels=labels)


def start(count: int, arguments: list[str]) -> int:
    """Run this script in several processes of this machine; the first status that is not 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    env = {**os.environ, "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
    command = [sys.executable, __file__, *arguments]
    runs = [subprocess.Popen(command, env=env | {"JAX_PROCESS_ID": str(i)}) for i in range(count)]
    return next(filter(None, [run.wait() for run in runs]), 0)


def main() -> None:
    run = options(__doc__, processes="start so many on this machine")
    if run.processes:
        sys.exit(start(run.processes, ["--out", str(run.out)] + ["--quick"] * run.quick))
    if "JAX_NUM_PROCESSES" in os.environ:  # of `start`; under Slurm or Open MPI: initialize()
        count, number = (int(os.environ[f"JAX_{name}"]) for name in ("NUM_PROCESSES", "PROCESS_ID"))
        jax.distributed.initialize(num_processes=count, process_id=number)
    mesh = nnx.make_mesh(data=-1)
    over = NamedSharding(mesh, PartitionSpec("data"))
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))  # the same in all processes
    images, labels = (pixels[order] / 16).astype("float32"), labels[order].astype("int32")

    def divided(data: np.ndarray, rows: np.ndarray) -> jax.Array:
        """These rows as a global array, of which this process reads its own."""
        read = lambda index: data[rows[index[0]]]  # index: a slice for each axis
        return jax.make_array_from_callback((len(rows), *data.shape[1:]), over, read)

    def batch(rows: np.ndarray) -> tuple[jax.Array, jax.Array]:
        return divided(images, rows), divided(labels, rows)

    def accuracy(model: Network) -> float:
        metric, model = nnx.metrics.Accuracy(), nnx.view(model, deterministic=True)
        for rows in np.arange(TESTED).reshape(-1, BATCH):
            evaluate(model, metric, *batch(rows))
        return 100 * float(metric.compute())

    model, optimizer = nnx.init_sharded(build, mesh, nnx.Plan(fsdp="data"))
    for step in nnx.training.loop(60 if run.quick else 600, progress=jax.process_index() == 0):
        rows = np.random.default_rng(step.number).integers(TESTED, len(labels), BATCH)
        # Read at once: virtual devices of a CPU share threads, which steps in advance would block.
        step.log(loss=float(train_step(model, optimizer, *batch(rows))))
    path, right = run.out / "multihost", accuracy(model)
    nnx.checkpoint.save(path, model=model, optimizer=optimizer, overwrite=True)
    restored = nnx.init_sharded(build, mesh, nnx.Plan(data="data"))
    nnx.checkpoint.restore(path, model=restored[0], optimizer=restored[1])
    again = accuracy(restored[0])
    if jax.process_index() == 0:
        print(f"trained by {jax.process_count()} processes on {jax.device_count()} devices")
        print(f"{right:.1f} % of {TESTED} test scans right; {again:.1f} % after the restore")


if __name__ == "__main__":
    main()
