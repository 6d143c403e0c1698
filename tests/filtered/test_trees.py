"""tree_at, equality and the other tools for whole trees."""

from __future__ import annotations

import collections

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


def test_equal_leaves_are_different_places():
    x = jnp.ones(1)
    assert nnx.tree_at(lambda t: t[0], [1, 1], 2) == [2, 1]
    assert nnx.tree_at(lambda t: t[1], [x, x], 2)[0] is x


def test_tree_at_tells_empty_parts_and_nones_from_each_other():
    tree = {"a": (), "b": (), "c": [(), {}, []]}
    assert nnx.tree_at(lambda t: t["b"], tree, 5) == {**tree, "b": 5}
    assert nnx.tree_at(lambda t: (t["c"][0], t["a"]), tree, (1, 2))["c"] == [1, {}, []]
    kept = nnx.tree_at(lambda t: t["c"][1], tree, 5)
    assert type(kept["a"]) is tuple and type(kept["c"][0]) is tuple
    assert nnx.tree_at(lambda t: t["a"], tree, replace_fn=len) == {**tree, "a": 0}
    layers = [{"w": 1, "bias": 2}, {"w": 3, "bias": None}, {"w": 4, "bias": 5}]
    that_exist = lambda t: [layer["bias"] for layer in t if layer["bias"] is not None]
    new = nnx.tree_at(that_exist, layers, replace_fn=lambda b: -b)
    assert [layer["bias"] for layer in new] == [-2, None, -5]
    assert nnx.tree_at(jax.tree.leaves, (1, None, 2), (3, 4)) == (3, None, 4)
    one_of_two = nnx.tree_at(lambda t: t[1]["bias"], [layers[1], layers[1]], 7)
    assert [layer["bias"] for layer in one_of_two] == [None, 7]
    assert nnx.tree_at(lambda t: t, None, 1) == 1
    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    with_bias = nnx.tree_at(lambda m: m.bias, model, nnx.Param(jnp.ones(2)))
    assert with_bias.bias.shape == (2,) and model.bias is None
    exists = lambda m: [m.bias] if m.bias is not None else []
    assert nnx.tree_at(exists, model, replace_fn=lambda b: b * 0).bias is None


@pytest.mark.parametrize("values", [jnp.array([3, 4]), np.array([3, 4]), range(3, 5), [3, 4]])
def test_tree_at_takes_sequences_of_replacements(values):
    new = nnx.tree_at(lambda t: (t["a"], t["b"][0]), {"a": 1, "b": [2]}, values)
    assert (int(new["a"]), int(new["b"][0])) == (3, 4)


def test_tree_at_by_path():
    tree = {"a": [1, (2, 3)]}
    assert nnx.tree_at("a.1.0", tree, 9) == {"a": [1, (9, 3)]}
    assert nnx.tree_at(("a", 0), tree, 9) == {"a": [9, (2, 3)]}
    assert nnx.tree_at(["a.0", "a.1.1"], tree, [8, 9]) == {"a": [8, (2, 9)]}


def test_tree_at_is_leaf():
    tree = [(1, 2), 3]
    stop = lambda x: isinstance(x, tuple)
    assert nnx.tree_at(lambda t: t[0], tree, replace_fn=sum, is_leaf=stop) == [3, 3]


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
        (
            lambda: nnx.tree_at(lambda m: (m.first, m.second), Tied(), (2, 3)),
            "twice; each part can be replaced once",
        ),
        (
            lambda: nnx.tree_at(lambda t: (t[0], t[0][1]), [[1, 2]], (2, 3)),
            "the parts overlap: '0.1' lies inside '0'",
        ),
        (lambda: nnx.tree_at(lambda t: (t[0], t[1]), [1, 2], (3,)), "sequence of 2 parts"),
        (lambda: nnx.tree_at(lambda t: (t[0], t[1]), [1, 2], 3), "same length, got int"),
        (
            lambda: nnx.tree_at("a.c", {"a": {"b": 1}}, 3),
            "nothing at 'a.c': dict at 'a' has no 'c'",
        ),
        (lambda: nnx.tree_at("first.x", Tied(), 3), "Linear at 'first' has no 'x'"),
    ],
)
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


