"""Definitions: the static side of an object graph, interned.

* `Layout`: attribute names and which of them are data; shared by all objects that look alike.
* `ObjectDef`: class, layout and static values of one object.
* `ContainerDef`: kind and keys of a plain container or pytree node that contains data.
* `StaticDef`: a static value inside such a container.
* `VariableDef` (from the variables package): class and metadata of a Variable.
* `GraphDef`: a whole graph, as the preorder sequence of the above.

A `GraphDef` is a flat tuple of tokens.  A definition announces a new node and is followed by the
tokens of its data attributes in sorted order; an int refers back to the object, Variable or array
reference of that number; `LEAF` is an array without a Variable.  Since every definition knows
its number of children the sequence decodes without brackets, and since definitions are interned,
comparing two graphs is comparing two tuples of identities.  Interning is weak: nothing lives longer
because it was once described.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing as tp

import jax

from nnxlite._interning import LOCK, Table
from nnxlite._state import sort_key, sorted_keys
from nnxlite._statics import (
    FIXED,
    MUTABLE,
    content_key,
    is_constant,
    is_current,
    own_copy,
    stability,
)
from nnxlite._together import Writes
from nnxlite._versions import epoch, observe, touch
from nnxlite.graph._containers import container_of, has_data
from nnxlite.graph._kinds import CONTAINERS, PYTREE, GraphNode, kind_of
from nnxlite.variables import VariableDef

Status = tp.Mapping[tp.Any, bool]
"""Which attributes are data: by name."""

Values = tp.Callable[[tp.Any], tuple[tp.Any, ...]]


def values_getter(names: tuple[tp.Any, ...]) -> Values:
    """A function that gives the values of a mapping (or a list) under these names."""
    if not names:
        return lambda mapping: ()
    if len(names) == 1:
        (name,) = names
        return lambda mapping: (mapping[name],)
    return operator.itemgetter(*names)


class Layout:
    """Sorted names of data and static attributes; `status` maps each name to "is data".

    Rebuilt objects hold `status` as their own until it changes, so it is read-only.
    """

    __slots__ = ("__weakref__", "data", "data_values", "key", "static", "static_values", "status")

    def __init__(self, names: list[tp.Any], status: Status, key: tp.Any) -> None:
        self.key = key
        self.status: Status = types.MappingProxyType({name: status[name] for name in names})
        self.data = tuple(n for n in names if status[n])
        self.static = tuple(n for n in names if not status[n])
        self.data_values = values_getter(self.data)
        self.static_values = values_getter(self.static)


_layouts: Table[Layout] = Table("key")


def layout_of(status: Status) -> Layout:
    """The interned layout for a status mapping, whatever its order."""
    status = dict(status)  # another thread may be editing it
    names = sorted_keys(status)
    key = (*names, *[status[n] for n in names])
    return _layouts.find(key) or _layouts.add(key, Layout(names, status, key))


class ObjectDef:
    """Class, layout and static values of a graph object; equal ones are the same object.

    Attributes:
        template: the static attributes, by name.
        mutable: the keys of those that can be edited in place, by name; `template` contains copies of
            the builtin containers among them.
        key: what makes two definitions equal.
        stability: that of the least stable static value.
    """

    __slots__ = (
        "__weakref__",
        "key",
        "layout",
        "metadata",
        "mutable",
        "stability",
        "statics",
        "template",
        "type",
    )

    def __init__(
        self,
        type_: type,
        layout: Layout,
        statics: tuple[tp.Any, ...],
        metadata: tp.Any,
        key: tuple[tp.Any, ...],
    ) -> None:
        self.type: tp.Any = type_
        self.layout = layout
        self.metadata = metadata
        self.statics = statics
        self.template = dict(zip(layout.static, statics))
        self.key = key
        stabilities = [stability(value) for value in statics]
        self.stability = max(stabilities, default=FIXED)
        keys = zip(layout.static, key[-len(statics) :], stabilities)
        self.mutable = {name: part for name, part, how in keys if how is MUTABLE}

    def content(self) -> tuple[tp.Any, ...]:
        """The key of the definition as its static values are now."""
        return (self.type, self.layout, content_key(self.metadata), *map(content_key, self.statics))

    def fresh_template(self) -> dict[tp.Any, tp.Any]:
        """The static attributes for a new object."""
        new = self.template.copy()
        for name in self.mutable:
            new[name] = own_copy(new[name])
        return new

    def with_static(self, name: tp.Any, value: tp.Any) -> ObjectDef:
        """The definition with another value of one static attribute; this one has to be FIXED.

        The keys of the other values are taken over: with them worked out again a change of mode takes
        nearly three times as long, about 4 % of training with an evaluation after every ten steps, which
        has 15 % to spend (bench `loops`).
        """
        at = self.layout.static.index(name)
        statics = (*self.statics[:at], value, *self.statics[at + 1 :])
        first = len(self.key) - len(statics)
        keys = (*self.key[: first + at], content_key(value), *self.key[first + at + 1 :])
        return _defs.find(keys) or intern_object(self.type, self.layout, statics, self.metadata)

    def __repr__(self) -> str:
        static = ", ".join(f"{k}={v!r}" for k, v in self.template.items())
        return f"{self.type.__name__}({static})"

    def __reduce__(self) -> tp.Any:
        return _object_def, (self.type, dict(self.layout.status), self.statics, self.metadata)


_defs: Table[ObjectDef] = Table("key", is_current)


def _object_def(
    cls: type, status: Status, statics: tuple[tp.Any, ...], metadata: tp.Any
) -> ObjectDef:
    return intern_object(cls, layout_of(status), statics, metadata)


def intern_object(
    cls: type, layout: Layout, statics: tuple[tp.Any, ...], metadata: tp.Any = None
) -> ObjectDef:
    """The one definition for these facts."""
    statics = tuple(map(own_copy, statics))  # before the key: another thread may be editing them
    key = (cls, layout, content_key(metadata), *map(content_key, statics))
    cached = _defs.find(key)
    return cached or _defs.add(key, ObjectDef(cls, layout, statics, metadata, key))


def definition(node: GraphNode) -> ObjectDef:
    """The interned definition of an object's present structure.

    Raises ValueError where data was put into a static container after its assignment.
    """
    current = node._nnx_def
    if current is not None and not current.mutable:
        return current
    return define(node)


def define(node: GraphNode, fresh: bool = False) -> ObjectDef:
    """Work out the definition of an object; a `fresh` object is not known to other threads yet.

    Raises ValueError where data was put into a static container after its assignment.
    """
    if fresh:
        current = _look_up(node)
        _set_def(node, current)
        _set_status(node, current.layout.status)  # shared: half of what a small module takes
        return current
    start = epoch.now
    version = observe(node)
    current = _look_up(node)
    with LOCK:
        if node._nnx_version == version and epoch.now == start:  # else it may have been edited
            _set_def(node, current)
            if epoch.now != start:  # by a signal handler or a finalizer, just now
                _set_def(node, None)
    return current


def set_definition(node: GraphNode, new: ObjectDef | None) -> None:
    """Give an object that has just been changed its new definition; None if it is not known."""
    with LOCK:
        _set_def(node, new)
        touch(node)


def note_definition_of(writes: Writes, node: GraphNode, new: ObjectDef | None) -> None:
    """Note what `set_definition` does, after the writes that change an object."""
    writes.add(_set_def, node, new)
    writes.touch(node)


def set_static(node: GraphNode, name: tp.Any, value: tp.Any) -> None:
    """Give a static attribute of an object another number, flag, text or the like.

    The version stays what it is, since the children do: a plan compares definitions as well.
    """
    old, new = node._nnx_def, None
    if old is not None and old.stability is FIXED and name in old.template:
        new = old.with_static(name, value)
    attributes: tp.Any = node.__dict__
    with LOCK:
        is_current = node._nnx_def is old
        _set_def(node, None)  # what interrupts this must not leave a plan valid
        epoch.move()
        start = epoch.now
        attributes[name] = value
        if new is not None and is_current:
            _set_def(node, new)
            if epoch.now == start:  # no signal handler or finalizer has edited it in between
                epoch.move()
                return
    set_definition(node, None)


def _look_up(node: GraphNode) -> ObjectDef:
    """The definition of an object: one that its class has cached, an interned one, or a new one."""
    if node._nnx_status.keys() != node.__dict__.keys():
        adopt_unknown(node)
    attributes, status = node.__dict__, dict(node._nnx_status)  # other threads may edit it
    by_name = {name: attributes[name] for name, is_data in status.items() if not is_data}
    statics = [*by_name.values()]  # read once: what is cached below must be of these very values
    types_of = [type(value) for value in statics]
    types_of += [tuple(map(type, value)) for value in statics if type(value) is tuple]
    form = (*status, *status.values(), *types_of, *statics)
    cache = type(node).__dict__.get("_nnx_definitions", {})
    try:
        cached = cache.get(form)
    except (TypeError, ValueError):  # a static value that cannot be hashed, or compared
        cached = None
    if cached is None:
        layout = layout_of(status)
        for name in layout.static:
            refuse_hidden_data(node, name, by_name[name])
        cached = intern_object(type(node), layout, layout.static_values(by_name))
        if len(status) <= DEFINITIONS_PER_CLASS and all(map(is_constant, statics)):
            if not cache or len(cache) >= DEFINITIONS_PER_CLASS:
                type(node)._nnx_definitions = cache = {}
            cache[form] = cached
    return cached


DEFINITIONS_PER_CLASS = 64
"""How many definitions a class caches, and how many attributes such a definition may have."""
# Key: names, statuses, types and values as an object has them. Nothing to invalidate: only constants
# are cached, which keep nothing else alive. Threads: one may replace the dict that another one fills.
# Earned by the budget of 10 us for a module with two static attributes (`construct`), which has to be
# defined again for each new object otherwise, and by training that switches modes (`loops`).


_set_def = GraphNode.__dict__["_nnx_def"].__set__
_set_status = GraphNode.__dict__["_nnx_status"].__set__


def adopt_unknown(node: GraphNode) -> None:
    """Give a status to attributes written around `__setattr__`, and drop that of vanished ones."""
    attributes = node.__dict__
    status = own_status(node)
    decide = getattr(node, "_nnx_decide", None) or (lambda name, value: has_data(value))
    for name in [name for name in status.copy() if name not in attributes]:
        status.pop(name, None)
    for name, value in attributes.copy().items():
        if name in status:
            continue
        if isinstance(getattr(type(node), str(name), None), functools.cached_property):
            del attributes[name]  # computed again when it is next read
        else:
            status.setdefault(name, decide(name, value))


def own_status(node: GraphNode) -> dict[tp.Any, bool]:
    """The status mapping of an object, after this its own, to be edited in place.

    Call it before the attributes change: what another thread then adopts goes to the same mapping.
    """
    status = node._nnx_status
    if type(status) is not dict:  # shared with others, see `Layout.status`
        status = dict(status)
        _set_status(node, status)
    return status


def refuse_hidden_data(node: tp.Any, name: tp.Any, value: tp.Any) -> None:
    """Raise ValueError where a static attribute contains data."""
    if kind_of(value) not in CONTAINERS or not has_data(value):
        return
    owner = type(node).__name__
    raise ValueError(
        f"Found unexpected data on value of type '{type(value).__name__}' in static attribute "
        f"{name!r} of Pytree type '{owner}': arrays, Variables or objects. A container that was "
        "empty (or held only static values) when it was assigned stays static. Either assign the "
        f"filled container, or use one of: self.{name} = nnx.data(...); self.{name} = "
        f"nnx.List(...) or nnx.Dict(...); the class annotation `{name}: nnx.Data[...]`; or "
        f"class {owner}(..., pytree=False)."
    )


class ContainerDef:
    """Kind, type, keys and (for registered pytree nodes) one-level treedef of a container.

    `container` is what the engine does with this kind.

    The keys of named tuples and pytree nodes are given in the order of the node and sorted;
    `order` is what sorts them, or None where they are sorted already.
    """

    __slots__ = ("__weakref__", "container", "key", "keys", "kind", "order", "treedef", "type")

    def __init__(
        self, kind: int, type_: type, keys: tuple[tp.Any, ...], treedef: tp.Any, key: tp.Any = None
    ) -> None:
        self.kind = kind
        self.type = type_
        self.container = container_of(type_, kind)
        self.order: list[int] | None = None
        if kind == PYTREE:
            order = sorted(range(len(keys)), key=lambda i: sort_key(keys[i]))
            if order != list(range(len(keys))):
                self.order = order
                keys = tuple(keys[i] for i in order)
        self.keys = keys
        self.treedef = treedef
        self.key = key

    def in_order(self, children: tp.Sequence[tp.Any]) -> tp.Sequence[tp.Any]:
        """The children of such a node in the order of the keys."""
        return children if self.order is None else [children[i] for i in self.order]

    def _as_node(self, parts: tp.Sequence[tp.Any]) -> tp.Sequence[tp.Any]:
        """The inverse of `in_order`."""
        if self.order is None:
            return parts
        place = dict(zip(self.order, parts))
        return [place[i] for i in range(len(parts))]

    def build(self, children: list[tp.Any]) -> tp.Any:
        """A container of this form with these children."""
        return self.container.build(self, self._as_node(children))

    def __repr__(self) -> str:
        return f"{self.type.__name__}{list(self.keys)}"

    def __reduce__(self) -> tp.Any:
        return container_def, (self.kind, self.type, tuple(self._as_node(self.keys)), self.treedef)


class StaticDef:
    """A static value inside a container that contains data."""

    __slots__ = ("__weakref__", "key", "stability", "value")

    def __init__(self, value: tp.Any, key: tp.Any = None) -> None:
        self.value = value
        self.key = key
        self.stability = stability(value)

    def content(self) -> tp.Any:
        """The key as the value is now."""
        return content_key(self.value)

    def __repr__(self) -> str:
        return f"Static({self.value!r})"

    def __reduce__(self) -> tp.Any:
        return static_def, (self.value,)


class _Mark:
    """A named token."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name


