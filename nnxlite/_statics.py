"""How static values compare: the keys under which compiled programs are shared.

A static value (a size, a flag, an activation function) is part of the identity of a compiled
program.  Python's `==` is too coarse for that (`1 == True == 1.0`) and too fine (a closure made
twice by the same code with the same captured values is "different").  `static_key` maps a value to
a hashable key with the right equality:

* numbers and bools compare with their type, floats by their bits;
* functions compare by code, defaults and captured values; `functools.partial` and bound methods by
  their parts; what cannot be compared that way falls back to identity, as do captured lists, dicts
  and other mutable objects (except those of `PURE` libraries, which are never edited), and functions
  that write a variable of their closure, since each has to write its own;
* tuples, lists, dicts and sets compare by content and kind;
* everything else compares by its own `==` and `hash`, together with its type.

What cannot be hashed (a dataclass of settings, say) has no such key.  It may be an attribute of an
object all the same: `content_key` describes it by its present content, and `stability` says that this
has to be repeated in each call.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import sys
import types
import typing as tp

import jax
import numpy as np

PLAIN: frozenset[type] = frozenset(
    {str, type(None), type, bytes, type(...), types.BuiltinFunctionType}
)
"""Types whose values are their own keys."""

COPIED: frozenset[type] = frozenset({list, dict, set})
"""Mutable static values of which every object has a copy; others are shared by all equal objects."""


PURE = frozenset({"optax"})
"""Packages whose functions and objects neither edit what they contain nor hand it out to be edited."""


class UnhashableStatic(TypeError):
    """A static value has no key, because it (or a part of it) is unhashable."""


class ById:
    """A key that compares by the identity of its value, and keeps that alive."""

    __slots__ = ("value",)

    def __init__(self, value: tp.Any) -> None:
        self.value = value

    def __eq__(self, other: tp.Any) -> bool:
        return type(other) is ById and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value) >> 4


def content_key(value: tp.Any) -> tp.Any:
    """The key of any static value; what cannot be hashed is described by its present content.

    For a dataclass these are its fields (those that count for `==`), for other objects what pickling
    would store.  JAX arrays, large NumPy arrays, and what does not tell its content, count by identity.

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
    return _content(value, ())


SMALL = 1_000
"""How many items a NumPy array may have that is compared by content, in each call."""


def _content(value: tp.Any, inside: tuple[tp.Any, ...]) -> tp.Any:
    try:
        return static_key(value)
    except UnhashableStatic:
        pass
    for depth, outer in enumerate(inside):
        if outer is value:
            return ("recursion", depth)
    inside = (*inside, value)
    kind = type(value)
    if kind is dict:
        return (dict, *[(static_key(k), _content(v, inside)) for k, v in value.items()])
    if kind is list or kind.__hash__ is tuple.__hash__:
        return (kind, *[_content(v, inside) for v in value])
    if isinstance(value, jax.Array) or (isinstance(value, np.ndarray) and value.size > SMALL):
        return ById(value)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.compare]
        return (kind, *[_content(getattr(value, name, None), inside) for name in names])
    try:
        _, arguments, *state = value.__reduce_ex__(2)
        parts = [arguments, *(list(part) if hasattr(part, "__next__") else part for part in state)]
    except Exception:  # it is the object's own code that runs, and may refuse as it likes
        return ById(value)
    return (kind, *[_content(part, inside) for part in parts])


def static_key(value: tp.Any) -> tp.Any:
    """The key of one static value.

    Raises UnhashableStatic where there is none.

    >>> from nnxlite._statics import static_key
    >>> static_key(1) == static_key(True)
    False
    >>> make = lambda n: (lambda x: x + n)
    >>> static_key(make(1)) == static_key(make(1)), static_key(make(1)) == static_key(make(2))
    (True, False)
    """
    return _key(value, ())


def _key(value: tp.Any, inside: tuple[tp.Any, ...]) -> tp.Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    special = _SPECIAL.get(kind)
    if special is not None:
        return special(value, inside)
    if kind.__hash__ is tuple.__hash__:  # named tuples
        return _sequence(value, inside)
    if isinstance(value, np.generic):
        return (kind, value.tobytes())
    if _is_pure_object(value):
        return _by_content(value, inside)
    try:
        hash(value)
    except TypeError as error:
        raise UnhashableStatic from error
    return (kind, value)


def _number(value: tp.Any, inside: tp.Any) -> tp.Any:
    return (type(value), value)


