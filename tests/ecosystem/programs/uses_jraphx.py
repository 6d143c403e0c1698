"""Trains a graph convolution network on a batch of small graphs."""

import jax
import jax.numpy as jnp
import optax
from clock import report, train
from flax import nnx
from jraphx.nn.models import GCN
from jraphx.nn.pool import global_mean_pool

edges = jax.random.randint(jax.random.key(0), (2, 60), 0, 20)
x = jax.random.normal(jax.random.key(1), (20, 8))
graphs, labels = jnp.repeat(jnp.arange(4), 5), jnp.array([0, 1, 2, 0])
model = GCN(in_features=8, hidden_features=16, num_layers=3, out_features=3, rngs=nnx.Rngs(0))


def loss_of(model, x, edges):
    logits = global_mean_pool(model(x, edges), graphs, 4)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


step, losses = train(model, optax.adam(1e-2), loss_of, x, edges, steps=30)
report(step, losses, model(x, edges))
