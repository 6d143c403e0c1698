"""How static values compare: the keys under which compiled programs are shared.

A static value (a size, a flag, an activation function) is part of the identity of a compiled program.
`facts` gives what the library has to know about one:

* its *key*: programs are shared where keys are equal;
* whether it is *exact*: values with this key are interchangeable, so that one may stand for another;
* whether it is *mutable*: its content may be edited in place, so that the key is read in each call.

Python's `==` is too coarse for a key (`1 == True == 1.0`), and too fine for functions, which are made
again wherever a model is.  The rules:

* numbers compare with their types, floats by their bits; tuples, lists, dicts and sets by content;
* **a user's function is equal to itself only**.  Its code may read a global, an attribute or a captured
  object that has changed since it was traced, and nobody can tell.  Two kinds of functions are known to
  be equal without being the same: those of packages that never edit what they capture (`TRUSTED`), where
  what they captured is known; and functions that capture nothing, whose code names nothing but such
  packages.  `functools.partial` counts like the function in it;
* everything else compares by its own `==` and `hash`, together with its type.

The key of a dataclass, and of a value without a hash, describes its present content.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import operator
import sys
import types
import typing as tp
import weakref
from collections.abc import Iterator

import jax
import numpy as np

TRUSTED = frozenset({"jax", "optax", "nnxlite"})
"""Packages whose functions never edit what they capture, nor hand it out to be edited."""

COPIED: frozenset[type] = frozenset({list, dict, set})
"""Mutable static values of which every rebuilt object gets a copy; others it shares with its model."""

SMALL = 1_000
"""How many items a NumPy array may have that is compared by content, in each call."""


class Unknown(Exception):
    """Whether a function equals another cannot be known."""


class Facts(tp.NamedTuple):
    """What the library knows about a static value; see the module.

    Attributes:
        key, exact, mutable: as above.
        hashable: whether it has a hash, or is a builtin container of values that have one.
    """

    key: tp.Any
    exact: bool
    mutable: bool
    hashable: bool = True


class ById:
    """A key that compares by the identity of its value, and does not keep that alive if it can."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: tp.Any) -> None:
        self._hash = id(value) >> 4
        try:
            self._value: tp.Callable[[], tp.Any] = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    @property
    def value(self) -> tp.Any:
        """The value, or None where it is gone."""
        return self._value()

    def __eq__(self, other: tp.Any) -> bool:
        if self is other:
            return True
        return type(other) is ById and (value := self._value()) is not None and value is other.value

    def __hash__(self) -> int:
        return self._hash


class _AsSeen:
    """A key of a value that may change: as it was when it was read, and only while `is_current`.

    The hash is that of the first sight, too: an object that is edited may have another one.
    """

    __slots__ = ("hash", "is_current", "key")

    def __init__(self, key: tp.Any, is_current: tp.Callable[[], bool] = lambda: True) -> None:
        self.key, self.hash, self.is_current = key, hash(key), is_current

    def __eq__(self, other: tp.Any) -> bool:
        if self is other:
            return True
        if type(other) is not _AsSeen or self.hash != other.hash or self.key != other.key:
            return False
        return self.is_current() and other.is_current()

    def __hash__(self) -> int:
        return self.hash


def facts(value: tp.Any) -> Facts:
    """What is known of any static value.

    The key of one without a hash is its content: fields of a dataclass that count for `==`, for other
    objects what pickling would store.  JAX arrays, large NumPy arrays, and the rest, by identity.

    >>> import jax
    >>> from nnxlite._base.statics import facts
    >>> [tuple(facts(value))[1:3] for value in (3, "relu", (1, 2), [3])]
    [(True, False), (True, False), (True, False), (False, True)]
    >>> facts(1).key == facts(True).key
    False
    >>> initializer = jax.nn.initializers.normal
    >>> facts(initializer(0.1)).key == facts(initializer(0.1)).key
    True
    """
    kind = type(value)
    if kind in _OWN_KEY:
        return Facts(value, True, False)
    if kind in _NUMBERS:
        return Facts(_NUMBERS[kind](value), True, False)
    reader = _Reader()
    key = reader.key(value, ())
    return Facts(key, reader.exact, reader.mutable, reader.hashable)


_OWN_KEY = frozenset({str, type(None), type, bytes, type(...), types.BuiltinFunctionType})
"""Types whose values are their own keys."""
_FUNCTIONS = frozenset({types.FunctionType, types.MethodType, functools.partial})
_SIMPLE = frozenset({*_OWN_KEY, int, bool})
"""Types of items that a key contains as they are, beside their types: item by item, a vocabulary of
many thousand words takes ten times as long in each call."""

