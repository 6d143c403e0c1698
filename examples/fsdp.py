"""Train one transformer on one device, data parallel, fully sharded, and with tensor parallelism.

A small decoder learns to copy random sequences. The program is the same each time: `nnx.init_sharded`
builds model and optimizer where a plan wants them, and `nnx.shard` says what lies where. Where there is
one device only, the CPU is divided into eight virtual ones.

    python examples/fsdp.py            # about two minutes on two CPU cores
    python examples/fsdp.py --quick    # a shorter run

Result: the first losses of all plans agree within 1e-3, and with `fsdp` a device has less than a third
of the bytes that it has with `data`. A table shows them, and what the devices exchange in a step.
"""

import collections
import re

import jax
import numpy as np
import optax
from _common import curves, options
from rich.console import Console
from rich.table import Table

import nnxlite as nnx

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 64, 4, 8
COLLECTIVE = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


class Block(nnx.Module):
    """Attention and a feed-forward network, each after a normalization."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), is_causal=True)
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
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@nnx.jit
def train_step(model: Decoder, optimizer: nnx.Optimizer, tokens) -> tuple[jax.Array, jax.Array]:
    """The loss and accuracy of the second half of each sequence, which repeats the first."""

    def loss_fn(model):
        logits, targets = model(tokens[:, :-1])[:, LENGTH - 1 :], tokens[:, LENGTH:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean(), (logits.argmax(-1) == targets).mean()

    (loss, accuracy), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss, accuracy


def main() -> None:
    run = options(__doc__)
    jax.config.update("jax_num_cpu_devices", 8)  # means nothing where there are GPUs or TPUs
    blocks, steps, rows = (1, 8, 32) if run.quick else (2, 300, 64)
    one, every = nnx.make_mesh(data=1, devices=jax.devices()[:1]), nnx.make_mesh(data=-1, model=2)

    def build() -> tuple[Decoder, nnx.Optimizer]:
        model = Decoder(blocks, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    table = Table("plan", "each device has", "collectives of a step", "loss", "apart")
    series: dict[str, list[float]] = {}
    for name in ("one device", "data", "fsdp", "fsdp+tensor"):
        mesh, plan = (one, "data") if name == "one device" else (every, name)
        model, optimizer = nnx.init_sharded(build, mesh, plan)
        layout = nnx.shard((model, optimizer), mesh, plan)  # nothing moves any more
        draw, series[name] = np.random.default_rng(0), []
        for step in nnx.training.loop(steps):
            half = draw.integers(0, VOCABULARY, (rows, LENGTH), dtype=np.int32)
            tokens = layout.put(np.concatenate([half, half], axis=1))
            loss, accuracy = train_step(model, optimizer, tokens)
            step.log(loss=loss)
            series[name].append(float(loss))  # virtual devices share threads: one step at a time
        program = train_step.lower(model, optimizer, tokens).compile().as_text()
        traffic = collections.Counter(re.findall(COLLECTIVE, program))
        apart = max(abs(a - b) for a, b in zip(series[name][:8], series["one device"]))
        assert apart < 1e-3, (name, apart)
        table.add_row(
            name,
            f"{layout.bytes_per_device / 1e3:.0f} kB of {layout.bytes / 1e3:.0f}",
            ", ".join(f"{n} {kind}" for kind, n in sorted(traffic.items())) or "nothing",
            f"{loss:.4f}",
            f"{apart:.0e}",
        )
    curves(run.out / "fsdp.png", series, "step", "loss")
    Console(width=110, highlight=False).print(table)
    print(f"copied tokens that are right, in the last step: {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
