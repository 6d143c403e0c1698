"""States: the mapping, its algebra, its flat form, its pytree, and the functions on it."""

from __future__ import annotations

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

State, FlatState = nnx.State, nnx.FlatState


def variables():
    return State(
        {
            "a": {"kernel": nnx.Param(jnp.ones(2)), "mean": nnx.BatchStat(jnp.zeros(2))},
            "z": 5,
        }
    )


@rows("""
    State({"a": 1})["x"]
        KeyError: 'x'
    State({"a": 1}).pop("x")
        KeyError: 'x'
    del State({"a": 1})["x"]
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
""")
def test_a_refusal_says_why_and_changes_nothing(line, message):
    state = variables()
    before = state.raw_mapping | {"a": {**state.a.raw_mapping}}
    refused(line, message, globals() | {"state": state})
    assert state == before


# The mapping --------------------------------------------------------------------------------


def test_an_inner_mapping_is_the_same_state_each_time():
    state = State({"a": {"b": {"c": 1}}})
    inner = state["a"]
    assert type(inner) is State
    assert state["a"] is inner
    assert state.a is inner
    assert dict(state.items())["a"] is inner
    assert list(state.values())[0] is inner
    inner["b"]["c"] = 2
    inner.new = 3
    assert state.raw_mapping == {"a": {"b": {"c": 2}, "new": 3}}


def test_the_constructor_copies_inner_mappings():
    source = {"a": {"b": 1}}
    state = State(source)
    state.a.b = 2
    state.c = 3
    again = State(state)
    again.a.b = 4
    assert source == {"a": {"b": 1}}
    assert state.raw_mapping == {"a": {"b": 2}, "c": 3}


def test_without_copy_the_dict_is_taken_over():
    inner = {"b": 1}
    source = {"a": inner}
    state = State(source, _copy=False)
    state.a.b = 2
    state.c = 3
    assert inner == {"b": 2}
    assert source["c"] == 3
    assert type(state.a) is State
    assert State(state, _copy=False)._mapping is source


def test_a_state_that_is_put_in_stays_the_same_object():
    outer, inner = State({}), State({"a": 1})
    outer["x"] = inner
    assert outer.x is inner
    inner.a = 2
    assert outer.raw_mapping == {"x": {"a": 2}}


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


@pytest.mark.parametrize(
    "edit",
    [
        lambda s: s.__setitem__("a", 9),
        lambda s: setattr(s, "new", 9),
        lambda s: s.update(a=9),
        lambda s: s.__delitem__("a"),
        lambda s: s.pop("a"),
        lambda s: s.setdefault("new", 9),
        lambda s: s.clear(),
        lambda s: s.replace_by_pure_dict({"a": 9}),
    ],
)
def test_every_edit_is_told_to_whoever_recorded_the_state(edit):
    state = State({"a": 1})
    version = _versions.observe(state)
    epoch = _versions.epoch.now
    assert _versions.observe(state) == version
    edit(state)
    assert state._nnx_version == 0
    assert _versions.epoch.now != epoch


def test_an_edit_of_an_inner_state_is_told_of_that_one():
    state = State({"a": {"b": 1}})
    outer, inner = _versions.observe(state), _versions.observe(state.a)
    state.a.b = 2
    assert state._nnx_version == outer
    assert state.a._nnx_version != inner


def test_reading_and_unobserved_edits_leave_the_epoch():
    state = variables()
    epoch = _versions.epoch.now
    state.a.x = 1
    state.split(nnx.Param, ...)
    state.flat_state()
    list(state.items())
    repr(state)
    assert _versions.epoch.now == epoch


# Comparing and copying ------------------------------------------------------------------------


def test_arrays_are_equal_by_shape_dtype_and_elements():
    one = State({"a": jnp.arange(3)})
    assert one == State({"a": jnp.arange(3)})
    assert one == State({"a": np.arange(3, dtype=np.int32)})
    assert one != State({"a": jnp.arange(3) + 1})
    assert one != State({"a": jnp.arange(3.0)})
    assert one != State({"a": jnp.arange(4)})
    abstract = State({"a": jax.ShapeDtypeStruct((3,), jnp.int32)})
    assert abstract == State({"a": jax.ShapeDtypeStruct((3,), jnp.int32)})
    assert one != abstract
    keys = State({"key": jax.random.key(0)})
    assert keys == State({"key": jax.random.key(0)})
    assert keys != State({"key": jax.random.key(1)})


def test_variables_are_equal_by_class_metadata_and_value():
    assert variables() == variables()
    assert State({"a": nnx.Param(1)}) != State({"a": nnx.BatchStat(1)})
    assert State({"a": nnx.Param(1)}) != State({"a": nnx.Param(1, tag="x")})
    assert State({"a": nnx.Param(1)}) != State({"a": nnx.Param(2)})
    refs = State({"a": nnx.Param(jnp.ones(2), ref=True)})
    assert refs == State({"a": nnx.Param(jnp.ones(2), ref=True)})
    assert refs != State({"a": nnx.Param(jnp.zeros(2), ref=True)})


