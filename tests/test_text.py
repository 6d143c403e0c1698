"""The two texts of an object: the outline that `print` shows, and the unabridged `repr`."""

import collections
import dataclasses
import doctest
import functools
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._base import outline, text
from nnxlite._base.errors import TEXT_DEPTH


class Linear(nnx.Module):
    def __init__(self, din=2, dout=3):
        self.kernel = nnx.Param(jnp.ones((din, dout)))
        self.bias = nnx.Param(jnp.zeros(dout))
        self.dtype = jnp.float32
        self.act = jax.nn.relu
        self._hidden = 1


class Base(nnx.Module):
    def __init__(self, rate=0.5, sizes=(1, 2), act=jax.nn.relu, flag=1):
        self.rate, self.sizes, self.act, self.flag = rate, sizes, act, flag
        self.nothing = None
        self._hidden = 1


class Derived(Base):
    def __init__(self, rate=0.25, **others):
        super().__init__(rate, **others)


@dataclasses.dataclass
class Plain(nnx.Module):
    layer: Linear
    rate: float = 0.1


@nnx.dataclass
class Ours(Plain):
    rate: float = 0.2


class Frozen(nnx.Module, frozen=True):
    weight: jax.Array
    act: object = jax.nn.relu


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    act: object
    secret: int = dataclasses.field(default=0, repr=False)


@dataclasses.dataclass
class Loud:
    def __repr__(self):
        return "loud!"


class LoudModule(Loud, nnx.Module): ...


class Drawn(nnx.reprlib.Representable):
    def __init__(self, *parts):
        self.parts = parts

    def __nnx_repr__(self):
        yield from self.parts


class Described(nnx.Module):
    def __nnx_repr__(self):
        yield nnx.reprlib.Object("Mine")


class Tree:
    def __nnx_text__(self):
        weight = text.Entry("w", "w=", nnx.Param(jnp.ones(2)))
        return text.Text("Tree", entries=(weight,), totals=True)


class Owner:
    def __init__(self, owner):
        self.owner = owner

    def __repr__(self):
        return f"Owner({self.owner}, {self.owner!r})"


class Strict(nnx.Module):
    def __getattr__(self, name):
        raise RuntimeError(name)


class Odd:
    """Nothing can be asked of it."""

    shape = property(lambda self: 1 / 0)
    __repr__ = __eq__ = lambda self, *other: 1 / 0
    __hash__ = None


def made(cls=nnx.Module, **attributes):
    """An object with these attributes."""
    module = cls()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def deleted(shape):
    array = jnp.ones(shape)
    array.delete()
    return array


