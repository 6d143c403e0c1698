"""Every refusal of the engine, in one table: what it says, and that the call changed nothing."""

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.laws.graphs import Box, Pair
from tests.messages import refused, rows

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


def cycle():
    root = nnx.Dict()
    root.child = nnx.Dict(up=root)
    return root


def annotated():
    layer = Layer()
    layer.kernel.set_metadata(out_sharding=(None, "a"))
    return layer


class Declared(nnx.Module):
    note: nnx.Static[str]

    def __init__(self):
        self.kernel = nnx.Param(ONE)


def holding(content):
    """An object with Variables before and inside of some content."""
    model = nnx.Dict(before=nnx.Param(ONE))
    model.held = content
    return model


def merged(model, without=(), **more):
    """Merge a model without some of its leaves and with others."""
    graphdef, state = nnx.split(model)
    leaves = {path: leaf for path, leaf in nnx.to_flat_state(state) if path[0] not in without}
    leaves |= {tuple(path.split("_")): leaf for path, leaf in more.items()}
    for state in (nnx.FlatState(leaves.items(), sort=True), nnx.from_flat_state(leaves)):
        nnx.merge(graphdef, state)


def bigger(layer):
    """The definition of another layer."""
    other = nnx.clone(layer)
    other.size += 1
    return other


def numbered(model):
    """A definition that refers to nodes of an earlier one."""
    index = nnx.graphlib.RefMap()
    nnx.flatten(model, ref_index=index)
    return nnx.flatten([model], ref_index=index)


NAMES = {
    **globals(),
    "Box": Box,
    "of_graph": (lambda x: ((), None), None, None, lambda m: None, None, lambda n, p: None),
    "below": nnx.FlatState([(("a", "b"), ONE)], sort=True),
    "two": lambda leaf: nnx.Dict(a=leaf, b=leaf),
    # comes first in an update, and must not have been written
    "good": {"cache": {"keys": 2 * ONE, "step": 1}, "ref": 3 * ONE, "bare": 3 * ONE},
}


