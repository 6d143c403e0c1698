"""Train a diffusion model on handwritten digits, and let it draw the digit that is asked for.

The 1,797 scans of 8 x 8 pixels ship inside scikit-learn, so nothing is downloaded. One network
learns to draw with and without a label, so that sampling can exaggerate the difference
(classifier-free guidance, Ho and Salimans 2022, https://arxiv.org/abs/2207.12598).

    python examples/diffusion.py            # less than a minute on two CPU cores
    python examples/diffusion.py --quick    # some seconds, and rougher digits

A classifier that has seen only real scans judges the samples: after a full run it recognises the
intended digit in more than 99 % of them. `diffusion.png` in the output folder shows samples of each
digit and how they come out of noise.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import options, picture
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlite as nnx

PIXELS, WIDTH, BLOCKS, FREQUENCIES, BATCH = 64, 256, 3, 16, 64
UNKNOWN = 10  # the label of "any digit"
UNLABELLED = 0.15  # the share of training scans whose label is hidden
STEPS = 40  # from noise to a digit
GUIDANCE = 2.0  # 1 is what the network predicts for the digit; more exaggerates


class Block(nnx.Module):
    """A residual block whose norm is scaled and shifted by the condition."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, use_bias=False, use_scale=False, rngs=rngs)
        self.modulate = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.mlp = nnx.MLP(WIDTH, WIDTH, WIDTH, 1, activation=nnx.silu, rngs=rngs)

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        scale, shift = jnp.split(self.modulate(condition), 2, axis=-1)
        return x + self.mlp(self.norm(x) * (1 + scale) + shift)


class Denoiser(nnx.Module):
    """Predicts the velocity of noisy images, given the time and the digit."""

    def __init__(self, rngs: nnx.Rngs):
        self.digit = nnx.Embed(UNKNOWN + 1, WIDTH, rngs=rngs)
        self.time = nnx.Linear(FREQUENCIES, WIDTH, rngs=rngs)
        self.enter = nnx.Linear(PIXELS, WIDTH, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(BLOCKS))
        self.leave = nnx.Linear(WIDTH, PIXELS, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, images: jax.Array, times: jax.Array, digits: jax.Array) -> jax.Array:
        """Images (batch, 64), times (batch,) in 0..1 and digits (batch,) to (batch, 64)."""
        waves = jnp.cos(jnp.pi * times[:, None] * jnp.arange(FREQUENCIES))
        condition = nnx.silu(self.time(waves) + self.digit(digits))
        x = self.enter(images)
        for block in self.blocks:
            x = block(x, condition)
        return self.leave(x)


