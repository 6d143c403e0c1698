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

import argparse
import typing as tp
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlite as nnx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PIXELS, WIDTH, BLOCKS, FREQUENCIES = 64, 256, 3, 16
UNKNOWN = 10  # the label of "any digit"
UNLABELLED = 0.15  # the share of training scans whose label is hidden
BATCH = 64
STEPS = 40  # from noise to a digit
GUIDANCE = 2.0  # 1 is what the network predicts for the digit; more exaggerates


class Split(tp.NamedTuple):
    """Some of the scans: `images` (count, 64) float32 in -1..1, `labels` (count,) int32."""

    images: np.ndarray
    labels: np.ndarray


class Block(nnx.Module):
    """A residual block whose norm is scaled and shifted by the condition."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, use_bias=False, use_scale=False, rngs=rngs)
        self.modulate = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.mlp = nnx.MLP(WIDTH, WIDTH, WIDTH, 1, activation=nnx.silu, rngs=rngs)

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        """Maps x and the condition, both (batch, WIDTH), to (batch, WIDTH)."""
        scale, shift = jnp.split(self.modulate(condition), 2, axis=-1)
        return x + self.mlp(self.norm(x) * (1 + scale) + shift)


class Denoiser(nnx.Module):
    """Predicts the velocity of noisy images, given the time and the digit."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.digit = nnx.Embed(UNKNOWN + 1, WIDTH, rngs=rngs)
        self.time = nnx.Linear(FREQUENCIES, WIDTH, rngs=rngs)
        self.enter = nnx.Linear(PIXELS, WIDTH, rngs=rngs)
        self.blocks = nnx.List(Block(rngs=rngs) for _ in range(BLOCKS))
        self.leave = nnx.Linear(WIDTH, PIXELS, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, images: jax.Array, times: jax.Array, digits: jax.Array) -> jax.Array:
        """Maps images (batch, 64), times (batch,) in 0..1 and digits (batch,) to (batch, 64)."""
        waves = jnp.cos(jnp.pi * times[:, None] * jnp.arange(FREQUENCIES))
        condition = nnx.silu(self.time(waves) + self.digit(digits))
        x = self.enter(images)
        for block in self.blocks:
            x = block(x, condition)
        return self.leave(x)


