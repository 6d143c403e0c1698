"""Every example is on the page of examples, with its command, and some test runs it."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gallery.md").read_text()
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("[!_]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_it_and_its_command(name):
    assert f"[`{name}.py`](../examples/{name}.py)" in PAGE
    assert re.search(rf"^python .*examples/{name}\.py( --processes 4)?$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short_states_a_result_and_a_test_runs_it(name):
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 120
    assert "\nResult: " in text.split('"""')[1]
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    assert any(re.search(rf"""["']{name}(\.py)?["']""", test) for test in tests)


def test_what_an_example_needs_can_be_installed(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    launcher = runpy.run_path(str(ROOT / "examples" / "__main__.py"))
    assert launcher["NEEDS"].keys() <= set(NAMES)
    assert set().union(*launcher["NEEDS"].values()) <= launcher["environment"].EXTRAS.keys()


def test_pictures_of_the_page_are_small():
    pictures = sorted((ROOT / "docs" / "gallery").glob("*.png"))
    assert [path.name for path in pictures if path.stat().st_size > 100_000] == []
    assert [path.name for path in pictures if f"gallery/{path.name}" not in PAGE] == []
