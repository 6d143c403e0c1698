"""A small model, the same on every number of processes, and steps of training it."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx

ROWS = 16


class Net(nnx.Module):
    """A sharded kernel, noise, what is on no mesh, and NumPy arrays."""

    def __init__(self, rngs):
        split = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", None))
        self.first = nnx.Linear(8, 16, kernel_init=split, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(16, 1, rngs=rngs)
        self.scale = nnx.Variable(np.full(2, 0.5, "float32"))

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.first(x)))) * self.scale[0]


def join(**options):
    """Join the processes that `starting` started."""
    count, number = (int(os.environ[f"JAX_{name}"]) for name in ("NUM_PROCESSES", "PROCESS_ID"))
    jax.distributed.initialize(num_processes=count, process_id=number, **options)


def mesh_of(devices):
    return jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def build(mesh, seed):
    def init():
        model = Net(nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    with jax.set_mesh(mesh):
        model, optimizer = nnx.jit(init)()
    return {"model": model, "optimizer": optimizer, "metrics": nnx.metrics.Average("loss")}


@nnx.jit
def step(model, optimizer, metrics, x):
    def loss_of(model):
        return jnp.mean((model(x) - x.sum(-1, keepdims=True)) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def train(mesh, items, steps):
    """Train with the rows of this process; the losses."""
    over = NamedSharding(mesh, P("data"))
    losses = []
    with jax.set_mesh(mesh):
        for number in steps:
            whole = np.random.default_rng(number).normal(size=(ROWS, 8)).astype("float32")
            x = jax.make_array_from_callback(whole.shape, over, whole.__getitem__)
            losses.append(float(step(*items.values(), x)))
    return losses
