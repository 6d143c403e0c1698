"""The filter algebra: what each filter matches, how filters compare, and what is refused."""

import copy
import dataclasses
import itertools
import pickle

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlite as nnx
from nnxlite import filters
from tests.messages import refused, rows

PATH = ("layers", 0, "kernel")


class Stands:
    """A leaf that stands for a Variable, as the entries of a graph definition do."""

    type = nnx.Param


class Misleading:
    type = "not a class"


LEAVES = {
    "param": nnx.Param(1),
    "tagged": nnx.Param(jnp.ones(2), tag="steps"),
    "stat": nnx.BatchStat(1, tag="other"),
    "stands": Stands(),
    "misleading": Misleading(),
    "array": jnp.ones(2),  # the leaf of a Variable is the Variable, not its array
    "int": 3,
    "text": "3",
}
ALL = " ".join(LEAVES)


@pytest.mark.parametrize(
    ("filter", "text", "matched"),
    [
        (nnx.Param, "OfType(<class 'nnxlite.variables._kinds.Param'>)", "param tagged stands"),
        (nnx.BatchStat, "", "stat"),
        (int, "OfType(<class 'int'>)", "int"),
        (jax.Array, "", "array"),
        ("steps", "WithTag('steps')", "tagged"),
        (..., "Everything()", ALL),
        (None, "Nothing()", ""),
        (["steps", int], "Any(WithTag('steps'), OfType(<class 'int'>))", "tagged int"),
        ((nnx.BatchStat, "steps"), "", "tagged stat"),
        (lambda path, x: path[1] == 0, "", ALL),
        (nnx.PathContains("kernel"), "PathContains('kernel', exact=True)", ALL),
        (nnx.PathContains(0), "", ALL),
        (nnx.PathContains("0"), "", ""),
        (nnx.PathContains("0", exact=False), "", ALL),
        (filters.PathIn(PATH, ("bias",)), "PathIn(('bias',), ('layers', 0, 'kernel'))", ALL),
        (filters.PathIn(("bias",)), "PathIn(('bias',))", ""),
        (nnx.Any(), "Any()", ""),
        (nnx.All(), "All()", ALL),
        (nnx.All("steps", ...), "All(WithTag('steps'), Everything())", "tagged"),
        (nnx.Not("steps"), "Not(WithTag('steps'))", ALL.replace("tagged ", "")),
        (nnx.OfType((int, str)), "", "int text"),
        (nnx.OfType(int | str), "", "int text"),
    ],
    ids=itertools.count(),
)
def test_a_filter_matches_and_prints_as_it_is_written(filter, text, matched):
    """More of them stand beside the reference in tests/parity/test_state.py."""
    predicate = filters.to_predicate(filter)
    assert [name for name, leaf in LEAVES.items() if predicate(PATH, leaf)] == matched.split()
    assert all(type(predicate(PATH, leaf)) is bool for leaf in LEAVES.values())
    assert repr(predicate) == text or not text


def combined(inner):
    several = st.lists(inner, max_size=3)
    kinds = st.sampled_from([list, tuple, lambda filters: nnx.All(*filters)])
    return inner.map(nnx.Not) | st.builds(lambda kind, filters: kind(filters), kinds, several)


LITERALS = "a", "b", int, nnx.Param, ..., True, None, False, nnx.PathContains("a")
FILTERS = st.recursive(st.sampled_from(LITERALS), combined, max_leaves=6)


@given(FILTERS)
def test_predicates_are_values(filter):
    predicate = filters.to_predicate(filter)
    again = filters.to_predicate(copy.deepcopy(filter))
    assert predicate == again
    assert hash(predicate) == hash(again)
    assert pickle.loads(pickle.dumps(predicate)) == predicate
    assert filters.to_predicate(predicate) is predicate


FEW = st.sampled_from([1, "a", nnx.Param(1), nnx.Param(1, tag="a"), nnx.BatchStat(1)])
PATHS = st.lists(st.sampled_from(["a", "b", 0]), max_size=3).map(tuple)


@given(FILTERS, FILTERS, PATHS, FEW)
def test_the_laws_of_logic_hold(f, g, path, leaf):
    says = lambda filter: filters.to_predicate(filter)(path, leaf)
    assert says(nnx.Not(nnx.Not(f))) == says(f)
    assert says(nnx.Not(nnx.Any(f, g))) == says(nnx.All(nnx.Not(f), nnx.Not(g)))
    assert says(nnx.Any(f, g)) == (says(f) or says(g)) == says([f, g])
    assert says(nnx.All(f, ...)) == says(f)
    assert says(nnx.Any(f, None)) == says(f)


