"""Filters, states and traversals beside the reference: the same calls, the same answers."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlite as nnx

flax = pytest.importorskip("flax")
ref = pytest.importorskip("flax.nnx")

# The reference plans to replace its State by dicts, and says so.
pytestmark = pytest.mark.filterwarnings("ignore")

# The reference sorts keys only where they are all of one type.
KEYS = st.text("abc", min_size=1, max_size=2)
VALUES = st.integers(0, 99)
TREES = st.recursive(
    st.dictionaries(KEYS, VALUES, max_size=3),
    lambda inner: st.dictionaries(KEYS, st.one_of(inner, VALUES), max_size=3),
    max_leaves=8,
)


def plain(x):
    """Results of both libraries in one form: classes by name, States as dicts in their order."""
    if isinstance(x, (nnx.FlatState, ref.FlatState)):
        return ["flat", *[(path, plain(leaf)) for path, leaf in x]]
    if isinstance(x, (nnx.State, ref.State, dict)):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, (tuple, list)):
        return [plain(v) for v in x]
    if isinstance(x, (nnx.Variable, ref.Variable)):
        return type(x).__name__, x.get_raw_value()
    return x


def outcome(call, lib):
    """What a call gives, or the class of what it raises."""
    try:
        return plain(call(lib))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        return type(error)


def agree(call, *, in_order=True):
    """Both libraries give the same, keys in the same order, or raise the same class of error."""
    ours, theirs = outcome(call, nnx), outcome(call, ref)
    assert ours == theirs
    if in_order:
        assert repr(ours) == repr(theirs)


def variables(lib):
    return lib.State(
        {
            "a": {
                "kernel": lib.Param(1, tag="x"),
                "mean": lib.BatchStat(2),
                "deep": {"count": lib.Variable(3, tag="y")},
            },
            "b": {"cache": lib.Cache(4)},
            "z": 5,
        }
    )


@given(TREES)
def test_flat_states(tree):
    agree(lambda lib: lib.to_flat_state(lib.State(tree)))
    agree(lambda lib: lib.to_flat_state(lib.State(tree)).paths)
    agree(lambda lib: lib.to_flat_state(lib.State(tree)).leaves)
    agree(lambda lib: lib.from_flat_state(lib.to_flat_state(lib.State(tree))))
    agree(lambda lib: lib.from_flat_state(lib.to_flat_state(lib.State(tree)), cls=dict))
    agree(lambda lib: lib.to_flat_state(lib.State(tree)).to_nested_state())
    agree(lambda lib: lib.State(tree).map(lambda path, x: (path, x)))
    agree(lambda lib: lib.to_pure_dict(lib.State(tree)))


@given(TREES)
def test_pytree_leaves_and_paths(tree):
    agree(lambda lib: jax.tree.leaves(lib.State(tree)))
    agree(
        lambda lib: [
            (jax.tree_util.keystr(path), leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(lib.State(tree))[0]
        ]
    )
    agree(lambda lib: jax.tree.map(lambda x: x + 1, lib.State(tree)))


@given(TREES, TREES)
def test_algebra(x, y):
    same = functools.partial(agree, in_order=False)
    same(lambda lib: lib.State(x) - lib.State(y))
    same(lambda lib: lib.statelib.diff(lib.State(x), lib.State(y)))
    same(lambda lib: lib.merge_state(lib.State(x), lib.State(y)))
    same(lambda lib: lib.merge_state(x, y, cls=dict))
    same(lambda lib: lib.State.merge(lib.State(x), y))
    same(lambda lib: lib.State(x) == lib.State(y))
    same(lambda lib: lib.State(x) == x)
    same(lambda lib: lib.FlatState.merge(*map(lib.to_flat_state, map(lib.State, (x, y)))).paths)


def filters(lib):
    return [
        lib.Param,
        lib.Variable,
        int,
        "x",
        ...,
        None,
        True,
        False,
        [lib.Param, "y"],
        (),
        lib.PathContains("a"),
        lib.PathContains("e", exact=False),
        lib.Not(lib.Param),
        lib.All(lib.Variable, lib.PathContains("deep")),
        lib.Any("x", lib.Cache),
        lib.WithTag("y"),
        lib.OfType(lib.BatchStat),
        lib.Everything(),
        lib.Nothing(),
        lambda path, x: len(path) == 2,
    ]


@pytest.mark.parametrize("i", range(len(filters(nnx))))
def test_filters(i):
    agree(lambda lib: variables(lib).filter(filters(lib)[i]))
    agree(lambda lib: lib.filter_state(variables(lib), filters(lib)[i], ...))
    agree(lambda lib: variables(lib).split(filters(lib)[i]))
    agree(lambda lib: lib.split_state(variables(lib), filters(lib)[i], lib.Param, ...))
    agree(lambda lib: variables(lib).flat_state().split(lib.BatchStat, filters(lib)[i], ...))
    agree(lambda lib: variables(lib).flat_state().filter(filters(lib)[i]))


@pytest.mark.parametrize("i", range(len(filters(nnx))))
def test_filters_print_alike(i):
    def text(lib):
        return repr(lib.filterlib.to_predicate(filters(lib)[i]))

    if "function" not in text(nnx):
        assert re.sub(r"'nnxlite[\w.]*\.", "'", text(nnx)) == re.sub(
            r"'flax[\w.]*\.", "'", text(ref)
        )


@pytest.mark.parametrize(
    "positions",
    [[], [...], ["x", ...], [..., ...], ["x", ..., True], [..., "x"], ["x", True, None]],
)
def test_where_everything_may_stand(positions):
    agree(lambda lib: len(lib.filterlib.filters_to_predicates(positions)))


@pytest.mark.parametrize(
    "edit",
    [
        lambda s: s.__setitem__("b", 1),
        lambda s: s.__setitem__("new", {"x": {"y": 1}}),
        lambda s: setattr(s, "new", 1),
        lambda s: s["a"].__setitem__("mean", 1),
        lambda s: s.a.deep.update(count=1, more=2),
        lambda s: s.update({"a": {"only": 1}}),
        lambda s: s.__delitem__("a"),
        lambda s: s["a"].__delitem__("deep"),
        lambda s: s.__delitem__("none"),
        lambda s: s.pop("z"),
        lambda s: s.pop("none"),
        lambda s: s.pop("none", 3),
        lambda s: s.popitem(),
        lambda s: s.setdefault("z", 7),
        lambda s: s.clear(),
        lambda s: s["none"],
        lambda s: s.none,
        lambda s: s.get("none"),
    ],
)
def test_edits(edit):
    def call(lib):
        state = variables(lib)
        return edit(state), state

    agree(call)


@pytest.mark.parametrize(
    "pure",
    [
        {},
        {"z": 6},
        {"a": {"kernel": 7, "deep": {"count": 8}}},
        {"a": {"deep": {}}},
        {"a": {"none": 7}},
        {"none": 7},
        {"a": 7},
        {"z": {"none": 7}},
    ],
)
@pytest.mark.parametrize("replace", [None, lambda leaf, value: ("new", plain(leaf), value)])
def test_replace_by_pure_dict(pure, replace):
    def call(lib):
        state = variables(lib)
        return state.replace_by_pure_dict(pure, replace), state

    agree(call, in_order=False)


def test_replace_by_pure_dict_with_string_numbers():
    def call(lib):
        state = lib.State({0: {"k": lib.Param(1)}, 1: {"k": lib.Param(2)}})
        lib.replace_by_pure_dict(state, {"0": {"k": 3}, 1: {"k": 4}})
        return state

    agree(call)


@given(st.dictionaries(st.sampled_from(["0", "12", "-1", "01", "a", "1.5", "²"]), TREES))
def test_restore_int_paths(pure):
    if not {"0", "01", "-1", "1"} >= set(pure):
        agree(lambda lib: lib.restore_int_paths(pure))


@pytest.mark.parametrize("function", ["pure", "as_pure"])
@pytest.mark.parametrize(
    "tree",
    [
        lambda lib: variables(lib),
        lambda lib: variables(lib).flat_state(),
        lambda lib: {"a": [lib.Param(1), 2], "b": None},
        lambda lib: lib.Param({"x": lib.Cache(1)}),
        lambda lib: lib.Param(1, on_get_value=lambda v, x: x + 1),
        lambda lib: 3,
    ],
)
def test_pure(function, tree):
    agree(lambda lib: getattr(lib, function)(tree(lib)), in_order=False)


def test_to_pure_dict():
    agree(lambda lib: lib.to_pure_dict(variables(lib)))
    agree(lambda lib: variables(lib).to_pure_dict(lambda leaf: plain(leaf)))
    agree(
        lambda lib: lib.State({"a": lib.Param(1, on_get_value=lambda v, x: 2 * x)}).to_pure_dict()
    )


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"a": {"b": 1}, "c": 2},
        {"a": {}, "s": "x", "t": (1, 2), "n": None},
    ],
)
def test_states_print_alike(state):
    assert repr(nnx.State(state)) == repr(ref.State(state))
    assert repr(nnx.State(state).flat_state()) == repr(ref.State(state).flat_state())


@given(TREES, st.booleans(), st.sampled_from([None, "/"]))
def test_traversals(tree, keep, sep):
    def flatten(lib):
        return lib.traversals.flatten_mapping(tree, keep_empty_nodes=keep, sep=sep)

    def is_empty(leaf):
        return type(leaf).__name__ == "_EmptyNode"

    agree(lambda lib: {k: is_empty(v) or v for k, v in flatten(lib).items()})
    agree(lambda lib: lib.traversals.unflatten_mapping(flatten(lib), sep=sep))
    agree(lambda lib: lib.traversals.flatten_to_sequence(tree))
    short = lambda path, x: len(path) == 1
    agree(lambda lib: lib.traversals.flatten_mapping(tree, is_leaf=short))
    agree(lambda lib: lib.traversals.flatten_to_sequence(tree, is_leaf=short))


def test_states_of_models_have_the_same_paths():
    ours, theirs = (
        lib.State({"w": {"kernel": lib.Param(jnp.ones((2, 3)))}, "b": lib.Param(jnp.ones(3))})
        for lib in (nnx, ref)
    )
    keys = lambda tree: [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    assert keys(ours) == keys(theirs)
