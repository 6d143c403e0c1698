"""Data in plain objects: a class that forgot to derive from `Module`, a dataclass with arrays in it.

An object that is neither a graph object nor a pytree is a static value.  Its content is not trained,
saved, counted or switched to another mode, and is a constant of each program.  The reference accepts it,
and a program may mean it, so there is a warning, not an error: once for each attribute of a class,
unless the value was marked with `nnx.static`.

Programs must not leave a tracer in such an object.  So those below the arguments are noted when objects
are rebuilt, and a write of data to one is taken back and refused when the function has returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing as tp
import weakref

import jax

from nnxlite._errors import path_text, short_type, warn_user
from nnxlite._statics import is_of_trusted
from nnxlite.graph._kinds import CONTAINERS, OTHER, GraphNode, kind_of
from nnxlite.variables import Variable

LEVELS = 3
"""How deep plain objects in plain objects are searched when a definition is made."""
OBJECTS = 200
"""How many objects and containers are searched then."""

_NOT_OBJECTS = (
    type,
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type(None),
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
)


class Found(tp.NamedTuple):
    """Data in a plain object.

    Attributes:
        path: of the data, from the value that was searched.
        owner: the plain object.
        data: what it contains.
    """

    path: tuple[tp.Any, ...]
    owner: tp.Any
    data: tp.Any


def attributes_of(value: tp.Any) -> dict[str, tp.Any]:
    """The attributes of a plain object; empty for everything else."""
    if isinstance(value, _NOT_OBJECTS) or kind_of(value) != OTHER or is_of_trusted(type(value)):
        return {}
    attributes = dict(getattr(value, "__dict__", ()))
    if dataclasses.is_dataclass(value):  # one with slots
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        attributes.update({name: getattr(value, name) for name in names})
    return attributes


def is_hidden_data(value: tp.Any) -> bool:
    """Whether a value in a plain object should be in a graph object: an array, Variable or object."""
    return isinstance(value, (jax.Array, Variable, GraphNode))


def find_hidden(value: tp.Any, levels: int = LEVELS, limit: int = OBJECTS) -> Found | None:
    """The first data in the plain objects in and below a static value; None if there is none."""
    if isinstance(value, _NOT_OBJECTS):
        return None
    pending: list[tuple[tuple[tp.Any, ...], tp.Any, tp.Any, int]] = [((), value, None, 0)]
    seen: dict[int, tp.Any] = {}
    while pending and len(seen) < limit:
        path, part, owner, level = pending.pop()
        if owner is not None and is_hidden_data(part):
            return Found(path, owner, part)
        if isinstance(part, _NOT_OBJECTS) or id(part) in seen or level > levels:
            continue
        seen[id(part)] = part
        if kind_of(part) in CONTAINERS:
            if isinstance(part, (list, tuple, dict)):
                pairs = part.items() if isinstance(part, dict) else enumerate(part)
                pending += [((*path, name), child, owner, level) for name, child in pairs]
        else:
            attributes = attributes_of(part)
            pending += [((*path, n), child, part, level + 1) for n, child in attributes.items()]
    return None


def mark_static(value: tp.Any) -> None:
    """Note that a value was marked with `nnx.static`: data in it is meant to be there."""
    parts = [value]
    for part in parts:  # grows
        if isinstance(part, (list, tuple)):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
        elif not isinstance(part, _NOT_OBJECTS) and kind_of(part) == OTHER:
            try:
                _marked[id(part)] = part
            except TypeError:  # no weak references to it
                _marked_classes.add(type(part))


_marked: weakref.WeakValueDictionary[int, tp.Any] = weakref.WeakValueDictionary()
_marked_classes: weakref.WeakSet[type] = weakref.WeakSet()
_warned: weakref.WeakKeyDictionary[type, set[tp.Any]] = weakref.WeakKeyDictionary()


def is_marked(value: tp.Any) -> bool:
    """Whether a value was marked with `nnx.static`."""
    return _marked.get(id(value)) is value or type(value) in _marked_classes


def warn_of_hidden(cls: type, name: tp.Any, value: tp.Any) -> None:
    """Warn, once for an attribute of a class, that its static value contains data in a plain object."""
    if isinstance(value, _NOT_OBJECTS) or name in _warned.get(cls, ()):
        return
    found = find_hidden(value)
    if found is None or is_marked(value) or is_marked(found.owner):
        return
    _warned.setdefault(cls, set()).add(name)
    kind, where = type(found.owner).__name__, path_text((name, *found.path))
    warn_user(
        f"{cls.__name__}: '{where}' is {_a(found.data)} in a {kind}, which is neither an nnx.Module nor "
        "a pytree. It is static: not trained, saved, counted or switched by train() and eval(), and a "
        f"constant of every program. Derive {kind} from nnx.Module (or nnx.Pytree), or, if it is meant, "
        f"write self.{name} = nnx.static(...)."
    )


def _a(value: tp.Any) -> str:
    text = short_type(value)
    return f"an {text}" if text[:1] in "AEIOUaeio" else f"a {text}"


# Writes in a program -------------------------------------------------------------------------------

Noted = list[tuple[tp.Any, dict[str, tp.Any]]]
"""Plain objects with data, and their attributes."""


def note_hidden(values: tp.Iterable[tp.Any]) -> Noted:
    """The plain objects with data in and below some static values, as they are now."""
    noted: Noted = []
    pending, seen = [(value, 0) for value in values], set()
    while pending and len(noted) < OBJECTS:
        part, level = pending.pop()
        if isinstance(part, _NOT_OBJECTS) or id(part) in seen or level > LEVELS:
            continue
        seen.add(id(part))
        if isinstance(part, (list, tuple)):
            pending += [(child, level) for child in part]
        elif isinstance(part, dict):
            pending += [(child, level) for child in part.values()]
        elif attributes := attributes_of(part):
            noted.append((part, attributes))
            pending += [(child, level + 1) for child in attributes.values()]
    return noted


def may_hide(value: tp.Any) -> bool:
    """Whether a static value is a plain object, or contains one."""
    return not isinstance(value, _NOT_OBJECTS) and bool(note_hidden([value]))


def take_back(noted: Noted) -> tuple[tp.Any, str, tp.Any] | None:
    """Take back the writes of data to plain objects; returns owner, name and value of one of them."""
    first = None
    for owner, before in noted:
        for name, value in attributes_of(owner).items():
            if value is before.get(name) or not is_hidden_data(value):
                continue
            first = first or (owner, name, value)
            if name in before:
                object.__setattr__(owner, name, before[name])
            else:
                object.__delattr__(owner, name)
    return first


@contextlib.contextmanager
def hidden_kept(nodes: tp.Iterable[tp.Any]) -> tp.Iterator[None]:
    """Take back the writes of data to plain objects in these objects that the block makes."""
    noted = note_hidden(value for node in nodes for value in getattr(node, "__dict__", {}).values())
    try:
        yield
    finally:
        take_back(noted)


def refuse_hidden_writes(noted: Noted) -> None:
    """Raise ValueError where data was written to a plain object, with its attributes as they were."""
    written = take_back(noted)
    if written is None:
        return
    owner, name, value = written
    kind = type(owner).__name__
    raise ValueError(
        f"A function under a transform wrote {_a(value)} to the attribute {name!r} of a {kind}, which "
        "is neither an nnx.Module nor a pytree: outside, the value would be a tracer, so the write was "
        f"taken back. Derive {kind} from nnx.Module or nnx.Pytree, keep the value in a Variable of a "
        "module, or return it."
    )