LEAF = _Mark("LEAF")
REF_LEAF = _Mark("REF_LEAF")

_containers: Table[ContainerDef] = Table("key")
_statics: Table[StaticDef] = Table("key", is_current)


def container_def(
    kind: int, type_: type, keys: tuple[tp.Any, ...], treedef: tp.Any = None
) -> ContainerDef:
    """The one definition of a container of this form."""
    key = (kind, type_, keys, tuple(map(type, keys)), treedef)
    try:
        cached = _containers.find(key)
    except ValueError:  # the static part of a pytree node cannot be compared: one of its own
        return ContainerDef(kind, type_, keys, treedef)
    return cached or _containers.add(key, ContainerDef(kind, type_, keys, treedef, key))


def static_def(value: tp.Any) -> StaticDef:
    """The one definition of a static value."""
    value = own_copy(value)
    key = content_key(value)
    cached = _statics.find(key)
    return cached or _statics.add(key, StaticDef(value, key))


Token: tp.TypeAlias = ObjectDef | VariableDef | ContainerDef | StaticDef | _Mark | int


# The public records that spell out a GraphDef, made on demand ------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class NodeDef:
    """One object or container of a `GraphDef`, spelled out."""

    type: type
    index: int | None
    outer_index: int | None
    num_attributes: int
    metadata: tp.Any


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRef:
    """A reference to an earlier node of a `GraphDef`, spelled out."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class VariableRecord:
    """One Variable of a `GraphDef`, spelled out."""

    type: type
    index: int
    outer_index: int | None
    metadata: dict[str, tp.Any]
    array_refdef: tp.Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class NodeAttr:
    """The attribute is a node or a Variable."""


@dataclasses.dataclass(frozen=True, slots=True)
class LeafAttr:
    """The attribute is a leaf."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, slots=True)
class Static:
    """The attribute is static; as a pytree, a value without leaves."""

    value: tp.Any
