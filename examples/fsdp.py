"""Train one transformer on one device, data parallel, fully sharded, and with tensor parallelism.

A small decoder learns to copy random sequences. The program is the same each time;
`nnx.init_sharded` builds model and optimizer where a plan wants them, and `nnx.shard` says what lies
where. The table at the end says what each device holds, what the devices exchange in a step, and how
far the first losses are from those of one device.

    pip install "nnxlite[examples]"
    python examples/fsdp.py            # about two minutes on two CPU cores
    python examples/fsdp.py --quick    # a shorter run

Result: the first losses of all plans agree within 1e-3, and with `fsdp` a device holds less than a
third of what it holds with `data`.

Where there is one device only, the CPU is divided into eight virtual ones. The picture
`fsdp.png` in the output folder shows the losses.
"""

from __future__ import annotations

import collections
import re
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from _common import options, picture
from rich.console import Console
from rich.table import Table

import nnxlite as nnx

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 64, 4, 8
PLANS = ("data", "fsdp", "fsdp+tensor")


class Block(nnx.Module):
    """Attention and a feed-forward network, each after a normalization."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    """A causal transformer with learned positions."""

    def __init__(self, blocks: int, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(2 * LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions.embedding[: tokens.shape[1]]
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def build(blocks: int) -> tuple[Decoder, nnx.Optimizer[Decoder]]:
    model = Decoder(blocks, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


@nnx.jit
def train_step(model: Decoder, optimizer: nnx.Optimizer, tokens) -> tuple[jax.Array, jax.Array]:
    """The loss and accuracy of the second half of each sequence, which repeats the first."""

    def loss_fn(model):
        logits = model(tokens[:, :-1])[:, LENGTH - 1 :]
        targets = tokens[:, LENGTH:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean(), (logits.argmax(-1) == targets).mean()

    (loss, accuracy), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss, accuracy


def batches(steps: int, rows: int, seed: int):
    """Sequences whose second half is the first again."""
    numbers = np.random.default_rng(seed)
    for _ in range(steps):
        half = numbers.integers(0, VOCABULARY, (rows, LENGTH), dtype=np.int32)
        yield np.concatenate([half, half], axis=1)


def train(mesh, plan: str, blocks: int, steps: int, rows: int, seed: int):
    """Build and train by one plan; what lies where, what is exchanged, and how the training went."""
    model, optimizer = nnx.init_sharded(lambda: build(blocks), mesh, plan)
    layout = nnx.shard((model, optimizer), mesh, plan)  # nothing moves any more
    losses, start = [], time.perf_counter()
    for number, tokens in enumerate(batches(steps, rows, seed)):
        batch = layout.put(tokens)
        if number == 1:
            start = time.perf_counter()  # the first step compiled
        loss, accuracy = train_step(model, optimizer, batch)
        losses.append(float(loss))  # virtual devices share threads: one step at a time
    seconds = (time.perf_counter() - start) / max(steps - 1, 1)
    program = train_step.lower(model, optimizer, batch).compile().as_text()
    kinds = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return layout, collections.Counter(re.findall(kinds, program)), losses, float(accuracy), seconds


def draw(curves: dict[str, list[float]], path: Path) -> None:
    with picture(path, 6, 3.6) as figure:
        axes = figure.subplots()
        for (label, losses), style in zip(curves.items(), ("-", "--", "-.", ":"), strict=False):
            axes.plot(losses, style, label=label, lw=1.8)
        axes.set(xlabel="step", ylabel="loss")
        axes.grid(axis="y", alpha=0.25, lw=0.6)
        axes.legend()


def main() -> None:
    run = options(__doc__)
    jax.config.update("jax_num_cpu_devices", 8)  # means nothing where there are GPUs or TPUs
    blocks, steps, rows = (1, 8, 32) if run.quick else (2, 300, 64)

    devices = jax.devices()
    if len(devices) % 4:
        sys.exit(f"fsdp.py: error: a multiple of 4 devices is needed, there are {len(devices)}")
    one = nnx.make_mesh(data=1, devices=devices[:1])
    every = nnx.make_mesh(data=-1, model=2)
    console = Console(width=110, highlight=False)
    table = Table(
        "plan", "each device holds", "collectives of a step", "ms a step", "loss", "apart"
    )
    curves: dict[str, list[float]] = {}
    for plan in ("one device", *PLANS):
        alone = plan == "one device"
        with console.status(f"training: {plan}"):
            mesh, name = (one, "data") if alone else (every, plan)
            layout, traffic, losses, accuracy, seconds = train(
                mesh, name, blocks, steps, rows, run.seed
            )
        curves[plan] = losses
        apart = max(abs(a - b) for a, b in zip(losses[:8], curves["one device"], strict=False))
        exchanged = ", ".join(f"{n} {kind}" for kind, n in sorted(traffic.items())) or "nothing"
        table.add_row(
            plan,
            f"{layout.bytes_per_device / 1e3:.0f} kB of {layout.bytes / 1e3:.0f}",
            exchanged,
            f"{1e3 * seconds:.0f}",
            f"{losses[-1]:.4f}",
            f"{apart:.0e}",
        )
        if apart > 1e-3:
            sys.exit(f"fsdp.py: error: plan {plan}: the first losses are {apart:.0e} apart")

    draw(curves, run.out / "fsdp.png")
    console.print(table)
    print(f"losses: {run.out / 'fsdp.png'}")
    print(f"copied tokens that are right, in the last step: {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
