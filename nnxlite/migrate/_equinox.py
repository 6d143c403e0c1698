"""Notes on programs of Equinox: which functions nnxlite has, and what its classes become.

Nothing is rewritten: modules of Equinox work in the filtered transforms of nnxlite, so a program moves
step by step.
"""

from __future__ import annotations

import libcst as cst

from nnxlite.migrate import _hints
from nnxlite.migrate._edits import Note
from nnxlite.migrate._program import Program, dotted

OTHER = "keep Equinox installed for it, or replace it"


def notes_of(program: Program) -> list[Note]:
    """A note for every name of Equinox in a program."""
    found: list[tuple[cst.CSTNode, str]] = []
    for node in program.nodes(without=program.imports):
        name = program.imported_as(node)
        if name.startswith("equinox.") and dotted(node)[0] != name.rpartition(".")[2]:
            found.append((node, name.removeprefix("equinox.")))
    for statement in program.imports:
        if isinstance(statement, cst.ImportFrom) and statement.module and not statement.relative:
            module = dotted(statement.module)
            names = [] if isinstance(statement.names, cst.ImportStar) else statement.names
            if module[:1] == ("equinox",):
                found += [(a, ".".join((*module[1:], *dotted(a.name)))) for a in names]
    return [_note(program, node, name) for node, name in found]


def _note(program: Program, node: cst.CSTNode, name: str) -> Note:
    if name in _hints.EQUINOX_SAME:
        hint = f"nnx.{name} is the same function, for modules of both"
    else:
        hint = _hints.EQUINOX_LEFT.get(name.split(".")[0], OTHER)
    return Note(*program.position(node), f"`equinox.{name}`", hint, _hints.EQUINOX)
