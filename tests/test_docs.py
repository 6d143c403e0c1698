"""The Python in README.md and docs/ runs: the blocks of a page are one program, top to bottom."""

from __future__ import annotations

import linecache
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS: dict[str, tuple[str, ...]] = {
    "docs/first-model.md": ("orbax.checkpoint", "sklearn", "matplotlib"),
    "docs/serving.md": ("flatbuffers",),
    "docs/migrating/linen.md": ("flax",),
    "docs/recipes/beside-others.md": ("flax", "equinox"),
    "docs/recipes/checkpoint-and-resume.md": ("orbax.checkpoint",),
    "docs/recipes/data-loading.md": ("orbax.checkpoint",),
    "docs/recipes/pretrained-weights.md": ("orbax.checkpoint", "safetensors"),
    "docs/recipes/quantization.md": ("qwix", "sklearn"),
}
"""Packages without which the Python of a page cannot run, by its path in the repository."""
OWN_PROCESS = {"docs/recipes/quantization.md"}
"""Pages that change the process: this one puts nnxlite in the place of `flax.nnx`."""
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of one language, each with the number of lines before its code."""
    return [
        (text.count("\n", 0, match.start(2)), match[2])
        for match in BLOCK.finditer(text)
        if match[1] == language
    ]


def program(text: str) -> str:
    """All Python of a page, every line under its line number in the page."""
    lines: list[str] = []
    for before, code in blocks(text, "python"):
        lines += [""] * (before - len(lines)) + code.splitlines()
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_of(page, tmp_path, monkeypatch):
    code = program(page.read_text())
    if not code.strip():
        pytest.skip("no Python on this page")
    for package in NEEDS.get(page.relative_to(ROOT).as_posix(), ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)  # what a page writes stays out of the repository
    if page.relative_to(ROOT).as_posix() in OWN_PROCESS:
        (tmp_path / "page.py").write_text(code)
        subprocess.run([sys.executable, tmp_path / "page.py"], check=True)
        return
    # A traceback then quotes the page, not the program made of it.
    linecache.cache[str(page)] = (len(code), None, code.splitlines(True), str(page))
    exec(compile(code, str(page), "exec", dont_inherit=True), {"__name__": "__docs__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    prose = BLOCK.sub("", page.read_text())  # what a block prints may look like a link
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_quick_start_is_two_short_commands():
    section = re.search(r"^## Quick start$(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)
    assert section
    commands = [code for _, code in blocks(section[1], "sh")]
    assert commands == ["python3 examples digits\n", "python3 tests\n"]
