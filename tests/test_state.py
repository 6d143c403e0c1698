"""States: the mapping, its algebra, its flat form, its pytree, and the functions on it."""

import copy
import itertools
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from nnxlite._base import interning as _versions
from nnxlite._state._flat import sorted_keys
from tests.messages import refused, rows

State, FlatState, tr = nnx.State, nnx.FlatState, nnx.traversals


def variables():
    inner = {"kernel": nnx.Param(jnp.ones(2)), "mean": nnx.BatchStat(jnp.zeros(2))}
    return State({"a": inner, "z": 5})


@rows("""
    State({"a": 1})["x"]
        KeyError: 'x'
    State({"a": 1}).x
        AttributeError: No attribute 'x' in State; its keys are: 'a'
    del State({"a": 1}).x
        AttributeError: its keys are: 'a'
    State({}).x
        AttributeError: its keys are: none
    State({i: i for i in range(11)}).x
        AttributeError: its keys are: 0, ... , 9
    State({"__wrapped__": 1}).__wrapped__
        AttributeError: no attribute '__wrapped__'
    State({"__wrapped__": 1}).__wrapped__ = 2
        AttributeError: Cannot set '__wrapped__' of State
    State(3)
        TypeError: State needs a mapping ... got int
    State(None)
        TypeError: State needs a mapping ... got NoneType
    hash(State({}))
        TypeError: unhashable type
    hash(state.flat_state())
        TypeError: unhashable type
    FlatState.from_sorted_keys_values([("a",)], [1, 2])
        ValueError: A FlatState of 1 paths cannot have 2 leaves
    FlatState(3, sort=True)
        TypeError: FlatState needs a mapping from paths ... got int
    nnx.from_flat_state(3)
        TypeError: iterable of (path, leaf) pairs, got int
    nnx.from_flat_state([((), 1)])
        ValueError: A leaf with an empty path has no place in a State
    nnx.from_flat_state([(("a",), 1), (("a", "b"), 2)])
        TypeError: The path 'a.b' leads through the key 'a', ... leaf (int)
    state.split(nnx.Param)
        ValueError: Non-exhaustive filters ... none of Param matches a.mean (BatchStat), z (int)
        ... Add a filter for them, or `...` as the last one
    state.flat_state().split(nnx.Param)
        ValueError: Non-exhaustive filters ... none of Param matches a.mean (BatchStat), z (int)
    State({i: i for i in range(9)}).split(str)
        ValueError: 7 (int) and 1 more.
    nnx.replace_by_pure_dict(state, {"z": 0, "a": {"x": 1}})
        ValueError: available in state: ('a', 'x'); ... in the State ... 'kernel'
    nnx.replace_by_pure_dict(state, {"z": 0, "q": {"x": 1}})
        ValueError: not available in state: ('q',
    nnx.replace_by_pure_dict(state, {"z": 0, "5": 1})
        ValueError: not available in state: ('5',
    nnx.replace_by_pure_dict(state, {"z": 0, "a": 1})
        ValueError: path 'a' ... leaf (int), but ... inner mapping with ... 'mean'
    nnx.replace_by_pure_dict(state, {"a": {"mean": {"x": 1}}, "z": 0})
        ValueError: path 'a.mean' ... with the keys ['x'], ... BatchStat
    nnx.replace_by_pure_dict({"a": 1}, {"a": 2})
        TypeError: replace_by_pure_dict needs a State, got dict
    nnx.replace_by_pure_dict(State({}), 3)
        TypeError: replace_by_pure_dict needs a mapping, got int
    nnx.restore_int_paths({"1": 1, 1: 2})
        ValueError: ('1',) and (1,) both become (1,)
    tr.flatten_mapping([1])
        TypeError: flatten_mapping needs a mapping, got list
    tr.flatten_to_sequence([1])
        TypeError: flatten_to_sequence needs a mapping, got list
    tr.flatten_mapping({1: {"a": 2}}, sep="/")
        TypeError: Cannot join the path (1, 'a') by sep='/' ... type int
    tr.unflatten_mapping(3)
        TypeError: unflatten_mapping needs a mapping from paths ... got int
    tr.unflatten_mapping({"ab": 1})
        TypeError: The path 'ab' is a string: give its separator as sep=
    tr.unflatten_mapping({("a",): 1}, sep="/")
        TypeError: With sep='/' a path must be a string, got
    tr.unflatten_mapping({(): 1})
        ValueError: An empty path is not possible
    tr.unflatten_mapping({("a",): 1, ("a", "b"): 2})
        TypeError: 'a.b' leads through the key 'a', ... leaf (int)
""")
def test_a_refusal_says_why_and_changes_nothing(line, message):
    state = variables()
    before = state.raw_mapping | {"a": {**state.a.raw_mapping}}
    refused(line, message, globals() | {"state": state})
    assert state == before


