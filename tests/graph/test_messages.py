"""Every refusal of the engine: what it says, and that nothing was changed by the call."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.laws import model as slow
from tests.laws.graphs import Box, Pair

ONE = jnp.ones(2)


class Layer(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((2, 3)))
        self.bias = nnx.Param(jnp.ones(3))
        self.mean = nnx.BatchStat(jnp.ones(3))
        self.size = 3
        self.sizes = [2, 3]


class Model(nnx.Module):
    def __init__(self):
        self.layer = Layer()
        self.layers = nnx.List([Layer()])
        self.pair = Pair(nnx.Param(ONE), ONE)
        self.plain = [ONE, 5]
        self.words = nnx.data(["one", None])
        self.array = ONE
        self.cache = nnx.Cache({"keys": ONE, "step": 0})
        self.ref = nnx.Variable(ONE, ref=True)
        self.bare = jax.new_ref(ONE)


class Unhashable:
    """Something with `==` and no hash."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Unhashable) and self.value == other.value

    __hash__ = None


@jax.tree_util.register_pytree_node_class
class Listed:
    """A pytree node whose static part is a list."""

    def __init__(self, child, notes):
        self.child, self.notes = child, notes

    def tree_flatten(self):
        return (self.child,), self.notes

    @classmethod
    def tree_unflatten(cls, notes, children):
        return cls(*children, notes)


def refused(
    model: tp.Any, call: tp.Callable[[tp.Any], object], error: type[Exception], *texts: str
) -> None:
    """A call raises, says all of this, and leaves the model as it was."""
    for _ in range(3):  # before there is a plan, and with one
        before = slow.canonical(model)
        with pytest.raises(error) as info:
            call(model)
        for text in texts:
            assert text in str(info.value), str(info.value)
        assert slow.canonical(model) == before
        if slow.is_object(model):
            nnx.split(model)


# split and state ----------------------------------------------------------------------------------


def test_split_with_filters_that_leave_a_variable_over():
    refused(
        Layer(),
        lambda m: nnx.split(m, nnx.Param),
        ValueError,
        "Non-exhaustive filters",
        "mean (BatchStat)",
        "Add a filter for them, or `...` as the last one",
    )


def test_split_names_the_first_few_and_counts_the_rest():
    model = nnx.List([nnx.Param(ONE) for _ in range(11)])
    refused(model, lambda m: nnx.split(m, nnx.Cache), ValueError, "7 (Param)", "and 3 more")


@pytest.mark.parametrize(
    "name", "split state graphdef clone flatten unpack iter_graph map recursive_map".split()
)
def test_tree_mode_refuses_sharing_and_names_every_path(name):
    function = getattr(nnx, name)
    if name.endswith("map"):
        function = functools.partial(function, lambda path, x: x)
    layer = Layer()
    model = nnx.Dict(a=layer, b=[layer, {"deep": layer}])
    refused(
        model,
        lambda m: function(m, graph=False),
        ValueError,
        "Duplicate Layer found at paths: 'a', 'b.0', 'b.1.deep'",
        f"pass graph=True to nnxlite.{'split' if name == 'unpack' else name}",
    )
    assert function(model, graph=True) is not None
    with nnx.set_graph_mode(False), pytest.raises(ValueError, match="Duplicate Layer"):
        function(model)


def test_tree_mode_refuses_shared_variables_cycles_and_references():
    shared = nnx.Param(ONE)
    refused(
        nnx.Dict(a=shared, b=shared),
        lambda m: nnx.split(m, graph=False),
        ValueError,
        "Duplicate Param found at paths: 'a', 'b'",
    )
    cycle = nnx.Dict()
    cycle.child = nnx.Dict(up=cycle)
    refused(
        cycle,
        lambda m: nnx.split(m, graph=False),
        ValueError,
        "Duplicate Dict found at paths: '<root>', 'child.up'",
    )
    ref = jax.new_ref(ONE)
    refused(
        nnx.Dict(a=ref, b=ref),
        lambda m: nnx.split(m, graph=False),
        ValueError,
        "Duplicate array reference found at paths: 'a', 'b'",
    )


