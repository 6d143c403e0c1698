"""Trains a low-rank hypernetwork that generates the weights of a network."""

import jax
import jax.numpy as jnp
import optax
import synecdoche
from clock import report
from flax import nnx

rngs = nnx.Rngs(0)
model = nnx.Sequential(nnx.Linear(16, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 4, rngs=rngs))
hyper = synecdoche.LowRank(nnx.state(model, nnx.Param), rank=4, rngs=nnx.Rngs(1))
apply = synecdoche.functional(model)
optimizer = nnx.Optimizer(hyper, optax.adam(3e-3), wrt=nnx.Param)
x = jax.random.normal(jax.random.key(2), (32, 16))
y = jax.random.normal(jax.random.key(3), (32, 4))


@nnx.jit
def step(hyper, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda hyper: jnp.mean((apply(hyper, x) - y) ** 2))(hyper)
    optimizer.update(hyper, grads)
    return loss


losses = [step(hyper, optimizer, x, y) for _ in range(30)]
assert losses[-1] < losses[0]
ratio = synecdoche.compression_ratio(hyper, model)
synecdoche.apply_to(model, hyper)
report(lambda: step(hyper, optimizer, x, y), losses, ratio, model(x))
