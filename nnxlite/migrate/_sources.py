"""Programs in their containers: a module, the cells of a notebook."""

from __future__ import annotations

import json
import re

from nnxlite.migrate._program import Edit, Migration, Note, Program, UnreadableError, apply

SOURCES = {"nnx": ("flax", "nnxlite"), "equinox": ("equinox",)}
"""What a program may be written for; one that contains none of these words needs no parsing."""

MAGIC = re.compile(
    r"^(?P<indent>[ \t]*)(?P<code>(?:%%?[A-Za-z]|[!?])[^\n]*|[^\n#'\"]*(?:=\s*[!%][^\n]*|\?))$",
    re.M,
)
CELL_MAGIC = re.compile(r"\s*%%(?!time|capture)")


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
    edits, notes = _find(text, source)
    return Migration(apply(text, edits), tuple(sorted(notes)))


def migrate_notebook(text: str, source: str = "nnx") -> Migration:
    """The code cells of a notebook rewritten as by `migrate_text`, as one program.

    Args:
        text: the content of an `.ipynb` file.
        source: what it was written for, as in `migrate_text`.

    Returns:
        The new content, written as Jupyter does, and notes that have the number of the code cell.

    Raises:
        UnreadableError: it is not a notebook, or a cell is not Python.
        ImportError: libcst is not installed.

    >>> from nnxlite.migrate import migrate_notebook
    >>> cell = '{"cell_type": "code", "source": "from flax import nnx", "outputs": []}'
    >>> "import nnxlite as nnx" in migrate_notebook('{"cells": [%s]}' % cell).text
    True
    """
    try:
        content = json.loads(text)
        cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UnreadableError(f"not a notebook: {type(error).__name__}: {error}") from error
    edits, notes = _find("".join(f"{_without_magics(code)}\n" for code in sources), source)
    placed, begin, first = [], 0, 1
    for number, (cell, code) in enumerate(zip(cells, sources), 1):
        stop, lines = begin + len(code), code.count("\n") + 1
        own = [
            Edit(e.start - begin, e.stop - begin, e.text) for e in edits if begin <= e.start < stop
        ]
        if own:
            new = apply(code, own)
            whole = isinstance(cell["source"], str)
            cell["source"] = new if whole else new.splitlines(keepends=True)
        for note in notes:
            if first <= note.line < first + lines:
                line = note.line - first + 1
                placed.append(Note(line, note.column, note.what, note.hint, note.page, number))
        begin, first = stop + 1, first + lines
    if edits:
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    return Migration(text, tuple(sorted(placed, key=lambda note: (note.cell, note))))


def _without_magics(source: str) -> str:
    """The code of a cell, with what only IPython understands blanked, character by character."""
    if CELL_MAGIC.match(source):
        return re.sub(r"[^\n]", " ", source)
    return MAGIC.sub(lambda match: match["indent"] + "0".ljust(len(match["code"])), source)


def _find(text: str, source: str) -> tuple[list[Edit], list[Note]]:
    """The edits and notes of a program."""
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}; expected one of {', '.join(SOURCES)}")
    if not any(word in text for word in SOURCES[source]):
        return [], []
    program = Program(text)
    from nnxlite.migrate._rules import Rules

    rules = Rules(program)
    getattr(rules, source)()
    return rules.edits, rules.notes
