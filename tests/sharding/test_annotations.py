"""Annotations: metadata without a mesh, placement at birth with one; what transforms make of them."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.sharding.meshes import linear, mesh_of, names_of

KINDS = (AxisType.Auto, AxisType.Explicit)
LAYERS = {nnx.PARTITION_NAME: "layers"}
RULES = (("batch", "data"), ("mlp", "model"), ("embed", None))


def param(*shape, **metadata):
    return nnx.Param(jnp.zeros(shape), **metadata)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def mesh(request):
    mesh = mesh_of(request.param)
    with jax.set_mesh(mesh):
        yield mesh


# On a mesh ---------------------------------------------------------------------------------------


def test_a_mesh_entered_as_a_context_manager_counts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh_of():
            assert names_of(linear("data", "model").kernel) == ("data", "model")
            assert names_of(nnx.jit(lambda: linear("data", "model"))().kernel) == ("data", "model")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.zeros((8, 4), np.float32), ("data", None)),
        ({"a": jnp.zeros((8, 4)), "b": jnp.zeros((2, 4, 3))}, ("data", None)),
        (jax.ShapeDtypeStruct((8, 4), jnp.float32), ("data", None)),
    ],
    ids=["numpy", "pytree", "abstract"],
)
def test_what_is_placed(value, expected):
    with jax.set_mesh(mesh_of()):
        held = nnx.Variable(value, sharding=("data", None)).value
    assert [names_of(leaf) for leaf in jax.tree.leaves(held)] == [expected] * len(
        jax.tree.leaves(value)
    )
    jax.tree.map(lambda x, y: x.shape == y.shape or pytest.fail("shape"), held, value)


def test_an_empty_annotation_moves_nothing(mesh):
    rows = jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh, P("data")))
    for empty in ((), [], P()):
        assert nnx.Param(rows, sharding=empty).value is rows
    assert names_of(nnx.Param(rows, sharding=(None,))) == (None,)


def test_references_are_made_of_placed_arrays():
    with jax.set_mesh(mesh_of()):
        variable = param(8, 4, sharding=("data", None), ref=True)
    assert names_of(variable.get_value()) == ("data", None)


def test_inside_shard_map_a_value_is_one_shard():
    mesh = mesh_of()

    def shard(x):
        count = nnx.Variable(x, sharding=("data", "model"))
        whole = nnx.Variable(x, sharding=(("data", "model"), None))
        return count.value + whole.value

    with jax.set_mesh(mesh):
        y = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(
            jnp.ones((8, 4))
        )
        np.testing.assert_array_equal(y, np.full((8, 4), 2))
        # Only `data` is divided by hand; `model` is still the compiler's.
        partly = jax.shard_map(
            shard, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
        )
        np.testing.assert_array_equal(jax.jit(partly)(jnp.ones((8, 4))), np.full((8, 4), 2))


def test_writing_does_not_move_a_value_back(mesh):
    variable = param(8, 4, sharding=("data", None))
    variable.value = jnp.ones((8, 4))
    assert variable.value.is_fully_replicated  # placed at birth, and the writer's business since


# Logical names -----------------------------------------------------------------------------------


def test_rules_place_parameters(mesh):
    with nnx.logical_axis_rules(RULES):
        layer = linear("batch", "mlp")
        assert layer.kernel.sharding_names == ("batch", "mlp")  # the annotation stays logical
        assert names_of(layer.kernel) == ("data", "model")


def test_a_jitted_function_is_traced_anew_under_other_rules():
    with jax.set_mesh(mesh_of()):
        make = nnx.jit(lambda: param(8, 4, sharding=("rows", None)))
        with nnx.logical_axis_rules([("rows", "data")]):
            assert names_of(make())[0] == "data"
        with nnx.logical_axis_rules([("rows", "model")]):
            assert names_of(make())[0] == "model"


# Axes that transforms add and remove -------------------------------------------------------------


@pytest.mark.parametrize("name, first", [("data", "data"), ("layers", None)])
def test_an_annotation_that_brings_its_mesh_gets_an_axis_and_loses_it(name, first):
    mesh, over = mesh_of(), {nnx.PARTITION_NAME: name}
    rows = NamedSharding(mesh, P(None, "model"))
    make = lambda i: nnx.Param(jnp.ones((4, 8)), sharding=rows)
    stacked = nnx.vmap(make, transform_metadata=over)(jnp.arange(2))
    assert stacked.sharding_names == NamedSharding(mesh, P(first, None, "model"))
    seen = []
    body = lambda carry, v: (seen.append(v.sharding_names), carry)[1]
    scan = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=over)
    scan(0.0, stacked)
    assert seen[0] == rows


NAMED = {nnx.PARTITION_NAME: "layers", "nickname": "nick"}


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (0, ("nick", "a", "b")),
        (1, ("a", "nick", "b")),
        (3, ("a", "b", None, "nick")),
        (-1, ("a", "b", "nick")),
    ],
)
def test_names_of_other_metadata_follow(index, expected):
    variable = nnx.Param(jnp.ones((2, 3)), nickname=("a", "b"), note="a note")
    nnx.spmd.add_axis(variable, index, {**NAMED, "note": "x", "absent": "y"})
    assert variable.nickname == expected and variable.note == "a note"
    assert not variable.has_metadata("absent")
    if index < 3:
        nnx.spmd.remove_axis(variable, index, NAMED)
        assert variable.nickname == ("a", "b")


@pytest.mark.parametrize("index", [1, 5, -3])
def test_another_name_in_other_metadata_is_refused_and_nothing_changes(index):
    told = []
    note = lambda *event: told.append(event)
    variable = param(2, 3, sharding=("layers", "b"), nickname=("nick", "b"), on_remove_axis=note)
    with pytest.raises(ValueError, match=rf"under 'nickname': axis {index} is .*, not 'nick' as"):
        nnx.spmd.remove_axis(variable, index, NAMED)
    assert variable.sharding_names == ("layers", "b") and variable.nickname == ("nick", "b")
    assert not told


def test_transforms_move_names_of_other_metadata():
    make = lambda i: nnx.Param(jnp.ones(2), sharding=("a",), nickname=("b",))
    stacked = nnx.vmap(make, out_axes=1, transform_metadata=NAMED)(jnp.arange(3))
    assert (stacked.sharding_names, stacked.nickname) == (("a", "layers"), ("b", "nick"))
    seen = []

    def step(total, variable):
        seen.append((variable.sharding_names, variable.nickname))
        return total + variable.sum(), nnx.Param(variable * 2, nickname=("c",))

    over = {"in_axes": (nnx.Carry, 1), "transform_metadata": NAMED}
    _, doubled = nnx.scan(step, **over)(0.0, stacked)
    assert set(seen) == {(("a",), ("b",))} and doubled.nickname == ("nick", "c")
    assert (stacked.sharding_names, stacked.nickname) == (("a", "layers"), ("b", "nick"))


@pytest.mark.parametrize(
    "axis, wanted", [(1, ("data", None, "model")), (-1, ("data", "model", None))]
)
def test_an_unnamed_axis_is_where_the_transform_puts_it(axis, wanted):
    make = lambda i: nnx.Param(jnp.ones((8, 8)) * i, sharding=("data", "model"))
    assert nnx.vmap(make, out_axes=axis)(jnp.arange(3)).sharding_names == wanted
    short = lambda i: nnx.Param(jnp.ones((8, 8)) * i, sharding=("data",))
    assert nnx.vmap(short, out_axes=2)(jnp.arange(3)).sharding_names == ("data", None, None)
    named = nnx.vmap(short, out_axes=-1, transform_metadata=LAYERS)(jnp.arange(3))
    assert named.sharding_names == ("data", None, "layers")
    sharding = NamedSharding(mesh_of(), P("data", "model"))
    placed = nnx.vmap(lambda i: nnx.Param(jnp.ones((8, 8)) * i, sharding=sharding), out_axes=axis)
    assert tuple(placed(jnp.arange(3)).sharding_names.spec) == wanted


@pytest.mark.parametrize(
    "names", [("layers", "data", "model"), ("layers", None, "model"), ("layers",)]
)
def test_annotations_of_arguments_and_their_copies_are_left_alone(names):
    def both(param, x):
        param.value = param + x
        return nnx.Variable(param.value * 2, sharding=param.sharding_names, eager_sharding=False)

    for transform in (nnx.vmap, lambda f: nnx.scan(f, in_axes=0, out_axes=0)):
        param = nnx.Param(jnp.ones((3, 8, 8)), sharding=names, eager_sharding=False)
        copied = transform(both)(param, jnp.arange(3.0))
        assert param.sharding_names == copied.sharding_names == names


# transform_metadata ------------------------------------------------------------------------------


def test_transform_metadata_takes_arguments_by_name_and_shared_ones_once():
    seen = []

    def f(a, b, *, scale=1):
        seen.append((a.sharding_names, b[0].sharding_names, scale))

    variable = param(3, 4, sharding=("x", "layers"))
    nnx.transform_metadata(f, in_axes=[1, 1], partition="layers")(b=[variable], a=variable, scale=2)
    assert seen == [(("x",), ("x",), 2)] and variable.sharding_names == ("x", "layers")
