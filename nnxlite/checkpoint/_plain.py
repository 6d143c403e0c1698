"""Plain data: what the caller saves beside objects, in dictionaries, lists and tuples.

The attributes of an object are set by its class, which the program builds again: a checkpoint describes
them as text.  Nothing builds the caller's own containers again, so a checkpoint stores all that is in
them.  `None`, bytes and empty containers are leaves there, beside arrays, numbers and text; a table of
the containers says how they are nested.  Everything else, such as a function or a set, is refused.
"""

from __future__ import annotations

import collections
import typing as tp
from collections.abc import Callable, Iterator, Mapping

import jax

from nnxlite.graph._kinds import OTHER, kind_of
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import is_graph_node
from nnxlite.variables._variable import Variable

KINDS = {
    "dict": (dict, collections.OrderedDict, collections.defaultdict),
    "list": (list,),
    "tuple": (tuple,),
}
"""The types of plain containers; what is read is of the first one of a kind."""

EMPTY = {f"empty {kind}": types[0] for kind, types in KINDS.items()}
FIXED: dict[str, tp.Any] = {"None": type(None), **EMPTY}
"""Names of leaves that have no other value than the one that they say."""

Table: tp.TypeAlias = dict[str, tuple[str, list[tuple[tp.Any, str]]]]
"""Containers by name: of which kind, and for each entry its key and its name."""


def kind_name(value: tp.Any) -> str | None:
    """`dict`, `list` or `tuple` for a plain container; None for anything else, also a named tuple."""
    cls = type(value)
    return next((name for name, types in KINDS.items() if cls in types), None)


def leaf_name(value: tp.Any) -> str | None:
    """The name of what is a leaf in plain data only: `None`, `Python bytes`, `empty list`."""
    if value is None:
        return "None"
    if type(value) is bytes:
        return "Python bytes"
    kind = kind_name(value)
    return f"empty {kind}" if kind and not value else None


def entries(container: tp.Any) -> Iterator[tuple[tp.Any, tp.Any]]:
    """The keys or indices of a plain container with what is there."""
    yield from container.items() if isinstance(container, dict) else enumerate(container)


def walk(items: Mapping[str, tp.Any]) -> Iterator[tuple[Path, tp.Any]]:
    """Everything in some items that is in plain containers only, containers before their entries."""
    todo: list[tuple[Path, tp.Any]] = [((name,), value) for name, value in items.items()]
    while todo:
        path, value = todo.pop()
        yield path, value
        if kind_name(value):
            todo += [((*path, key), child) for key, child in entries(value)]


def refused(value: tp.Any) -> tp.Any:
    """The part because of which a checkpoint cannot contain a value without leaves; None if it can."""
    if is_graph_node(value) or isinstance(value, Variable):
        return None
    if kind_of(value) == OTHER:
        return value
    if leaves := jax.tree.leaves(value):
        return leaves[0]
    return value if getattr(value, "__dict__", None) else None


def rebuilt(name: str, table: Table, value_of: Callable[[str], tp.Any]) -> tp.Any:
    """A container as it was saved, or what else there is of a name."""
    if name not in table:
        return value_of(name)
    kind, children = table[name]
    parts = [(key, rebuilt(child, table, value_of)) for key, child in children]
    return dict(parts) if kind == "dict" else KINDS[kind][0](part for _, part in parts)