def test_tree_equal():
    one = jnp.ones(2)
    assert nnx.tree_equal([one, "a"], [jnp.ones(2), "a"])
    assert not nnx.tree_equal([one], [jnp.zeros(2)])
    assert not nnx.tree_equal([one], [jnp.ones(3)])
    assert not nnx.tree_equal([one], [jnp.ones(2, jnp.int32)])
    assert not nnx.tree_equal([1], (1,))
    assert nnx.tree_equal(one, np.ones(2, np.float32))
    assert not nnx.tree_equal(one, np.ones(2, np.float32), typematch=True)
    assert nnx.tree_equal(1, 1.0) and not nnx.tree_equal(1, 1.0, typematch=True)
    for number in (1.0, 1, True, float("nan")):  # an array is no number
        for array in (jnp.array(1.0), np.float32(1), jnp.array(jnp.nan)):
            assert nnx.tree_equal([array], [number]) is nnx.tree_equal([number], [array]) is False
    assert not nnx.tree_equal(jnp.array(1.0), "a") and not nnx.tree_equal(one, 1.0)
    assert nnx.tree_equal(one, one, one) and not nnx.tree_equal(one, one, one + 1)
    assert nnx.tree_equal(one) and nnx.tree_equal()
    assert not nnx.tree_equal(jnp.full(1, jnp.nan), jnp.full(1, jnp.nan))
    assert nnx.tree_equal(np.ones(2), np.ones(2)) is True


def test_tree_equal_with_tolerances_and_under_jit():
    one = jnp.ones(2)
    assert nnx.tree_equal(one, one + 1e-3, atol=1e-2)
    assert nnx.tree_equal(one, one + 1e-3, rtol=1e-2)
    assert not nnx.tree_equal(one, one + 1e-1, atol=1e-2)
    assert nnx.tree_equal(1.0, 1.001, atol=1e-2) is False  # tolerances are for arrays
    equal = jax.jit(lambda x, y: nnx.tree_equal([x], [y]))
    assert equal(one, one) and not equal(one, one + 1)
    with_number = jax.jit(lambda x: (nnx.tree_equal([x, 1], [x, 1]), nnx.tree_equal([x], [1.0])))
    assert tuple(map(bool, with_number(jnp.array(1.0)))) == (True, False)


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


def test_tree_flatten_one_level():
    children, treedef = nnx.tree_flatten_one_level({"a": [1, 2], "b": None})
    assert children == [[1, 2], None] or children == [[1, 2]]
    assert jax.tree.unflatten(treedef, children) == {"a": [1, 2], "b": None}
    assert nnx.tree_flatten_one_level(3)[0] == [3]
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match="The list contains itself"):
        nnx.tree_flatten_one_level(loop)


def test_tree_inference_gives_a_copy():
    model = nnx.Dict(a=nnx.Dropout(0.5), b=nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    quiet = nnx.tree_inference([model, 1])[0]
    assert quiet.a.deterministic is True and quiet.b.use_running_average is True
    assert model.a.deterministic is False and model.b.use_running_average is False
    assert nnx.tree_inference(quiet, False).a.deterministic is False


Point = collections.namedtuple("Point", "x y")


def test_tree_pformat(capsys):
    tree = {"w": jnp.zeros((2, 3)), "n": np.arange(2), "p": Point(1, "a"), "f": jax.nn.relu}
    text = nnx.tree_pformat(tree, width=100)
    assert (
        text == "{'w': f32[2,3], 'n': i64[2](numpy), 'p': Point(x=1, y='a'), 'f': <function relu>}"
    )
    assert nnx.tree_pformat([1, [2, 3]], width=6, indent=1) == "[\n 1,\n [\n  2,\n  3\n ]\n]"
    assert nnx.tree_pformat(jnp.ones(1), short_arrays=False) == "Array([1.], dtype=float32)"
    struct = jax.ShapeDtypeStruct((2,), jnp.bfloat16)
    assert nnx.tree_pformat(struct, struct_as_array=True) == "bf16[2]"
    assert "ShapeDtypeStruct" in nnx.tree_pformat(struct)
    assert nnx.tree_pformat([1, "a"], truncate_leaf=lambda x: x == 1) == "[int(...), 'a']"
    assert "kernel=Param(value=f32[3,3])" in nnx.tree_pformat(Tied())
    loop = nnx.Dict()
    loop.me = loop
    assert "<shared: self>" in nnx.tree_pformat(loop)
    nnx.tree_pprint([1])
    assert capsys.readouterr().out == "[1]\n"


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
