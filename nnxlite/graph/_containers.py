"""Containers: what the engine does with lists, tuples, dicts, States, named tuples and pytree nodes.

Each kind is one object.  Objects and Variables are not containers: they have an identity, and
`_traverse.py` treats them itself.  A class of the user's own becomes a graph node, not a container, with
`register_graph_node_type` (`_kinds.py`).
"""

from __future__ import annotations

import operator
import typing as tp

import jax

from nnxlite._jax import PyTreeDef, flatten_one_level, key_name
from nnxlite._state import sort_key, sorted_keys
from nnxlite._together import Writes
from nnxlite.graph._kinds import (
    CONTAINERS,
    DICT,
    LIST,
    PYTREE,
    STATE,
    TUPLE,
    is_data,
    kind_of,
)

Children = tp.Sequence[tp.Any]
Assigned = tp.Mapping[tp.Any, tp.Any]
Names = tp.Collection[tp.Any]


class Flat(tp.NamedTuple):
    """A container, flattened by one level.

    Attributes:
        keys: of the children.
        children: the children.
        treedef: the structure of this level, for pytree nodes.
    """

    keys: tuple[tp.Any, ...]
    children: Children
    treedef: PyTreeDef | None = None


class Form(tp.Protocol):
    """What a definition knows of a container."""

    type: type
    keys: tuple[tp.Any, ...]
    treedef: tp.Any


class Node:
    """What is edited in a node of one kind, a container or not: its children, by name.

    Attributes:
        in_place: whether children are replaced in the node itself, not by building another node.
        grows: whether it takes children under new names.
    """

    in_place: tp.ClassVar[bool] = True
    grows: tp.ClassVar[bool] = True

    def items(self, value: tp.Any) -> list[tuple[tp.Any, tp.Any]]:
        """The (name, child) pairs, in the order in which they are traversed."""
        raise NotImplementedError  # pragma: no cover - abstract

    def mapping(self, value: tp.Any) -> tp.Mapping[tp.Any, tp.Any]:
        """The children by name, in any order."""
        return dict(self.items(value))

    def is_static(self, value: tp.Any, name: tp.Any, child: tp.Any) -> bool:
        """Whether a child is not part of the state, not even with `graph=False`."""
        return child is None

    def edit(self, writes: Writes, value: tp.Any, assigned: Assigned, removed: Names = ()) -> None:
        """Note that children are replaced or added, and others removed."""
        note = writes.add if type(value) in (list, dict) else writes.add_foreign
        for name in sorted(removed, key=_last_item_first):
            note(operator.delitem, value, name)
        for name, child in assigned.items():
            note(operator.setitem, value, name, child)


def _last_item_first(name: tp.Any) -> int:
    return -name if isinstance(name, int) else 0


class Container(Node):
    """Base of the kinds of containers.

    Attributes:
        notifies: whether nothing in it can be replaced without a new version or a new container.
    """

    in_place = False
    grows = False
    notifies: tp.ClassVar[bool] = False

    def items(self, value: tp.Any) -> list[tuple[tp.Any, tp.Any]]:
        keys, children, _ = self.flatten(value)
        return list(zip(keys, children))

    def flatten(self, value: tp.Any) -> Flat:
        """A container of this kind, flattened."""
        raise NotImplementedError  # pragma: no cover - abstract

    def build(self, form: Form, children: Children) -> tp.Any:
        """A container of this kind with these children, in the order of `flatten`."""
        raise NotImplementedError  # pragma: no cover - abstract

    def children(self, value: tp.Any, form: Form) -> Children | None:
        """The children of a container of the right class; None where it has another form now."""
        raise NotImplementedError  # pragma: no cover - abstract


class _List(Container):
    in_place = True

    def flatten(self, value: tp.Any) -> Flat:
        return Flat(tuple(range(len(value))), value)

    def build(self, form: Form, children: Children) -> tp.Any:
        return children

    def children(self, value: tp.Any, form: Form) -> Children | None:
        return value if len(value) == len(form.keys) else None