@rows("""
    nnx.split(layer, nnx.Param)
        ValueError: Non-exhaustive filters ... mean (BatchStat)
        ... Add a filter for them, or `...` as the last one
    nnx.split(nnx.List([nnx.Param(ONE) for _ in range(11)]), nnx.Cache)
        ValueError: 7 (Param) ... and 3 more
    nnx.split(layer, 3)
        TypeError: filter
    nnx.split(layer, [3])
        TypeError: filter
    nnx.split(layer, ..., nnx.Param)
        ValueError: last
    nnx.split(two(nnx.Param(ONE)), graph=False)
        ValueError: Duplicate Param found at paths: 'a', 'b'
    nnx.split(two(nnx.array_ref(ONE)), graph=False)
        ValueError: Duplicate array reference found at paths: 'a', 'b'
    nnx.split(cycle(), graph=False)
        ValueError: Duplicate Dict found at paths: '<root>', 'child.up'
    merged(layer, ["bias"])
        ValueError: expected 3 leaves, but got 2 in the states: missing 'bias'
    merged(layer, extra=ONE, other_w=ONE)
        ValueError: but got 5 in the states: unknown 'extra', 'other.w'
    merged(layer, ["bias"], extra=ONE)
        ValueError: missing 'bias'; unknown 'extra'
    merged(nnx.List([]), **dict.fromkeys("abcdefghijk", ONE))
        ValueError: and 3 more
    nnx.merge(*nnx.split(layer, nnx.BatchStat, ...)[:2])
        ValueError: missing 'bias', 'kernel'
    nnx.merge(nnx.graphdef(layer))
        ValueError: missing
    nnx.merge(*nnx.split(layer)[::-1])
        TypeError: Expected a GraphDef or GraphState object, got: State
    nnx.merge(nnx.graphdef(layer), ONE)
        TypeError: Expected a State ... got ArrayImpl
    nnx.merge(nnx.graphdef(variable))
        ValueError: expected 1 leaf, but got 0
    nnx.merge(nnx.unpack(layer, nnx.Param, ...)[0], nnx.unpack(bigger(layer), nnx.Param, ...)[1])
        ValueError: GraphDef must be the same for all GraphState objects; that of argument 1 differs
        from that of argument 0: 'size': 3 became 4. Merge what one unpack gave
    nnx.merge(nnx.unpack(layer, nnx.Param, ...)[0], nnx.unpack(layer)._state)
        ValueError: Expected GraphState object, got State as argument 1. Give merge the GraphStates of
        one
    nnx.merge(nnx.graphdef(layer), [])
        ValueError: Incorrect number of leaves, expected 3 leaves, but got 0 in the list. Pass one for
        each path of the definition, in their order.
    nnx.unflatten(nnx.graphdef(layer), (ONE,) * 4)
        ValueError: Incorrect number of leaves, expected 3 leaves, but got 4 in the tuple. Pass one
    nnx.unflatten(nnx.graphdef(variable), below)
        ValueError: The root is a leaf, but the FlatState has leaves below it: ['a.b']
    nnx.unflatten(*numbered(layer))
        ValueError: refers to node 0 of an earlier one; pass the index_ref
    nnx.graphdef(layer).with_matching_outer_index(nnx.graphdef(nnx.Dict(a=layer)))
        ValueError: Outer numbers of a graph with 5 nodes do not fit
    nnx.graphlib.register_graph_node_type(Layer, *of_graph)
        ValueError: Node type Layer is already registered
    nnx.set_metadata(model, tag=1, ref=True)
        ValueError: Cannot change `ref` metadata of
    nnx.graphlib.RefMap()[layer]
        KeyError: No entry for this Layer object
    del nnx.graphlib.RefMap()[layer]
        KeyError: No entry for this Layer object
    nnx.recursive_map(lambda path, x: jnp.ones(2) if path == ("size",) else x, layer)
        ValueError: static attribute 'size' of Pytree type 'Layer'
    nnx.unpack(layer)._mapping
        AttributeError: _mapping
    list(nnx.iter_children(variable))
        ValueError: Expected an object or ... got Param
    list(nnx.iter_module_children(3))
        ValueError: Expected an object or ... got int
    nnx.pop(model)
        ValueError: Expected at least one filter: nnx.pop(node
    nnx.pop(3, nnx.Param)
        TypeError: pop takes an object, or a pytree of objects, got
    nnx.pop(variable, nnx.Param)
        TypeError: pop takes an object, or a pytree of objects, got
    nnx.pop(in_tuple, nnx.Param)
        ValueError: pop: 'held.1' is inside a tuple, which cannot lose an element
        ... Hold it in an attribute, a list or a dict.
    nnx.pop(holding(Pair(nnx.Param(ONE), 1)), nnx.Param)
        ValueError: pop: 'held.first' is inside a Pair, which cannot lose an element
    nnx.pop(holding(Box(nnx.Param(ONE))), nnx.Param)
        ValueError: pop: 'held.content' is inside a Box, which cannot lose an element
    nnx.update(variable, 2 * ONE, ONE)
        ValueError: Expected exactly one non-empty state for a Param, got 2: float32[2], float32[2]
    nnx.update(with_axes, {"kernel": jnp.ones((4, 2, 3))})
        ValueError: 'kernel' has shape (2, 3) and its axes are annotated as (None, 'a'), the state
        brings ... Bring a Variable with the annotation of its axes (variable.replace(value,
        sharding=...))
    nnx.update(with_axes, {"kernel": nnx.Param(jnp.ones(3), sharding=(None, "a"))})
        ValueError: 'kernel' has shape (2, 3) and its axes are annotated as (None, 'a'), the state
        brings ... Bring a Variable with the annotation of its axes
    nnx.update(nnx.Dict(a=variable, b=[variable]), {"a": nnx.Param(ONE), "b": {0: 2 * ONE}})
        ValueError: update: 'a' and 'b.0' of Dict are one leaf ... Remove one of them from the state
    nnx.update(3, {})
        TypeError: update takes an object, or a pytree of objects, got int
    nnx.update(ONE, {})
        TypeError: got float32[2]
    nnx.update(layer, ONE)
        TypeError: update takes states (State, FlatState or nested dicts), got ArrayImpl
    nnx.update((variable, (ONE,)), {0: 2 * ONE, 1: {0: 2 * ONE}})
        ValueError: update cannot change an array inside a tuple in place; pass the object that holds it
    nnx.update(declared, {"kernel": 2 * ONE, "note": nnx.Param(ONE)})
        ValueError: static attribute ... note
    nnx.update(no_bias, {"kernel": 2 * no_bias.kernel[...], "bias": 1.0})
        ValueError: path 'bias' of Linear is None ... Remove it from the state, or bring a Variable
        to be added to an existing object.
    nnx.update(model, good, {"extra": ONE})
        ValueError: update: the path 'extra' of Model does not exist ... float32[2] ... Remove it from
        the state, or bring a Variable to be added to an existing object.
    nnx.update(model, good | {"extra": {"deep": nnx.Param(ONE)}})
        ValueError: update: the path 'extra' of Model does not exist ... holds a
    nnx.update(model, good | {"layer": ONE})
        ValueError: update: the path 'layer' of Model holds a node, not a leaf ... float32[2]
    nnx.update(model, nnx.State(good | {"layer": {"size": 4}}))
        ValueError: update: the path 'layer.size' of Model is static
    nnx.update(model, good | {"layer": {"sizes": {0: 4}}})
        ValueError: update: the path 'layer.sizes' of Model is static
    nnx.update(model, good, nnx.State({"plain": {1: {"x": 6}}}))
        ValueError: update: the path 'plain.1' of Model holds an array of shape ()
    nnx.update(model, good | {"words": {0: {"x": 6}}})
        ValueError: update: the path 'words.0' of Model holds a leaf, not a node
    nnx.update(model, good | {"words": {1: 6}})
        ValueError: update: the path 'words.1' of Model is static
    nnx.update(model, good | {"layers": {2: nnx.Param(ONE)}})
        ValueError: update: the path 'layers.2' of Model is not the next item
    nnx.update(model, good | {"layers": {"0": {"weight": ONE}}})
        ValueError: update: the path 'layers.0' of Model does not exist ... number 0, not a text
        ... restore_int_paths(state)
    nnx.update(model, good | {"pair": {"third": nnx.Param(ONE)}})
        ValueError: update: the path 'pair.third' of Model does not exist
    nnx.update(model, good | {"layer": {"bias": {"x": 1}}})
        ValueError: update: the path 'layer.bias' of Model holds an array of shape (3,)
    nnx.update(model, good | {"layer": {"bias": None}})
        ValueError: update: the path 'layer.bias' of Model holds an array ... NoneType
    nnx.update(model, good | {"ref": jnp.ones(3)})
        ValueError: update: the reference at 'ref' has shape (2,), the state brings float32[3] of shape
        (3,) ... The shape of a reference is fixed: bring a value of the same shape, or assign a new
    nnx.update(model, nnx.State({"layer": {"bias": jnp.ones(3)}, "ref": nnx.Variable(1.0)}))
        ValueError: update: the reference at 'ref' has shape (2,), the state brings ... of shape ()
    nnx.update(model, good | {"ref": jnp.ones(2, int)})
        ValueError: the reference at 'ref' has dtype float32, the state brings int32[2]
        ... Bring a value of the same dtype
    nnx.update(model, {"bare": jnp.ones(2, int)})
        ValueError: the reference at 'bare' has dtype float32, the state brings int32[2]
    nnx.update(model, good | {"layer": {"bias": Boxed(jnp.ones(3))}})
        ValueError: 'layer.bias' of Model holds an array of shape (3,), the state brings a Boxed of
        tests. ... Bring the arrays themselves: a State of Flax becomes a dict of them with
        flax.nnx.to_
    nnx.update(model, {"layer": {"bias": nnx.Param(Boxed(jnp.ones(3)))}})
        ValueError: 'layer.bias' of Model holds an array of shape (3,), the state brings a Boxed
    nnx.update(model, {"array": Boxed(ONE)})
        ValueError: 'array' of Model
""")
def test_a_refusal_says_why_and_changes_nothing(line, message):
    scope = {"layer": Layer(), "model": Model(), "variable": nnx.Param(ONE), "declared": Declared()}
    scope |= {"with_axes": annotated(), "in_tuple": holding((1, nnx.Param(ONE)))}
    scope["no_bias"] = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    refused(line, message, NAMES | scope)


