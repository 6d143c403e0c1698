"""A parsed program: its nodes, where they are in the text, and what import each name came from.

Edits are spans of the original text, so that whatever no edit covers stays byte for byte.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing as tp
from collections.abc import Iterable, Iterator

from nnxlite._base.errors import importing

if tp.TYPE_CHECKING:
    import libcst as cst

LINE = re.compile(r"\r\n|\r|\n")
NO_LIBCST = (
    "nnxlite.migrate parses programs with libcst, which is not installed. "
    "Install it: pip install 'nnxlite[migrate]'"
)


class UnreadableError(ValueError):
    """A program cannot be parsed; `line` and `column` (both from 1) say where, if that is known."""

    def __init__(self, message: str, line: int = 1, column: int = 1):
        super().__init__(message)
        self.line, self.column = line, column


@dataclasses.dataclass(frozen=True, order=True)
class Edit:
    """The characters from `start` to `stop` become `text`."""

    start: int
    stop: int
    text: str


@dataclasses.dataclass(frozen=True, order=True)
class Note:
    """Something that needs a decision.

    Attributes:
        line: counted from 1, in the program before it is rewritten.
        column: counted from 1.
        what: the code in question.
        hint: what to do about it.
        page: the page with more about it, relative to the folder `docs`.
        cell: the number of the code cell, from 1, in a notebook; otherwise 0.
    """

    line: int
    column: int
    what: str
    hint: str
    page: str
    cell: int = 0


@dataclasses.dataclass(frozen=True)
class Migration:
    """A rewritten program, and what needs a decision in it."""

    text: str
    notes: tuple[Note, ...] = ()


def apply(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made, which must not overlap."""
    parts, end = [], 0
    for edit in sorted(set(edits)):
        assert edit.start >= end, f"edits overlap at {edit.start}"
        parts += [text[end : edit.start], edit.text]
        end = edit.stop
    return "".join([*parts, text[end:]])


def load_libcst() -> tp.Any:
    """The package `libcst`; ImportError with the remedy where it is not installed."""
    with importing(NO_LIBCST):
        import libcst
    return libcst


class Program:
    """A program and what is known about its nodes."""

    def __init__(self, text: str):
        cst = load_libcst()
        from libcst import metadata

        self.text = text
        try:
            self.module: cst.Module = cst.parse_module(text)
        except cst.ParserSyntaxError as error:
            message = f"syntax error: {error.message.splitlines()[0]}"
            raise UnreadableError(message, error.raw_line, error.raw_column + 1) from error
        wrapper = metadata.MetadataWrapper(self.module, unsafe_skip_copy=True)
        self._positions = wrapper.resolve(metadata.PositionProvider)
        self._names = wrapper.resolve(metadata.QualifiedNameProvider)
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._imported = metadata.QualifiedNameSource.IMPORT
        self.newline = self.module.default_newline
        self.lines = [0, *(match.end() for match in LINE.finditer(text))]
        """Where each line begins."""

    def offset(self, position: tp.Any) -> int:
        """The offset of a position of libcst."""
        return self.lines[position.line - 1] + position.column

    @functools.cached_property
    def imports(self) -> list[cst.Import | cst.ImportFrom]:
        """The import statements, in order."""
        kinds = ("Import", "ImportFrom")
        return [tp.cast(tp.Any, n) for n in walk(self.module) if type(n).__name__ in kinds]

    def nodes(self) -> Iterator[cst.CSTNode]:
        """The nodes of the program outside of imports, and of a dotted name only the whole."""
        hidden = {part for statement in self.imports for part in walk(statement)}
        for node in walk(self.module):
            if node not in hidden:
                hidden.update(walk(node) if dotted(node) else ())
                yield node

    def replaced(self, node: cst.CSTNode, text: str) -> Edit:
        """The edit that puts a text in the place of a node."""
        span = self._positions[node]
        return Edit(self.offset(span.start), self.offset(span.end), text)

    def position(self, node: cst.CSTNode) -> tuple[int, int]:
        """Line and column of a node, both from 1."""
        position = self._positions[node].start
        return position.line, position.column + 1

    def imported_as(self, node: cst.CSTNode) -> str:
        """The dotted name that a dotted name has where it was imported from, or an empty text."""
        if not dotted(node):
            return ""  # libcst gives calls the name of their function
        names = self._names.get(node, ())
        names = names() if callable(names) else names
        return min((name.name for name in names if name.source is self._imported), default="")

    def statement(self, node: cst.Import | cst.ImportFrom, lines: list[str]) -> Edit:
        """The edit that puts statements in the place of an import."""
        position, parent = self._positions[node].start, self._parents[node]
        indent = self.text[self.lines[position.line - 1] : self.offset(position)]
        alone = type(parent).__name__ == "SimpleStatementLine" and len(parent.body) == 1  # type: ignore[attr-defined]
        return self.replaced(node, (self.newline + indent if alone else "; ").join(lines))


def dotted(node: cst.CSTNode) -> tuple[str, ...]:
    """The parts of `a.b.c`, or nothing for an expression of another form."""
    parts: list[str] = []
    value: tp.Any = node
    while type(value).__name__ == "Attribute":
        parts.append(value.attr.value)
        value = value.value
    if type(value).__name__ != "Name":
        return ()
    return (value.value, *reversed(parts))


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all nodes below it, in the order of the text."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += reversed(node.children)
