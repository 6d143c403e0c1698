"""Fits the threshold and the ratio of a compressor, written in Faust, to a recording."""

import jax
import jax.numpy as jnp
import optax
from clock import report
from faustax.modules import Compressor
from flax import nnx

model = Compressor(sample_rate=44100)
x = 0.5 * jnp.sin(jnp.arange(256) / 5.0)[None]
target = 0.7 * x
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, x, target):
    def loss_of(model):
        carry = model.initialize_carry()
        return jnp.mean((model.process_block(carry, x)[1] - target) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


losses = [step(model, optimizer, x, target) for _ in range(10)]
report(lambda: step(model, optimizer, x, target), losses, jax.tree.leaves(nnx.state(model)))
