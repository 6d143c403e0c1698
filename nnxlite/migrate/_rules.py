"""What becomes of the names of Flax NNX and Equinox.

A name is judged by where it was imported from, whatever it is called: `flax.nnx.transforms.scan` and
`nnx.scan` are the same thing. Both become a path below `nnxlite`, which is looked up there. Names that
come from nnxlite already are judged likewise, so that notes stay until they are acted on.

For Equinox there are only notes: its modules work in the filtered transforms of nnxlite, so a program
moves step by step.
"""

from __future__ import annotations

import collections
import functools
import importlib
import inspect
import re
import types
import typing as tp
from collections.abc import Iterator

import libcst as cst
from libcst import metadata

from nnxlite import filtered
from nnxlite.migrate import Note, UnreadableError, _hints

STRING = re.compile(r"""["']flax\.nnx(?P<rest>(?:\.\w+)*)["']""")
LINE = re.compile(r"\r\n|\r|\n")

Edit: tp.TypeAlias = tuple[int, int, str]
"""The characters from the first offset to the second become the text."""


class Rules:
    """A parsed program, what import each of its names came from, and what is to be done about them.

    Attributes:
        edits: spans of the text, which must not overlap; what none of them covers stays byte for byte.
        notes: what needs a decision.
    """

    def __init__(self, text: str):
        self._text = text
        try:
            self._module = cst.parse_module(text)
        except cst.ParserSyntaxError as error:
            message = f"syntax error: {error.message.splitlines()[0]}"
            raise UnreadableError(message, error.raw_line, error.raw_column + 1) from error
        wrapper = metadata.MetadataWrapper(self._module, unsafe_skip_copy=True)
        self._positions = wrapper.resolve(metadata.PositionProvider)
        self._names = wrapper.resolve(metadata.QualifiedNameProvider)
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._lines = [0, *(match.end() for match in LINE.finditer(text))]
        self._imports = [
            n for n in walk(self._module) if isinstance(n, (cst.Import, cst.ImportFrom))
        ]
        self.edits: list[Edit] = []
        self.notes: list[Note] = []
        self._uses: collections.Counter[tuple[str, bool]] = collections.Counter()
        """How often `flax.nnx` (True) or another part of Flax is reached through a name of `flax`."""

    def edited(self) -> str:
        """The text with all edits made."""
        parts, end = [], 0
        for start, stop, new in sorted(set(self.edits)):
            assert start >= end, f"edits overlap at {start}"
            parts += [self._text[end:start], new]
            end = stop
        return "".join([*parts, self._text[end:]])

    def _nodes(self) -> Iterator[cst.CSTNode]:
        """The nodes of the program outside of imports, and of a dotted name only the whole."""
        hidden = {part for statement in self._imports for part in walk(statement)}
        for node in walk(self._module):
            if node not in hidden:
                hidden.update(walk(node) if dotted(node) else ())
                yield node

    def _imported_as(self, node: cst.CSTNode) -> str:
        """The dotted name that a dotted name has where it was imported from, or an empty text."""
        if not dotted(node):
            return ""  # libcst gives calls the name of their function
        names = self._names.get(node, ())
        names = names() if callable(names) else names
        imported = metadata.QualifiedNameSource.IMPORT
        return min((name.name for name in names if name.source is imported), default="")

    def _offset(self, position: tp.Any) -> int:
        return self._lines[position.line - 1] + position.column

    def _replace(self, node: cst.CSTNode, text: str) -> None:
        """Put a text in the place of a node."""
        span = self._positions[node]
        self.edits.append((self._offset(span.start), self._offset(span.end), text))

    def _note(self, node: cst.CSTNode, what: str, hint: tuple[str, str]) -> None:
        """Note something at a node, with what to do, and the page that says more."""
        position = self._positions[node].start
        self.notes.append(Note(position.line, position.column + 1, what, *hint))

    def nnx(self) -> None:
        """The rules for Flax NNX."""
        for node in self._nodes():
            match node:
                case cst.Attribute() | cst.Name():
                    self._name(node)
                case cst.Call():
                    self._call(node)
                case cst.SimpleString():
                    if found := STRING.fullmatch(node.value):
                        hint = f'write "nnxlite{found["rest"]}" if it names a module'
                        what = f"a string says `flax.nnx{found['rest']}`"
                        self._note(node, what, (hint, _hints.FLAX_NNX))
        for statement in self._imports:
            match statement:
                case cst.Import():
                    self._import(statement)
                case cst.ImportFrom():
                    self._import_from(statement)

    def _name(self, node: cst.Name | cst.Attribute) -> None:
        name, parts = self._imported_as(node), dotted(node)
        full, path = name.split("."), _path(name)
        if full[0] == "flax" and len(full) - len(parts) == 0:  # the first part is `flax` itself
            self._uses[parts[0], bool(path)] += 1
            if path:
                first: tp.Any = node
                while len(dotted(first)) > 2:
                    first = first.value
                self._replace(first, "nnxlite")
            elif len(full) > 1:
                self._note(node, f"`{'.'.join(full[:2])}` stays", _flax_hint(name))
        if path and len(parts) > 1:
            self._check(node, path)

    def _check(self, node: cst.CSTNode, path: str) -> None:
        if absent := missing(path):
            parts = [part for part in reversed(absent.split(".")) if part in _hints.ABSENT]
            hint = _hints.ABSENT[parts[0]] if parts else _hints.OTHER_ABSENT
            self._note(node, f"nnxlite has no `{absent.removeprefix('nnxlite.')}`", hint)

    def _call(self, node: cst.Call) -> None:
        path = _path(self._imported_as(node.func))
        if not path or missing(path):
            return
        short, known = path.rpartition(".")[2], parameters(path)
        given = [arg.keyword.value for arg in node.args if arg.keyword]
        for arg in node.args:
            keyword = arg.keyword.value if arg.keyword else ""
            if keyword and known is not None and keyword not in known:
                use = _hints.KEYWORDS.get(keyword, f"its parameters are {', '.join(sorted(known))}")
                what = f"`nnx.{short}` takes no argument `{keyword}`"
                self._note(arg, what, (use, _hints.FLAX_NNX))
        positional = len(node.args) - len(given)
        if any(arg.star for arg in node.args) or len(node.args) < 2 or positional > 2:
            return
        if short == "VariableState" and positional == 2:
            hint = ("write kind(value), such as nnx.Param(value)", _hints.FLAX_NNX)
            self._note(node, "`VariableState` is another name of `Variable`", hint)
        elif short == "Optimizer" and "wrt" not in given:
            # Before Flax 0.11 an Optimizer contained the model, which `ModelAndOptimizer` still does.
            if isinstance(node.func, cst.Attribute):
                self._replace(node.func.attr, "ModelAndOptimizer")
            else:
                hint = "import nnx.ModelAndOptimizer, or add wrt=nnx.Param and call update(model, grads)"
                self._note(node, "`Optimizer` needs `wrt`", (hint, _hints.FLAX_NNX))

    # Imports ----------------------------------------------------------------------------------------

    def _import(self, node: cst.Import) -> None:
        stay: list[cst.ImportAlias] = []
        new: dict[str, None] = {}
        for alias in node.names:
            name, bound = ".".join(dotted(alias.name)), bound_name(alias)
            binds_flax = name.split(".")[0] == "flax" and (name == "flax" or not alias.asname)
            if path := _path(name) if name.startswith("flax") else "":
                self._check(alias, path)
                if binds_flax and self._uses[bound, False]:
                    new["import flax"] = None
                new[f"import {path}" + (f" as {bound}" if alias.asname else "")] = None
                continue
            moves = binds_flax and self._uses[bound, True]
            if moves:
                new["import nnxlite"] = None
            if name != "flax" or not moves or self._uses[bound, False]:
                stay.append(alias)
            if name.startswith("flax."):
                self._note(alias, f"`{name}` stays", _flax_hint(name))
        self._moved(node, stay, list(new))

    def _import_from(self, node: cst.ImportFrom) -> None:
        module = ".".join(dotted(node.module)) if node.module and not node.relative else ""
        path = _path(module)
        if path and isinstance(node.names, cst.ImportStar):
            if module != path:
                hint = "import nnxlite as nnx: a star would hide `map` and `filter` of Python"
                self._note(node, "a star import of `flax.nnx`", (hint, _hints.FLAX_NNX))
        elif path and not isinstance(node.names, cst.ImportStar):
            for alias in node.names:
                self._check(alias, f"{path}.{alias.name.value}")
            if module != path:
                self._replace(tp.cast(cst.CSTNode, node.module), path)
        elif module == "flax" and not isinstance(node.names, cst.ImportStar):
            stay = [alias for alias in node.names if alias.name.value != "nnx"]
            for alias in stay:
                self._note(
                    alias,
                    f"`flax.{alias.name.value}` stays",
                    _flax_hint(f"flax.{alias.name.value}"),
                )
            new = [f"import nnxlite as {bound_name(a)}" for a in node.names if a not in stay]
            self._moved(node, stay, new)
        elif module.startswith("flax."):
            self._note(node, f"`{module}` stays", _flax_hint(module))

    def _moved(
        self, node: cst.Import | cst.ImportFrom, stay: list[cst.ImportAlias], new: list[str]
    ) -> None:
        """Replace an import by one of the names that stay, as it was written, and new statements."""
        if not new:
            return
        if stay:
            if getattr(node, "lpar", None) is None:
                stay[-1] = stay[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            new.insert(0, self._module.code_for_node(node.with_changes(names=stay)))
        position, parent = self._positions[node].start, self._parents[node]
        indent = self._text[self._lines[position.line - 1] : self._offset(position)]
        alone = isinstance(parent, cst.SimpleStatementLine) and len(parent.body) == 1
        self._replace(node, (self._module.default_newline + indent if alone else "; ").join(new))

    # Equinox ----------------------------------------------------------------------------------------

    def equinox(self) -> None:
        """A note for every name of Equinox; those of `nnxlite.filtered` are the same here."""
        found: list[tuple[cst.CSTNode, str]] = []
        for node in self._nodes():
            name = self._imported_as(node)
            if name.startswith("equinox.") and dotted(node)[0] != name.rpartition(".")[2]:
                found.append((node, name.removeprefix("equinox.")))
        for statement in self._imports:
            match statement:
                case cst.ImportFrom(module=cst.CSTNode() as module, names=[*names]):
                    first, *inner = dotted(module)
                    if first == "equinox" and not statement.relative:
                        found += [(a, ".".join((*inner, *dotted(a.name)))) for a in names]
        for node, name in found:
            hint = _hints.EQUINOX_LEFT.get(name.split(".")[0])
            if hint is None and hasattr(filtered, name):
                hint = f"nnx.{name} is the same function, for modules of both"
            hint = hint or _hints.OTHER_EQUINOX
            self._note(node, f"`equinox.{name}`", (hint, _hints.EQUINOX))


def bound_name(alias: cst.ImportAlias) -> str:
    """The name that an alias of an import binds."""
    return dotted(tp.cast(tp.Any, alias.asname.name if alias.asname else alias.name))[0]


def _path(name: str) -> str:
    """The path below `nnxlite` of a name of `flax.nnx` or nnxlite, or an empty text."""
    if name == "flax.nnx" or name.startswith("flax.nnx."):
        rest = name.removeprefix("flax.nnx")  # Flax 0.8 had its modules in `flax.nnx.nnx`
        return "nnxlite" + (rest.removeprefix(".nnx") if rest.startswith(".nnx.") else rest)
    return name if name == "nnxlite" or name.startswith("nnxlite.") else ""


def _flax_hint(name: str) -> tuple[str, str]:
    while name and name not in _hints.FLAX:
        name = name.rpartition(".")[0]
    return _hints.FLAX.get(name, _hints.OTHER_FLAX)


def dotted(node: cst.CSTNode) -> tuple[str, ...]:
    """The parts of `a.b.c`, or nothing for an expression of another form."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    return (node.value, *reversed(parts)) if isinstance(node, cst.Name) else ()


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all nodes below it, in the order of the text."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += reversed(node.children)


# What nnxlite offers, looked up in nnxlite itself ---------------------------------------------------


@functools.cache
def missing(path: str) -> str:
    """The first part of a dotted name below `nnxlite` that does not exist, or an empty text."""
    value: tp.Any = importlib.import_module("nnxlite")
    walked = ["nnxlite"]
    for part in path.split(".")[1:]:
        if not isinstance(value, (types.ModuleType, type)):
            return ""  # attributes of an instance are known when the program runs
        walked.append(part)
        try:
            value = getattr(value, part)
        except ImportError:
            return ""  # it needs a package that is not installed
        except AttributeError:
            try:
                value = importlib.import_module(".".join(walked))
            except ImportError:
                return ".".join(walked)
    return ""


@functools.cache
def parameters(path: str) -> frozenset[str] | None:
    """The names of the parameters of a function or class; None where any name is accepted."""
    value: tp.Any = importlib.import_module("nnxlite")
    for part in path.split(".")[1:]:
        value = getattr(value, part, None)
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in found):
        return None
    return frozenset(parameter.name for parameter in found)
