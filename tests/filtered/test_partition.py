"""Filter, partition and combine: what is selected, and that sharing and structure are kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.filtered.models import Tied


class Convertible:
    def __jax_array__(self):
        return jnp.ones(2)


def test_what_knows_how_to_become_an_array_is_array_like():
    assert nnx.is_array_like(Convertible())
    assert nnx.is_inexact_array_like(Convertible())
    assert not nnx.is_array(Convertible())


def test_predicates_hold_for_tracers():
    seen = []
    jax.jit(lambda x: seen.append((nnx.is_array(x), nnx.is_inexact_array(x))))(1.0)
    assert seen == [(True, True)]


def test_if_array():
    assert nnx.if_array(1)(jnp.ones(2)) == 1
    assert nnx.if_array(1)("a") is None
    assert nnx.if_array(1) == nnx.if_array(1)


def test_is_leaf_closes_parts():
    chosen, rest = nnx.partition(
        [(1, 2), 3], lambda x: isinstance(x, tuple), is_leaf=lambda x: isinstance(x, tuple)
    )
    assert (chosen, rest) == ([(1, 2), None], [None, 3])
    model = Tied()
    chosen, _ = nnx.partition([model, 3], nnx.Module, is_leaf=lambda x: isinstance(x, Tied))
    assert chosen[0] is model


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        (nnx.Param, {"first.bias", "first.kernel"}),
        (nnx.Not(nnx.Param), {"parts.0", "parts.1", "scale", "steps"}),
        (nnx.PathContains("parts"), {"parts.0", "parts.1"}),
        (nnx.Any(nnx.BatchStat, nnx.PathContains("scale")), {"parts.0", "scale"}),
        (..., {"first.bias", "first.kernel", "parts.0", "parts.1", "scale", "steps"}),
        (False, set()),
    ],
    ids=lambda v: type(v).__name__,
)
def test_variable_filters_are_specs(spec, chosen):
    found = nnx.filter(Tied(), spec)
    names = {
        ".".join(map(str, path))
        for path, leaf in nnx.to_flat_state(nnx.state(found))
        if jax.tree.leaves(leaf)
    }
    assert names == chosen


def test_specs_that_differ_between_arguments():
    model = Tied()
    chosen, rest = nnx.partition((model, {"x": 1}), (nnx.BatchStat, {"x": True}))
    assert chosen[0].first.kernel.value is None and chosen[0].parts[0].value is not None
    assert chosen[1] == {"x": 1} and rest[1] == {"x": None}


def test_a_spec_of_the_objects_own_form():
    spec = nnx.filter(Tied(), False, replace=False)
    spec = nnx.tree_at(lambda m: (m.scale, m.first.bias), spec, (True, True))
    found = nnx.filter(Tied(), spec)
    assert found.scale is not None and found.second.bias.value is not None
    assert found.first.kernel.value is None and found.steps is None
    prefix = nnx.tree_at(lambda m: m.first, spec, True)
    found = nnx.filter(Tied(), prefix)
    assert found.first.kernel.value is not None


def test_a_spec_of_the_objects_own_form_may_share_its_parts_but_not_contain_itself():
    tree = nnx.List([nnx.Dict(a=nnx.Param(i), b=nnx.Param(i)) for i in range(12)])
    spec = nnx.List([nnx.Dict(a=nnx.Param(True), b=nnx.Param(False))] * 12)
    found = nnx.filter(tree, spec)
    assert [part.a.value for part in found] == [*range(12)]
    assert all(part.b.value is None for part in found)

    spec[0].me = spec[0]
    with pytest.raises(ValueError, match="prefix of type List contains itself at '0.me'. Choose"):
        nnx.filter(tree, spec)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nnx.filter([1, (2, 3)], [True, (True,)]), "filter_spec is not a prefix of the tree"),
        (lambda: nnx.filter([1, 2], [True, 3]),
         ("filter_spec must consist of booleans, callables and Variable filters only, got int 3 for "
         "the leaf at '1'")),
        (lambda: nnx.filter([1], lambda x: "yes"), "answered 'yes' for the leaf"),
        (lambda: nnx.filter([1], [Tied()]),
         "as filter_spec it is given to the leaf at '0', which has no Variables. Give the leaf a"),
        (lambda: nnx.filter(Tied(), nnx.List([True])),
         "No setting found for Param at 'first.bias': the prefix of type List has nothing"),
        (lambda: nnx.filter(Tied(), nnx.PathContains("first")),
         ("Inconsistent aliasing detected: different filter_spec for a shared Param: at "
         "'first.kernel' it is True, at 'second.kernel' it is False")),
        (lambda: nnx.combine(), "combine needs at least one pytree"),
        (lambda: nnx.combine({"a": [1, 2]}, {"a": [1]}),
         "combine: the trees differ in structure at 'a': one has list with 2 children"),
        (lambda: nnx.combine(Tied(), nnx.List([])), "one has Tied, another List"),
    ],
)  # fmt: skip
def test_messages(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


def test_a_chain_longer_than_the_recursion_limit():
    class Link(nnx.Module):
        def __init__(self, below):
            self.weight = nnx.Param(jnp.ones(()))
            self.below = nnx.data(below)

    chain = None
    for _ in range(3000):
        chain = Link(chain)
    again = nnx.combine(*nnx.partition(chain, nnx.is_array))
    assert again.below.below.weight.value == 1


def test_parts_are_leaves_from_where_the_spec_ends():
    tree, stop = {"a": (1, "x"), "b": [(2, "y"), 3]}, lambda x: isinstance(x, tuple)
    spec = {"a": (True, False), "b": lambda x: isinstance(x, tuple)}
    assert nnx.filter(tree, spec, is_leaf=stop) == {"a": (1, None), "b": [(2, "y"), None]}
    with pytest.raises(ValueError, match="filter_spec is not a prefix of the tree"):
        nnx.filter(tree, {"a": [True, False], "b": True}, is_leaf=stop)


def test_frozen_variables_as_a_spec():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    nnx.freeze(model.bias)
    frozen, rest = nnx.partition(model, nnx.Frozen())
    assert [jnp.shape(leaf) for leaf in jax.tree.leaves((frozen, rest))] == [(3,), (2, 3)]
    grads = nnx.filter_grad(lambda m: m(jnp.ones((1, 2))).sum(), arg=nnx.Not(nnx.Frozen()))(model)
    assert [jnp.shape(leaf) for leaf in jax.tree.leaves(grads)] == [(2, 3)]
