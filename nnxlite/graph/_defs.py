"""Definitions: the static side of an object graph, interned.

* `AttributeNames`: names of attributes and which of them are data; shared by objects that look alike.
* `ObjectDef`: class, names and static values of one object.
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

Static values that may be edited, or are equal without being interchangeable, stay with their object: its
definition is private, see `_base.interning`.

What has children is a *node*: an object, a container, or an instance of a registered class.
The last part of this file says how children are listed and edited.
"""

from __future__ import annotations

import enum
import functools
import operator
import types
import typing as tp

from nnxlite._base.errors import path_text
from nnxlite._base.interning import (
    LOCK,
    Definition,
    Table,
    Writes,
    epoch,
    next_number,
    observe,
    run_together,
    touch,
)
from nnxlite._base.jax import static_part, with_static_part
from nnxlite._base.statics import alike, atoms, facts, is_constant, own_copy
from nnxlite._state._flat import sort_key, sorted_keys, values_getter
from nnxlite.graph._kinds import (
    CONTAINERS,
    CUSTOM_NODES,
    GraphNode,
    Kind,
    Leaves,
    build_container,
    flatten_container,
    has_data,
    is_static_item,
    is_static_value,
    items_of,
    kind_of,
    warn_of_hidden,
)
from nnxlite.variables._definition import VariableDef

IsData = tp.Mapping[tp.Any, bool]
"""Which attributes are data: by name."""


class AttributeNames:
    """Sorted names of data and static attributes; `status` maps each name to "is data".

    Rebuilt objects hold `status` as their own until it changes, so it is read-only.
    """

    __slots__ = ("__weakref__", "data", "data_values", "key", "static", "static_values", "status")

    def __init__(self, names: list[tp.Any], status: IsData, key: tp.Any) -> None:
        self.key = key
        self.status: IsData = types.MappingProxyType({name: status[name] for name in names})
        self.data = tuple(n for n in names if status[n])
        self.static = tuple(n for n in names if not status[n])
        self.data_values = values_getter(self.data)
        self.static_values = values_getter(self.static)

    def __reduce__(self) -> tp.Any:
        return names_of, (dict(self.status),)


_names: Table[AttributeNames] = Table("key")


def names_of(status: IsData) -> AttributeNames:
    """The interned names for a status mapping, whatever its order."""
    status = dict(status)  # another thread may be editing it
    names = sorted_keys(status)
    key = (*names, *[status[n] for n in names])
    return _names.find(key) or _names.add(key, AttributeNames(names, status, key))


class ObjectDef(Definition):
    """Class, names and static values of a graph object, and last the metadata of a foreign one.

    Attributes:
        template: the static attributes, by name, with copies of the builtin containers among them.
        attributes: the same among all attributes, sorted by name; data has any value.
        watched: names and positions of those that can be edited in place.
    """

    def __init__(self, *content: tp.Any) -> None:
        super().__init__(*content)
        self.type: tp.Any
        self.names: AttributeNames
        self.type, self.names = self.head
        names, self.metadata = self.names.static, self.values[-1]
        self.template = dict(zip(names, self.values))
        self.attributes = {**self.names.status, **self.template}
        self.watched = [(names[i], i) for i in self.mutable if i < len(names)]

    def new_template(self) -> dict[tp.Any, tp.Any]:
        """The `attributes` for a new object; data is yet to be put in its place."""
        new = self.attributes.copy()
        for name, _ in self.watched:
            new[name] = own_copy(new[name])
        return new

    def with_static(self, name: tp.Any, value: tp.Any) -> ObjectDef:
        """The definition with another value of one static attribute; this one is not `mutable`.

        What is known of the other values is taken over: it is why a change of mode is quick.
        """
        at, about = self.names.static.index(name), facts(value)
        if self.public is None and about.exact:
            place = len(self.head) + at
            key = (*self.key[:place], about.key, *self.key[place + 1 :])
            known = ObjectDef._table.find(key)
            if known is not None:
                return known
        values = (*self.values[:at], value, *self.values[at + 1 :])
        return ObjectDef.of(self.head, values, (*self.facts[:at], about, *self.facts[at + 1 :]))

    def is_of(self, node: GraphNode, seen: set[int]) -> bool:
        """Whether the mutable static attributes of an object are what this definition says.

        An object that many nodes share is read once: `seen` has the ids of those that were.
        """
        attributes = node._nnx_dict
        for name, at in self.watched:
            value = attributes.get(name)
            number = id(value)
            if number in seen:
                continue
            seen.add(number)
            if facts(value).key != self.facts[at].key:
                return False
            pairs = zip(atoms(value), atoms(self.values[at])) if self.atoms else ()
            if any(a is not b for a, b in pairs):
                return False
        return True

    def differs(self, name: tp.Any, before: ObjectDef) -> bool:
        """Whether a static attribute has another value than in an earlier definition."""
        return name not in before.template or not alike(self.template[name], before.template[name])

    def __repr__(self) -> str:
        static = ", ".join(f"{k}={v!r}" for k, v in self.template.items())
        return f"{self.type.__name__}({static})"


