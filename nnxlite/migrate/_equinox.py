"""The rules for programs of Equinox: filtered transforms and trees move, modules are for a person.

The functions of nnxlite that have the names of Equinox's take its modules as they take any pytree, so a
program may use both.  Classes and layers differ in what they are, and stay.
"""

from __future__ import annotations

import collections
import typing as tp

import libcst as cst

from nnxlite.migrate import _hints
from nnxlite.migrate._edits import Edit, Note
from nnxlite.migrate._imports import alias_text, bound_name, rewrite
from nnxlite.migrate._program import Program, dotted, leading, walk


class EquinoxRules:
    """The edits and notes of one program."""

    def __init__(self, program: Program):
        self.program = program
        self.edits: list[Edit] = []
        self.notes: list[Note] = []
        self.moving: collections.Counter[str] = collections.Counter()
        self.staying: collections.Counter[str] = collections.Counter()
        self.target = "nnxlite" if self._nnx_is_taken() else "nnx"
        """The name that nnxlite is given."""

    def _nnx_is_taken(self) -> bool:
        names = (node for node in walk(self.program.module) if isinstance(node, cst.Name))
        return any(name.value == "nnx" and not self._is_nnxlite(name) for name in names)

    def _is_nnxlite(self, node: cst.Name) -> bool:
        parent = self.program.parent(node)
        if isinstance(parent, cst.Attribute) and parent.attr is node:
            return True  # an attribute of something
        if isinstance(parent, cst.AsName):
            alias = self.program.parent(parent)
            return isinstance(alias, cst.ImportAlias) and dotted(alias.name) == ("nnxlite",)
        return self.program.imported_as(node) == "nnxlite"

    def run(self) -> tuple[list[Edit], list[Note]]:
        """The edits and notes of the program."""
        for node in self.program.nodes(without=self.program.imports):
            if isinstance(node, (cst.Attribute, cst.Name)) and dotted(node):
                self._name(node)
        for statement in self.program.imports:
            if isinstance(statement, cst.Import):
                self._import(statement)
            else:
                self._import_from(statement)
        return self.edits, self.notes

    def _note(self, node: cst.CSTNode, name: str) -> None:
        first = name.split(".")[0]
        hint = _hints.EQUINOX_LEFT.get(first, "keep Equinox installed for it, or replace it")
        position = self.program.position(node)
        self.notes.append(Note(*position, f"`equinox.{name}` stays", hint, _hints.EQUINOX))

    def _name(self, node: cst.Name | cst.Attribute) -> None:
        name, parts = self.program.imported_as(node), dotted(node)
        if name == "equinox" and len(parts) == 1:
            self.staying[parts[0]] += 1
        if not name.startswith("equinox."):
            return
        full = name.split(".")
        if len(parts) < len(full):  # `from equinox import ...`, which its import answers for
            return
        if full[1] in _hints.EQUINOX_SAFE:
            self.moving[parts[0]] += 1
            self.edits.append(self.program.replaced(leading(node, 1), self.target))
        else:
            self.staying[parts[0]] += 1
            self._note(node, name.removeprefix("equinox."))

    def _import(self, node: cst.Import) -> None:
        new = "import nnxlite as nnx" if self.target == "nnx" else "import nnxlite"

        def moved(alias: cst.ImportAlias) -> tuple[str, ...]:
            is_root = dotted(alias.name) == ("equinox",)
            return (new,) if is_root and self.moving[bound_name(alias)] else ()

        def keep(alias: cst.ImportAlias) -> bool:
            return self.staying[bound_name(alias)] > 0

        self.edits += rewrite(self.program, node, moved, keep=keep)
        for alias in node.names:
            name = dotted(alias.name)
            if name[0] == "equinox" and len(name) > 1:
                self._note(alias, ".".join(name[1:]))

    def _import_from(self, node: cst.ImportFrom) -> None:
        module = dotted(node.module) if node.module and not node.relative else ()
        if not module or module[0] != "equinox":
            return
        if len(module) > 1 or isinstance(node.names, cst.ImportStar):
            self._note(node, ".".join(module[1:]) or "*")
            return

        def moved(alias: cst.ImportAlias) -> tuple[str, ...]:
            name = tp.cast(str, alias.name.value)
            if name in _hints.EQUINOX_SAFE:
                return (f"from nnxlite import {alias_text(name, alias)}",)
            self._note(alias, name)
            return ()

        self.edits += rewrite(self.program, node, moved)