def _float(value: float, inside: tp.Any) -> tp.Any:
    return (float, value.hex())


def _complex(value: complex, inside: tp.Any) -> tp.Any:
    return (complex, value.real.hex(), value.imag.hex())


_SIMPLE = frozenset({*PLAIN, int, bool})
"""Types of items that a key contains as they are, beside their types.

A model may have a vocabulary of many thousand words as a static value, whose key is worked out in each
call: item by item that takes ten times as long.
"""


def _items(values: tp.Collection[tp.Any], inside: tp.Any) -> tuple[tp.Any, ...]:
    types_of = tuple(map(type, values))
    if _SIMPLE.issuperset(types_of):
        return (types_of, *values)
    return tuple([_key(value, inside) for value in values])


def _sequence(value: tp.Any, inside: tp.Any) -> tp.Any:
    return (type(value), *_items(value, inside))


def _dict(value: dict[tp.Any, tp.Any], inside: tp.Any) -> tp.Any:
    return (dict, _items(value.keys(), inside), _items(value.values(), inside))


def _set(value: tp.Any, inside: tp.Any) -> tp.Any:
    return (type(value), frozenset(_key(v, inside) for v in value))


def _or_identity(value: tp.Any, inside: tp.Any) -> tp.Any:
    """Captured values that have no key count by identity."""
    try:
        return _key(value, inside)
    except UnhashableStatic:
        return ById(value)


def _function(fun: types.FunctionType, inside: tuple[tp.Any, ...]) -> tp.Any:
    closure = fun.__closure__
    defaults, keywords = fun.__defaults__, fun.__kwdefaults__
    own = fun.__dict__  # such as `__wrapped__`
    if closure is None and defaults is None and keywords is None and not own:
        return (_function, ById(fun.__code__), ById(fun.__globals__))
    for depth, outer in enumerate(inside):  # a recursive function captures itself
        if outer is fun:
            return ("recursion", depth)
    inside = (*inside, fun)
    pure = _is_pure(fun.__globals__.get("__name__"))
    if closure and not pure and writes_outside(fun.__code__):
        return ById(fun)
    key = _by_content if pure else _captured
    captured: list[tp.Any] = []
    for cell in closure or ():
        try:
            content = cell.cell_contents
        except ValueError:  # an empty cell
            return ById(fun)
        captured.append(key(content, inside))
    return (
        _function,
        ById(fun.__code__),
        ById(fun.__globals__),
        tuple(captured),
        tuple(key(d, inside) for d in defaults or ()),
        tuple((k, key(v, inside)) for k, v in (keywords or {}).items()),
        tuple((k, key(v, inside)) for k, v in own.items()),
    )


# Key: the code, which never changes. Bound: 4096. Threads: as lru_cache. Earned where a loop makes
# modules with a closure among their static values (`construct`): 60 % of the time of their GraphDef.
@functools.lru_cache(maxsize=4096)
def writes_outside(code: types.CodeType) -> bool:
    """Whether code, inner functions included, rebinds variables of its closure or globals."""
    pending = [code]
    while pending:
        part = pending.pop()
        pending += [c for c in part.co_consts if isinstance(c, types.CodeType)]
        for op in dis.get_instructions(part):
            if op.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
                op.opname in ("STORE_DEREF", "DELETE_DEREF") and op.argval in code.co_freevars
            ):
                return True
    return False


def _captured(value: tp.Any, inside: tuple[tp.Any, ...]) -> tp.Any:
    """Captured values compare by content only where nobody can edit them in place."""
    kind = type(value)
    if kind in PLAIN or kind in _IMMUTABLE or isinstance(value, _VALUES):
        return _or_identity(value, inside)
    if kind.__hash__ is tuple.__hash__:
        return (kind, *[_captured(v, inside) for v in value])
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        fields = [getattr(value, field.name, None) for field in dataclasses.fields(kind)]
        return (kind, *[_captured(field, inside) for field in fields])
    return ById(value)


def _by_content(value: tp.Any, inside: tuple[tp.Any, ...]) -> tp.Any:
    """What an object of a pure library contains compares by content: nobody else can edit it.

    Whole numbers compare without their type, since `optax.cosine_decay_schedule` turns the ints that
    it captured into floats when it is first called.
    """
    kind = type(value)
    if kind is float and value and value.is_integer():
        return _number(int(value), inside)
    if kind is dict:
        return (dict, *[(_by_content(k, inside), _by_content(v, inside)) for k, v in value.items()])
    if kind is list or kind.__hash__ is tuple.__hash__:
        return (kind, *[_by_content(v, inside) for v in value])
    if not _is_pure_object(value):
        return _captured(value, inside)
    for depth, outer in enumerate(inside):
        if outer is value:
            return ("recursion", depth)
    return (kind, _by_content(vars(value), (*inside, value)))