def signal_and_noise(times: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How much of image and noise there is at a time: all image at 0, all noise at 1."""
    return jnp.cos(jnp.pi / 2 * times), jnp.sin(jnp.pi / 2 * times)


def velocity_loss(
    model: Denoiser, images: jax.Array, labels: jax.Array, rngs: nnx.Rngs
) -> jax.Array:
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
def train_step(
    model: Denoiser,
    optimizer: nnx.Optimizer,
    average: nnx.EMA,
    batch: Split,
    rngs: nnx.Rngs,
) -> jax.Array:
    """One step of gradient descent; model, optimizer, average and streams are changed in place."""
    loss, grads = nnx.value_and_grad(velocity_loss)(model, *batch, rngs)
    optimizer.update(model, grads)
    average.update(model)
    return loss


def train(train_set: Split, options: argparse.Namespace) -> tuple[Denoiser, list[float]]:
    """The model with averaged weights, and the loss of each step."""
    model = Denoiser(rngs=nnx.Rngs(options.seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, options.steps // 20, options.steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.01), wrt=nnx.Param)
    average = nnx.EMA(model, decay=max(0.0, 1 - 20 / options.steps), only=nnx.Param)
    rngs = nnx.Rngs(options.seed + 1)  # "time", "noise" and "label" all draw from this default
    order = np.random.default_rng(options.seed)
    run = nnx.training.loop(options.steps)
    for step in run:
        rows = order.choice(len(train_set.labels), BATCH, replace=False)
        batch = Split(train_set.images[rows], train_set.labels[rows])
        step.log(loss=train_step(model, optimizer, average, batch, rngs))
    return average.apply_to(model), [entry["loss"] for entry in run.history]


@nnx.jit
def sample(
    model: Denoiser, digits: jax.Array, guidance: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Images (batch, 64) of digits (batch,), and their trajectory (STEPS, batch, 64).

    Each step removes the predicted noise and adds less of the same noise (DDIM, Song et al. 2020,
    https://arxiv.org/abs/2010.02502).
    """
    both = jnp.concatenate([digits, jnp.full_like(digits, UNKNOWN)])

    def denoise(
        images: jax.Array, times: jax.Array, model: Denoiser
    ) -> tuple[jax.Array, jax.Array]:
        now, after = times
        known, unknown = jnp.split(
            model(jnp.tile(images, (2, 1)), jnp.full(both.shape, now), both), 2
        )
        velocity = unknown + guidance * (known - unknown)
        signal, level = signal_and_noise(now)
        clean = jnp.clip(signal * images - level * velocity, -1, 1)
        noise = (images - signal * clean) / level
        signal, level = signal_and_noise(after)
        images = signal * clean + level * noise
        return images, images

    edges = jnp.linspace(1.0, 0.0, STEPS + 1)
    times = jnp.stack([edges[:-1], edges[1:]], axis=1)
    noise = jax.random.normal(key, (len(digits), PIXELS))
    loop = nnx.scan(denoise, in_axes=(nnx.Carry, 0, None), out_axes=(nnx.Carry, 0))
    return loop(noise, times, model)


def train_classifier(train_set: Split, seed: int) -> nnx.MLP:
    """A judge that has seen real scans only."""
    model = nnx.MLP(PIXELS, 10, 128, 1, rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    def loss_fn(model: nnx.MLP, batch: Split) -> jax.Array:
        logits = model(batch.images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    @nnx.jit
    def step(model: nnx.MLP, optimizer: nnx.Optimizer, batch: Split) -> None:
        optimizer.update(model, nnx.grad(loss_fn)(model, batch))

    order = np.random.default_rng(seed)
    for _ in range(600):
        rows = order.choice(len(train_set.labels), BATCH, replace=False)
        step(model, optimizer, Split(train_set.images[rows], train_set.labels[rows]))
    return model


def recognised(classifier: nnx.MLP, images: jax.Array, labels: jax.Array) -> float:
    """Percentage of images (count, 64) that the classifier reads as their labels."""
    return 100 * float((classifier(images).argmax(-1) == labels).mean())


def load_splits() -> tuple[Split, Split]:
    """Training and test scans: always the same ones, every digit equally frequent."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 8 - 1).astype(np.float32)
    train, test, train_labels, test_labels = train_test_split(
        images, labels.astype(np.int32), test_size=0.2, stratify=labels, random_state=0
    )
    return Split(train, train_labels), Split(test, test_labels)


INK, LINE = "#22303c", "#8aa1b4"


def draw(
    images: jax.Array, trajectory: jax.Array, real: Split, losses: list[float], path: Path
) -> None:
    """Samples and scans of each digit, how samples come out of noise, and the training loss.

    Images are (10, count, 64), `trajectory` is (STEPS, 10, count, 64).
    """
    style = {"font.size": 9, "text.color": INK, "axes.edgecolor": LINE, "axes.labelcolor": INK}
    with plt.rc_context(style | {"axes.titleweight": "bold"}):
        figure, axes = plt.subplot_mosaic(
            [["samples", "real", "trajectory"], ["samples", "real", "loss"]],
            figsize=(12.4, 4.5),
            layout="constrained",
            height_ratios=[3, 2],
        )
        show(axes["samples"], images[:, :10], "Samples of each digit")
        scans = [real.images[real.labels == digit][:10] for digit in range(10)]
        show(axes["real"], np.stack(scans), "Real scans")
        moments = np.linspace(0, STEPS - 1, 10).astype(int)
        show(
            axes["trajectory"],
            jnp.swapaxes(trajectory[moments, 2:8, 0], 0, 1),
            "From noise to digits",
        )
        draw_loss(axes["loss"], losses)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def show(axes: plt.Axes, images: jax.Array | np.ndarray, title: str) -> None:
    """Images (rows, columns, 64) as one picture, with a margin around each."""
    rows, columns, _ = images.shape
    sheet = np.asarray(images).reshape(rows, columns, 8, 8)
    sheet = np.pad(sheet, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-1)
    sheet = sheet.transpose(0, 2, 1, 3).reshape(rows * 10, columns * 10)
    axes.imshow(sheet, cmap="gray_r", vmin=-1, vmax=1)
    axes.set(xticks=[], yticks=[], title=title)


def draw_loss(axes: plt.Axes, losses: list[float]) -> None:
    window = max(len(losses) // 50, 1)
    means = [np.mean(losses[i : i + window]) for i in range(0, len(losses), window)]
    axes.plot(window * np.arange(1, len(means) + 1), means, color="#d1603d", lw=1.8)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes.grid(axis="y", alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> tp.NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def whole_number(minimum: int) -> tp.Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"a whole number from {minimum} up, not {text!r}")
        return int(text)

    return parse


def folder(text: str) -> Path:
    """An output folder, made before training rather than after it."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write to {text}: {error.strerror}") from None
    return path


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="diffusion.py", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=whole_number(1), help="default: 4000, with --quick 400")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="default: 0")
    parser.add_argument("--out", type=folder, default="out", help="folder; default: out")
    parser.add_argument("--quick", action="store_true", help="a short run")
    options = parser.parse_args(arguments)
    options.steps = options.steps or (400 if options.quick else 4000)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    train_set, test_set = load_splits()
    model, losses = train(train_set, options)

    count = 30 if options.quick else 100  # samples of each digit
    digits = jnp.repeat(jnp.arange(10), count)
    key = jax.random.key(options.seed)
    plain, _ = sample(model, digits, 1.0, key)
    guided, trajectory = sample(model, digits, GUIDANCE, key)
    classifier = train_classifier(train_set, options.seed)
    right = recognised(classifier, guided, digits)
    right_plain = recognised(classifier, plain, digits)
    right_real = recognised(classifier, *test_set)

    images = guided.reshape(10, count, PIXELS)
    trajectory = trajectory.reshape(STEPS, 10, count, PIXELS)
    draw(images, trajectory, test_set, losses, options.out / "diffusion.png")
    print(f"samples of each digit: {options.out / 'diffusion.png'}")
    print(
        f"intended digit recognised in {right:.1f} % of {len(digits):,} samples, {right_plain:.1f} % "
        f"without guidance; {right_real:.1f} % of real test scans"
    )


if __name__ == "__main__":
    main()
