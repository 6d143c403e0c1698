"""The text form: what it shows, what it shortens, and that nothing makes it fail."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxlite._base.errors import TEXT_DEPTH
from nnxlite._base.text import (
    MAX_ENTRIES,
    MAX_LINES,
    Atom,
    Entry,
    Text,
    clip,
    count_and_bytes,
    human_bytes,
    short,
    text_of,
    totals_text,
)
from nnxlite.graph._functional import split, state
from nnxlite.objects._containers import Dict, List
from nnxlite.objects._module import Module
from nnxlite.variables._kinds import BatchStat, Param
from nnxlite.variables._variable import Variable


class Linear(Module):
    def __init__(self, din=2, dout=3):
        self.kernel = Param(jnp.ones((din, dout)))
        self.bias = Param(jnp.zeros(dout))
        self.dtype = jnp.float32
        self.act = jax.nn.relu
        self._hidden = 1


class Block(Module):
    def __init__(self):
        self.linear = Linear()
        self.mean = BatchStat(jnp.zeros(3), tag="running")
        self.rate = 0.5


def lines(text):
    return [line.strip() for line in text.splitlines()]


def test_a_module_shows_kinds_shapes_dtypes_counts_and_bytes():
    assert (
        repr(Block())
        == """\
Block( # Param: 9 (36 B), BatchStat: 3 (12 B), Total: 12 (48 B)
  linear=Linear( # Param: 9 (36 B)
    kernel=Param( # 6 (24 B)
      value=Array(shape=(2, 3), dtype=float32)
    ),
    bias=Param( # 3 (12 B)
      value=Array(shape=(3,), dtype=float32)
    ),
    dtype=float32,
    act=<function relu>
  ),
  mean=BatchStat( # 3 (12 B)
    value=Array(shape=(3,), dtype=float32),
    tag='running'
  ),
  rate=0.5
)"""
    )


def test_a_variable_alone_shows_few_elements_by_value():
    assert repr(Param(jnp.array([[1.5, -2.0], [0.0, 4.0]]))) == (
        "Param( # 4 (16 B)\n  value=Array([[1.5, -2.], [0., 4.]], dtype=float32)\n)"
    )


def test_values_that_are_no_arrays():
    assert repr(Variable(3)) == "Variable(\n  value=3\n)"
    assert repr(Param({"a": jnp.ones(3)})) == (
        "Param( # 3 (12 B)\n  value={'a': Array([1., 1., 1.], dtype=float32)}\n)"
    )
    assert "ShapeDtypeStruct(shape=(2, 3), dtype=bfloat16)" in repr(
        Param(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16))
    )
    assert "# 6 (12 B)" in repr(Param(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)))


def test_empty_objects_take_one_line():
    assert [repr(Module()), repr(List()), repr(Dict())] == ["Module()", "List([])", "Dict({})"]


def test_containers_of_the_library():
    text = repr(List([Param(jnp.ones(2)), 3]))
    assert lines(text)[0] == "List([ # Param: 2 (8 B)"
    assert lines(text)[-2:] == ["3", "])"]
    assert lines(repr(Dict(a=Param(jnp.ones(2)))))[1] == "'a': Param( # 2 (8 B)"


def test_sharing_is_shown_by_the_path_of_the_first():
    model = Module()
    model.layers = List([Linear(), Linear()])
    model.last = model.layers[0]
    model.tied = model.layers[1].kernel
    shown = lines(repr(model))
    assert "last=<shared: layers.0>," in shown
    assert "tied=<shared: layers.1.kernel>" in shown
    assert shown[0] == "Module( # Param: 18 (72 B)"  # each Variable counts once


def test_cycles_end():
    a, b = Module(), Module()
    a.b, b.a, b.own = b, a, b
    assert lines(repr(a)) == [
        "Module(",
        "b=Module(",
        "a=<shared: self>,",
        "own=<shared: b>",
        ")",
        ")",
    ]


def test_plain_containers_stay_on_one_line_where_they_fit():
    model = Module()
    model.sizes = (1, 2, 3)
    model.single = ("x",)
    model.table = {"relu": jax.nn.relu, "n": None}
    model.fn = functools.partial(jnp.sum, axis=1)
    model.wide = ["a" * 40, "b" * 40]
    assert lines(repr(model))[1:] == [
        "sizes=(1, 2, 3),",
        "single=('x',),",
        "table={'relu': <function relu>, 'n': None},",
        "fn=partial(<function sum>, axis=1),",
        "wide=[",
        f"'{'a' * 40}',",
        f"'{'b' * 40}'",
        "]",
        ")",
    ]


def test_plain_containers_of_objects_are_opened():
    model = Module()
    model.pair = (Linear(), jnp.ones(3))
    model.one = (Linear(),)
    shown = lines(repr(model))
    assert "pair=(" in shown
    assert "Array(shape=(3,), dtype=float32)" in shown
    assert shown[-3:] == ["),", ")", ")"]  # a tuple of one keeps its comma


def test_long_lists_of_numbers_are_cut():
    assert text_of({"ids": list(range(1000))}) == "{'ids': [0, 1, 2, 3, 4, 5, ... 994 more]}"


def test_named_tuples_and_dataclasses_show_their_fields():
    Point = collections.namedtuple("Point", ["x", "y"])

    @dataclasses.dataclass(frozen=True)
    class Config:
        width: int
        act: object
        secret: int = dataclasses.field(default=0, repr=False)

    @dataclasses.dataclass
    class Loud:
        x: int

        def __repr__(self):
            return "loud!"

    assert text_of(Point(1, jnp.ones(9))) == "Point(x=1, y=Array(shape=(9,), dtype=float32))"
    config = Config(3, jax.nn.relu)
    one = "Config(width=3, act=<function relu>)"
    assert text_of([config, config]) == f"[{one}, {one}]"
    assert text_of([Loud(1)]) == "[loud!]"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (jnp.float32, "float32"),
        (jnp.dtype("bfloat16"), "bfloat16"),
        (Linear, "Linear"),
        (jax.nn.gelu, "<function gelu>"),
        (max, "<function max>"),
        (np.float32(2.5), repr(np.float32(2.5))),
        (np.ones(2), "ndarray([1., 1.], dtype=float64)"),
        (np.ones(20), "ndarray(shape=(20,), dtype=float64)"),
        (np.array([None]), "ndarray(shape=(1,), dtype=object)"),
        (jnp.zeros((0, 3)), "Array(shape=(0, 3), dtype=float32)"),
        (jnp.array([[1, 20], [300, 4]]), "Array([[1, 20], [300, 4]], dtype=int32)"),
        (jax.random.key(0), "Array(shape=(), dtype=key<fry>)"),
        (jax.lax.Precision.HIGHEST, "Precision.HIGHEST"),
        ("a\nb", "'a\\nb'"),
        (Atom("as it is"), "as it is"),
    ],
    ids=lambda v: str(v)[:12] if isinstance(v, str) else type(v).__name__,
)
def test_single_values(value, shown):
    assert short(value) == shown


def test_methods_and_addresses():
    model = Linear()
    model.__class__.run = lambda self: None
    assert short(model.run).startswith("<method ")
    assert "0x" not in short(object())
    assert short(object()) == "<object object>"


def test_arrays_that_cannot_be_read_are_shown_by_shape():
    x = jnp.ones(2)
    x.delete()
    assert "Array(shape=(2,), dtype=float32)" in repr(Param(x))

    seen = []

    @jax.jit
    def f(x):
        seen.append(repr(Param(x)))
        return x

    f(jnp.ones(2))
    assert "Tracer(shape=(2,), dtype=float32)" in seen[0]


def test_printing_a_concrete_variable_inside_jit_stages_nothing():
    held, key = Param(jnp.ones(2)), Param(jax.random.key(0))

    def f(x):
        repr((held, key))
        return x

    assert len(jax.make_jaxpr(f)(1.0).eqns) == 0
    assert "1., 1." in repr(held)


def test_states_show_levels_as_plain_braces():
    shown = text_of(split(Block())[1])
    assert lines(shown)[-1] == "})"
    assert "'linear': {" in lines(shown)
    assert "'bias': Param( # 3 (12 B)" in lines(shown)
    assert "value=Array([0., 0., 0.], dtype=float32)" in lines(shown)


def test_graph_definitions_show_kinds_in_place_of_values():
    model = Module()
    model.a = Linear()
    model.b = model.a
    model.me = model
    model.stat = BatchStat(jnp.ones(3), tag="x")
    model.pair = [jnp.ones(2), 4]
    assert (
        repr(split(model)[0])
        == """\