def _is_pure_object(value: tp.Any) -> bool:
    """Whether a value is an object of a pure library that has no equality of its own."""
    kind = type(value)
    return (
        kind.__hash__ is object.__hash__
        and hasattr(value, "__dict__")
        and _is_pure(kind.__module__)
    )


def _is_pure(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in PURE


def _partial(value: functools.partial, inside: tp.Any) -> tp.Any:
    return (
        functools.partial,
        _key(value.func, inside),
        tuple(_captured(a, inside) for a in value.args),
        frozenset((k, _captured(v, inside)) for k, v in value.keywords.items()),
    )


def _slice(value: slice, inside: tp.Any) -> tp.Any:
    return (slice, *[_key(part, inside) for part in (value.start, value.stop, value.step)])


def _method(value: types.MethodType, inside: tp.Any) -> tp.Any:
    owner = value.__self__
    key = _by_content(owner, inside) if _is_pure_object(owner) else ById(owner)
    return (types.MethodType, _key(value.__func__, inside), key)


_SPECIAL: dict[type, tp.Callable[[tp.Any, tp.Any], tp.Any]] = {
    bool: _number,
    int: _number,
    float: _float,
    complex: _complex,
    slice: _slice,
    tuple: _sequence,
    list: _sequence,
    dict: _dict,
    set: _set,
    frozenset: _set,
    types.FunctionType: _function,
    types.MethodType: _method,
    functools.partial: _partial,
}

_IMMUTABLE: frozenset[type] = frozenset(
    {bool, int, float, complex, types.FunctionType, functools.partial, types.MethodType, frozenset}
)
_VALUES = (
    np.number,
    np.bool_,
    np.dtype,
    jax.sharding.Sharding,
    jax.sharding.PartitionSpec,
    jax.sharding.Mesh,
)


class Stability(enum.IntEnum):
    """When the key of a static value has to be worked out again."""

    FIXED = 0
    """Never: the value is immutable, or counts by its identity or its own hash."""
    CAPTURING = 1
    """Before another object shares the definition: what a closure captured can be rebound."""
    MUTABLE = 2
    """In each call: the value can be edited in place. Python says so by having no hash for it."""


FIXED, CAPTURING, MUTABLE = Stability


def stability(value: tp.Any) -> Stability:
    """How long the key of a static value stays the same, while the value is the same object.

    >>> from nnxlite._statics import stability
    >>> [stability(value).name for value in (3, lambda: 3, (lambda n: lambda: n)(3), (3, [3]))]
    ['FIXED', 'FIXED', 'CAPTURING', 'MUTABLE']
    """
    kind = type(value)
    if kind is types.FunctionType:
        return FIXED if value.__closure__ is None else CAPTURING
    if kind is types.MethodType:
        return stability(value.__func__)
    if kind is functools.partial:  # what it contains counts by identity where it is mutable
        return min(CAPTURING, max(map(stability, (value.func, *value.args))))
    if kind.__hash__ is tuple.__hash__:
        return max(map(stability, value), default=FIXED)
    try:
        hash(value)
    except TypeError:
        return FIXED if kind is slice else MUTABLE  # slices have a hash from Python 3.12 on
    return FIXED


class Keyed(tp.Protocol):
    """A definition made of static values."""

    key: tp.Any
    stability: Stability

    def content(self) -> tp.Any:
        """The key as the static values are now."""
        ...


def is_current(definition: Keyed) -> bool:
    """Whether a definition still is what its key says, so that another object may share it."""
    return definition.stability is FIXED or definition.content() == definition.key


def is_constant(value: tp.Any, inside: bool = False) -> bool:
    """Whether a value lives as long as the process, and `==` tells it from all others of its type.

    So it is with text and most numbers, tuples of these, and what a module contains by its name.
    """
    kind = type(value)
    if kind in _CONSTANTS:
        return kind is not float or value != 0.0  # 0.0 == -0.0
    if kind is tuple:  # one level: types are compared no deeper
        return not inside and all(is_constant(part, True) for part in value)
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
    if kind.__hash__ is tuple.__hash__ and stability(value) is MUTABLE:
        return tuple.__new__(kind, map(own_copy, value))  # named tuples included
    return value
