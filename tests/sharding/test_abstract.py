"""Abstract models: what they keep of shapes, dtypes and shardings, and that nothing is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.sharding.meshes import linear, mesh_of, names_of, steps


def shapes(tree):
    """Path to (shape, dtype, names of the sharding) of every abstract leaf."""
    out = {}
    for path, leaf in nnx.to_flat_state(nnx.pure(tree)):
        assert isinstance(leaf, jax.ShapeDtypeStruct), path
        out[path] = (leaf.shape, leaf.dtype.name, names_of(leaf))
    return out


SHARDED = {
    ("bias",): ((16,), "float32", ("model",)),
    ("kernel",): ((8, 16), "float32", ("data", "model")),
}
UNSHARDED = {path: (shape, dtype, None) for path, (shape, dtype, _) in SHARDED.items()}


def test_the_state_of_an_abstract_model_tells_jit_where_parameters_are_to_be_made():
    make = lambda: linear("data", "model")
    _, abstract = nnx.get_abstract_model(make, mesh_of())
    where = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    state = jax.jit(lambda: nnx.state(make()), out_shardings=where)()
    assert names_of(state["kernel"].value) == ("data", "model")
    np.testing.assert_array_equal(state["kernel"].value, steps(None, (8, 16)))
    with jax.set_mesh(mesh_of()):
        assert shapes(nnx.state(nnx.jit(make).eval_shape())) == SHARDED


def test_get_abstract_model_resolves_logical_names_and_may_lack_a_mesh():
    make = lambda: linear("batch", "mlp")
    with nnx.logical_axis_rules([("batch", "data"), ("mlp", "model")]):
        assert shapes(nnx.get_abstract_model(make, mesh_of())[1]) == SHARDED
        assert shapes(nnx.get_abstract_model(make, None)[1]) == UNSHARDED
    with pytest.raises(ZeroDivisionError):
        nnx.get_abstract_model(lambda: 1 // 0, mesh_of())


def test_as_abstract():
    model, found = linear("data", "model"), []
    state = nnx.as_abstract(nnx.state(model))
    assert state["kernel"].value.sharding == model.kernel.value.sharding
    assert state["kernel"].sharding_names and isinstance(model.kernel.value, jax.Array)
    nnx.jit(lambda model: found.append(nnx.as_abstract(nnx.state(model))))(model)
    assert shapes(found[0]) == UNSHARDED
    with jax.set_mesh(mesh_of()):
        assert shapes(nnx.as_abstract(nnx.state(model))) == SHARDED
        born = linear("data", "model")
        kept = nnx.abstract_with_sharding(nnx.state(born))
        assert kept["kernel"].value is born.kernel.value
        tree = {"a": jnp.ones(2), "s": jax.ShapeDtypeStruct((2,), jnp.float32), "c": 1}
        assert nnx.abstract_with_sharding(tree)["s"].sharding is None
    again = nnx.as_abstract(born)  # outside the mesh: as the arrays are
    assert isinstance(again, nnx.Linear) and again is not born
    assert shapes(nnx.state(again)) == SHARDED
    tree = nnx.as_abstract({"n": np.ones(3), "b": 1.0, "c": "x", "d": None, "k": jax.random.key(0)})
    assert tree["n"] == jax.ShapeDtypeStruct((3,), np.float64)
    assert (tree["b"], tree["c"], tree["d"]) == (1.0, "x", None)
    assert tree["k"].shape == () and jnp.issubdtype(tree["k"].dtype, jax.dtypes.prng_key)


def test_eval_shape_places_on_the_mesh_of_a_variable():
    mesh, zeros = mesh_of(), jnp.zeros((8, 4))
    make = lambda: nnx.Dict(
        a=nnx.Param(zeros, sharding=("data", None), mesh=mesh),
        b=nnx.Param(zeros, sharding=NamedSharding(mesh, P("model"))),
        c=nnx.Param(zeros, sharding=("data",)),
    )
    shapes = nnx.eval_shape(make)
    assert names_of(shapes.a) == ("data", None) and names_of(shapes.b) == ("model",)
    assert shapes.c.value.sharding is None