Inside = tuple[tp.Any, ...]
"""The values around the one that is read, so that recursion ends."""
Read = tp.Callable[[tp.Any, Inside], tp.Any]


class _Reader:
    """One reading of a static value; notes what `Facts` says."""

    exact, mutable, hashable = True, False, True

    def key(self, value: tp.Any, inside: Inside) -> tp.Any:
        """The key of a value."""
        kind = type(value)
        if kind in _OWN_KEY:
            return value
        if (plain := self._plain(value, inside, self.key)) is not None:
            return plain
        if kind in COPIED:
            self.exact, self.mutable = False, True
            depth = _depth(value, inside) if inside else None
            return depth or self._collection(kind, value, (*inside, value), self.key)
        if is_constant(value):  # a function or class of a module: nobody makes an equal one
            return ById(value)
        if kind in _FUNCTIONS or _is_object_of_optax(value, kind):
            try:
                return self.known(value, inside)
            except Unknown:
                pass
            if kind is types.MethodType:
                return (types.MethodType, ById(value.__func__), ById(value.__self__))
        if isinstance(value, jax.Array):
            self.hashable = False
            return ById(value)
        if kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__:
            return ById(value)
        return self._content(value, kind, inside)

    def _content(self, value: tp.Any, kind: type, inside: Inside) -> tp.Any:
        """The key of a value with an equality of its own."""
        try:
            as_seen = None if kind.__hash__ is None else hash(value)
        except TypeError:
            as_seen = None
        if as_seen is not None and (isinstance(value, VALUE_TYPES) or is_trusted(kind.__module__)):
            self.exact &= isinstance(value, VALUE_TYPES)
            return (kind, value)
        self.exact = False
        if (depth := _depth(value, inside)) is not None:
            return depth
        inside = (*inside, value)
        self.hashable &= as_seen is not None
        if dataclasses.is_dataclass(kind):
            fields = dataclasses.fields(kind)
            own = kind.__dict__.get("__dataclass_params__")  # other classes inherit it
            keys = [self.key(getattr(value, f.name, None), inside) for f in fields if f.compare]
            self.mutable |= own is None or not own.frozen
            # A class with a hash of its own says what it is: a module of Linen has a number besides.
            if own is None or (as_seen is None and not own.frozen):
                keys += [(n, self.key(getattr(value, n), inside)) for n in _beside(value, fields)]
            return (kind, *keys)
        is_object = hasattr(value, "__dict__") or hasattr(kind, "__slots__")
        self.mutable |= as_seen is None or is_object
        if as_seen is not None:  # an object that is edited may get another hash
            return _AsSeen((kind, as_seen, value)) if is_object else (kind, value)
        if isinstance(value, np.ndarray):
            return _of_array(value) or ById(value)
        if kind is types.MappingProxyType:  # it cannot be pickled
            return (kind, self.key(dict(value), inside))
        try:
            _, arguments, *state = value.__reduce_ex__(2)
            parts = [arguments, *(list(p) if hasattr(p, "__next__") else p for p in state)]
        except Exception:  # it is the object's own code that runs, and may refuse as it likes
            return ById(value)
        return (kind, *[self.key(part, inside) for part in parts])

    def _plain(self, value: tp.Any, inside: Inside, read: Read) -> tp.Any:
        """The key of a number (a time with its unit), slice, tuple or frozenset; else None."""
        kind = type(value)
        if kind in _NUMBERS:
            return _NUMBERS[kind](value)
        if kind.__hash__ is tuple.__hash__ or kind is frozenset:
            items = self._collection(kind, value, inside, read)
            own = hasattr(value, "__dict__") and not is_trusted(kind.__module__)
            if not own or not (names := _beside(value)):
                return items
            self.exact, self.mutable = False, True
            return (items, *names, *[read(getattr(value, name), inside) for name in names])
        if kind is slice:
            return (slice, *[read(part, inside) for part in (value.start, value.stop, value.step)])
        return (kind, value.dtype, value.tobytes()) if isinstance(value, np.generic) else None

    def _collection(self, kind: type, value: tp.Any, inside: Inside, read: Read) -> tp.Any:
        if kind is set or kind is frozenset:
            return (kind, frozenset(read(v, inside) for v in value))
        if kind is dict:
            values = self._items(value.values(), inside, read)
            return (dict, self._items(value, inside, read), values)
        return (kind, *self._items(value, inside, read))

    def _items(self, values: tp.Any, inside: Inside, read: Read) -> tp.Any:
        types_of = tuple(map(type, values))
        if _SIMPLE.issuperset(types_of):
            return (types_of, *values)
        return tuple([read(value, inside) for value in values])

    def known(self, value: tp.Any, inside: Inside, live: bool = False) -> tp.Any:
        """The key of a value that cannot change; `live` takes containers with the content they have.

        Raises Unknown for any other.
        """
        kind = type(value)
        if kind in (str, bytes, type(None), type(...)):
            return value
        read: Read = lambda v, inside: self.known(v, inside, live)
        if (plain := self._plain(value, inside, read)) is not None:
            return plain
        if (depth := _depth(value, inside)) is not None:
            return depth
        inside = (*inside, value)
        if kind is types.FunctionType:
            return self._function(value, inside)
        if kind is functools.partial:
            words = (*value.keywords, *value.keywords.values())
            return (kind, *[read(part, inside) for part in (value.func, value.args, words)])
        if kind is types.MethodType:
            return (kind, read(value.__func__, inside), read(value.__self__, inside))
        if _is_object_of_optax(value, kind):
            return self._once(value, lambda new: (kind, *new._entries(vars(value), inside)))
        is_number = kind is type and (np.generic in value.__mro__ or value in _NUMBERS)
        if isinstance(value, jax.Array) or _is_named(value) or is_number:
            return ById(value)
        if isinstance(value, VALUE_TYPES):
            return (kind, value)
        if getattr(kind.__dict__.get("__dataclass_params__"), "frozen", False):
            self.exact = False
            fields = dataclasses.fields(value)
            return (kind, *[read(getattr(value, f.name, None), inside) for f in fields])
        if live and (kind in COPIED or kind is np.ndarray):
            self.exact, is_array = False, kind is np.ndarray
            key = _of_array(value) if is_array else self._collection(kind, value, inside, read)
            if key is not None:  # its owner may edit it: from then on the key equals no other
                return _AsSeen(key, lambda: _is_still(value, key))
        raise Unknown

    def _entries(self, mapping: tp.Mapping[str, tp.Any], inside: Inside) -> tp.Any:
        return tuple([(name, self.known(v, inside, live=True)) for name, v in mapping.items()])

    def _function(self, fun: types.FunctionType, inside: Inside) -> tp.Any:
        if is_trusted(fun.__globals__.get("__name__")):
            if fun.__closure__ is None and _is_named(fun):
                return ById(fun)
            return self._once(fun, lambda new: new._captured(fun, inside))
        if fun.__closure__ is not None or fun.__dict__:
            raise Unknown
        reads = _reads(fun.__code__, fun.__globals__)
        if reads is None:
            raise Unknown
        defaults = fun.__defaults__ or (), tuple((fun.__kwdefaults__ or {}).items())
        # `vars` of a class is a new mapping each time: only those of modules are compared.
        means = [(ById(s) if type(s) is dict else None, name, ById(v)) for s, name, v in reads]
        self.exact = False
        # A name that is bound to a module will hardly be bound to something else.
        self.mutable |= any(
            s is fun.__globals__ and not isinstance(v, types.ModuleType) for s, _, v in reads
        )
        return _AsSeen(
            (ById(fun.__code__), self.known(defaults, inside), *means),
            lambda: all(s.get(name, _NOTHING) is v for s, name, v in reads),
        )

    def _captured(self, fun: types.FunctionType, inside: Inside) -> tp.Any:
        """The key of a function of a trusted package, from what it captured."""
        try:
            cells = [cell.cell_contents for cell in fun.__closure__ or ()]
        except ValueError:  # an empty cell
            raise Unknown from None
        values = (*cells, *(fun.__defaults__ or ()))
        captured = [self.known(value, inside, live=True) for value in values]
        named = self._entries({**(fun.__kwdefaults__ or {}), **fun.__dict__}, inside)
        return (fun.__code__, *captured, named)

    def _once(self, value: tp.Any, read: tp.Callable[[_Reader], tp.Any]) -> tp.Any:
        """The key of a function or object of a trusted package, as it was when first seen.

        `optax.cosine_decay_schedule` rebinds a variable that it captured when it is first called:
        without this a second optimizer would not equal the first.
        """
        seen = _first_seen.get(value)
        if seen is None:
            reader, key = _Reader(), None
            with contextlib.suppress(Unknown):
                key = read(reader)
            seen = _first_seen[value] = key, reader.exact
        key, exact = seen
        if key is None:
            raise Unknown
        self.exact &= exact
        return key


