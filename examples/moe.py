"""Train a small mixture of experts on several devices, each of which has some of the experts.

A sequence begins with one of eight letters, which says how it goes on: each letter has a table of its
own for the number that follows a number. So there is something for each expert to learn, and the model
has to find out who learns what. The data is made here, so nothing is downloaded.

    python examples/moe.py            # about a minute on two CPU cores
    python examples/moe.py --quick    # some seconds

The layer `MoE` is as in GShard (Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668): an expert has
places for a number of tokens of each group, so that shapes are known, and the program has two
all-to-alls.

Result: an accuracy of at least 0.98; with `--quick`, at least 0.8.

Without several devices, eight virtual ones are made of the CPU. At the end there are a table of the load
of each expert, with the letters that it serves, and `moe.png` with the same by letter.
"""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import options, picture
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

import nnxlite as nnx

LETTERS, NUMBERS, LENGTH = 8, 24, 16


class MoE(nnx.Module):
    """Each token passes through one of many two-layer networks.

    Maps (groups, tokens, features) to the same shape. A token that finds no place at its expert becomes
    zero, so add the result to the input. `load` is the part of the tokens that chose each expert,
    `dropped` the part that found no place, and `balance_loss` is one where the load is even (Switch
    Transformers, Fedus et al. 2021, https://arxiv.org/abs/2101.03961).

    Args:
        features: size of the last axis, and width of an expert.
        experts: number of experts; they lie along the mesh axis "expert", and so do groups.
        capacity: an expert has places for `capacity * tokens / experts` tokens of a group.
        rngs: the source of random keys.
    """

    def __init__(self, features: int, experts: int, capacity: float, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        shape = (experts, features, features)
        self.router = nnx.Param(0.02 * rngs.params.normal((features, experts)))
        self.up = nnx.Param(init(rngs.params(), shape))
        self.down = nnx.Param(init(rngs.params(), shape))
        self.capacity = capacity
        self.load = nnx.Variable(jnp.zeros(experts))
        self.dropped = nnx.Variable(jnp.zeros(()))
        self.balance_loss = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        experts = self.router.shape[1]
        probabilities = jax.nn.softmax(x @ self.router)
        choice = jax.nn.one_hot(probabilities.argmax(-1), experts)  # (groups, tokens, experts)
        gate = (choice * probabilities).sum(-1)
        before = jnp.cumsum(choice, 1) - choice  # how many tokens of the group are in front
        place = (before * choice).sum(-1).astype(jnp.int32)
        capacity = math.ceil(self.capacity * x.shape[1] / experts)
        places = jax.nn.one_hot(place, capacity)  # zeros beyond the capacity
        self.load.value = choice.mean((0, 1))
        self.dropped.value = 1 - places.sum(-1).mean()
        self.balance_loss.value = experts * (self.load * probabilities.mean((0, 1))).sum()

        sent = jnp.einsum("gse,gsc->gsec", choice, places)
        tokens = moved(jnp.einsum("gsec,gsf->egcf", sent, x), 1, 0)
        hidden = nnx.gelu(jnp.einsum("egcf,efh->egch", tokens, self.up[...]))
        tokens = moved(jnp.einsum("egch,ehf->egcf", hidden, self.down[...]), 0, 1)
        return jnp.einsum("gsec,egcf->gsf", sent * gate[..., None, None], tokens)


def moved(x: jax.Array, before: int, after: int) -> jax.Array:
    """An array that is divided along another axis than before: an all-to-all."""
    for axis in (before, after):
        x = jax.lax.with_sharding_constraint(x, P(*(None,) * axis, "expert"))
    return x


class Model(nnx.Module):
    """The letter and a number, to logits for the next number."""

    def __init__(self, features: int, experts: int, *, rngs: nnx.Rngs):
        self.letter = nnx.Embed(LETTERS, features, rngs=rngs)
        self.number = nnx.Embed(NUMBERS, features, rngs=rngs)
        self.norm = nnx.RMSNorm(features, rngs=rngs)
        self.experts = MoE(features, experts, capacity=2.0, rngs=rngs)
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
    return losses.mean() + 0.02 * model.experts.balance_loss[...]


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
    numbers = jnp.tile(jnp.arange(NUMBERS), (model.experts.router.shape[1], 1))
    model(jnp.broadcast_to(letter, numbers.shape[:1]), numbers)
    return model.experts.load[...]


def draw_load(loads: np.ndarray, path: Path) -> None:
    with picture(path, 5.5, 4.2) as figure:
        axes = figure.subplots()
        image = axes.imshow(loads, cmap="YlGnBu", vmin=0, vmax=1, aspect="auto")
        axes.set(xlabel="expert", ylabel="letter", xticks=range(loads.shape[1]))
        axes.set_yticks(range(LETTERS), [chr(ord("a") + i) for i in range(LETTERS)])
        figure.colorbar(image, label="part of the numbers after the letter")


def main() -> None:
    run = options(__doc__)
    jax.config.update("jax_num_cpu_devices", 8)  # means nothing where there are GPUs or TPUs
    steps = 150 if run.quick else 600

    devices = jax.device_count()
    experts = LETTERS if LETTERS % devices == 0 else devices
    mesh = nnx.make_mesh(expert=-1)
    model = Model(32, experts, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    rules = {"**.up": ("expert",), "**.down": ("expert",)}
    layout = nnx.shard((model, optimizer), mesh, nnx.Plan(data="expert", rules=rules))

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
    draw_load(loads, run.out / "moe.png")
    print(f"load by letter: {run.out / 'moe.png'}; {dropped:.1%} of the tokens were dropped")
    print(
        f"{experts} experts on {devices} devices: accuracy {after:.3f}; {before:.3f} before training"
    )


if __name__ == "__main__":
    main()
