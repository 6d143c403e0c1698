"""`List` and `Dict`: the methods of lists and dicts, on graph objects."""

import copy
import pickle
from collections.abc import MutableMapping, MutableSequence

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlite as nnx


class Leaf(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.zeros(1))


def keys(node):
    """The key paths of the leaves of a pytree."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.flatten_with_path(node)[0]]


def test_lists_and_dicts_are_collections_and_modules():
    table = nnx.Dict({"b": 1}, a=2)
    assert list(table) == ["b", "a"] and bool(nnx.Dict(a=0)) and not nnx.Dict()
    items = nnx.List([1, jnp.zeros(2), nnx.data(3), nnx.static("s"), [jnp.zeros(1)], [2]])
    assert [items._nnx_status[i] for i in range(6)] == [False, True, True, False, True, False]
    assert keys(items) == ["[1]", "[2]", "[4][0]"]
    for it, kind in ((table, MutableMapping), (items, MutableSequence)):
        assert isinstance(it, kind) and isinstance(it, nnx.Module)
    for new in (copy.copy(items), copy.deepcopy(items), pickle.loads(pickle.dumps(items))):
        assert type(new) is nnx.List and len(new) == 6 and new[0] == 1
        new.append(4)
        assert len(items) == 6
    assert [len(nnx.List(*args)) for args in ((), ([],), ((1, 2),), (range(3),))] == [0, 0, 2, 3]
    assert bool(nnx.List([0])) and not nnx.List()


VALUES = st.one_of(st.integers(0, 3), st.sampled_from("ab"), st.just("array"), st.just("leaf"))
POSITIONS = st.integers(-4, 4)
EDITS = st.one_of(
    st.tuples(st.just("append"), VALUES),
    st.tuples(st.just("insert"), POSITIONS, VALUES),
    st.tuples(st.just("pop"), POSITIONS),
    st.tuples(st.just("extend"), st.lists(VALUES, max_size=3)),
    st.tuples(st.just("reverse")),
    st.tuples(st.just("clear")),
    st.tuples(st.just("__delitem__"), st.builds(slice, POSITIONS, POSITIONS)),
    st.tuples(st.just("__setitem__"), st.builds(slice, POSITIONS, POSITIONS), st.lists(VALUES)),
    st.tuples(st.just("__iadd__"), st.lists(VALUES, max_size=2)),
)


def real(value):
    if isinstance(value, list):
        return [real(v) for v in value]
    return {"array": lambda: jnp.zeros(1), "leaf": Leaf}.get(value, lambda: value)()


@given(st.lists(VALUES, max_size=4), st.lists(EDITS, max_size=6))
def test_a_list_changes_as_a_list_of_python_does(start, edits):
    model = [real(v) for v in start]
    items = nnx.List(model)
    for name, *args in edits:
        args = [real(a) if not isinstance(a, (int, slice)) else a for a in args]
        outcomes = []
        for target in (items, model):
            try:
                getattr(target, name)(*args)
                outcomes.append(None)
            except IndexError:
                outcomes.append(IndexError)
        assert outcomes[0] is outcomes[1]
        assert len(items) == len(model) and all(a is b for a, b in zip(items, model))
        expected = [nnx.is_data(v) for v in model]
        assert [items._nnx_status[i] for i in range(len(model))] == expected
        assert len(vars(items)) == len(model) and nnx.clone(items)[:0] == []


def test_statuses_move_with_their_items():
    items = nnx.List([nnx.data(1), 1, jnp.zeros(1)])
    items.reverse()
    items.insert(0, nnx.data("d"))
    del items[1]
    assert [items._nnx_status[i] for i in range(3)] == [True, False, True]
    assert list(items) == ["d", 1, 1]


def test_a_list_may_have_attributes_beside_its_items():
    items = nnx.List([jnp.zeros(1)])
    items.note = "text"
    items.sow(nnx.Intermediate, "seen", 1)
    items.append(2)
    assert items[1:] == [2] and keys(items) == ["[0]", ".seen.value[0]"] and "note" in dir(items)


def test_long_lists_are_built_and_read_in_linear_time():
    items = nnx.List()
    for i in range(20_000):
        items.append(i)
    assert sum(items[i] for i in range(len(items))) == sum(range(20_000))


def test_keys_may_be_numbers():
    table = nnx.Dict({1: jnp.ones(1), 2: "static", 3: jnp.zeros(1)})
    assert list(nnx.state(table)) == [1, 3] and keys(table) == ["[1]", "[3]"]
    new = nnx.merge(*nnx.split(table))
    assert new[1].tolist() == [1.0] and [*new] == [*jax.tree.map(jnp.sin, table)] == [1, 2, 3]
    items = nnx.Dict(text=nnx.Param(1.0), image=nnx.Param(2.0))  # sorted by the first transform
    traced = nnx.jit(lambda items: jnp.stack([x[...] for x in items.values()]))(items)
    assert traced.tolist() == [x.get_value() for x in items.values()] == [2.0, 1.0]


def test_subclasses_may_have_their_own_constructor():
    class Heads(nnx.Dict):
        def __init__(self, **heads):
            super().__init__(**heads)
            self.extra = jnp.zeros(1)

        def __call__(self):
            return len(self)

    assert Heads(a=1)() == 2 and type(nnx.clone(Heads(a=1))) is Heads


def test_attributes_of_a_list_have_the_names_that_setattr_takes():
    """Programs walk modules by `vars` and `setattr`, whatever contains them."""
    layers = nnx.List([nnx.Module(), nnx.Param(1.0), nnx.Dict(a=nnx.Param(2.0))])
    assert [*vars(layers)] == ["0", "1", "2"] == [n for n in dir(layers) if n.isdecimal()]

    def doubled(node):
        for name, value in list(vars(node).items()):
            if isinstance(value, nnx.Variable):
                setattr(node, name, type(value)(value.value * 2))
            elif isinstance(value, nnx.Module) and not name.startswith("_"):
                doubled(value)

    doubled(layers)
    assert (layers[1].value, layers[2].a.value) == (2.0, 4.0)
    with pytest.raises(TypeError):
        vars(layers)["0"] = 3
    layers.__dict__ = {"0": nnx.Param(5.0), "note": 1}
    assert (len(layers), layers[0].value, layers.note) == (1, 5.0, 1)
    setattr(layers, "1", nnx.Param(6.0))
    assert jax.tree.leaves(nnx.state(nnx.clone(layers))) == [5.0, 6.0] == [v.value for v in layers]
