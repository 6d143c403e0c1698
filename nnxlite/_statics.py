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

A value without a hash (a dataclass of settings, say) has no `static_key`, but a `content_key`, which
describes it by its present content.  So is a dataclass that has a hash and is not frozen: one object
equals itself, whatever was done to it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import types
import typing as tp
import weakref

import jax
import numpy as np

TRUSTED = frozenset({"jax", "optax", "nnxlite"})
"""Packages whose functions never edit what they capture, nor hand it out to be edited."""

COPIED: frozenset[type] = frozenset({list, dict, set})
"""Mutable static values of which every rebuilt object gets a copy; others it shares with its model."""

SMALL = 1_000
"""How many items a NumPy array may have that is compared by content, in each call."""


class UnhashableStatic(TypeError):
    """A static value has no key, because it (or a part of it) is unhashable."""


class Unknown(Exception):
    """Whether a function equals another cannot be known."""


class Facts(tp.NamedTuple):
    """What the library knows about a static value; see the module."""

    key: tp.Any
    exact: bool
    mutable: bool


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
    """The key of an object with its own `==` and hash: where it is edited, the hash tells it."""

    __slots__ = ("hash", "value")

    def __init__(self, value: tp.Any, as_seen: int) -> None:
        self.value, self.hash = value, as_seen

    def __eq__(self, other: tp.Any) -> bool:
        if type(other) is not _AsSeen or self.hash != other.hash:
            return False
        mine, theirs = self.value, other.value
        return mine is theirs or (type(mine) is type(theirs) and bool(mine == theirs))

    def __hash__(self) -> int:
        return self.hash


def facts(value: tp.Any) -> Facts:
    """Key, exactness and mutability of any static value.

    What cannot be hashed is described by its present content: the fields of a dataclass that count for
    `==`, for other objects what pickling would store.  JAX arrays, large NumPy arrays, and what does not
    tell its content, count by identity.

    >>> from nnxlite._statics import facts
    >>> [tuple(facts(value))[1:] for value in (3, "relu", (1, 2), [3])]
    [(True, False), (True, False), (True, False), (False, True)]
    """
    kind = type(value)
    if kind in _OWN_KEY:
        return Facts(value, True, False)
    if kind in _NUMBERS:
        return Facts(_NUMBERS[kind](value), True, False)
    reader = _Reader(by_content=True)
    return Facts(reader.content(value, ()), reader.exact, reader.mutable)


def content_key(value: tp.Any) -> tp.Any:
    """The key of any static value, as its content is now.

    >>> from types import SimpleNamespace
    >>> from nnxlite._statics import content_key
    >>> settings = SimpleNamespace(width=3)
    >>> before = content_key(settings)
    >>> content_key(SimpleNamespace(width=3)) == before
    True
    >>> settings.width = 4
    >>> content_key(settings) == before
    False
    """
    reader = _Reader(by_content=True)
    try:
        return reader.key(value, ())
    except UnhashableStatic:
        return reader.content(value, ())


def static_key(value: tp.Any) -> tp.Any:
    """The key of one static value.

    Raises UnhashableStatic where there is none.

    >>> import jax
    >>> from nnxlite._statics import static_key
    >>> static_key(1) == static_key(True)
    False
    >>> initializer = jax.nn.initializers.normal
    >>> static_key(initializer(0.1)) == static_key(initializer(0.1))
    True
    """
    return static_facts(value).key


def static_facts(value: tp.Any) -> Facts:
    """The `static_key` of a value, and what `facts` says of it; raises UnhashableStatic as that does."""
    if type(value) in _OWN_KEY:
        return Facts(value, True, False)
    reader = _Reader()
    return Facts(reader.key(value, ()), reader.exact, reader.mutable)


_OWN_KEY: frozenset[type] = frozenset(
    {str, type(None), type, bytes, type(...), types.BuiltinFunctionType}
)
"""Types whose values are their own keys."""
_SIMPLE = frozenset({*_OWN_KEY, int, bool})
"""Types of items that a key contains as they are, beside their types.

A model may have a vocabulary of many thousand words as a static value, whose key is worked out in each
call: item by item that takes ten times as long.
"""

