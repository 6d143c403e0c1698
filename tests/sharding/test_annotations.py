"""Annotations: what is placed at birth, logical names, axes of transforms, and abstract models.

That layers, optimizers and transforms treat them as the reference does is tested beside it.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.sharding.meshes import linear, mesh_of, names_of

LAYERS = {nnx.PARTITION_NAME: "layers"}
NAMED = {**LAYERS, "nickname": "nick"}


def param(*shape, **metadata):
    return nnx.Param(jnp.zeros(shape), **metadata)


@pytest.fixture(params=(AxisType.Auto, AxisType.Explicit), ids=lambda kind: kind.name)
def mesh(request):
    mesh = mesh_of(request.param)
    with jax.set_mesh(mesh):
        yield mesh


def test_a_mesh_entered_as_a_context_manager_counts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh_of():
            for make in (linear, nnx.jit(linear, static_argnums=(0, 1))):
                assert names_of(make("data", "model").kernel) == ("data", "model")


def test_what_is_placed(mesh):
    for value in (
        np.zeros((8, 4), np.float32),
        {"a": jnp.zeros((8, 4)), "b": jnp.zeros((2, 4, 3))},
        jax.ShapeDtypeStruct((8, 4), jnp.float32),
    ):
        placed = nnx.Variable(value, sharding=("data", None)).value
        assert {names_of(leaf) for leaf in jax.tree.leaves(placed)} == {("data", None)}
    reference = param(8, 4, sharding=("data", None), ref=True)
    assert names_of(reference.get_value()) == ("data", None)
    rows = jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh, P("data")))
    for empty in ((), [], P()):
        assert nnx.Param(rows, sharding=empty).value is rows
    assert names_of(nnx.Param(rows, sharding=(None,))) == (None,)
    variable = param(8, 4, sharding=("data", None))
    variable.value = jnp.ones((8, 4))
    assert variable.value.is_fully_replicated  # placed at birth, and the writer's business since


def test_inside_shard_map_a_value_is_one_shard():
    mesh = mesh_of()

    def shard(x):
        count = nnx.Variable(x, sharding=("data", "model"))
        whole = nnx.Variable(x, sharding=(("data", "model"), None))
        return count.value + whole.value

    specs = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data")}
    with jax.set_mesh(mesh):
        for partly in ({}, {"axis_names": {"data"}}):  # then `model` is still the compiler's
            y = jax.jit(jax.shard_map(shard, **specs, **partly))(jnp.ones((8, 4)))
            np.testing.assert_array_equal(y, np.full((8, 4), 2))


def test_rules_place_parameters_and_are_part_of_a_program(mesh):
    with nnx.logical_axis_rules((("batch", "data"), ("mlp", "model"))):
        layer = linear("batch", "mlp")
        assert layer.kernel.sharding_names == ("batch", "mlp")  # the annotation stays logical
        assert names_of(layer.kernel) == ("data", "model")
    make = nnx.jit(lambda: param(8, 4, sharding=("rows", None)))
    for axis in ("data", "model"):
        with nnx.logical_axis_rules([("rows", axis)]):
            assert names_of(make())[0] == axis


@pytest.mark.parametrize("name, first", [("data", "data"), ("layers", None)])
def test_an_annotation_that_brings_its_mesh_gets_an_axis_and_loses_it(name, first):
    mesh, over = mesh_of(), {nnx.PARTITION_NAME: name}
    rows = NamedSharding(mesh, P(None, "model"))
    make = lambda i: nnx.Param(jnp.ones((4, 8)), sharding=rows)
    stacked = nnx.vmap(make, transform_metadata=over)(jnp.arange(2))
    assert stacked.sharding_names == NamedSharding(mesh, P(first, None, "model"))
    seen = []
    scan = nnx.scan(in_axes=0, out_axes=0, transform_metadata=over)
    scan(lambda v: seen.append(v.sharding_names))(stacked)
    assert seen[0] == rows


@pytest.mark.parametrize("index, names", [(0, "nick a b"), (1, "a nick b"), (-1, "a b nick")])
def test_names_of_other_metadata_follow(index, names):
    variable = nnx.Param(jnp.ones((2, 3)), nickname=("a", "b"), note="a note")
    nnx.spmd.add_axis(variable, index, {**NAMED, "note": "x", "absent": "y"})
    assert variable.nickname == tuple(names.split()) and variable.note == "a note"
    assert not variable.has_metadata("absent")
    nnx.spmd.remove_axis(variable, index, NAMED)
    assert variable.nickname == ("a", "b")
    nnx.spmd.add_axis(variable, 3, NAMED)
    assert variable.nickname == ("a", "b", None, "nick")


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
    ("names", "axis", "over", "wanted"),
    [
        (("data", "model"), -1, {}, ("data", "model", None)),
        (("data",), 2, {}, ("data", None, None)),
        (("data",), -1, {"transform_metadata": LAYERS}, ("data", None, "layers")),
    ],
)
def test_an_axis_is_where_the_transform_puts_it(names, axis, over, wanted):
    make = lambda i: nnx.Param(jnp.ones((8, 8)) * i, sharding=names)
    assert nnx.vmap(make, out_axes=axis, **over)(jnp.arange(3)).sharding_names == wanted


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


def test_transform_metadata_takes_arguments_by_name_and_shared_ones_once():
    seen = []

    def f(a, b, *, scale=1):
        seen.append((a.sharding_names, b[0].sharding_names, scale))

    variable = param(3, 4, sharding=("x", "layers"))
    nnx.transform_metadata(f, in_axes=[1, 1], partition="layers")(b=[variable], a=variable, scale=2)
    assert seen == [(("x",), ("x",), 2)] and variable.sharding_names == ("x", "layers")


# Abstract models: what they keep, and that nothing is computed --------------------------------------


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


def test_get_abstract_model_resolves_logical_names_and_may_lack_a_mesh():
    make = lambda: linear("batch", "mlp")
    with nnx.logical_axis_rules([("batch", "data"), ("mlp", "model")]):
        assert shapes(nnx.get_abstract_model(make, mesh_of())[1]) == SHARDED
        assert shapes(nnx.get_abstract_model(make, None)[1]) == UNSHARDED
    with pytest.raises(ZeroDivisionError):
        nnx.get_abstract_model(lambda: 1 // 0, mesh_of())
    with jax.set_mesh(mesh_of()):
        assert (
            shapes(nnx.state(nnx.jit(linear, static_argnums=(0, 1)).eval_shape("data", "model")))
            == SHARDED
        )


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
    host = NamedSharding(mesh_of(), P("data"), memory_kind="pinned_host")
    assert nnx.as_abstract(param(8, 4, sharding=host)).value.sharding == host
    again = nnx.as_abstract(born)  # outside the mesh: as the arrays are
    assert isinstance(again, nnx.Linear) and again is not born
    assert shapes(nnx.state(again)) == SHARDED
    tree = nnx.as_abstract({"n": np.ones(3), "b": 1.0, "c": "x", "d": None, "k": jax.random.key(0)})
    assert tree["n"] == jax.ShapeDtypeStruct((3,), np.float64)
    assert (tree["b"], tree["c"], tree["d"]) == (1.0, "x", None)
    assert tree["k"].shape == () and jnp.issubdtype(tree["k"].dtype, jax.dtypes.prng_key)
