"""Equinox: each name has a note, and all stays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("libcst")

import nnxlite as nnx
from nnxlite import filtered
from nnxlite.migrate import _hints, migrate_text

SAME = sorted(
    {name for name in vars(filtered) if not name.startswith("_")} - {*_hints.EQUINOX_LEFT}
)


@pytest.mark.parametrize("name", SAME)
def test_what_is_the_same_exists_and_is_said(name):
    assert callable(getattr(nnx, name))
    for program in (f"import equinox as eqx\neqx.{name}", f"from equinox import {name}"):
        done = migrate_text(program, "equinox")
        (note,) = done.notes
        assert done.text == program and note.what == f"`equinox.{name}`"
        assert note.hint == f"nnx.{name} is the same function, for modules of both"


@pytest.mark.parametrize("name", sorted(_hints.EQUINOX_LEFT))
def test_what_is_not_has_a_hint(name):
    (note,) = migrate_text(f"import equinox as eqx\neqx.{name}", "equinox").notes
    assert (note.line, note.what) == (2, f"`equinox.{name}`")
    assert note.hint == _hints.EQUINOX_LEFT[name]


def test_a_name_nobody_knows_has_a_note_too():
    for program in ("import equinox as eqx\neqx.unheard", "from equinox.unheard import x"):
        (note,) = migrate_text(program, "equinox").notes
        assert "keep Equinox installed" in note.hint


def test_names_below_a_module_have_its_hint():
    program = "import equinox as eqx\nfrom equinox.nn import Linear\neqx.nn.Linear(2, 3), Linear"
    notes = migrate_text(program, "equinox").notes
    assert [(note.line, note.what) for note in notes] == [
        (2, "`equinox.nn.Linear`"),
        (3, "`equinox.nn.Linear`"),
    ]
    assert {note.hint for note in notes} == {_hints.EQUINOX_LEFT["nn"]}


def test_hints_name_what_exists():
    for hint in _hints.EQUINOX_LEFT.values():
        for name in re.findall(r"nnx\.([a-zA-Z_]+)", hint):
            assert hasattr(nnx, name), name


def test_every_hint_points_at_a_page():
    docs = Path(__file__).parents[2] / "docs"
    pages = {page for _, page in [*_hints.FLAX.values(), *_hints.ABSENT.values()]}
    pages |= {_hints.FLAX_NNX, _hints.LINEN, _hints.EQUINOX}
    assert [page for page in pages if not (docs / page).is_file()] == []
