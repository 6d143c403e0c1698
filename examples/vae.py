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

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import options, picture
from jax.scipy.stats import norm
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlite as nnx

PIXELS, LEVELS, BATCH = 64, 17, 32
DRAWS = 10  # of the latent variables of each test scan, to estimate the ELBO


class VAE(nnx.Module):
    """An encoder to a normal distribution of latent variables, and a decoder to pixels."""

    def __init__(self, latents: int, rngs: nnx.Rngs):
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
    """The negative ELBO, averaged over levels (batch, 64); noise comes from the stream "noise"."""
    mean, log_std = model.encode(levels)
    latents = mean + jnp.exp(log_std) * rngs.noise.normal(mean.shape)
    divergence = ((mean**2 + jnp.exp(2 * log_std) - 1) / 2 - log_std).sum(-1)
    logits = model.decode(latents)
    code = optax.softmax_cross_entropy_with_integer_labels(logits, levels).sum(-1)
    return (code + divergence).mean() / (PIXELS * math.log(2))


@nnx.jit
def train_step(model: VAE, optimizer: nnx.Optimizer, levels, rngs: nnx.Rngs) -> jax.Array:
    """One step of gradient descent; model, optimizer and random streams change in place."""
    loss, grads = nnx.value_and_grad(bits_per_pixel)(model, levels, rngs)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def evaluate(model: VAE, levels, rngs: nnx.Rngs) -> jax.Array:
    return bits_per_pixel(model, jnp.tile(levels, (DRAWS, 1)), rngs)


@nnx.jit
def expected_levels(model: VAE, latents) -> jax.Array:
    """Levels (batch, 64), averaged over what the decoder thinks possible for the latents."""
    return nnx.softmax(model.decode(latents)) @ jnp.arange(LEVELS, dtype=jnp.float32)


def train(latents: int, levels: np.ndarray, steps: int, seed: int) -> VAE:
    """A trained model, in the mode without dropout."""
    model = VAE(latents, nnx.Rngs(seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 20, steps, end_value=1e-5)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.01), wrt=nnx.Param)
    rngs = nnx.Rngs(noise=seed + 1)
    order = np.random.default_rng(seed)
    for step in nnx.training.loop(steps):
        rows = order.choice(len(levels), BATCH, replace=False)
        step.log(bits=train_step(model, optimizer, levels[rows], rngs))
    return nnx.view(model, deterministic=True)


def load_splits():
    """Training and test scans, levels (count, 64) in 0..16, and the labels of the test scans."""
    levels, labels = load_digits(return_X_y=True)
    train, test, _, test_labels = train_test_split(
        levels.astype("int32"), labels, test_size=0.2, stratify=labels, random_state=0
    )
    return train, test, test_labels


def pixel_entropy(train: np.ndarray, test: np.ndarray) -> float:
    """Bits per test pixel of a code that knows only how frequent each value of each pixel is."""
    counts = (train == np.arange(LEVELS)[:, None, None]).sum(1) + 1.0  # (17, 64)
    return float(-np.log2(counts / counts.sum(0))[test, np.arange(PIXELS)].mean())


def draw(models: dict[int, VAE], test, labels, seed: int, path) -> None:
    """Scans and reconstructions, samples, and the map of two latent variables."""
    scans = test[[int(np.argmax(labels == digit)) for digit in range(10)]]
    rebuilt = [expected_levels(model, model.encode(scans)[0]) for model in models.values()]
    samples = expected_levels(models[16], jax.random.normal(jax.random.key(seed), (50, 16)))
    quantiles = norm.ppf((jnp.arange(16) + 0.5) / 16)
    plane = jnp.stack(jnp.meshgrid(quantiles, quantiles[::-1]), -1).reshape(-1, 2)
    sheets = (
        ("Scans, and as 16 and 2 latents rebuild them", 3, jnp.concatenate([scans, *rebuilt])),
        ("Samples, 16 latent variables", 5, samples),
        ("What two latent variables can draw", 16, expected_levels(models[2], plane)),
    )
    with picture(path, 12, 4) as figure:
        for axes, (title, rows, images) in zip(figure.subplots(1, 3), sheets):
            images = np.asarray(images).reshape(rows, -1, 8, 8)
            images = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
            axes.imshow(images.transpose(0, 2, 1, 3).reshape(rows * 10, -1), cmap="gray_r")
            axes.set(xticks=[], yticks=[], title=title)


def main() -> None:
    run = options(__doc__)
    train_set, test, labels = load_splits()
    steps = 300 if run.quick else 2500
    models = {latents: train(latents, train_set, steps, run.seed) for latents in (16, 2)}
    bits = [float(evaluate(model, test, nnx.Rngs(noise=0))) for model in models.values()]
    draw(models, test, labels, run.seed, run.out / "vae.png")
    print(f"reconstructions, samples and latent map: {run.out / 'vae.png'}")
    print(
        f"test scans take {bits[0]:.2f} bits per pixel with 16 latent variables, {bits[1]:.2f} with 2,"
        f" {pixel_entropy(train_set, test):.2f} by the frequency of each pixel's values alone"
    )


if __name__ == "__main__":
    main()
