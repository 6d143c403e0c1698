"""The notebooks in docs/ run from top to bottom, and are stored with what they print."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
every = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

nbformat = pytest.importorskip("nbformat")


def load_build():
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_cells(path: Path):
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@every
def test_runs(path, tmp_path):
    for package in ("nbclient", "ipykernel", "matplotlib", "sklearn"):
        pytest.importorskip(package)
    notebook = load_build().executed(path, tmp_path)
    assert [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"] == list(
        range(1, len(code_cells(path)) + 1)
    )


@every
def test_is_stored_with_what_it_prints(path):
    """`python docs/build.py --notebooks` stores it."""
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert "stream" in kinds and "error" not in kinds
    assert path.stat().st_size < 400_000


@every
def test_shows_nothing_of_the_machine_it_ran_on(path):
    text = path.read_text()
    assert str(ROOT) not in text and "site-packages" not in text and "/tmp/" not in text


@every
def test_links_lead_somewhere(path):
    notebook = nbformat.read(path, as_version=4)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose)
    assert targets and [name for name in targets if not (path.parent / name).exists()] == []