class _Tuple(_List):
    in_place = False
    notifies = True

    def build(self, form: Form, children: Children) -> tp.Any:
        return tuple(children)


class _Dict(Container):
    in_place = True
    grows = True

    def mapping(self, value: tp.Any) -> tp.Mapping[tp.Any, tp.Any]:
        """The dict that contains the children."""
        return value

    def flatten(self, value: tp.Any) -> Flat:
        mapping = self.mapping(value)
        keys = tuple(sorted_keys(mapping))
        return Flat(keys, [mapping[key] for key in keys])

    def build(self, form: Form, children: Children) -> tp.Any:
        return dict(zip(form.keys, children))

    def children(self, value: tp.Any, form: Form) -> Children | None:
        mapping = self.mapping(value)
        if len(mapping) != len(form.keys):
            return None
        try:
            return [mapping[key] for key in form.keys]
        except KeyError:
            return None


class _State(_Dict):
    notifies = True

    def mapping(self, value: tp.Any) -> tp.Mapping[tp.Any, tp.Any]:
        """The dict that contains the children."""
        return value._mapping

    def build(self, form: Form, children: Children) -> tp.Any:
        return form.type._nnx_wrap(dict(zip(form.keys, children)))  # type: ignore[attr-defined]


class _Fields(Container):
    """Containers of the user's own, whose keys are sorted for a traversal."""

    def items(self, value: tp.Any) -> list[tuple[tp.Any, tp.Any]]:
        return sorted(super().items(value), key=lambda pair: sort_key(pair[0]))


class _NamedTuple(_Fields):
    notifies = True

    def flatten(self, value: tp.Any) -> Flat:
        return Flat(type(value)._fields, value)

    def build(self, form: Form, children: Children) -> tp.Any:
        return form.type(*children)

    def children(self, value: tp.Any, form: Form) -> Children | None:
        return value


class _PyTreeNode(_Fields):
    def flatten(self, value: tp.Any) -> Flat:
        pairs, treedef = flatten_one_level(value)
        return Flat(tuple(key_name(key) for key, _ in pairs), [x for _, x in pairs], treedef)

    def build(self, form: Form, children: Children) -> tp.Any:
        return jax.tree_util.tree_unflatten(form.treedef, children)

    def children(self, value: tp.Any, form: Form) -> Children | None:
        pairs, treedef = flatten_one_level(value)
        try:
            same = treedef == form.treedef
        except ValueError:  # its static part cannot be compared
            return None
        return [child for _, child in pairs] if same else None


_NAMED_TUPLE, _PYTREE_NODE = _NamedTuple(), _PyTreeNode()
_KINDS = {LIST: _List(), TUPLE: _Tuple(), DICT: _Dict(), STATE: _State()}


def container_of(cls: type, kind: int) -> Container:
    """What is done with containers of a class, of which the kind is known."""
    if kind != PYTREE:
        return _KINDS[kind]
    return _NAMED_TUPLE if hasattr(cls, "_fields") else _PYTREE_NODE


def has_data(value: tp.Any, /) -> bool:
    """Whether a value is data or a container with data at any depth.

    Args:
        value: anything.

    Returns:
        A bool.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.has_data([1, (jnp.zeros(2),)]), nnx.has_data([1, "a"])
    (True, False)
    """
    return any(is_data(part) for part in walk(value))


def walk(value: tp.Any) -> tp.Iterator[tp.Any]:
    """A value and, through plain containers and pytree nodes, everything inside it."""
    pending = [value]
    entered: dict[int, tp.Any] = {}  # with the values: some are new, and their ids must stay taken
    while pending:
        value = pending.pop()
        yield value
        kind = kind_of(value)
        if kind in CONTAINERS and id(value) not in entered:
            entered[id(value)] = value
            pending.extend(part for _, part in container_of(type(value), kind).items(value))
