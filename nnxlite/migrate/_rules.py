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

import libcst as cst

from nnxlite.migrate import _hints
from nnxlite.migrate._program import Edit, Note, Program, dotted

STRING = re.compile(r"""["']flax\.nnx(?P<rest>(?:\.\w+)*)["']""")


class Rules:
    """The edits and notes of one program."""

    def __init__(self, program: Program):
        self.program = program
        self.edits: list[Edit] = []
        self.notes: list[Note] = []
        self.uses: collections.Counter[tuple[str, bool]] = collections.Counter()
        """How often `flax.nnx` (True) or another part of Flax is reached through a name of `flax`."""

    def note(self, node: cst.CSTNode, what: str, hint: tuple[str, str]) -> None:
        """Note something at a node, with what to do, and the page that says more."""
        self.notes.append(Note(*self.program.position(node), what, *hint))

    def nnx(self) -> None:
        """The rules for Flax NNX."""
        for node in self.program.nodes():
            match node:
                case cst.Attribute() | cst.Name():
                    self._name(node)
                case cst.Call():
                    self._call(node)
                case cst.SimpleString():
                    if found := STRING.fullmatch(node.value):
                        hint = f'write "nnxlite{found["rest"]}" if it names a module'
                        what = f"a string says `flax.nnx{found['rest']}`"
                        self.note(node, what, (hint, _hints.FLAX_NNX))
        for statement in self.program.imports:
            match statement:
                case cst.Import():
                    self._import(statement)
                case cst.ImportFrom():
                    self._import_from(statement)

    def _name(self, node: cst.Name | cst.Attribute) -> None:
        name, parts = self.program.imported_as(node), dotted(node)
        full, path = name.split("."), _path(name)
        if full[0] == "flax" and len(full) - len(parts) == 0:  # the first part is `flax` itself
            self.uses[parts[0], bool(path)] += 1
            if path:
                first: tp.Any = node
                while len(dotted(first)) > 2:
                    first = first.value
                self.edits.append(self.program.replaced(first, "nnxlite"))
            elif len(full) > 1:
                self.note(node, f"`{'.'.join(full[:2])}` stays", _flax_hint(name))
        if path and len(parts) > 1:
            self._check(node, path)

    def _check(self, node: cst.CSTNode, path: str) -> None:
        if absent := missing(path):
            parts = [part for part in reversed(absent.split(".")) if part in _hints.ABSENT]
            hint = _hints.ABSENT[parts[0]] if parts else _hints.OTHER_ABSENT
            self.note(node, f"nnxlite has no `{absent.removeprefix('nnxlite.')}`", hint)

    def _call(self, node: cst.Call) -> None:
        path = _path(self.program.imported_as(node.func))
        if not path or missing(path):
            return
        short, known = path.rpartition(".")[2], parameters(path)
        given = [arg.keyword.value for arg in node.args if arg.keyword]
        for arg in node.args:
            keyword = arg.keyword.value if arg.keyword else ""
            if keyword and known is not None and keyword not in known:
                use = _hints.KEYWORDS.get(keyword, f"its parameters are {', '.join(sorted(known))}")
                what = f"`nnx.{short}` takes no argument `{keyword}`"
                self.note(arg, what, (use, _hints.FLAX_NNX))
        positional = len(node.args) - len(given)
        if any(arg.star for arg in node.args) or len(node.args) < 2 or positional > 2:
            return
        if short == "VariableState" and positional == 2:
            hint = ("write kind(value), such as nnx.Param(value)", _hints.FLAX_NNX)
            self.note(node, "`VariableState` is another name of `Variable`", hint)
        elif short == "Optimizer" and "wrt" not in given:
            # Before Flax 0.11 an Optimizer contained the model, which `ModelAndOptimizer` still does.
            if isinstance(node.func, cst.Attribute):
                self.edits.append(self.program.replaced(node.func.attr, "ModelAndOptimizer"))
            else:
                hint = "import nnx.ModelAndOptimizer, or add wrt=nnx.Param and call update(model, grads)"
                self.note(node, "`Optimizer` needs `wrt`", (hint, _hints.FLAX_NNX))

    # Imports ----------------------------------------------------------------------------------------

    def _import(self, node: cst.Import) -> None:
        stay: list[cst.ImportAlias] = []
        new: dict[str, None] = {}
        for alias in node.names:
            name, bound = ".".join(dotted(alias.name)), bound_name(alias)
            binds_flax = name.split(".")[0] == "flax" and (name == "flax" or not alias.asname)
            if path := _path(name) if name.startswith("flax") else "":
                self._check(alias, path)
                if binds_flax and self.uses[bound, False]:
                    new["import flax"] = None
                new[f"import {path}" + (f" as {bound}" if alias.asname else "")] = None
                continue
            moves = binds_flax and self.uses[bound, True]
            if moves:
                new["import nnxlite"] = None
            if name != "flax" or not moves or self.uses[bound, False]:
                stay.append(alias)
            if name.startswith("flax."):
                self.note(alias, f"`{name}` stays", _flax_hint(name))
        self._moved(node, stay, list(new))

    def _import_from(self, node: cst.ImportFrom) -> None:
        module = ".".join(dotted(node.module)) if node.module and not node.relative else ""
        path = _path(module)
        if path and isinstance(node.names, cst.ImportStar):
            if module != path:
                hint = "import nnxlite as nnx: a star would hide `map` and `filter` of Python"
                self.note(node, "a star import of `flax.nnx`", (hint, _hints.FLAX_NNX))
        elif path and not isinstance(node.names, cst.ImportStar):
            for alias in node.names:
                self._check(alias, f"{path}.{alias.name.value}")
            if module != path:
                self.edits.append(self.program.replaced(tp.cast(cst.CSTNode, node.module), path))
        elif module == "flax" and not isinstance(node.names, cst.ImportStar):
            stay = [alias for alias in node.names if alias.name.value != "nnx"]
            for alias in stay:
                self.note(
                    alias,
                    f"`flax.{alias.name.value}` stays",
                    _flax_hint(f"flax.{alias.name.value}"),
                )
            new = [f"import nnxlite as {bound_name(a)}" for a in node.names if a not in stay]
            self._moved(node, stay, new)
        elif module.startswith("flax."):
            self.note(node, f"`{module}` stays", _flax_hint(module))

    def _moved(
        self, node: cst.Import | cst.ImportFrom, stay: list[cst.ImportAlias], new: list[str]
    ) -> None:
        """Replace an import by one of the names that stay, as it was written, and new statements."""
        if not new:
            return
        if stay:
            if getattr(node, "lpar", None) is None:
                stay[-1] = stay[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            new.insert(0, self.program.module.code_for_node(node.with_changes(names=stay)))
        self.edits.append(self.program.statement(node, new))

    # Equinox ----------------------------------------------------------------------------------------

    def equinox(self) -> None:
        """A note for every name of Equinox."""
        found: list[tuple[cst.CSTNode, str]] = []
        for node in self.program.nodes():
            name = self.program.imported_as(node)
            if name.startswith("equinox.") and dotted(node)[0] != name.rpartition(".")[2]:
                found.append((node, name.removeprefix("equinox.")))
        for statement in self.program.imports:
            if (
                isinstance(statement, cst.ImportFrom)
                and statement.module
                and not statement.relative
            ):
                module = dotted(statement.module)
                names = [] if isinstance(statement.names, cst.ImportStar) else statement.names
                if module[:1] == ("equinox",):
                    found += [(a, ".".join((*module[1:], *dotted(a.name)))) for a in names]
        for node, name in found:
            hint = _hints.EQUINOX_LEFT.get(name.split(".")[0], _hints.OTHER_EQUINOX)
            if name in _hints.EQUINOX_SAME:
                hint = f"nnx.{name} is the same function, for modules of both"
            self.note(node, f"`equinox.{name}`", (hint, _hints.EQUINOX))


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
