"""Pipelines: equal to a loop over microbatches, whatever the layers write."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.nn.quick import QUICK, normal

X = jnp.asarray(normal(12, 4))


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "stage"), axis_types=(kind,) * 2)


class Block(nnx.Module):
    """Has a parameter, a statistic, a random stream and a counter."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, **QUICK, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return x + self.dropout(jnp.tanh(self.linear(self.norm(x))))


def call(layer, x):
    return layer(x)


def make(count=4):
    return nnx.stack_layers([Block(nnx.Rngs(i)) for i in range(count)])


def on_stages(layers, mesh):
    for variable in jax.tree.leaves(layers, is_leaf=lambda v: isinstance(v, nnx.Variable)):
        variable.value = jax.device_put(variable.value, NamedSharding(mesh, P("stage")))
    return layers


def one_after_the_other(layers, x, microbatches):
    forward = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    parts = [forward(x[i::microbatches], layers) for i in range(microbatches)]
    return jnp.stack(parts, 1).reshape(x.shape)


def value_and_grad(forward, layers, x):
    f = nnx.value_and_grad(lambda layers, x: jnp.mean(forward(layers, x) ** 2))
    return nnx.jit(f)(layers, x)


def assert_close(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    for a, b in pairs:
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def expected():
    layers = make()
    result = value_and_grad(lambda m, x: one_after_the_other(m, x, 3), layers, X)
    return result, nnx.state(layers)


@pytest.mark.parametrize(("kind", "recompute"), [(AxisType.Auto, False), (AxisType.Explicit, True)])
def test_values_gradients_and_what_is_written(kind, recompute, expected):
    mesh = mesh_of(kind)
    layers = on_stages(make(), mesh)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("data"))
        (loss, grads) = value_and_grad(
            lambda m, x: nnx.pipeline(call, m, x, microbatches=3, recompute=recompute), layers, x
        )
    np.testing.assert_allclose(loss, expected[0][0], rtol=1e-5)
    assert_close(grads, expected[0][1])
    assert_close(nnx.state(layers), expected[1])
    assert layers.calls[...].tolist() == [3] * 4
    for array in (grads["linear"]["kernel"][...], layers.linear.kernel[...], layers.norm.mean[...]):
        assert array.sharding.spec[0] == "stage"


def test_eagerly_over_pytrees_with_layers_that_are_rematerialised():
    mesh = mesh_of()
    linears = [nnx.Linear(4, 4, **QUICK, rngs=nnx.Rngs(i)) for i in range(4)]
    layers = on_stages(nnx.stack_layers(linears), mesh)

    @nnx.remat
    def masked(layer, x):
        y, keep = x
        return jnp.where(keep[:, None], layer(y), y), keep

    keep = jnp.arange(12) % 3 > 0
    y, same = nnx.pipeline(masked, layers, (X, keep), microbatches=6, mesh=mesh)
    expected = X
    for layer in linears:
        expected, _ = masked(layer, (expected, keep))
    np.testing.assert_allclose(y, expected, rtol=1e-4)
    assert same.dtype == bool and same.tolist() == keep.tolist()


def test_refusals():
    mesh = mesh_of()
    layers = make(2)

    def refusal(f=call, layers=layers, x=X, error=ValueError, **options):
        given = {"microbatches": 3, "mesh": mesh, **options}
        with pytest.raises(error) as info:
            nnx.pipeline(f, layers, x, **given)
        return str(info.value)

    assert "3 layers cannot be divided among 2 stages, the devices along the mesh axis 'stage'" in (
        refusal(layers=make(3))
    )
    assert "a batch of 12 cannot be divided into 5 microbatches" in refusal(microbatches=5)
    assert "cannot be divided into 0 microbatches" in refusal(microbatches=0)
    assert "need a leading batch axis of one size; their shapes are [(12, 4), (3,)]" in refusal(
        x=(X, jnp.ones(3))
    )
    assert "the mesh with axes ('data', 'stage') has no axis 'pipe'" in refusal(axis="pipe")
    assert "Pass mesh=..., or call it within jax.set_mesh(mesh)" in refusal(mesh=None)
    linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    assert (
        "Linear is not a stack of layers: 'bias' has 3 entries along its leading axis, 'kernel' has 4"
        in refusal(layers=linear)
    )

    def writes(layer, x):
        layer.linear.bias[...] += 1
        return x

    assert "writes the Param 'linear.bias' (float32[1, 4])" in refusal(writes)

    def sows(layer, x):
        layer.sow(nnx.Intermediate, "seen", x)
        return x

    assert "adds the Intermediate 'seen' to its layer" in refusal(sows)
    message = refusal(lambda layer, x: layer(x)[:, :2], error=(TypeError, ValueError))
    assert "[4,4]" in message and "[4,2]" in message
