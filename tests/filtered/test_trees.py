"""tree_at, equality and the other tools for whole trees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from tests.filtered.models import Tied


def test_tree_at_replaces_one_or_many_places():
    tree = {"a": [1, 2], "b": (3, None)}
    assert nnx.tree_at(lambda t: t["a"][1], tree, 9) == {"a": [1, 9], "b": (3, None)}
    assert nnx.tree_at(lambda t: (t["a"][0], t["b"][1]), tree, (8, 9)) == {
        "a": [8, 2],
        "b": (3, 9),
    }
    assert nnx.tree_at(lambda t: t["a"], tree, "x") == {"a": "x", "b": (3, None)}
    assert nnx.tree_at(lambda t: t["b"], tree, replace_fn=lambda b: b[0]) == {"a": [1, 2], "b": 3}
    assert nnx.tree_at(lambda t: t, tree, 1) == 1
    assert nnx.tree_at(lambda t: t["a"], tree, replace_fn=sum) == {"a": 3, "b": (3, None)}
    assert tree == {"a": [1, 2], "b": (3, None)}


def test_tree_at_by_path():
    tree = {"a": [1, (2, 3)]}
    assert nnx.tree_at("a.1.0", tree, 9) == {"a": [1, (9, 3)]}
    assert nnx.tree_at(("a", 0), tree, 9) == {"a": [9, (2, 3)]}
    assert nnx.tree_at(["a.0", "a.1.1"], tree, [8, 9]) == {"a": [8, (2, 9)]}


def test_tree_at_on_objects_gives_a_changed_copy_with_the_sharing():
    model = Tied()
    new = nnx.tree_at(lambda m: m.first.kernel, model, jnp.zeros((3, 3)))
    assert new is not model and new.first is new.second
    assert type(new.first.kernel) is nnx.Param and not new.second.kernel.value.any()
    assert model.first.kernel.value.any()
    assert new.first.bias.value is model.first.bias.value

    new = nnx.tree_at(lambda m: m.second, model, nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    assert new.first is new.second and new.first.kernel.shape == (3, 2)

    new = nnx.tree_at(lambda m: (m.scale, m.parts[1]), model, replace_fn=lambda x: x + 1)
    assert new.scale.tolist() == [2, 2, 2] and new.parts[1].tolist() == [2, 2]

    new = nnx.tree_at(lambda m: m.first.bias.value, model, jnp.ones(3))
    assert new.second.bias.value.tolist() == [1, 1, 1]
    new = nnx.tree_at(lambda m: m.first.bias[...], model, jnp.ones(3))
    assert new.second.bias.value.tolist() == [1, 1, 1]

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


def test_cycles_are_copied():
    model = Tied()
    model.me = model
    new = nnx.tree_at(lambda m: m.scale, model, jnp.zeros(3))
    assert new.me is new and new is not model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nnx.tree_at(lambda t: t[0], [1]), "exactly one of `replace` and `replace_fn`"),
        (lambda: nnx.tree_at(lambda t: t[0], [1], 2, id), "exactly one of `replace` and `repl"),
        (lambda: nnx.tree_at(lambda t: 7, [1], 2), "does not return a part of the tree, but 7"),
        (lambda: nnx.tree_at(lambda m: m.rate, Tied(), 2), "For a static attribute give its path"),
        (lambda: nnx.tree_at(lambda t: (t[0], t[0]), [1], (2, 3)), "the part at '0' twice"),
        (lambda: nnx.tree_at(lambda m: (m.first, m.second), Tied(), (2, 3)),
         "twice; each part can be replaced once"),
        (lambda: nnx.tree_at(lambda t: (t[0], t[0][1]), [[1, 2]], (2, 3)),
         "the parts overlap: '0.1' lies inside '0'"),
        (lambda: nnx.tree_at(lambda t: (t[0], t[1]), [1, 2], (3,)), "sequence of 2 parts"),
        (lambda: nnx.tree_at(lambda t: (t[0], t[1]), [1, 2], 3), "same length, got int"),
        (lambda: nnx.tree_at("a.c", {"a": {"b": 1}}, 3),
         "nothing at 'a.c': dict at 'a' has no 'c'"),
        (lambda: nnx.tree_at("first.x", Tied(), 3), "Linear at 'first' has no 'x'"),
    ],
)  # fmt: skip
def test_messages_of_tree_at(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


def test_where_that_looks_into_a_leaf():
    with pytest.raises(TypeError, match="it looked inside a leaf int with"):
        nnx.tree_at(lambda t: t[0][0], [1], 2)


def test_apply_updates_leaves_alone_what_has_no_update():
    assert nnx.apply_updates([1.0, "a", None], [2.0, None, None]) == [3.0, "a", None]
    with pytest.raises(ValueError, match="apply_updates: the trees differ in structure at '1'"):
        nnx.apply_updates([1, 2], [1, (2,)])


def test_apply_updates_leaves_alone_what_containers_of_objects_hold_beside_data():
    model = nnx.Dict(parts=[nnx.Param(jnp.ones(2)), 3, {"name": "a", 1: (2.5, jnp.ones(1))}], n=4)
    model.rate = nnx.data(0.5)
    grads = nnx.filter_grad(lambda m: (m.parts[0] ** 2).sum() + m.parts[2][1][1].sum())(model)
    new = nnx.apply_updates(model, grads)
    assert new.parts[1:2] == [3] and new.n == 4 and new.rate == 0.5
    assert new.parts[2]["name"] == "a" and new.parts[2][1][0] == 2.5
    assert new.parts[0].value.tolist() == [3, 3] and new.parts[2][1][1].tolist() == [2]


def test_apply_updates_with_optax_keeps_sharing():
    model = Tied()
    params = nnx.filter(model, nnx.is_inexact_array)
    tx = optax.sgd(1.0)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(grads, tx.init(params), params)
    new = nnx.apply_updates(model, updates)
    assert new.first is new.second
    np.testing.assert_allclose(new.first.kernel.value, model.first.kernel.value - 1)
    assert new.steps is model.steps
    assert nnx.tree_equal(model, Tied())


def test_an_update_of_none_is_refused():
    with pytest.raises(ValueError, match=r"the update float32\[2\] belongs to a None of the model"):
        nnx.apply_updates([None, 1.0], [jnp.ones(2), 1.0])


def test_tree_equal_sees_sharing():
    model, other = Tied(), Tied()
    assert nnx.tree_equal(model, other)
    other.second = nnx.clone(other.first)
    assert not nnx.tree_equal(model, other)
    other = Tied()
    other.rate = 0.1
    assert not nnx.tree_equal(model, other)


def test_tree_check():
    shared = [1]
    nnx.tree_check([shared, [1]])
    nnx.tree_check([Tied(), jnp.ones(1), ()])
    nnx.tree_check([(), ()])
    with pytest.raises(ValueError, match="The list at 'a' appears again at 'b.0'"):
        nnx.tree_check({"a": shared, "b": (shared,)})
    loop = [1]
    loop.append(loop)
    with pytest.raises(ValueError, match="The list at '<root>' appears again at '1'"):
        nnx.tree_check(loop)


def test_tree_inference_gives_a_copy():
    model = nnx.Dict(a=nnx.Dropout(0.5), b=nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    quiet = nnx.tree_inference([model, 1])[0]
    assert quiet.a.deterministic is True and quiet.b.use_running_average is True
    assert model.a.deterministic is False and model.b.use_running_average is False
    assert nnx.tree_inference(quiet, False).a.deterministic is False


def test_a_tree_that_contains_itself_has_no_level():
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match="^The list contains itself: it is not a tree"):
        nnx.tree_flatten_one_level(loop)


def test_tree_pformat_of_nested_objects():
    class Block(nnx.Module, frozen=True):
        weight: jax.Array
        inner: object = None

    inside = Block(jnp.ones(2), {"layers": [nnx.Dict(w=nnx.Param(jnp.ones(3))), (1, "a")]})
    text = nnx.tree_pformat(Block(np.ones((1, 2)), inside), width=30)
    assert text.splitlines() == PRETTY
    up = nnx.Dict(child=nnx.Dict())
    up.child.up, up.child.again = up, up.child
    text = nnx.tree_pformat(up)
    assert "<shared: self>" in text and "<shared: child>" in text
    shared = nnx.Dict()
    assert "shared" not in nnx.tree_pformat([shared, shared])


PRETTY = [
    "Block(",
    "  weight=f64[1,2](numpy),",
    "  inner=Block(",
    "    weight=f32[2],",
    "    inner={",
    "      'layers': [",
    "        Dict({",
    "          'w': Param(",
    "            value=f32[3]",
    "          )",
    "        }),",
    "        (1, 'a')",
    "      ]",
    "    }",
    "  )",
    ")",
]


def test_a_none_that_cannot_be_told_from_the_others():
    tree = {"a": 1, "b": None, "c": None}
    with pytest.raises(ValueError, match="`where` returns a None, and it is unclear which one"):
        nnx.tree_at(lambda t: t["c"] if t["b"] is None else t["a"], tree, 5)
    assert tree == {"a": 1, "b": None, "c": None}
