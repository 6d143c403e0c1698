"""The rules for programs of Flax NNX: imports, names, and spellings of its earlier versions.

A name is judged by where it was imported from, whatever it is called: `flax.nnx.transforms.scan` and
`nnx.scan` are the same thing.  Both become a path below `nnxlite`, which is looked up there.  Names that
come from nnxlite already are judged likewise, so that notes stay until they are acted on.
"""

from __future__ import annotations

import collections
import re
import typing as tp

import libcst as cst

from nnxlite.migrate import _hints
from nnxlite.migrate._edits import Edit, Note
from nnxlite.migrate._imports import alias_text, bound_name, rewrite
from nnxlite.migrate._lookup import missing, parameters
from nnxlite.migrate._program import Program, dotted, leading, walk

STRING = re.compile(r"""(?P<quote>["'])flax\.nnx(?P<rest>(?:\.\w+)*)(?P=quote)""")
GRADIENTS = {"nnxlite.grad", "nnxlite.value_and_grad"}
NODES = {"nnxlite.Module", "nnxlite.Object", "nnxlite.Pytree"}
"""Base classes whose objects notify the engine of assignments."""


class NnxRules:
    """The edits and notes of one program."""

    def __init__(self, program: Program):
        self.program = program
        self.edits: list[Edit] = []
        self.notes: list[Note] = []
        self.moving: collections.Counter[str] = collections.Counter()
        """How often `flax.nnx` is reached through each name that is bound to `flax`."""
        self.staying: collections.Counter[str] = collections.Counter()
        """How often something else of Flax is."""
        self.gone: set[cst.CSTNode] = set()
        """Names that an edit takes away."""
        self.optimizers: set[str] = set()
        """The expressions that are assigned an Optimizer that wants the model in `update`."""

    def run(self) -> tuple[list[Edit], list[Note]]:
        """The edits and notes of the program."""
        for node in self.program.nodes(without=self.program.imports):
            match node:
                case cst.Attribute() | cst.Name():
                    if dotted(node):
                        self._name(node)
                case cst.Call():
                    self._call(node)
                case cst.SimpleString():
                    self._string(node)
                case cst.Assign() | cst.AnnAssign() | cst.Param():
                    self._remember_optimizer(node)
                case cst.ClassDef():
                    self._class(node)
        for node in walk(self.program.module):
            if isinstance(node, cst.Call):
                self._update_call(node)
        for statement in self.program.imports:
            if isinstance(statement, cst.Import):
                self._import(statement)
            else:
                self._import_from(statement)
        return self.edits, self.notes

    def _note(self, node: cst.CSTNode, what: str, hint: tuple[str, str]) -> None:
        self.notes.append(Note(*self.program.position(node), what, *hint))

    # Names ------------------------------------------------------------------------------------------

    def _path(self, node: cst.CSTNode) -> str:
        """The path below `nnxlite` of what a node names, or an empty text."""
        name = self.program.imported_as(node)
        if name == "flax.nnx" or name.startswith("flax.nnx."):
            return _moved(name)
        return name if name == "nnxlite" or name.startswith("nnxlite.") else ""

    def _name(self, node: cst.Name | cst.Attribute) -> None:
        name = self.program.imported_as(node)
        if not name.startswith(("flax", "nnxlite")) or node in self.gone:
            return
        parts = dotted(node)
        full = name.split(".")
        root = ".".join(full[: len(full) - len(parts) + 1])  # what the first part was imported as
        path = self._path(node)
        if root == "flax" and path:
            self.moving[parts[0]] += 1
            self.edits.append(self.program.replaced(leading(node, 2), "nnxlite"))
        elif root == "flax" and full[0] == "flax":
            self.staying[parts[0]] += 1
            if len(full) > 1:
                self._note(node, f"`{'.'.join(full[:2])}` stays", _flax_hint(name))
        if path and len(parts) > 1:
            self._check(node, path)
        if path == "nnxlite.VariableState" and len(parts) > 1 and not self._is_called(node):
            self._replace_last(node, "Variable")

    def _check(self, node: cst.CSTNode, path: str) -> None:
        absent = missing(path)
        if absent:
            self._note(node, f"nnxlite has no `{absent.removeprefix('nnxlite.')}`", _absent(absent))

    def _is_called(self, node: cst.CSTNode) -> bool:
        parent = self.program.parent(node)
        return isinstance(parent, cst.Call) and parent.func is node

    def _replace_last(self, node: cst.Name | cst.Attribute, name: str) -> None:
        last = node.attr if isinstance(node, cst.Attribute) else node
        self.edits.append(self.program.replaced(last, name))

    def _string(self, node: cst.SimpleString) -> None:
        found = STRING.fullmatch(node.value)
        if not found:
            return
        if self._is_annotation(node):
            rest, quote = found["rest"], found["quote"]
            self.moving["flax"] += 1
            self.edits.append(self.program.replaced(node, f"{quote}nnxlite{rest}{quote}"))
        else:
            hint = (f'write "nnxlite{found["rest"]}" if it names a module', _hints.FLAX_NNX)
            self._note(node, f"a string says `flax.nnx{found['rest']}`", hint)

    def _is_annotation(self, node: cst.CSTNode) -> bool:
        while isinstance(node, (cst.BaseExpression, cst.Index, cst.SubscriptElement)):
            node = self.program.parent(node)
        return isinstance(node, cst.Annotation)

    # Calls and assignments --------------------------------------------------------------------------

    def _call(self, node: cst.Call) -> None:
        name = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        if name == "partial_init":
            hint = "make it in a function under nnx.jit, and load the known state by nnx.update"
            self._note(node, "`partial_init` no longer exists", (hint, _hints.FLAX_NNX))
        elif name == "fork" and any(not arg.keyword and not arg.star for arg in node.args):
            receiver = self.program.text_of(tp.cast(cst.Attribute, node.func).value)
            if receiver.endswith(("rng", "rngs")):
                hint = "use rngs.fork(split=...) or nnx.split_rngs"
                self._note(node, "`fork` takes no positional argument", (hint, _hints.FLAX_NNX))
        elif name == "__setattr__" and self.program.text_of(node.func).startswith("object."):
            self._hidden_write(node)
        path = self._path(node.func)
        if not path or missing(path):
            return
        short = path.rpartition(".")[2]
        match short:
            case "Optimizer":
                self._optimizer(node)
            case "VariableState":
                self._variable_state(node)
            case "grad" | "value_and_grad":
                self._gradient(node)
        self._keywords(node, path, short)

    def _keywords(self, node: cst.Call, path: str, short: str) -> None:
        known = parameters(path)
        for arg in node.args:
            keyword = arg.keyword.value if arg.keyword else ""
            if keyword == "hijax" and self.program.text_of(arg.value) == "True":
                hint = ("use ref=True, or leave it out", "differences.md")
                self._note(arg, "`hijax=True` is refused", hint)
            elif keyword == "wrt" and f"nnxlite.{short}" in GRADIENTS:
                continue
            elif keyword and known is not None and keyword not in known:
                hint = _hints.FLAX_NNX
                if keyword in ("state_axes", "variable_axes"):
                    use = "give in_axes an nnx.StateAxes({filter: axis, ...: axis})"
                else:
                    use = f"its parameters are {', '.join(sorted(known))}"
                self._note(arg, f"`nnx.{short}` takes no argument `{keyword}`", (use, hint))

    def _optimizer(self, node: cst.Call) -> None:
        """Before Flax 0.11 an Optimizer contained the model, which `ModelAndOptimizer` still does."""
        if any(arg.star or (arg.keyword and arg.keyword.value == "wrt") for arg in node.args):
            return
        if sum(not arg.keyword for arg in node.args) > 2 or len(node.args) < 2:
            return
        if isinstance(node.func, cst.Attribute):
            self._replace_last(node.func, "ModelAndOptimizer")
        else:
            hint = (
                "import nnx.ModelAndOptimizer, or add wrt=nnx.Param and call update(model, grads)"
            )
            self._note(node, "`Optimizer` needs `wrt`", (hint, _hints.FLAX_NNX))

    def _variable_state(self, node: cst.Call) -> None:
        """`VariableState(kind, value)` of Flax before 0.11 is `kind(value)`."""
        func = tp.cast(cst.Name | cst.Attribute, node.func)
        plain = [arg for arg in node.args if not arg.keyword]
        if len(plain) == 2 and not any(arg.star for arg in plain) and dotted(plain[0].value):
            kind, value = plain
            start, stop = self.program.start, self.program.stop
            between = self.program.text[stop(kind.value) : start(value.value)]
            before = self.program.text[stop(func) : start(kind.value)]
            if not {"#", "\n", "\r"} & {*between, *before}:
                self.edits.append(Edit(start(func), start(kind.value), ""))
                self.edits.append(Edit(stop(kind.value), start(value.value), "("))
                self.gone.add(func)
                return
        if len(plain) == 1 and isinstance(func, cst.Attribute):
            self._replace_last(func, "Variable")
        else:
            hint = ("write kind(value), such as nnx.Param(value)", _hints.FLAX_NNX)
            self._note(node, "`VariableState` is another name of `Variable`", hint)

    def _gradient(self, node: cst.Call) -> None:
        """`grad(f, wrt=filter)` of early NNX is `grad(f, argnums=nnx.DiffState(0, filter))`."""
        given = {arg.keyword.value: arg for arg in node.args if arg.keyword}
        if "wrt" not in given:
            return
        wrt, func = given["wrt"], node.func
        alone = sum(not arg.keyword for arg in node.args) < 2 and "argnums" not in given
        if not alone or not isinstance(func, cst.Attribute):
            hint = ("write argnums=nnx.DiffState(0, filter)", _hints.FLAX_NNX)
            self._note(wrt, "`wrt` is no argument of gradients", hint)
            return
        start, stop = self.program.start, self.program.stop
        owner = self.program.text_of(func.value)
        if self.program.imported_as(func.value) == "flax.nnx" and owner.count("."):
            owner = "nnxlite"
        self.edits.append(Edit(start(wrt), start(wrt.value), f"argnums={owner}.DiffState(0, "))
        self.edits.append(Edit(stop(wrt.value), stop(wrt.value), ")"))

    def _remember_optimizer(self, node: cst.Assign | cst.AnnAssign | cst.Param) -> None:
        if isinstance(node, cst.Param):
            annotation = node.annotation and node.annotation.annotation
            if annotation and self._path(annotation) == "nnxlite.Optimizer":
                self.optimizers.add(node.name.value)
            return
        if not isinstance(node.value, cst.Call):
            return
        wrt = any(arg.keyword and arg.keyword.value == "wrt" for arg in node.value.args)
        if wrt and self._path(node.value.func) == "nnxlite.Optimizer":
            self.optimizers.update(map(self.program.text_of, _targets(node)))

    def _update_call(self, node: cst.Call) -> None:
        """`optimizer.update(grads)` of an Optimizer that needs the model, too."""
        func = node.func
        if not isinstance(func, cst.Attribute) or func.attr.value != "update":
            return
        if len(node.args) != 1 or node.args[0].star or "ModelAndOptimizer" in self.program.text:
            return
        if any(edit.text == "ModelAndOptimizer" for edit in self.edits):
            return
        if self.program.text_of(func.value) in self.optimizers:
            name = self.program.text_of(func.value)
            hint = f"write {name}.update(model, grads), or use nnx.ModelAndOptimizer"
            self._note(node, "`Optimizer.update` needs the model", (hint, _hints.FLAX_NNX))

    # Classes ----------------------------------------------------------------------------------------

    def _class(self, node: cst.ClassDef) -> None:
        if not any(self._path(base.value) in NODES for base in node.bases):
            return
        for inner in walk(node.body):
            if isinstance(inner, (cst.Assign, cst.AugAssign)):
                for target in _targets(inner):
                    text = self.program.text_of(target)
                    if text.startswith(("self.__dict__[", "vars(self)[")):
                        self._hidden_write(target)

    def _hidden_write(self, node: cst.CSTNode) -> None:
        hint = (
            "assign to the attribute, or use setattr: transforms do not see this write",
            "differences.md",
        )
        self._note(node, "an attribute is written behind the module's back", hint)

    # Imports ----------------------------------------------------------------------------------------

    def _import(self, node: cst.Import) -> None:
        def others(alias: cst.ImportAlias) -> bool:
            """Whether another import binds the name `flax`, and stays."""
            return any(
                bound_name(other) == bound_name(alias) and not _is_nnx(other)
                for statement in self.program.imports
                if isinstance(statement, cst.Import)
                for other in statement.names
            )

        def moved(alias: cst.ImportAlias) -> tuple[str, ...]:
            name, bound = ".".join(dotted(alias.name)), bound_name(alias)
            if _is_nnx(alias):
                path = _moved(name)
                if missing(path):
                    self._check(alias, path)
                    return ()
                new = (f"import {alias_text(path, alias)}",)
                needed = not alias.asname and self.staying[bound] and not others(alias)
                return ("import flax", *new) if needed else new
            if bound_to_flax(alias) and self.moving[bound]:
                return ("import nnxlite",)
            return ()

        def bound_to_flax(alias: cst.ImportAlias) -> bool:
            name = ".".join(dotted(alias.name))
            return name == "flax" or (name.startswith("flax.") and not alias.asname)

        def keep(alias: cst.ImportAlias) -> bool:
            name = ".".join(dotted(alias.name))
            return not _is_nnx(alias) and (name != "flax" or self.staying[bound_name(alias)] > 0)

        self.edits += rewrite(self.program, node, moved, keep=keep)
        for alias in node.names:
            name = ".".join(dotted(alias.name))
            if name.startswith("flax.") and not _is_nnx(alias):
                self._note(alias, f"`{name}` stays", _flax_hint(name))

    def _import_from(self, node: cst.ImportFrom) -> None:
        module = ".".join(dotted(node.module)) if node.module and not node.relative else ""
        if module == "flax":
            self._from_flax(node)
        elif module == "flax.nnx" or module.startswith("flax.nnx."):
            self._from_nnx(node, _moved(module))
        elif module.startswith("flax."):
            self._note(node, f"`{module}` stays", _flax_hint(module))

    def _from_flax(self, node: cst.ImportFrom) -> None:
        if isinstance(node.names, cst.ImportStar):
            return

        def moved(alias: cst.ImportAlias) -> tuple[str, ...]:
            if alias.name.value != "nnx":
                name = f"flax.{alias.name.value}"
                self._note(alias, f"`{name}` stays", _flax_hint(name))
                return ()
            return (f"import nnxlite as {bound_name(alias)}",)

        self.edits += rewrite(self.program, node, moved)

    def _from_nnx(self, node: cst.ImportFrom, path: str) -> None:
        if isinstance(node.names, cst.ImportStar):
            hint = (
                "import nnxlite as nnx: a star would hide `map` and `filter` of Python",
                _hints.FLAX_NNX,
            )
            self._note(node, "a star import of `flax.nnx`", hint)
            return
        absent = {alias for alias in node.names if missing(f"{path}.{alias.name.value}")}
        for alias in node.names:
            self._check(alias, f"{path}.{alias.name.value}")
        if not absent:
            self.edits.append(self.program.replaced(tp.cast(cst.CSTNode, node.module), path))
            return

        def moved(alias: cst.ImportAlias) -> tuple[str, ...]:
            if alias in absent:
                return ()
            return (f"from {path} import {alias_text(tp.cast(str, alias.name.value), alias)}",)

        self.edits += rewrite(self.program, node, moved)


def _targets(node: cst.Assign | cst.AnnAssign | cst.AugAssign) -> list[cst.BaseExpression]:
    return [t.target for t in node.targets] if isinstance(node, cst.Assign) else [node.target]


def _is_nnx(alias: cst.ImportAlias) -> bool:
    return dotted(alias.name)[:2] == ("flax", "nnx")


def _moved(name: str) -> str:
    """A path below `flax.nnx` as one below `nnxlite`; Flax 0.8 had its modules in `flax.nnx.nnx`."""
    rest = name.removeprefix("flax.nnx")
    return "nnxlite" + (rest.removeprefix(".nnx") if rest.startswith(".nnx.") else rest)


def _flax_hint(name: str) -> tuple[str, str]:
    return _hints.FLAX.get(_hints.longest(name, _hints.FLAX), _hints.OTHER_FLAX)


def _absent(path: str) -> tuple[str, str]:
    return next(
        (_hints.ABSENT[part] for part in reversed(path.split(".")) if part in _hints.ABSENT),
        _hints.OTHER_ABSENT,
    )