def intern_object(
    cls: type, names: AttributeNames, statics: tuple[tp.Any, ...], metadata: tp.Any = None
) -> ObjectDef:
    """The definition for these facts."""
    # Copied before the key is made: another thread may be editing them.
    return ObjectDef.of((cls, names), (*map(own_copy, statics), metadata))


def definition(node: GraphNode) -> ObjectDef:
    """The interned definition of an object's present structure.

    Raises ValueError where data was put into a static container after its assignment.
    """
    current = node._nnx_def
    if current is not None and not current.mutable:
        return current
    return define(node)


def define(node: GraphNode, new: bool = False) -> ObjectDef:
    """Work out the definition of an object; a `new` object is not known to other threads yet.

    Raises ValueError where data was put into a static container after its assignment.
    """
    if new:
        current = _look_up(node)
        _warn_of_hidden(node, current)
        _set_def(node, current)
        _set_status(node, current.names.status)  # shared: half of what a small module takes
        return current
    start = epoch.now
    version = observe(node)
    current, before = _look_up(node), node._nnx_def
    if before is not None and current.matches(before):
        return before
    _warn_of_hidden(node, current)
    with LOCK:
        if node._nnx_version == version and epoch.now == start:  # else it may have been edited
            _set_def(node, current)
            if epoch.now != start:  # by a signal handler or a finalizer, just now
                _set_def(node, None)
    return current


def _warn_of_hidden(node: GraphNode, definition: ObjectDef) -> None:
    if not getattr(node, "_nnx_is_pytree", True):  # its attributes are not checked
        return
    declared = getattr(type(node), "_nnx_declared", None) or {}
    for name, value in definition.template.items():
        if declared.get(name) is not False:
            warn_of_hidden(type(node), name, node._nnx_dict.get(name, value))


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
    if old is not None and not old.mutable and name in old.template:
        new = old.with_static(name, value)
    attributes: tp.Any = node._nnx_dict
    before = attributes.get(name)  # alive to the end: what a finalizer of it edits comes after
    with LOCK:
        start = next_number()
        if node._nnx_def is not old:  # another thread has edited the object
            new = None
        move = (setattr, epoch, "now", next_number())
        run_together([(attributes.__setitem__, name, value), (_set_def, node, new), move])
        # A handler may have edited it since the check.
        if new is None or next_number() != start + 2:
            set_definition(node, None)
    del before


def _look_up(node: GraphNode) -> ObjectDef:
    """The definition of an object: one that its class has cached, an interned one, or a new one."""
    if node._nnx_status.keys() != node._nnx_dict.keys():
        adopt_unknown(node)
    attributes, status = node._nnx_dict, dict(node._nnx_status)  # other threads may edit it
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
        names = names_of(status)
        for name in names.static:
            refuse_data_in_static(node, name, by_name[name])
        cached = intern_object(type(node), names, names.static_values(by_name))
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
_set_plans = GraphNode.__dict__["_nnx_plans"].__set__
_set_searched = GraphNode.__dict__["_nnx_searched"].__set__
_set_trace = GraphNode.__dict__["_nnx_trace"].__set__
_set_version = GraphNode.__dict__["_nnx_version"].__set__


def new_shell(cls: type, definition: ObjectDef | None, trace: tp.Any, searched: int = -1) -> tp.Any:
    """An object of a class, unfilled, that belongs to the given trace; `definition` may be None yet.

    With `searched=0` it counts as one in no circle, as long as it has version 0.
    """
    return fill_shell(object.__new__(cls), definition, trace, searched)


