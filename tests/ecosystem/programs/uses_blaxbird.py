"""Trains a classifier by the package's own loop, with its evaluation and its hook for averages."""

import itertools

import jax
import jax.numpy as jnp
import optax
from blaxbird import train_fn
from clock import report
from flax import nnx

rngs = nnx.Rngs(0)
layers = [layer for _ in range(4) for layer in (nnx.Linear(16, 16, rngs=rngs), nnx.relu)]
model = nnx.Sequential(*layers, nnx.Linear(16, 3, rngs=rngs))
optimizer = nnx.ModelAndOptimizer(model, optax.adam(1e-2))
batch = {
    "x": jax.random.normal(jax.random.key(1), (32, 16)),
    "label": jax.random.randint(jax.random.key(2), (32,), 0, 3),
}


def loss_of(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@nnx.jit
def train_step(model, rng_key, batch):
    return nnx.value_and_grad(loss_of)(model, batch)


@nnx.jit
def val_step(model, rng_key, batch):
    return loss_of(model, batch)


def train(steps):
    often = {"n_steps": steps, "eval_every_n_steps": steps, "n_eval_batches": 2}
    fit = train_fn(fns=(train_step, val_step), **often)
    fit(jax.random.key(3), optimizer, itertools.repeat(batch), itertools.repeat(batch))
    return model.layers[0].kernel[...]


before = loss_of(model, batch)
train(30)
assert loss_of(model, batch) < before
report(lambda: train(10), loss_of(model, batch), jnp.ravel(model(batch["x"])))
