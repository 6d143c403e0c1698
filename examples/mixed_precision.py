"""Train a reader of digits in float32, bfloat16 and float16, and compare.

One program trains all three: `nnx.Policy` sets what the layers compute in, parameters and optimizer
stay in float32. float16 has a small exponent, so its loss is scaled, and a step that overflows is
skipped. Each training scan is changed at random before it is used (moved, brightened or partly
erased); each block of the network is computed again for the gradient. The test scans are judged on
all devices, each its own part.

    python examples/mixed_precision.py            # half a minute on two CPU cores
    python examples/mixed_precision.py --quick    # some seconds, and weaker networks

Result: all three read at least 95 % of the 360 test scans, and a copy for serving, stored in 16 bits,
takes half of the memory and reads as many of them within one percent.

Where there is one device only, the CPU is divided into eight virtual ones. `mixed_precision.png` in
the output folder shows the losses and the loss scale.
"""

from __future__ import annotations

import argparse
import sys
import typing as tp
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlite as nnx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH, WIDTH, BLOCKS = 128, 96, 3
POLICIES = {name: nnx.Policy(compute=name) for name in ("float32", "bfloat16", "float16")}


class Augment(nnx.Module):
    """Changes one scan (8, 8) in one of four ways, each as often as the others."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rngs = rngs

    def __call__(self, scan: jax.Array) -> jax.Array:
        ways = [self.keep, self.move, self.brighten, self.erase]
        kind = jax.random.randint(self.rngs.augment(), (), 0, len(ways))
        return nnx.switch(kind, ways, scan, self.rngs.augment())

    @staticmethod
    def keep(scan: jax.Array, key: jax.Array) -> jax.Array:
        return scan

    @staticmethod
    def move(scan: jax.Array, key: jax.Array) -> jax.Array:
        """By one pixel at most, each way."""
        down, right = jax.random.randint(key, (2,), 0, 3)
        return jax.lax.dynamic_slice(jnp.pad(scan, 1), (down, right), scan.shape)

    @staticmethod
    def brighten(scan: jax.Array, key: jax.Array) -> jax.Array:
        return scan * jax.random.uniform(key, (), minval=0.6, maxval=1.4)

    @staticmethod
    def erase(scan: jax.Array, key: jax.Array) -> jax.Array:
        """A twelfth of the pixels."""
        return jnp.where(jax.random.bernoulli(key, 1 / 12, scan.shape), 0.0, scan)


@nnx.split_rngs(splits=BATCH)
@nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), 0))
def augmented(augment: Augment, scan: jax.Array) -> jax.Array:
    """Scans (BATCH, 8, 8), each changed with a random stream of its own."""
    return augment(scan)


class Block(nnx.Module):
    """A layer after a normalization, added to what came in."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.gelu(self.linear(self.norm(x)))


class Reader(nnx.Module):
    """Logits (batch, 10) of scans (batch, 8, 8)."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.last = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, scans: jax.Array) -> jax.Array:
        x = self.first(scans.reshape(len(scans), -1))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def loss_fn(model: Reader, scans: jax.Array, labels: jax.Array) -> jax.Array:
    logits = model(scans).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(
    model: Reader,
    optimizer: nnx.Optimizer,
    loss_scale: nnx.DynamicLossScale | nnx.StaticLossScale,
    augment: Augment,
    scans: jax.Array,
    labels: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The loss, and whether the gradients were finite; if not, nothing was updated."""
    lean = nnx.remat_layers(loss_fn, {"blocks.*": None})
    loss, grads = loss_scale.value_and_grad(lean)(model, augmented(augment, scans), labels)
    return loss, loss_scale.step(optimizer, model, grads)


