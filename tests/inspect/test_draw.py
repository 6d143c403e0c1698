"""`draw`: the boxes and arrows of its flowchart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import nnxlite as nnx
from benchmarks.models import chain
from nnxlite.inspect._draw import MAX_BOXES
from tests.laws.graphs import roots


class Block(nnx.Module):
    def __init__(self, rngs):
        self.down = nnx.Linear(8, 2, rngs=rngs)
        self.up = nnx.Linear(2, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(2, use_scale=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.up(self.norm(x)))


class Model(nnx.Module):
    def __init__(self, layers=6):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.größe = nnx.Linear(3, 2, use_bias=False, rngs=rngs)
        self.tied = self.größe.kernel
        self.again = self.blocks[0].up
        self.late = self.blocks[4].up.kernel
        self.me = self
        self.pair = [nnx.Cache(jnp.ones(2)), '"<&']
        self.setting = "not shown"

    def __call__(self, x, *, flag=None):
        x = self.größe(x)
        for block in self.blocks:
            x = block(x)
        return {"out": x, "flag": flag}

    def encode(self, x):
        return self.blocks[0](self.größe(x))


def test_boxes_references_and_calls():
    """Equal blocks are one box, also for a reference into one that is not drawn."""
    text = """\
flowchart TD
  subgraph n0["Model"]
    subgraph n1["blocks: List"]
      subgraph n2["0-5: 6 x Block"]
        subgraph n3["down: Linear"]
          n4["kernel: Param float32[8,2]"]:::kind0
          n5["bias: Param float32[2]"]:::kind0
        end
        subgraph n6["up: Linear"]
          n7["kernel: Param float32[2,8]"]:::kind0
        end
        subgraph n8["norm: BatchNorm"]
          n9["mean: BatchStat float32[2]"]:::kind1
          n10["var: BatchStat float32[2]"]:::kind1
          n11["bias: Param float32[2]"]:::kind0
        end
      end
    end
    subgraph n12["größe: Linear"]
      n13["kernel: Param float32[3,2]"]:::kind0
    end
    n14(["tied"])
    n15(["again"])
    n16(["late"])
    n17(["me: self"])
    subgraph n18["pair: list"]
      n19["0: Cache float32[2]"]:::kind2
      n20["1: '#quot;#lt;#amp;'"]
    end
  end
  n14 -.-> n13
  n15 -.-> n6
  n16 -.-> n7
"""
    kinds = """\
  classDef kind0 fill:#cfe2ff,stroke:#8d99ae,color:#000
  classDef kind1 fill:#d1f0d6,stroke:#8d99ae,color:#000
  classDef kind2 fill:#ffe5b4,stroke:#8d99ae,color:#000
"""
    calls = """\
  n8 -->|"float32[4,2]"| n6
  n6 -->|"float32[4,8]"| n3
  n12 -->|"float32[4,2]"| n1
"""
    x, traced = jax.ShapeDtypeStruct((4, 3), "float32"), []
    nnx.jit(lambda model, x: traced.append(nnx.draw(model, x).text))(Model(), jnp.ones((4, 3)))
    assert '["kernel: Param float32[2,8]"]' in traced[0] and '-->|"float32[4,8]"|' in traced[0]
    assert str(nnx.draw(Model())) == text + kinds
    drawing = nnx.draw(Model(), x)
    assert drawing.text == repr(drawing) == text + calls + kinds
    assert nnx.draw(Model(), x, method="encode") == drawing
    with pytest.raises(AttributeError, match="Model has no method 'decode'"):
        nnx.draw(Model(), x, method="decode")
    bundle = drawing._repr_mimebundle_()
    assert bundle["text/vnd.mermaid"] == bundle["text/plain"] == drawing.text
    assert bundle["text/markdown"] == f"```mermaid\n{drawing.text}```\n"


@given(roots)
def test_any_graph_is_drawn(root):
    lines = [line.strip() for line in nnx.draw(root).text.splitlines()]
    assert lines.count("end") == sum(line.startswith("subgraph ") for line in lines)


def test_half_built_objects_and_enormous_models():
    model = nnx.Dict(half=object.__new__(nnx.Param), unset=nnx.Linear.__new__(nnx.Linear))
    assert "half: #lt;Param: AttributeError while it was shown#gt;" in nnx.draw(model).text
    shape = lambda n, m: nnx.Param(jax.ShapeDtypeStruct((n, m), "int8"))
    many = nnx.List([nnx.List([shape(n, m) for n in range(60)]) for m in range(200)])
    text = nnx.draw(many).text
    assert len(text.splitlines()) < MAX_BOXES * 1.2 and len(text) < 50_000
    assert '["... 10 more"]' in text and '["... 192 more"]' in text
    assert nnx.draw(chain(nnx, 10_000)).text.count("subgraph") == 16


def test_characters_that_no_file_can_have():
    class Odd:
        def __repr__(self):
            return "odd\ud800"

    model = nnx.Dict()
    model["a\x00<&"] = nnx.Param(jnp.ones(2))
    model.odd = [Odd(), jnp.ones(2)]
    text = nnx.draw(model).text
    assert "a\\x00#lt;#amp;: Param float32[2]" in text and "0: odd?" in text
