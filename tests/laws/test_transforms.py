"""Laws L4 and L5 through `grad`: random programs against the same, run eagerly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, reject, settings

import nnxlite as nnx
from tests.laws import model
from tests.laws.edits import REAL, is_float, pick, variables
from tests.laws.graphs import Node
from tests.laws.model import content, references
from tests.laws.programs import numbers, pairs, programs, run


def is_float_param(path, x):
    return isinstance(x, nnx.Param) and is_float(x.get_raw_value())


def held(pair):
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


def eagerly(function, *args):
    """What a function returns; ends here for data in a static list, which every transform refuses."""
    out = function(*args)
    try:
        nnx.graphdef(nnx.List(args))
    except ValueError as error:
        assert "Found unexpected data" in str(error)
        reject()
    return out


@settings(max_examples=25)
@given(pairs.map(held), programs, numbers)
def test_L4_L5_a_program_under_grad_does_what_it_does_eagerly(here, program, a):
    def function(here):
        run(REAL, program, here)
        return total(here), [pick(references(here), a), here]

    other, by_hand = model.copied(here), model.copied(here)
    mine, theirs = references(here), references(other)
    value, aux = eagerly(function, other)
    transform = nnx.value_and_grad(function, argnums=CHOSEN, has_aux=True)
    (value_found, aux_found), grads = transform(here)
    expected = model.canonical([theirs, other, aux], content)
    assert model.canonical([mine, here, aux_found], content) == expected
    assert value_found == value

    graphdef, params, rest = nnx.split(by_hand, is_float_param, ...)
    pure, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
    expected = jax.grad(lambda p: function(nnx.merge(graphdef, p, rest))[0])(pure)
    found = nnx.to_pure_dict(grads)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x == y).all()


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
