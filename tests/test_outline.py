"""What `print` shows of a model: a line for each object, equal neighbours once, never an exception."""

from __future__ import annotations

import contextlib
import dataclasses
import io

import jax
import jax.numpy as jnp

import nnxlite as nnx
from nnxlite._base.errors import TEXT_DEPTH
from nnxlite._base.outline import MAX_CHILDREN, MAX_LINES


class Block(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class GPT(nnx.Module):
    def __init__(self, vocabulary, width, heads, layers, context, rngs):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.position = nnx.Param(jnp.zeros((context, width)))
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = self.embed
        self.context = context


OUTLINE = """\
GPT(context=64)
  embed: Embed(num_embeddings=65, features=32, dtype=float32)
    embedding: Param float32[65,32]
  position: Param float32[64,32]
  blocks: List
    0-1: 2 x Block
      norm1: LayerNorm(num_features=32)
        scale: Param float32[32]
        bias: Param float32[32]
      attention: MultiHeadAttention(num_heads=4, in_features=32, qkv_features=32, \
out_features=32, num_kv_heads=4, in_kv_features=32, decode=False, head_dim=8)
        query, key, value: 3 x LinearGeneral(in_features=(32,), out_features=(4, 8))
          kernel: Param float32[32,4,8]
          bias: Param float32[4,8]
        out: LinearGeneral(in_features=(4, 8), out_features=(32,), axis=(-2, -1))
          kernel: Param float32[4,8,32]
          bias: Param float32[32]
      norm2: LayerNorm(num_features=32)
        scale: Param float32[32]
        bias: Param float32[32]
      up: Linear(in_features=32, out_features=128)
        kernel: Param float32[32,128]
        bias: Param float32[128]
      down: Linear(in_features=128, out_features=32)
        kernel: Param float32[128,32]
        bias: Param float32[32]
      dropout: Dropout(rate=0.1)
        rngs: RngStream(tag='default')
          key: RngKey(tag='default') key<fry>[]
          count: RngCount(tag='default') uint32[] = 0
  norm: LayerNorm(num_features=32)
    scale: Param float32[32]
    bias: Param float32[32]
  head: shared with `embed`
Param: 29,600 (118.4 KB), RngState: 4 (24 B), Total: 29,604 (118.4 KB)"""


def gpt(layers):
    return GPT(65, 32, 4, layers, 64, nnx.Rngs(0))


def test_a_model_of_hundreds_of_lines_is_one_screen():
    model = gpt(2)
    assert str(model) == OUTLINE
    assert len(repr(model).splitlines()) > 300  # unabridged, with every setting
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print(model)
    assert printed.getvalue() == OUTLINE + "\n" and f"{model}" == OUTLINE


def test_a_layer_that_differs_divides_its_neighbours():
    layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(5)]
    layers[3].use_bias = False
    assert [line for line in str(nnx.List(layers)).splitlines() if "Linear" in line] == [
        "  0-2: 3 x Linear(in_features=2, out_features=2)",
        "  3: Linear(in_features=2, out_features=2, use_bias=False)",
        "  4: Linear(in_features=2, out_features=2)",
    ]


def test_scalars_have_values_that_neighbours_do_not_share():
    class Gain(nnx.Module):
        def __init__(self, value):
            self.gain = nnx.Param(jnp.array(value))
            self.step = nnx.Variable(jnp.array(3), tag="t")

    assert str(nnx.List([Gain(1.0), Gain(2.0)])) == (
        "List\n"
        "  0-1: 2 x Gain\n"
        "    gain: Param weakly typed float32[]\n"
        "    step: Variable(tag='t') int32[] = 3\n"
        "Param: 2 (8 B), Variable: 2 (8 B), Total: 4 (16 B)"
    )


def test_settings_are_those_that_are_not_defaults():
    class Base(nnx.Module):
        def __init__(self, rate=0.5, sizes=(1, 2), act=jax.nn.relu, flag=1):
            self.rate, self.sizes, self.act, self.flag = rate, sizes, act, flag
            self.nothing = None
            self._hidden = 1

    class Derived(Base):
        def __init__(self, rate=0.25, **others):
            super().__init__(rate, **others)

    assert str(Base()) == "Base"
    assert str(Base(0.25, (3,), jax.nn.gelu, True)) == (
        "Base(rate=0.25, sizes=(3,), act=gelu, flag=True)"
    )
    assert str(Derived()) == "Derived" and str(Derived(0.5)) == "Derived(rate=0.5)"


