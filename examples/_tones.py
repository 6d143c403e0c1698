"""Tones for `pitch.py`: sound made by rule, and the outputs of CREPE for frequencies and back."""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

RATE, FRAME = 16_000, 1024  # samples in a second, and in what the network hears at once
CENTS = 1997.3794 + 20 * jnp.arange(360)  # of the outputs, above 10 Hz; 100 cents are a semitone


def tones(draw: np.random.Generator, count: int, fundamental: bool) -> tuple[np.ndarray, ...]:
    """Sound (count, 1024) of eight harmonics or those but the first, and the frequencies in Hz."""
    frequency = 32.7 * 2 ** draw.uniform(0, 5.9, (count, 1))
    number = np.arange(1, 9)
    strength = draw.uniform(0, 1, (count, 8)) / number * (frequency * number < RATE / 2)
    if not fundamental:
        strength[:, 0] = 0
    phase = draw.uniform(0, 2 * np.pi, (count, 8, 1))
    angle = 2 * np.pi * (frequency * number)[..., None] * np.arange(FRAME) / RATE
    sound = (strength[..., None] * np.sin(angle + phase)).sum(1)
    sound = sound + 0.05 * sound.std(1, keepdims=True) * draw.normal(size=sound.shape)
    sound = (sound - sound.mean(1, keepdims=True)) / sound.std(1, keepdims=True)
    return sound.astype("float32"), frequency[:, 0].astype("float32")


def targets(frequency: jax.Array) -> jax.Array:
    """Outputs (batch, 360) for frequencies (batch,): a bump of 25 cents, as in the paper."""
    cents = 1200 * jnp.log2(frequency / 10)[:, None]
    return jnp.exp(-(((CENTS - cents) / 25) ** 2) / 2)


def frequencies(outputs: jax.Array) -> jax.Array:
    """Frequencies (batch,) in Hz: the mean around the largest of the outputs, by weight."""
    near = jnp.clip(outputs.argmax(-1)[:, None] + jnp.arange(-4, 5), 0, 359)
    weight = jnp.take_along_axis(outputs, near, 1)
    return 10 * 2 ** ((weight * CENTS[near]).sum(1) / weight.sum(1) / 1200)


def errors(pitch: tp.Callable[[np.ndarray], jax.Array]) -> list[np.ndarray]:
    """How far the heard pitch is from the true one, in cents, with and without a fundamental."""
    pairs = (tones(np.random.default_rng(1), 1024, fundamental) for fundamental in (True, False))
    return [np.abs(1200 * np.log2(np.asarray(pitch(sound)) / true)) for sound, true in pairs]
