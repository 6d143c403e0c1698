"""`diff`: nothing for clones, exactly the edits that were made, and never an exception."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlite as nnx
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


def add(item):
    item.new = nnx.Dict(deep=nnx.Param(1.0))
    return ("new",), "added", None, nnx.Dict


def remove(item):
    del item.inner
    return ("inner",), "removed", nnx.Dict, None


def retype(item):
    item.w = nnx.BatchStat(item.w[...])
    return ("w",), "retyped", nnx.Param, nnx.BatchStat


def reshape(item):
    item.array = jnp.ones((3, 1))
    return ("array",), "shape", "float32[3]", "float32[3,1]"


def cast(item):
    item.pair[0].set_value(jnp.ones(2, "float16"))
    return ("pair", 0), "dtype", "float32[2]", "float16[2]"


def untie(item):
    item.tied = nnx.BatchStat(item.stat[...])
    return ("tied",), "shared", ("stat",), None


def tie(item):
    item.w = item.stat
    return ("w",), "shared", None, ("stat",)


def set_rate(item):
    item.rate = 1
    return ("rate",), "setting", 0.5, 1


def set_item(item):
    item.pair[1] = "three"
    return ("pair", 1), "setting", 3, "three"


def set_metadata(item):
    item.w.set_metadata(tag="b", note=1)
    return ("w",), "metadata", {"tag": "a"}, {"tag": "b", "note": 1}


def write(item):
    item.w[1, 2] = 7.5
    return ("w",), "value", 5.0, 7.5


def write_key(item):
    item.key[...] = jax.random.key(3)
    return ("key",), "value", 0, 3


EDITS = (
    add, remove, retype, reshape, cast, untie, tie, set_rate, set_item, set_metadata, write,
    write_key, None,
)  # fmt: skip


@given(st.lists(st.sampled_from(EDITS), max_size=6))
def test_exactly_the_edits_are_named(edits):
    before = nnx.List([Item() for _ in edits])
    after = nnx.clone(before)
    assert not nnx.diff(before, after)
    wanted = []
    for number, edit in enumerate(edits):
        if edit is not None:
            path, *rest = edit(after[number])
            wanted.append(((number, *path), *rest))
    found = nnx.diff(before, after)
    shown = [(e.path, e.kind, _relative(e, e.before), _relative(e, e.after)) for e in found]
    assert shown == wanted
    assert len(found) == len(wanted) == len(str(found).splitlines()) - (not wanted)
    assert bool(found) == bool(wanted)
    backwards = nnx.diff(after, before)
    assert {e.path for e in backwards} == {e.path for e in found}


def _relative(entry, side):
    return side[1:] if entry.kind == "shared" and side else side


@given(roots)
def test_a_clone_does_not_differ(root):
    assert not nnx.diff(root, nnx.clone(root))
    assert not nnx.diff(nnx.state(root), nnx.state(nnx.clone(root)))


@given(roots, roots)
def test_definitions_differ_exactly_if_there_is_a_difference(a, b):
    definitions = nnx.graphdef(a), nnx.graphdef(b)
    assert bool(compare(*definitions)) == (definitions[0] != definitions[1])
    assert bool(nnx.diff(*definitions)) == bool(compare(*definitions))


def test_the_text_has_a_line_for_each_difference():
    before, after = Item(), Item()
    for edit in (add, remove, retype, reshape, cast, untie, set_rate, set_item):
        edit(after)
    after.key[...] = jax.random.key(3)
    after.stat[0] = 3
    assert (
        str(nnx.diff(before, after))
        == repr(nnx.diff(before, after))
        == (
            "array: float32[3] became float32[3,1]\n"
            "inner: Dict became nothing\n"
            "key: values differ by up to 3 (at [1]: 0 became 3)\n"
            "pair.0: float32[2] became float16[2]\n"
            "pair.1: 3 became 'three'\n"
            "rate: 0.5 became 1\n"
            "stat: values differ by up to 3 (at [0]: 0 became 3)\n"
            "tied: what is at 'stat' became an object of its own\n"
            "w: Param became BatchStat\n"
            "new: nothing became Dict"
        )
    )
    after = Item()
    set_metadata(after)
    write(after)
    found = nnx.diff(before, after)
    assert str(found) == (
        "w: tag='a' became tag='b', note=1\nw: values differ by up to 2.5 (at [1, 2]: 5 became 7.5)"
    )
    assert [(e.kind, e.largest, e.index) for e in found] == [
        ("metadata", None, ()),
        ("value", 2.5, (1, 2)),
    ]
    assert str(nnx.diff(before, before)) == "no differences"


def test_sharing_that_starts_elsewhere_is_no_difference():
    shared = nnx.Param(jnp.ones(2))
    before = nnx.Dict(a=shared, b=shared, c=shared)
    after = nnx.clone(before)
    del after["a"]
    assert [(e.path, e.kind) for e in nnx.diff(before, after)] == [(("a",), "removed")]


def test_cycles_end():
    def loop(rate):
        a, b = nnx.Module(), nnx.Module()
        a.b, b.a, b.rate = b, a, rate
        return a

    assert not nnx.diff(loop(1), loop(1))
    assert str(nnx.diff(loop(1), loop(2))) == "b.rate: 1 became 2"
    other = loop(1)
    other.b.a = other.b
    assert str(nnx.diff(loop(1), other)) == "b.a: what is at '<root>' became what is at 'b'"


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


def test_values_that_are_no_arrays():
    before = nnx.Dict(
        a=nnx.Variable(1), b=nnx.Variable({"x": jnp.ones(2), "n": 1}), c=nnx.Variable("s")
    )
    after = nnx.Dict(
        a=nnx.Variable(3), b=nnx.Variable({"x": jnp.zeros(2), "n": 1}), c=nnx.Variable(None)
    )
    assert str(nnx.diff(before, after)) == (
        "a: values differ by up to 2 (1 became 3)\n"
        "b.x: values differ by up to 1 (at [0]: 1 became 0)\n"
        "c: 's' became None"
    )
    assert str(nnx.diff(nnx.Dict(a=nnx.Variable(1)), nnx.Dict(a=nnx.Variable(jnp.ones(2))))) == (
        "a: 1 became float32[2]"
    )


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


def test_any_pytrees():
    assert str(nnx.diff([jnp.ones(2), {"a": 1}], (jnp.ones(2),))) == "<root>: list became tuple"
    assert str(nnx.diff([jnp.ones(2), {"a": 1}], [jnp.ones(2), {"a": 2}])) == "1.a: 1 became 2"
    assert str(nnx.diff(nnx.Param(1), 3)) == "<root>: Param became an array"


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


def test_many_differences_are_cut_in_the_text_alone():
    before = nnx.List([nnx.Param(jnp.zeros(())) for _ in range(MAX_LINES + 7)])
    after = nnx.List([nnx.Param(jnp.ones(())) for _ in range(MAX_LINES + 7)])
    found = nnx.diff(before, after)
    assert len(found) == len(found.entries) == MAX_LINES + 7
    assert str(found).splitlines()[-1] == "... 7 more differences"


def test_a_chain_of_ten_thousand_modules():
    def chain(end):
        root = here = nnx.Module()
        for _ in range(10_000):
            here.next = nnx.Module()
            here = here.next
        here.rate = end
        return root

    (entry,) = nnx.diff(chain(1), chain(2))
    assert len(entry.path) == 10_001 and (entry.before, entry.after) == (1, 2)


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