def _beside(value: tp.Any, fields: tp.Sequence[tp.Any] = ()) -> list[str]:
    """The attributes of a dataclass or tuple beside its content, but for those that it caches."""
    names = getattr(value, "__dict__", {}).keys() - {field.name for field in fields}
    if not names:
        return []
    is_cached = lambda name: isinstance(getattr(type(value), name, None), functools.cached_property)
    return sorted(name for name in names if not is_cached(name))


def _depth(value: tp.Any, inside: Inside) -> tp.Any:
    """The key of a value that contains itself, by how deep it is; else None."""
    depths = [depth for depth, outer in enumerate(inside) if outer is value]
    return ("recursion", depths[0]) if depths else None


_first_seen: weakref.WeakKeyDictionary[tp.Any, tuple[tp.Any, bool]] = weakref.WeakKeyDictionary()
# Key: the function or object, by identity; nothing to invalidate. Bound: entries die with their
# functions. Threads: two may work a key out twice; both are equal. Earned by `construct` and law L6.


Lookup = tuple[tp.Mapping[str, tp.Any], str, tp.Any]
"""Where a function's code reads: a scope, a name, and what the scope has under it, if anything."""


def _reads(code: types.CodeType, namespace: dict[str, tp.Any]) -> list[Lookup] | None:
    """What code reads, if it names nothing but modules, functions and classes of trusted packages.

    A name is a global, a builtin, or an attribute: of one of these modules or classes, or of an array.
    None where a name means anything else.
    """
    names: list[str] = []
    pending = [code]
    while pending:
        part = pending.pop()
        names += part.co_names
        pending += [c for c in part.co_consts if isinstance(c, types.CodeType)]
    reads: list[Lookup] = []
    resolved: set[str] = set()
    owners: list[tp.Any] = [None]  # the namespace, then whose attributes the other names may be
    for owner in owners:  # grows
        bases = owner.__mro__ if isinstance(owner, type) else (owner,)
        scopes: tp.Any = [namespace] if owner is None else map(vars, bases)
        for scope, name in itertools.product(scopes, names):
            value = scope.get(name, _NOTHING)
            if value is not _NOTHING or owner is None:
                reads.append((scope, name, value))
            if value is _NOTHING:
                continue
            resolved.add(name)
            is_number = owner is not None and (type(value) in _NUMBERS or value is None)
            if not (is_number or _is_named(value)):
                return None
            if isinstance(value, (type, types.ModuleType)) and value not in owners:
                owners.append(value)
    unknown = set(names) - resolved - _SAFE_BUILTINS - _ARRAY_ATTRIBUTES
    return None if unknown else reads


