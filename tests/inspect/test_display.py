"""`display` and the drawings of treescope."""

from __future__ import annotations

import sys
import types

import jax.numpy as jnp
import pytest
import treescope

import nnxlite as nnx

# Treescope looks at a numpy class that the newest numpy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")


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


def test_in_a_notebook_treescope_draws(notebook, capsys):
    shown = Linear()
    nnx.display(shown, 3)
    assert [value for value, _ in notebook] == [shown, 3]
    assert notebook[0][1] == {"ignore_exceptions": True, "autovisualize": True}
    assert capsys.readouterr().out == ""


def test_a_terminal_shell_is_no_notebook(monkeypatch, capsys):
    terminal = types.SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    nnx.display(3)
    assert capsys.readouterr().out == "3\n"


def test_what_treescope_cannot_draw_is_printed(notebook, monkeypatch, capsys):
    def too_deep(value, **options):
        raise RecursionError

    monkeypatch.setattr(treescope, "display", too_deep)
    nnx.display(nnx.Param(3))
    assert capsys.readouterr().out == "Param(\n  value=3\n)\n"


def test_treescope_draws_every_kind_of_object():
    graphdef, state = nnx.split(model())
    drawn = treescope.render_to_text(model())
    assert "Module( # Param: 12 (48 B)" in drawn
    assert "kernel=Param(" in drawn
    assert "tag='w'" in drawn
    assert "_hidden" not in drawn
    assert "cyclic reference" in drawn
    assert "Repeated" in drawn
    assert "State({ # Param: 12 (48 B)" in treescope.render_to_text(state)
    assert "GraphDef[Module](" in treescope.render_to_text(graphdef)
    assert "kernel=Param(tag='w')" in treescope.render_to_text(graphdef)
    assert treescope.render_to_text(nnx.Module()) == "Module()"
    assert len(treescope.render_to_html(model())) > 1000


def test_treescope_has_paths_to_copy_and_says_what_is_shared():
    drawn = treescope.render_to_html(model(), compressed=False)
    assert ".layers[1].kernel.value" in drawn
    assert "# shared with `layers.0`" in drawn and "# shared with `self`" in drawn
    assert drawn.count("# shared with") == 2
    assert "# shared with" not in treescope.render_to_html(Linear(), compressed=False)
