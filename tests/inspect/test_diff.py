"""`diff`: nothing for clones, exactly the edits that were made, and never an exception."""

import jax
import jax.numpy as jnp
import numpy as np
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


KEY, HALF = jax.random.key(3), jnp.ones(2, "float16")
EDITS = {
    "array: float32[3] became float32[3,1]": ("shape", "item.array = jnp.ones((3, 1))"),
    "inner: Dict became nothing": ("removed", "del item.inner"),
    "key: values differ by up to 3 (at [1]: 0 became 3)": ("value", "item.key.set_value(KEY)"),
    "pair.0: float32[2] became float16[2]": ("dtype", "item.pair[0].set_value(HALF)"),
    "pair.1: 3 became 'three'": ("setting", "item.pair[1] = 'three'"),
    "rate: 0.5 became 1": ("setting", "item.rate = 1"),
    "tied: what is at 'stat' became an object of its own": (
        "shared",
        "item.tied = item.stat.copy()",
    ),
    "w: an object of its own became what is at 'stat'": ("shared", "item.w = item.stat"),
    "w: Param became BatchStat": ("retyped", "item.w = nnx.BatchStat(item.w[...])"),
    "w: tag='a' became tag='b', note=1": ("metadata", "item.w.set_metadata(tag='b', note=1)"),
    "w: values differ by up to 2.5 (at [1, 2]: 5 became 7.5)": ("value", "item.w[1, 2] = 7.5"),
    "new: nothing became Dict": ("added", "item.new = nnx.Dict(deep=nnx.Param(1.0))"),
    "nothing": (None, "pass"),
}
"""By its text, each edit of an `Item`, and the kind of the difference that it makes."""


@given(st.lists(st.sampled_from([*EDITS]), max_size=6))
def test_exactly_the_edits_are_named(texts):
    before = nnx.List([Item() for _ in texts])
    after = nnx.clone(before)
    assert not nnx.diff(before, after) and str(nnx.diff(before, after)) == "no differences"
    wanted, lines = [], []
    for number, text in enumerate(texts):
        kind, edit = EDITS[text]
        exec(edit, {**globals(), "item": after[number]})
        if kind is not None:
            names = text.partition(":")[0].split(".")
            path = (number, *(int(name) if name.isdigit() else name for name in names))
            wanted.append((path, kind))
            lines.append(f"{number}.{text}".replace("'stat'", f"'{number}.stat'"))
    found = nnx.diff(before, after)
    assert [(e.path, e.kind) for e in found] == wanted
    assert str(found) == repr(found) == ("\n".join(lines) or "no differences")
    assert bool(found) == bool(wanted) and len(found) == len(wanted)
    backwards = nnx.diff(after, before)
    assert {e.path for e in backwards} == {e.path for e in found}


def test_a_difference_has_both_sides_its_size_and_its_index():
    (long,) = nnx.diff(*(nnx.Dict(n=np.array([1, 2**53 + i])) for i in range(2)))
    assert (long.after, long.largest, long.index) == (2**53 + 1, 1, (1,))
    before, after = Item(), Item()
    after.w[1, 2], after.new, after.tied = 7.5, nnx.Dict(), after.w
    after.w.set_metadata(tag="b")
    assert [(e.before, e.after, e.largest, e.index) for e in nnx.diff(before, after)] == [
        (("stat",), None, None, ()),
        ({"tag": "a"}, {"tag": "b"}, None, ()),
        (5.0, 7.5, 2.5, (1, 2)),
        (None, nnx.Dict, None, ()),
    ]
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


def test_the_largest_difference():
    nan, inf = np.nan, np.inf
    for before, after, dtype, largest, shown in (
        ([1.0, nan], [1.0, nan], None, None, None),
        ([1.0, 2.0], [3.0, nan], None, nan, (2.0, nan)),
        ([inf, 1], [inf, 2], None, 1.0, (1.0, 2.0)),
        ([inf], [-inf], None, inf, (inf, -inf)),
        ([True, False], [True, True], None, 1.0, (False, True)),
        ([200], [100], "uint8", 100.0, (200, 100)),
        ([1 + 1j], [1 - 2j], None, 3.0, (1 + 1j, 1 - 2j)),
        ([], [], None, None, None),
        (1.0, 1.5, None, 0.5, (1.0, 1.5)),
        ([1.0], [1.5], jnp.bfloat16, 0.5, (1.0, 1.5)),
    ):
        pair = [nnx.Param(np.array(side, dtype)) for side in (before, after)]
        entries = [(e.kind, e.path, e.largest, e.before, e.after) for e in nnx.diff(*pair)]
        np.testing.assert_equal(entries, [("value", (), largest, *shown)] if shown else [])


def test_pytrees_and_values_that_are_no_arrays():
    tree = {"x": jnp.ones(2), "n": 1}
    for before, after, text in (
        (nnx.Variable(1), nnx.Variable(3), "<root>: values differ by up to 2 (1 became 3)"),
        (
            nnx.Variable(tree),
            nnx.Variable({**tree, "x": jnp.zeros(2)}),
            "x: values differ by up to 1 (at [0]: 1 became 0)",
        ),
        (nnx.Variable("s"), nnx.Variable(None), "<root>: 's' became None"),
        (nnx.Variable(1), nnx.Variable(jnp.ones(2)), "<root>: 1 became float32[2]"),
        (nnx.Variable(1), nnx.Variable(1.0), "<root>: 1 became 1.0"),
        (jnp.full(2, 1.0), jnp.ones(2), "<root>: weakly typed float32[2] became float32[2]"),
        (np.array(["a", "b"]), np.array(["a", "c"]), "<root>: 'b' became 'c'"),
        (np.array([1, "b"], object), np.array([1, 3], object), "<root>: 'b' became 3"),
        ([tree], (tree,), "<root>: list became tuple"),
        ([tree, {"a": 1}], [tree, {"a": 2}], "1.a: 1 became 2"),
        (nnx.Param(1), 3, "<root>: Param became an array"),
    ):
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
        assert nnx.diff(other, model)  # of values, with a key
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

    made = lambda n: nnx.Dict(w=nnx.Param(jnp.ones(2), note=Odd(n)), odd=Odd(n))
    odd = "<Odd: RuntimeError while it was shown>"
    assert not nnx.diff(made(1), made(1)) and nnx.diff(nnx.Variable(10**400), nnx.Variable(0))
    assert str(nnx.diff(made(1), made(2))) == (
        f"odd: {odd} became {odd}\nw: note={odd} became note={odd}"
    )