def accuracy(
    model: Reader, mesh: jax.sharding.Mesh, scans: np.ndarray, labels: np.ndarray
) -> float:
    """The share of scans that are read correctly; each device judges its part of them."""

    @nnx.jit
    @nnx.shard_map(mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    def count(model: Reader, scans: jax.Array, labels: jax.Array) -> jax.Array:
        return jax.lax.psum((model(scans).argmax(-1) == labels).sum(), "data")

    return int(count(model, scans, labels)) / len(labels)


class Run(tp.NamedTuple):
    """How a training went."""

    losses: list[float]
    scales: list[float]
    skipped: int
    """Steps whose gradients were not finite."""
    model: Reader


def train(
    name: str, steps: int, scans: np.ndarray, labels: np.ndarray, seed: int, console: Console
) -> Run:
    model = Reader(nnx.Rngs(seed))
    POLICIES[name].apply(model)
    schedule = optax.cosine_onecycle_schedule(steps, 4e-3)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    # 2^24 is more than float16 can represent: the first steps are skipped, and lower it.
    loss_scale = nnx.DynamicLossScale(2.0**24) if name == "float16" else nnx.StaticLossScale(1.0)
    augment, order = Augment(nnx.Rngs(augment=seed)), np.random.default_rng(seed)
    losses, scales, skipped = [], [], 0
    for _ in track(range(steps), f"training in {name}", console=console):
        rows = order.integers(0, len(scans), BATCH)
        loss, finite = train_step(model, optimizer, loss_scale, augment, scans[rows], labels[rows])
        losses.append(float(loss))
        skipped += not finite
        scales.append(float(loss_scale.scale(jnp.float32(1.0))))
    return Run(losses, scales, skipped, model)


def draw(runs: dict[str, Run], path: Path) -> None:
    styles = {
        "float32": ("#22303c", "-"),
        "bfloat16": ("#d1603d", "--"),
        "float16": ("#8aa1b4", "-"),
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, run in runs.items():
        color, style = styles[name]
        left.plot(run.losses, style, color=color, label=name, lw=1.5)
    left.set(xlabel="step", ylabel="loss", yscale="log", title="Training")
    left.legend(frameon=False)
    right.step(range(len(runs["float16"].scales)), runs["float16"].scales, color="#8aa1b4")
    right.set(xlabel="step", yscale="log", title="Loss scale in float16")
    right.set_yscale("log", base=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25, lw=0.6)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="mixed_precision.py", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="a short run")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder; default: out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", 8)  # means nothing where there are GPUs or TPUs
    options.out.mkdir(parents=True, exist_ok=True)
    if 360 % len(jax.devices()):
        sys.exit(
            f"mixed_precision.py: error: 360 scans cannot be divided by {len(jax.devices())} devices"
        )

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)
    scans, test_scans, labels, test_labels = train_test_split(
        images, labels.astype(np.int32), test_size=360, stratify=labels, random_state=0
    )
    mesh, console = nnx.make_mesh(data=-1), Console(width=100, highlight=False)
    table = Table("computed in", "loss", "skipped steps", "test scans read", "16-bit copy reads")
    runs: dict[str, Run] = {}
    read: list[float] = []
    for name in POLICIES:
        run = train(name, 60 if options.quick else 500, scans, labels, options.seed, console)
        serving = nnx.clone(run.model)
        nnx.cast(serving, "bfloat16" if name == "float32" else name)
        whole, half = (accuracy(m, mesh, test_scans, test_labels) for m in (run.model, serving))
        assert 2 * nnx.memory(serving).total <= 1.1 * nnx.memory(run.model).total
        table.add_row(
            name,
            f"{run.losses[-1]:.4f}",
            str(run.skipped),
            f"{100 * whole:.1f} %",
            f"{100 * half:.1f} %",
        )
        runs[name] = run
        read += [whole, half]
    draw(runs, options.out / "mixed_precision.png")
    console.print(table)
    print(f"losses and loss scale: {options.out / 'mixed_precision.png'}")
    print(f"each of the six networks reads at least {100 * min(read):.1f} % of the test scans")


if __name__ == "__main__":
    main()
