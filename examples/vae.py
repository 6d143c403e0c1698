"""Train variational autoencoders on handwritten digits, and draw digits that nobody wrote.

The 1,797 scans of 8 x 8 pixels ship inside scikit-learn; a fifth of them is for the test. The decoder
gives a probability to each of the 17 grey levels of a pixel, so the negative ELBO in bits bounds the
length of a lossless code for a scan (Kingma and Welling 2014, https://arxiv.org/abs/1312.6114).

    python examples/vae.py            # less than a minute on two CPU cores
    python examples/vae.py --quick    # some seconds, and blurred digits

Result: about 2.1 bits per pixel on the test set with 16 latent variables. A second model, with two,
gives a map of all digits that it can draw. Both are in `vae.png` in the output folder.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import options, picture, tiles
from jax.scipy.stats import norm
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlite as nnx

PIXELS, LEVELS, BATCH = 64, 17, 32


class VAE(nnx.Module):
    """An encoder to a normal distribution of latent variables, and a decoder to pixels."""

    def __init__(self, latents: int, rngs: nnx.Rngs):
        def hidden(ins: int) -> tuple:
            return nnx.Linear(ins, 256, rngs=rngs), nnx.gelu, nnx.Dropout(0.2, rngs=rngs)

        def mlp(ins: int, outs: int) -> nnx.Sequential:
            return nnx.Sequential(*hidden(ins), *hidden(256), nnx.Linear(256, outs, rngs=rngs))

        self.encoder, self.decoder = mlp(PIXELS, 2 * latents), mlp(latents, PIXELS * LEVELS)

    def encode(self, levels: jax.Array) -> list[jax.Array]:
        """Mean and log standard deviation, both (batch, latents), for levels (batch, 64)."""
        return jnp.split(self.encoder(levels / (LEVELS - 1)), 2, axis=-1)

    def decode(self, latents: jax.Array) -> jax.Array:
        """Logits (batch, 64, 17) of the levels of each pixel, for latents (batch, latents)."""
        return self.decoder(latents).reshape(-1, PIXELS, LEVELS)


@nnx.jit
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
def expected_levels(model: VAE, latents) -> jax.Array:
    """Levels (batch, 64), averaged over what the decoder thinks possible for the latents."""
    return nnx.softmax(model.decode(latents)) @ jnp.arange(LEVELS, dtype=jnp.float32)


def train(latents: int, levels: np.ndarray, steps: int) -> VAE:
    """A trained model, in the mode without dropout."""
    model, rngs = VAE(latents, nnx.Rngs(0)), nnx.Rngs(noise=1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 20, steps, end_value=1e-5)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.01), wrt=nnx.Param)
    draw = np.random.default_rng(0)
    for step in nnx.training.loop(steps):
        rows = draw.choice(len(levels), BATCH, replace=False)
        step.log(bits=train_step(model, optimizer, levels[rows], rngs))
    return nnx.view(model, deterministic=True)


def main() -> None:
    run = options(__doc__)
    levels, labels = load_digits(return_X_y=True)
    levels, test, _, labels = train_test_split(
        levels.astype("int32"), labels, test_size=0.2, stratify=labels, random_state=0
    )
    large, small = (train(latents, levels, 300 if run.quick else 2500) for latents in (16, 2))
    draws = np.tile(test, (10, 1))  # ten draws of the latent variables of each scan
    bits, bits_of_small = (bits_per_pixel(m, draws, nnx.Rngs(noise=0)) for m in (large, small))

    scans = test[[int(np.argmax(labels == digit)) for digit in range(10)]]
    rebuilt = [expected_levels(model, model.encode(scans)[0]) for model in (large, small)]
    samples = expected_levels(large, jax.random.normal(jax.random.key(0), (50, 16)))
    quantiles = norm.ppf((jnp.arange(16) + 0.5) / 16)
    plane = jnp.stack(jnp.meshgrid(quantiles, quantiles[::-1]), -1).reshape(-1, 2)
    with picture(run.out / "vae.png", 12, 4) as figure:
        left, middle, right = figure.subplots(1, 3)
        rows = np.stack([scans, *rebuilt])
        tiles(left, rows, "Scans, and as 16 and 2 latents rebuild them", 0, 16)
        tiles(middle, samples.reshape(5, 10, 64), "Samples, 16 latent variables", 0, 16)
        maps = expected_levels(small, plane).reshape(16, 16, 64)
        tiles(right, maps, "What two latent variables can draw", 0, 16)

    counts = (levels == np.arange(LEVELS)[:, None, None]).sum(1) + 1.0  # (17, 64)
    by_frequency = -np.log2(counts / counts.sum(0))[test, np.arange(PIXELS)].mean()
    print(
        f"test scans take {bits:.2f} bits per pixel with 16 latent variables, {bits_of_small:.2f} with"
        f" 2, {by_frequency:.2f} by the frequency of each pixel's values alone"
    )


if __name__ == "__main__":
    main()
