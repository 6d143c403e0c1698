"""Stacked layers, from a list to one object and back; and remat by path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.nn.quick import QUICK, normal

MESH = jax.make_mesh((2, 4), ("layers", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
COLUMNS = NamedSharding(MESH, P(None, "model"))


class Block(nnx.Module):
    def __init__(self, rngs, rate=0.3, size=4):
        self.linear = nnx.Linear(4, size, **QUICK, rngs=rngs)
        self.norm = nnx.BatchNorm(size, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.tied = self.linear.kernel
        self.tree = nnx.Variable({"none": None, "pair": (self.linear.kernel[0], jnp.ones(1))})

    def __call__(self, x):
        return x + self.dropout(self.norm(self.linear(x)))


def blocks(count=3):
    return [Block(nnx.Rngs(i)) for i in range(count)]


def test_scanned_and_unrolled_layers_compute_and_write_the_same():
    layers, x = blocks(), jnp.asarray(normal(6, 4))
    stacked = nnx.stack_layers(layers)
    assert type(stacked) is Block and stacked.tied is stacked.linear.kernel
    nnx.stack_layers(layers).linear.bias[...] += 1  # shares nothing with the layers
    forward = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    for _ in range(2):  # the second time with other random numbers
        y = forward(x, stacked)
        expected = x
        for layer in layers:
            expected = layer(expected)
        np.testing.assert_allclose(y, expected, rtol=1e-4)
    again = nnx.unstack_layers(stacked)
    assert isinstance(again, nnx.List) and len(again) == 3
    for before, after in zip(layers, again):
        assert nnx.graphdef(before) == nnx.graphdef(after)
        np.testing.assert_allclose(after.norm.mean[...], before.norm.mean[...], rtol=1e-4)
        assert after.dropout.rngs.count[...] == before.dropout.rngs.count[...] == 2
        assert after.dropout.rngs.key[...] == before.dropout.rngs.key[...]
        assert not nnx.diff(before.tree, after.tree)


def sharded(where=COLUMNS, **metadata):
    layer = nnx.Linear(4, 8, **QUICK, kernel_metadata=metadata, rngs=nnx.Rngs(0))
    layer.kernel.value = jax.device_put(layer.kernel.value, where)
    return layer


@pytest.mark.parametrize("partition", [None, "layers"])
def test_a_sharding_stays_behind_the_new_axis(partition):
    layers = [sharded(sharding=(None, "model")) for _ in range(4)]
    stacked = nnx.stack_layers(layers, partition=partition)
    wanted = NamedSharding(MESH, P(partition, None, "model"))
    assert stacked.kernel.value.sharding.is_equivalent_to(wanted, 3)
    assert stacked.kernel.sharding_names == (partition, None, "model")
    again = nnx.unstack_layers(stacked)
    assert again[3].kernel.value.sharding.is_equivalent_to(COLUMNS, 2)
    assert again[3].kernel.sharding_names == (None, "model")
    np.testing.assert_array_equal(again[3].kernel.value, layers[3].kernel.value)


def test_an_annotation_with_a_mesh_and_the_plan_of_a_layout():
    stacked = nnx.stack_layers([sharded(sharding=COLUMNS) for _ in range(2)])
    assert stacked.kernel.sharding_names == COLUMNS.update(spec=P(None, None, "model"))
    layers = [sharded() for _ in range(2)]
    nnx.shard(nnx.List(layers), MESH, {"**.kernel": P("model")})
    stacked = nnx.stack_layers(layers)
    again = nnx.unstack_layers(stacked)[0]
    assert stacked.kernel.value.sharding.spec[:2] == (None, "model")
    assert again.kernel.value.sharding.spec[0] == "model"
    assert nnx.graphdef(again) == nnx.graphdef(layers[0])


def test_abstract_layers():
    layers = nnx.eval_shape(lambda: [nnx.Linear(4, 8, rngs=nnx.Rngs(0)) for _ in range(2)])
    nnx.shard(nnx.List(layers), MESH, {"**.kernel": P(None, "model"), "**": None})
    value = nnx.stack_layers(layers).kernel.value
    assert isinstance(value, jax.ShapeDtypeStruct) and value.shape == (2, 4, 8)
    assert value.sharding.spec == P(None, None, "model")


def test_callbacks_hear_of_the_axis():
    seen = []
    note = lambda what: lambda v, index, name: seen.append((what, index, name))
    hooks = {"on_add_axis": note("added"), "on_remove_axis": note("removed")}
    layers = [nnx.Dict(w=nnx.Param(jnp.ones(2), **hooks)) for _ in range(2)]
    stacked = nnx.stack_layers(layers, partition="layers")
    assert seen == [("added", 0, "layers")]
    nnx.unstack_layers(stacked)
    assert seen[1:] == [("removed", 0, None)] * 2


# Remat by path ----------------------------------------------------------------------------------

INPUT = jnp.asarray(normal(2, 4))


class Wave(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, **QUICK, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x, wave=False):
        self.calls[...] += 1
        return jnp.sin(self.linear(x)) if wave else x, "text"


class Waves(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List(Wave(nnx.Rngs(i)) for i in range(3))
        self.last = self.blocks[-1]

    def __call__(self, x):
        for block in self.blocks:
            x, text = block(x, wave=True)
            assert text == "text"
        return x


def loss_of(model, x):
    return jnp.sum(model(x) ** 2)


def test_what_is_computed_again_by_path():
    def recomputed(policies):
        """How many products a gradient computes, and how many calls of it compute again."""
        text = str(nnx.make_jaxpr(nnx.grad(nnx.remat_layers(loss_of, policies)))(Waves(), INPUT))
        return text.count("dot_general["), text.count("policy=")

    dots = jax.checkpoint_policies.dots_saveable
    products = str(nnx.make_jaxpr(nnx.grad(loss_of))(Waves(), INPUT)).count("dot_general[")
    assert recomputed({"blocks.*": None}) == (products + 3, 3)
    for path in ("blocks.1", "last"):
        assert recomputed({path: None}) == (products + 1, 1)
    with pytest.warns(UserWarning, match=r"loss_of called none of the modules at blocks\.\*, so"):
        nnx.remat_layers(nnx.jit(loss_of), {"blocks.*": None})(Waves(), INPUT)
    assert recomputed({"blocks.*": dots}) == (products, 3)
    assert recomputed({"blocks.0": None, "blocks.*": dots}) == (products + 1, 3)


def test_gradients_and_what_is_written_stay():
    other = Waves()
    expected = nnx.jit(nnx.grad(loss_of))(Waves(), INPUT)
    grads = nnx.jit(nnx.grad(nnx.remat_layers(loss_of, {"blocks.*": None})))(other, INPUT)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert [int(b.calls[...]) for b in other.blocks] == [1, 1, 1]
    assert "observed" not in str(Wave.__call__)
