"""The filter algebra: what each filter matches, how filters compare, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
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


@pytest.mark.parametrize(
    ("filter", "leaf", "expected"),
    [
        (nnx.Param, nnx.Param(1), True),
        (nnx.Variable, nnx.Param(1), True),
        (nnx.Param, nnx.Variable(1), False),
        (nnx.BatchStat, nnx.Param(1), False),
        (nnx.Variable, Stands(), True),
        (nnx.BatchStat, Stands(), False),
        (nnx.Variable, Misleading(), False),
        (int, 3, True),
        (int, "3", False),
        (jax.Array, jnp.ones(2), True),
        (jax.Array, nnx.Param(jnp.ones(2)), False),  # the leaf is the Variable, not its value
        ("steps", nnx.Param(1, tag="steps"), True),
        ("steps", nnx.Param(1, tag="other"), False),
        ("steps", nnx.Param(1), False),
        ("steps", 1, False),
        (..., 1, True),
        (True, nnx.Param(1), True),
        (None, 1, False),
        (False, nnx.Param(1), False),
        ([nnx.BatchStat, nnx.Param], nnx.Param(1), True),
        ((nnx.BatchStat, "steps"), nnx.Param(1), False),
        ([], 1, False),
        (lambda path, x: path[1] == 0, 1, True),
        (nnx.PathContains("kernel"), 1, True),
        (nnx.PathContains("ker"), 1, False),
        (nnx.PathContains(0), 1, True),
        (nnx.PathContains("0"), 1, False),
        (nnx.PathContains("ker", exact=False), 1, True),
        (nnx.PathContains("0", exact=False), 1, True),
        (filters.PathIn(PATH, ("bias",)), 1, True),
        (filters.PathIn(("bias",)), 1, False),
        (nnx.Any(), 1, False),
        (nnx.All(), 1, True),
        (nnx.All(nnx.Param, "steps"), nnx.Param(1, tag="steps"), True),
        (nnx.All(nnx.Param, "steps"), nnx.Param(1), False),
        (nnx.Not(nnx.Param), 1, True),
        (nnx.Not(...), 1, False),
        (nnx.OfType((int, str)), "a", True),
        (nnx.OfType(int | str), 1.0, False),
    ],
)
def test_a_filter_matches(filter, leaf, expected):
    assert filters.to_predicate(filter)(PATH, leaf) is expected


@pytest.mark.parametrize(
    ("filter", "text"),
    [
        ("a", "WithTag('a')"),
        (int, "OfType(<class 'int'>)"),
        (..., "Everything()"),
        (True, "Everything()"),
        (None, "Nothing()"),
        (False, "Nothing()"),
        (["a", int], "Any(WithTag('a'), OfType(<class 'int'>))"),
        (nnx.All("a", ...), "All(WithTag('a'), Everything())"),
        (nnx.Not("a"), "Not(WithTag('a'))"),
        (nnx.PathContains("k"), "PathContains('k', exact=True)"),
        (filters.PathIn(("b",), ("a",)), "PathIn(('a',), ('b',))"),
    ],
)
def test_predicates_print_as_they_are_written(filter, text):
    assert repr(filters.to_predicate(filter)) == text


def all_filters():
    literals = st.sampled_from(
        ["a", "b", int, nnx.Param, ..., True, None, False, nnx.PathContains("a")]
    )
    return st.recursive(
        literals,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.lists(inner, max_size=3).map(lambda fs: nnx.All(*fs)),
            inner.map(nnx.Not),
        ),
        max_leaves=6,
    )


@given(all_filters())
def test_predicates_are_values(filter):
    predicate = filters.to_predicate(filter)
    again = filters.to_predicate(copy.deepcopy(filter))
    assert predicate == again
    assert hash(predicate) == hash(again)
    assert pickle.loads(pickle.dumps(predicate)) == predicate
    assert filters.to_predicate(predicate) is predicate


LEAVES = st.sampled_from([1, "a", nnx.Param(1), nnx.Param(1, tag="a"), nnx.BatchStat(1)])
PATHS = st.lists(st.sampled_from(["a", "b", 0]), max_size=3).map(tuple)


@given(all_filters(), all_filters(), PATHS, LEAVES)
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
    ("filter", "field"),
    [
        (nnx.WithTag("a"), "tag"),
        (nnx.PathContains("a"), "__doc__"),
        (nnx.OfType(int), "type"),
        (nnx.OfType(int), "note"),
    ],
)
def test_filters_of_one_value_are_frozen(filter, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(filter, field, None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nnx.Any("a"),
        lambda: nnx.All(nnx.Param),
        lambda: nnx.Not("a"),
        lambda: nnx.filterlib.PathIn(("a",)),
        nnx.Everything,
        nnx.Nothing,
    ],
)
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


def test_everything_may_only_stand_last():
    found = filters.filters_to_predicates([nnx.Param, "a", ...])
    assert found == (nnx.OfType(nnx.Param), nnx.WithTag("a"), nnx.Everything())
    assert filters.filters_to_predicates([]) == ()
    twice = filters.filters_to_predicates([nnx.Param, ..., True])
    assert twice[1:] == (nnx.Everything(), nnx.Everything())


def test_match_index_is_the_first_that_matches():
    predicates = filters.filters_to_predicates([nnx.Param, nnx.Variable])
    assert filters.match_index(predicates, (), nnx.Param(1)) == 0
    assert filters.match_index(predicates, (), nnx.BatchStat(1)) == 1
    assert filters.match_index(predicates, (), 1) is None


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
