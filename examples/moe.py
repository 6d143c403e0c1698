"""Train a small mixture of experts on several devices, each of which has some of the experts.

A sequence begins with one of eight letters, which says how it goes on: each letter has a table of its
own for the number that follows a number. So there is something for each expert to learn, and the model
has to find out who learns what. The data is made here, so nothing is downloaded.

    python examples/moe.py            # about a minute on two CPU cores
    python examples/moe.py --quick    # some seconds

Result: an accuracy of at least 0.98; with `--quick`, at least 0.8.

Without several devices, eight virtual ones are made of the CPU. At the end there are a table of the load
of each expert, with the letters that it serves, and `moe.png` with the same by letter.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import nnxlite as nnx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LETTERS, NUMBERS, LENGTH = 8, 24, 16


class Model(nnx.Module):
    """The letter and a number, to logits for the next number."""

    def __init__(self, features: int, experts: int, *, rngs: nnx.Rngs):
        self.letter = nnx.Embed(LETTERS, features, rngs=rngs)
        self.number = nnx.Embed(NUMBERS, features, rngs=rngs)
        self.norm = nnx.RMSNorm(features, rngs=rngs)
        self.experts = nnx.MoE(features, features, experts, top_k=1, capacity_factor=2.0, rngs=rngs)
        self.head = nnx.Linear(features, NUMBERS, rngs=rngs)

    def __call__(self, letters: jax.Array, numbers: jax.Array) -> jax.Array:
        x = self.letter(letters)[:, None] + self.number(numbers)
        # Experts have places for some tokens of each group, and those of a sequence are alike.
        mixed = self.norm(x).reshape(jax.device_count(), -1, x.shape[-1])
        return self.head(x + self.experts(mixed).reshape(x.shape))


class Data:
    """Sequences in which each number follows from the one before by the table of the letter."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(0)
        self.tables = np.stack([self.draw.permutation(NUMBERS) for _ in range(LETTERS)])

    def batch(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        letters = self.draw.integers(0, LETTERS, size)
        numbers = [self.draw.integers(0, NUMBERS, size)]
        for _ in range(LENGTH):
            numbers.append(self.tables[letters, numbers[-1]])
        return letters, np.stack(numbers, 1)


def loss_of(model: Model, letters: jax.Array, numbers: jax.Array) -> jax.Array:
    logits = model(letters, numbers[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, numbers[:, 1:])
    return losses.mean() + nnx.router_loss(model, balance=0.02)


@nnx.jit
def train_step(
    model: Model, optimizer: nnx.Optimizer, letters: jax.Array, numbers: jax.Array
) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, letters, numbers)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def accuracy(model: Model, letters: jax.Array, numbers: jax.Array) -> jax.Array:
    return jnp.mean(model(letters, numbers[:, :-1]).argmax(-1) == numbers[:, 1:])


@nnx.jit
def load_of(model: Model, letter: jax.Array) -> jax.Array:
    """The load of each expert by all numbers after one letter."""
    numbers = jnp.tile(jnp.arange(NUMBERS), (model.experts.num_experts, 1))
    model(jnp.broadcast_to(letter, numbers.shape[:1]), numbers)
    return model.experts.load[...]


def draw_load(loads: np.ndarray, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(5.5, 4.2), layout="constrained")
    image = axes.imshow(loads, cmap="YlGnBu", vmin=0, vmax=1, aspect="auto")
    axes.set(xlabel="expert", ylabel="letter", xticks=range(loads.shape[1]))
    axes.set_yticks(range(LETTERS), [chr(ord("a") + i) for i in range(LETTERS)])
    figure.colorbar(image, label="part of the numbers after the letter")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="moe.py", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder; default: out")
    parser.add_argument("--quick", action="store_true", help="a short run")
    options = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", 8)  # means nothing where there are GPUs or TPUs
    steps = 150 if options.quick else 600
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(1, f"{parser.prog}: error: cannot write to {options.out}: {error.strerror}\n")

    devices = jax.device_count()
    experts = LETTERS if LETTERS % devices == 0 else devices
    mesh = nnx.make_mesh(expert=-1)
    model = Model(32, experts, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    layout = nnx.shard((model, optimizer), mesh, "expert")

    data, size = Data(), 8 * devices
    with jax.set_mesh(mesh):
        before = float(accuracy(model, *layout.put(data.batch(16 * size))))
        for step in track(range(1, steps + 1), "training", console=Console(stderr=True)):
            # Read at once: virtual devices share threads, which steps in advance would block.
            loss = float(train_step(model, optimizer, *layout.put(data.batch(size))))
            if step % (steps // 3) == 0:
                print(f"step {step}: loss {loss:.3f}")
        after = float(accuracy(model, *layout.put(data.batch(16 * size))))
        load, dropped = np.asarray(model.experts.load[...]), float(model.experts.dropped[...])
        loads = np.stack([load_of(model, jnp.array(letter)) for letter in range(LETTERS)])

    table = Table("expert", "on device", "load", "serves mostly", title="experts")
    for expert in range(experts):
        served = "".join(chr(ord("a") + i) for i in range(LETTERS) if loads[i].argmax() == expert)
        place = str(expert * devices // experts)
        table.add_row(str(expert), place, f"{load[expert]:.0%}", served or "-")
    Console().print(table)
    draw_load(loads, options.out / "moe.png")
    print(f"load by letter: {options.out / 'moe.png'}; {dropped:.1%} of the tokens were dropped")
    print(
        f"{experts} experts on {devices} devices: accuracy {after:.3f}; {before:.3f} before training"
    )


if __name__ == "__main__":
    main()
