"""One rule for the leaves of a tree: what JAX, the filtered functions and `split` see agrees."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlite as nnx
from nnxlite.filtered._specs import leaves_of
from tests.laws import model
from tests.laws.graphs import Box, Pair
from tests.laws.model import content, references
from tests.laws.programs import pairs


class Frozen(nnx.Module, frozen=True):
    a: object
    b: object
    fixed: object = nnx.field(static=True, default="fixed")


class Loose(nnx.Module):
    def __init__(self, a, b):
        self.a, self.b = nnx.data(a), nnx.List([b])


class Opaque:
    """An object of another library."""


def double(x):
    return 2 * x


ARRAYS = st.sampled_from([(2,), (), (1, 2)]).map(lambda shape: jnp.full(shape, 2.0))
NUMBERS = st.sampled_from([3, True, 0.5, 1j, np.float32(2)])
STATIC = st.sampled_from(["text", b"bytes", double, jax.nn.relu, len, Opaque(), jnp.float32])
SIMPLE = st.one_of(ARRAYS, ARRAYS, NUMBERS, STATIC, st.none(), st.just(np.arange(2)))


def nested(inner):
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs,
        pairs.map(list),
        st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
        pairs.map(lambda p: Pair(*p)),
        inner.map(Box),
    )


@st.composite
def objects(draw, inner):
    """An object with containers, none of which is an attribute that is static as a whole."""
    a, b = draw(nested(inner)), draw(inner)
    if draw(st.booleans()):
        return Frozen(a, b)
    return Loose(a, b if nnx.has_data(b) else nnx.Param(jnp.ones(1)))


TREES = st.recursive(SIMPLE, lambda inner: st.one_of(nested(inner), objects(inner)), max_leaves=8)
OBJECTS = objects(TREES)


def is_static(x):
    return not (nnx.is_array(x) or isinstance(x, (bool, int, float, complex)))


@settings(max_examples=40)
@given(OBJECTS)
def test_every_view_of_an_object_has_the_same_leaves(tree):
    leaves = jax.tree.leaves(tree)
    assert not any(map(is_static, leaves))
    seen = leaves_of(tree).leaves
    assert len(seen) == len(leaves) and all(x is y for x, y in zip(seen, leaves))
    treedef = jax.tree.structure(tree)
    again = jax.tree.unflatten(treedef, leaves)
    assert nnx.tree_equal(again, tree) and jax.tree.structure(again) == treedef
    if not any(isinstance(x, Loose) for _, x in nnx.iter_graph(tree)):  # where a number is static
        graphdef, state = nnx.split(tree)
        pairs = nnx.to_flat_state(state)
        found = [x.get_raw_value() if isinstance(x, nnx.Variable) else x for _, x in pairs]
        assert all(x is y for x, y in zip(jax.tree.leaves(found), leaves, strict=True))
        assert nnx.tree_equal(nnx.merge(graphdef, state), tree)


@settings(max_examples=40)
@given(st.one_of(OBJECTS, TREES), st.sampled_from([nnx.is_array, nnx.is_inexact_array, callable]))
def test_halves_have_the_leaves_that_were_chosen_and_join_again(tree, spec):
    leaves = jax.tree.leaves(tree)
    chosen, rest = nnx.partition(tree, spec)
    for half, wanted in ((chosen, True), (rest, False)):
        expected = [x for x in leaves if bool(spec(x)) is wanted]
        found = jax.tree.leaves(half)
        assert len(found) == len(expected) and all(x is y for x, y in zip(found, expected))
    again = nnx.combine(chosen, rest)
    assert nnx.tree_equal(again, tree)
    assert jax.tree.structure(again) == jax.tree.structure(tree)


@settings(max_examples=40)
@given(pairs, st.sampled_from([nnx.Param, nnx.BatchStat, ..., False, nnx.is_array]), st.booleans())
def test_halves_of_objects_that_share_join_again(pair, spec, inverse):
    before = model.canonical(pair)
    again = nnx.combine(*nnx.partition(pair, spec))
    assert model.canonical(again) == before == model.canonical(pair)
    assert not {id(x) for x in references(again)} & {id(x) for x in references(pair)}
    chosen = nnx.filter(pair, spec, inverse=inverse)
    assert [type(x) for x in references(chosen)] == [type(x) for x in references(pair)]


def floats(tree):
    """The float Variables and arrays of a tree, by path."""
    values = {p: x.get_raw_value() if model.is_variable(x) else x for p, x in model.leaves(tree)}
    return {p: x for p, x in values.items() if nnx.is_inexact_array(x)}


@settings(max_examples=15)
@given(pairs)
def test_filter_jit_and_filter_grad_keep_the_form_of_objects_that_share(pair):
    def write(pair):
        for variable in references(pair):
            if model.is_variable(variable) and nnx.is_inexact_array(variable.get_value()):
                variable[...] = 2 * variable[...]
        return pair

    other, refs = model.copied(pair), references(pair)
    found, expected = nnx.filter_jit(write)(pair), write(other)
    for mine, theirs in ((pair, other), (found, expected)):
        assert model.canonical(mine, content) == model.canonical(theirs, content)
    assert all(x is y for x, y in zip(references(found), refs, strict=True))
    loss = lambda tree: sum([(x * x).sum() for x in floats(tree).values()], jnp.zeros(()))
    grads = nnx.filter_grad(loss)(pair)
    chosen = nnx.filter(pair, nnx.is_inexact_array)
    assert [type(x) for x in references(grads)] == [type(x) for x in references(chosen)]
    assert all((floats(grads)[path] == 2 * x).all() for path, x in floats(chosen).items())


@settings(max_examples=3, deadline=None)
@given(OBJECTS)
def test_halves_and_gradients_go_through_jax_and_optax(tree):
    arrays, rest = nnx.partition(tree, nnx.is_array)
    out = jax.jit(lambda half: jax.tree.map(lambda x: 2 * x, half))(arrays)
    assert jax.tree.structure(out) == jax.tree.structure(arrays)
    carry, _ = jax.lax.scan(lambda c, _: (c, None), arrays, None, length=2)
    assert jax.tree.structure(nnx.combine(carry, rest)) == jax.tree.structure(tree)
    floats = nnx.filter(tree, nnx.is_inexact_array)
    tx = optax.adam(0.1)
    opt_state = tx.init(floats)

    def loss(t):
        return sum(
            (jnp.sum(x * x) for x in jax.tree.leaves(t) if nnx.is_inexact_array(x)), jnp.zeros(())
        )

    grads = nnx.filter_grad(loss)(tree)
    assert jax.tree.structure(grads) == jax.tree.structure(floats)
    updates, _ = tx.update(grads, opt_state, floats)
    assert jax.tree.structure(nnx.apply_updates(tree, updates)) == jax.tree.structure(tree)
    moved = nnx.filter_jit(lambda t, g: nnx.apply_updates(t, jax.tree.map(lambda x: -x / 2, g)))(
        tree, grads
    )
    for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(x, y - y if nnx.is_inexact_array(y) else y)


@settings(max_examples=15)
@given(
    OBJECTS, st.sampled_from(["label", double, jax.sharding.PartitionSpec("x"), False, Opaque()])
)
def test_a_tree_of_labels_has_the_structure_of_its_model(tree, label):
    labels = jax.tree.map(lambda _: label, tree)
    treedef, leaves = jax.tree.structure(tree), jax.tree.leaves(tree)
    for same in (labels, nnx.tree_at(lambda t: t, labels, replace_fn=lambda t: t)):
        assert jax.tree.structure(same) == treedef
        assert all(x is label for x in jax.tree.leaves(same))
    pairs = jax.tree.map(lambda x, y: (x, y), tree, labels)
    assert len(jax.tree.leaves(pairs)) == 2 * len(leaves)
    assert jax.tree.structure(jax.tree.map(lambda _, x: x, labels, tree)) == treedef