@pytest.mark.parametrize(
    "name", "split state graphdef clone flatten unpack iter_graph map recursive_map".split()
)
def test_tree_mode_refuses_sharing_and_names_every_path(name):
    function = getattr(nnx, name)
    if name.endswith("map"):
        function = functools.partial(function, lambda path, x: x)
    layer = Layer()
    model = nnx.Dict(a=layer, b=[layer, {"deep": layer}])
    with pytest.raises(ValueError) as caught:
        function(model, graph=False)
    text = str(caught.value)
    assert "Duplicate Layer found at paths: 'a', 'b.0', 'b.1.deep'" in text
    assert f"pass graph=True to nnxlite.{'split' if name == 'unpack' else name}" in text
    assert function(model, graph=True) is not None
    with nnx.set_graph_mode(False), pytest.raises(ValueError, match="Duplicate Layer"):
        function(model)


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


CALLS = {
    "split": nnx.split,
    "state": nnx.state,
    "clone": nnx.clone,
    "iter_graph": lambda m: list(nnx.iter_graph(m)),
    "find_duplicates": nnx.find_duplicates,
    "recursive_map": lambda m: nnx.recursive_map(lambda p, x: x, m),
    "pop": lambda m: nnx.pop(m, nnx.Param),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_plain_container_that_contains_itself(name):
    box, items = Box(ONE), [ONE, [ONE]]
    box.content = [box]
    items[1].append(items)
    for held, found in ((items, "list at 'held.1.1'"), (nnx.data(box), "Box at 'held.content.0'")):
        with pytest.raises(ValueError) as info:
            CALLS[name](nnx.Dict(held=held))
        assert f"The {found} contains itself" in str(info.value)
        assert "put the cycle through a Module, nnx.List or nnx.Dict" in str(info.value)


def test_update_of_an_annotated_variable_and_of_a_parameter_that_is_none():
    bare = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    nnx.update(bare, {"bias": None})
    nnx.update(bare, {"bias": nnx.Param(ONE)})
    assert bare.bias[...] is ONE
    model = annotated()
    right = model.kernel.replace(jnp.ones((4, 2, 3)), sharding=(None, None, "a"))
    nnx.update(model, {"kernel": right})
    assert model.kernel.shape == (4, 2, 3) and model.kernel.sharding_names == (None, None, "a")
    nnx.update(model, {"kernel": jnp.ones((5, 6, 7))})  # as many axes as are annotated
    assert model.kernel.shape == (5, 6, 7)


def test_update_with_pytrees_that_are_more_than_an_array():
    for scale in (2.0, 0.0):
        layer = Layer()
        nnx.update(layer, {"bias": Boxed(jnp.ones(3), scale)})
        assert layer.bias.value.scale == scale
    boxed = nnx.Dict(a=nnx.Param(Boxed(jnp.ones(2))))  # there it is what the object holds
    nnx.update(boxed, jax.tree.map(jnp.zeros_like, nnx.state(boxed)))
    assert not boxed.a.value.content.any()


def test_a_graph_state_has_the_attributes_of_its_state_and_updates_as_one():
    v = nnx.Param(jnp.array(1.0))
    nnx.update(v, nnx.unpack(nnx.Param(jnp.array(2.0))))
    assert float(v.value) == 2
    packed = nnx.unpack(Layer())
    assert packed.kernel.shape == (2, 3)
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