SHOWN = r"""
## a module shows kinds, shapes, dtypes, counts and bytes, in the order of first appearance
>>> block = made(mean=nnx.BatchStat(jnp.zeros(3), tag="running"), linear=Linear(), rate=0.5)
>>> block
Module( # BatchStat: 3 (12 B), Param: 9 (36 B), Total: 12 (48 B)
  mean=BatchStat( # 3 (12 B)
    value=Array(shape=(3,), dtype=float32),
    tag='running'
  ),
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
  rate=0.5
)
>>> print(block)
Module(rate=0.5)
  mean: BatchStat(tag='running') float32[3]
  linear: Linear(dtype=float32, act=relu)
    kernel: Param float32[2,3]
    bias: Param float32[3]
BatchStat: 3 (12 B), Param: 9 (36 B), Total: 12 (48 B)

## a model of hundreds of lines is one screen
>>> rngs = nnx.Rngs(0)
>>> attention = partial(nnx.MultiHeadAttention, 4, 32, decode=False, dropout_rate=0.1)
>>> layers = [attention(rngs=rngs) for _ in range(2)]
>>> model = made(embed=nnx.Embed(65, 32, rngs=rngs), blocks=nnx.List(layers), context=64)
>>> model.norm, model.head = nnx.LayerNorm(32, rngs=rngs), model.embed
>>> print(model)
Module(context=64)
  embed: Embed(num_embeddings=65, features=32, dtype=float32)
    embedding: Param float32[65,32]
  blocks: List
    0-1: 2 x MultiHeadAttention(num_heads=4, in_features=32, ... decode=False, head_dim=8)
      query, key, value: 3 x LinearGeneral(in_features=(32,), out_features=(4, 8))
        kernel: Param float32[32,4,8]
        bias: Param float32[4,8]
      out: LinearGeneral(in_features=(4, 8), out_features=(32,), axis=(-2, -1))
        kernel: Param float32[4,8,32]
        bias: Param float32[32]
      rngs: RngStream(tag='default')
        key: RngKey(tag='default') key<fry>[]
        count: RngCount(tag='default') uint32[] = 0
  norm: LayerNorm(num_features=32)
    scale: Param float32[32]
    bias: Param float32[32]
  head: shared with `embed`
Param: 10,592 (42.4 KB), RngState: 4 (24 B), Total: 10,596 (42.4 KB)
>>> f"{model}" == str(model), len(repr(model).splitlines())
(True, 282)

## Variables, objects and containers alone; few elements are shown by value
>>> nnx.Param(jnp.array([[1.5, -2.0], [0.0, 4.0]]))
Param( # 4 (16 B)
  value=Array([[1.5, -2.], [0., 4.]], dtype=float32)
)
>>> print(nnx.Param({"a": jnp.ones(3), "b": 3}))
Param( # 3 (12 B)
  value={'a': Array([1., 1., 1.], dtype=float32), 'b': 3}
)
>>> nnx.Param(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16))
Param( # 6 (12 B)
  value=ShapeDtypeStruct(shape=(2, 3), dtype=bfloat16)
)
>>> nnx.Module(), nnx.List(), nnx.Dict()
(Module(), List([]), Dict({}))
>>> nnx.List([nnx.Dict(a=nnx.Param(jnp.ones(9))), 3])
List([ # Param: 9 (36 B)
  Dict({ # Param: 9 (36 B)
    'a': Param( # 9 (36 B)
      value=Array(shape=(9,), dtype=float32)
    )
  }),
  3
])

## sharing and cycles are paths, and each Variable counts once
>>> model = made(layers=nnx.List([nnx.Dict(w=nnx.Param(jnp.ones(2))), nnx.Module()]))
>>> model.tied, model.rest, model.me = model.layers[0].w, [model.layers[1]] * 3, model
>>> loop = [1]
>>> loop.append(loop)
>>> model
Module( # Param: 2 (8 B)
  layers=List([ # Param: 2 (8 B)
    Dict({ # Param: 2 (8 B)
      'w': Param( # 2 (8 B)
        value=Array(shape=(2,), dtype=float32)
      )
    }),
    Module()
  ]),
  tied=<shared: layers.0.w>,
  rest=[<shared: layers.1>, <shared: layers.1>, <shared: layers.1>],
  me=<shared: self>
)
>>> print(model)
Module
  layers: List
    0: Dict
      w: Param float32[2]
    1: Module
  tied: shared with `layers.0.w`
  rest: list
    0-2: 3 x shared with `layers.1`
  me: shared with `self`
Param: 2 (8 B)
>>> text_of(loop)
'[1, <shared: self>]'

## plain containers stay on one line where they fit
>>> made(sizes=(1, 2), single=("x",), table={"relu": jax.nn.relu, "n": None}, one=(nnx.Module(),))
Module(
  sizes=(1, 2),
  single=('x',),
  table={'relu': <function relu>, 'n': None},
  one=(Module(),)
)
>>> print(text_of([["a" * 40, "b" * 40], (Linear, nnx.Dict(a=1))]))
[
  [
    'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',
    'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb'
  ],
  (
    Linear,
    Dict({
      'a': 1
    })
  )
]
>>> print(text_of({"ids": list(range(1000)), "fn": partial(jnp.sum, axis=1)}))
{'ids': [0, 1, 2, 3, 4, 5, ... 994 more], 'fn': partial(<function sum>, axis=1)}
>>> point = namedtuple("Point", "x y")(1, jnp.ones(9))
>>> print(text_of(point), text_of([Config(3, jax.nn.relu)] * 2), sep="\n")
Point(x=1, y=Array(shape=(9,), dtype=float32))
[Config(width=3, act=<function relu>), Config(width=3, act=<function relu>)]

## containers of data, and names in any alphabet
>>> model = made(größe={"ключ": (jnp.ones((2, 3)), 3, "x"), 5: jax.random.key(0)})
>>> model.層 = nnx.Dict(重み=nnx.Param({"a": jnp.ones(2), "n": 1}))
>>> print(model)
Module
  größe: dict
    ключ: tuple
      0: float32[2,3]
      1: 3
      2: 'x'
    5: key<fry>[]
  層: Dict
    重み: Param {'a': float32[2], 'n': 1}
Param: 2 (8 B)

## single values
>>> show(jnp.float32, jnp.dtype("bfloat16"), Linear, jax.nn.gelu, max, Linear().train, object())
float32
bfloat16
Linear
<function gelu>
<function max>
<method Module.train>
<object object>
>>> show(np.float32(2.5), np.ones(2), np.ones(20), np.array([None]), jax.random.key(0))
np.float32(2.5)
ndarray([1., 1.], dtype=float64)
ndarray(shape=(20,), dtype=float64)
ndarray(shape=(1,), dtype=object)
Array(shape=(), dtype=key<fry>)
>>> show(jnp.zeros((0, 3)), jnp.array([[1, 20], [300, 4]]), deleted(2))
Array(shape=(0, 3), dtype=float32)
Array([[1, 20], [300, 4]], dtype=int32)
Array(shape=(2,), dtype=float32)
>>> show(jax.lax.Precision.HIGHEST, "a\nb", text.Atom("as it is"))
Precision.HIGHEST
'a\nb'
as it is

## states show levels as braces, definitions show kinds in place of values
>>> model = made(layers=nnx.List([Linear(), Linear()]))
>>> graphdef, state = nnx.split(model)
>>> print(state)
State
  layers:
    0-1: 2 x
      bias: Param float32[3]
      kernel: Param float32[2,3]
Param: 18 (72 B)
>>> state["layers"]
State({ # Param: 18 (72 B)
  0: {
    'bias': Param( # 3 (12 B)
      value=Array([0., 0., 0.], dtype=float32)
    ),
...
  }
})
>>> str(state.flat_state()) == repr(state.flat_state())
True
>>> print(graphdef)
GraphDef[Module]
  layers: List
    0-1: 2 x Linear(act=relu, dtype=float32)
      bias: Param
      kernel: Param
4 objects, 4 leaves
>>> model.me, model.pair, model.layers = model, [jnp.ones(2), 4], model.layers[0]
>>> model.again, model.stat = model.layers, nnx.BatchStat(jnp.ones(3), tag="x")
>>> nnx.graphdef(model)
GraphDef[Module]( # 2 objects, 4 leaves
  again=Linear(
    bias=Param,
    kernel=Param,
    act=<function relu>,
    dtype=float32
  ),
  layers=<shared: again>,
  me=<shared: self>,
  pair=[Array, 4],
  stat=BatchStat(tag='x')
)
>>> nnx.graphdef(nnx.Param(jnp.ones(2))), nnx.graphdef((nnx.Module(),))
(GraphDef[Param](), GraphDef[tuple]( # 1 object, 0 leaves
  Module()
))

## equal neighbours are shown once, without values that they do not share
>>> layers = nnx.List([Linear() for _ in range(5)])
>>> layers[3].act = jax.nn.gelu
>>> print(*[line for line in str(layers).splitlines() if "Linear" in line], sep="\n")
  0-2: 3 x Linear(dtype=float32, act=relu)
  3: Linear(dtype=float32, act=gelu)
  4: Linear(dtype=float32, act=relu)
>>> step = nnx.Variable(jnp.array(3), tag="t")
>>> print(nnx.List([made(gain=nnx.Param(jnp.array(g)), step=nnx.clone(step)) for g in (1.0, 2.0)]))
List
  0-1: 2 x Module
    gain: Param weakly typed float32[]
    step: Variable(tag='t') int32[] = 3
Param: 2 (8 B), Variable: 2 (8 B), Total: 4 (16 B)

## settings are those that are not defaults, and deleted attributes are not there
>>> print(Base(), Base(0.25, (3,), jax.nn.gelu, True), Derived(), Derived(0.5), sep="\n")
Base
Base(rate=0.25, sizes=(3,), act=gelu, flag=True)
Derived
Derived(rate=0.5)
>>> layer = Linear()
>>> del layer.bias, layer.dtype
>>> print(layer)
Linear(act=relu)
  kernel: Param float32[2,3]
Param: 6 (24 B)

## a dataclass shows its tree
>>> print(Plain(Linear(), 0.3))
Plain(rate=0.3)
  layer: Linear(dtype=float32, act=relu)
    kernel: Param float32[2,3]
    bias: Param float32[3]
Param: 9 (36 B)
>>> [str(x).splitlines()[0] for x in (Plain(Linear()), Ours(Linear()), Ours(Linear(), 0.1))]
['Plain', 'Ours', 'Ours(rate=0.1)']
>>> print(Frozen(jnp.ones((2, 3))))
Frozen
  weight: float32[2,3]

## a class with a text of its own keeps it
>>> print(LoudModule(), Described(), text_of([Loud()]), text_of(Tree()), sep="\n")
loud!
Mine()
[loud!]
Tree( # Param: 2 (8 B)
  w=Param( # 2 (8 B)
    value=Array([1., 1.], dtype=float32)
  )
)
>>> Object, Attr = nnx.reprlib.Object, nnx.reprlib.Attr
>>> value = Attr("k", "raw", start="(", end=")", use_raw_value=True)
>>> Drawn(Object(type="Mine", start="<", end=">", comment=" # c"), value)
Mine< # c
  (k=raw)
>
>>> point = Drawn(Object(type="Point"), Attr("x", Drawn(Object("Empty", empty_repr="nothing"))))
>>> made(start=point), nnx.reprlib.get_repr(point) == repr(point), Drawn(Object(Drawn))
(Module(
  start=Point(
    x=Empty(nothing)
  )
), True, Drawn())

## what cannot be shown is said so, and a text within a text ends
>>> bare = object.__new__(nnx.Linear)
>>> print(bare, repr(bare), object.__new__(nnx.Param), repr(nnx.Param(nnx.Rngs(0)))[:8])
Linear Linear() <Param: AttributeError while it was shown> Param( #
>>> abstract = nnx.Param(jax.ShapeDtypeStruct((2, 3), "bfloat16"))
>>> model = made(half=object.__new__(nnx.Param), gone=nnx.Param(deleted(())), abstract=abstract)
>>> model.odd, model.unset = Odd(), bare
>>> print(model)
Module(odd=<Odd: ZeroDivisionError while it was shown>)
  half: <Param: AttributeError while it was shown>
  gone: Param float32[]
  abstract: Param bfloat16[2,3]
  unset: Linear
Param: 7 (16 B)
>>> model
Module( # Param: 7 (16 B)
  half=<Param: AttributeError while it was shown>,
...
  odd=<Odd: ZeroDivisionError while it was shown>,
  unset=Linear()
)
>>> model = nnx.Module()
>>> model.helper = Owner(model)
>>> print(model, repr(model), sep="\n")
Module(helper=Owner(Module(...), Module(...)))
Module(
  helper=Owner(Module(...), Module(...))
)
>>> model = made(Strict, items=nnx.Dict({"two\nlines": nnx.Param(jnp.ones(2))}))
>>> model.twin = model.items["two\nlines"]
>>> print(model)
Strict
  items: Dict
    two\nlines: Param float32[2]
  twin: shared with `items.two\nlines`
Param: 2 (8 B)
>>> outline = nnx.jit(lambda model: print(str(model), repr(model), sep="\n"))
>>> outline(nnx.Dict(count=nnx.Variable(jnp.array(1))))
Dict
  count: Variable int32[]
Variable: 1 (4 B)
Dict({ # Variable: 1 (4 B)
  'count': Variable( # 1 (4 B)
    value=...Tracer(shape=(), dtype=int32, weak_type=True)
  )
})
"""
"""Objects in both texts: a line of a program, and what it prints."""