def test_tree_mode_names_the_arguments_beside_static_ones():
    pair = [weight := nnx.Param(ONE), weight]
    for options in ({"static_argnums": 0}, {"static_argnames": "size"}):
        apply = nnx.jit(lambda size, pair: pair[0] * size, graph=False, **options)
        with pytest.raises(ValueError, match=r"found at paths: 'pair\.0', 'pair\.1'"):
            apply(2, pair)


def test_tree_mode_takes_shared_objects_without_state():
    rate = nnx.Dropout(0.5, deterministic=True)
    model = nnx.Dict(a=rate, b=nnx.List([rate]), w=nnx.Param(ONE))
    graphdef, state = nnx.split(model, graph=False)
    assert [path for path, _ in nnx.to_flat_state(state)] == [("w",)]
    again = nnx.merge(graphdef, state)
    assert again.a is again.b[0] and again.a.rate == 0.5
    apply = nnx.jit(lambda m, x: m.b[0](m.a(x)) * m.w, graph=False)
    assert apply(model, ONE).tolist() == [1.0, 1.0]
    rate.noise = nnx.Variable(ONE)  # now there is something that two places would share
    with pytest.raises(ValueError, match=r"Duplicate Dropout found at paths: 'm\.a', 'm\.b\.0'"):
        apply(model, ONE)


@pytest.mark.parametrize(
    "function",
    [
        nnx.split,
        nnx.state,
        nnx.clone,
        lambda m: list(nnx.iter_graph(m)),
        nnx.find_duplicates,
        lambda m: nnx.recursive_map(lambda p, x: x, m),
        lambda m: nnx.pop(m, nnx.Param),
    ],
    ids=["split", "state", "clone", "iter_graph", "find_duplicates", "recursive_map", "pop"],
)
def test_a_plain_container_that_contains_itself(function):
    model = nnx.Dict(inner=nnx.Dict(items=[ONE, [ONE]]))
    model.inner["items"][1].append(model.inner["items"])
    with pytest.raises(ValueError) as info:
        function(model)
    assert "The list at 'inner.items.1.1' contains itself" in str(info.value)
    assert "put the cycle through a Module, nnx.List or nnx.Dict" in str(info.value)


def test_data_put_into_a_static_container():
    class Late(nnx.Module):
        def __init__(self):
            self.found = []

    model = Late()
    model.found.append(ONE)
    for function in (nnx.split, nnx.state, nnx.clone, lambda m: list(nnx.iter_graph(m))):
        with pytest.raises(ValueError) as info:
            function(model)
        text = str(info.value)
        assert "Found unexpected data on value of type 'list' in static attribute" in text
        assert "'found' of Pytree type 'Late'" in text
        assert "nnx.List(...)" in text
    model.found.clear()
    nnx.split(model)


def test_a_bad_filter():
    for filters in ((3,), (nnx.Param, 3.5), ([3],)):
        refused(Layer(), lambda m, f=filters: nnx.split(m, *f), TypeError, "filter")
    refused(Layer(), lambda m: nnx.split(m, ..., nnx.Param), ValueError, "last")


# merge --------------------------------------------------------------------------------------------


def test_merge_with_missing_and_surplus_leaves():
    graphdef, state = nnx.split(Model())
    flat = dict(nnx.to_flat_state(state))
    missing = {p: x for p, x in flat.items() if p != ("layer", "bias")}
    surplus = {**flat, ("layer", "extra"): ONE, ("other",): ONE}
    both = {**missing, ("layer", "extra"): ONE}
    cases = [
        (missing, f"expected {len(flat)} leaves, but got {len(flat) - 1} in the states: missing"),
        (missing, "missing 'layer.bias'"),
        (surplus, "unknown 'layer.extra', 'other'"),
        (surplus, f"but got {len(flat) + 2} in the states"),
        (both, "missing 'layer.bias'; unknown 'layer.extra'"),
    ]
    for pairs, text in cases:
        for given in (nnx.from_flat_state(pairs), nnx.FlatState(pairs.items(), sort=True)):
            with pytest.raises(ValueError, match=re.escape(text)):
                nnx.merge(graphdef, given)
    with pytest.raises(ValueError, match="and 3 more"):
        nnx.merge(*nnx.split(nnx.List([]))[:1], nnx.State(dict.fromkeys(range(11), ONE)))


