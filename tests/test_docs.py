"""The Python in README.md and docs/ runs, and prints what the page shows: see `docs/pages.py`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import spare
from tests.structure import load

ROOT = Path(__file__).parents[1]
pages = load(ROOT / "docs" / "pages.py")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
every = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
NEEDS: dict[str, tuple[str, ...]] = {
    "docs/checkpoints.md": ("orbax.checkpoint",),
    "docs/ecosystem.md": ("flax", "equinox"),
    "docs/first-model.md": ("orbax.checkpoint", "sklearn", "matplotlib"),
    "docs/serving.md": ("flatbuffers",),
    "docs/migrating/flax-nnx.md": ("orbax.checkpoint",),
    "docs/migrating/linen.md": ("flax",),
    "docs/recipes/training.md": ("orbax.checkpoint",),
    "docs/training.md": ("orbax.checkpoint",),
    "docs/weights.md": ("huggingface_hub", "orbax.checkpoint", "safetensors"),
    "docs/recipes/quantization.md": ("qwix", "sklearn"),
}
"""Packages without which the Python of a page cannot run, by its path in the repository."""
OWN_PROCESS = {"docs/recipes/quantization.md"}
"""Pages that change the process: this one puts nnxlite in the place of `flax.nnx`."""


@every
def test_python_of(page, tmp_path, monkeypatch):
    if "```python\n" not in page.read_text():
        pytest.skip("no Python on this page")
    for package in NEEDS.get(page.relative_to(ROOT).as_posix(), ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)  # what a page writes stays out of the repository
    if page.relative_to(ROOT).as_posix() in OWN_PROCESS:
        subprocess.run([sys.executable, ROOT / "docs" / "pages.py", page], check=True)
        return
    for output in pages.run(page):
        assert output.agrees, f"{page}:{output.line} shows other output:\n{output.printed}"
    spare()  # the pages are one module, and compile much


@every
def test_a_page_shows_output_asserts_once_at_most_and_links_lead_somewhere(page):
    text = page.read_text()
    code = "".join(code for name, code in pages.BLOCK.findall(text) if name == "python")
    asserts = re.findall(r"^ *(?:assert|np\.testing\.assert_\w+)\b", code, re.MULTILINE)
    beside_the_reference = page.parts[-2:] == ("migrating", "differences.md")
    assert len(asserts) <= 1 or beside_the_reference, f"{page}: print what a reader wants to see"
    prose = pages.BLOCK.sub("", text)  # what a block prints may look like a link
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_an_output_block_is_what_the_blocks_before_it_print(tmp_path):
    page = tmp_path / "page.md"
    block = "```python\nprint({})\n```\n\n```output\n{}\n```\n\n"
    page.write_text(block.format("1 / 3", "0.33...") + block.format("'two'", "three"))
    assert [output.agrees for output in pages.run(page)] == [True, False]
    page.write_text(pages.stored(page))
    assert page.read_text() == block.format("1 / 3", "0.33...") + block.format("'two'", "two")


def test_quick_start_is_two_short_commands():
    section = re.search(r"^## Quick start$(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)
    assert section
    commands = [code for name, code in pages.BLOCK.findall(section[1]) if name == "sh"]
    assert commands == ["python3 examples digits\n", "python3 tests\n"]


PRIVATE = re.compile(
    r"\b(is no|are no|be no|has no such|anew|afresh|whoever|mended|lies on|lie on|truth values?|is told"
    r"|settled|dealt|where it stands|fickle|bit by bit)\b|, too\."
)
"""Words that the field does not use, or not in this sense."""


def test_pages_docstrings_and_messages_use_the_words_of_the_field():
    sources = [*PAGES, *(ROOT / "nnxlite").rglob("*.py")]
    assert [
        (path.name, match[0]) for path in sources for match in PRIVATE.finditer(path.read_text())
    ] == []