Inside = tuple[tp.Any, ...]
"""The values around the one that is read, so that recursion ends."""


class _Reader:
    """One reading of a static value; notes whether it is exact and mutable.

    With `by_content`, a dataclass that may be edited has no key, whatever hash it has.
    """

    def __init__(self, by_content: bool = False) -> None:
        self.exact = True
        self.mutable = False
        self.by_content = by_content

    # any value -----------------------------------------------------------------------------------

    def content(self, value: tp.Any, inside: Inside) -> tp.Any:
        """The key of a value, by content where it has no hash."""
        try:
            return self.key(value, inside)
        except UnhashableStatic:
            pass
        if isinstance(value, jax.Array):
            return ById(value)
        self.exact, self.mutable = False, True
        for depth, outer in enumerate(inside):
            if outer is value:
                return ("recursion", depth)
        inside = (*inside, value)
        kind = type(value)
        if kind is dict:
            keys = [_Reader().key(name, inside) for name in value]
            return (dict, *zip(keys, [self.content(v, inside) for v in value.values()]))
        if kind is list or kind.__hash__ is tuple.__hash__:
            return (kind, *[self.content(v, inside) for v in value])
        if isinstance(value, np.ndarray):
            return _of_array(value) or ById(value)
        if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind) if field.compare]
            return (kind, *[self.content(getattr(value, name, None), inside) for name in names])
        try:
            _, arguments, *state = value.__reduce_ex__(2)
            parts = [arguments, *(list(p) if hasattr(p, "__next__") else p for p in state)]
        except Exception:  # it is the object's own code that runs, and may refuse as it likes
            return ById(value)
        return (kind, *[self.content(part, inside) for part in parts])

    def key(self, value: tp.Any, inside: Inside) -> tp.Any:
        """The key of a value; raises UnhashableStatic where there is none."""
        kind = type(value)
        if kind in _OWN_KEY:
            return value
        if kind in _NUMBERS:
            return _NUMBERS[kind](value)
        if kind in COPIED or kind.__hash__ is tuple.__hash__ or kind is frozenset:
            if kind in COPIED:
                self.exact, self.mutable = False, True
            if kind is list or kind is tuple:
                return (kind, *self._items(value, inside, self.key))
            return self._collection(kind, value, inside, self.key)
        if kind is slice:
            return (slice, *[self.key(part, inside) for part in _bounds(value)])
        if isinstance(value, np.generic):
            return (kind, value.tobytes())
        if is_constant(value):  # a function or class of a module: nobody makes an equal one
            return ById(value)
        if kind is types.MethodType or _may_be_known(value, kind):
            try:
                return self.known(value, inside)
            except Unknown:
                pass
            if kind is types.MethodType:
                return (types.MethodType, ById(value.__func__), ById(value.__self__))
        if kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__:
            return ById(value)
        if isinstance(value, jax.Array):  # a tracer has a hash
            raise UnhashableStatic
        try:
            as_seen = hash(value)
        except TypeError as error:
            raise UnhashableStatic from error
        if isinstance(value, _VALUES) or _is_trusted(kind.__module__):
            self.exact = self.exact and isinstance(value, _VALUES)
            return (kind, value)
        self.exact = False
        if dataclasses.is_dataclass(kind):
            if self.by_content and _may_be_edited(value):
                raise UnhashableStatic
        elif hasattr(value, "__dict__"):
            self.mutable = True
            return _AsSeen(value, as_seen)
        return (kind, value)

    def _collection(
        self, kind: type, value: tp.Any, inside: Inside, read: tp.Callable[..., tp.Any]
    ) -> tp.Any:
        if kind is dict:
            return (
                dict,
                self._items(value, inside, read),
                self._items(value.values(), inside, read),
            )
        if kind is set or kind is frozenset:
            return (kind, frozenset(read(v, inside) for v in value))
        return (kind, *self._items(value, inside, read))

    def _items(self, values: tp.Any, inside: Inside, read: tp.Callable[..., tp.Any]) -> tp.Any:
        types_of = tuple(map(type, values))
        if _SIMPLE.issuperset(types_of):
            return (types_of, *values)
        return tuple([read(value, inside) for value in values])

    # what is known to be equal without being the same ----------------------------------------------

    def known(self, value: tp.Any, inside: Inside, live: bool = False) -> tp.Any:
        """The key of a value that cannot change; `live` takes containers with the content they have.

        Raises Unknown for any other.
        """
        kind = type(value)
        if kind in _NUMBERS:
            return _NUMBERS[kind](value)
        if kind in (str, bytes, type(None), type(...)):
            return value
        if kind.__hash__ is tuple.__hash__ or kind is frozenset:
            read = lambda v, inside: self.known(v, inside, live)
            return self._collection(kind, value, inside, read)
        for depth, outer in enumerate(inside):
            if outer is value:
                return ("recursion", depth)
        inside = (*inside, value)
        if kind is types.FunctionType:
            return self._function(value, inside)
        if kind is functools.partial:
            names = [*value.keywords]
            parts = [value.func, value.args, (*names, *value.keywords.values())]
            return (kind, *[self.known(part, inside, live) for part in parts])
        if kind is types.MethodType:
            return (kind, *[self.known(p, inside, live) for p in (value.__func__, value.__self__)])
        if _is_object_of_optax(value, kind):
            return self._once(value, lambda: (kind, *self._entries(vars(value), inside)))
        if kind is slice:
            return (slice, *[self.known(part, inside, live) for part in _bounds(value)])
        if isinstance(value, np.generic):
            return (kind, value.tobytes())
        if isinstance(value, jax.Array) or _is_named(value) or _is_number_type(value):
            return ById(value)
        if isinstance(value, _VALUES):
            return (kind, value)
        if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            self.exact = False
            fields = [getattr(value, field.name, None) for field in dataclasses.fields(kind)]
            return (kind, *[self.known(field, inside, live) for field in fields])
        if live and kind in COPIED:
            self.exact = False
            read = lambda v, inside: self.known(v, inside, live)
            return _Live(value, self._collection(kind, value, inside, read), kind)
        if live and kind is np.ndarray and (content := _of_array(value)) is not None:
            self.exact = False
            return _Live(value, content, kind)
        raise Unknown

    def _entries(self, mapping: tp.Mapping[str, tp.Any], inside: Inside) -> tp.Any:
        return tuple([(name, self.known(v, inside, live=True)) for name, v in mapping.items()])

    def _function(self, fun: types.FunctionType, inside: Inside) -> tp.Any:
        if _is_trusted(fun.__globals__.get("__name__")):
            if fun.__closure__ is None and _is_named(fun):
                return ById(fun)
            return self._once(fun, lambda: self._captured(fun, inside))
        if fun.__closure__ is not None or fun.__dict__:
            raise Unknown
        reads = _reads(fun.__code__, fun.__globals__)
        if reads is None:
            raise Unknown
        defaults = fun.__defaults__ or (), tuple((fun.__kwdefaults__ or {}).items())
        key = _ByCode(fun.__code__, reads, self.known(defaults, inside))
        self.exact = False
        self.mutable = self.mutable or _may_change(reads, fun.__globals__)
        return key

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

    def _once(self, value: tp.Any, make: tp.Callable[[], tp.Any]) -> tp.Any:
        """The key of a function or object of a trusted package, as it was when first seen.

        `optax.cosine_decay_schedule` rebinds a variable that it captured when it is first called:
        without this a second optimizer would not equal the first.
        """
        seen = _first_seen.get(value)
        if seen is None:
            before, self.exact = self.exact, True
            try:
                key = make()
            except Unknown:
                key = None
            seen = _first_seen[value] = key, self.exact
            self.exact = before
        key, exact = seen
        if key is None:
            raise Unknown
        self.exact = self.exact and exact
        return key