_NOTHING = object()
_SAFE_BUILTINS = frozenset(
    (
        "abs bool complex dict divmod enumerate float frozenset int isinstance len list max min pow "
        "range reversed round set slice sorted str sum tuple zip"
    ).split()
)
_ARRAY_ATTRIBUTES = frozenset(dir(jax.Array)) | {"set", "add", "multiply", "min", "max", "get"}


def is_trusted(module: str | None) -> bool:
    """Whether a module belongs to a trusted package."""
    return module is not None and module.partition(".")[0] in TRUSTED


def _is_named(value: tp.Any) -> bool:
    """Whether a value is a module of a trusted package, or what such a module contains by its name."""
    if isinstance(value, types.ModuleType):
        name = value.__name__  # a module of `nnxlite.flax` is named as Flax's
        return is_trusted(name) or name == "flax.nnx" or name.startswith("flax.nnx.")
    name = getattr(value, "__module__", None)
    if not isinstance(name, str) or not is_trusted(name):
        return False
    owner: tp.Any = sys.modules.get(name)
    path = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    for part in str(path).split("."):
        owner = getattr(owner, "__dict__", {}).get(part)
    return owner is value


def _is_still(value: tp.Any, key: tp.Any) -> bool:
    """Whether a captured container has the content that it had."""
    try:
        return bool(_Reader().known(value, (), live=True).key == key)
    except Unknown:
        return False


def _is_object_of_optax(value: tp.Any, kind: type) -> bool:
    """Whether a value is an object of optax that has no equality of its own."""
    by_identity = kind.__hash__ is object.__hash__ and hasattr(value, "__dict__")
    return by_identity and kind.__module__.partition(".")[0] == "optax"


def _of_array(array: np.ndarray) -> tp.Any:
    """The content of a small array; None for a large one, and for one of objects."""
    if array.size > SMALL or array.dtype.hasobject:
        return None
    return (type(array), array.dtype, array.shape, array.tobytes())


