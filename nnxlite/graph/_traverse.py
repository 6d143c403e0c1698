"""From objects to definitions and leaves: one walk, iterative, in sorted order.

What has children is a *node*: an object, a container, or an instance of a registered class. The
first part of this file says how children are listed and edited, the second is the walk.
"""

from __future__ import annotations

import operator
import typing as tp

from nnxlite._base.errors import path_text
from nnxlite._base.interning import Writes, next_number, observe
from nnxlite._state._definition import State
from nnxlite.graph._defs import (
    LEAF,
    REF_LEAF,
    ObjectDef,
    StaticDef,
    Token,
    container_def,
    define,
    definition,
    intern_object,
    layout_of,
    static_def,
)
from nnxlite.graph._kinds import (
    ARRAY,
    CONTAINERS,
    CUSTOM,
    CUSTOM_NODES,
    DICT,
    EVERY,
    LIST,
    NUMBERS,
    OBJECT,
    OTHER,
    REF,
    STATE,
    STRICT,
    VARIABLE,
    GraphNode,
    classify,
    flatten_container,
    is_held,
    is_setting,
    items_of,
    kind_by_type,
    kind_of,
)
from nnxlite.variables._definition import VariableDef, current_definition

Assigned = tp.Mapping[tp.Any, tp.Any]
Names = tp.Collection[tp.Any]

NODES = CONTAINERS | {OBJECT, CUSTOM}
"""The kinds of values that have children."""


def children_of(value: tp.Any, static: bool = True) -> list[tuple[tp.Any, tp.Any]]:
    """The (name, child) pairs of a value in traversal order, with or without static attributes."""
    kind = kind_of(value)
    if kind == OBJECT:
        attributes, layout = value._nnx_dict, definition(value).layout
        names = layout.status if static else layout.data
        return [(name, attributes[name]) for name in names]
    if kind == CUSTOM:
        return list(CUSTOM_NODES[type(value)].flatten(value)[0])
    return items_of(value, kind) if kind in CONTAINERS else []


def children_by_name(value: tp.Any) -> tp.Mapping[tp.Any, tp.Any]:
    """The children of a node by name, in any order."""
    kind = kind_of(value)
    if kind == OBJECT:
        return value._nnx_dict
    if kind == STATE:
        return value._mapping
    return value if kind == DICT else dict(children_of(value))


def is_static_child(value: tp.Any, name: tp.Any, child: tp.Any) -> bool:
    """Whether a child of a node is not part of its state, not even with `graph=False`."""
    kind = kind_of(value)
    if kind == OBJECT:
        return not value._nnx_status.get(name, True)
    return is_setting(child) if kind == CUSTOM else child is None


def is_edited_in_place(value: tp.Any) -> bool:
    """Whether children are replaced in the node itself, not by building another node.

    All of these take children under new names as well, but for lists.
    """
    kind = kind_of(value)
    return not value._nnx_closed if kind == OBJECT else kind in (CUSTOM, LIST, DICT, STATE)


def note_edit(writes: Writes, value: tp.Any, assigned: Assigned, removed: Names = ()) -> None:
    """Note that children of a node are replaced or added, and others removed."""
    kind = kind_of(value)
    if kind == OBJECT:
        value._nnx_edit(writes, assigned, removed)
        return
    delete: tp.Callable[..., None] = operator.delitem
    assign: tp.Callable[..., None] = operator.setitem
    if kind == CUSTOM:
        delete, assign = CUSTOM_NODES[type(value)].pop_key, CUSTOM_NODES[type(value)].set_key
    note = writes.add if type(value) in (list, dict) else writes.add_foreign
    for name in sorted(removed, key=lambda name: -name if isinstance(name, int) else 0):
        note(delete, value, name)  # the last item first
    for name, child in assigned.items():
        note(assign, value, name, child)


# A walk -----------------------------------------------------------------------------------------


class Traversal:
    """The result of one walk over some roots.

    Attributes:
        tokens: the preorder sequence of definitions.
        nodes: objects, Variables and references, in order of first visit.
        versions: the structural version of each node, 0 where it has none.
        leaves: Variables, references and arrays, in leaf order.
        nested: the leaves once more, as their State, by number of the root.
        index: node number by identity.
        states: the `State` mappings met, with their versions.
        mutable: the objects with mutable static attributes and Variables with mutable metadata: number
            and definition.
        exact: False where something without any trace of its edits was met (foreign graph nodes).
    """

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.nodes: list[tp.Any] = []
        self.versions: list[int] = []
        self.leaves: list[tp.Any] = []
        self.nested: dict[tp.Any, tp.Any] = {}
        self.index: dict[int, int] = {}
        self.states: list[tuple[tp.Any, int]] = []
        self.mutable: list[tuple[int, ObjectDef | VariableDef]] = []
        self.exact = True


kind_by_type[StaticDef] = _STATIC = -1
"""What is static among the children of a container is given by its definition."""


