"""What a function sees besides its arguments: a key for it, or None because it may change.

A program compiled from a function holds on to what the function read from its closure, globals,
defaults and classes.  It may run again only while all this is what it was: while `surroundings`
gives an equal key.  The key is worked out in every call, so nothing has to be told of a change.

The promise is small on purpose.  Names that the code mentions are followed through functions,
partials, methods and modules of the user's down to constants, arrays, functions and classes.
Everything else *may change*: a list, a NumPy array, an object, a generator, an import, a module
handed around, an interpreter whose bytecode was not tested.  Such a function is traced in every
call; that costs time, a stale program would cost the result.

Functions of libraries count as constant, by their code; those of JAX that somebody has replaced are
part of the key of a call (`replaced_functions`).  A function may count its traces (`n += 1`,
`seen.append(x)`): what it only adds to is no content, but it is told apart from that of another
closure, which wants its own count.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import itertools
import operator
import sys
import types
import typing as tp
import weakref

import jax
import jax.core
import numpy as np

from nnxlite._jax import Ref
from nnxlite._statics import KNOWN, ById, static_key
from nnxlite.boundary import CallDef, is_root
from nnxlite.graph import ContainerDef, ObjectDef, StaticDef
from nnxlite.transforms._wrapper import unwrapped
from nnxlite.variables import VariableDef

TESTED = {(3, 11), (3, 12), (3, 13)}
"""The versions of CPython whose bytecode is understood."""

_LIBRARIES = frozenset(
    {
        "abc", "builtins", "chex", "collections", "dataclasses", "einops", "enum", "functools",
        "itertools", "jax", "jaxlib", "jaxtyping", "math", "nnxlite", "numpy", "operator", "optax",
        "string", "types", "typing",
    }
)  # fmt: skip
"""Packages whose functions see nothing that changes; `numpy.random` is no part of them."""

_IMPURE = frozenset(
    {"breakpoint", "eval", "exec", "globals", "input", "locals", "open", "vars", "__import__"}
)
_BY_NAME = (getattr, hasattr, setattr, delattr, operator.attrgetter, operator.methodcaller)
_CONSTANTS = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented)}
)
_IMMUTABLE = (
    np.number, np.bool_, np.dtype, np.ufunc, jax.sharding.Mesh, jax.sharding.AbstractMesh,
    jax.sharding.PartitionSpec, jax.sharding.Sharding, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType, tp.TypeVar,
)  # fmt: skip
_ASIDE = frozenset(
    f"__{name}__"
    for name in """annotate annotate_func class_getitem copy deepcopy del dir format getstate hash
    init_subclass reduce reduce_ex replace repr set_name setstate sizeof str subclasshook""".split()
)
"""Methods that no program depends on."""
_BUILDING = frozenset({"__init__", "__new__", "__post_init__"})
_LIMIT = 200
"""How many functions are looked at before giving up."""

_MISSING: tp.Any = object()


class MayChange(Exception):
    """A function sees something that may change without notice."""


class Surroundings(tp.NamedTuple):
    """What some functions see.

    Attributes:
        key: compares it by content.
        shared: whether the key, and so the functions, hold nothing but code, classes and constants.
    """

    key: tuple[tp.Any, ...]
    shared: bool


# What code refers to ------------------------------------------------------------------------------


class Reads(tp.NamedTuple):
    """What code refers to.

    Attributes:
        outer: names from outside, whether each is a cell, and the attributes read one after the other.
        counts: names to which the code only adds a constant, and whether each is a cell.
        names: every attribute name.
    """

    outer: tuple[tuple[str, bool, tuple[str, ...]], ...]
    counts: tuple[tuple[str, bool], ...]
    names: frozenset[str]


_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_IGNORED = ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL")


@functools.lru_cache(maxsize=4096)
def reads(code: types.CodeType) -> Reads | None:
    """What code refers to, inner functions included; None where it imports or changes outer names."""
    outer: dict[tuple[str, bool, tuple[str, ...]], None] = {}
    counts: dict[tuple[str, bool], None] = {}
    names: set[str] = set()
    stores = 0
    pending = [code]
    while pending:
        part = pending.pop()
        pending += [c for c in part.co_consts if isinstance(c, types.CodeType)]
        ops = [op for op in dis.get_instructions(part) if op.opname not in _IGNORED]
        for i, op in enumerate(ops):
            kind, _, what = op.opname.partition("_")
            free = "DEREF" in what
            if op.opname in _ATTRIBUTES:
                names.add(op.argval)
            elif kind == "IMPORT":
                return None
            elif not (free or "GLOBAL" in what or op.opname == "LOAD_NAME"):
                continue
            elif free and op.argval not in code.co_freevars:
                continue  # a variable of the function itself
            elif kind != "LOAD":
                stores += 1
            elif _counts(ops[i : i + 4]):
                counts[op.argval, free] = None
                stores -= 1
            else:
                chain = itertools.takewhile(lambda op: op.opname in _ATTRIBUTES, ops[i + 1 :])
                outer[op.argval, free, tuple(op.argval for op in chain)] = None
    if stores or any((name, free) in counts for name, free, _ in outer):
        return None
    return Reads(tuple(outer), tuple(counts), frozenset(names))


def _counts(ops: list[dis.Instruction]) -> bool:
    """Whether instructions begin with those of `n += 1`."""
    load, *rest = (op.opname for op in ops)
    store = load.replace("LOAD", "STORE")
    return rest == ["LOAD_CONST", "BINARY_OP", store] and ops[0].argval == ops[3].argval


@functools.cache
def _of_library(module: tp.Any) -> bool:
    """Whether a module, by name, is one whose functions see nothing that changes."""
    return (
        isinstance(module, str)
        and module.partition(".")[0] in _LIBRARIES
        and not f"{module}.".startswith("numpy.random.")
    )


def _is_library_class(cls: type) -> bool:
    """Whether a class is one of a library; the module of one made by calling a metaclass misleads."""
    module, name = cls.__module__, cls.__qualname__
    space = sys.modules.get(module) if _of_library(module) else None
    return space is not None and ("." in name or getattr(space, name, None) is cls)


# What a function sees -----------------------------------------------------------------------------


def surroundings(
    funs: tp.Iterable[tp.Any],
    classes: tp.Iterable[type] = (),
    statics: tp.Iterable[tp.Any] = (),
) -> Surroundings | None:
    """What functions see, and methods of classes that they may call; None if it may change.

    Args:
        funs: the functions.
        classes: classes of objects that the functions are given; only what is mentioned counts.
        statics: values that these objects hold, whose own content is known by other means.
    """
    if sys.version_info[:2] not in TESTED or sys.implementation.name != "cpython":
        return None
    look = _Look()
    try:
        for fun in funs:
            look.value(fun)
        for value in statics:
            look.static(value)
        look.methods([*classes])
        return Surroundings(tuple(look.key), look.shared)
    except (MayChange, RecursionError):
        return None


class _Look:
    """Collects what functions see; raises MayChange where that may change."""

    def __init__(self) -> None:
        self.key: list[tp.Any] = []
        self.names: set[str] = set()  # every attribute name that is mentioned
        self.computed = False  # whether names are computed, and may be any
        self.shared = True
        self._numbers: dict[int, int] = {}
        self._alive: list[tp.Any] = []
        self._built: dict[type, None] = {}

    def value(self, value: tp.Any) -> None:
        """One value that a function uses."""
        kind: tp.Any = type(value)
        if kind in _CONSTANTS:
            self.key.append(static_key(value))
        elif id(value) in KNOWN:
            self.key.append(id(value))
        elif kind is types.FunctionType:
            self.function(value)
        elif isinstance(value, type):
            self._class(value)
        elif kind is tuple or kind is frozenset:
            self.key.append((kind, len(value)))
            for part in value if kind is tuple else sorted(value, key=repr):
                self.value(part)
        elif issubclass(kind, functools.partial) and _of_library(kind.__module__):
            self.key.append(kind)
            self.value((value.func, value.args, *value.keywords.items(), *vars(value).items()))
        elif kind is types.MethodType:
            self.value((value.__self__, value.__func__))
        elif kind is types.BuiltinFunctionType:
            self._builtin(value)
        elif isinstance(value, _IMMUTABLE):
            self.key.append((kind, value))
        elif isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
            self._identity(value)
        else:
            self._wrapper(value)

    def _identity(self, value: tp.Any) -> None:
        self.shared = False
        self.key.append(ById(value))

    def _builtin(self, value: tp.Any) -> None:
        owner = value.__self__
        module = value.__module__ if owner is None else getattr(owner, "__name__", None)
        if isinstance(owner, type):  # such as dict.fromkeys
            module = owner.__module__
        if not _of_library(module) or value.__name__ in _IMPURE:
            raise MayChange
        self.computed = self.computed or value in _BY_NAME
        self.key.append(value)

    def _wrapper(self, value: tp.Any) -> None:
        """A function that a library has wrapped, or made callable by a class of its own."""
        module, wrapped = type(value).__module__, getattr(value, "__wrapped__", None)
        if not callable(value) or is_root(value) or not _of_library(module):
            raise MayChange
        if wrapped is None and module.partition(".")[0] not in ("jax", "jaxlib"):
            raise MayChange
        if self._again(value):
            return
        layers = unwrapped(value)[1]
        if layers:  # one of this library, equal to another of the same function and options
            self.key.append(layers)
        else:
            self._identity(value)
        self._held(wrapped)
        held = [*vars(value).values()] if hasattr(value, "__dict__") else []
        for part in jax.tree_util.tree_leaves(held, is_leaf=is_root):
            if is_root(part) or isinstance(part, (types.FunctionType, types.MethodType)):
                self.value(part)  # bound arguments, and rules given later

    def _again(self, value: tp.Any) -> bool:
        """Whether a value was looked at already; its number stands for it."""
        number = self._numbers.get(id(value))
        if number is not None:
            self.key.append(number)
            return True
        if len(self._numbers) >= _LIMIT:
            raise MayChange
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        return False

    def function(self, fun: types.FunctionType) -> None:
        """A function: its code, and everything that the code refers to."""
        if self._again(fun):
            return
        code = fun.__code__
        self.key.append(ById(code))
        if _of_library(fun.__globals__.get("__name__")):
            for cell in fun.__closure__ or ():
                self._held(_content(cell))
            return
        found = reads(code)
        if found is None:
            raise MayChange
        self.names |= found.names
        self.computed = self.computed or "__dict__" in found.names
        self.value((fun.__defaults__, *(fun.__kwdefaults__ or {}).items(), *vars(fun).items()))
        cells = dict(zip(code.co_freevars, fun.__closure__ or ()))
        for name, free in found.counts:
            self.key.append(ById(cells[name] if free else fun.__globals__))
        for name, free, attributes in found.outer:
            if name == "__class__" and free and not attributes:
                continue  # for super()
            if free:
                value = _content(cells[name])
            else:
                value = fun.__globals__.get(name, _MISSING)
                if value is _MISSING:
                    value = fun.__builtins__.get(name, None)  # None: it will be a NameError
            if type(value) is list and attributes[:1] == ("append",):  # no content, yet its own
                self.shared = self.shared and not free
                self.key.append(ById(value))
            else:
                self._follow(value, attributes)

    def _held(self, value: tp.Any) -> None:
        """What a function of a library has captured: functions of the user, perhaps."""
        kind = type(value)
        if kind in (tuple, list, dict):
            self.key.append((kind, len(value)))
            for part in value.items() if kind is dict else value:
                self._held(part)
        elif callable(value) or kind in _CONSTANTS or is_root(value) or kind is np.ndarray:
            self.value(value)
        else:
            self._identity(value)

    def _follow(self, value: tp.Any, attributes: tuple[str, ...]) -> None:
        """A value, or what its attributes lead to through modules and classes."""
        for name in attributes:
            if isinstance(value, types.ModuleType):
                own = not _of_library(value.__name__)  # and may make up attributes as it likes
                value = vars(value).get(name, _MISSING) if own else getattr(value, name, _MISSING)
            elif isinstance(value, type) and name != "__dict__":
                value = self._entry(value, name)
            else:
                break
            if value is _MISSING:
                raise MayChange
        self.value(value)

    def _entry(self, cls: type, name: str) -> tp.Any:
        """What a class has under a name, itself or from its bases."""
        if _is_library_class(cls):
            return getattr(cls, name, _MISSING)
        if not _is_library_class(type(cls)):
            raise MayChange
        self.key.append(weakref.ref(cls))
        found = next((vars(b)[name] for b in cls.__mro__ if name in vars(b)), _MISSING)
        if isinstance(found, classmethod):
            self._class(cls)
        return _functions_of(found)

    def _class(self, cls: type) -> None:
        """A class that is used as a value: it may be called."""
        self.key.append(weakref.ref(cls))
        self.computed = self.computed or cls in _BY_NAME
        if not _is_library_class(cls):
            self.shared = False  # its methods may hold on to anything
            self._built[cls] = None

    def methods(self, classes: list[type]) -> None:
        """The methods (and class attributes) that the functions may use."""
        done: set[tuple[type, str]] = set()
        size = -1
        while len(done) != size:  # what a method mentions may be in a class that was done
            size = len(done)
            built = dict.fromkeys(b for c in self._built for b in c.__mro__)
            given = dict.fromkeys(
                b for c in classes for k in (c, type(c)) for b in inspect.getmro(k)
            )
            for base in (*given, *(b for b in built if b not in given)):
                for name in self._used(base, base in built):
                    if (base, name) not in done:
                        done.add((base, name))
                        self.key.append((weakref.ref(base), name))
                        self.value(_functions_of(vars(base)[name]))

    def _used(self, cls: type, built: bool) -> list[str]:
        """Names of what the functions may use of a class, itself."""
        space = vars(cls)
        if _is_library_class(cls):  # somebody may have replaced a method
            if cls.__module__.partition(".")[0] != "nnxlite":
                return []
            names = self.names if issubclass(cls, type) else ("__call__", *self.names)
            return [name for name in names if type(space.get(name)) is types.FunctionType]
        aside = _ASIDE if built else _ASIDE | _BUILDING
        return [
            name
            for name, value in space.items()
            if name in self.names
            or (name not in aside and _is_special(name, value))
            or (self.computed and not name.startswith(("__", "_abc_", "_nnx_")))
        ]

    def static(self, value: tp.Any) -> None:
        """A static value that comes with the arguments; the key of the call knows its content."""
        kind = type(value)
        if kind in (list, set, frozenset, dict) or issubclass(kind, tuple):
            for part in value.values() if kind is dict else value:
                self.static(part)
        elif is_root(value) or hasattr(value, "__wrapped__"):
            self.value(value)
        elif _compares_by_content(kind) or kind.__module__.partition(".")[0] in _SETTINGS:
            self._class(kind)
            if not self._again(value) and hasattr(value, "__dict__"):
                for part in vars(value).values():
                    self.static(part)
        else:
            self.value(value)


_SETTINGS = frozenset({"nnxlite", "optax"})
"""Packages whose objects, as static values, compare by content or do not change."""


def _compares_by_content(kind: type) -> bool:
    return kind is types.SimpleNamespace or (
        dataclasses.is_dataclass(kind) and kind.__hash__ is not object.__hash__
    )


def _is_special(name: str, value: tp.Any) -> bool:
    """Whether an entry of a class may be used by code that does not mention it."""
    special = name.startswith("__") and name.endswith("__")
    return special and callable(value) and not isinstance(value, type)


def _content(cell: types.CellType) -> tp.Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise MayChange from None


def _functions_of(value: tp.Any) -> tp.Any:
    """The functions behind an entry of a class."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if type(value) is property:
        return (value.fget, value.fset)
    if type(value) is functools.cached_property:
        return value.func
    return value