_NUMBERS: dict[type, tp.Callable[[tp.Any], tp.Any]] = {
    bool: lambda value: (bool, value),
    int: lambda value: (int, value),
    float: lambda value: (float, value.hex()),
    complex: lambda value: (complex, value.real.hex(), value.imag.hex()),
}
VALUE_TYPES = (
    np.dtype,
    enum.Enum,
    jax.sharding.Sharding,
    jax.sharding.PartitionSpec,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
)
"""Types whose values cannot change, and are interchangeable where they are equal."""


def is_constant(value: tp.Any, inside: bool = False) -> bool:
    """Whether a value lives as long as the process, and `==` tells it from all others of its type.

    So it is with text and most numbers, tuples of these, and what a module contains by its name.
    """
    kind = type(value)
    if kind in _CONSTANTS:
        return kind is not float or value != 0.0  # 0.0 == -0.0
    if kind is tuple:  # one level: types are compared no deeper
        return not inside and all(is_constant(part, True) for part in value)
    if kind is not types.FunctionType and not isinstance(value, type):
        return False
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return module is not None and module.__dict__.get(getattr(value, "__name__", "")) is value


_CONSTANTS = frozenset({str, bytes, bool, int, float, type(None), type(...)})


def _rebuilt(value: tp.Any, change: tp.Callable[[tp.Any], tp.Any]) -> tp.Any:
    """New builtin containers, also those inside, with other values; tuples only where one differs."""
    kind = type(value)
    if kind is list:
        return [_rebuilt(v, change) for v in value]
    if kind is dict:
        return {_rebuilt(k, change): _rebuilt(v, change) for k, v in value.items()}
    if kind is set:
        return set(value)
    if kind.__hash__ is not tuple.__hash__:
        return change(value)
    parts = [_rebuilt(v, change) for v in value]
    if all(map(operator.is_, parts, value)):
        return value
    new = tuple.__new__(kind, parts)  # named tuples included
    getattr(new, "__dict__", {}).update(getattr(value, "__dict__", {}))
    return new


def own_copy(value: tp.Any) -> tp.Any:
    """A copy of a mutable builtin container, and of those inside it; other values as they are."""
    return _rebuilt(value, lambda part: part)


def atoms(value: tp.Any) -> tp.Iterator[tp.Any]:
    """The values inside builtin containers that `own_copy` does not copy, in order; none of a set."""
    kind = type(value)
    if kind is dict:
        value = (*value, *value.values())
    elif kind is set:
        return
    elif kind is not list and kind.__hash__ is not tuple.__hash__:
        yield value
        return
    if not _SIMPLE.issuperset(map(type, value)):
        for part in value:
            yield from atoms(part)


def alike(value: tp.Any, other: tp.Any) -> bool:
    """Whether two static values have the same content, where objects are the same ones.

    An object may have been edited in place in between: it is the same all the same.
    """
    if value is other:
        return True
    if facts(value).key != facts(other).key:
        return False
    return all(a is b or facts(a).exact for a, b in zip(atoms(value), atoms(other)))


def with_atoms(value: tp.Any, instead: tp.Mapping[int, tp.Any]) -> tp.Any:
    """The same containers with other atoms, given by the identity of those in them."""
    return _rebuilt(value, lambda part: instead.get(id(part), part))


# What functions capture ------------------------------------------------------------------------


MOST = 2_000  # values that are looked at


def captures(value: tp.Any) -> Iterator[tp.Any]:
    """The value, and all that it captures: closures, defaults, arguments of partials, elements.

    What the objects of a user refer to is not followed, only those of optax.

    >>> from nnxlite._base.statics import captures
    >>> rate = 0.5
    >>> def make(rate):
    ...     return lambda x: x * rate
    >>> 0.5 in captures((make(0.5), "text"))
    True
    """
    todo, seen = [value], dict[int, tp.Any]()  # values, so that no id is used again
    while todo and len(seen) < MOST:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        yield item
        match item:
            case types.FunctionType():
                todo += map(_content, item.__closure__ or ())
                todo += [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
                todo += vars(item).values()
            case types.MethodType():
                todo += [item.__func__, item.__self__]
            case functools.partial():
                todo += [item.func, *item.args, *item.keywords.values()]
            case tuple(init=_, update=update):  # optax calls `init` once, when the state is made
                todo.append(update)
            case tuple() | list() | set() | frozenset():
                todo += item
            case dict():
                todo += item.values()
            case _ if type(item).__module__.partition(".")[0] == "optax":
                todo += getattr(item, "__dict__", {}).values()


def _content(cell: types.CellType) -> tp.Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