_first_seen: weakref.WeakKeyDictionary[tp.Any, tuple[tp.Any, bool]] = weakref.WeakKeyDictionary()
# Key: the function or object, by identity. Nothing to invalidate: the key is that of the first sight.
# Bound: entries die with their functions; keys refer weakly to all but constants and containers.
# Threads: two may work a key out twice; both are equal. Earned by `construct` and law L6 (see `_once`).


class _ByCode:
    """The key of a user's function that captures nothing and names trusted packages only.

    Equal keys have the same code, and every name in it means now, for both, what it meant when the key
    was made.
    """

    __slots__ = ("code", "defaults", "reads")

    def __init__(self, code: types.CodeType, reads: Reads, defaults: tp.Any) -> None:
        self.code, self.reads, self.defaults = code, reads, defaults

    def is_current(self) -> bool:
        """Whether every name means what it meant."""
        return all(scope.get(name, _NOTHING) is value for scope, name, value in self.reads)

    def __eq__(self, other: tp.Any) -> bool:
        if self is other:
            return True
        if type(other) is not _ByCode or self.code is not other.code:
            return False
        if self.defaults != other.defaults or len(self.reads) != len(other.reads):
            return False
        for (scope, name, value), (other_scope, other_name, other_value) in zip(
            self.reads, other.reads
        ):
            same = scope is other_scope or type(scope) is types.MappingProxyType
            if not same or name != other_name or value is not other_value:
                return False
        return self.is_current() and other.is_current()

    def __hash__(self) -> int:
        return hash((id(self.code), self.defaults))


