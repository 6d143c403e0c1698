"""`draw`: what is in the picture, where, and that nothing overlaps or leaves its box."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given

import nnxlite as nnx
from nnxlite.inspect._picture import MAX_ITEMS, inputs_of, picture_of
from nnxlite.inspect._svg import PAD, arrange, colour_of, text_width
from tests.laws.graphs import roots

SVG = "{http://www.w3.org/2000/svg}"


class Block(nnx.Module):
    def __init__(self, rngs):
        self.down = nnx.Linear(8, 2, rngs=rngs)
        self.up = nnx.Linear(2, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.up(self.norm(x)))


class Model(nnx.Module):
    def __init__(self, layers=24):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.embed = nnx.Linear(3, 2, rngs=rngs)
        self.tied = self.embed.kernel
        self.again = self.blocks[0].up
        self.me = self
        self.scale = nnx.Param(jnp.ones(2))
        self.name = '<a & "b">'

    def __call__(self, x, *, flag=None):
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return {"out": x, "flag": flag}


def shapes_of(picture):
    arrange(picture.root)
    return [
        (item, part) for item in picture.root.walk() for part in (*item.children, *item.references)
    ]


def check_layout(picture):
    for item, part in shapes_of(picture):
        assert item.x + PAD / 2 <= part.x, part.label
        assert part.x + part.width <= item.x + item.width - PAD / 2, part.label
        assert item.y < part.y and part.y + part.height <= item.y + item.height
        assert part.width >= text_width(part.label)
    for item in picture.root.walk():
        for a, b in itertools.combinations([*item.children, *item.references], 2):
            apart = (
                a.x + a.width <= b.x
                or b.x + b.width <= a.x
                or a.y + a.height <= b.y
                or b.y + b.height <= a.y
            )
            assert apart, f"{a.label} and {b.label} overlap"


def texts_of(drawing):
    root = ET.fromstring(drawing.svg)
    return [element.text for element in root.iter(f"{SVG}text")]


def test_the_boxes_of_a_deep_model():
    drawing = nnx.draw(Model())
    assert repr(drawing) == "Drawing(Model, 18 boxes)"
    texts = texts_of(drawing)
    assert texts[:2] == ["Model", "name='<a & \"b\">'"]
    assert "0-23: 24 x Block" in texts and texts.count("kernel: Param float32[2,8]") == 1
    assert "mean: BatchStat float32[2]" in texts
    assert [t for t in texts if t in ("tied", "again", "me")] == ["tied", "again", "me"]
    assert texts[-2:] == ["Param: 1,114 (4.5 KB)", "BatchStat: 96 (384 B)"]
    assert drawing.svg.count('marker-end="url(#ref)"') == 3
    assert drawing.svg.count('marker-end="url(#call)"') == 0
    assert nnx.draw(Model(2)).svg.count("<rect") == nnx.draw(Model(24)).svg.count("<rect")


def test_a_shared_reference_is_one_box_with_several_arrows():
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model = nnx.Dict(a=layer, b=layer, c=nnx.Dict(d=layer.kernel), e=layer)
    drawing = nnx.draw(model)
    assert texts_of(drawing).count("a: Linear") == 1 and "b: Linear" not in texts_of(drawing)
    found = [(item.title, r.name, r.target.label) for item, r in drawing._picture.references]
    assert found == [
        ("Dict", "b", "a: Linear"),
        ("Dict", "e", "a: Linear"),
        ("Dict", "d", "kernel: Param float32[2,2]"),
    ]
    assert drawing.svg.count('marker-end="url(#ref)"') == 3


def test_calls_are_in_order_with_shapes_on_the_arrows():
    drawing = nnx.draw(Model(), jnp.ones((4, 3)))
    picture = drawing._picture
    assert [child.name for child in picture.root.called] == ["embed", "blocks"]
    (block,) = picture.root.called[1].children
    assert [child.name for child in block.called] == ["norm", "up", "down"]
    assert [(a.name, b.name, label) for a, b, label in picture.call_edges] == [
        ("embed", "blocks", "float32[4,2]"),
        ("norm", "up", "float32[4,2]"),
        ("up", "down", "float32[4,8]"),
    ]
    assert (picture.root.inputs, picture.root.outputs) == (
        "float32[4,3]",
        "out: float32[4,2]",
    )
    assert inputs_of(picture.root.called[1]) == "float32[4,2]"
    arrange(picture.root)
    positions = [child.y for child in block.called]
    assert positions == sorted(positions)
    assert drawing.svg.count('marker-end="url(#call)"') == 2 + 2 + 1 + 3
    texts = texts_of(drawing)
    assert "float32[4,8]" in texts and "float32[4,3]" in texts


def test_another_method_and_abstract_inputs():
    class Codec(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

        def encode(self, x):
            return self.inner(x)

    drawing = nnx.draw(Codec(), jax.ShapeDtypeStruct((5, 3), "float32"), method="encode")
    assert drawing._picture.root.outputs == "float32[5,2]"
    with pytest.raises(AttributeError, match="Codec has no method '__call__'"):
        nnx.draw(Codec(), jnp.ones(3))


@pytest.mark.parametrize("inputs", [(), (jnp.ones((4, 3)),)])
def test_nothing_overlaps_or_leaves_its_box(inputs):
    check_layout(nnx.draw(Model(3), *inputs)._picture)


@given(roots)
def test_any_graph_is_drawn(root):
    drawing = nnx.draw(root)
    check_layout(drawing._picture)
    ET.fromstring(drawing.svg)
    dot = [line.strip() for line in drawing.dot.splitlines()]
    assert dot.count("}") == 1 + sum(line.startswith("subgraph ") for line in dot)
    lines = [line.strip() for line in drawing.mermaid.splitlines()]
    assert lines.count("end") == sum(line.startswith("subgraph ") for line in lines)


class Small(nnx.Module):
    def __init__(self):
        self.größe = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
        self.重み = nnx.BatchStat(jnp.zeros(3))
        self.tied = self.größe.kernel
        self.me = self
        self.pair = [nnx.Cache(jnp.ones(2)), '"<&']

    def __call__(self, x):
        return self.größe(x)


def test_the_text_for_graphviz():
    assert (
        nnx.draw(Small(), jnp.ones((1, 2))).dot
        == """\