def fill_shell(
    new: tp.Any, definition: ObjectDef | None, trace: tp.Any, searched: int = -1
) -> tp.Any:
    """What `new_shell` makes of an instance that has nothing yet."""
    _set_def(new, definition)
    _set_status(new, {} if definition is None else definition.names.status)
    _set_trace(new, trace)
    _set_version(new, 0)
    _set_plans(new, None)
    _set_searched(new, searched)
    return new


class KeptElsewhere(property):
    """A property: what is written under its name into `__dict__` goes to its setter instead."""


def adopt_unknown(node: GraphNode) -> None:
    """Give a status to attributes written around `__setattr__`, and drop that of vanished ones."""
    attributes = node._nnx_dict
    status = own_status(node)
    for name in [name for name in status.copy() if name not in attributes]:
        status.pop(name, None)
    elsewhere = []
    for name, value in attributes.copy().items():
        if name in status:
            continue
        member = getattr(type(node), str(name), None)
        if isinstance(member, functools.cached_property):
            del attributes[name]  # computed again when it is next read
        elif isinstance(member, KeptElsewhere):
            elsewhere.append((member, attributes.pop(name)))
        else:
            bare, is_data = node._nnx_decided(name, value)
            if bare is not value:  # marked, but not by way of our `__setattr__`: a frozen dataclass
                attributes[name] = bare
            status.setdefault(name, is_data)
    for member, value in elsewhere:  # last: it may say what the others are
        member.__set__(node, value)


def own_status(node: GraphNode) -> dict[tp.Any, bool]:
    """The status mapping of an object, after this its own, to be edited in place.

    Call it before the attributes change: what another thread then adopts goes to the same mapping.
    """
    status = node._nnx_status
    if type(status) is not dict:  # shared with others, see `AttributeNames.status`
        status = dict(status)
        _set_status(node, status)
    return status


def refuse_data_in_static(node: tp.Any, name: tp.Any, value: tp.Any) -> None:
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


class ContainerDef(Definition):
    """Kind, type, keys and (for registered pytree nodes) one-level treedef of a container.

    The keys of named tuples and pytree nodes are given in the order of the node and sorted;
    `order` is what sorts them, or None where they are sorted already.
    """

    __slots__ = ("keys", "kind", "order", "treedef", "type")

    def __init__(self, *content: tp.Any) -> None:
        super().__init__(*content)
        self.kind, self.type, keys, _, self.treedef = self.head
        self.order: list[int] | None = None
        if self.kind == Kind.PYTREE:
            order = sorted(range(len(keys)), key=lambda i: sort_key(keys[i]))
            if order != list(range(len(keys))):
                self.order = order
                keys = tuple(keys[i] for i in order)
        self.keys = keys

    def _head_of(self, values: tp.Sequence[tp.Any]) -> tuple[tp.Any, ...]:
        """See `Definition`: the treedef has the static part of a pytree node as well."""
        return (*self.head[:-1], with_static_part(self.treedef, *values))

    def in_order(self, children: tp.Sequence[tp.Any]) -> tp.Sequence[tp.Any]:
        """The children of such a node in the order of the keys."""
        return children if self.order is None else [children[i] for i in self.order]

    def build(self, children: list[tp.Any]) -> tp.Any:
        """A container of this form with these children, given in the order of the keys."""
        if self.order is not None:
            by_position = dict(zip(self.order, children))
            children = [by_position[i] for i in range(len(children))]
        return build_container(self, children)

    def __repr__(self) -> str:
        return f"{self.type.__name__}{list(self.keys)}"


class StaticDef(Definition):
    """A static value inside a container that contains data."""

    __slots__ = ()

    @property
    def value(self) -> tp.Any:
        """The value."""
        return self.values[0]

    def is_of(self, value: tp.Any) -> bool:
        """Whether it describes this value as it is now."""
        if value is self.value and not self.mutable:
            return True
        return static_def(value).matches(self)

    def __repr__(self) -> str:
        return f"Static({self.value!r})"


class Mark(enum.Enum):
    """Tokens of leaves that have no definition."""

    LEAF, REF_LEAF = range(2)


LEAF, REF_LEAF = Mark


def static_def(value: tp.Any) -> StaticDef:
    """The definition of a static value."""
    return StaticDef.of((), (own_copy(value),))