def test_a_dataclass_module_shows_its_tree():
    @dataclasses.dataclass
    class Plain(nnx.Module):
        layer: nnx.Linear
        rate: float = 0.1

    @nnx.dataclass
    class Ours(Plain):
        rate: float = 0.2

    class Frozen(nnx.Module, frozen=True):
        weight: jax.Array
        act: object = jax.nn.relu

    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    below = [
        "  layer: Linear(in_features=2, out_features=3)",
        "    kernel: Param float32[2,3]",
        "    bias: Param float32[3]",
        "Param: 9 (36 B)",
    ]
    assert str(Plain(layer)).splitlines() == ["Plain", *below]
    assert str(Plain(layer, 0.3)).splitlines() == ["Plain(rate=0.3)", *below]
    assert str(Ours(layer)).splitlines() == ["Ours", *below]
    assert str(Frozen(jnp.ones((2, 3)))) == "Frozen\n  weight: float32[2,3]"


def test_a_class_with_a_repr_of_its_own_keeps_it():
    class Loud(nnx.Module):
        def __repr__(self):
            return "loud!"

    class Described(nnx.Module):
        def __nnx_repr__(self):
            yield nnx.reprlib.Object("Mine")

    assert str(Loud()) == "loud!" and str(Described()) == "Mine()"
    assert str(nnx.Param(jnp.ones(2))) == repr(nnx.Param(jnp.ones(2)))


def test_sharing_and_cycles_are_paths():
    model = nnx.Module()
    model.layers = nnx.List([nnx.Module(), nnx.Module()])
    model.layers[0].w = nnx.Param(jnp.ones(2))
    model.tied = model.layers[0].w
    model.rest = nnx.List([model.layers[1]] * 3)
    model.me = model
    assert str(model).splitlines() == [
        "Module",
        "  layers: List",
        "    0: Module",
        "      w: Param float32[2]",
        "    1: Module",
        "  tied: shared with `layers.0.w`",
        "  rest: List",
        "    0-2: 3 x shared with `layers.1`",
        "  me: shared with `self`",
        "Param: 2 (8 B)",
    ]


def test_containers_of_data_and_names_in_any_alphabet():
    model = nnx.Module()
    model.pair = (nnx.Param(jnp.ones(2)), 3, "x")
    model.größe = {"ключ": jnp.ones((2, 3)), 5: jax.random.key(0)}
    model.層 = nnx.Dict(重み=nnx.Param({"a": jnp.ones(2), "n": 1}))
    assert str(model).splitlines() == [
        "Module",
        "  pair: tuple",
        "    0: Param float32[2]",
        "    1: 3",
        "    2: 'x'",
        "  größe: dict",
        "    ключ: float32[2,3]",
        "    5: key<fry>[]",
        "  層: Dict",
        "    重み: Param {'a': float32[2], 'n': 1}",
        "Param: 4 (16 B)",
    ]


def test_states_and_definitions():
    model = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0)) for _ in range(3)])
    graphdef, state = nnx.split(model)
    assert str(state) == (
        "State\n  0-2: 3 x\n    bias: Param float32[3]\n    kernel: Param float32[2,3]\n"
        "Param: 27 (108 B)"
    )
    assert str(graphdef) == (
        "GraphDef[List]\n  0-2: 3 x Linear(in_features=2, out_features=3)\n    bias: Param\n"
        "    kernel: Param\n4 objects, 6 leaves"
    )
    assert str(nnx.to_flat_state(state)) == repr(nnx.to_flat_state(state))


