"""Train a small mixture of experts on several devices, each of which has some of the experts.

A sequence begins with one of eight letters; each letter has a table that says which number follows a
number. So there is something for each expert to learn, and the model finds out who learns what. Without
several devices, eight virtual ones are made of the CPU.

    python examples/moe.py            # about a minute on two CPU cores
    python examples/moe.py --quick    # some seconds

Result: an accuracy of at least 0.98; with `--quick`, at least 0.8. `moe.png` in the output folder shows
which expert serves which letter. The layer is in `_moe.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import options, picture
from _moe import MoE

import nnxlite as nnx

LETTERS, NUMBERS, LENGTH = 8, 24, 16


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


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, letters, numbers) -> jax.Array:
    def loss_fn(model: Model) -> jax.Array:
        logits = model(letters, numbers[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, numbers[:, 1:])
        return losses.mean() + 0.02 * model.experts.balance_loss[...]

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def accuracy(model: Model, letters, numbers) -> tuple[jax.Array, jax.Array]:
    """The share of the numbers that are right, and the load of each expert."""
    right = jnp.mean(model(letters, numbers[:, :-1]).argmax(-1) == numbers[:, 1:])
    return right, model.experts.load[...]


def main() -> None:
    run = options(__doc__)
    jax.config.update("jax_num_cpu_devices", 8)  # means nothing where there are GPUs or TPUs
    devices = jax.device_count()
    experts = LETTERS if LETTERS % devices == 0 else devices
    model = Model(32, experts, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    mesh, rules = nnx.make_mesh(expert=-1), {"**.up": ("expert",), "**.down": ("expert",)}
    layout = nnx.shard((model, optimizer), mesh, nnx.Plan(data="expert", rules=rules))
    draw = np.random.default_rng(0)
    tables = np.stack([draw.permutation(NUMBERS) for _ in range(LETTERS)])

    def batch(letters: np.ndarray) -> tuple[jax.Array, jax.Array]:
        numbers = [draw.integers(0, NUMBERS, len(letters))]
        for _ in range(LENGTH):
            numbers.append(tables[letters, numbers[-1]])
        return layout.put((letters, np.stack(numbers, 1)))

    with jax.set_mesh(mesh):
        test = batch(draw.integers(0, LETTERS, 128 * devices))
        before, _ = accuracy(model, *test)
        for step in nnx.training.loop(150 if run.quick else 600):
            letters = draw.integers(0, LETTERS, 8 * devices)
            # Read at once: virtual devices share threads, which steps in advance would block.
            step.log(loss=float(train_step(model, optimizer, *batch(letters))))
        after, load = accuracy(model, *test)
        dropped = float(model.experts.dropped[...])
        loads = [accuracy(model, *batch(np.full(64 * devices, i)))[1] for i in range(LETTERS)]

    shares = " ".join(f"{share:.0%}" for share in load)
    print(f"load of the experts: {shares}; {dropped:.1%} of the tokens had no place")
    with picture(run.out / "moe.png", 5.5, 4.2) as figure:
        axes = figure.subplots()
        image = axes.imshow(loads, cmap="YlGnBu", vmin=0, vmax=1, aspect="auto")
        axes.set(xlabel="expert", ylabel="letter", xticks=range(experts))
        axes.set_yticks(range(LETTERS), list("abcdefgh"))
        figure.colorbar(image, label="part of the numbers after the letter")
    print(
        f"{experts} experts on {devices} devices: {after:.3f} right; {before:.3f} before training"
    )


if __name__ == "__main__":
    main()
