"""Notes on programs of Linen, Haiku and PyTorch: what each construct becomes. Nothing is rewritten."""

from __future__ import annotations

import libcst as cst

from nnxlite.migrate import _hints
from nnxlite.migrate._edits import Note
from nnxlite.migrate._program import Program, dotted, walk

TABLES = {
    "linen": ("flax.linen", _hints.LINEN_CONSTRUCTS, _hints.LINEN),
    "haiku": ("haiku", _hints.HAIKU_CONSTRUCTS, _hints.HAIKU),
    "torch": ("torch", _hints.TORCH_CONSTRUCTS, _hints.TORCH),
}


def report(program: Program, source: str) -> list[Note]:
    """A note for every name of a library that has an equivalent, or is known to have none."""
    package, table, page = TABLES[source]
    notes, inner = [], set()
    for node in walk(program.module):
        if node in inner or not isinstance(node, (cst.Attribute, cst.Name)) or not dotted(node):
            continue
        inner.update(walk(node))
        name = program.imported_as(node)
        if not name.startswith(package + "."):
            continue
        path = name.removeprefix(package + ".")
        key = _longest(path, table)
        if key:
            notes.append(Note(*program.position(node), f"`{package}.{path}`", table[key], page))
    return notes


def _longest(path: str, table: dict[str, str]) -> str:
    """The longest beginning of a dotted name that is in a table, or an empty text."""
    while path and path not in table:
        path = path.rpartition(".")[0]
    return path
