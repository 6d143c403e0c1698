"""Nodes: what has children, and how each kind of node lists and edits them.

Containers are in `_containers.py`; here are the two kinds with an identity: objects, and instances of
classes registered with `register_graph_node_type`.
"""

from __future__ import annotations

import typing as tp

from nnxlite._together import Writes
from nnxlite.graph._containers import Assigned, Names, Node, container_of
from nnxlite.graph._defs import definition
from nnxlite.graph._kinds import (
    CONTAINERS,
    CUSTOM,
    CUSTOM_NODES,
    OBJECT,
    is_setting,
    kind_of,
)


class _Object(Node):
    def items(self, value: tp.Any) -> list[tuple[tp.Any, tp.Any]]:
        attributes = value._nnx_dict
        return [(name, attributes[name]) for name in definition(value).layout.status]

    def mapping(self, value: tp.Any) -> tp.Mapping[tp.Any, tp.Any]:
        return value._nnx_dict

    def is_static(self, value: tp.Any, name: tp.Any, child: tp.Any) -> bool:
        return not value._nnx_status.get(name, True)

    def edit(self, writes: Writes, value: tp.Any, assigned: Assigned, removed: Names = ()) -> None:
        value._nnx_edit(writes, assigned, removed)


class _Custom(Node):
    def items(self, value: tp.Any) -> list[tuple[tp.Any, tp.Any]]:
        return list(CUSTOM_NODES[type(value)].flatten(value)[0])

    def is_static(self, value: tp.Any, name: tp.Any, child: tp.Any) -> bool:
        return is_setting(child)

    def edit(self, writes: Writes, value: tp.Any, assigned: Assigned, removed: Names = ()) -> None:
        custom = CUSTOM_NODES[type(value)]
        for name in removed:
            writes.add_foreign(custom.pop_key, value, name)
        for name, child in assigned.items():
            writes.add_foreign(custom.set_key, value, name, child)


class _Frozen(_Object):
    """Replaced by a copy, like a tuple, where its attributes are to change."""

    in_place = False
    grows = False


_KINDS: dict[int, Node] = {OBJECT: _Object(), CUSTOM: _Custom()}
_FROZEN = _Frozen()
NODES = CONTAINERS | frozenset(_KINDS)
"""The kinds of values that have children."""


def node_of(value: tp.Any) -> Node:
    """How the children of a node are listed and edited."""
    kind = kind_of(value)
    if kind == OBJECT and value._nnx_closed:
        return _FROZEN
    return _KINDS.get(kind) or container_of(type(value), kind)


def children_of(value: tp.Any, static: bool = True) -> list[tuple[tp.Any, tp.Any]]:
    """The (name, child) pairs of a value in traversal order, with or without static attributes."""
    if kind_of(value) not in NODES:
        return []
    node = node_of(value)
    items = node.items(value)
    if static or not isinstance(node, _Object):
        return items
    return [(name, child) for name, child in items if not node.is_static(value, name, child)]
