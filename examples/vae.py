"""Train variational autoencoders on handwritten digits, and draw digits that nobody wrote.

The 1,797 scans of 8 x 8 pixels ship inside scikit-learn, so nothing is downloaded. One fifth of
them is the test set. The decoder gives a probability to each of the 17 grey levels of a pixel, so the
negative ELBO in bits bounds the length of a lossless code for a scan (Kingma and Welling 2014,
https://arxiv.org/abs/1312.6114).

    python examples/vae.py            # less than a minute on two CPU cores
    python examples/vae.py --quick    # some seconds, and blurred digits

A full run reaches about 2.1 bits per pixel on the test set with 16 latent variables. A second model,
with two, gives a map of all digits that it can draw. Both are in `vae.png` in the output folder.
"""

from __future__ import annotations

import argparse
import functools
import math
import typing as tp
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax.scipy.stats import norm
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlite as nnx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PIXELS, LEVELS = 64, 17  # of a scan; level 16 is black
BATCH = 32
DRAWS = 10  # of the latent variables of each test scan, to estimate the ELBO


class Split(tp.NamedTuple):
    """Some of the scans: `levels` (count, 64) int32 in 0..16, `labels` (count,)."""

    levels: np.ndarray
    labels: np.ndarray


class VAE(nnx.Module):
    """An encoder to a normal distribution of latent variables, and a decoder to pixels."""

    def __init__(self, latents: int, *, rngs: nnx.Rngs):
        mlp = functools.partial(nnx.MLP, width=256, depth=2, activation=nnx.gelu, dropout_rate=0.2)
        self.encoder = mlp(PIXELS, 2 * latents, rngs=rngs)
        self.decoder = mlp(latents, PIXELS * LEVELS, rngs=rngs)

    def encode(self, levels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and log standard deviation, both (batch, latents), for levels (batch, 64)."""
        mean, log_std = jnp.split(self.encoder(levels / (LEVELS - 1)), 2, axis=-1)
        return mean, log_std

    def decode(self, latents: jax.Array) -> jax.Array:
        """Logits (batch, 64, 17) of the levels of each pixel, for latents (batch, latents)."""
        return self.decoder(latents).reshape(-1, PIXELS, LEVELS)


def bits_per_pixel(model: VAE, levels: jax.Array, rngs: nnx.Rngs) -> jax.Array:
    """The negative ELBO, averaged over levels (batch, 64).

    The latent variables are reparameterised, mean + std * noise, so that gradients reach the
    encoder; the noise comes from the stream "noise" of `rngs`.
    """
    mean, log_std = model.encode(levels)
    latents = mean + jnp.exp(log_std) * rngs.noise.normal(mean.shape)
    divergence = ((mean**2 + jnp.exp(2 * log_std) - 1) / 2 - log_std).sum(-1)
    logits = model.decode(latents)
    code = optax.softmax_cross_entropy_with_integer_labels(logits, levels).sum(-1)
    return (code + divergence).mean() / (PIXELS * math.log(2))


@nnx.jit
def train_step(
    model: VAE, optimizer: nnx.Optimizer, levels: jax.Array, rngs: nnx.Rngs
) -> jax.Array:
    """One step of gradient descent; model, optimizer and random streams are changed in place."""
    loss, grads = nnx.value_and_grad(bits_per_pixel)(model, levels, rngs)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def evaluate(model: VAE, levels: jax.Array, rngs: nnx.Rngs) -> jax.Array:
    """Bits per pixel, with `DRAWS` draws of the latent variables."""
    return bits_per_pixel(model, jnp.tile(levels, (DRAWS, 1)), rngs)


@nnx.jit
def expected_levels(model: VAE, latents: jax.Array) -> jax.Array:
    """Levels (batch, 64), averaged over what the decoder thinks possible for the latents."""
    return nnx.softmax(model.decode(latents)) @ jnp.arange(LEVELS, dtype=jnp.float32)


@nnx.jit
def reconstruct(model: VAE, levels: jax.Array) -> jax.Array:
    """Expected levels (batch, 64), decoded from the mean of the latent variables."""
    return expected_levels(model, model.encode(levels)[0])


def load_splits() -> tuple[Split, Split]:
    """Training and test scans: always the same ones, every digit equally frequent."""
    levels, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        levels.astype(np.int32), labels, test_size=0.2, stratify=labels, random_state=0
    )
    return Split(train, train_labels), Split(test, test_labels)


def pixel_entropy(train: Split, test: Split) -> float:
    """Bits per test pixel of a code that knows only how frequent each value of each pixel is."""
    values = np.arange(LEVELS)[:, None, None]
    counts = (train.levels == values).sum(1) + 1.0  # (17, 64)
    bits = -np.log2(counts / counts.sum(0))
    return float(bits[test.levels, np.arange(PIXELS)].mean())


def train(latents: int, train_set: Split, test_set: Split, options: argparse.Namespace) -> VAE:
    """A trained model, in the mode without dropout."""
    model = VAE(latents, rngs=nnx.Rngs(options.seed))
    without_dropout = nnx.view(model, deterministic=True)  # the same Variables in another mode
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, 2e-3, options.steps // 20, options.steps, end_value=1e-5
    )
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.01), wrt=nnx.Param)
    rngs = nnx.Rngs(noise=options.seed + 1)
    order = np.random.default_rng(options.seed)
    run = nnx.training.loop(
        options.steps,
        evaluate=lambda: {"test": evaluate(without_dropout, test_set.levels, rngs)},
        evaluate_every=max(options.steps // 5, 1),
    )
    for step in run:
        rows = order.choice(len(train_set.levels), BATCH, replace=False)
        step.log(train=train_step(model, optimizer, train_set.levels[rows], rngs))
    return without_dropout


INK, LINE = "#22303c", "#8aa1b4"


def draw(models: dict[int, VAE], test: Split, seed: int, path: Path) -> None:
    """Reconstructions and samples on the left, the plane of two latent variables on the right."""
    style = {"font.size": 9, "text.color": INK, "axes.edgecolor": LINE, "axes.titleweight": "bold"}
    with plt.rc_context(style):
        figure, axes = plt.subplot_mosaic(
            [["rebuilt", "map", "posterior"], ["samples", "map", "posterior"]],
            figsize=(12.4, 4.5),
            layout="constrained",
            height_ratios=[3, 5],
        )
        draw_reconstructions(axes["rebuilt"], models, test)
        draw_samples(axes["samples"], models[16], seed)
        draw_map(axes["map"], models[2])
        draw_posterior(axes["posterior"], models[2], test)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def show(axes: plt.Axes, scans: jax.Array, rows: int) -> None:
    """Levels (rows * columns, 64) as one picture, row by row, with a margin around each scan."""
    images = np.asarray(scans).reshape(rows, -1, 8, 8)
    images = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    sheet = images.transpose(0, 2, 1, 3).reshape(rows * 10, -1)
    axes.imshow(sheet, cmap="gray_r", vmin=0, vmax=LEVELS - 1)
    axes.set(xticks=[], yticks=[])


def draw_reconstructions(axes: plt.Axes, models: dict[int, VAE], test: Split) -> None:
    """A test scan of each digit as it was, and as each model rebuilds it."""
    scans = test.levels[[int(np.argmax(test.labels == digit)) for digit in range(10)]]
    rebuilt = [reconstruct(model, scans) for model in models.values()]
    show(axes, jnp.concatenate([scans, *rebuilt]), rows=3)
    axes.set_yticks([4.5, 14.5, 24.5], ["test scans", *(f"{count} latents" for count in models)])
    axes.tick_params(length=0)
    axes.set_title("Reconstructions")


def draw_samples(axes: plt.Axes, model: VAE, seed: int) -> None:
    noise = jax.random.normal(jax.random.key(seed), (50, 16))
    show(axes, expected_levels(model, noise), rows=5)
    axes.set_title("Samples, 16 latent variables")


def draw_map(axes: plt.Axes, model: VAE, side: int = 16) -> None:
    """What the decoder draws at equally probable positions of the latent plane."""
    quantiles = norm.ppf((jnp.arange(side) + 0.5) / side)
    across, up = jnp.meshgrid(quantiles, quantiles[::-1])
    show(axes, expected_levels(model, jnp.stack([across.ravel(), up.ravel()], -1)), rows=side)
    axes.set_title("What two latent variables can draw")


def draw_posterior(axes: plt.Axes, model: VAE, test: Split) -> None:
    """Where the encoder puts the test scans, on the scale of the map."""
    mean, _ = model.encode(test.levels)
    positions = np.asarray(norm.cdf(mean))
    for digit, colour in enumerate(plt.get_cmap("tab10").colors):
        chosen = positions[test.labels == digit]
        axes.plot(*chosen.T, ".", color=colour, ms=5, label=str(digit))
    axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[], aspect="equal")
    axes.legend(
        frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), handletextpad=0.1, markerscale=2
    )
    axes.set_title("Where the test scans lie on that map")


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
    parser = Parser(prog="vae.py", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=whole_number(1), help="default: 2500, with --quick 300")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="default: 0")
    parser.add_argument("--out", type=folder, default="out", help="folder; default: out")
    parser.add_argument("--quick", action="store_true", help="a short run")
    options = parser.parse_args(arguments)
    options.steps = options.steps or (300 if options.quick else 2500)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    train_set, test_set = load_splits()
    models, bits = {}, {}
    for latents in (16, 2):
        models[latents] = train(latents, train_set, test_set, options)
        bits[latents] = float(evaluate(models[latents], test_set.levels, nnx.Rngs(noise=0)))
        print(f"{latents} latent variables: {bits[latents]:.2f} bits per pixel of the test set")
    draw(models, test_set, options.seed, options.out / "vae.png")
    print(f"reconstructions, samples and latent map: {options.out / 'vae.png'}")
    print(
        f"test scans take {bits[16]:.2f} bits per pixel with 16 latent variables, {bits[2]:.2f} with 2,"
        f" {pixel_entropy(train_set, test_set):.2f} by the frequency of each pixel's values alone"
    )


if __name__ == "__main__":
    main()