digraph model {
  compound=true
  graph [fontname="monospace", style=rounded, color="#8d99ae"]
  node [fontname="monospace", fontsize=10, shape=box, style="rounded,filled"]
  edge [fontname="monospace", fontsize=9]
  subgraph cluster_n0 {
    label="Small"
    n0 [shape=point, style=invis, width=0, label=""]
    n3 [label="重み: BatchStat float32[3]", fillcolor="#d1f0d6"]
    subgraph cluster_n6 {
      label="pair: list"
      n6 [shape=point, style=invis, width=0, label=""]
      n7 [label="0: Cache float32[2]", fillcolor="#ffe5b4"]
      n8 [label="1: '\\"<&'", fillcolor="#ffffff"]
    }
    subgraph cluster_n1 {
      label="größe: Linear\\nin_features=2, out_features=3, use_bias=False"
      n1 [shape=point, style=invis, width=0, label=""]
      n2 [label="kernel: Param float32[2,3]", fillcolor="#cfe2ff"]
    }
    n4 [label="tied", style=dashed]
    n5 [label="me", style=dashed]
  }
  n4 -> n2 [style=dashed]
  n5 -> n0 [style=dashed]
}
"""
    )


def test_the_text_for_mermaid():
    assert (
        nnx.draw(Small()).mermaid
        == """\
flowchart TD
  subgraph n0["Small"]
    n0_self((self))
    subgraph n1["größe: Linear"]
      n2["kernel: Param float32[2,3]"]:::kind0
    end
    n3["重み: BatchStat float32[3]"]:::kind1
    subgraph n6["pair: list"]
      n7["0: Cache float32[2]"]:::kind2
      n8["1: '#quot;#lt;#amp;'"]:::kind3
    end
    n4(["tied"])
    n5(["me"])
  end
  n4 -.-> n2
  n5 -.-> n0_self
  classDef kind0 fill:#cfe2ff,stroke:#8d99ae,color:#000
  classDef kind1 fill:#d1f0d6,stroke:#8d99ae,color:#000
  classDef kind2 fill:#ffe5b4,stroke:#8d99ae,color:#000
  classDef kind3 fill:#ffffff,stroke:#8d99ae,color:#000
"""
    )
    calls = nnx.draw(Model(2), jnp.ones((4, 3))).mermaid
    assert '-->|"float32[4,8]"|' in calls


def test_files_and_notebooks(tmp_path):
    drawing = nnx.draw(Small())
    for suffix, text in (
        (".svg", drawing.svg),
        (".dot", drawing.dot),
        (".GV", drawing.dot),
        (".mmd", drawing.mermaid),
        (".mermaid", drawing.mermaid),
    ):
        path = tmp_path / f"model{suffix}"
        assert drawing.save(str(path)) == path
        assert path.read_text(encoding="utf-8") == text
    assert drawing._repr_svg_() is drawing.svg
    with pytest.raises(
        ValueError, match=r"Drawing.save: no format for the suffix '.png' of '.*m.png'"
    ):
        drawing.save(tmp_path / "m.png")


def test_kinds_have_colours_of_their_own():
    class Mine(nnx.Variable):
        pass

    assert colour_of("Param") != colour_of("BatchStat") != colour_of("Mine") == colour_of("Mine")
    assert colour_of("Mine") in nnx.draw(nnx.Dict(a=Mine(jnp.ones(2)))).svg
    text = str(texts_of(nnx.draw(nnx.Dict(a=jnp.ones(2)))))
    assert "a: float32[2]" in text and "'Array'" in text


def test_an_optimizer_beside_its_model():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    both = {"model": model, "optimizer": nnx.ModelAndOptimizer(model, optax.adam(1e-3))}
    drawing = nnx.draw(both)
    assert "mu, nu: 2 x State" in texts_of(drawing)
    assert [r.label for _, r in drawing._picture.references] == ["model"]


def test_references_into_what_is_folded_point_to_the_box_that_stands_for_it():
    model = Model(6)
    model.late = model.blocks[4].up.kernel
    picture = picture_of(model)
    (late,) = [r for _, r in picture.references if r.name == "late"]
    assert late.target.path == "blocks.0.up.kernel" and late.path == "blocks.4.up.kernel"


def test_half_built_objects_and_enormous_models():
    model = nnx.Dict(half=object.__new__(nnx.Param), unset=nnx.Linear.__new__(nnx.Linear))
    assert "half: <Param: AttributeError while it was shown>" in texts_of(nnx.draw(model))
    many = nnx.List(
        [
            nnx.List([nnx.Param(jax.ShapeDtypeStruct((n, m), "int8")) for n in range(60)])
            for m in range(200)
        ]
    )
    drawing = nnx.draw(many)
    assert sum(1 for _ in drawing._picture.root.walk()) < MAX_ITEMS * 1.2
    assert "... 10 more" in texts_of(drawing) and texts_of(drawing)[-2] == "... 170 more"
    root = here = nnx.Module()
    for _ in range(10_000):
        here.next = nnx.Module()
        here = here.next
    ET.fromstring(nnx.draw(root).svg)


def test_characters_that_xml_does_not_have():
    class Odd:
        def __repr__(self):
            return "odd\x00\x1b\ud800"

    model = nnx.Dict()
    model["a\x00<&"] = nnx.Param(jnp.ones(2))
    model.odd = [Odd(), jnp.ones(2)]
    assert "a\\x00<&: Param float32[2]" in texts_of(nnx.draw(model))
    assert "0: odd???" in texts_of(nnx.draw(model))


def test_a_call_inside_a_trace_is_drawn_by_shape():
    drawings = []

    @nnx.jit
    def step(model, x):
        drawings.append(nnx.draw(model, x))
        return x

    step(Small(), jnp.ones((1, 2)))
    assert "kernel: Param float32[2,3]" in texts_of(drawings[0])


def test_the_picture_in_the_docs_is_up_to_date():
    docs = Path(__file__).parents[2] / "docs"
    code = (docs / "inspecting.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    drawing = nnx.draw(names["model"], jax.ShapeDtypeStruct((2, 16), "int32"))
    assert (docs / "model.svg").read_text() == drawing.svg
