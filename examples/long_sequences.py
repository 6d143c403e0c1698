"""Train one transformer on long sequences in three ways: whole, along a ring, and in stages.

A decoder learns to repeat a random sequence. On one device, attention needs a weight for each pair of
positions. With `ring_attention` (in `_ring_attention.py`) the sequence is divided between the devices,
and keys and values go round. With `pipeline` (in `_pipeline.py`) the layers are divided, and the batch
goes through in parts. The program is the same each time but for the function that runs the layers and
the attention that they use.

    python examples/long_sequences.py            # about four minutes on two CPU cores
    python examples/long_sequences.py --quick    # a shorter run

Result: the first losses of the three agree within 1e-3; a step along the ring of eight devices needs
less than a tenth of the memory for each; and at least 99 % of the repeated symbols are right.

Where there is one device only, the CPU is divided into eight virtual ones. `long_sequences.png` in the
output folder shows the losses, and the memory of a device by the length of the sequence.
"""

from __future__ import annotations

import functools
import sys
import typing as tp
from collections.abc import Collection
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import BLUE, INK, RED, options, picture
from _pipeline import pipeline
from _ring_attention import ring_attention
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

import nnxlite as nnx

SYMBOLS, WIDTH, HEADS, LAYERS = 16, 32, 4, 4
MICROBATCHES = 4


class Block(nnx.Module):
    """Attention with rotary positions and a feed-forward network, each after a normalization."""

    def __init__(self, attention_fn: tp.Callable[..., jax.Array], rngs: nnx.Rngs) -> None:
        rotated = functools.partial(
            nnx.dot_product_attention_with_rope, rope=nnx.RoPE(), attention_fn=attention_fn
        )
        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, attention_fn=rotated, decode=False, rngs=rngs
        )
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    """Stacked blocks between an embedding and a linear layer.

    Args:
        attention_fn: as for `nnx.MultiHeadAttention`.
        run: applies the stacked blocks to an array (batch, length, WIDTH).
        rngs: the source of random keys.
    """

    def __init__(
        self,
        attention_fn: tp.Callable[..., jax.Array],
        run: tp.Callable[[Block, jax.Array], jax.Array],
        rngs: nnx.Rngs,
    ) -> None:
        self.tokens = nnx.Embed(SYMBOLS + 1, WIDTH, rngs=rngs)
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda rngs: Block(attention_fn, rngs)))
        self.blocks = make(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, SYMBOLS, rngs=rngs)
        self.run = run

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.norm(self.run(self.blocks, self.tokens(tokens))))


def looped(blocks: Block, x: jax.Array) -> jax.Array:
    """One block after the other; the gradient keeps what goes into each, and computes the rest again."""
    body = nnx.remat(lambda x, block: block(x))
    return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, blocks)


def staged(blocks: Block, x: jax.Array) -> jax.Array:
    """The same in stages of a pipeline, on the mesh that `jax.set_mesh` has set."""
    body = nnx.remat(lambda block, x: block(x))
    return pipeline(body, blocks, x, microbatches=MICROBATCHES)


class Way(tp.NamedTuple):
    """How the work is divided."""

    mesh: Mesh
    batch: P
    """Of tokens (batch, length)."""
    parameters: str | dict[str, tp.Any]
    """A plan, or rules by path, as `nnx.shard` takes them."""
    attention_fn: tp.Callable[..., jax.Array]
    run: tp.Callable[[Block, jax.Array], jax.Array]


def ways() -> dict[str, Way]:
    devices = jax.devices()
    one, ring = nnx.make_mesh(data=1, devices=devices[:1]), nnx.make_mesh(sequence=-1)
    stages = nnx.make_mesh(data=-1, stage=LAYERS)
    plain = nnx.dot_product_attention
    return {
        "one device": Way(one, P(), "data", plain, looped),
        "ring": Way(ring, P(None, "sequence"), {}, ring_attention, looped),
        "stages": Way(stages, P("data"), {"*.blocks.**": ("stage",)}, plain, staged),
    }