def signal_and_noise(times: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How much of image and noise there is at a time: all image at 0, all noise at 1."""
    return jnp.cos(jnp.pi / 2 * times), jnp.sin(jnp.pi / 2 * times)


def velocity_loss(model: Denoiser, images, labels, rngs: nnx.Rngs) -> jax.Array:
    """Mean squared error of the velocity, signal * noise - noise level * image.

    Source: Salimans and Ho, "Progressive Distillation for Fast Sampling of Diffusion Models" (2022).
    """
    times = rngs.time.uniform(labels.shape)
    noise = rngs.noise.normal(images.shape)
    hidden = rngs.label.bernoulli(UNLABELLED, labels.shape)
    signal, level = (share[:, None] for share in signal_and_noise(times))
    predicted = model(signal * images + level * noise, times, jnp.where(hidden, UNKNOWN, labels))
    return jnp.mean((predicted - (signal * noise - level * images)) ** 2)


@nnx.jit
def train_step(model, optimizer, average, images, labels, rngs) -> jax.Array:
    """One step of gradient descent; model, optimizer, average and streams change in place."""
    loss, grads = nnx.value_and_grad(velocity_loss)(model, images, labels, rngs)
    optimizer.update(model, grads)
    average.update(model)
    return loss


def train(images, labels, steps: int, seed: int) -> Denoiser:
    """The model with averaged weights."""
    model = Denoiser(nnx.Rngs(seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 20, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.01), wrt=nnx.Param)
    average = nnx.EMA(model, decay=1 - 20 / steps, only=nnx.Param)
    rngs = nnx.Rngs(seed + 1)  # "time", "noise" and "label" all draw from this default
    order = np.random.default_rng(seed)
    for step in nnx.training.loop(steps):
        rows = order.choice(len(labels), BATCH, replace=False)
        step.log(loss=train_step(model, optimizer, average, images[rows], labels[rows], rngs))
    return average.apply_to(model)


@nnx.jit
def sample(model: Denoiser, digits, guidance, key) -> tuple[jax.Array, jax.Array]:
    """Images (batch, 64) of digits (batch,), and their trajectory (STEPS, batch, 64).

    Each step removes the predicted noise and adds less of the same noise (DDIM, Song et al. 2020,
    https://arxiv.org/abs/2010.02502).
    """
    both = jnp.concatenate([digits, jnp.full_like(digits, UNKNOWN)])

    @nnx.scan(in_axes=(nnx.Carry, 0, None), out_axes=(nnx.Carry, 0))
    def denoise(images, times, model):
        now, after = times
        velocity = model(jnp.tile(images, (2, 1)), jnp.full(both.shape, now), both)
        known, unknown = jnp.split(velocity, 2)
        velocity = unknown + guidance * (known - unknown)
        signal, level = signal_and_noise(now)
        clean = jnp.clip(signal * images - level * velocity, -1, 1)
        noise = (images - signal * clean) / level
        signal, level = signal_and_noise(after)
        images = signal * clean + level * noise
        return images, images

    edges = jnp.linspace(1.0, 0.0, STEPS + 1)
    noise = jax.random.normal(key, (len(digits), PIXELS))
    return denoise(noise, jnp.stack([edges[:-1], edges[1:]], axis=1), model)


def train_judge(images, labels, seed: int) -> nnx.MLP:
    """A classifier that has seen real scans only."""
    model = nnx.MLP(PIXELS, 10, 128, 1, rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    def loss_fn(model, images, labels):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    @nnx.jit
    def step(model, optimizer, images, labels):
        optimizer.update(model, nnx.grad(loss_fn)(model, images, labels))

    order = np.random.default_rng(seed)
    for _ in range(600):
        rows = order.choice(len(labels), BATCH, replace=False)
        step(model, optimizer, images[rows], labels[rows])
    return model


def draw(sheets: dict[str, np.ndarray], path) -> None:
    """Each (rows, columns, 64) as one picture, with a margin around each image."""
    with picture(path, 12, 4) as figure:
        for axes, (title, images) in zip(figure.subplots(1, len(sheets)), sheets.items()):
            rows, columns, _ = images.shape
            sheet = np.asarray(images).reshape(rows, columns, 8, 8)
            sheet = np.pad(sheet, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-1)
            sheet = sheet.transpose(0, 2, 1, 3).reshape(rows * 10, columns * 10)
            axes.imshow(sheet, cmap="gray_r", vmin=-1, vmax=1)
            axes.set(xticks=[], yticks=[], title=title)


def main() -> None:
    run = options(__doc__)
    pixels, labels = load_digits(return_X_y=True)
    images, test, labels, test_labels = train_test_split(
        (pixels / 8 - 1).astype("float32"),
        labels.astype("int32"),
        test_size=0.2,
        stratify=labels,
        random_state=0,
    )
    model = train(images, labels, 400 if run.quick else 4000, run.seed)

    count = 30 if run.quick else 100  # samples of each digit
    digits = jnp.repeat(jnp.arange(10), count)
    key = jax.random.key(run.seed)
    plain, _ = sample(model, digits, 1.0, key)
    guided, trajectory = sample(model, digits, GUIDANCE, key)
    judge = train_judge(images, labels, run.seed)
    right, right_plain, right_real = (
        100 * float((judge(x).argmax(-1) == y).mean())
        for x, y in ((guided, digits), (plain, digits), (test, test_labels))
    )
    moments = np.linspace(0, STEPS - 1, 10).astype(int)
    steps = trajectory.reshape(STEPS, 10, count, PIXELS)[moments, :, 0]
    sheets = {
        "Samples of each digit": guided.reshape(10, count, PIXELS)[:, :10],
        "Real scans": np.stack([test[test_labels == digit][:10] for digit in range(10)]),
        "From noise to digits": steps.swapaxes(0, 1),
    }
    draw(sheets, run.out / "diffusion.png")
    print(f"samples of each digit: {run.out / 'diffusion.png'}")
    print(
        f"intended digit recognised in {right:.1f} % of {len(digits):,} samples, {right_plain:.1f} % "
        f"without guidance; {right_real:.1f} % of real test scans"
    )


if __name__ == "__main__":
    main()
