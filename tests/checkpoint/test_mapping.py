"""Mappings: names and layouts of foreign weights, in both directions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.checkpoint import Keep, Mapping, MappingError, MismatchError, Rule


def params(**shapes):
    """Params of these shapes with different numbers in them; `a__b` is a path of two names."""
    model = nnx.Dict()
    for start, (path, shape) in enumerate(shapes.items()):
        *outer, name = path.split("__")
        place = model
        for part in outer:
            place = place.setdefault(part, nnx.Dict())
        numbers = 100 * start + np.arange(int(np.prod(shape)), dtype="float32")
        place[name] = nnx.Param(jnp.asarray(numbers.reshape(shape)))
    return model


def values(model):
    pairs = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): leaf[...].tolist() for path, leaf in pairs}


def round_trip(model, *rules):
    """What the mapping exports, after checking that it loads back to the same."""
    mapping = Mapping(rules)
    foreign = mapping.export(model)
    loaded = nnx.map(lambda _, leaf: leaf.replace(jnp.zeros_like(leaf[...])), nnx.clone(model))
    report = mapping.load(foreign, loaded)
    assert report.complete and sorted(report.restored) == sorted(values(model))
    assert values(loaded) == values(model)
    return foreign


GATES = {"gate": [[0, 6], [1, 7], [2, 8]], "up": [[3, 9], [4, 10], [5, 11]]}
ROWS = {"one": [0, 1, 2, 3, 4, 5], "two": [6, 7, 8, 9, 10, 11]}
QKV = {"qkv": [[0, 1, 100, 101, 200, 201], [2, 3, 102, 103, 202, 203]]}
NETS = [Rule("net.{i}.weight", "fc{i}.kernel", "o i -> i o"), Rule("net.{i}.bias", "fc{i}.bias")]
LINEAR = {"net.0.weight": [[0, 2], [1, 3]], "net.0.bias": [100, 101]}
THREE = {"q": (2, 2), "k": (2, 2), "v": (2, 2)}
EXPERTS = [f"{{m}}.experts.{e}.w" for e in range(2)]
WILD = {"m.enc.a.w": [0], "m.enc.b": [100], "head_x": [200]}


@pytest.mark.parametrize(
    ("shapes", "rules", "foreign"),
    [
        ({"fc0__kernel": (2, 2), "fc0__bias": (2,)}, NETS, LINEAR),
        (THREE, [Rule("qkv", [*THREE], split=1)], QKV),
        (THREE, [Rule("qkv", [*THREE], "d (n x) -> n d x")], QKV),
        (
            {"q": (1, 2, 2), "k": (1, 1, 2)},
            [Rule("qk", ["q", "k"], "(h x) d -> d h x", split=0)],
            {"qk": [[0], [1], [2], [3], [100], [101]]},
        ),
        ({"w": (2, 6)}, [Rule(["gate", "up"], "w", "n o i -> i (n o)", n=2)], GATES),
        ({"w": (2, 6)}, [Rule(["one", "two"], "w")], ROWS),
        ({"a": (6,), "b": (6,)}, [Rule("w", ["a", "b"])], {"w": [[*range(6)], [*range(100, 106)]]}),
        (
            {"moe__a__w": (2, 1), "moe__b__w": (2, 1)},
            [Rule(EXPERTS, "moe.{m}.w")],
            {f"{m}.experts.{e}.w": [100 * i + e] for i, m in enumerate("ab") for e in range(2)},
        ),
        (
            {"encoder__a__w": (1,), "encoder__b": (1,), "head": (1,)},
            [Rule("m.enc.**", "encoder.**"), Rule("*_x", "*")],
            WILD,
        ),
    ],
    ids=lambda x: repr(x)[:40],
)
def test_arrays_are_renamed_and_converted_and_back(shapes, rules, foreign):
    found = round_trip(params(**shapes), *rules)
    assert {name: array.tolist() for name, array in found.items()} == foreign


@pytest.mark.parametrize(
    ("axes", "sizes", "ours", "foreign"),
    [
        ("o i h w -> h w i o", {}, (2, 3, 4, 5), (5, 4, 2, 3)),
        ("d (h k) -> h k d", {}, (2, 3, 5), (5, 6)),
        ("h k d -> d (h k)", {"h": 2}, (5, 6), (2, 3, 5)),
        # Llama's own checkpoints rotate neighbours, RoPE here the two halves.
        ("(h k two) d -> d h (two k)", {"two": 2}, (5, 2, 6), (12, 5)),
        ("1 1 d -> d", {}, (3,), (1, 1, 3)),
        ("(o g) i ... -> g ... i o", {}, (2, 3, 3, 4, 5), (10, 4, 3, 3)),
        ("-> ", {}, (), ()),
        ("(a b) -> b a", {}, (0, 2), (0,)),
        ("in out -> out in", {}, (2, 3), (3, 2)),  # a keyword is a fine name
    ],
)
def test_axes_are_rearranged_and_back(axes, sizes, ours, foreign):
    model = params(w=ours)
    array = round_trip(model, Rule("theirs", "w", axes, **sizes))["theirs"]
    assert array.shape == foreign
    if sizes == {"two": 2}:
        expected = np.asarray(model.w).reshape(5, 2, 2, 3).transpose(1, 3, 2, 0).reshape(12, 5)
        assert np.array_equal(array, expected)


def test_a_shared_array_is_one_whatever_name_a_rule_uses():
    model = params(wte__w=(2,))
    model["head"] = model["wte"]
    assert list(round_trip(model, Rule("x", "wte.w"))) == ["x"]
    rules = [Rule("x", "wte.w"), Rule("y", "head.w")]
    with pytest.raises(MappingError, match=r"both Rule\('x', 'wte.w'\) and Rule\('y', 'head.w'\)"):
        Mapping(rules).load({"x": np.ones(2), "y": np.ones(2)}, model)


def test_random_keys_keep_their_kind():
    streams = lambda seed: nnx.Rngs(nnx.RngStream(jax.random.key(seed, impl="rbg"), tag="a"))
    model, other, every = streams(3), streams(4), Mapping([Rule("**", "**")])
    every.load(every.export(model), other)
    assert (other.default.key[...] == model.default.key[...]).all()
    assert every.export(model)["default.key"].dtype == "uint32"
    rules = [Rule("default.key", "default.key", "-> "), Rule("*.count", "*.count")]
    with pytest.raises(MappingError, match=r"default.key is a random key, which can only be renam"):
        Mapping(rules).export(model)


def test_only_some_variables():
    model = nnx.Dict(a=params(w=(1,), v=(1,)), b=nnx.Variable(jnp.zeros(1)))
    mapping = Mapping([Rule("A.*", "a.*"), Rule("B", "b")])
    assert sorted(mapping.export(model, only=nnx.Param)) == ["A.v", "A.w"]
    foreign = {"A.w": np.full(1, 5, "f4"), "A.v": np.ones(1, "f4"), "B": np.ones(1, "f4")}
    report = mapping.load(foreign, model, only=lambda path, leaf: path[-1] == "w")
    assert report.restored == ("a.w",) and report.complete
    assert model.a.w[...] == 5 and model.a.v[...] == 100 and model.b[...] == 0


def test_nested_dictionaries():
    model, mapping = params(a__w=(2,)), Mapping([Rule("x.y", "a.w")])
    mapping.load({"x": {"y": jnp.array([3.0, 4.0])}}, model)
    assert model.a.w[...].tolist() == [3, 4]
    with pytest.raises(ValueError, match=re.escape("'x.y' is a str, not an array.")):
        mapping.load({"x": {"y": "three"}}, model)
    with pytest.raises(ValueError, match=re.escape("Several arrays have the name 'x.y'")):
        mapping.load({"x": {"y": jnp.ones(2)}, "x.y": jnp.zeros(2)}, model)


def test_what_does_not_match_is_reported_by_name():
    model = params(fc0__kernel=(2, 3), fc0__bias=(3,), head=(1,), other=(1,))
    before = values(model)
    mapping = Mapping([*NETS, Rule("head", "head")])
    foreign = {"net.0.weight": np.zeros((2, 3), "f4"), "net.0.bais": np.zeros(3, "f4")}
    foreign |= {"head": np.zeros(1), "more": np.zeros(1)}
    with pytest.raises(MismatchError) as caught:
        mapping.load(foreign, model)
    assert str(caught.value) == (
        "The dictionary does not match the objects, and nothing was changed.\n"
        "  missing, 2: other, fc0.bias (as net.0.bias, near: net.0.bais)\n"
        "  unexpected, 2: more, net.0.bais\n"
        "  misshapen, 2: fc0.kernel: stored float32[2,3] as net.0.weight, wanted float32[3,2], "
        "head: stored float64[1], wanted float32[1]\n"
        "  cast=True casts with loss of precision; strict=False restores what matches and reports the "
        "rest."
    )
    assert values(model) == before
    mapping = Mapping([*mapping.entries, Rule("none", "none")])  # not strict: it may match nothing
    report = mapping.load(foreign, model, strict=False, cast=True)
    assert report.restored == ("head",) and model.head[...] == 0
    assert values(model)["other"] == before["other"]


def test_foreign_arrays_that_are_merged_have_one_dtype():
    foreign = {"a": np.zeros(1, "f4"), "b": np.zeros(1, "f2")}
    with pytest.raises(MismatchError, match=r"stored float16\[1\] as b, wanted float32\[1\]"):
        Mapping([Rule(["a", "b"], "w")]).load(foreign, params(w=(2, 1)))


BIAS = Rule("x", "bias")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule("x", "kernels")], "Rule('x', 'kernels') matches none of our names (near: kernel)"),
        ([BIAS, Rule("*", "*as")], "bias: both Rule('x', 'bias') and Rule('*', '*as')"),
        ([BIAS, Rule("x", "bias2")], "bias') and Rule('x', 'bias2') are for it. Remove one of them."),
        ([Rule("x", ["bias", "baes"])], "'baes' does not exist (near: bias)"),
        ([Rule("x", ["bias", "kernel"])], "our shapes are (3,), (2, 3): all input arrays must have"),
        ([Rule("x", ["bias", "kernel"], split=0)], "are (3,), (2, 3): all the input arrays must have"),
        ([Rule("x", ["bias", "bias2"], split=1)], "our shapes are (3,), (3,): axis 1"),
        ([Rule("x", "bias", "o i")], "'o i' has one side. Write both, as in 'o i -> i o'."),
        ([Rule("x", "bias", "o i -> i o")], "Wrong shape: expected 2 dims."),
        ([Rule("x", "bias", "(o i -> i o")], "Imbalanced parentheses"),
        ([Rule("x", "bias", "o -> o", i=2)], "Axis i is not used in transform"),
        ([Rule("x", "kernel", "h a b -> h (a b)")], "Could not infer sizes for {"),
        ([Rule(["x", "y"], "bias")], "it is made from 3 arrays, not 2. Write axes, of which the fir"),
        ([Rule("x", "bias", split=0), Rule(["x", "y"], "kernel", split=0)], "from 1 arrays, not 2. W"),
    ],
    ids=lambda x: None if isinstance(x, str) else repr(x)[:60],
)  # fmt: skip
def test_a_mapping_that_does_not_suit_the_model(rules, message):
    model = params(kernel=(2, 3), bias=(3,), bias2=(3,), l0=(1,), l2=(1,))
    before = values(model)
    with pytest.raises(MappingError, match=re.escape(message)) as caught:
        Mapping(rules).load({}, model)
    assert str(caught.value).startswith("The mapping does not suit Dict:\n  ")
    assert any(message in problem for problem in caught.value.problems)
    assert values(model) == before
    with pytest.raises(MappingError, match=re.escape(message)):
        Mapping(rules).export(model)


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
        Mapping([Rule("wb", ["w", "b"])]).export(model)


def test_a_rule_that_makes_no_sense():
    for names, message in (
        (([], "c"), "Rule((), 'c') names nothing on one side."),
        ((["a{i}", "b"], "c{i}"), "have the same wildcards. List those that an axis counts: [f'"),
        (("a.*", "b"), "Rule('a.*', 'b'): all names of a rule must have the same wildcards"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Rule(*names)


def test_text_forms_and_equality():
    rule = Rule("a.{i}", ["b.{i}", "c.{i}"], "(a b) -> b a", split=0, b=2)
    text = "Rule('a.{i}', ('b.{i}', 'c.{i}'), '(a b) -> b a', split=0, b=2)"
    assert repr(rule) == text and rule == eval(text)
    assert Mapping([rule]) == Mapping((rule,)) and hash(Mapping([rule])) == hash(Mapping([rule]))
    assert repr(Mapping([Keep("a")])) == "Mapping(entries=(Keep(ours='a'),))"
    with pytest.raises(TypeError, match=r"Mapping: \('a', 'b'\) is not a Rule, Ignore or Keep"):
        Mapping([("a", "b")])  # type: ignore[list-item]
