"""A parsed program: its nodes, where they are in the text, and what import each name came from.

libcst drops some white space of blank lines when it gives a program back, so it parses a copy whose
blank lines are empty.  Lines and columns are the same in both, and edits are made in the original.
"""

from __future__ import annotations

import ast
import functools
import re
import typing as tp
import warnings

from nnxlite._base.errors import importing
from nnxlite.migrate._edits import Edit
from nnxlite.migrate._errors import UnreadableError

if tp.TYPE_CHECKING:
    import libcst as cst

BLANK = re.compile(r"^[ \t\f]+(?=[\r\n]|$)", re.MULTILINE)
LINE = re.compile(r"\r\n|\r|\n")
NO_LIBCST = (
    "nnxlite.migrate parses programs with libcst, which is not installed. "
    "Install it: pip install 'nnxlite[migrate]'"
)


def load_libcst() -> tp.Any:
    """The package `libcst`; ImportError with the remedy where it is not installed."""
    with importing(NO_LIBCST):
        import libcst
    return libcst


def _check_depth(text: str) -> None:
    """Raise UnreadableError for a program that is nested so deeply that libcst would end the process."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the program, such as an invalid escape
            ast.parse(text)
    except (RecursionError, MemoryError) as error:
        raise UnreadableError("it is nested too deeply") from error
    except (SyntaxError, ValueError) as error:
        if "too many nested" in str(error):
            raise UnreadableError("it is nested too deeply") from error
        if isinstance(error, UnicodeError):
            raise UnreadableError(f"cannot be encoded: {error}") from error


class Program:
    """A program and what is known about its nodes."""

    def __init__(self, text: str):
        cst = load_libcst()
        from libcst import metadata

        self.text = text
        copy = BLANK.sub("", text)
        _check_depth(copy)
        try:
            module = cst.parse_module(copy)
        except cst.ParserSyntaxError as error:
            message = f"syntax error: {error.message.splitlines()[0]}"
            raise UnreadableError(message, error.raw_line, error.raw_column + 1) from error
        if module.code != copy:
            raise UnreadableError("libcst does not give this program back unchanged")
        wrapper = metadata.MetadataWrapper(module, unsafe_skip_copy=True)
        self.module: cst.Module = module
        self._positions = wrapper.resolve(metadata.PositionProvider)
        self._names = wrapper.resolve(metadata.QualifiedNameProvider)
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._imported = metadata.QualifiedNameSource.IMPORT
        self.newline = module.default_newline

    @functools.cached_property
    def _lines(self) -> list[int]:
        return [0, *(match.end() for match in LINE.finditer(self.text))]

    def start(self, node: cst.CSTNode) -> int:
        """The offset of a node's first character."""
        position = self._positions[node].start
        return self._lines[position.line - 1] + position.column

    def stop(self, node: cst.CSTNode) -> int:
        """The offset after a node's last character."""
        position = self._positions[node].end
        return self._lines[position.line - 1] + position.column

    @functools.cached_property
    def imports(self) -> list[cst.Import | cst.ImportFrom]:
        """The import statements, in order."""
        kinds = ("Import", "ImportFrom")
        return [tp.cast(tp.Any, n) for n in walk(self.module) if type(n).__name__ in kinds]

    def nodes(self, without: tp.Iterable[cst.CSTNode] = ()) -> tp.Iterator[cst.CSTNode]:
        """The nodes of the program, without some statements, and of a dotted name only the whole."""
        hidden = {part for statement in without for part in walk(statement)}
        for node in walk(self.module):
            if node not in hidden:
                hidden.update(walk(node) if dotted(node) else ())
                yield node

    def replaced(self, node: cst.CSTNode, text: str) -> Edit:
        """The edit that puts a text in the place of a node."""
        return Edit(self.start(node), self.stop(node), text)

    def text_of(self, node: cst.CSTNode) -> str:
        """A node as it is written."""
        return self.text[self.start(node) : self.stop(node)]

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

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """The node that a node is a part of."""
        return self._parents[node]

    def indent(self, node: cst.CSTNode) -> str:
        """The white space before the line of a node."""
        line = self._lines[self._positions[node].start.line - 1]
        return self.text[line : self.start(node)]


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


def leading(node: cst.CSTNode, count: int) -> cst.CSTNode:
    """The first parts of a dotted name."""
    value: tp.Any = node
    while len(dotted(value)) > count:
        value = value.value
    return value


def walk(node: cst.CSTNode) -> tp.Iterator[cst.CSTNode]:
    """A node and all nodes below it, in the order of the text."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += reversed(node.children)
