"""What becomes of the names of Flax NNX and Equinox.

A name is judged by where it was imported from, whatever it is called: `flax.nnx.transforms.scan` and
`nnx.scan` are the same thing. Both become a path below `nnxlite`, which is looked up there. Names that
come from nnxlite already are judged likewise, so that notes stay until they are acted on.

For Equinox there are only notes: its modules work in the filtered transforms of nnxlite, so a program
moves step by step.
"""

from __future__ import annotations

import abc
import functools
import inspect
import pkgutil
import re
import types
import typing as tp

import libcst as cst
from libcst import metadata

from nnxlite import filtered
from nnxlite.migrate import Note, UnreadableError, _hints

STRING = re.compile(r"""["']flax\.nnx(?P<rest>(?:\.\w+)*)["']""")
LINE = re.compile(r"\r\n|\r|\n")


class Rules(cst.CSTVisitor):
    """A parsed program, what import each of its names came from, and what is to be done about them.

    Attributes:
        edits: spans of the text in bytes, and what becomes of each; the rest stays byte for byte.
        notes: what needs a decision.
    """

    METADATA_DEPENDENCIES = (
        metadata.PositionProvider,
        metadata.ByteSpanPositionProvider,
        metadata.QualifiedNameProvider,
        metadata.ParentNodeProvider,
    )

    def __init__(self, text: str):
        super().__init__()
        self._text = text
        try:
            self._module = cst.parse_module(text)
        except cst.ParserSyntaxError as error:
            message = f"syntax error: {error.message.splitlines()[0]}"
            raise UnreadableError(message, error.raw_line, error.raw_column + 1) from error
        self.edits: set[tuple[int, int, str]] = set()
        self.notes: list[Note] = []
        self._imports: list[tp.Callable[[], None]] = []
        """What is to be done about each import, when the uses of its names are known."""
        self._uses: set[tuple[str, bool]] = set()
        """Names of `flax` through which `flax.nnx` (True) or another part of Flax is reached."""
        metadata.MetadataWrapper(self._module, unsafe_skip_copy=True).visit(self)

    def edited(self) -> str:
        """The text with all edits made."""
        data = bytearray(self._text.encode())
        for start, stop, new in sorted(self.edits, reverse=True):
            data[start:stop] = new.encode()
        return data.decode()

    def visit_Import(self, node: cst.Import) -> bool:
        """An import uses no name."""
        self._imports.append(functools.partial(self._import, node))
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Likewise."""
        self._imports.append(functools.partial(self._import_from, node))
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        """Of a dotted name only the whole counts."""
        self._name(node)
        return not dotted(node)

    def visit_Name(self, node: cst.Name) -> None:
        """A name by itself."""
        self._name(node)

    def leave_Module(self, original_node: cst.Module) -> None:
        """The imports come last."""
        for judge in self._imports:
            judge()

    @abc.abstractmethod
    def _name(self, node: cst.Name | cst.Attribute) -> None:
        """Judge a name."""

    def _import(self, node: cst.Import) -> None:
        """Judge an import; what is imported so may be judged where it is used."""

    @abc.abstractmethod
    def _import_from(self, node: cst.ImportFrom) -> None:
        """Judge an import of names."""

    def _imported_as(self, node: cst.CSTNode) -> str:
        """The dotted name that a dotted name has where it was imported from, or an empty text."""
        if not dotted(node):
            return ""  # libcst gives calls the name of their function
        names: tp.Any = self.get_metadata(metadata.QualifiedNameProvider, node, ())
        imported = metadata.QualifiedNameSource.IMPORT
        return min((name.name for name in names if name.source is imported), default="")

    def _replace(self, node: cst.CSTNode, text: str) -> None:
        """Put a text in the place of a node."""
        span: tp.Any = self.get_metadata(metadata.ByteSpanPositionProvider, node)
        self.edits.add((span.start, span.start + span.length, text))

    def _note(self, node: cst.CSTNode, what: str, hint: tuple[str, str]) -> None:
        """Note something at a node, with what to do, and the page that says more."""
        position = tp.cast(tp.Any, self.get_metadata(metadata.PositionProvider, node)).start
        self.notes.append(Note(position.line, position.column + 1, what, *hint))


class FromNnx(Rules):
    """The rules for Flax NNX."""

    def _name(self, node: cst.Name | cst.Attribute) -> None:
        name, parts = self._imported_as(node), dotted(node)
        full, path = name.split("."), _path(name)
        if full[0] == "flax" and len(full) == len(parts):  # the first part is `flax` itself
            self._uses.add((parts[0], bool(path)))
            if path:
                first: tp.Any = node
                while len(dotted(first)) > 2:
                    first = first.value
                self._replace(first, "nnxlite")
            elif len(full) > 1:
                self._stays(node, ".".join(full[:2]), name)
        if path and len(parts) > 1:
            self._check(node, path)

    def _check(self, node: cst.CSTNode, path: str) -> None:
        if absent := find(path)[1]:
            parts = [part for part in reversed(absent.split(".")) if part in _hints.ABSENT]
            hint = _hints.ABSENT[parts[0]] if parts else _hints.OTHER_ABSENT
            self._note(node, f"nnxlite has no `{absent.removeprefix('nnxlite.')}`", hint)

    def _stays(self, node: cst.CSTNode, name: str, known: str = "") -> None:
        """Note that a part of Flax stays, with the hint for the longest known part of its name."""
        known = known or name
        while known and known not in _hints.FLAX:
            known = known.rpartition(".")[0]
        self._note(node, f"`{name}` stays", _hints.FLAX.get(known, _hints.OTHER_FLAX))

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        """A string that says the whole path of a module."""
        if found := STRING.fullmatch(node.value):
            hint = f'write "nnxlite{found["rest"]}" if it names a module'
            what = f"a string says `flax.nnx{found['rest']}`"
            self._note(node, what, (hint, _hints.FLAX_NNX))

    def visit_Call(self, node: cst.Call) -> None:
        """Arguments of earlier versions."""
        path = _path(self._imported_as(node.func))
        if not path or find(path)[1]:
            return
        short, known = path.rpartition(".")[2], parameters(path)
        given = {arg.keyword.value: arg for arg in node.args if arg.keyword}
        for keyword, arg in given.items():
            if known is not None and keyword not in known:
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
                if binds_flax and (bound, False) in self._uses:
                    new["import flax"] = None
                new[f"import {path}" + (f" as {bound}" if alias.asname else "")] = None
                continue
            moves = binds_flax and (bound, True) in self._uses
            if moves:
                new["import nnxlite"] = None
            if name != "flax" or not moves or (bound, False) in self._uses:
                stay.append(alias)
            if name.startswith("flax."):
                self._stays(alias, name)
        self._moved(node, stay, list(new))

    def _import_from(self, node: cst.ImportFrom) -> None:
        module = ".".join(dotted(node.module)) if node.module and not node.relative else ""
        aliases = [] if isinstance(node.names, cst.ImportStar) else list(node.names)
        if path := _path(module):
            for alias in aliases:
                self._check(alias, f"{path}.{alias.name.value}")
            if module != path and aliases:
                self._replace(tp.cast(cst.CSTNode, node.module), path)
            elif module != path:
                hint = "import nnxlite as nnx: a star would hide `map` and `filter` of Python"
                self._note(node, "a star import of `flax.nnx`", (hint, _hints.FLAX_NNX))
        elif module == "flax":
            stay = [alias for alias in aliases if alias.name.value != "nnx"]
            for alias in stay:
                self._stays(alias, f"flax.{alias.name.value}")
            new = [f"import nnxlite as {bound_name(a)}" for a in aliases if a not in stay]
            self._moved(node, stay, new)
        elif module.startswith("flax."):
            self._stays(node, module)

    def _moved(
        self, node: cst.Import | cst.ImportFrom, stay: list[cst.ImportAlias], new: list[str]
    ) -> None:
        """Replace an import by one of the names that stay, as it was written, and new statements."""
        if stay and new:
            if getattr(node, "lpar", None) is None:
                stay[-1] = stay[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            new.insert(0, self._module.code_for_node(node.with_changes(names=stay)))
        parent = self.get_metadata(metadata.ParentNodeProvider, node)
        separator = "; "
        if isinstance(parent, cst.SimpleStatementLine) and len(parent.body) == 1:  # on its own line
            position = tp.cast(tp.Any, self.get_metadata(metadata.PositionProvider, node)).start
            line = LINE.split(self._text)[position.line - 1]
            separator = self._module.default_newline + line[: position.column]
        if new:
            self._replace(node, separator.join(new))


class FromEquinox(Rules):
    """A note for every name of Equinox; those of `nnxlite.filtered` are the same here."""

    def _name(self, node: cst.Name | cst.Attribute) -> None:
        name = self._imported_as(node)
        if name.startswith("equinox.") and dotted(node)[0] != name.rpartition(".")[2]:
            self._say(node, name.removeprefix("equinox."))

    def _import_from(self, node: cst.ImportFrom) -> None:
        first, *inner = dotted(node.module) if node.module else [""]
        if first == "equinox" and not (node.relative or isinstance(node.names, cst.ImportStar)):
            for alias in node.names:
                self._say(alias, ".".join((*inner, *dotted(alias.name))))

    def _say(self, node: cst.CSTNode, name: str) -> None:
        hint = _hints.EQUINOX_LEFT.get(name.split(".")[0])
        if hint is None and hasattr(filtered, name):
            hint = f"nnx.{name} is the same function, for modules of both"
        self._note(node, f"`equinox.{name}`", (hint or _hints.OTHER_EQUINOX, _hints.EQUINOX))


def bound_name(alias: cst.ImportAlias) -> str:
    """The name that an alias of an import binds."""
    return dotted(tp.cast(tp.Any, alias.asname.name if alias.asname else alias.name))[0]


def _path(name: str) -> str:
    """The path below `nnxlite` of a name of `flax.nnx` or nnxlite, or an empty text."""
    if name == "flax.nnx" or name.startswith("flax.nnx."):
        rest = name.removeprefix("flax.nnx")  # Flax 0.8 had its modules in `flax.nnx.nnx`
        return "nnxlite" + (rest.removeprefix(".nnx") if rest.startswith(".nnx.") else rest)
    return name if name == "nnxlite" or name.startswith("nnxlite.") else ""


def dotted(node: cst.CSTNode) -> tuple[str, ...]:
    """The parts of `a.b.c`, or nothing for an expression of another form."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    return (node.value, *reversed(parts)) if isinstance(node, cst.Name) else ()


# What nnxlite offers, looked up in nnxlite itself ---------------------------------------------------


@functools.cache
def find(path: str) -> tuple[tp.Any, str]:
    """What a dotted name of nnxlite is, or None and its first part that does not exist."""
    try:
        return pkgutil.resolve_name(path), ""
    except (AttributeError, ImportError) as error:
        if isinstance(getattr(error, "obj", None), (types.ModuleType, type)):
            return None, f"{path.partition(f'.{error.name}')[0]}.{error.name}"
    # It needs a package that is not installed, or is an attribute of an instance: not known here.
    return None, ""


@functools.cache
def parameters(path: str) -> frozenset[str] | None:
    """The names of the parameters of a function or class; None where any name is accepted."""
    try:
        found = inspect.signature(find(path)[0]).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in found):
        return None
    return frozenset(parameter.name for parameter in found)
