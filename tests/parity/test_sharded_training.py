"""The same annotated training program on the same mesh of eight devices: losses, shardings, steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import nnxlite

flax_nnx = pytest.importorskip("flax.nnx")

STEPS = 4


def train(nnx):
    """Losses of some steps, and where parameters and moments are after them."""
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

    class Net(nnx.Module):
        def __init__(self, rngs):
            init = nnx.initializers.lecun_normal()
            columns = nnx.with_partitioning(init, ("fsdp", "tensor"))
            rows = nnx.with_partitioning(init, ("tensor", "fsdp"))
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.up = nnx.Linear(8, 16, kernel_init=columns, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(16, 8, kernel_init=rows, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    @nnx.jit
    def build():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss_of(model):
            return jnp.mean((model(x) - y) ** 2)

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    with jax.set_mesh(mesh):
        model, optimizer = build()
        rows = NamedSharding(mesh, PartitionSpec("fsdp"))
        x = jax.device_put(np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8), rows)
        losses = [float(step(model, optimizer, x, x**2)) for _ in range(STEPS)]
    adam = optimizer.opt_state[0]
    kernels = {
        f"{owner} {layer}": tree[layer]["kernel"]
        for owner, tree in (("param", nnx.state(model)), ("mu", adam.mu), ("nu", adam.nu))
        for layer in ("up", "down")
    }
    values = {name: variable.get_value() for name, variable in kernels.items()}
    parts = {name: x.sharding.shard_shape(x.shape) for name, x in values.items()}
    specs = {name: x.sharding.spec for name, x in values.items()}
    return losses, specs, parts, values, int(optimizer.step.get_value())


def test_losses_shardings_and_steps_are_the_same():
    ours, theirs = train(nnxlite), train(flax_nnx)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    assert ours[0][-1] < ours[0][0]
    assert ours[1] == theirs[1]
    assert ours[2] == theirs[2]
    assert set(ours[2].values()) == {(4, 4)} and len(ours[2]) == 6
    for name, value in ours[3].items():
        np.testing.assert_allclose(value, theirs[3][name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert ours[4] == theirs[4] == STEPS
