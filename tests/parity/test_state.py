"""Filters, states and traversals beside the reference: the same calls, the same answers."""

import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parity.programs import Lines, agree

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
# Those of Variables are in the random programs.
OF_TREES = """
    (lambda flat: [flat, flat.paths, flat.leaves, flat.to_nested_state()])(lib.to_flat_state(lib.State(x)))
    [lib.State(x) - lib.State(y), lib.statelib.diff(lib.State(x), lib.State(y))]
    lib.merge_state(x, y, cls=dict)
    [lib.State(x) == lib.State(y), lib.State(x) == x]
    lib.FlatState.merge(*map(lib.to_flat_state, map(lib.State, (x, y)))).paths
    {k: type(v).__name__ == '_EmptyNode' or v for k, v in flatten(x, keep_empty_nodes=keep, sep=sep).items()}
    lib.traversals.unflatten_mapping(flatten(x, keep_empty_nodes=keep, sep=sep), sep=sep)
    [lib.traversals.flatten_to_sequence(x), flatten(x, is_leaf=short)]
    lib.traversals.flatten_to_sequence(x, is_leaf=short)
"""


@given(TREES, TREES, st.booleans(), st.sampled_from([None, "/"]))
def test_lines_about_trees(x, y, keep, sep):
    def scope(lib):
        more = {"flatten": lib.traversals.flatten_mapping, "short": lambda path, x: len(path) == 1}
        return {"x": x, "y": y, "keep": keep, "sep": sep, **more}

    for line in OF_TREES.strip().splitlines():
        agree(scope, line.strip(), "updates")


@given(st.dictionaries(st.sampled_from(["0", "12", "-1", "01", "a", "1.5", "²"]), TREES))
def test_restore_int_paths(pure):
    if not {"0", "01", "-1", "1"} >= set(pure):
        agree(lambda lib: {"pure": pure}, "lib.restore_int_paths(pure)", "updates")


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
        "flat": lambda **items: lib.to_flat_state(lib.State(items)),
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
    s.flat_state().split(lib.BatchStat, {_filter}, ...)
    """,
    )
    if _filter != "short":
        lines("filter", states, f"text({_filter})")
EACH = {
    ("replaced({0})", "replaced({0}, new)"): (
        *("{}", "{'z': 6}", "{'a': {'kernel': 7, 'deep': {'count': 8}}}", "{'a': {'deep': {}}}"),
        *("{'a': {'none': 7}}", "{'none': 7}", "{'a': 7}", "{'z': {'none': 7}}"),
    ),
    ("unordered(lib.pure({0}))", "unordered(lib.as_pure({0}))"): (
        *("s", "s.flat_state()", "tree", "lib.Param({'x': lib.Cache(1)})", "lib.Param(1, **hook)"),
        "3",
    ),
    ("repr(lib.State({0}))", "repr(lib.State({0}).flat_state())"): (
        *("{}", "{'a': {'b': 1}, 'c': 2}", "{'a': {}, 's': 'x', 't': (1, 2), 'n': None}"),
    ),
    ("len(lib.filterlib.filters_to_predicates([{0}]))",): (
        *("", "...", "'x', ...", "..., ...", "'x', ..., True", "..., 'x'", "'x', True, None"),
    ),
}
for _forms, _values in EACH.items():
    for _value in _values:
        lines("each", states, "\n".join(form.format(_value) for form in _forms))
lines(
    "edits",
    states,
    """
    s.split(lib.Param)
    s['new'] = {'x': {'y': 1}}
    s.new = 1
    s.a.deep.update(count=1, more=2)
    s.update({'a': {'only': 1}})
    del s['a']['deep']
    s.pop('z')
    s.pop('none', 3)
    s.popitem()
    s.setdefault('z', 7)
    s.clear()
    s.get('none')
    by_number({'0': {'k': 3}, 1: {'k': 4}})
    s.to_pure_dict(lambda leaf: ('leaf', leaf))
    lib.State({'a': lib.Param(1, **hook)}).to_pure_dict()
    paths(model)
    (lambda flat: [flat.leaves, flat.to_nested_state()])(lib.FlatState.merge(flat(a=1, b=0), flat(a=2)))
    """,
)


test_line = lines.test()
