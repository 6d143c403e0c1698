"""Layers on a mesh with explicit axes: results are sharded as inputs and `out_sharding` say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.nn.catalogue import of
from tests.nn.quick import QUICK, normal

IDS = np.arange(32).reshape(8, 4) % 16


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def spec(y):
    return tuple(jax.typeof(y).sharding.spec)


def put(layer, **specs):
    for name, names in specs.items():
        variable = getattr(layer, name)
        variable.value = jax.device_put(variable.value, P(*names))
    return layer


COLUMNS = {"kernel": (None, "b"), "bias": ("b",)}
LAYERS = {  # a maker, shardings of parameters, the sharding asked for
    "Linear": (of("Linear", 16, 8), COLUMNS, ("a", None, "b")),
    "LinearGeneral": (
        of("LinearGeneral", 16, (8, 4)),
        {"kernel": (None, "b", None), "bias": ("b", None)},
        ("a", None, "b", None),
    ),
    "Einsum": (of("Einsum", "bta,ac->btc", (16, 8), (8,)), COLUMNS, ("a", None, "b")),
    "Embed": (of("Embed", 16, 8), {"embedding": (None, "b")}, ("a", None, "b")),
    "Conv": (of("Conv", 16, 8, 3), {}, ("a", None, "b")),
}


@pytest.mark.parametrize("name", LAYERS)
def test_results_are_sharded_as_asked(name, mesh):
    make, specs, asked = LAYERS[name]
    x = jnp.asarray(IDS if name == "Embed" else normal(8, 4, 16))
    layer = make(nnx.Rngs(0))
    expected = layer(x)
    rows = jax.device_put(x, P("a"))
    y = put(layer, **specs)(rows, out_sharding=P(*asked))
    assert spec(y) == asked
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    if name == "Linear":
        assert spec(layer(rows)) == asked
    if name == "Conv":
        assert spec(layer(rows)) == ("a", None, None)
    if name == "Embed":
        query = jax.device_put(normal(8, 3, 8), P("a"))
        assert spec(layer.attend(query, out_sharding=P("a", None, None))) == ("a", None, None)


def test_a_sharded_contraction_needs_the_sharding_of_its_result(mesh):
    x = jax.device_put(normal(8, 16), P("a", "b"))
    layer = put(nnx.Linear(16, 8, **QUICK, rngs=nnx.Rngs(0)), kernel=("b", None))
    with pytest.raises(Exception, match="specify the output sharding"):
        layer(x)
    assert spec(layer(x, out_sharding=P("a", None))) == ("a", None)


def test_dropout_draws_the_same_mask_on_a_mesh(mesh):
    x, key = normal(8, 4, 16), jax.random.key(0)
    placed = jax.device_put(x, P("a", None, "b"))
    for layer in (nnx.Dropout(0.5), nnx.Dropout(0.5, broadcast_dims=(1,))):
        y = layer(placed, rngs=key)
        assert spec(y) == ("a", None, "b")
        np.testing.assert_array_equal(y, layer(jnp.asarray(x), rngs=key))