def build(way: Way, steps: int, seed: int) -> tuple[Decoder, nnx.Optimizer[Decoder]]:
    model = Decoder(way.attention_fn, way.run, nnx.Rngs(seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(30, steps // 2), steps)
    # Matrices decay; gains of normalizations and biases do not.
    groups = {"**.kernel": optax.adamw(schedule, weight_decay=0.01), "**": optax.adam(schedule)}
    optimizer = nnx.Optimizer(model, nnx.by_path(groups), wrt=nnx.Param)
    return model, optimizer


@nnx.jit(donate="written")
def train_step(
    model: Decoder, optimizer: nnx.Optimizer, tokens: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The loss and the accuracy in the second half of each sequence, which repeats the first."""
    repeated = (jnp.arange(targets.shape[1]) >= targets.shape[1] // 2).astype(jnp.float32)

    def loss_fn(model: Decoder) -> tuple[jax.Array, jax.Array]:
        logits = model(tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        right = (logits.argmax(-1) == targets) * repeated
        count = targets.shape[0] * repeated.sum()
        return (losses * repeated).sum() / count, right.sum() / count

    (loss, accuracy), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss, accuracy


def batch(step: int, rows: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets (rows, length) int32: a start symbol, then a sequence twice."""
    half = np.random.default_rng((seed, step)).integers(0, SYMBOLS, (rows, length // 2))
    targets = np.concatenate([half, half], axis=1).astype(np.int32)
    start = np.full((rows, 1), SYMBOLS, np.int32)
    return np.concatenate([start, targets[:, :-1]], axis=1), targets


class Run(tp.NamedTuple):
    """How a training went."""

    losses: list[float]
    accuracy: float
    held: int
    """Bytes of parameters and optimizer on the first device."""


def train(way: Way, numbers: Collection[int], rows: int, length: int, seed: int) -> Run:
    model, optimizer = build(way, len(numbers), seed)
    layout = nnx.shard((model, optimizer), way.mesh, way.parameters)
    sharding = NamedSharding(way.mesh, way.batch)
    losses, accuracy = [], 0.0
    with jax.set_mesh(way.mesh):
        for step in track(numbers, "training", console=Console(stderr=True)):
            data = jax.device_put(batch(step, rows, length, seed), sharding)
            loss, accuracy = train_step(model, optimizer, *data)
            losses.append(float(loss))  # virtual devices share threads: one step at a time
    return Run(losses, float(accuracy), layout.bytes_per_device)


def temporary(way: Way, rows: int, length: int) -> int:
    """Bytes of intermediate results of a step on a device; the step is compiled and not run."""
    model, optimizer = build(way, 2, 0)
    nnx.shard((model, optimizer), way.mesh, way.parameters)
    tokens = jax.ShapeDtypeStruct(
        (rows, length), jnp.int32, sharding=NamedSharding(way.mesh, way.batch)
    )
    with jax.set_mesh(way.mesh):
        step = nnx.memory(model, optimizer, train_step, tokens, tokens).step
    assert step is not None
    return step.temporary


def draw(runs: dict[str, Run], lengths: list[int], sizes: dict[str, list[int]], path: Path) -> None:
    looks = {"one device": (INK, "-"), "ring": (RED, "--"), "stages": (BLUE, ":")}
    with picture(path, 10, 3.8) as figure:
        left, right = figure.subplots(1, 2)
        for name, run in runs.items():
            color, style = looks[name]
            left.plot(run.losses, style, color=color, label=name, lw=1.8)
            right.plot(lengths, np.array(sizes[name]) / 1e6, "o-", color=color, label=name, ms=4)
        left.set(xlabel="step", ylabel="loss", title="The same training in three ways")
        right.set(xlabel="length of the sequence", ylabel="MB on each device")
        right.set(xscale="log", yscale="log", title="Intermediate results of a step")
        right.set_xticks(lengths, [str(length) for length in lengths], minor=False)
        right.minorticks_off()
        for axes in (left, right):
            axes.legend()


def main() -> None:
    chosen = options(__doc__)
    jax.config.update("jax_num_cpu_devices", 8)  # means nothing where there are GPUs or TPUs
    if len(jax.devices()) % 8:
        sys.exit(f"long_sequences.py: error: 8 devices are needed, there are {len(jax.devices())}")
    steps, rows, length = (3, 8, 64) if chosen.quick else (200, 16, 128)
    lengths = [256] if chosen.quick else [256, 512, 1024, 2048, 4096]
    runs: dict[str, Run] = {}
    sizes: dict[str, list[int]] = {}
    for name, way in ways().items():
        runs[name] = train(way, range(steps), rows, length, chosen.seed)
        sizes[name] = [temporary(way, 8, length) for length in lengths]
    draw(runs, lengths, sizes, chosen.out / "long_sequences.png")

    first = runs["one device"].losses[:5]
    table = Table(
        "", "loss", "apart at first", "right", "parameters and optimizer", "step, at most"
    )
    apart = 0.0
    for name, run in runs.items():
        differences = [abs(a - b) for a, b in zip(run.losses, first, strict=False)]
        apart = max(apart, *differences)
        table.add_row(
            name,
            f"{run.losses[-1]:.4f}",
            f"{max(differences):.0e}",
            f"{100 * run.accuracy:.1f} %",
            f"{run.held / 1e3:.0f} kB a device",
            f"{sizes[name][-1] / 1e6:.1f} MB a device",
        )
    Console(width=110, highlight=False).print(table)
    if apart > 1e-3:
        sys.exit(f"long_sequences.py: error: the first losses are {apart:.0e} apart")
    share = sizes["ring"][-1] / sizes["one device"][-1]
    worst = min(run.accuracy for run in runs.values())
    print(f"losses and memory: {chosen.out / 'long_sequences.png'}")
    print(
        f"a step on {lengths[-1]} positions needs {100 * share:.0f} % of the memory along the ring; "
        f"{100 * worst:.1f} % of the repeated symbols are right"
    )


if __name__ == "__main__":
    main()
