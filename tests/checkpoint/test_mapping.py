"""Mappings: names and layouts of foreign weights, in both directions."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.checkpoint import (
    Cast,
    Concatenate,
    Ignore,
    Keep,
    Mapping,
    MappingError,
    MismatchError,
    Rearrange,
    Rule,
    Split,
    Stack,
    Tie,
    Unstack,
)


def params(**shapes: tuple[int, ...]) -> nnx.Dict:
    """Params of these shapes with different numbers in them; `a__b` is a path of two names."""
    model = nnx.Dict()
    for start, (path, shape) in enumerate(shapes.items()):
        *outer, name = path.split("__")
        place = model
        for part in outer:
            if part not in place:
                place[part] = nnx.Dict()
            place = place[part]
        numbers = 100 * start + np.arange(int(np.prod(shape)), dtype="float32")
        place[name] = nnx.Param(jnp.asarray(numbers.reshape(shape)))
    return model


def values(model) -> dict[str, list]:
    return {
        ".".join(map(str, path)): np.asarray(leaf[...]).tolist()
        for path, leaf in nnx.to_flat_state(nnx.state(model))
    }


def zeros_like(model):
    return nnx.map(lambda path, leaf: leaf.replace(jnp.zeros_like(leaf[...])), nnx.clone(model))


def round_trip(mapping: Mapping, model) -> dict[str, np.ndarray]:
    """What the mapping exports, after checking that it loads back to the same."""
    foreign = mapping.export(model)
    loaded = zeros_like(model)
    report = mapping.load(foreign, loaded)
    assert report.complete and sorted(report.restored) == sorted(values(model))
    assert values(loaded) == values(model)
    return foreign


GATES = {"gate": [[0, 6], [1, 7], [2, 8]], "up": [[3, 9], [4, 10], [5, 11]]}
STACKED = {"one": [0, 1, 2, 3, 4, 5], "two": [6, 7, 8, 9, 10, 11]}
QKV = [[0, 1, 100, 101, 200, 201], [2, 3, 102, 103, 202, 203]]
NETS = [Rule("net.{i}.weight", "fc{i}.kernel", "o i -> i o"), Rule("net.{i}.bias", "fc{i}.bias")]
LINEAR = {"net.0.weight": [[0, 2], [1, 3]], "net.0.bias": [100, 101]}
MERGED = ["gate", "up"]
THREE = {"q": (2, 2), "k": (2, 2), "v": (2, 2)}


@pytest.mark.parametrize(
    ("shapes", "rules", "foreign"),
    [
        ({"fc0__kernel": (2, 2), "fc0__bias": (2,)}, NETS, LINEAR),
        (THREE, [Rule("qkv", [*THREE], Split(1))], {"qkv": QKV}),
        (THREE, [Rule("qkv", [*THREE], "d (n x) -> n d x", Unstack())], {"qkv": QKV}),
        (THREE, [Rule("qkv", [*THREE], "d (n x) -> d x n", Unstack(-1))], {"qkv": QKV}),
        ({"w": (2, 6)}, [Rule(MERGED, "w", "o i -> i o", Concatenate(-1))], GATES),
        ({"w": (2, 6)}, [Rule(["one", "two"], "w", Stack())], STACKED),
        (
            {"w": (1, 3)},
            [Rule(MERGED, "w", Concatenate(1, sizes=(1, 2)))],
            {"gate": [[0]], "up": [[1, 2]]},
        ),
        (
            {"moe__a__w": (2, 1), "moe__b__w": (2, 1)},
            [Rule([f"{{m}}.experts.{e}.w" for e in range(2)], "moe.{m}.w", Stack())],
            {
                "a.experts.0.w": [0],
                "a.experts.1.w": [1],
                "b.experts.0.w": [100],
                "b.experts.1.w": [101],
            },
        ),
        (
            {"encoder__a__w": (1,), "encoder__b": (1,), "head": (1,)},
            [Rule("m.enc.**", "encoder.**"), Rule("*_x", "*")],
            {"m.enc.a.w": [0], "m.enc.b": [100], "head_x": [200]},
        ),
    ],
    ids=lambda x: repr(x)[:40],
)
def test_arrays_are_renamed_and_converted_and_back(shapes, rules, foreign):
    found = round_trip(Mapping(rules), params(**shapes))
    assert {name: array.tolist() for name, array in found.items()} == foreign


def test_parts_of_different_sizes_are_split_and_then_rearranged():
    model = params(q=(4, 2, 3), k=(4, 1, 3))
    rule = Rule("qk", ["q", "k"], Split(0), "(h x) d -> d h x")
    assert round_trip(Mapping([rule]), model)["qk"].shape == (9, 4)


@pytest.mark.parametrize(
    ("pattern", "sizes", "ours", "foreign"),
    [
        ("o i h w -> h w i o", {}, (2, 3, 4, 5), (5, 4, 2, 3)),
        ("(h k) d -> d h k", {}, (5, 2, 3), (6, 5)),
        ("d (h k) -> h k d", {}, (2, 3, 5), (5, 6)),
        ("h k d -> d (h k)", {"h": 2}, (5, 6), (2, 3, 5)),
        # Llama's own checkpoints rotate neighbours, RoPE here the two halves.
        ("(h k two) d -> d h (two k)", {"two": 2}, (5, 2, 6), (12, 5)),
        ("1 1 d -> d", {}, (3,), (1, 1, 3)),
        ("-> ", {}, (), ()),
        ("(a b) -> b a", {}, (0, 2), (0,)),
    ],
)
def test_arrays_are_rearranged_and_back(pattern, sizes, ours, foreign):
    model = params(w=ours)
    array = round_trip(Mapping([Rule("theirs", "w", Rearrange(pattern, **sizes))]), model)["theirs"]
    assert array.shape == foreign
    einsum = {
        "(h k) d -> d h k": lambda w: w.transpose(1, 2, 0).reshape(6, 5),
        "(h k two) d -> d h (two k)": lambda w: (
            w.reshape(5, 2, 2, 3).transpose(1, 3, 2, 0).reshape(12, 5)
        ),
    }
    if pattern in einsum:
        assert np.array_equal(array, einsum[pattern](np.asarray(model.w[...])))


def test_several_foreign_names_of_one_array():
    model = params(embedding=(2, 2))
    mapping = Mapping([Rule(["wte", "head"], "embedding", Tie())])
    foreign = round_trip(mapping, model)
    assert foreign["wte"].tolist() == foreign["head"].tolist() == [[0, 1], [2, 3]]
    del foreign["wte"]
    loaded = zeros_like(model)
    assert mapping.load(foreign, loaded).renamed == (("head", "embedding"),)
    assert values(loaded) == values(model)
    foreign["wte"] = foreign["head"] + 1
    loaded = zeros_like(model)
    with pytest.raises(MismatchError, match="dictionary has different values for 'wte' and 'head'"):
        mapping.load(foreign, loaded)
    assert not loaded.embedding[...].any()
    with pytest.raises(MismatchError, match=r"missing, 1: embedding \(as wte\)"):
        mapping.load({}, loaded)


def test_several_of_our_arrays_under_one_foreign_name():
    model = params(embedding=(2, 3), kernel=(3, 2))
    model.kernel[...] = model.embedding[...].T
    for mapping in (
        Mapping([Rule("wte", "embedding"), Rule("wte", "kernel", Tie(), "v d -> d v")]),
        Mapping([Rule("wte", "kernel", Tie(), "v d -> d v"), Rule("wte", "embedding", Tie())]),
    ):
        assert round_trip(mapping, model)["wte"].shape == (2, 3)
        changed = nnx.clone(model)
        changed.kernel[...] = 0
        with pytest.raises(
            MappingError, match="tied, as both are saved as 'wte', and differ.* Share"
        ):
            mapping.export(changed)
    model = params(table=(2, 3), double=(3,))
    mapping = Mapping([Rule("b", "double", Tie()), Rule(["a", "b"], "table", Stack())])
    with pytest.raises(MappingError, match="'double' and 'table' are tied"):
        mapping.export(model)
    model.double[...] = model.table[1]
    assert round_trip(mapping, model)["b"].tolist() == [3, 4, 5]
    model = params(a=(2,), b=(2,))
    mapping = Mapping([Rule("both", ["a", "b"], Tie())])
    with pytest.raises(
        MappingError, match=r"a, b are tied by Rule\('both'.*, and differ\. .* Share"
    ):
        mapping.export(model)
    model.b[...] = model.a[...]
    round_trip(mapping, model)
    model.a[...] = model.b[...] = jnp.array([jnp.nan, 1])
    assert np.isnan(mapping.export(model)["both"][0])  # NaNs are equal


def test_a_shared_array_is_one_whatever_name_a_rule_uses():
    model = params(wte__w=(2,))
    model["head"] = model["wte"]
    foreign = round_trip(Mapping([Rule("x", "wte.w")]), model)
    assert list(foreign) == ["x"]
    rules = [Rule("x", "wte.w"), Rule("y", "head.w")]
    with pytest.raises(MappingError, match=r"both Rule\('x', 'wte.w'\) and Rule\('y', 'head.w'\)"):
        Mapping(rules).load({"x": np.ones(2), "y": np.ones(2)}, model)


def test_a_cast_holds_for_the_foreign_side():
    model = params(w=(2,))
    mapping = Mapping([Rule("w", "w", Cast("bfloat16"))])
    foreign = mapping.export(model)
    assert foreign["w"].dtype == ml_dtypes.bfloat16
    report = mapping.load({"w": np.array([1 / 3, 2])}, model)  # float64: no `cast=True` is needed
    assert [tuple(entry) for entry in report.cast] == [("w", "float64[2]", "float32[2]")]
    assert model.w[...].dtype == "float32" and model.w[...][0] == np.float32(1 / 3)


def test_what_only_one_side_has():
    model = nnx.Dict(norm0=params(mean=(2,)), norm1=params(mean=(2,)), rngs=nnx.Rngs(0))
    key = model.rngs.default.key[...]
    mapping = Mapping([Rule("bn{i}.mean", "norm{i}.mean"), Ignore("*.mask"), Keep("rngs.**")])
    foreign = mapping.export(model)
    assert sorted(foreign) == ["bn0.mean", "bn1.mean"]
    foreign["bn0.mask"] = np.zeros(5)
    report = mapping.load(foreign, model)
    assert report.complete and report.restored == ("norm0.mean", "norm1.mean")
    assert model.rngs.default.key[...] == key


def test_random_keys_keep_their_kind():
    model = nnx.Rngs(nnx.RngStream(jax.random.key(3, impl="rbg"), tag="a"))
    stream = Mapping([Rule("**", "**")])
    foreign = stream.export(model)
    other = nnx.Rngs(nnx.RngStream(jax.random.key(4, impl="rbg"), tag="a"))
    stream.load(foreign, other)
    assert (other.default.key[...] == model.default.key[...]).all()
    with pytest.raises(MappingError, match="default.key is a random key; no operation applies"):
        Mapping([Rule("**", "**", Cast("float32"))]).export(model)


def test_only_some_variables():
    model = nnx.Dict(a=params(w=(1,), v=(1,)), b=nnx.Variable(jnp.zeros(1)))
    mapping = Mapping([Rule("A.*", "a.*"), Rule("B", "b")])
    assert sorted(mapping.export(model, only=nnx.Param)) == ["A.v", "A.w"]
    foreign = {"A.w": np.full(1, 5, "f4"), "A.v": np.ones(1, "f4"), "B": np.ones(1, "f4")}
    report = mapping.load(foreign, model, only=lambda path, leaf: path[-1] == "w")
    assert report.restored == ("a.w",) and report.complete
    assert model.a.w[...] == 5 and model.a.v[...] == 100 and model.b[...] == 0


def test_nested_dictionaries_and_pytorch_like_arrays():
    model = params(a__w=(2,))
    Mapping([Rule("x.y", "a.w")]).load({"x": {"y": jnp.array([3.0, 4.0])}}, model)
    assert model.a.w[...].tolist() == [3, 4]
    with pytest.raises(ValueError, match=re.escape("'x.y' is a str, not an array.")):
        Mapping([Rule("x.y", "a.w")]).load({"x": {"y": "three"}}, model)


def test_an_abstract_model_gets_arrays():
    model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    rules = [Rule("w", "kernel", "o i -> i o"), Rule("b", "bias")]
    Mapping(rules).load({"w": np.ones((3, 2), "f4"), "b": np.ones(3, "f4")}, model)
    assert model(jnp.ones((1, 2))).tolist() == [[3, 3, 3]]


def test_what_does_not_match_is_reported_by_name():
    model = params(fc0__kernel=(2, 3), fc0__bias=(3,), head=(1,), other=(1,))
    before = values(model)
    mapping = Mapping([
        Rule("layers.{i}.weight", "fc{i}.kernel", "o i -> i o"),
        Rule("layers.{i}.bias", "fc{i}.bias"),
        Rule("head", "head"),
    ])  # fmt: skip
    foreign = {
        "layers.0.weight": np.zeros((2, 3), "f4"),
        "layers.0.bais": np.zeros(3, "f4"),
        "head": np.zeros(1),
        "more": np.zeros(1),
    }
    with pytest.raises(MismatchError) as caught:
        mapping.load(foreign, model)
    assert str(caught.value) == (
        "The dictionary does not match the objects, and nothing was changed.\n"
        "  missing, 2: other, fc0.bias (as layers.0.bias, near: layers.0.bais)\n"
        "  unexpected, 2: layers.0.bais, more\n"
        "  misshapen, 2: fc0.kernel: stored float32[2,3] as layers.0.weight, wanted float32[3,2], "
        "head: stored float64[1], wanted float32[1]\n"
        "  cast=True casts with loss of precision, cast=None keeps the stored dtypes; strict=False "
        "restores what matches and reports the rest."
    )
    assert caught.value.report.near == {"fc0.bias": "layers.0.bais"}
    assert values(model) == before
    report = mapping.load(foreign, model, strict=False, cast=True)
    assert report.restored == ("head",) and model.head[...] == 0
    assert values(model)["other"] == before["other"]


def test_foreign_arrays_that_are_merged_have_one_dtype():
    model = params(w=(2, 1))
    foreign = {"a": np.zeros(1, "f4"), "b": np.zeros(1, "f2")}
    with pytest.raises(MismatchError, match=r"stored float16\[1\] as b, wanted float32\[1\]"):
        Mapping([Rule(["a", "b"], "w", Stack())]).load(foreign, model)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule("x", "kernels")], "Rule('x', 'kernels') matches none of our names (near: kernel)"),
        ([Rule("x", "bias"), Rule("*", "*as")], "bias: both Rule('x', 'bias') and Rule('*', '*as')"),
        (
            [Rule("x", "bias"), Rule("x", "bias2")],
            "for it. Remove one of them. Where ours have the same values, write Rule('x', ('bias', ",
        ),
        (
            [Rule("x", "bias"), Rule(["x", "y"], "kernel", Concatenate())],
            "and Rule(('x', 'y'), 'kernel', Concatenate(axis=0, sizes=None)) are for it. Remove one",
        ),
        (
            [Rule("x", ["bias", "kernel"], Tie())],
            "our shapes are (3,), (2, 3): Tie() needs one shape. Write a rule for each of the others.",
        ),
        (
            [Rule("x", ["bias", "baes"], Unstack())],
            "'baes' does not exist (near: bias)",
        ),
        (
            [Rule("x", ["bias", "kernel"], Unstack())],
            "Unstack(axis=0)): our shapes are (3,), (2, 3): all input arrays must have the same shape",
        ),
        (
            [Rule("x", ["bias", "kernel"], Split(0))],
            "Split(axis=0)): our shapes are (3,), (2, 3): all the input arrays must have",
        ),
        ([Rule("x", ["bias", "bias2"], Split(1))], "Split(axis=1)): our shapes are (3,), (3,): axis 1"),
        ([Rule("x", "bias", "o i -> i o")], "Wrong shape: expected 2 dims."),
        (
            [Rule("x", "kernel", "h a b -> h (a b)")],
            "Could not infer sizes for {",
        ),
        (
            [Rule("x", "kernel", Rearrange("h a b -> h (a b)", a=2))],
            "Shape mismatch, can't divide axis of length 3 in chunks of 2",
        ),
        ([Rule(["x", "y"], "bias", Concatenate())], "array split does not result in an equal div"),
        (
            [Rule(["x", "y"], "bias", Concatenate(0, (1, 1)))],
            "has sizes that add up to 2, not 3.",
        ),
        ([Rule(["x", "y"], "bias", Stack())], "it is made from 3 arrays, not 2."),
        ([Rule("x", ["bias", "bias2"])], "from 2 arrays, not 1. Add Split or Unstack, Concatenate or"),
        ([Rule(["x", "y"], ["bias", "bias2"], Tie())], "it is made from 1 arrays, not 2. Add Split"),
        ([Rule(["x", "y"], "bias", Split())], "it is made from 1 arrays, not 2. Add Split or Unstack"),
        ([Rule(["x", "y"], ["bias", "bias2"], Stack())], "Stack(axis=0) has one array on a side, and"),
    ],
    ids=lambda x: None if isinstance(x, str) else repr(x)[:60],
)  # fmt: skip
def test_a_mapping_that_does_not_suit_the_model(rules, message):
    model = params(kernel=(2, 3), bias=(3,), bias2=(3,), l0=(1,), l2=(1,))
    before = values(model)
    with pytest.raises(MappingError, match=re.escape(message)) as caught:
        Mapping([*rules]).load({}, model)
    assert str(caught.value).startswith("The mapping does not suit Dict:\n  ")
    assert any(message in problem for problem in caught.value.problems)
    assert values(model) == before
    with pytest.raises(MappingError, match=re.escape(message)):
        Mapping([*rules]).export(model)


def test_without_strict_a_rule_may_match_nothing():
    model = params(w=(1,))
    mapping = Mapping([Rule("w", "w"), Rule("b", "b")])
    assert mapping.load({"w": np.full(1, 3, "f4")}, model, strict=False).restored == ("w",)


def test_saving_needs_a_rule_for_each_array():
    model = params(w=(2,), b=(3,))
    with pytest.raises(MappingError) as caught:
        Mapping([Rule("w", "w")]).export(model)
    assert str(caught.value) == (
        "The mapping cannot save Dict; nothing was written:\n"
        "  b: no rule is for it; add one, or Keep('b')."
    )
    model.b = nnx.Param(jnp.zeros(2, "bfloat16"))
    with pytest.raises(MappingError, match="wb: ours are of bfloat16 and float32."):
        Mapping([Rule("wb", ["w", "b"], Unstack())]).export(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rearrange("o i"), "Rearrange('o i'): write both sides, as in Rearrange('o i -> i o')."),
        (lambda: Rearrange("o i -> o"), "Rearrange('o i -> o'): "),
        (lambda: Rearrange("o o -> o o"), "o"),
        (lambda: Rearrange("(o i -> i o"), "Imbalanced parentheses"),
        (lambda: Rearrange("o) -> o"), "Brackets are not balanced"),
        (lambda: Rearrange("o -> o", i=2), "Axis i is not used in transform"),
        (lambda: Rule([], "c"), "Rule((), 'c') names nothing on one side."),
        (lambda: Rule(["a{i}", "b"], "c{i}", Tie()), "must have the same wildcards. List those that"),
        (lambda: Rule("a.*", "b"), "Rule('a.*', 'b'): all names of a rule must have the same wildc"),
        (lambda: Rule("a", "b.{i}", Unstack()), "List those that Stack or Unstack counts: [f'exp"),
    ],
)  # fmt: skip
def test_a_rule_that_makes_no_sense(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_values_of_other_classes():
    with pytest.raises(TypeError, match=re.escape("Rule('a', 'b', 3): 3 is not an operation.")):
        Rule("a", "b", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Mapping: \('a', 'b'\) is not a Rule, Ignore or Keep"):
        Mapping([("a", "b")])  # type: ignore[list-item]


def test_text_forms_and_equality():
    rule = Rule("a.{i}", "b.{i}", "o i -> i o", Rearrange("(a b) -> b a", b=2), Cast("float16"))
    assert repr(rule) == (
        "Rule('a.{i}', 'b.{i}', 'o i -> i o', Rearrange('(a b) -> b a', b=2), Cast('float16'))"
    )
    assert Mapping([rule]) == Mapping((rule,)) and hash(Mapping([rule])) == hash(Mapping([rule]))
    assert repr(Mapping([Keep("a")])) == "Mapping(entries=(Keep(ours='a'),))"
