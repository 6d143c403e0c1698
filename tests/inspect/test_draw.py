"""`draw`: the boxes and arrows of its flowchart; `display` and the drawings of treescope."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest
import treescope
from hypothesis import given

import nnxlite as nnx
from benchmarks.models import chain
from nnxlite.inspect._draw import MAX_BOXES
from tests.laws.graphs import roots

# Treescope looks at a numpy class that the newest numpy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.down = nnx.Linear(8, 2, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(2, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.up(x))


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(6)])
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
        end
        subgraph n5["up: Linear"]
          n6["kernel: Param float32[2,8]"]:::kind0
        end
      end
    end
    subgraph n7["größe: Linear"]
      n8["kernel: Param float32[3,2]"]:::kind0
    end
    n9(["tied"])
    n10(["again"])
    n11(["late"])
    n12(["me: self"])
    subgraph n13["pair: list"]
      n14["0: Cache float32[2]"]:::kind1
      n15["1: '#quot;#lt;#amp;'"]
    end
  end
  n9 -.-> n8
  n10 -.-> n5
  n11 -.-> n6
"""
    kinds = """\
  classDef kind0 fill:#cfe2ff,stroke:#8d99ae,color:#000
  classDef kind1 fill:#d1f0d6,stroke:#8d99ae,color:#000
"""
    calls = """\
  n5 -->|"float32[4,8]"| n3
  n7 -->|"float32[4,2]"| n1
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

    class Odd:
        def __repr__(self):
            return "odd\ud800"  # which no file can have

    text = nnx.draw(nnx.Dict({"a\x00<&": nnx.Param(jnp.ones(2)), "odd": [Odd(), jnp.ones(2)]})).text
    assert "a\\x00#lt;#amp;: Param float32[2]" in text and "0: odd?" in text


# `display` --------------------------------------------------------------------------------------


class Linear(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((2, 3)), tag="w")
        self.size = (2, 3)
        self._hidden = 1


def model():
    new = nnx.Module()
    new.layers = nnx.List([Linear(), Linear()])
    new.tied = new.layers[0]
    new.me = new
    return new


def test_outside_a_notebook_the_text_form_is_printed(capsys):
    nnx.display()
    assert capsys.readouterr().out == ""
    nnx.display("a title", Linear(), jnp.ones((30, 30)), [1, 2])
    assert (
        capsys.readouterr().out
        == f"a title\n{Linear()!r}\nArray(shape=(30, 30), dtype=float32)\n[1, 2]\n"
    )


@pytest.fixture
def notebook(monkeypatch):
    """What an IPython kernel looks like from inside, and what was drawn in it."""
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    drawn = []
    monkeypatch.setattr(
        treescope, "display", lambda value, **options: drawn.append((value, options))
    )
    return drawn


def test_in_a_notebook_treescope_draws(notebook, monkeypatch, capsys):
    shown = Linear()
    nnx.display(shown, 3)
    assert [value for value, _ in notebook] == [shown, 3]
    assert notebook[0][1] == {"ignore_exceptions": True, "autovisualize": True}

    def too_deep(value, **options):
        raise RecursionError

    monkeypatch.setattr(treescope, "display", too_deep)  # what it cannot draw is printed
    nnx.display(nnx.Param(3))
    terminal = types.SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(sys.modules, "IPython", terminal)  # is no notebook
    nnx.display(3)
    assert capsys.readouterr().out == "Param(\n  value=3\n)\n3\n"


def test_treescope_draws_every_kind_of_object():
    graphdef, state = nnx.split(model())
    drawn = treescope.render_to_text(model())
    wanted = (
        "Module( # Param: 12 (48 B)",
        "kernel=Param(",
        "tag='w'",
        "cyclic reference",
        "Repeated",
    )
    assert all(text in drawn for text in wanted) and "_hidden" not in drawn
    assert "State({ # Param: 12 (48 B)" in treescope.render_to_text(state)
    drawn = treescope.render_to_text(graphdef)
    assert "GraphDef[Module](" in drawn and "kernel=Param(tag='w')" in drawn
    assert treescope.render_to_text(nnx.Module()) == "Module()"
    assert len(treescope.render_to_html(model())) > 1000


def test_treescope_has_paths_to_copy_and_says_what_is_shared():
    drawn = treescope.render_to_html(model(), compressed=False)
    assert ".layers[1].kernel.value" in drawn
    assert "# shared with `layers.0`" in drawn and "# shared with `self`" in drawn
    assert drawn.count("# shared with") == 2
    assert "# shared with" not in treescope.render_to_html(Linear(), compressed=False)
