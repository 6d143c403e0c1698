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
from tests.parity.layers import ref
from tests.parity.programs import Lines, Plain, attempt
from tests.parity.programs import agree as agree_on_line

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


def agree(call, *, in_order=True):
    """Both libraries give the same, keys in the same order, or raise the same class of error."""
    ours, theirs = (Plain(lib)(attempt(lambda lib=lib: call(lib))) for lib in (nnx, ref))
    assert ours == theirs
    if in_order:
        assert repr(ours) == repr(theirs)


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


@given(st.dictionaries(st.sampled_from(["0", "12", "-1", "01", "a", "1.5", "²"]), TREES))
def test_restore_int_paths(pure):
    if not {"0", "01", "-1", "1"} >= set(pure):
        agree(lambda lib: lib.restore_int_paths(pure))


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


def states(lib):
    """A state of Variables, and what is said of others."""

    def variables():
        deep = {"count": lib.Variable(3, tag="y")}
        a = {"kernel": lib.Param(1, tag="x"), "mean": lib.BatchStat(2), "deep": deep}
        return lib.State({"a": a, "b": {"cache": lib.Cache(4)}, "z": 5})

    def text(filter):
        found = repr(lib.filterlib.to_predicate(filter))
        return re.sub(r"'(nnxlite|flax)[\w.]*\.", "'", found)

    def by_path(state):
        return sorted(lib.to_flat_state(state), key=lambda item: repr(item[0]))

    def replaced(*args):
        changed = variables()
        return changed.replace_by_pure_dict(*args), by_path(changed)

    def by_number(pure):
        changed = lib.State({0: {"k": lib.Param(1)}, 1: {"k": lib.Param(2)}})
        lib.replace_by_pure_dict(changed, pure)
        return changed

    def unordered(x):
        is_mapping = isinstance(x, (dict, lib.State))
        return {k: unordered(x[k]) for k in sorted(x)} if is_mapping else x

    return {
        "s": variables(),
        "unordered": unordered,
        "replaced": replaced,
        "by_number": by_number,
        "text": text,
        "short": lambda path, x: len(path) == 2,
        "paths": lambda t: [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(t)],
        "new": lambda leaf, value: ("new", leaf, value),
        "hook": {"on_get_value": lambda v, x: 2 * x},
        "tree": {"a": [lib.Param(1), 2], "b": None},
        "model": lib.State({"w": {"kernel": lib.Param(jnp.ones((2, 3)))}, "b": lib.Param(1)}),
    }


lines = Lines()
FILTERS = """lib.Param lib.Variable int 'x' ... None True False [lib.Param,'y'] () lib.PathContains('a')
    lib.PathContains('e',exact=False) lib.Not(lib.Param) lib.All(lib.Variable,lib.PathContains('deep'))
    lib.Any('x',lib.Cache) lib.WithTag('y') lib.OfType(lib.BatchStat) lib.Everything() lib.Nothing()
    short""".split()
for _filter in FILTERS:
    lines(
        "filter",
        states,
        f"""
    s.filter({_filter})
    lib.split_state(s, {_filter}, lib.Param, ...)
    s.flat_state().split(lib.BatchStat, {_filter}, ...)
    s.flat_state().filter({_filter})
    """,
    )
    if _filter != "short":
        lines("filter", states, f"text({_filter})")
for _pure in (
    "{}",
    "{'z': 6}",
    "{'a': {'kernel': 7, 'deep': {'count': 8}}}",
    "{'a': {'deep': {}}}",
    "{'a': {'none': 7}}",
    "{'none': 7}",
    "{'a': 7}",
    "{'z': {'none': 7}}",
):
    lines("replace by a pure dict", states, f"replaced({_pure})\nreplaced({_pure}, new)")
for _tree in (
    "s",
    "s.flat_state()",
    "tree",
    "lib.Param({'x': lib.Cache(1)})",
    "lib.Param(1, **hook)",
    "3",
):
    lines("pure", states, f"unordered(lib.pure({_tree}))\nunordered(lib.as_pure({_tree}))")
for _state in ("{}", "{'a': {'b': 1}, 'c': 2}", "{'a': {}, 's': 'x', 't': (1, 2), 'n': None}"):
    lines("texts", states, f"repr(lib.State({_state}))\nrepr(lib.State({_state}).flat_state())")
for _filters in (
    "",
    "...",
    "'x', ...",
    "..., ...",
    "'x', ..., True",
    "..., 'x'",
    "'x', True, None",
):
    lines(
        "where everything may be", states, f"len(lib.filterlib.filters_to_predicates([{_filters}]))"
    )
lines(
    "edits",
    states,
    """
    s.split(lib.Param)
    s['new'] = {'x': {'y': 1}}
    s.new = 1
    s['a']['mean'] = 1
    s.a.deep.update(count=1, more=2)
    s.update({'a': {'only': 1}})
    del s['a']['deep']
    del s['none']
    s.pop('z')
    s.pop('none')
    s.pop('none', 3)
    s.popitem()
    s.setdefault('z', 7)
    s.clear()
    s['none']
    s.none
    s.get('none')
    by_number({'0': {'k': 3}, 1: {'k': 4}})
    lib.to_pure_dict(s)
    s.to_pure_dict(lambda leaf: ('leaf', leaf))
    lib.State({'a': lib.Param(1, **hook)}).to_pure_dict()
    paths(model)
    """,
)


@pytest.mark.parametrize("scope, line, mode", lines.params)
def test_line(scope, line, mode):
    agree_on_line(scope, line, mode)
