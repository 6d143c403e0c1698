"""Notes on programs of Linen, Haiku and PyTorch: what each construct becomes. Nothing is rewritten."""

from __future__ import annotations

from nnxlite.migrate import _hints
from nnxlite.migrate._edits import Note
from nnxlite.migrate._program import Program

TABLES = {
    "linen": ("flax.linen", _hints.LINEN_CONSTRUCTS, _hints.LINEN),
    "haiku": ("haiku", _hints.HAIKU_CONSTRUCTS, _hints.HAIKU),
    "torch": ("torch", _hints.TORCH_CONSTRUCTS, _hints.TORCH),
}


def report(program: Program, source: str) -> list[Note]:
    """A note for every name of a library that has an equivalent, or is known to have none."""
    package, table, page = TABLES[source]
    notes = []
    for node in program.nodes():
        name = program.imported_as(node)
        if not name.startswith(package + "."):
            continue
        path = name.removeprefix(package + ".")
        key = _hints.longest(path, table)
        if key:
            notes.append(Note(*program.position(node), f"`{package}.{path}`", table[key], page))
    return notes
