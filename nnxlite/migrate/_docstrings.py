"""The examples in docstrings, which are programs of their own with the names of the module."""

from __future__ import annotations

import re

import libcst as cst

from nnxlite.migrate._edits import Edit
from nnxlite.migrate._errors import UnreadableError
from nnxlite.migrate._program import Program, walk

EXAMPLE = re.compile(r"^(?P<indent>[ \t]*)(?:>>>|\.\.\.) (?P<code>[^\r\n]*)", re.MULTILINE)


def in_docstrings(program: Program, bindings: dict[str, str]) -> list[Edit]:
    """The edits of the examples in all docstrings of a program."""
    edits = []
    for node in walk(program.module):
        if isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString):
            text = node.value.value
            if ">>> " in text and ("flax" in text or "nnx" in text):
                edits += _in_examples(program.start(node.value), text, bindings, program.newline)
    return edits


def _in_examples(at: int, text: str, bindings: dict[str, str], newline: str) -> list[Edit]:
    """The edits of the examples in a text that begins at an offset."""
    from nnxlite.migrate._nnx import NnxRules

    header = "".join(f"import {path} as {name}\n" for name, path in bindings.items())
    code, starts = header, []
    for match in EXAMPLE.finditer(text):
        starts.append((len(code), at + match.start("code"), match["indent"]))
        code += match["code"] + "\n"
    try:
        edits, _ = NnxRules(Program(code)).run()
    except UnreadableError:
        return []  # an example that shows a mistake, perhaps
    found = []
    for edit in edits:
        if edit.start >= len(header):
            begin, place, indent = max(line for line in starts if line[0] <= edit.start)
            last, there, _ = max(line for line in starts if line[0] <= edit.stop)
            new = re.sub(r"\n(?=[\s)])", f"\0{indent}... ", edit.text)
            new = new.replace("\n", f"\0{indent}>>> ").replace("\0", newline)
            found.append(Edit(place + edit.start - begin, there + edit.stop - last, new))
    return found
