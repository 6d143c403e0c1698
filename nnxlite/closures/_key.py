"""The key: everything that functions see, collected by following the names in their code."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing as tp
import weakref

import jax

from nnxlite._jax import Tracer
from nnxlite._statics import ById, static_key
from nnxlite.boundary import is_root
from nnxlite.closures._bytecode import is_tested, references
from nnxlite.closures._trusted import (
    ADDING,
    BY_NAME,
    CONSTANTS,
    CONSTRUCTORS,
    DERIVED,
    IMMUTABLE,
    IMPURE,
    JITTED,
    KNOWN,
    SETTINGS,
    UNCOMPUTED,
    UNUSED,
    WRAPPERS,
    is_trusted,
    is_trusted_class,
)

LIMIT = 200
"""How many functions and objects are followed before giving up."""


class MayChange(Exception):
    """A function sees something that may change without notice."""


class Surroundings(tp.NamedTuple):
    """What some functions see.

    Attributes:
        key: compares it by content.
        constant: whether the functions refer to nothing but code, trusted functions and constants, so
            that a cache may keep them alive.
    """

    key: tuple[tp.Any, ...]
    constant: bool


def surroundings(
    funs: tp.Iterable[tp.Any],
    classes: tp.Iterable[type] = (),
    statics: tp.Iterable[tp.Any] = (),
) -> Surroundings | None:
    """What functions see besides their arguments; None if it may change.

    Args:
        funs: the functions.
        classes: those of their arguments, whose methods they may call.
        statics: static values in their arguments, whose own content is known by other means.
    """
    if not is_tested():
        return None
    collector = _Collector(classes)
    try:
        for fun in funs:
            collector.value(fun)
        for value in statics:
            collector.content(value)
        collector.entries()
    except (MayChange, RecursionError):
        return None
    return Surroundings(tuple(collector.key), collector.constant)


class _Collector:
    """Collects what functions see in `key`; raises MayChange where that may change."""

    def __init__(self, classes: tp.Iterable[type]) -> None:
        self.key: list[tp.Any] = []
        self.constant = True
        self._classes = dict.fromkeys(classes)
        self._attributes = {"__call__"}  # every attribute name that is mentioned
        self._computes_names = False
        self._visited: dict[int, tuple[int, tp.Any]] = {}  # by id: a number, and the object itself

    def value(self, value: tp.Any) -> None:
        """A value that a function uses."""
        kind: tp.Any = type(value)
        if kind in CONSTANTS:
            self.key.append(static_key(value))
        elif id(value) in KNOWN:
            self.key.append(id(value))
        elif kind is types.FunctionType:
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif kind is tuple:
            self.key.append((tuple, len(value)))
            for part in value:
                self.value(part)
        elif issubclass(kind, functools.partial) and is_trusted(kind.__module__):
            self.key.append(kind)
            self.value((value.func, value.args, *value.keywords.items(), *vars(value).items()))
        elif kind is types.MethodType:
            self.value((value.__self__, value.__func__))
        elif kind is types.BuiltinFunctionType:
            self._builtin(value)
        elif isinstance(value, IMMUTABLE):
            self.key.append((kind, value))
        elif isinstance(value, jax.Array) and not isinstance(value, Tracer):
            self._identity(value)
        elif hasattr(value, "__wrapped__"):
            self._wrapper(value)
        else:
            self._settings(value)

    def content(self, value: tp.Any) -> None:
        """A value that only a library or the key of the call refers to, so that it may be a container.

        The key has its present content.
        """
        kind: tp.Any = type(value)
        if kind in (list, dict, set, frozenset) or issubclass(kind, tuple):
            self.key.append((kind, len(value)))
            for part in value.items() if kind is dict else value:
                self.content(part)
        else:
            self.value(value)

    def _identity(self, value: tp.Any) -> None:
        self.constant = False
        self.key.append(ById(value))

    def _is_repeated(self, value: tp.Any) -> bool:
        """Whether a value was visited before; its number stands for it then."""
        if id(value) in self._visited:
            self.key.append(self._visited[id(value)][0])
            return True
        if len(self._visited) >= LIMIT:
            raise MayChange
        self._visited[id(value)] = len(self._visited), value
        return False

    def _builtin(self, value: tp.Any) -> None:
        owner = value.__self__  # a class for dict.fromkeys
        module = owner.__module__ if isinstance(owner, type) else value.__module__
        if not is_trusted(module) or value.__name__ in IMPURE:
            raise MayChange
        self._computes_names |= value in BY_NAME
        self.key.append(value)

    def _settings(self, value: tp.Any) -> None:
        """An object that is nothing but its attributes, and does not change as a rule."""
        kind = type(value)
        frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        of_library = kind.__module__.partition(".")[0] in SETTINGS
        if is_root(value) or not (frozen or of_library) or not hasattr(value, "__dict__"):
            raise MayChange
        if not self._is_repeated(value):
            self._class(kind)
            self.content(vars(value))

    def _wrapper(self, value: tp.Any) -> None:
        """A function under `jax.jit`, or under a transform that is nothing but function and options."""
        kind = type(value)
        ours = kind.__module__.startswith(WRAPPERS) and kind.__eq__ is not object.__eq__
        if not (ours or kind is JITTED) or is_root(value):
            raise MayChange
        if self._is_repeated(value):
            return
        if ours:
            self.key.append(kind)
        else:
            self._identity(value)
        self.value(value.__wrapped__)
        names = [n for n in vars(value) if not n.startswith("_") and n not in DERIVED]
        self.content({name: vars(value)[name] for name in names})

    def _function(self, fun: types.FunctionType) -> None:
        """A function: its code, and everything that the code refers to."""
        if self._is_repeated(fun):
            return
        code = fun.__code__
        self.key.append(ById(code))
        cells = dict(zip(code.co_freevars, fun.__closure__ or ()))
        if is_trusted(fun.__globals__.get("__name__")):
            for cell in cells.values():
                self.content(_content_of(cell))
            return
        found = references(code)
        if found is None:
            raise MayChange
        self._attributes |= found.attributes
        self._computes_names |= "__dict__" in found.attributes
        self.value((fun.__defaults__, *(fun.__kwdefaults__ or {}).items(), *vars(fun).items()))
        for name, is_cell in found.counters:
            self.key.append(ById(cells[name] if is_cell else fun.__globals__))
        for name, is_cell, attributes in found.names:
            if name == "__class__" and is_cell and not attributes:
                continue  # for super()
            if is_cell:
                value = _content_of(cells[name])
            else:  # None where there is no such name: the function will raise a NameError
                value = fun.__globals__.get(name, fun.__builtins__.get(name))
            if type(value) is list and attributes and attributes[0] in ADDING:
                self.constant = self.constant and not is_cell
                self.key.append(ById(value))
            else:
                self._through_modules(value, attributes)

    def _through_modules(self, value: tp.Any, attributes: tuple[str, ...]) -> None:
        """A value; of a module, the attribute that is read."""
        for name in attributes:
            if type(value) is not types.ModuleType:
                break
            if name not in vars(value):  # the module computes it
                raise MayChange
            value = vars(value)[name]
        self.value(value)

    def _class(self, cls: type) -> None:
        """A class that is used as a value: it may be called, and its attributes may be read."""
        self.key.append(weakref.ref(cls))
        self._computes_names |= cls in BY_NAME
        if not is_trusted_class(cls):
            self.constant = False  # its methods may refer to anything
            self._classes[cls] = None
            self._attributes |= CONSTRUCTORS

    def entries(self) -> None:
        """The entries of classes that functions may use; their methods may bring further classes."""
        done: set[tuple[type, str]] = set()
        while True:
            bases = {
                b: None for c in self._classes for k in (c, type(c)) for b in inspect.getmro(k)
            }
            used = [(base, name) for base in bases for name in self._used(base)]
            new = [entry for entry in used if entry not in done]
            if not new:
                return
            done.update(new)
            for base, name in new:
                self.key.append((weakref.ref(base), name))
                self.value(_functions_of(vars(base)[name]))

    def _used(self, cls: type) -> list[str]:
        """The names of entries of a class itself, not of its bases, that functions may use."""
        namespace = vars(cls)
        if is_trusted_class(cls):  # somebody may have replaced a method
            names = sorted(namespace.keys() & self._attributes - CONSTRUCTORS)
            return [name for name in names if type(namespace[name]) is types.FunctionType]
        return [
            name
            for name, value in namespace.items()
            if name in self._attributes
            or (name not in UNUSED and _is_special(name, value))
            or (self._computes_names and not name.startswith(UNCOMPUTED))
        ]


def _is_special(name: str, value: tp.Any) -> bool:
    """Whether an entry of a class may be used by code that does not mention it."""
    special = name.startswith("__") and name.endswith("__")
    return special and callable(value) and not isinstance(value, type)


def _content_of(cell: types.CellType) -> tp.Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise MayChange from None


def _functions_of(entry: tp.Any) -> tp.Any:
    """The functions behind an entry of a class."""
    if isinstance(entry, (staticmethod, classmethod)):
        return entry.__func__
    if type(entry) is property:
        return (entry.fget, entry.fset)
    return entry


def common_owner(funs: tp.Iterable[tp.Any]) -> tp.Any:
    """The one function that refers to everything that functions captured, except constants; or None.

    A body is often defined in each call, around a function that stays.  What is cached for the body
    can live as long as that function then.
    """
    owners = {id(owner): owner for owner in map(_owner, funs) if not _is_constant(owner)}
    return next(iter(owners.values())) if len(owners) == 1 else None


def _owner(fun: tp.Any) -> tp.Any:
    """The function that is left where each captures nothing but the next one: often `fun` itself."""
    passed: set[int] = set()  # functions may capture themselves, or each other
    while type(fun) is types.FunctionType and not (fun.__defaults__ or fun.__kwdefaults__):
        passed.add(id(fun))
        captured = [x for x in map(_content_of, fun.__closure__ or ()) if not _is_constant(x)]
        if [*map(type, captured)] != [types.FunctionType] or id(captured[0]) in passed:
            break
        (fun,) = captured
    return fun


def _is_constant(value: tp.Any) -> bool:
    kind = type(value)
    return kind in CONSTANTS or (kind is types.FunctionType and not value.__closure__)
