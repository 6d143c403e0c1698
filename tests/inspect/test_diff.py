"""`diff`: nothing for clones, exactly the edits that were made, and never an exception."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlite as nnx
from benchmarks.models import chain
from nnxlite.graph._compare import compare
from nnxlite.inspect._diff import MAX_LINES
from tests.laws.graphs import roots


class Item(nnx.Module):
    """One of everything that can be edited."""

    def __init__(self):
        self.w = nnx.Param(jnp.arange(6.0).reshape(2, 3), tag="a")
        self.stat = nnx.BatchStat(jnp.zeros(2, "int32"))
        self.array = jnp.ones(3)
        self.rate = 0.5
        self.pair = [nnx.Param(jnp.ones(2)), 3]
        self.inner = nnx.Dict(k=nnx.Param(jnp.ones(())))
        self.tied = self.stat
        self.key = nnx.RngKey(jax.random.key(0))


TAGS = {"tag": "a"}, {"tag": "b", "note": 1}
EDITS = {
    "array: float32[3] became float32[3,1]": (
        lambda item: setattr(item, "array", jnp.ones((3, 1))),
        (("array",), "shape", "float32[3]", "float32[3,1]"),
    ),
    "inner: Dict became nothing": (
        lambda item: delattr(item, "inner"),
        (("inner",), "removed", nnx.Dict, None),
    ),
    "key: values differ by up to 3 (at [1]: 0 became 3)": (
        lambda item: item.key.set_value(jax.random.key(3)),
        (("key",), "value", 0, 3),
    ),
    "pair.0: float32[2] became float16[2]": (
        lambda item: item.pair[0].set_value(jnp.ones(2, "float16")),
        (("pair", 0), "dtype", "float32[2]", "float16[2]"),
    ),
    "pair.1: 3 became 'three'": (
        lambda item: item.pair.__setitem__(1, "three"),
        (("pair", 1), "setting", 3, "three"),
    ),
    "rate: 0.5 became 1": (
        lambda item: setattr(item, "rate", 1),
        (("rate",), "setting", 0.5, 1),
    ),
    "tied: what is at 'stat' became an object of its own": (
        lambda item: setattr(item, "tied", nnx.BatchStat(item.stat[...])),
        (("tied",), "shared", ("stat",), None),
    ),
    "w: an object of its own became what is at 'stat'": (
        lambda item: setattr(item, "w", item.stat),
        (("w",), "shared", None, ("stat",)),
    ),
    "w: Param became BatchStat": (
        lambda item: setattr(item, "w", nnx.BatchStat(item.w[...])),
        (("w",), "retyped", nnx.Param, nnx.BatchStat),
    ),
    "w: tag='a' became tag='b', note=1": (
        lambda item: item.w.set_metadata(**TAGS[1]),
        (("w",), "metadata", *TAGS),
    ),
    "w: values differ by up to 2.5 (at [1, 2]: 5 became 7.5)": (
        lambda item: item.w.__setitem__((1, 2), 7.5),
        (("w",), "value", 5.0, 7.5),
    ),
    "new: nothing became Dict": (
        lambda item: setattr(item, "new", nnx.Dict(deep=nnx.Param(1.0))),
        (("new",), "added", None, nnx.Dict),
    ),
    "nothing": (lambda item: None, None),
}
"""By its text, each edit of an `Item`, and the difference that it makes."""


@given(st.lists(st.sampled_from([*EDITS]), max_size=6))
def test_exactly_the_edits_are_named(texts):
    before = nnx.List([Item() for _ in texts])
    after = nnx.clone(before)
    assert not nnx.diff(before, after) and str(nnx.diff(before, after)) == "no differences"
    wanted, lines = [], []
    for number, text in enumerate(texts):
        edit, difference = EDITS[text]
        edit(after[number])
        if difference is not None:
            path, kind, *sides = difference
            if kind == "shared":
                sides = [side and (number, *side) for side in sides]
                text = text.replace("'stat'", f"'{number}.stat'")
            wanted.append(((number, *path), kind, *sides))
            lines.append(f"{number}.{text}")
    found = nnx.diff(before, after)
    assert [(e.path, e.kind, e.before, e.after) for e in found] == wanted
    assert str(found) == repr(found) == ("\n".join(lines) or "no differences")
    assert bool(found) == bool(wanted) and len(found) == len(wanted)
    backwards = nnx.diff(after, before)
    assert {e.path for e in backwards} == {e.path for e in found}


def test_a_difference_of_values_has_its_size_and_place():
    before, after = Item(), Item()
    after.w[1, 2] = 7.5
    [entry] = nnx.diff(before, after)
    assert (entry.largest, entry.index) == (2.5, (1, 2))
    before, after = (nnx.List([f(()) for _ in range(207)]) for f in (jnp.zeros, jnp.ones))
    found = nnx.diff(before, after)
    assert len(found) == len(found.entries) == 207
    assert str(found).splitlines()[-1] == f"... {207 - MAX_LINES} more differences"


@given(roots)
def test_a_clone_does_not_differ(root):
    assert not nnx.diff(root, nnx.clone(root))
    assert not nnx.diff(nnx.state(root), nnx.state(nnx.clone(root)))


@given(roots, roots)
def test_definitions_differ_exactly_if_there_is_a_difference(a, b):
    definitions = nnx.graphdef(a), nnx.graphdef(b)
    assert bool(compare(*definitions)) == (definitions[0] != definitions[1])
    assert bool(nnx.diff(*definitions)) == bool(compare(*definitions))


def test_sharing_that_starts_elsewhere_is_no_difference():
    shared = nnx.Param(jnp.ones(2))
    before = nnx.Dict(a=shared, b=shared, c=shared)
    after = nnx.clone(before)
    del after["a"]
    assert [(e.path, e.kind) for e in nnx.diff(before, after)] == [(("a",), "removed")]


def test_cycles_and_long_chains_end():
    def loop(rate):
        a, b = nnx.Module(), nnx.Module()
        a.b, b.a, b.rate = b, a, rate
        return a

    assert not nnx.diff(loop(1), loop(1))
    assert str(nnx.diff(loop(1), loop(2))) == "b.rate: 1 became 2"
    other = loop(1)
    other.b.a = other.b
    assert str(nnx.diff(loop(1), other)) == "b.a: what is at '<root>' became what is at 'b'"
    long = chain(nnx, 5_000)
    changed = nnx.clone(long)
    changed.mark = 1
    assert str(nnx.diff(long, changed)) == "mark: 0 became 1"


@pytest.mark.parametrize(
    ("before", "after", "largest", "shown"),
    [
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), None, None),
        (np.array([1.0, 2.0]), np.array([3.0, np.nan]), np.nan, (2.0, np.nan)),
        (np.array([np.inf, 1]), np.array([np.inf, 2]), 1.0, (1.0, 2.0)),
        (np.array([np.inf]), np.array([-np.inf]), np.inf, (np.inf, -np.inf)),
        (np.array([True, False]), np.array([True, True]), 1.0, (False, True)),
        (np.array([200], "uint8"), np.array([100], "uint8"), 100.0, (200, 100)),
        (np.array([1 + 1j]), np.array([1 - 2j]), 3.0, (1 + 1j, 1 - 2j)),
        (np.zeros((0, 2)), np.zeros((0, 2)), None, None),
        (jnp.array(1.0), jnp.array(1.5), 0.5, (1.0, 1.5)),
        (jnp.array([1.0], "bfloat16"), jnp.array([1.5], "bfloat16"), 0.5, (1.0, 1.5)),
    ],
)
def test_the_largest_difference(before, after, largest, shown):
    found = nnx.diff(nnx.Param(before), nnx.Param(after))
    if largest is None:
        assert not found
        return
    (entry,) = found
    assert entry.kind == "value" and entry.path == ()
    np.testing.assert_equal([entry.largest, entry.before, entry.after], [largest, *shown])


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (nnx.Variable(1), nnx.Variable(3), "<root>: values differ by up to 2 (1 became 3)"),
        (
            nnx.Variable({"x": jnp.ones(2), "n": 1}),
            nnx.Variable({"x": jnp.zeros(2), "n": 1}),
            "x: values differ by up to 1 (at [0]: 1 became 0)",
        ),
        (nnx.Variable("s"), nnx.Variable(None), "<root>: 's' became None"),
        (nnx.Variable(1), nnx.Variable(jnp.ones(2)), "<root>: 1 became float32[2]"),
        ([jnp.ones(2), {"a": 1}], (jnp.ones(2),), "<root>: list became tuple"),
        ([jnp.ones(2), {"a": 1}], [jnp.ones(2), {"a": 2}], "1.a: 1 became 2"),
        (nnx.Param(1), 3, "<root>: Param became an array"),
    ],
)
def test_pytrees_and_values_that_are_no_arrays(before, after, text):
    assert str(nnx.diff(before, after)) == text


def test_what_has_no_values_is_compared_by_structure():
    model, other = Item(), Item()
    other.rate = 0.1
    other.w[...] = jnp.zeros((2, 3))
    assert [e.kind for e in nnx.diff(nnx.graphdef(model), other)] == ["setting"]
    abstract = nnx.eval_shape(Item)
    assert not nnx.diff(abstract, model)
    model.array.delete()
    assert not nnx.diff(abstract, model)
    texts = []

    @nnx.jit
    def step(item):
        texts.append(str(nnx.diff(item, model)))

    step(Item())
    assert texts == ["no differences"]


def test_an_object_that_cannot_be_traversed_is_a_difference():
    model = nnx.Module()
    model.items = []
    model.items.append(jnp.ones(2))
    (entry,) = nnx.diff(model, Item())
    assert entry.kind == "unreadable" and entry.path == ()
    assert str(entry).startswith(
        "<root>: ValueError: Found unexpected data on value of type 'list'"
    )
    assert str(entry).endswith("became Item")
    assert nnx.diff(Item(), object.__new__(nnx.Param))


def test_values_that_cannot_be_shown_or_compared():
    class Odd:
        __hash__ = None

        def __init__(self, number):
            self.number = number

        def __eq__(self, other):
            raise RuntimeError("no comparison")

        def __repr__(self):
            raise RuntimeError("no text")

    def made(number):
        return nnx.Dict(w=nnx.Param(jnp.ones(2), note=Odd(number)), odd=Odd(number))

    odd = "<Odd: RuntimeError while it was shown>"
    assert not nnx.diff(made(1), made(1))
    assert str(nnx.diff(made(1), made(2))) == (
        f"odd: {odd} became {odd}\nw: note={odd} became note={odd}"
    )
