"""What a function can see besides its arguments, and whether that has changed.

A program compiled from a function holds on to the values that the function read from its closure,
its globals, its defaults, class attributes and so on.  It may run again only while these are what
they were.  `look` collects them: constants are compared by value, functions by code and what they
see in turn.  Whatever may change without notice (a list, an object of an unknown class, a random
generator) has no key, and a function that reads it is traced on every call.

What a function only adds to is not read: `seen.append(x)`, `count += 1`, `calls["f"] += 1` and
`stats.calls += 1` leave a function as constant as it was.  So traces can be counted.

Nothing here keeps a function or a class alive: they are referred to weakly.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import inspect
import operator
import types
import typing as tp
import weakref

import jax
import jax.core
import numpy as np

from nnxlite._statics import ById, UnhashableStatic, static_key
from nnxlite.boundary import CallDef, is_root
from nnxlite.graph._defs import ObjectDef
from nnxlite.transforms._callables import unwrapped
from nnxlite.variables import VariableDef

_TRUSTED = frozenset(
    {
        "abc", "builtins", "chex", "collections", "dataclasses", "einops", "enum", "functools",
        "itertools", "jax", "jaxlib", "jaxtyping", "math", "nnxlite", "numpy", "operator", "optax",
        "string", "types", "typing",
    }
)  # fmt: skip
"""Packages whose functions see nothing that changes."""

_CHANGING = frozenset({"numpy.random"})
_IMPURE_BUILTINS = frozenset(
    {"eval", "exec", "globals", "input", "locals", "open", "vars", "__import__"}
)
_CONSTANTS = (int, float, complex, str, bytes, type(None), type(...), np.generic, np.dtype)
_FIXED = (
    enum.Enum,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    jax.sharding.PartitionSpec,
    jax.sharding.Sharding,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    np.ufunc,
    tp.TypeVar,
)
_COLLECTIONS = frozenset(
    {list, set, dict, collections.deque, collections.Counter, collections.defaultdict}
)
_ADDERS = frozenset({"add", "append", "appendleft", "extend", "insert", "update"})
_UNCALLED = frozenset(
    {
        "__annotate__", "__annotate_func__", "__class_getitem__", "__copy__", "__deepcopy__",
        "__del__", "__dir__", "__format__", "__getstate__", "__hash__", "__init_subclass__",
        "__reduce__", "__reduce_ex__", "__replace__", "__repr__", "__set_name__", "__setstate__",
        "__sizeof__", "__str__", "__subclasshook__",
    }
)  # fmt: skip
_BY_NAME = (getattr, hasattr, inspect.getattr_static, operator.attrgetter, operator.methodcaller)
_EVERY = "__dict__"
"""Stands among the mentioned attribute names for all of them: code that computes names may read any."""
_LIMIT = 500
"""How many functions are looked at before giving up."""

_MISSING: tp.Any = object()


class Changing(Exception):
    """A function sees something that may change without notice."""


# What code refers to ------------------------------------------------------------------------------


class Reference(tp.NamedTuple):
    """A name that code loads from outside, and the attributes it goes on to."""

    name: str
    free: bool
    attributes: tuple[str, ...]


class References(tp.NamedTuple):
    """What code refers to: outer names, and every attribute name it mentions."""

    outer: tuple[Reference, ...]
    attributes: frozenset[str]


_LOADS = {
    "LOAD_GLOBAL": False,
    "LOAD_NAME": False,
    "LOAD_DEREF": True,
    "LOAD_CLASSDEREF": True,
    "LOAD_FROM_DICT_OR_GLOBALS": False,
    "LOAD_FROM_DICT_OR_DEREF": True,
}
_STORES = {
    "STORE_GLOBAL": False,
    "DELETE_GLOBAL": False,
    "STORE_DEREF": True,
    "DELETE_DEREF": True,
}
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL"})
_NUMBER = {"LOAD_CONST": "C", "LOAD_SMALL_INT": "C", "COPY": "c", "SWAP": "s"}
_CODES = {
    **_NUMBER,
    "BINARY_OP": "+",
    "BINARY_SUBSCR": "[",
    "LOAD_ATTR": ".",
    "STORE_ATTR": "a",
    "STORE_SUBSCR": "k",
    **dict.fromkeys(_STORES, "n"),
}
# What follows the load of x in `x += 1`, `x.y += 1` and `x[0] += 1`.
_INCREMENTS = ("C+n", "c.C+sa", "Ccc[C+ssk", "Ccc+C+ssk")


@functools.lru_cache(maxsize=4096)
def references(code: types.CodeType) -> References | None:
    """What code refers to, inner functions included; None where it changes outer names."""
    outer: dict[Reference, None] = {}
    attributes: set[str] = set()
    pending = [code]
    while pending:
        part = pending.pop()
        pending += [c for c in part.co_consts if isinstance(c, types.CodeType)]
        ops = [op for op in dis.get_instructions(part) if op.opname not in _SKIPPED]
        text = "".join(_CODES.get(op.opname, "?") for op in ops)
        added_to: set[int] = set()
        for i, op in enumerate(ops):
            if op.opname in _ATTRIBUTES:
                attributes.add(op.argval)
            elif op.opname == "IMPORT_NAME" and not _is_trusted(op.argval):
                return None
            elif op.opname in _STORES:
                is_outer = not _STORES[op.opname] or op.argval in code.co_freevars
                if is_outer and i not in added_to:
                    return None
            elif op.opname in _LOADS:
                free = _LOADS[op.opname]
                if free and op.argval not in code.co_freevars:
                    continue  # a variable of the function itself
                end = _increment(ops, text, i)
                if end:
                    added_to.add(end)
                    continue
                following = []
                for later in ops[i + 1 :]:
                    if later.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                        break
                    following.append(later.argval)
                outer[Reference(op.argval, free, tuple(following))] = None
    return References(tuple(outer), frozenset(attributes))


def _increment(ops: list[dis.Instruction], text: str, start: int) -> int:
    """Where `x += 1` and its kin store, if a load begins one; else 0."""
    for pattern in _INCREMENTS:
        if text.startswith(pattern, start + 1):
            end = start + len(pattern)
            if pattern != "C+n" or ops[end].argval == ops[start].argval:
                return end
    return 0


def _is_trusted(module: tp.Any) -> bool:
    return (
        isinstance(module, str)
        and module.partition(".")[0] in _TRUSTED
        and not any(module == m or module.startswith(m + ".") for m in _CHANGING)
    )


# What a function sees -----------------------------------------------------------------------------


class Surroundings:
    """The values that some functions read from outside.

    Attributes:
        key: compares them by content.
        self_contained: whether the key holds nothing but code, classes and plain values.
        attributes: every attribute name that the functions mention.
    """

    __slots__ = ("_checks", "_fast", "_hash", "attributes", "key", "self_contained")

    def __init__(self, look: _Look) -> None:
        self.key = tuple(look.key)
        self._hash = hash(self.key)
        self._fast = look.fast
        self.self_contained = look.self_contained
        self.attributes = frozenset(look.attributes)
        self._checks = tuple((weakref.ref(o), tuple(c)) for o, c in look.checks.values())

    def __eq__(self, other: tp.Any) -> bool:
        return self is other or (isinstance(other, Surroundings) and self.key == other.key)

    def __hash__(self) -> int:
        return self._hash

    def hold(self) -> bool:
        """Whether every value is the one that was seen: the same object."""
        if not self._fast:
            return False
        for owner, checks in self._checks:
            found = owner()
            if found is None:
                return False
            for where, expected in checks:
                now = _read(found, where)
                if now is not (expected() if type(expected) is weakref.ref else expected):
                    return False
        return True


def _read(owner: tp.Any, where: tp.Any) -> tp.Any:
    """A value that an owner leads to: a function's cell or global, a module's or class's entry."""
    if type(where) is int:
        try:
            return owner.__closure__[where].cell_contents
        except ValueError:
            return _MISSING
    if type(owner) is types.FunctionType:
        return owner.__defaults__ if where is None else owner.__globals__.get(where, _MISSING)
    return owner.__dict__.get(where, _MISSING)


