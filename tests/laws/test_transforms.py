"""Laws L4, L5, L8 and L9 through `jit` and `grad`: random programs against the same, run eagerly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import nnxlite as nnx
from tests.laws import model
from tests.laws.edits import REAL, Broken, own, pick, raw, variables
from tests.laws.graphs import Node
from tests.laws.model import content, references
from tests.laws.programs import numbers, pairs, programs
from tests.laws.programs import run as perform

few = settings(max_examples=25)


def run(program, here) -> list[type]:
    """Run a program; the refusals it met."""
    return [type(error) for error in perform(REAL, program, here)]


def is_float(value) -> bool:
    return model.is_array(value) and jnp.issubdtype(value.dtype, jnp.floating)


def is_float_param(path, x) -> bool:
    return isinstance(x, nnx.Param) and is_float(x.get_raw_value())


def held(pair) -> Node:
    """Two arguments as one object, whose float Params are marked."""
    holder = Node()
    holder.one, holder.two = pair
    for variable in variables(holder):
        if is_float_param((), variable):
            variable.set_metadata(chosen=True)
    return holder


CHOSEN = nnx.DiffState(0, lambda path, x: getattr(x, "chosen", False))
"""What is differentiated; transforms choose by path, class and metadata."""


def total(here):
    """A loss that every float Variable has a part in."""
    values = [v.get_value() for v in variables(here)]
    return sum(((x * x).sum() for x in values if is_float(x)), jnp.zeros(()))


def compare(mine, theirs):
    """Two lists of references and results have one form: values, sharing, who is who; no tracers."""
    assert model.canonical(mine, content) == model.canonical(theirs, content)


def eagerly(function, *args):
    """What a function returns; ends here for data in a static list, which every transform refuses."""
    out = function(*args)
    try:
        nnx.graphdef(nnx.List(args))
    except ValueError as error:
        assert "Found unexpected data" in str(error)
        reject()
    return out


@few
@given(pairs, programs, numbers, numbers)
def test_L4_L5_a_program_under_jit_does_what_it_does_eagerly(pair, program, a, b):
    refused = []

    def function(one, two):
        here = (one, two)
        refused.append(run(program, here))
        result = [pick(references(here), a), {"total": total(here), "again": two}]
        return result, pick(references(here), b)

    own(variables(pair))  # so that a copy is a write
    other = model.copied(pair)
    mine, theirs = references(pair), references(other)
    before = raw(mine)
    expected = eagerly(function, *other)
    result = nnx.jit(function)(*pair)
    compare([mine, pair, result], [theirs, other, expected])
    assert refused[0] == refused[1]
    for x, old, now, eager in zip(mine, before, raw(mine), raw(theirs), strict=True):
        assert now is old or eager is not old, f"{x} was not written"


@few
@given(pairs.map(held), programs, numbers)
def test_L4_L5_a_program_under_grad_does_what_it_does_eagerly(here, program, a):
    def function(here):
        run(program, here)
        return total(here), [pick(references(here), a), here]

    other, by_hand = model.copied(here), model.copied(here)
    mine, theirs = references(here), references(other)
    value, aux = eagerly(function, other)
    transform = nnx.value_and_grad(function, argnums=CHOSEN, has_aux=True)
    (value_found, aux_found), grads = transform(here)
    compare([mine, here, aux_found], [theirs, other, aux])
    assert value_found == value

    graphdef, params, rest = nnx.split(by_hand, is_float_param, ...)
    pure, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
    expected = jax.grad(lambda p: function(nnx.merge(graphdef, p, rest))[0])(pure)
    found = nnx.to_pure_dict(grads)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x == y).all()


def raises(here):
    raise Broken(0)


def asks_for_a_value(here):
    bool(jnp.zeros(()) * total(here) + jax.numpy.ones(()) > 0)
    raise Broken(0)


def returns_what_is_no_array(here):
    return object()


FAILURES = [raises, asks_for_a_value, returns_what_is_no_array]


@few
@given(pairs.map(held), programs, st.sampled_from(FAILURES), st.booleans())
def test_L8_L9_a_failing_program_leaves_everything_as_it_was(pair, program, fail, by_grad):
    def function(here):
        run(program, here)
        return fail(here)

    refs = references(pair)
    before = model.canonical([refs, pair])
    values = raw(refs)
    wrap = nnx.grad(function, argnums=CHOSEN) if by_grad else nnx.jit(function)
    with pytest.raises((Broken, TypeError, jax.errors.ConcretizationTypeError)):
        wrap(pair)
    assert model.canonical([refs, pair]) == before
    assert all(x is y for x, y in zip(values, raw(refs), strict=True))


@pytest.mark.parametrize("wrap", [nnx.jit, nnx.grad], ids=["jit", "grad"])
def test_L4_a_captured_variable_is_itself_inside_and_cannot_be_mistaken_for_its_copy(wrap):
    """An argument enters as a fresh object; what is captured stays the outer one, to be read only."""
    shared = nnx.Param(jnp.array(3.0))
    here = Node()
    here.a, here.b = shared, Node()
    here.b.again = shared
    seen = []

    def function(here):
        seen.append((here.a is here.b.again, here.a is shared))
        return here.a * shared

    out = wrap(function)(here)
    assert seen == [(True, False)] and here.a is here.b.again is shared
    assert (out if wrap is nnx.jit else out["a"].value) == (9 if wrap is nnx.jit else 3)
    with pytest.raises(nnx.TraceContextError, match="Pass the object to the transformed function"):
        wrap(lambda here: shared.set_value(here.a * 2))(here)
    assert shared.value == 3