def show(*values):
    """Print some values, each in a line."""
    print(*map(text.short, values), sep="\n")


SECTIONS = dict(section.split("\n", 1) for section in re.split(r"^## ", SHOWN, flags=re.M)[1:])


@pytest.mark.parametrize("title", SECTIONS)
def test_what_is_shown(title):
    report = io.StringIO()
    names = globals() | {"np": np, "partial": functools.partial, "text_of": text.text_of}
    names |= {"namedtuple": collections.namedtuple}
    parsed = doctest.DocTestParser().get_doctest(SECTIONS[title], names, title, __file__, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    assert runner.run(parsed, out=report.write).failed == 0, report.getvalue()


def test_printing_a_concrete_variable_inside_jit_stages_nothing():
    concrete = nnx.Param(jnp.ones(2)), nnx.Param(jax.random.key(0))
    jaxpr = jax.make_jaxpr(lambda x: (repr(concrete), str(concrete)) and x)(1.0)
    assert not jaxpr.eqns and "1., 1." in repr(concrete)


def test_a_chain_of_ten_thousand_modules_is_cut_and_what_is_not_shown_is_counted():
    root = here = nnx.Module()
    for _ in range(10_000):
        here.next = nnx.Module()
        here = here.next
    here.w = nnx.Param(jnp.ones(3))
    lines = [line.strip() for line in repr(root).splitlines()]
    assert len(lines) == 2 * TEXT_DEPTH.get() + 1 and lines[0] == "Module( # Param: 3 (12 B)"
    assert "next=Module(...) # Param: 3 (12 B)" in lines
    assert "next=Module(...)" in repr(nnx.graphdef(root))
    lines = [line.strip() for line in str(root).splitlines()]
    assert len(lines) == TEXT_DEPTH.get() + 2
    assert lines[-2:] == ["next: Module ...", "Param: 3 (12 B)"]


def test_very_long_levels_and_texts_are_cut():
    wide = repr(nnx.List([nnx.Module() for _ in range(text.MAX_ENTRIES + 5)]))
    assert wide.endswith("\n  ... 5 more\n])")
    tall = nnx.List([nnx.List([nnx.List([0, Linear()]) for _ in range(30)]) for _ in range(30)])
    lines = [line.strip() for line in repr(tall).splitlines()]
    assert len(lines) < text.MAX_LINES + 100
    assert lines[0] == "List([ # Param: 8,100 (32.4 KB)"
    assert "List([...]), # Param: 270 (1.1 KB)" in lines


def sized(numbers):
    """A list whose Variables are all different."""
    return nnx.List([nnx.Param(jax.ShapeDtypeStruct((n,), "int8")) for n in numbers])


def test_ten_thousand_variables_take_few_lines():
    lines = str(nnx.List([nnx.Param(jnp.ones(2)) for _ in range(100)] * 100)).splitlines()
    assert lines[:3] == ["List", "  0-99: 100 x Param float32[2]", "  100: shared with `0`"]
    assert len(lines) == outline.MAX_CHILDREN + 3 and lines[-2] == "  ... 9,851 more"
    models = [made(sizes=sized(range(99)), number=i) for i in range(50)]
    lines = str(nnx.List(models)).splitlines()
    assert len(lines) == outline.MAX_LINES + 2 and lines[-2].endswith(" more lines")
    assert lines[-1] == "Param: 242,550 (242.6 KB)"
    assert str(sized(range(1_000))).splitlines()[-2] == f"  ... {1_000 - outline.MAX_CHILDREN} more"


def test_numbers():
    sizes = (0, 999, 1000, 999_949, 999_960, 10**15)
    expected = ["0 B", "999 B", "1.0 KB", "999.9 KB", "1.0 MB", "1,000.0 TB"]
    assert [text.human_bytes(n) for n in sizes] == expected
    assert text.clip("x" * 10, 10) == "x" * 10 and text.clip("x" * 11, 10) == "x" * 7 + "..."
    assert text.count_and_bytes([jnp.ones(3, jnp.bfloat16), 2, None]) == (3, 6)
    assert text.count_and_bytes(jax.random.key(0)) == (1, 8)
