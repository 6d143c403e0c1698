"""Laws L6 and L7 on random graphs: equal structure compiles once, and nothing is lost silently."""

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlite as nnx
from nnxlite._base.errors import path_text
from tests.laws import model
from tests.laws.graphs import roots
from tests.laws.model import references
from tests.laws.programs import pairs

few = settings(max_examples=20)


@few
@given(pairs)
def test_L6_equal_structure_is_traced_once(pair):
    root, _ = pair
    traces = []

    @nnx.jit
    def function(x):
        traces.append(type(x))
        return jnp.zeros(())

    for _ in range(2):
        for one in (root, nnx.clone(root), model.copied(root), nnx.merge(*nnx.split(root))):
            function(one)
    assert len(traces) == 1


filled = roots.map(lambda root: nnx.Dict(root=root, more=nnx.Param(jnp.ones(2))))
"""Random graphs with a Variable at least."""


def leaf_of(data, root):
    return data.draw(st.sampled_from([path for path, _ in model.leaves(root)]))


@few
@given(st.data(), filled)
def test_L7_a_missing_leaf_is_named(data, root):
    graphdef, state = nnx.flatten(root)
    path = leaf_of(data, root)
    rest = nnx.from_flat_state([(p, x) for p, x in state if p != path])
    with pytest.raises(ValueError) as caught:
        nnx.merge(graphdef, rest)
    assert f"'{path_text(path)}'" in str(caught.value)


@few
@given(st.data(), filled)
def test_L7_what_no_filter_matches_is_named(data, root):
    path = leaf_of(data, root)
    with pytest.raises(ValueError) as caught:
        nnx.split(root, lambda p, x: p != path)
    assert path_text(path) in str(caught.value)


@few
@given(st.data(), roots)
def test_L7_an_unknown_path_is_named_and_nothing_is_written(data, root):
    before = model.canonical(root)
    refs = references(root)
    new = (*data.draw(st.sampled_from([(), *(p[:-1] for p, _ in model.leaves(root))])), "unheard")
    state = nnx.to_flat_state(nnx.to_pure_dict(nnx.state(root)))
    changed = nnx.from_flat_state([*state, (new, jnp.ones(3))])
    with pytest.raises(ValueError) as caught:
        nnx.update(root, changed)
    assert f"'{path_text(new)}'" in str(caught.value)
    assert "update" in str(caught.value)
    assert model.canonical(root) == before
    assert all(x is y for x, y in zip(references(root), refs, strict=True))


@few
@given(st.data(), filled)
def test_L7_a_misshapen_value_is_named_with_both_shapes(data, root):
    """Whatever has a shape of its own: here a reference."""
    root.ref = nnx.Variable(jnp.ones(2), ref=True)
    path, _ = data.draw(st.sampled_from([(p, x) for p, x in model.leaves(root)]))
    before = model.canonical(root)
    changed = {path: jnp.ones((3,)), ("ref",): jnp.zeros((7, 9))}
    with pytest.raises(ValueError) as caught:
        nnx.update(root, nnx.from_flat_state(changed))
    text = str(caught.value)
    assert "'ref'" in text and "(2,)" in text and "(7, 9)" in text
    assert model.canonical(root) == before