def test_merge_with_a_part_of_the_states():
    graphdef, params, rest = nnx.split(Layer(), nnx.Param, ...)
    with pytest.raises(ValueError, match="missing 'bias', 'kernel'"):
        nnx.merge(graphdef, rest)
    with pytest.raises(ValueError, match="missing 'mean'"):
        nnx.merge(graphdef, params)
    with pytest.raises(ValueError, match="missing"):
        nnx.merge(graphdef)


def test_merge_of_something_else():
    graphdef, state = nnx.split(Layer())
    with pytest.raises(TypeError, match="Expected a GraphDef or GraphState object, got: State"):
        nnx.merge(state, graphdef)
    with pytest.raises(TypeError, match="Expected a State .* got ArrayImpl"):
        nnx.merge(graphdef, ONE)
    with pytest.raises(ValueError, match="expected 1 leaf, but got 0"):
        nnx.merge(*nnx.split(nnx.Param(ONE))[:1])
    with pytest.raises(ValueError, match="expected 1 leaf, but got 2"):
        nnx.merge(nnx.graphdef(nnx.Param(ONE)), ONE, ONE)


def test_merge_of_graph_states_that_do_not_belong_together():
    params, rest = nnx.unpack(Layer(), nnx.Param, ...)
    bigger = Layer()
    bigger.size = 4
    other = nnx.unpack(bigger, nnx.Param, ...)[1]
    text = "GraphDef must be the same for all GraphState objects; that of argument 1 differs"
    text += " from that of argument 0: 'size': 3 became 4. Merge what one unpack gave"
    with pytest.raises(ValueError, match=text):
        nnx.merge(params, other)
    text = "Expected GraphState object, got State as argument 1. Give merge the GraphStates of one"
    with pytest.raises(ValueError, match=text):
        nnx.merge(params, rest._state)


def test_a_root_that_is_a_leaf_has_one_value():
    variable = nnx.Param(ONE)
    text = "Expected exactly one non-empty state for a Param, got 2: float32[2], float32[2]"
    refused(variable, lambda v: nnx.update(v, 2 * ONE, ONE), ValueError, text)
    below = nnx.FlatState([(("a", "b"), ONE)], sort=True)
    text = "The root is a leaf, but the FlatState has leaves below it: ['a.b']"
    refused(variable, lambda v: nnx.update(v, below), ValueError, text)
    with pytest.raises(ValueError, match=re.escape(text)):
        nnx.unflatten(nnx.graphdef(variable), below)


def test_unflatten_without_the_nodes_of_an_earlier_definition():
    layer, index = Layer(), nnx.graphlib.RefMap()
    nnx.flatten(layer, ref_index=index)
    graphdef, flat = nnx.flatten([layer], ref_index=index)
    with pytest.raises(ValueError, match="refers to node 0 of an earlier one; pass the index_ref"):
        nnx.unflatten(graphdef, flat)


def test_unflatten_into_an_object_of_another_trace():
    layer = Layer()
    index = nnx.graphlib.RefMap([(layer, 0)])
    graphdef, flat = nnx.flatten(layer, ref_outer_index=index)

    def inside(x):
        nnx.unflatten(graphdef, flat, outer_index_outer_ref={0: layer})
        return x

    refused(layer, lambda m: jax.jit(inside)(1.0), nnx.TraceContextError, "Cannot mutate 'Layer'")


