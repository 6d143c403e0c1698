"""Fits the threshold and the ratio of a compressor, written in Faust, to a recording."""

import jax
import jax.numpy as jnp
import optax
from clock import report, train
from faustax.modules import Compressor
from flax import nnx

model = Compressor(sample_rate=44100)
x = 0.5 * jnp.sin(jnp.arange(256) / 5.0)[None]


def loss_of(model, x, target):
    carry = model.initialize_carry()
    return jnp.mean((model.process_block(carry, x)[1] - target) ** 2)


step, losses = train(model, optax.adam(1e-2), loss_of, x, 0.7 * x, steps=10)
report(step, losses, jax.tree.leaves(nnx.state(model)))