GraphDef[Module]( # 2 objects, 4 leaves
  a=Linear(
    bias=Param,
    kernel=Param,
    act=<function relu>,
    dtype=float32
  ),
  b=<shared: a>,
  me=<shared: self>,
  pair=[Array, 4],
  stat=BatchStat(tag='x')
)"""
    )


def test_graph_definitions_of_other_roots():
    assert repr(split(Param(jnp.ones(2)))[0]) == "GraphDef[Param]()"
    assert lines(repr(split((Module(),))[0])) == [
        "GraphDef[tuple]( # 1 object, 0 leaves",
        "Module()",
        ")",
    ]


def test_a_repr_on_the_way_may_come_back_to_an_object_being_printed():
    class Helper:
        def __init__(self, owner):
            self.owner = owner

        def __repr__(self):
            return f"Helper({self.owner!r})"

    model = Module()
    model.inner = Module()
    model.inner.helper = Helper(model)
    assert "Helper(Module(...))" in repr(model)


def test_a_chain_of_ten_thousand_modules():
    root = here = Module()
    for _ in range(10_000):
        here.next = Module()
        here = here.next
    here.w = Param(jnp.ones(3))
    text = repr(root)
    assert lines(text)[0] == "Module( # Param: 3 (12 B)"  # what is not shown is still counted
    assert "next=Module(...) # Param: 3 (12 B)" in lines(text)
    assert len(text.splitlines()) == 2 * TEXT_DEPTH.get() + 1
    assert "next=Module(...)" in repr(split(root)[0])


def test_a_list_that_holds_itself():
    loop = [1]
    loop.append(loop)
    assert text_of(loop) == "[1, <shared: self>]"


def test_very_long_levels_and_very_long_texts_are_cut():
    wide = List([Module() for _ in range(MAX_ENTRIES + 5)])
    assert lines(repr(wide))[-2:] == ["... 5 more", "])"]
    tall = List([List([List([0, Linear()]) for _ in range(30)]) for _ in range(30)])
    text = repr(tall)
    assert len(text.splitlines()) < MAX_LINES + 100
    assert "List([...]), # Param: 270 (1.1 KB)" in lines(text)
    assert lines(text)[0] == "List([ # Param: 8,100 (32.4 KB)"


def test_any_object_can_take_part():
    class Tree:
        def __nnx_text__(self):
            return Text("Tree", entries=(Entry("leaf", "leaf=", Param(jnp.ones(2))),), totals=True)

    assert lines(text_of(Tree()))[0] == "Tree( # Param: 2 (8 B)"


def test_small_helpers():
    assert [human_bytes(n) for n in (0, 999, 1000, 999_949, 999_960, 10**15)] == [
        "0 B",
        "999 B",
        "1.0 KB",
        "999.9 KB",
        "1.0 MB",
        "1,000.0 TB",
    ]
    assert totals_text({}) == ""
    assert totals_text({"A": (1, 4)}) == "A: 1 (4 B)"
    assert totals_text({"A": (1, 4), "B": (1, 4)}).endswith("Total: 2 (8 B)")
    assert clip("x" * 10, 10) == "x" * 10
    assert clip("x" * 11, 10) == "x" * 7 + "..."
    assert count_and_bytes([jnp.ones(3, jnp.bfloat16), 2, None]) == (3, 6)
    assert count_and_bytes(jax.random.key(0)) == (1, 8)


def test_totals_come_in_the_order_of_first_appearance():
    model = Module()
    model.stat = BatchStat(jnp.ones(1))
    model.layers = List([Linear(), BatchStat(jnp.ones(1))])
    assert lines(repr(model))[0].startswith("Module( # BatchStat: 2 (8 B), Param: 9")
    assert text_of(state(model)) == repr(state(model))