def test_outer_numbers_of_a_graph_of_another_size():
    one, two = nnx.graphdef(Layer()), nnx.graphdef(nnx.Dict(a=Layer()))
    with pytest.raises(ValueError, match="Outer numbers of a graph with 5 nodes do not fit"):
        one.with_matching_outer_index(two)


# update -------------------------------------------------------------------------------------------

UNKNOWN = "Remove it from the state, or bring a Variable to be added to an existing object."


@pytest.mark.parametrize(
    "state, texts",
    [
        ({"extra": ONE}, ["path 'extra' of Model does not exist", "float32[2]", UNKNOWN]),
        ({"layer": {"extra": ONE}}, ["path 'layer.extra' of Model does not exist"]),
        ({"extra": {"deep": nnx.Param(ONE)}}, ["path 'extra' of Model does not exist", "holds a "]),
        ({"layer": ONE}, ["path 'layer' of Model holds a node, not a leaf", "float32[2]"]),
        ({"layer": nnx.Param(ONE)}, ["path 'layer' of Model holds a node, not a leaf"]),
        ({"layer": {"size": 4}}, ["path 'layer.size' of Model is static"]),
        ({"layer": {"sizes": {0: 4}}}, ["path 'layer.sizes' of Model is static"]),
        ({"plain": {1: {"x": 6}}}, ["path 'plain.1' of Model holds an array of shape ()"]),
        ({"words": {0: {"x": 6}}}, ["path 'words.0' of Model holds a leaf, not a node"]),
        ({"words": {1: 6}}, ["path 'words.1' of Model is static"]),
        ({"plain": {2: nnx.Param(ONE)}}, ["path 'plain.2' of Model does not exist"]),
        ({"layers": {2: nnx.Param(ONE)}}, ["path 'layers.2' of Model is not the next item"]),
        (
            {"layers": {"0": {"weight": ONE}}},
            [
                "path 'layers.0' of Model does not exist",
                "number 0, not a text",
                "restore_int_paths(state)",
            ],
        ),
        ({"plain": {"0": 4}}, ["path 'plain.0' of", "number 0, not", "nnx.restore_int_paths"]),
        ({"layers": {"7": {"x": 1}}}, ["path 'layers.7' of Model does not exist", UNKNOWN]),
        ({"layers": {"x": nnx.Param(ONE)}}, ["path 'layers.x' of Model is not the next item"]),
        ({"pair": {"third": nnx.Param(ONE)}}, ["path 'pair.third' of Model does not exist"]),
        (
            {"layer": {"bias": {"x": 1}}},
            ["path 'layer.bias' of Model holds an array of shape (3,)"],
        ),
        ({"array": {"x": 1}}, ["path 'array' of Model holds an array of shape (2,)"]),
        ({"layer": {"bias": None}}, ["path 'layer.bias' of Model holds an array", "NoneType"]),
        ({"layer": {"bias": "text"}}, ["path 'layer.bias' of Model holds an array", "str"]),
    ],
    ids=lambda x: str(x)[:40],
)
def test_update_with_a_path_that_does_not_fit(state, texts):
    # what fits comes first, and must not have been written
    good = {"cache": {"keys": 2 * ONE, "step": 1}, "ref": 3 * ONE, "bare": 3 * ONE}
    for given in ([{**good, **state}], [good, state], [nnx.State(state)]):
        refused(Model(), lambda m, g=given: nnx.update(m, *g), ValueError, "update: the", *texts)