def look(
    funs: tp.Iterable[tp.Any], classes: tp.Iterable[type] = (), mentioned: tp.Iterable[str] = ()
) -> Surroundings | None:
    """What functions see, and methods of classes that they may call; None if it may change.

    Args:
        funs: the functions.
        classes: classes of objects that the functions are given.
        mentioned: further attribute names; of the classes only what is mentioned is looked at.
    """
    found = _Look(mentioned)
    try:
        for fun in funs:
            found.value(fun)
        found.methods(list(dict.fromkeys(classes)))
    except Changing:
        return None
    return Surroundings(found)


class _Look:
    """Collects what functions see.

    Raises Changing where that may change without notice.
    """

    def __init__(self, mentioned: tp.Iterable[str] = ()) -> None:
        self.key: list[tp.Any] = []
        self.checks: dict[int, tuple[tp.Any, list[tuple[tp.Any, tp.Any]]]] = {}
        self.attributes = set(mentioned)
        self.self_contained = True
        self.fast = True
        self._numbers: dict[int, int] = {}
        self._alive: list[tp.Any] = []
        self._built: list[type] = []

    def _again(self, value: tp.Any) -> bool:
        """Whether a value was looked at already; its number stands for it."""
        number = self._numbers.get(id(value))
        if number is not None:
            self.key.append(number)
            return True
        if len(self._numbers) >= _LIMIT:
            raise Changing
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        return False

    def _expect(self, owner: tp.Any, where: tp.Any, value: tp.Any) -> None:
        if isinstance(value, (types.FunctionType, type, types.ModuleType)):
            value = weakref.ref(value)
        self.checks.setdefault(id(owner), (owner, []))[1].append((where, value))

    def value(self, value: tp.Any) -> None:
        """One value that a function uses."""
        if isinstance(value, _CONSTANTS):
            self._plain(value)
        elif isinstance(value, (tuple, frozenset)):
            self.key.append((type(value), len(value)))
            for part in value if isinstance(value, tuple) else sorted(value, key=repr):
                self.value(part)
        elif isinstance(value, types.FunctionType):
            self.function(value)
        elif isinstance(value, functools.partial):
            self.key.append(functools.partial)
            self.value(value.func)
            self.value(value.args)
            self.value(tuple(value.keywords.items()))
        elif isinstance(value, types.MethodType):
            if not isinstance(value.__self__, type):
                raise Changing
            self.value(value.__self__)
            self.value(value.__func__)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            if not _is_trusted(value.__name__):
                raise Changing
            self.key.append(value.__name__)
        elif isinstance(value, types.BuiltinFunctionType):
            self._builtin(value)
        else:
            self._object(value)

    def _plain(self, value: tp.Any) -> None:
        try:
            self.key.append(static_key(value))
        except UnhashableStatic:
            raise Changing from None

    def _identity(self, value: tp.Any) -> None:
        self.self_contained = False
        self.key.append(ById(value))

    def _builtin(self, value: tp.Any) -> None:
        owner = value.__self__
        module = owner.__name__ if isinstance(owner, types.ModuleType) else value.__module__
        if isinstance(owner, type):  # such as dict.fromkeys
            module = owner.__module__
        elif not (owner is None or isinstance(owner, types.ModuleType)):
            raise Changing
        if not _is_trusted(module) or value.__name__ in _IMPURE_BUILTINS:
            raise Changing
        if value in _BY_NAME:
            self.attributes.add(_EVERY)
        self.key.append(value)

    def _object(self, value: tp.Any) -> None:
        cls = type(value)
        if isinstance(value, jax.core.Tracer) or is_root(value):
            raise Changing
        if isinstance(value, (jax.Array, *_FIXED)):
            self._identity(value)
            return
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None and _is_trusted(cls.__module__):
            self._wrapper(value)
            self.value(wrapped)
        elif callable(value) and cls.__module__.partition(".")[0] in ("jax", "jaxlib"):
            self._identity(value)
        else:
            raise Changing

    def _wrapper(self, value: tp.Any) -> None:
        """What a transform returned: with other options the same function does something else."""
        layers = unwrapped(value)[1]
        self.key.append(layers or weakref.ref(value))
        self.self_contained = self.self_contained and bool(layers)

    def function(self, fun: types.FunctionType) -> None:
        """A function: its code, and everything that the code refers to."""
        if self._again(fun):
            return
        code = fun.__code__
        self.key.append(ById(code))
        if fun in _BY_NAME:
            self.attributes.add(_EVERY)
        closure = fun.__closure__ or ()
        if _is_trusted(fun.__globals__.get("__name__")):
            for i, cell in enumerate(closure):
                self._of_library(fun, i, cell)
            self.value(tuple(v for v in fun.__defaults__ or () if callable(v)))
            return
        found = references(code)
        if found is None:
            raise Changing
        self.attributes |= found.attributes
        self._expect(fun, None, fun.__defaults__)
        self.value(fun.__defaults__)
        for pair in (fun.__kwdefaults__ or {}).items():
            self.value(pair)
            self.fast = False
        builtins = fun.__globals__.get("__builtins__", {})
        builtins = builtins if isinstance(builtins, dict) else vars(builtins)
        for name, free, attributes in found.outer:
            if free:
                where = code.co_freevars.index(name)
                value = _read(fun, where)
                if value is _MISSING:
                    raise Changing
            else:
                where, value = name, fun.__globals__.get(name, _MISSING)
            if type(value) in _COLLECTIONS and attributes and attributes[0] in _ADDERS:
                continue  # only added to
            if name == "__class__" and not attributes:
                continue  # for super()
            self._expect(fun, where, value)
            if value is _MISSING:
                value = builtins.get(name, _MISSING)
                if value is _MISSING:
                    self.key.append(name)
                    continue
            self._follow(value, attributes)

    def _of_library(self, fun: types.FunctionType, where: int, cell: tp.Any) -> None:
        """What a function of a trusted package has captured: functions of the user, perhaps."""
        value = _read(fun, where)
        if isinstance(value, (*_CONSTANTS, types.FunctionType, functools.partial, type)):
            self.value(value)
        elif isinstance(value, types.MethodType) or is_root(value):
            raise Changing
        else:
            self._identity(value)

    def _follow(self, value: tp.Any, attributes: tuple[str, ...]) -> None:
        """A value, or what its attributes lead to through modules and classes."""
        for name in attributes:
            if isinstance(value, types.ModuleType):
                if _is_trusted(value.__name__):
                    value = getattr(value, name, _MISSING)
                else:
                    found = value.__dict__.get(name, _MISSING)
                    self._expect(value, name, found)
                    value = found
            elif isinstance(value, type) and not _is_trusted(value.__module__) and name != _EVERY:
                value = self._entry(value, name)
            else:
                break
            if value is _MISSING:
                raise Changing
        self.value(value)

    def _entry(self, cls: type, name: str) -> tp.Any:
        """What a class has under a name, itself or from its bases."""
        for base in cls.__mro__:
            found = base.__dict__.get(name, _MISSING)
            if not _is_trusted(base.__module__):
                self._expect(base, name, found)
            if found is not _MISSING:
                if isinstance(found, classmethod):
                    self._class(cls)
                return _function_of(found)
        return _MISSING

    def _class(self, cls: type) -> None:
        """A class that is used as a value: it may be called."""
        self.key.append(weakref.ref(cls))
        if cls in _BY_NAME:
            self.attributes.add(_EVERY)
        if not _is_trusted(cls.__module__) and cls not in self._built:
            self.self_contained = False  # its methods may hold on to anything
            self._built.append(cls)

    def methods(self, classes: list[type]) -> None:
        """The methods (and class attributes) that the functions may use."""
        done: set[tuple[type, str]] = set()
        while True:
            size = len(done)
            for cls in (*classes, *self._built):
                for base in cls.__mro__:
                    if _is_trusted(base.__module__):
                        continue
                    for name, value in list(base.__dict__.items()):
                        if (base, name) not in done and self._may_use(cls, name, value):
                            done.add((base, name))
                            self._expect(base, name, value)
                            self.key.append((weakref.ref(base), name))
                            self.value(_function_of(value))
            if len(done) == size:
                return

    def _may_use(self, cls: type, name: str, value: tp.Any) -> bool:
        if name in ("__init__", "__new__", "__post_init__"):
            return cls in self._built and isinstance(value, types.FunctionType)
        if name.startswith("__") and name.endswith("__"):
            return name not in _UNCALLED and callable(value) and not isinstance(value, type)
        return name in self.attributes or _EVERY in self.attributes