def test_filters_of_different_kinds_differ():
    assert nnx.Any("a") != nnx.All("a")
    assert nnx.Any("a", "b") != nnx.Any("b", "a")
    assert nnx.Everything() != nnx.Nothing()
    assert nnx.PathContains("a") != nnx.PathContains("a", exact=False)
    assert nnx.OfType(int) != nnx.OfType(bool)


@pytest.mark.parametrize(
    "filter", [nnx.WithTag("a"), nnx.PathContains("a"), nnx.OfType(int)], ids=str
)
def test_filters_of_one_value_are_frozen(filter):
    for field in ("tag", "type", "__doc__", "note"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(filter, field, None)


MADE = {
    "Any": lambda: nnx.Any("a"),
    "All": lambda: nnx.All(nnx.Param),
    "Not": lambda: nnx.Not("a"),
    "PathIn": lambda: nnx.filterlib.PathIn(("a",)),
    "Everything": nnx.Everything,
    "Nothing": nnx.Nothing,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_filters_can_be_documented(make):
    filter, model = make(), nnx.Dict(a=nnx.Param(1), b=nnx.BatchStat(2))
    filter.__doc__ = "The leaves that matter."
    filter.note = 3
    assert (filter.__doc__, filter.note) == ("The leaves that matter.", 3)
    assert filter == make() and hash(filter) == hash(make())
    assert nnx.split(model, filter, ...) == nnx.split(model, make(), ...)


def test_filters_of_ones_own():
    class Kernels(nnx.PathContains):
        pass

    class Either(nnx.Any):
        def __init__(self, *filters):
            super().__init__(*filters)
            self.name = "either"

    kernels, either = Kernels("kernel"), Either(nnx.Param)
    kernels.note = 1
    assert kernels(("kernel",), 1) and kernels == Kernels("kernel") != nnx.PathContains("kernel")
    assert either((), nnx.Param(1)) and either.name == "either"


@rows("""
    filters.to_predicate(3)
        TypeError: 3 ... 'int' ... A filter is a class, a string (a tag)
    filters.to_predicate({"a"})
        TypeError: {'a'} ... 'set' ... A filter is a class, a string (a tag)
    filters.to_predicate(2.5)
        TypeError: 2.5 ... 'float'
    nnx.Any(nnx.Param, nnx.Not([3]))
        TypeError: 3 of type 'int' is not a filter
    nnx.OfType("Param")
        TypeError: OfType needs a class ... got 'Param'
    filters.filters_to_predicates([..., nnx.Param])
        ValueError: can only be used as the last ... at index 0 ... Move it to the end
    filters.filters_to_predicates(["a", True, ..., nnx.Param])
        ValueError: can only be used as the last ... at index 1 ... Move it to the end
""")
def test_what_is_no_filter_is_refused(line, message):
    refused(line, message, globals())


def test_everything_may_only_stand_last_and_the_first_that_matches_counts():
    predicates = filters.filters_to_predicates([nnx.Param, "a", ..., True])
    everything = nnx.Everything()
    assert predicates == (nnx.OfType(nnx.Param), nnx.WithTag("a"), everything, everything)
    leaves = nnx.Param(1, tag="a"), nnx.BatchStat(1, tag="a"), 1
    assert [filters.match_index(predicates, (), leaf) for leaf in leaves] == [0, 1, 2]
    assert filters.match_index(predicates[:2], (), 1) is None
    assert filters.filters_to_predicates([]) == ()


class Positive(nnx.WithTag):
    """A filter of the user's that looks at values, though its base class does not."""

    def __call__(self, path, x):
        return isinstance(x, nnx.Variable) and bool((x.value > 0).all())


class Computed(nnx.Variable):
    @property
    def tag(self):
        return "positive" if self.value > 0 else "negative"


class Tagged(float):
    tag = "mine"


@pytest.mark.parametrize(
    ("graph", "filter", "matched"),
    [
        (lambda: {"a": nnx.Param(jnp.ones(1)), "b": nnx.Param(-jnp.ones(1))}, Positive("x"), "a"),
        (lambda: {"a": Computed(jnp.ones(())), "b": Computed(-jnp.ones(()))}, "positive", "a"),
        (lambda: {"a": nnx.Param(Tagged(1)), "b": nnx.Param(2.0)}, "mine", "a"),
        (lambda: {"a": nnx.Param(1.0), "b": nnx.Param(1.0)}, nnx.PathContains(["a"]), ""),
    ],
)
def test_filters_that_look_at_values_are_asked_about_every_leaf(graph, filter, matched):
    assert list(nnx.state(nnx.Dict(graph()), filter)) == list(matched)


def test_equal_keys_that_are_spelled_differently():
    model = nnx.Dict({"a1": nnx.Param(1.0), "True": nnx.Param(1.0)})
    for key, matched in ((True, "True"), (1, "a1")):
        assert list(nnx.state(model, nnx.PathContains(key, exact=False))) == [matched]
