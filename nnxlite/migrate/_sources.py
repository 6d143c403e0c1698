"""Programs in their containers: a module, the cells of a notebook."""

from __future__ import annotations

import typing as tp

from nnxlite.migrate._edits import Edit, Migration, Note, apply
from nnxlite.migrate._errors import UnreadableError
from nnxlite.migrate._notebooks import Notebook
from nnxlite.migrate._program import Program

SOURCES = {"nnx": ("flax", "nnxlite"), "equinox": ("equinox",)}
"""What a program may be written for; one that contains none of these words needs no parsing."""


def migrate_text(text: str, source: str = "nnx") -> Migration:
    """A program rewritten for nnxlite, and what needs a decision in it.

    Args:
        text: a module of Python.
        source: what it was written for: `"nnx"`; or `"equinox"`, for which there are only notes.

    Returns:
        The new text and the notes in the order of their lines.

    Raises:
        UnreadableError: it is not Python.
        ImportError: libcst is not installed.

    >>> from nnxlite.migrate import migrate_text
    >>> done = migrate_text("from flax import nnx\\nnnx.Optimizer(model, tx)\\n")
    >>> print(done.text, end="")
    import nnxlite as nnx
    nnx.ModelAndOptimizer(model, tx)
    """
    edits, notes = find(text, source)
    return Migration(apply(text, edits), tuple(sorted(notes)))


def migrate_notebook(text: str, source: str = "nnx") -> Migration:
    """The code cells of a notebook rewritten as by `migrate_text`, as one program.

    Everything but the changed lines stays as it was in the file: outputs, metadata, indentation.

    Args:
        text: the content of an `.ipynb` file.
        source: what it was written for, as in `migrate_text`.

    Returns:
        The new content, and notes that have the number of the code cell.

    Raises:
        UnreadableError: it is not a notebook, or a cell is not Python.
        ImportError: libcst is not installed.

    >>> from nnxlite.migrate import migrate_notebook
    >>> cell = '{"cell_type": "code", "source": ["from flax import nnx"], "outputs": []}'
    >>> migrate_notebook('{"cells": [%s]}' % cell).text
    '{"cells": [{"cell_type": "code", "source": ["import nnxlite as nnx"], "outputs": []}]}'
    """
    notebook = Notebook(text)
    edits, notes = find(notebook.program, source)
    placed = []
    for note in notes:
        cell, line = notebook.place(note.line)
        placed.append(Note(line, note.column, note.what, note.hint, note.page, cell))
    key = lambda note: (note.cell, note)
    return Migration(notebook.with_edits(edits), tuple(sorted(placed, key=key)))


def find(text: str, source: str) -> tuple[list[Edit], list[Note]]:
    """The edits and notes of a program."""
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}; expected one of {', '.join(SOURCES)}")
    if not any(word in text for word in SOURCES[source]):
        return [], []
    try:
        return _find(Program(text), source)
    except RecursionError as error:
        raise UnreadableError("it is nested too deeply") from error


def _find(program: Program, source: str) -> tuple[list[Edit], list[Note]]:
    if source == "equinox":
        from nnxlite.migrate._equinox import notes_of

        return [], notes_of(program)
    from nnxlite.migrate._nnx import NnxRules

    return NnxRules(program).run()


__all__: tp.Final = ["SOURCES", "UnreadableError", "migrate_notebook", "migrate_text"]