# The mapping --------------------------------------------------------------------------------


def test_an_inner_mapping_is_the_same_state_each_time():
    state, given = State({"a": {"b": {"c": 1}}}), State({"x": 1})
    state["given"] = given
    for key, inner in {"a": state["a"], "given": given}.items():
        assert type(inner) is State
        ways = state[key], getattr(state, key), dict(state.items())[key], state.get(key)
        assert all(found is inner for found in ways)
    assert list(state.values()) == [state.a, given]
    state.a["b"]["c"] = 2
    state.a.new = 3
    for number, node in enumerate([state, nnx.GraphState(nnx.graphdef({}), state)], 4):
        node.setdefault("given", {})["x"] = node.setdefault(number, {})["y"] = number
    assert state.raw_mapping.pop("given") == {"x": 5}
    assert state == {"a": {"b": {"c": 2}, "new": 3}, "given": given, 4: {"y": 4}, 5: {"y": 5}}


def test_the_constructor_copies_inner_mappings_unless_it_takes_the_dict_over():
    source = {"a": {"b": 1}}
    state = State(source)
    again = State(state)
    state.a.b = again.a.b = 2
    again.c = 3
    assert source == {"a": {"b": 1}} and state.raw_mapping == {"a": {"b": 2}}
    state = State(source, _copy=False)
    state.a.b = state.c = 3
    assert source["c"] == 3 and state.raw_mapping["a"] == {"b": 3}
    assert State(state, _copy=False)._mapping is source


def test_keys_may_have_the_names_of_methods():
    state = State({"keys": 1, "split": {"items": 2}})
    assert list(state.keys()) == ["keys", "split"] and list(reversed(state)) == ["split", "keys"]
    assert state["split"]["items"] == 2
    assert state.flat_state().paths == (("keys",), ("split", "items"))


def test_a_state_has_no_cycles():
    state = State({"a": {"b": {"c": 1}}})
    for target in (state.a.b, state.a, state):
        with pytest.raises(ValueError, match="under 'x' of a State that it contains"):
            target["x"] = state
    state["x"] = state.a  # sharing is fine
    cycle: dict = {"a": {}}
    cycle["a"]["b"] = cycle
    with pytest.raises(ValueError, match="The mapping under 'b' contains itself"):
        State(cycle)


# Versions -----------------------------------------------------------------------------------