def test_copies():
    state = variables()
    shallow = copy.copy(state)
    assert shallow == state
    assert shallow.a is state.a
    shallow.new = 1
    assert "new" not in state
    deep = copy.deepcopy(state)
    assert deep == state
    assert deep.a is not state.a
    assert deep.a.kernel is not state.a.kernel
    both = copy.deepcopy({"x": state, "y": state})
    assert both["x"] is both["y"]


def test_pickling():
    state = variables()
    back = pickle.loads(pickle.dumps(state))
    assert back == state
    assert type(back.a) is State
    assert type(back.a.kernel) is nnx.Param
    flat = pickle.loads(pickle.dumps(state.flat_state()))
    assert flat == state.flat_state()


def test_states_can_be_referred_to_weakly():
    state = State({"a": {"b": 1}})
    refs = weakref.ref(state), weakref.ref(state.a)
    assert refs[0]() is state
    del state
    assert [ref() for ref in refs] == [None, None]


class Special(State):
    pass


def test_a_subclass():
    special = Special({"a": {"b": 1}})
    special["c"] = {"d": 2}
    assert type(special.a) is type(special.c) is Special
    assert type(special.map(lambda path, x: x)) is State
    assert type(special.split(...)) is State
    assert type(special - {"a": 1}) is State
    assert type(special | {"a": 1}) is State
    assert type(Special.from_flat_path(special.flat_state())) is Special
    assert type(nnx.merge_state(special, special, cls=Special).a) is Special
    assert type(jax.tree.map(lambda x: x, special).a) is Special
    assert type(copy.deepcopy(special).a) is Special
    assert type(pickle.loads(pickle.dumps(special))) is Special
    assert nnx.to_flat_state(State({"x": special})).paths == (("x", "a", "b"), ("x", "c", "d"))


# Pytree -------------------------------------------------------------------------------------


def test_the_order_of_leaves_does_not_depend_on_insertion():
    items = [("b", 1), ("a", 2), (10, 3), (9, 4), (("t", 1), 5)]
    expected = [9, 10, "a", "b", ("t", 1)]
    for permuted in itertools.permutations(items):
        assert sorted_keys(key for key, _ in permuted) == expected
        state = State(permuted)
        assert jax.tree.leaves(state) == [4, 3, 2, 1, 5]
        assert [path[0] for path in state.flat_state().paths] == expected
        assert [p[0] for p in FlatState([((k,), v) for k, v in permuted], sort=True).paths] == (
            expected
        )
    first, second = (jax.tree.structure(State(i)) for i in (items, items[::-1]))
    assert first == second
    assert hash(first) == hash(second)


def test_to_jax_an_inner_state_is_a_dict_where_jax_can_sort_its_keys():
    state = State({"a": {"b": {2: 1, 1: 2}}, "c": {}, "d": {"x": 3, 1: 4}})
    children, _ = jax.tree_util.default_registry.flatten_one_level(state)
    assert list(map(type, children)) == [dict, dict, State]
    assert type(children[0]["b"]) is dict
    assert jax.tree.leaves(state) == [2, 1, 4, 3]
    optimizer = nnx.Optimizer(
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        wrt=nnx.Param,
    )
    rate = optax.tree_utils.tree_get(nnx.state(optimizer), "learning_rate")
    assert type(rate) is nnx.OptArray
    assert rate == pytest.approx(0.1)


def test_true_is_not_taken_for_one():
    jax.tree.leaves(State({1: 0}))
    [(path, _)], treedef = jax.tree_util.tree_flatten_with_path(State({True: 0}))
    assert path[0].key is True
    assert list(jax.tree.unflatten(treedef, [0])) == [True]


def test_unflattening_takes_any_object():
    state = State({"a": {"b": 1}, "c": 2})
    treedef = jax.tree.structure(state)
    odd = object()
    back = jax.tree.unflatten(treedef, [None, odd])
    assert back.a.b is None
    assert back.c is odd


def test_dicts_that_a_pytree_operation_leaves_behind_are_inner_states():
    def made():
        return jax.tree.map(lambda x: {"value": {"deep": x}}, State({"a": 1, "b": {"c": 2}}))

    expected = {
        "a": {"value": {"deep": 1}},
        "b": {"c": {"value": {"deep": 2}}},
    }
    assert made() == expected
    assert made().raw_mapping == expected
    assert made().flat_state().paths == (("a", "value", "deep"), ("b", "c", "value", "deep"))
    state = made()
    assert type(state.a) is State
    assert state.a is state["a"]
    state.a.value.deep = 5
    assert state.raw_mapping["a"] == {"value": {"deep": 5}}
    assert all(type(v) is State for v in made().values())
    assert all(type(v) is State for _, v in made().items())
    assert (made() | {"a": {"x": 1}}).raw_mapping["a"] == {"value": {"deep": 1}, "x": 1}
    assert made().map(lambda path, x: x) == expected