def test_what_cannot_be_shown_is_said_so():
    class Odd:
        @property
        def shape(self):
            raise RuntimeError("no shape")

        def __repr__(self):
            raise RuntimeError("no text")

        def __eq__(self, other):
            raise RuntimeError("no comparison")

        __hash__ = None

    deleted = jnp.ones(())
    deleted.delete()
    model = nnx.Module()
    model.odd = Odd()
    model.half = object.__new__(nnx.Param)
    model.gone = nnx.Param(deleted)
    model.abstract = nnx.Param(jax.ShapeDtypeStruct((2, 3), "bfloat16"))
    model.unset = nnx.Linear.__new__(nnx.Linear)
    assert str(model).splitlines() == [
        "Module(odd=<Odd: RuntimeError while it was shown>)",
        "  half: <Param: AttributeError while it was shown>",
        "  gone: Param float32[]",
        "  abstract: Param bfloat16[2,3]",
        "  unset: Linear",
        "Param: 7 (16 B)",
    ]
    assert "<Odd: RuntimeError while it was shown>" in repr(model)
    assert "half=<Param: AttributeError while it was shown>" in repr(model)
    half = "<Param: AttributeError while it was shown>"
    assert repr(object.__new__(nnx.Param)) == half == str(object.__new__(nnx.Param))
    bare = object.__new__(nnx.Linear)
    assert str(bare) == "Linear" and repr(bare) == "Linear()"


def test_deleted_attributes_are_not_there():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    del layer.bias, layer.in_features
    assert str(layer) == "Linear(out_features=3)\n  kernel: Param float32[2,3]\nParam: 6 (24 B)"


def test_tracers_are_shown_by_shape():
    texts = []

    @nnx.jit
    def step(model, x):
        texts.append(str(model))
        return x

    step(nnx.Dict(count=nnx.Variable(jnp.array(1))), 1.0)
    assert texts == ["Dict\n  count: Variable int32[]\nVariable: 1 (4 B)"]


def test_a_hundred_thousand_variables_take_few_lines():
    model = nnx.List([nnx.Param(jnp.ones(2)) for _ in range(100)] * 1_000)
    lines = str(model).splitlines()
    assert lines[:3] == [
        "List",
        "  0-99: 100 x Param float32[2]",
        "  100: shared with `0`",
    ]
    assert len(lines) == MAX_CHILDREN + 3 and lines[-2] == "  ... 99,851 more"

    class Different(nnx.Module):
        def __init__(self, number):
            self.sizes = nnx.List(
                [nnx.Param(jax.ShapeDtypeStruct((n,), "int8")) for n in range(99)]
            )
            self.number = number

    text = str(nnx.List([Different(i) for i in range(1_000)]))
    assert len(text.splitlines()) == MAX_LINES + 2
    assert text.splitlines()[-2].endswith(" more lines")
    assert text.splitlines()[-1] == "Param: 4,851,000 (4.9 MB)"
    wide = str(nnx.List([nnx.Param(jax.ShapeDtypeStruct((n,), "int8")) for n in range(1_000)]))
    assert wide.splitlines()[-2] == f"  ... {1_000 - MAX_CHILDREN} more"


def test_a_chain_of_ten_thousand_modules_is_cut():
    root = here = nnx.Module()
    for _ in range(10_000):
        here.next = nnx.Module()
        here = here.next
    here.w = nnx.Param(jnp.ones(3))
    lines = str(root).splitlines()
    assert len(lines) == TEXT_DEPTH.get() + 2
    assert lines[-2].strip() == "next: Module ..."
    assert lines[-1] == "Param: 3 (12 B)"


def test_a_text_within_a_text_ends():
    class Owner:
        def __init__(self, owner):
            self.owner = owner

        def __repr__(self):
            return f"Owner({self.owner})"

    model = nnx.Module()
    model.helper = Owner(model)
    assert str(model) == "Module(helper=Owner(Module(...)))"


def test_keys_and_classes_of_every_kind():
    class Strict(nnx.Module):
        def __getattr__(self, name):
            raise RuntimeError(name)

    model = Strict()
    model.items = nnx.Dict()
    model.items["two\nlines"] = nnx.Param(jnp.ones(2))
    model.twin = model.items["two\nlines"]
    assert str(model).splitlines() == [
        "Strict",
        "  items: Dict",
        "    two\\nlines: Param float32[2]",
        "  twin: shared with `items.two\\nlines`",
        "Param: 2 (8 B)",
    ]
    assert repr(model).startswith("Strict( # Param: 2 (8 B)")
