"""tree_at, equality and the other tools for whole trees; filter, partition and combine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.filtered.models import Tied


def test_tree_at_by_path():
    tree = {"a": [1, (2, 3)]}
    assert nnx.tree_at("a.1.0", tree, 9) == {"a": [1, (9, 3)]}
    assert nnx.tree_at(("a", 0), tree, 9) == {"a": [9, (2, 3)]}
    assert nnx.tree_at(["a.0", "a.1.1"], tree, [8, 9]) == {"a": [8, (2, 9)]}


def test_tree_at_on_objects_gives_a_changed_copy_with_the_sharing():
    model = Tied()
    model.me = model
    new = nnx.tree_at(lambda m: m.first.kernel, model, jnp.zeros((3, 3)))
    assert new.me is new is not model and new.first is new.second
    assert type(new.first.kernel) is nnx.Param and not new.second.kernel.value.any()
    assert model.first.kernel.value.any()
    assert new.first.bias.value is model.first.bias.value

    new = nnx.tree_at(lambda m: m.second, model, nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    assert new.first is new.second and new.first.kernel.shape == (3, 2)

    new = nnx.tree_at(lambda m: (m.scale, m.parts[1]), model, replace_fn=lambda x: x + 1)
    assert new.scale.tolist() == [2, 2, 2] and new.parts[1].tolist() == [2, 2]

    for where in (lambda m: m.first.bias.value, lambda m: m.first.bias[...]):
        assert nnx.tree_at(where, model, jnp.ones(3)).second.bias.value.tolist() == [1, 1, 1]

    new = nnx.tree_at("first.kernel", model, nnx.LoRAParam(jnp.ones(2)))
    assert type(new.second.kernel) is nnx.LoRAParam

    new = nnx.tree_at("first.bias", model, None)
    assert new.second.bias is None
    again = nnx.tree_at(lambda m: m.first.bias, new, nnx.Param(jnp.ones(3)))
    assert again(jnp.ones((1, 3))).shape == (1, 3)
    assert len(jax.tree.leaves(nnx.state(again))) == 6


def test_a_path_can_name_a_static_attribute():
    new = nnx.tree_at(["rate", "first.use_bias"], Tied(), [0.1, False])
    assert new.rate == 0.1 and new.second.use_bias is False
    assert nnx.tree_at("rate", Tied(), jnp.ones(2)).rate.shape == (2,)
    assert nnx.tree_at("rate", Tied(), replace_fn=lambda r: r * 2).rate == 1.0


def test_apply_updates_leaves_alone_what_containers_of_objects_hold_beside_data():
    model = nnx.Dict(parts=[nnx.Param(jnp.ones(2)), 3, {"name": "a", 1: (2.5, jnp.ones(1))}], n=4)
    model.rate = nnx.data(0.5)
    grads = nnx.filter_grad(lambda m: (m.parts[0] ** 2).sum() + m.parts[2][1][1].sum())(model)
    new = nnx.apply_updates(model, grads)
    assert new.parts[1:2] == [3] and new.n == 4 and new.rate == 0.5
    assert new.parts[2]["name"] == "a" and new.parts[2][1][0] == 2.5
    assert new.parts[0].value.tolist() == [3, 3] and new.parts[2][1][1].tolist() == [2]


def test_apply_updates_keeps_sharing_and_what_has_no_update():
    model = Tied()
    new = nnx.apply_updates(model, jax.tree.map(jnp.ones_like, nnx.filter(model, nnx.Param)))
    assert new.first is new.second and new.steps is model.steps
    np.testing.assert_allclose(new.first.kernel.value, model.first.kernel.value + 1)
    assert nnx.tree_equal(model, Tied())


def test_tree_equal_sees_sharing():
    model, other = Tied(), Tied()
    assert nnx.tree_equal(model, other)
    other.second = nnx.clone(other.first)
    assert not nnx.tree_equal(model, other)
    other = Tied()
    other.rate = 0.1
    assert not nnx.tree_equal(model, other)


def test_tree_inference_gives_a_copy():
    model = nnx.Dict(a=nnx.Dropout(0.5), b=nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    quiet = nnx.tree_inference([model, 1])[0]
    assert quiet.a.deterministic is True and quiet.b.use_running_average is True
    assert model.a.deterministic is False and model.b.use_running_average is False
    assert nnx.tree_inference(quiet, False).a.deterministic is False


def test_tree_pformat_of_nested_objects():
    class Block(nnx.Module, frozen=True):
        weight: jax.Array
        inner: object = None

    inside = Block(jnp.ones(2), [nnx.Dict(w=nnx.Param(jnp.ones(3))), (1, "a")])
    lines = nnx.tree_pformat(Block(np.ones((1, 2)), inside), width=30).splitlines()
    assert lines[:4] == [
        "Block(",
        "  weight=f64[1,2](numpy),",
        "  inner=Block(",
        "    weight=f32[2],",
    ]
    assert [line.strip() for line in lines[5:9]] == ["Dict({", "'w': Param(", "value=f32[3]", ")"]
    up = nnx.Dict(child=nnx.Dict())
    up.child.up, up.child.again = up, up.child
    text = nnx.tree_pformat(up)
    assert "<shared: self>" in text and "<shared: child>" in text
    shared = nnx.Dict()
    assert "shared" not in nnx.tree_pformat([shared, shared])


class Convertible:
    def __jax_array__(self):
        return jnp.ones(2)


def test_what_knows_how_to_become_an_array_is_array_like():
    assert nnx.is_array_like(Convertible())
    assert nnx.is_inexact_array_like(Convertible())
    assert not nnx.is_array(Convertible())


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        (nnx.Param, {"first.bias", "first.kernel"}),
        (nnx.Not(nnx.Param), {"parts.0", "parts.1", "scale", "steps"}),
        (nnx.Any(nnx.BatchStat, nnx.PathContains("scale")), {"parts.0", "scale"}),
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


def test_a_spec_of_the_objects_own_form_may_share_its_parts():
    tree = nnx.List([nnx.Dict(a=nnx.Param(i), b=nnx.Param(i)) for i in range(12)])
    spec = nnx.List([nnx.Dict(a=nnx.Param(True), b=nnx.Param(False))] * 12)
    found = nnx.filter(tree, spec)
    assert [part.a.value for part in found] == [*range(12)]
    assert all(part.b.value is None for part in found)


def test_a_chain_longer_than_the_recursion_limit():
    class Link(nnx.Module):
        def __init__(self, below):
            self.weight = nnx.Param(jnp.ones(()))
            self.below = nnx.data(below)

    chain = None
    for _ in range(1500):
        chain = Link(chain)
    assert nnx.combine(*nnx.partition(chain, nnx.is_array)).below.below.weight.value == 1


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