# What the arguments of a call bring along ---------------------------------------------------------


def of_call(
    funs: tp.Iterable[tp.Any], seen: Surroundings, call: CallDef, values: tp.Iterable[tp.Any]
) -> Surroundings | None:
    """What functions see together with the code that the arguments bring along; None if that may change.

    Args:
        funs: the functions.
        seen: what they see without arguments.
        call: the arguments.
        values: their graph leaves.
    """
    if not all(issubclass(kind, _LEAVES) for kind in {*map(type, values)}):
        return None
    classes, statics = _brought(call)
    return surroundings(funs, classes, statics) if classes or statics else seen


_LEAVES = (jax.Array, jax.core.Tracer, Ref, np.ndarray, np.generic, bool, int, float, complex)


def _brought(call: CallDef) -> tuple[list[type], list[tp.Any]]:
    """The user's classes among the arguments of a call, and the static values that they hold."""
    found = call.cache.get(_brought)
    if found is not None:
        return found
    classes: dict[type, None] = {}
    statics: list[tp.Any] = [box.value for _, box in getattr(call.extra, "hidden", ())]
    trees = [call.treedef]
    for token in call.graphdef.tokens:
        if isinstance(token, (ObjectDef, VariableDef)):
            classes[token.type] = None
            statics += (token.template if type(token) is ObjectDef else token.metadata).values()
        elif isinstance(token, ContainerDef):
            classes[token.type] = None
            trees += [token.treedef] if token.treedef is not None else []
        elif isinstance(token, StaticDef):
            statics.append(token.value)
    while trees:
        tree = trees.pop()
        trees += tree.children()
        kind, auxiliary = tree.node_data() or (None, None)
        if kind not in (None, type(None), tuple, list, dict):
            classes[kind] = None
            statics.append(auxiliary)
    unique = {id(value): value for value in statics if not _is_plain(value)}
    own = [c for c in classes if not _is_library_class(c) or "nnxlite.nn" in c.__module__]
    found = call.cache[_brought] = own, [*unique.values()]
    return found


def _is_plain(value: tp.Any) -> bool:
    """Whether a value runs no code of the user's."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, types.FunctionType):
        return not value.__closure__ and _of_library(value.__globals__.get("__name__"))
    return type(value) in _CONSTANTS or isinstance(value, _IMMUTABLE)