EDITS = {
    "setitem": lambda s: s.__setitem__("a", 9),
    "setattr": lambda s: setattr(s, "new", 9),
    "update": lambda s: s.update(a=9),
    "delitem": lambda s: s.__delitem__("a"),
    "pop": lambda s: s.pop("a"),
    "setdefault": lambda s: s.setdefault("new", 9),
    "clear": lambda s: s.clear(),
    "replace": lambda s: s.replace_by_pure_dict({"a": 9}),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_every_edit_is_told_to_whoever_recorded_the_state_and_not_its_parent(edit):
    outer = State({"inner": {"a": 1}})
    version = _versions.observe(outer)
    _versions.observe(outer.inner)
    epoch = _versions.epoch.now
    edit(outer.inner)
    assert outer.inner._nnx_version == 0 and outer._nnx_version == version
    assert _versions.epoch.now != epoch


def test_reading_and_unobserved_edits_leave_the_epoch():
    state = variables()
    epoch = _versions.epoch.now
    state.a.x = 1
    for read in (lambda s: s.split(nnx.Param, ...), State.flat_state, State.items, repr):
        read(state)
    assert _versions.epoch.now == epoch


# Comparing and copying ------------------------------------------------------------------------

ARRAYS = {
    "numbers": lambda: jnp.arange(3),
    "other numbers": lambda: jnp.arange(3) + 1,
    "another dtype": lambda: jnp.arange(3.0),
    "another shape": lambda: jnp.arange(4),
    "abstract": lambda: jax.ShapeDtypeStruct((3,), jnp.int32),
    "key": lambda: jax.random.key(0),
    "another key": lambda: jax.random.key(1),
}
VARIABLES = {
    "Param": lambda: nnx.Param(1),
    "another kind": lambda: nnx.BatchStat(1),
    "another tag": lambda: nnx.Param(1, tag="x"),
    "another value": lambda: nnx.Param(2),
    "reference": lambda: nnx.Param(jnp.ones(2), ref=True),
    "another reference": lambda: nnx.Param(jnp.zeros(2), ref=True),
}


@pytest.mark.parametrize("leaves", [ARRAYS, VARIABLES], ids=["arrays", "Variables"])
def test_states_are_equal_by_the_class_metadata_dtype_and_elements_of_their_leaves(leaves):
    for one, other in itertools.product(leaves, leaves):
        states = [State({"a": leaves[name]()}) for name in (one, other)]
        assert (states[0] == states[1]) is (one == other), (one, other)
        assert (states[0].flat_state() == states[1].flat_state()) is (one == other)
    assert State({"a": jnp.arange(3)}) == State({"a": np.arange(3, dtype=np.int32)})
    assert variables().flat_state() != variables().flat_state()[1:] != 3


def test_copies_and_pickles():
    state = variables()
    shallow = copy.copy(state)
    assert shallow == state and shallow.a is state.a
    shallow.new = 1
    assert "new" not in state
    for deep in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert deep == state and type(deep.a) is State and type(deep.a.kernel) is nnx.Param
        assert deep.a is not state.a and deep.a.kernel is not state.a.kernel
    both = copy.deepcopy({"x": state, "y": state})
    assert both["x"] is both["y"]
    flat = state.flat_state()
    assert pickle.loads(pickle.dumps(flat)) == flat
    assert pickle.loads(pickle.dumps(tr.empty_node)) is tr.empty_node
    assert repr(tr.empty_node) == "empty_node"
    refs = weakref.ref(both["x"]), weakref.ref(both["x"].a)
    assert refs[0]() is both["x"]
    del both
    assert [ref() for ref in refs] == [None, None]


class Special(State):
    pass


def test_a_subclass():
    special = Special({"a": {"b": 1}})
    special["c"] = {"d": 2}
    assert type(special.a) is type(special.c) is Special
    assert nnx.to_flat_state(State({"x": special})).paths == (("x", "a", "b"), ("x", "c", "d"))
    plain = special.map(lambda path, x: x), special.split(...), special - {"a": 1}
    assert {type(state) for state in (*plain, special | {"a": 1})} == {State}
    assert type(nnx.merge_state(special, special, cls=Special).a) is Special
    assert type(jax.tree.map(lambda x: x, special).a) is Special
    flat = Special.from_flat_path(special.flat_state())
    copies = copy.deepcopy(special), pickle.loads(pickle.dumps(special))
    assert {type(state) for state in (flat, *copies)} == {Special}


# Pytree -------------------------------------------------------------------------------------


def test_the_order_of_leaves_does_not_depend_on_insertion():
    items = [("b", 1), ("a", 2), (10, 3), (9, 4), ((0, 1), 5), (np.int8(1), 6)]
    expected = [9, 10, "a", "b", np.int8(1), (0, 1)]
    treedefs = set()
    for permuted in itertools.permutations(items):
        assert sorted_keys(key for key, _ in permuted) == expected
        state = State(permuted)
        assert jax.tree.leaves(state) == [4, 3, 2, 1, 6, 5]
        flat = FlatState([((key,), value) for key, value in permuted], sort=True)
        assert [path for (path,) in flat.paths] == expected
        assert flat == state.flat_state()
        treedefs.add(jax.tree.structure(state))
    assert len(treedefs) == 1


def test_to_jax_an_inner_state_is_a_dict_where_jax_can_sort_its_keys():
    state = State({"a": {"b": {2: 1, 1: 2}}, "c": {}, "d": {"x": 3, 1: 4}})
    children, _ = jax.tree_util.default_registry.flatten_one_level(state)
    assert list(map(type, children)) == [dict, dict, State]
    assert type(children[0]["b"]) is dict and jax.tree.leaves(state) == [2, 1, 4, 3]
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    optimizer = nnx.Optimizer(nnx.Dict(w=nnx.Param(jnp.ones(2))), tx, wrt=nnx.Param)
    rate = optax.tree_utils.tree_get(nnx.state(optimizer), "learning_rate")
    assert type(rate) is nnx.OptArray and rate == pytest.approx(0.1)


def test_unflattening_takes_any_object_and_keeps_the_keys():
    treedef, odd = jax.tree.structure(State({"a": {"b": 1}, "c": 2})), object()
    back = jax.tree.unflatten(treedef, [None, odd])
    assert back.a.b is None and back.c is odd
    jax.tree.leaves(State({1: 0}))
    [(path, _)], treedef = jax.tree_util.tree_flatten_with_path(State({True: 0}))
    assert path[0].key is True and list(jax.tree.unflatten(treedef, [0])) == [True]


def test_dicts_that_a_pytree_operation_leaves_behind_are_inner_states():
    def made():
        return jax.tree.map(lambda x: {"value": {"deep": x}}, State({"a": 1, "b": {"c": 2}}))

    expected = {"a": {"value": {"deep": 1}}, "b": {"c": {"value": {"deep": 2}}}}
    assert made() == expected == made().raw_mapping == made().map(lambda path, x: x)
    assert made().flat_state().paths == (("a", "value", "deep"), ("b", "c", "value", "deep"))
    for values in (made().values(), dict(made().items()).values()):
        assert all(type(value) is State for value in values)
    state = made()
    assert type(state.a) is State and state.a is state["a"]
    state.a.value.deep = 5
    assert state.raw_mapping["a"] == {"value": {"deep": 5}}
    assert (made() | {"a": {"x": 1}}).raw_mapping["a"] == {"value": {"deep": 1}, "x": 1}


# Flat states ----------------------------------------------------------------------------------


def test_a_flat_state_is_a_sequence_and_a_pytree_of_its_leaves():
    flat = State({"b": {"c": 1, "a": 2}, "a": 3, "e": {}}).flat_state()
    pairs = [(("a",), 3), (("b", "a"), 2), (("b", "c"), 1)]
    assert list(flat) == pairs == [flat[0], flat[1], flat[-1]] and len(flat) == 3
    assert type(flat[1:]) is FlatState and list(flat[1:]) == pairs[1:]
    assert list(reversed(flat)) == pairs[::-1] and flat.index(pairs[1]) == 1
    assert pairs[0] in flat and (("a",), 4) not in flat and 3 not in flat
    with pytest.raises(IndexError):
        flat[3]
    doubled = jax.tree.map(lambda x: 2 * x, flat)
    assert type(doubled) is FlatState and jax.tree.leaves(doubled) == [6, 4, 2] == doubled.leaves


def test_building_flat_states():
    pairs = [(("b",), 1), (["a", "c"], 2)]
    assert FlatState(pairs, sort=True).paths == (("a", "c"), ("b",))
    assert FlatState(pairs, sort=False).paths == (("b",), ("a", "c"))
    assert FlatState({("b",): 1}, sort=True) == FlatState([(("b",), 1)], sort=False)
    leaves = [1, 2]
    assert FlatState.from_sorted_keys_values((("a",), ("b",)), leaves).leaves is leaves
    assert FlatState.from_sorted_keys_values([("a",)], (1,)).leaves == [1]


# Functions ------------------------------------------------------------------------------------


def test_a_mapping_that_came_as_a_leaf_is_not_edited_and_a_later_entry_counts():
    leaf = {"x": {"y": 1}}
    flat = {("a",): leaf, ("a", "x", "z"): 2}
    for nested in (nnx.from_flat_state(flat.items()).raw_mapping, tr.unflatten_mapping(flat)):
        assert nested == {"a": {"x": {"y": 1, "z": 2}}}
    assert leaf == {"x": {"y": 1}}
    assert tr.unflatten_mapping([(("a", "b"), 1), (("a",), 2)]) == {"a": 2}


def test_merging_keeps_the_order_in_which_keys_come_and_does_not_edit_the_parts():
    parts = State({"z": {"y": 1, "b": 2}}), State({"a": 3, "z": {"c": 4, "b": 5}})
    for merged in (parts[0] | parts[1], nnx.merge_state(*parts)):
        assert list(merged) == ["z", "a"] and list(merged.z) == ["y", "b", "c"]
        merged.z.y = 6
    assert list(nnx.merge_state({"z": 1}, {"a": 2}, cls=dict)) == ["z", "a"]
    assert parts == ({"z": {"y": 1, "b": 2}}, {"a": 3, "z": {"c": 4, "b": 5}})


FUNCTIONS = {
    "to_flat_state": nnx.to_flat_state,
    "to_pure_dict": nnx.to_pure_dict,
    "restore_int_paths": nnx.restore_int_paths,
    "split_state": lambda x: nnx.split_state(x, ...),
    "filter_state": lambda x: nnx.filter_state(x, ...),
    "map_state": lambda x: nnx.map_state(lambda p, v: v, x),
    "merge_state": lambda x: nnx.merge_state(x, x),
    "diff": lambda x: nnx.statelib.diff(x, {}),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_take_mappings_and_refuse_other_things(function):
    for mapping in ({"a": {"b": 1}}, State({"a": {"b": 1}}), State({"a": {"b": 1}}).flat_state()):
        function(mapping)
    with pytest.raises(TypeError, match="needs a State .or another mapping., got list"):
        function([1])


def test_replace_by_pure_dict_of_a_variable_that_holds_a_mapping():
    state = State({"a": nnx.Variable({"x": 1})})
    nnx.replace_by_pure_dict(state, {"a": {"x": 2, "y": 3}})
    assert state.a.value == {"x": 2, "y": 3}


def test_depth_is_not_bounded_by_the_recursion_limit():
    nested: dict = {"leaf": nnx.Param(1)}
    for _ in range(4_000):
        nested = {"a": nested}
    state = State(nested)
    flat = state.flat_state()
    assert len(flat.paths[0]) == 4_001
    assert flat.to_nested_state() == state
    assert State(tr.unflatten_mapping(tr.flatten_mapping(nested))) == state
    assert copy.deepcopy(state) == state
    assert State(state.raw_mapping) == state
    assert nnx.merge_state(*state.split(nnx.Param, ...)) == state
    assert (state | {"b": 1}) - {"b": 1} == state
    nnx.replace_by_pure_dict(state, nnx.to_pure_dict(state))
    assert nnx.pure(state).flat_state().leaves == [1]
    outer = State({})
    outer["state"] = state
    with pytest.raises(ValueError, match="that it contains"):
        state["x"] = outer
    assert "State" in repr(state)
