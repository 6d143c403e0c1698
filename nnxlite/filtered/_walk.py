"""Walking trees level by level, and copying them with their sharing."""

from __future__ import annotations

import typing as tp

from nnxlite._base.errors import path_text, short_type
from nnxlite._base.jax import flatten_one_level, is_pytree_leaf, key_name
from nnxlite._state._walk import sorted_keys
from nnxlite.graph._kinds import OBJECT, VARIABLE, is_static_part, kind_of
from nnxlite.graph._rebuild import Path
from nnxlite.variables._variable import Variable, make


def level(value: tp.Any) -> tuple[list[tuple[tp.Any, tp.Any]], tp.Any] | None:
    """The (name, child) pairs of an ordinary container and its treedef; None for a leaf."""
    if value is None or is_pytree_leaf(value):
        return None
    pairs, treedef = flatten_one_level(value)
    return [(key_name(key), child) for key, child in pairs], treedef


def children(value: tp.Any, also: tuple[type, ...] = ()) -> list[tuple[Path, tp.Any]]:
    """The parts one level down, with their paths from there.

    Those of an object are its data attributes, and static ones of the types in `also`; the value of a
    Variable has the Variable's own path.
    """
    kind = kind_of(value)
    if kind == VARIABLE:
        return [((), value.get_raw_value())]
    if kind == OBJECT:
        status, attributes = value._nnx_status, value._nnx_dict.items()
        return [((n,), v) for n, v in attributes if status.get(n) or isinstance(v, also)]
    found = level(value)
    return [((name,), child) for name, child in found[0]] if found else []


def _level(value: tp.Any) -> tuple[tp.Sequence[tp.Any], tp.Sequence[tp.Any], tp.Any, tp.Any] | None:
    """Names and children of a container, what equal ones share, and how to build one; None for a leaf.

    The keys of a dict may be of several types, unlike for JAX.
    """
    if type(value) is dict:
        keys = tuple(sorted_keys(value))
        return keys, [value[key] for key in keys], keys, lambda new: dict(zip(keys, new))
    parts = level(value)
    if parts is None:
        return None
    pairs, treedef = parts
    return [name for name, _ in pairs], [part for _, part in pairs], treedef, treedef.unflatten


Values = tuple[tp.Any, ...]


def copied(
    what: str,
    trees: Values,
    leaf: tp.Callable[[Path, Values, bool], tp.Any],
    stops: tp.Callable[[tp.Any], bool] = lambda part: False,
    finish: tp.Callable[[tp.Any, tp.Any], None] = lambda lead, copy: None,
) -> tp.Any:
    """A copy of a tree with its sharing, in which leaves are replaced.

    Several trees may be walked together: of their parts at one path, None where a tree has none, the
    first that is not None (the lead) gives the form, and the static parts of objects. An object is
    filled after the containers around it, so a chain of objects may be of any length.

    Args:
        what: the function that copies, for messages.
        trees: the trees.
        leaf: gives the copy of a leaf, from its path, the values there, and whether it is in a container
            that an attribute of an object has.
        stops: whether a part is a leaf, and not walked into.
        finish: is called with each object and its copy, once that has its data.

    Raises ValueError naming the path where two trees differ in structure.
    """
    copies: dict[
        int, tuple[tp.Any, tp.Any]
    ] = {}  # by id: the lead, which so stays alive, and its copy
    pending: list[tuple[Path, Values, tp.Any]] = []

    def copy_of(path: Path, lead: tp.Any, values: Values) -> tp.Any:
        for value in values:
            if value is not None and type(value) is not type(lead):
                differ(what, path, lead, value)
        if isinstance(lead, Variable):
            raw = tuple(None if v is None else v.get_raw_value() for v in values)
            return make(lead._box.definition, part(path, raw, False))
        copy = lead.__copy__()
        pending.append((path, values, copy))
        return copy

    def part(path: Path, values: Values, in_container: bool) -> tp.Any:
        lead = first_given(*values)
        if lead is None or stops(lead):
            return leaf(path, values, in_container)
        if kind_of(lead) in (OBJECT, VARIABLE):
            if id(lead) not in copies:
                copies[id(lead)] = lead, copy_of(path, lead, values)
            return copies[id(lead)][1]
        found = _level(lead)
        if found is None:
            return leaf(path, values, in_container)
        names, _, form, build = found
        others = [None if value is None else _level(value) for value in values]
        for value, other in zip(values, others):
            if value is not None and (other is None or other[2] != form):
                differ(what, path, lead, value)
        below = zip(*[[None] * len(names) if other is None else other[1] for other in others])
        new = [part((*path, name), parts, in_container) for name, parts in zip(names, below)]
        return build(new)

    out = part((), trees, False)
    while pending:
        path, values, copy = pending.pop()
        lead = first_given(*values)
        for name, child in list(lead._nnx_dict.items()):
            if lead._nnx_status.get(name):
                parts = tuple(None if v is None else v._nnx_dict.get(name) for v in values)
                is_object = kind_of(child) in (OBJECT, VARIABLE)
                in_container = not is_object and _level(child) is not None
                copy._nnx_dict[name] = part((*path, name), parts, in_container)
        finish(lead, copy)
    return out


def first_given(*values: tp.Any) -> tp.Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def differ(what: str, path: Path, one: tp.Any, other: tp.Any) -> tp.NoReturn:
    """Raise ValueError for two parts of different structure."""

    def shown(value: tp.Any) -> str:
        found = None if kind_of(value) in (OBJECT, VARIABLE) else _level(value)
        if found is None:
            return short_type(value)
        return f"{short_type(value)} with {len(found[0])} children {[*found[0]]}"

    raise ValueError(
        f"{what}: the trees differ in structure at '{path_text(path)}': one has {shown(one)}, another "
        f"{shown(other)}."
    )


def combined(
    fun: tp.Callable[..., tp.Any],
    trees: tp.Sequence[tp.Any],
    what: str,
    is_leaf: tp.Callable[[tp.Any], bool] | None = None,
) -> tp.Any:
    """Trees joined leaf by leaf: `fun(*leaves)`, with None where a tree has no leaf.

    The first tree that is not None gives the form at each path, and the static parts of objects: their
    static attributes, and functions, text and other objects in their containers. `fun` decides about
    every leaf, also where all trees, or below a container all but one, are None.

    Raises ValueError naming the path where two trees differ in structure.
    """
    stops = is_leaf or (lambda part: False)

    def leaf(path: Path, values: Values, in_container: bool) -> tp.Any:
        lead = first_given(*values)
        if lead is None or stops(lead):
            return fun(*values)
        if in_container and is_static_part(lead):
            return lead
        for value in values:
            if kind_of(value) in (OBJECT, VARIABLE) or _level(value) is not None:
                differ(what, path, lead, value)
        return fun(*values)

    return copied(what, tuple(trees), leaf, stops)