def traverse(
    roots: tp.Iterable[tp.Any],
    into: Traversal | None = None,
    *,
    trees: int = STRICT,
    open_roots: bool = False,
) -> Traversal:
    """Walk the graphs below `roots` as one: each object once, children by sorted name.

    Args:
        roots: objects, Variables, containers or leaves.
        into: an earlier traversal to go on with, in the same numbering.
        trees: what is a leaf in plain containers besides data: nothing, numbers (True, or `NUMBERS`, as
            for JAX, and always in frozen objects), or `EVERY` value but None.
        open_roots: whether all but None is a leaf in containers that are roots, and in those inside
            them outside of objects; with `trees` as well.

    Raises ValueError for a plain container that contains itself.
    """
    traversal = Traversal() if into is None else into
    tokens, nodes, versions = traversal.tokens, traversal.nodes, traversal.versions
    leaves, index = traversal.leaves, traversal.index
    kinds, wrap = kind_by_type, State._nnx_wrap
    # A level is: children still to come, their State so far, its name above, id of the container,
    # and what is a leaf in plain containers (`STRICT`, `NUMBERS`, `EVERY`).
    children: tp.Iterator[tuple[tp.Any, tp.Any]] = enumerate(tuple(roots))
    level, above, container = traversal.nested, None, 0
    loose, inner_loose = EVERY if trees or open_roots else STRICT, int(trees)
    stack: list[
        tuple[tp.Iterator[tuple[tp.Any, tp.Any]], dict[tp.Any, tp.Any], tp.Any, int, int]
    ] = []
    open_containers: set[int] = set()
    token: tp.Any
    parts: tp.Iterable[tp.Any] = ()
    while True:
        for name, value in children:
            kind = kinds.get(type(value))
            if kind is None:
                kind = classify(value)
            if kind == VARIABLE or kind == OBJECT or kind == REF or kind == CUSTOM:
                number = len(nodes)
                known = index.setdefault(id(value), number)
                if known != number:
                    tokens.append(known)
                    continue
                nodes.append(value)
                version, token = 0, REF_LEAF
                if kind == VARIABLE:
                    box = value._box
                    token = box.definition
                    if token.public is not None:
                        token = current_definition(box)
                        if token.mutable:
                            traversal.mutable.append((number, token))
                        token = token.for_variable()
                    version = box._nnx_version
                    if not version:
                        version = box._nnx_version = next_number()
                elif kind == OBJECT:
                    version = value._nnx_version
                    if not version:
                        version = next_number()
                        _set_version(value, version)
                    token = value._nnx_def
                    if (
                        token is None
                        or len(token.layout.status) != len(value._nnx_dict)
                        or token.mutable
                    ):
                        token = define(value)
                    if token.mutable:
                        traversal.mutable.append((number, token))
                    parts = token.layout.data_values(value._nnx_dict)
                elif kind == CUSTOM:
                    traversal.exact = False
                    token, parts = define_custom(value)
                versions.append(version)
                tokens.append(token)
                if kind == VARIABLE or kind == REF:
                    leaves.append(value)
                    level[name] = value
                    continue
                names = token.layout.data
                if not names:
                    continue
                opened, inner = 0, inner_loose
                if not inner and kind == OBJECT and value._nnx_frozen:
                    inner = NUMBERS
            elif kind == _STATIC:
                tokens.append(value)
                continue
            elif value is None:
                tokens.append(static_def(None))
                continue
            elif kind == ARRAY or kind == OTHER:
                tokens.append(LEAF)
                leaves.append(value)
                level[name] = value
                continue
            else:  # a container
                opened = id(value)
                if opened in open_containers:
                    path = [*[outer[2] for outer in stack[2:]], above, name]
                    raise contains_itself(value, path[-len(stack) :])
                if kind == STATE:
                    traversal.states.append((value, value._nnx_version or observe(value)))
                inner = loose
                token, parts = define_container(value, kind, loose)
                tokens.append(token)
                names = token.keys
                open_containers.add(opened)
            stack.append((children, level, above, container, loose))
            children, level, above, container, loose = zip(names, parts), {}, name, opened, inner
            break
        else:
            if not stack:
                return traversal
            if container:
                open_containers.discard(container)
            below, name = level, above
            children, level, above, container, loose = stack.pop()
            if below:
                level[name] = wrap(below)


_set_version = GraphNode.__dict__["_nnx_version"].__set__


def contains_itself(value: tp.Any, path: list[tp.Any]) -> ValueError:
    """The error for a plain container that was met inside itself, at a path."""
    return ValueError(
        f"The {type(value).__name__} at '{path_text(path)}' contains itself. Plain containers form "
        "trees; put the cycle through a Module, nnx.List or nnx.Dict."
    )


def define_container(
    value: tp.Any, kind: int, loose: int = STRICT
) -> tuple[tp.Any, tp.Sequence[tp.Any]]:
    """The definition of a container and its children, static ones as their definitions."""
    keys, children, treedef = flatten_container(value, kind)
    definition = container_def(kind, type(value), keys, treedef)
    parts = definition.in_order(children)
    if loose == EVERY:
        return definition, parts
    return definition, [static_def(v) if is_held(v, loose) else v for v in parts]


def define_custom(value: tp.Any) -> tuple[tp.Any, list[tp.Any]]:
    """The definition of a foreign graph node and its data children."""
    custom = CUSTOM_NODES[type(value)]
    pairs, metadata = custom.flatten(value)
    attributes = dict(pairs)
    status = {k: not is_setting(v) for k, v in attributes.items()}
    layout = layout_of(status)
    definition = intern_object(type(value), layout, layout.static_values(attributes), metadata)
    return definition, [attributes[name] for name in layout.data]