Token: tp.TypeAlias = ObjectDef | VariableDef | ContainerDef | StaticDef | Mark | int


# Children ------------------------------------------------------------------------------------

Assigned = tp.Mapping[tp.Any, tp.Any]
Removed = tp.Collection[tp.Any]


def children_of(value: tp.Any, static: bool = True) -> list[tuple[tp.Any, tp.Any]]:
    """The (name, child) pairs of a value in traversal order, with or without static attributes."""
    kind = kind_of(value)
    if kind == Kind.OBJECT:
        attributes, names = value._nnx_dict, definition(value).names
        return [(name, attributes[name]) for name in (names.status if static else names.data)]
    if kind == Kind.CUSTOM:
        return list(CUSTOM_NODES[type(value)].flatten(value)[0])
    return items_of(value, kind) if kind in CONTAINERS else []


def children_by_name(value: tp.Any) -> tp.Mapping[tp.Any, tp.Any]:
    """The children of a node by name, in any order."""
    kind = kind_of(value)
    if kind == Kind.OBJECT:
        return value._nnx_dict
    if kind == Kind.STATE:
        return value._mapping
    return value if kind == Kind.DICT else dict(children_of(value))


def is_static_child(value: tp.Any, name: tp.Any, child: tp.Any) -> bool:
    """Whether a child of a node is not part of its state, not even with `graph=False`."""
    kind = kind_of(value)
    if kind == Kind.OBJECT:
        return not value._nnx_status.get(name, True)
    return is_static_value(child) if kind == Kind.CUSTOM else child is None


def is_edited_in_place(value: tp.Any) -> bool:
    """Whether children are replaced in the node itself, not by building another node.

    All of these take children under new names as well, but for lists.
    """
    kind = kind_of(value)
    if kind == Kind.OBJECT:
        return not value._nnx_closed
    return kind in (Kind.CUSTOM, Kind.LIST, Kind.DICT, Kind.STATE)


def note_edit(writes: Writes, value: tp.Any, assigned: Assigned, removed: Removed = ()) -> None:
    """Note that children of a node are replaced or added, and others removed."""
    kind = kind_of(value)
    if kind == Kind.OBJECT:
        value._nnx_edit(writes, assigned, removed)
        return
    custom = CUSTOM_NODES[type(value)] if kind == Kind.CUSTOM else None
    delete = custom.pop_key if custom else operator.delitem
    assign = custom.set_key if custom else operator.setitem
    note = writes.add if type(value) in (list, dict) else writes.add_foreign
    for name in sorted(removed, key=lambda name: -name if isinstance(name, int) else 0):
        note(delete, value, name)  # the last item first
    for name, child in assigned.items():
        note(assign, value, name, child)


def contains_itself(value: tp.Any, path: list[tp.Any]) -> ValueError:
    """The error for a plain container that was met inside itself, at a path."""
    return ValueError(
        f"The {type(value).__name__} at '{path_text(path)}' contains itself. Plain containers form "
        "trees; put the cycle through a Module, nnx.List or nnx.Dict."
    )


def define_container(
    value: tp.Any, kind: int, loose: int = Leaves.STRICT
) -> tuple[tp.Any, tp.Sequence[tp.Any]]:
    """The definition of a container and its children, static ones as their definitions."""
    keys, children, treedef = flatten_container(value, kind)
    head = (kind, type(value), keys, tuple(map(type, keys)), treedef)
    try:
        definition = ContainerDef.of(head, () if treedef is None else (static_part(treedef),))
    except ValueError:  # the static part of a pytree node cannot be compared: one of its own
        definition = ContainerDef(head)
    parts = definition.in_order(children)
    if loose == Leaves.EVERY:
        return definition, parts
    return definition, [static_def(v) if is_static_item(v, loose) else v for v in parts]


def define_custom(value: tp.Any) -> tuple[tp.Any, list[tp.Any]]:
    """The definition of a foreign graph node and its data children."""
    custom = CUSTOM_NODES[type(value)]
    pairs, metadata = custom.flatten(value)
    attributes = dict(pairs)
    status = {k: not is_static_value(v) for k, v in attributes.items()}
    names = names_of(status)
    definition = intern_object(type(value), names, names.static_values(attributes), metadata)
    return definition, [attributes[name] for name in names.data]
