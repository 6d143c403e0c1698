"""The notebooks in docs/ run from top to bottom, and are stored with what they print."""

import re
from pathlib import Path

import pytest

from tests.structure import load

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
every = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

nbformat = pytest.importorskip("nbformat")


def counts(notebook) -> list[int | None]:
    return [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]


@every
def test_runs(path, tmp_path):
    for package in ("nbclient", "ipykernel", "matplotlib", "sklearn"):
        pytest.importorskip(package)
    ran = counts(load(ROOT / "docs" / "build.py").executed(path, tmp_path))
    assert ran == list(range(1, len(ran) + 1)) == counts(nbformat.read(path, as_version=4))


@every
def test_is_stored_with_what_it_prints_and_nothing_of_the_machine_it_ran_on(path):
    """`python docs/build.py --notebooks` stores it."""
    notebook, text = nbformat.read(path, as_version=4), path.read_text()
    assert counts(notebook) == list(range(1, len(counts(notebook)) + 1))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    kinds = {output.output_type for output in outputs}
    assert "stream" in kinds and "error" not in kinds
    assert str(ROOT) not in text and "site-packages" not in text and "/tmp/" not in text
    assert path.stat().st_size < 400_000


@every
def test_links_lead_somewhere(path):
    notebook = nbformat.read(path, as_version=4)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose)
    assert targets and [name for name in targets if not (path.parent / name).exists()] == []