def test_a_flat_state_is_a_pytree_of_its_leaves():
    flat = State({"b": 1, "a": {"c": 2}}).flat_state()
    assert jax.tree.leaves(flat) == [2, 1]
    doubled = jax.tree.map(lambda x: 2 * x, flat)
    assert type(doubled) is FlatState
    assert doubled == State({"b": 2, "a": {"c": 4}}).flat_state()


# Flat states ----------------------------------------------------------------------------------


def test_a_flat_state_is_a_sequence():
    flat = State({"b": {"c": 1, "a": 2}, "a": 3, "e": {}}).flat_state()
    assert flat.paths == (("a",), ("b", "a"), ("b", "c"))
    assert flat.leaves == [3, 2, 1]
    assert len(flat) == 3
    assert flat[0] == (("a",), 3)
    assert flat[-1] == (("b", "c"), 1)
    assert list(flat[1:]) == list(flat)[1:]
    assert type(flat[1:]) is FlatState
    assert list(reversed(flat)) == list(flat)[::-1]
    assert (("a",), 3) in flat
    assert (("a",), 4) not in flat
    assert 3 not in flat
    assert flat.index((("b", "a"), 2)) == 1
    with pytest.raises(IndexError):
        flat[3]


def test_flat_states_are_equal_by_content():
    make = lambda: variables().flat_state()
    assert make() == make()
    assert make() != make()[1:]
    assert State({"a": 1}).flat_state() != State({"a": 2}).flat_state()
    assert make() != 3


def test_building_flat_states():
    pairs = [(("b",), 1), (["a", "c"], 2)]
    assert FlatState(pairs, sort=True).paths == (("a", "c"), ("b",))
    assert FlatState(pairs, sort=False).paths == (("b",), ("a", "c"))
    assert FlatState({("b",): 1}, sort=True) == FlatState([(("b",), 1)], sort=False)
    leaves = [1, 2]
    flat = FlatState.from_sorted_keys_values((("a",), ("b",)), leaves)
    assert flat.leaves is leaves
    assert FlatState.from_sorted_keys_values([("a",)], (1,)).leaves == [1]


def test_from_flat_state_does_not_edit_a_leaf():
    leaf = {"x": 1}
    assert nnx.from_flat_state([(("a",), leaf), (("a", "y"), 2)]).raw_mapping == {
        "a": {"x": 1, "y": 2}
    }
    assert leaf == {"x": 1}


# Splitting and merging ------------------------------------------------------------------------


def test_merging_keeps_the_order_in_which_keys_come():
    merged = State({"z": {"y": 1, "b": 2}}) | {"a": 3, "z": {"c": 4, "b": 5}}
    assert list(merged) == ["z", "a"] and list(merged.z) == ["y", "b", "c"]
    assert list(nnx.merge_state({"z": 1}, {"a": 2}, cls=dict)) == ["z", "a"]


def test_merging_does_not_edit_the_parts():
    a, b = State({"a": {"b": 1}}), State({"a": {"c": 2}})
    merged = nnx.merge_state(a, b)
    merged.a.b = 5
    assert a == {"a": {"b": 1}}
    assert b == {"a": {"c": 2}}


@pytest.mark.parametrize(
    "function",
    [
        nnx.to_flat_state,
        nnx.to_pure_dict,
        nnx.restore_int_paths,
        lambda x: nnx.split_state(x, ...),
        lambda x: nnx.filter_state(x, ...),
        lambda x: nnx.map_state(lambda p, v: v, x),
        lambda x: nnx.merge_state(x, x),
        lambda x: nnx.statelib.diff(x, {}),
    ],
)
def test_functions_take_mappings_and_refuse_other_things(function):
    function({"a": {"b": 1}})
    function(State({"a": {"b": 1}}))
    function(FlatState([(("a", "b"), 1)], sort=False))
    with pytest.raises(TypeError, match="needs a State .or another mapping., got list"):
        function([1])


# Pure values ----------------------------------------------------------------------------------


def test_replace_by_pure_dict_of_a_variable_that_holds_a_mapping():
    state = State({"a": nnx.Variable({"x": 1})})
    nnx.replace_by_pure_dict(state, {"a": {"x": 2, "y": 3}})
    assert state.a.value == {"x": 2, "y": 3}


# Depth --------------------------------------------------------------------------------------


def test_depth_is_not_bounded_by_the_recursion_limit():
    nested: dict = {"leaf": nnx.Param(1)}
    for _ in range(10_000):
        nested = {"a": nested}
    state = State(nested)
    flat = state.flat_state()
    assert len(flat.paths[0]) == 10_001
    assert flat.to_nested_state() == state
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