class _Live:
    """The key of a container that a function of a trusted package captured: its content at first sight.

    Its owner may edit it.  From then on the key equals no other.
    """

    __slots__ = ("content", "kind", "value")

    def __init__(self, value: tp.Any, content: tp.Any, kind: type) -> None:
        self.value, self.content, self.kind = value, content, kind

    def _is_unchanged(self) -> bool:
        try:
            return _Reader().known(self.value, (), live=True).content == self.content
        except Unknown:
            return False

    def __eq__(self, other: tp.Any) -> bool:
        if self is other:
            return True
        return (
            type(other) is _Live
            and self.kind is other.kind
            and self.content == other.content
            and self._is_unchanged()
            and other._is_unchanged()
        )

    def __hash__(self) -> int:
        return hash(self.content)


Reads = tuple[tuple[tp.Mapping[str, tp.Any], str, tp.Any], ...]
"""Where a function's code reads: a scope, a name, and what the scope has under it, if anything."""


def _reads(code: types.CodeType, namespace: dict[str, tp.Any]) -> Reads | None:
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
    reads: list[tuple[tp.Mapping[str, tp.Any], str, tp.Any]] = []
    owners: list[tp.Any] = []  # whose attributes the other names may be
    unknown: set[str] = set()
    for name in names:
        value = namespace.get(name, _NOTHING)
        reads.append((namespace, name, value))
        if value is _NOTHING and name not in _SAFE_BUILTINS:
            unknown.add(name)
        elif value is not _NOTHING and not _is_named(value):
            return None
        elif isinstance(value, (type, types.ModuleType)):
            owners.append(value)
    resolved = set()
    for owner in owners:  # grows
        for scope in owner.__mro__ if isinstance(owner, type) else (owner,):
            for name in names:
                value = vars(scope).get(name, _NOTHING)
                if value is _NOTHING:
                    continue
                resolved.add(name)
                reads.append((vars(scope), name, value))
                if not (_is_named(value) or type(value) in _NUMBERS or value is None):
                    return None
                if isinstance(value, (type, types.ModuleType)) and value not in owners:
                    owners.append(value)
    return None if unknown - resolved - _ARRAY_ATTRIBUTES else tuple(reads)


def _may_change(reads: Reads, namespace: dict[str, tp.Any]) -> bool:
    """Whether a name may well be bound to something else: any but that of a module."""
    return any(
        not isinstance(value, types.ModuleType) for scope, _, value in reads if scope is namespace
    )


_NOTHING = object()
_SAFE_BUILTINS = frozenset(
    (
        "abs bool complex dict divmod enumerate float frozenset int isinstance len list max min pow "
        "range reversed round set slice sorted str sum tuple zip"
    ).split()
)
_ARRAY_ATTRIBUTES = frozenset(dir(jax.Array)) | {"set", "add", "multiply", "min", "max", "get"}


