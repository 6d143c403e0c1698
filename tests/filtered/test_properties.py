"""Properties of the filtered transforms on random trees: sharing and loops."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlite as nnx
from tests.laws import model
from tests.laws.model import content, references
from tests.laws.programs import pairs

KINDS = [nnx.Param, nnx.BatchStat, nnx.Variable, ..., False, nnx.is_array, nnx.is_inexact_array]


def variables(tree) -> list[nnx.Variable]:
    """All Variables of a tree, those without a value among them."""
    return [x for x in references(tree) if model.is_variable(x)]


@settings(max_examples=60)
@given(pairs, st.sampled_from(KINDS), st.booleans())
def test_partition_and_combine_keep_form_and_sharing(pair, spec, inverse):
    before = model.canonical(pair)
    again = nnx.combine(*nnx.partition(pair, spec))
    assert model.canonical(again) == before == model.canonical(pair)
    assert not {id(x) for x in references(again)} & {id(x) for x in references(pair)}
    chosen = nnx.filter(pair, spec, inverse=inverse)
    assert len(references(chosen)) == len(references(pair))
    assert [type(x) for x in references(chosen)] == [type(x) for x in references(pair)]


def double(pair):
    for variable in variables(pair):
        if jnp.issubdtype(variable.dtype, jnp.floating):
            variable[...] = 2 * variable[...]
    return pair


@settings(max_examples=15)
@given(pairs)
def test_filter_jit_keeps_form_sharing_and_identity(pair):
    other = model.copied(pair)
    refs = references(pair)
    found = nnx.filter_jit(double)(pair)
    double(other)
    assert model.canonical(pair, content) == model.canonical(other, content)
    assert model.canonical(found, content) == model.canonical(other, content)
    assert all(x is y for x, y in zip(references(found), refs, strict=True))


@settings(max_examples=15)
@given(pairs)
def test_filter_grad_keeps_form_and_sharing(pair):
    def loss(pair):
        values = [v.get_value() for v in variables(pair)]
        floats = [x for x in values if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(((x * x).sum() for x in floats), jnp.zeros(()))

    grads = nnx.filter_grad(loss)(pair)
    mine, theirs = variables(grads), variables(pair)
    assert len(mine) == len(theirs) and len(references(grads)) == len(references(pair))
    for grad, variable in zip(mine, theirs, strict=True):
        value = variable.get_value()
        if nnx.is_inexact_array(value):
            np.testing.assert_array_equal(grad.get_value(), 2 * value)
        elif not nnx.is_array(value) or not jnp.issubdtype(value.dtype, jnp.floating):
            assert grad.get_value() is None


@settings(max_examples=15)
@given(st.data(), pairs)
def test_filter_vmap_on_objects_is_a_loop(data, pair):
    """Stacked copies through `filter_vmap`, and one copy after the other."""
    size = 2
    mapped = data.draw(st.sampled_from([nnx.Param, nnx.Variable, nnx.BatchStat]))
    stacked = model.copied(pair)
    for variable in variables(stacked):
        if isinstance(variable, mapped):
            value = variable.get_value()
            variable.set_value(jnp.stack([jnp.asarray(value)] * size))
    copies = [model.copied(pair) for _ in range(size)]

    def f(pair, x):
        for variable in variables(pair):
            if isinstance(variable, mapped) and jnp.issubdtype(variable.dtype, jnp.floating):
                variable.value = variable.value * 2 + x

    spec = lambda path, variable: isinstance(variable, mapped)
    axes = ((nnx.All(spec), nnx.All(spec)), 0)
    if not any(isinstance(v, mapped) for v in variables(pair)):
        axes = (None, 0)
    refs = references(stacked)
    nnx.filter_vmap(f, in_axes=axes)(stacked, jnp.arange(float(size)))
    assert all(x is y for x, y in zip(references(stacked), refs, strict=True))
    for number, copy in enumerate(copies):
        f(copy, jnp.float32(number))
    for whole, *parts in zip(variables(stacked), *map(variables, copies), strict=True):
        if isinstance(whole, mapped):
            for number, part in enumerate(parts):
                assert content(whole.value[number]) == content(jnp.asarray(part.value))
