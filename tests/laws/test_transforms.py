"""Laws L4 and L5 through `grad`: random programs against the same, run eagerly."""

import functools

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
@given(pairs.map(nnx.List), programs, numbers)
def test_L4_L5_a_program_under_grad_does_what_it_does_eagerly(here, program, a):
    def function(here):
        run(REAL, program, here)
        return total(here), [pick(references(here), a), here]

    other, by_hand = model.copied(here), model.copied(here)
    mine, theirs = references(here), references(other)
    value, aux = eagerly(function, other)
    transform = nnx.value_and_grad(function, argnums=nnx.DiffState(0, is_float_param), has_aux=True)
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


def test_L4_a_captured_variable_is_itself_inside_and_not_the_argument_that_entered():
    shared, here, seen = nnx.Param(jnp.array(3.0)), Node(), []
    here.a, here.b = shared, nnx.List([shared])

    @functools.partial(nnx.jit, static_argnames="write")
    def function(here, write):
        seen.append((here.a is here.b[0], here.a is shared))
        if write:
            shared.value = here.a * 2
        return here.a * shared

    assert function(here, write=False) == 9
    assert seen == [(True, False)] and here.a is here.b[0] is shared
    with pytest.raises(nnx.TraceContextError, match="Pass the object to the transformed function"):
        function(here, write=True)
    assert shared.value == 3
