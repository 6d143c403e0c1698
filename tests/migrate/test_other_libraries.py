"""Equinox: what is safe moves. Linen, Haiku, PyTorch: each construct has a note, and all stays."""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

pytest.importorskip("libcst")

import nnxlite as nnx
from nnxlite.migrate import _hints, migrate_text

FORMS = {
    "import equinox as eqx\neqx.filter_jit(f)": "import nnxlite as nnx\nnnx.filter_jit(f)",
    "import equinox\nequinox.filter_jit(f)": "import nnxlite as nnx\nnnx.filter_jit(f)",
    "import equinox as eqx\neqx.Module, eqx.filter_jit": (
        "import equinox as eqx\nimport nnxlite as nnx\neqx.Module, nnx.filter_jit"
    ),
    "import equinox as eqx\nnnx = 1\neqx.tree_at": "import nnxlite\nnnx = 1\nnnxlite.tree_at",
    "from equinox import filter_jit as j, Module, tree_at": (
        "from equinox import Module\nfrom nnxlite import filter_jit as j, tree_at"
    ),
    "import equinox as eqx\neqx.nn.Linear(2, 3, key=k)": (
        "import equinox as eqx\neqx.nn.Linear(2, 3, key=k)"
    ),
    "from equinox.nn import Linear": "from equinox.nn import Linear",
}


@pytest.mark.parametrize("before", FORMS)
def test_filtered_transforms_move(before):
    done = migrate_text(before, "equinox")
    assert done.text == FORMS[before]
    assert migrate_text(done.text, "equinox").text == done.text


@pytest.mark.parametrize("name", sorted(_hints.EQUINOX_SAFE))
def test_what_moves_exists(name):
    assert callable(getattr(nnx, name))


@pytest.mark.parametrize("name", sorted(_hints.EQUINOX_LEFT))
def test_what_stays_has_a_note(name):
    (note,) = migrate_text(f"import equinox as eqx\neqx.{name}", "equinox").notes
    assert (note.line, note.what) == (2, f"`equinox.{name}` stays")
    assert note.hint == _hints.EQUINOX_LEFT[name]


def test_a_name_nobody_knows_has_a_note_too():
    for program in ("import equinox as eqx\neqx.unheard", "from equinox import unheard"):
        (note,) = migrate_text(program, "equinox").notes
        assert "keep Equinox installed" in note.hint


def test_migrated_transforms_take_modules_of_equinox():
    pytest.importorskip("equinox")
    program = """
import equinox as eqx, jax, jax.numpy as jnp

class Scale(eqx.Module):
    w: jax.Array
    n: int = eqx.field(static=True)

    @eqx.filter_jit
    def __call__(self, x):
        return self.w * x * self.n

m = Scale(jnp.ones(()), 3)
out = m(2.0), eqx.filter_grad(lambda m: m(2.0))(m).w, eqx.tree_at(lambda m: m.w, m, 5.0).w
arrays, rest = eqx.partition(m, eqx.is_array)
again = eqx.combine(arrays, rest)(2.0)
"""
    before, after = {}, {}
    exec(program, before)
    exec(migrate_text(program, "equinox").text, after)
    assert after["nnx"] is nnx
    assert jnp.array_equal(jnp.stack(before["out"]), jnp.stack(after["out"]))
    assert before["again"] == after["again"]


@pytest.mark.parametrize(
    ("source", "head", "program", "hint"),
    [
        ("linen", "import flax.linen as nn", "nn.Dense(3)", "nnx.Linear(in_features"),
        ("linen", "from flax import linen", "linen.compact(f)", "no equivalent"),
        ("haiku", "import haiku as hk", "hk.get_parameter('w', [2])", "nnx.Param"),
        ("torch", "import torch.nn as nn", "nn.Linear(2, 3)", "transposed"),
        ("torch", "import torch", "torch.nn.functional.relu(x)", "jax.nn"),
    ],
)
def test_constructs_of_others_are_reported_and_stay(source, head, program, hint):
    done = migrate_text(f"{head}\n{program}\n", source)
    assert done.text == f"{head}\n{program}\n"
    (note,) = done.notes
    assert note.line == 2 and hint in note.hint and note.page == f"migrating/{_page(source)}"


def _page(source: str) -> str:
    return {"torch": "pytorch"}.get(source, source) + ".md"


@pytest.mark.parametrize("table", ["LINEN_CONSTRUCTS", "HAIKU_CONSTRUCTS", "TORCH_CONSTRUCTS"])
def test_hints_name_what_exists(table):
    for hint in getattr(_hints, table).values():
        for name in re.findall(r"nnx\.([a-zA-Z_]+)", hint):
            assert hasattr(nnx, name), name


def test_every_hint_points_at_a_page():
    docs = Path(__file__).parents[2] / "docs"
    pages = {page for _, page in [*_hints.FLAX.values(), *_hints.ABSENT.values()]}
    pages |= {_hints.FLAX_NNX, _hints.LINEN, _hints.EQUINOX, _hints.HAIKU, _hints.TORCH}
    assert [page for page in pages if not (docs / page).is_file()] == []