def _is_trusted(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in TRUSTED


def is_of_trusted(kind: type) -> bool:
    """Whether a class belongs to a trusted package."""
    return _is_trusted(kind.__module__)


def _is_named(value: tp.Any) -> bool:
    """Whether a value is a module of a trusted package, or what such a module contains by its name."""
    if isinstance(value, types.ModuleType):
        name = value.__name__  # a module of `nnxlite.flax` is named as Flax's
        return _is_trusted(name) or name == "flax.nnx" or name.startswith("flax.nnx.")
    name = getattr(value, "__module__", None)
    if not isinstance(name, str) or not _is_trusted(name):
        return False
    owner: tp.Any = sys.modules.get(name)
    path = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    for part in str(path).split("."):
        owner = getattr(owner, "__dict__", {}).get(part)
    return owner is value


def _is_number_type(value: tp.Any) -> bool:
    return isinstance(value, type) and (issubclass(value, np.generic) or value in _NUMBERS)


def _may_be_known(value: tp.Any, kind: type) -> bool:
    return kind in (types.FunctionType, functools.partial) or _is_object_of_optax(value, kind)


def _may_be_edited(value: tp.Any) -> bool:
    """Whether a dataclass may be edited, or what is in it."""
    kind = type(value)
    if not dataclasses.is_dataclass(kind):
        return kind.__hash__ is tuple.__hash__ and any(map(_may_be_edited, value))
    if not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return kind.__hash__ is not object.__hash__
    fields = dataclasses.fields(kind)
    return any(_may_be_edited(getattr(value, field.name, None)) for field in fields)


def _is_object_of_optax(value: tp.Any, kind: type) -> bool:
    """Whether a value is an object of optax that has no equality of its own."""
    return (
        kind.__hash__ is object.__hash__
        and kind.__module__.partition(".")[0] == "optax"
        and hasattr(value, "__dict__")
    )


def _of_array(array: np.ndarray) -> tp.Any:
    """The content of a small array; None for a large one, and for one of objects."""
    if array.size > SMALL or array.dtype.hasobject:
        return None
    return (type(array), array.dtype, array.shape, array.tobytes())


def _bounds(value: slice) -> tuple[tp.Any, ...]:
    return (value.start, value.stop, value.step)


_NUMBERS: dict[type, tp.Callable[[tp.Any], tp.Any]] = {
    bool: lambda value: (bool, value),
    int: lambda value: (int, value),
    float: lambda value: (float, value.hex()),
    complex: lambda value: (complex, value.real.hex(), value.imag.hex()),
}
_VALUES = (
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


def own_copy(value: tp.Any) -> tp.Any:
    """A copy of a mutable builtin container, and of those inside it; other values as they are."""
    kind = type(value)
    if kind is list:
        return [own_copy(v) for v in value]
    if kind is dict:
        return {k: own_copy(v) for k, v in value.items()}
    if kind is set:
        return set(value)
    if kind.__hash__ is tuple.__hash__:
        parts = [own_copy(v) for v in value]
        if any(new is not old for new, old in zip(parts, value)):
            return tuple.__new__(kind, parts)  # named tuples included
    return value


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
    kind = type(value)
    if kind is not type(other):
        return False
    if kind is dict:
        pairs = [zip(value, other), zip(value.values(), other.values())]
    elif kind is list or kind.__hash__ is tuple.__hash__:
        pairs = [zip(value, other)]
    else:
        mine, theirs = facts(value), facts(other)
        return mine.key == theirs.key and (mine.exact or kind is set)
    return len(value) == len(other) and all(alike(a, b) for part in pairs for a, b in part)


def with_atoms(value: tp.Any, instead: tp.Mapping[int, tp.Any]) -> tp.Any:
    """The same containers with other atoms, given by the identity of those in them."""
    kind = type(value)
    swap = lambda part: with_atoms(part, instead)
    if kind is dict:
        return {swap(k): swap(v) for k, v in value.items()}
    if kind is list:
        return [swap(v) for v in value]
    if kind.__hash__ is tuple.__hash__:
        return tuple.__new__(kind, map(swap, value))
    return instead.get(id(value), value)