@pytest.mark.parametrize(
    "state, path, shape",
    [
        ({"ref": jnp.ones(3)}, "ref", "float32[3] of shape (3,)"),
        ({"ref": nnx.Variable(jnp.ones(()))}, "ref", "of shape ()"),
        ({"bare": jnp.ones(3)}, "bare", "float32[3] of shape (3,)"),
        ({"bare": 1.0}, "bare", "shape ()"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_update_of_a_reference_with_a_value_of_another_shape(state, path, shape):
    for given in (state, nnx.State(state)):
        refused(
            Model(),
            lambda m, g=given: nnx.update(m, {"layers": {0: {"bias": jnp.zeros(3)}}}, g),
            ValueError,
            f"update: the reference at '{path}' has shape (2,), the state brings",
            shape,
            "The shape of a reference is fixed: bring a value of the same shape, or assign a new",
        )


@pytest.mark.parametrize(
    "brought", [jnp.ones((4, 2, 3)), nnx.Param(jnp.ones(3), sharding=(None, "a"))]
)
def test_update_of_an_annotated_variable_with_a_value_of_other_axes(brought):
    model = Layer()
    model.kernel.set_metadata(out_sharding=(None, "a"))
    text = "'kernel' has shape (2, 3) and its axes are annotated as (None, 'a'), the state brings"
    remedy = (
        "Bring a Variable with the annotation of its axes (variable.replace(value, sharding=...))"
    )
    refused(model, lambda m: nnx.update(m, {"kernel": brought}), ValueError, text, remedy)
    right = model.kernel.replace(jnp.ones((4, 2, 3)), sharding=(None, None, "a"))
    nnx.update(model, {"kernel": right})
    assert model.kernel.shape == (4, 2, 3) and model.kernel.sharding_names == (None, None, "a")
    nnx.update(model, {"kernel": jnp.ones((5, 6, 7))})  # as many axes as are annotated
    assert model.kernel.shape == (5, 6, 7)


def test_update_of_a_reference_with_another_dtype():
    for name in ("ref", "bare"):
        refused(
            Model(),
            lambda m, n=name: nnx.update(m, {n: jnp.ones(2, int)}),
            ValueError,
            f"the reference at '{name}' has dtype float32, the state brings int32[2]",
            "Bring a value of the same dtype",
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Boxed:
    """What a Variable of another library is to JAX: a pytree around one array, and that array."""

    content: tp.Any
    scale: float | None = dataclasses.field(default=None, metadata={"static": True})

    shape = property(lambda self: self.content.shape)

    def __jax_array__(self):
        if self.scale == 0:
            raise TypeError("it has a unit")
        return self.content if self.scale is None else self.scale * self.content


def test_update_with_variables_of_another_library():
    text = "'layer.bias' of Model holds an array of shape (3,), the state brings a Boxed of tests."
    remedy = "Bring the arrays themselves: a State of Flax becomes a dict of them with flax.nnx.to_"
    for bias in (Boxed(jnp.ones(3)), Boxed(np.ones(3)), nnx.Param(Boxed(jnp.ones(3)))):
        state = {"cache": {"keys": 2 * ONE, "step": 1}, "layer": {"bias": bias}}
        refused(Model(), lambda m, s=state: nnx.update(m, s), ValueError, text, remedy)
    refused(Model(), lambda m: nnx.update(m, {"array": Boxed(ONE)}), ValueError, "'array' of Model")


def test_update_with_pytrees_that_are_more_than_an_array():
    for scale in (2.0, 0.0):
        layer = Layer()
        nnx.update(layer, {"bias": Boxed(jnp.ones(3), scale)})
        assert layer.bias.value.scale == scale
    boxed = nnx.Dict(a=nnx.Param(Boxed(jnp.ones(2))))  # there it is what the object holds
    nnx.update(boxed, jax.tree.map(jnp.zeros_like, nnx.state(boxed)))
    assert not boxed.a.value.content.any()


def test_update_of_something_without_leaves():
    with pytest.raises(TypeError, match="update takes an object, or a pytree of objects, got int"):
        nnx.update(3, {})
    with pytest.raises(TypeError, match=r"got float32\[2\]"):
        nnx.update(ONE, {})
    refused(
        Layer(),
        lambda m: nnx.update(m, ONE),
        TypeError,
        "update takes states (State, FlatState or nested dicts), got ArrayImpl",
    )
    refused(Layer(), lambda m: nnx.update(m, {}, 3), TypeError, "got int")


def test_update_of_an_array_in_a_tuple_that_nobody_holds():
    refused(
        (nnx.Param(ONE), (ONE,)),
        lambda m: nnx.update(m, {0: 2 * ONE, 1: {0: 2 * ONE}}),
        ValueError,
        "update cannot change an array inside a tuple in place; pass the object that holds it",
    )


def test_update_with_a_variable_for_a_static_declaration():
    class Declared(nnx.Module):
        note: nnx.Static[str]

        def __init__(self):
            self.kernel = nnx.Param(ONE)

    state = {"kernel": 2 * ONE, "note": nnx.Param(ONE)}
    refused(Declared(), lambda m: nnx.update(m, state), ValueError, "static attribute", "note")


# writing from another trace -----------------------------------------------------------------------

WRITES: dict[str, tp.Callable[[tp.Any, tp.Any], object]] = {
    "update a Variable": lambda m, x: nnx.update(m, {"layer": {"bias": x[:3]}}),
    "update an array": lambda m, x: nnx.update(m, {"array": x[:2]}),
    "update a plain list": lambda m, x: nnx.update(m, {"plain": {0: x[:2]}}),
    "update a tuple": lambda m, x: nnx.update(m, {"pair": {"second": x[:2]}}),
    "update with a Variable": lambda m, x: nnx.update(m, {"extra": nnx.Param(x)}),
    "update everything": lambda m, x: nnx.update(
        m.layer, jax.tree.map(lambda v: v * x[0], nnx.state(m.layer))
    ),
    "pop": lambda m, x: nnx.pop(m, nnx.BatchStat),
    "pop from a list": lambda m, x: nnx.pop(m, lambda path, leaf: path == ("plain", 0)),
    "set_metadata": lambda m, x: nnx.set_metadata(m, tag=1),
    "attribute": lambda m, x: setattr(m.layer, "bias", x),
    "value": lambda m, x: setattr(m.layer.bias, "value", x),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap], ids=["jit", "grad", "vmap"])
def test_a_write_from_another_trace(write, transform):
    def inside(x):
        write(model, jnp.broadcast_to(x, (4,)))
        return jnp.sum(x)

    model = Model()
    for _ in range(2):
        refused(
            model,
            lambda m: transform(inside)(jnp.ones(2) if transform is jax.vmap else 1.0),
            nnx.TraceContextError,
            "different trace level: it belongs to eager",
            "Pass the object to the transformed function as an argument",
        )


# pop ----------------------------------------------------------------------------------------------


def test_pop_without_filters():
    refused(
        Model(),
        nnx.pop,
        ValueError,
        "Expected at least one filter: nnx.pop(node",
    )


def test_pop_of_something_without_leaves():
    for node in (3, nnx.Param(ONE), ONE):
        with pytest.raises(TypeError, match="pop takes an object, or a pytree of objects, got"):
            nnx.pop(node, nnx.Param)


def test_pop_of_a_leaf_inside_a_tuple():
    class Holder(nnx.Module):
        def __init__(self, content):
            self.before = nnx.Param(ONE)
            self.held = content

    for content, path, name in [
        ((1, nnx.Param(ONE)), "held.1", "tuple"),
        (Pair(nnx.Param(ONE), 1), "held.first", "Pair"),
        ([(nnx.Param(ONE),)], "held.0.0", "tuple"),
        (Box(nnx.Param(ONE)), "held.content", "Box"),
    ]:
        refused(
            Holder(content),
            lambda m: nnx.pop(m, nnx.Param),
            ValueError,
            f"pop: '{path}' is inside a {name}, which cannot lose an element",
            "Hold it in an attribute, a list or a dict.",
        )


# static values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("notes", [[1], Unhashable(1), np.arange(2)], ids=["list", "==", "array"])
def test_a_pytree_node_with_an_unusual_static_part(notes):
    class Holder(nnx.Module):
        def __init__(self, held):
            self.held = held

    holder = Holder(Listed(ONE, notes))
    for _ in range(3):
        graphdef, state = nnx.split(holder)
        assert nnx.merge(graphdef, state).held.notes is notes


# registration and metadata ------------------------------------------------------------------------


def test_registering_a_class_twice():
    class Foreign:
        pass

    args = (lambda x: ((), None), None, None, lambda m: Foreign(), None, lambda n, p: None)
    nnx.graphlib.register_graph_node_type(Foreign, *args)
    with pytest.raises(ValueError, match="Node type Foreign is already registered"):
        nnx.graphlib.register_graph_node_type(Foreign, *args)
    with pytest.raises(ValueError, match="Node type Layer is already registered"):
        nnx.graphlib.register_graph_node_type(Layer, *args)


def test_set_metadata_that_is_fixed():
    refused(
        Model(),
        lambda m: nnx.set_metadata(m, tag=1, ref=True),
        ValueError,
        "Cannot change `ref` metadata of",
    )


def test_maps_of_objects_say_that_there_is_no_entry():
    index = nnx.graphlib.RefMap()
    with pytest.raises(KeyError, match="No entry for this Layer object"):
        index[Layer()]
    with pytest.raises(KeyError, match="No entry for this Layer object"):
        del index[Layer()]


def test_recursive_map_that_gives_data_for_a_static_attribute():
    refused(
        Layer(),
        lambda m: nnx.recursive_map(lambda path, x: ONE if path == ("size",) else x, m),
        ValueError,
        "static attribute 'size' of Pytree type 'Layer'",
    )


def test_a_graph_state_has_no_private_attributes_of_its_state():
    packed = nnx.unpack(Layer())
    assert packed.kernel.shape == (2, 3)
    with pytest.raises(AttributeError, match="_mapping"):
        packed._mapping
    packed["_hidden"] = nnx.Param(ONE)
    assert packed._hidden is packed["_hidden"]


def test_errors_of_frozen_dataclasses_pass_through():
    @dataclasses.dataclass(frozen=True)
    class Frozen(nnx.Pytree):
        x: jax.Array

    model = Frozen(ONE)
    nnx.update(model, {"x": 2 * ONE})  # the engine writes around __setattr__
    assert model.x.tolist() == [2.0, 2.0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.x = ONE


@pytest.mark.parametrize("leaves", [[], [ONE], (ONE,) * 4], ids=["empty", "list", "tuple"])
@pytest.mark.parametrize("build", [nnx.merge, nnx.unflatten])
def test_a_sequence_of_leaves_of_another_length(build, leaves):
    text = (
        f"Incorrect number of leaves, expected 3 leaves, but got {len(leaves)} in the "
        f"{type(leaves).__name__}. Pass one for each path of the definition, in their order."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        build(nnx.graphdef(Layer()), leaves)


@pytest.mark.parametrize("walk", [nnx.iter_children, nnx.iter_module_children])
@pytest.mark.parametrize("leaf", [nnx.Param(1.0), 3, "text"], ids=["variable", "number", "text"])
def test_children_of_what_has_none(walk, leaf):
    with pytest.raises(ValueError, match=f"Expected an object or .*, got {type(leaf).__name__}"):
        list(walk(leaf))


@pytest.mark.parametrize("value", [ONE, 1.0, {"a": ONE}])
def test_update_refuses_a_value_for_a_parameter_that_is_none(value):
    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    kernel = model.kernel[...]
    with pytest.raises(ValueError, match=r"path 'bias' of Linear is None.*" + UNKNOWN):
        nnx.update(model, {"kernel": 2 * kernel, "bias": value})
    assert model.bias is None and model.kernel[...] is kernel
    nnx.update(model, {"bias": None})
    nnx.update(model, {"bias": nnx.Param(ONE)})
    assert model.bias[...] is ONE