def _function_of(value: tp.Any) -> tp.Any:
    """The function behind an entry of a class."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return tuple(f for f in (value.fget, value.fset) if f is not None)
    if isinstance(value, functools.cached_property):
        return value.func
    return value


# What the arguments of a call bring along ---------------------------------------------------------


class Brought(tp.NamedTuple):
    """Code that comes with the arguments: classes of objects, and functions that they hold."""

    classes: tuple[tp.Any, ...]
    functions: tuple[tp.Any, ...]


_NOTHING = Brought((), ())


def brought(call: CallDef) -> Brought:
    """The code that comes with the arguments of a call, as far as it is the user's."""
    found = call.cache.get(brought)
    if found is None:
        classes: dict[type, None] = {}
        functions: list[tp.Any] = []
        for definition in call.graphdef.decoded.node_defs:
            held: tp.Iterable[tp.Any] = ()
            if isinstance(definition, ObjectDef):
                classes[definition.type] = None
                held = definition.template.values()
            elif isinstance(definition, VariableDef):
                classes[definition.type] = None
                held = definition.metadata.values()
            functions += [value for value in held if _runs(value)]
        own = tuple(weakref.ref(c) for c in classes if not _all_trusted(c))
        found = Brought(own, tuple(functions)) if own or functions else _NOTHING
        call.cache[brought] = found
    return found


def _all_trusted(cls: type) -> bool:
    return all(_is_trusted(base.__module__) for base in cls.__mro__)


def _runs(value: tp.Any) -> bool:
    """Whether a static value may run code of the user."""
    if isinstance(value, tuple):
        return any(map(_runs, value))
    if not callable(value) or isinstance(value, (type, types.BuiltinFunctionType, np.ufunc)):
        return False
    if isinstance(value, types.FunctionType) and not value.__closure__:
        return not _is_trusted(value.__globals__.get("__name__"))
    return True


def surroundings_of(call: CallDef, mentioned: tp.Iterable[str]) -> Surroundings | None:
    """What the code sees that comes with the arguments of a call; None if that may change."""
    found = brought(call)
    if found is _NOTHING:
        return EMPTY
    return look(found.functions, filter(None, [ref() for ref in found.classes]), mentioned)


EMPTY = Surroundings(_Look())
"""What code sees that looks at nothing but its arguments."""
