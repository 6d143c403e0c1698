"""Layers on a mesh with explicit axes: results are sharded as inputs and `out_sharding` say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.nn.quick import QUICK, normal, quick


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def sharded(x, *spec):
    return jax.device_put(x, P(*spec))


def spec(y):
    return tuple(jax.typeof(y).sharding.spec)


def put(layer, **specs):
    for name, names in specs.items():
        variable = getattr(layer, name)
        variable.value = sharded(variable.value, *names)
    return layer


def test_linear_products_are_sharded_as_asked(mesh):
    x = normal(8, 4, 16)
    layer = nnx.Linear(16, 8, **QUICK, rngs=nnx.Rngs(0))
    expected = x @ np.asarray(layer.kernel.value) + np.asarray(layer.bias.value)
    put(layer, kernel=(None, "b"), bias=("b",))
    y = layer(sharded(x, "a", None, None))
    assert spec(y) == spec(layer(sharded(x, "a"), out_sharding=P("a", None, "b")))
    assert spec(y) == ("a", None, "b")
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_a_sharded_contraction_needs_the_sharding_of_its_result(mesh):
    x = sharded(normal(8, 16), "a", "b")
    layer = put(nnx.Linear(16, 8, **QUICK, rngs=nnx.Rngs(0)), kernel=("b", None))
    with pytest.raises(Exception, match="specify the output sharding"):
        layer(x)
    assert spec(layer(x, out_sharding=P("a", None))) == ("a", None)


def test_general_and_einsum_products_are_sharded_as_asked(mesh):
    x = sharded(normal(8, 4, 16), "a", None, None)
    layer = nnx.LinearGeneral(16, (8, 4), **QUICK, rngs=nnx.Rngs(0))
    put(layer, kernel=(None, "b", None), bias=("b", None))
    assert spec(layer(x, out_sharding=P("a", None, "b", None))) == ("a", None, "b", None)
    layer = nnx.Einsum("bta,ac->btc", (16, 8), (8,), **QUICK, rngs=nnx.Rngs(0))
    put(layer, kernel=(None, "b"), bias=("b",))
    assert spec(layer(x, out_sharding=P("a", None, "b"))) == ("a", None, "b")


def test_embeddings_are_sharded_as_asked(mesh):
    embed = nnx.Embed(16, 8, embedding_init=quick, rngs=nnx.Rngs(0))
    table = np.asarray(embed.embedding.value)
    put(embed, embedding=(None, "b"))
    numbers = np.arange(24).reshape(8, 3) % 16
    rows = embed(sharded(jnp.asarray(numbers), "a"), out_sharding=P("a", None, "b"))
    assert spec(rows) == ("a", None, "b")
    np.testing.assert_array_equal(rows, table[numbers])
    query = sharded(normal(8, 3, 8), "a", None, None)
    assert spec(embed.attend(query, out_sharding=P("a", None, None))) == ("a", None, None)


def test_convolutions_are_sharded_as_asked(mesh):
    x = sharded(normal(8, 4, 16), "a", None, None)
    layer = nnx.Conv(16, 8, 3, **QUICK, rngs=nnx.Rngs(0))
    assert spec(layer(x)) == ("a", None, None)
    assert spec(layer(x, out_sharding=P("a", None, "b"))) == ("a", None, "b")


def test_dropout_draws_the_same_mask_on_a_mesh(mesh):
    x = normal(8, 4, 16)
    layer = nnx.Dropout(0.5)
    key = jax.random.key(0)
    y = layer(sharded(x, "a", None, "b"), rngs=key)
    assert spec(y) == ("a", None, "b")
    np.testing.assert_array_equal(y, layer(jnp.asarray(x), rngs=key))
    shared = nnx.Dropout(0.5, broadcast_dims=(1,))
    assert spec(shared(sharded(x, "a", None, "b"), rngs=key)) == ("a", None, "b")
    assert spec(jax.jit(lambda x: layer(x, rngs=key))(sharded(x, "a", None, None)))[0] == "a"
