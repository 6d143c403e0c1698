"""Trains by the package's step for many devices, on a mesh of all there are."""

import jax
import jax.numpy as jnp
import optax
from clock import report
from flax import nnx
from substrax.mesh import DeviceMeshManager
from substrax.spmd import create_data_parallel_sharding, place_batch_on_shards, spmd_train_step

rngs = nnx.Rngs(0)
layers = [layer for _ in range(6) for layer in (nnx.Linear(16, 16, rngs=rngs), nnx.relu)]
model = nnx.Sequential(*layers, nnx.Linear(16, 1, rngs=rngs))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
mesh = DeviceMeshManager.create_device_mesh({"data": jax.device_count()})
batch = {"x": jax.random.normal(jax.random.key(1), (32, 16)), "y": jnp.ones((32, 1))}
batch = place_batch_on_shards(batch, create_data_parallel_sharding(mesh))


def loss_of(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@nnx.jit
def train_step(model, optimizer, batch):
    return spmd_train_step(model, optimizer, loss_of, batch)


def step():
    with jax.set_mesh(mesh):
        return train_step(model, optimizer, batch)


losses = [step() for _ in range(20)]
assert losses[-1] < losses[0]
report(step, losses, model(batch["x"]))
