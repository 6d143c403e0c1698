"""Trains a low-rank hypernetwork that generates the weights of a network."""

import jax
import jax.numpy as jnp
import optax
import synecdoche
from clock import report, train
from flax import nnx

rngs = nnx.Rngs(0)
model = nnx.Sequential(nnx.Linear(16, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 4, rngs=rngs))
hyper = synecdoche.LowRank(nnx.state(model, nnx.Param), rank=4, rngs=nnx.Rngs(1))
apply = synecdoche.functional(model)
x = jax.random.normal(jax.random.key(2), (32, 16))
y = jax.random.normal(jax.random.key(3), (32, 4))
loss_of = lambda hyper, x, y: jnp.mean((apply(hyper, x) - y) ** 2)
step, losses = train(hyper, optax.adam(3e-3), loss_of, x, y, steps=30)
ratio = synecdoche.compression_ratio(hyper, model)
synecdoche.apply_to(model, hyper)
report(step, losses, ratio, model(x))
