"""From objects to definitions and leaves, and back.

`traverse` is the walk from objects to definitions: iterative, in sorted order.

`Decoded` is a token sequence made ready for use: every node with its definition, every object with
the codes of its children: a `NodeCode`, an `ArrayCode`, a `StaticDef`, or a `ContainerCode`.
`visit` walks them, for everything that is looked up in a definition. Rebuilding makes all
objects empty first and fills them after, so cycles need no care and nothing recurses through
objects.

The objects that were built inside the traces that are running are the models whose parts run: a
transform builds new objects from its arguments, and `merge` builds them under JAX's own transforms.
The outermost of them give a layer its path, for named scopes and for messages. They are noted by
the trace, weakly: nothing here keeps an object, a tracer or a trace alive, and no frame is read.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import typing as tp
import weakref

from nnxlite._base.errors import check_level
from nnxlite._base.interning import next_number, observe
from nnxlite._base.jax import EAGER, TraceRef, trace_state
from nnxlite._base.statics import own_copy
from nnxlite._state._definition import State
from nnxlite._state._flat import Values, values_getter
from nnxlite.graph._defs import (
    LEAF,
    REF_LEAF,
    ContainerDef,
    ObjectDef,
    StaticDef,
    Token,
    _set_version,
    contains_itself,
    define,
    define_container,
    define_custom,
    new_shell,
    static_def,
)
from nnxlite.graph._kinds import (
    CUSTOM_NODES,
    GraphNode,
    Kind,
    Leaves,
    classify,
    kind_by_type,
    note_hidden,
)
from nnxlite.variables._definition import MISSING, VariableDef, current_definition
from nnxlite.variables._variable import Variable, make


@dataclasses.dataclass(frozen=True, slots=True)
class NodeCode:
    """An object, Variable or array reference, by its node number."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayCode:
    """An array without a Variable, by its leaf number."""

    leaf: int


@dataclasses.dataclass(eq=False, slots=True)
class ContainerCode:
    """A plain container inside an object: its form and the codes of its children."""

    definition: ContainerDef
    codes: list[Code] = dataclasses.field(default_factory=list)


Code: tp.TypeAlias = NodeCode | ArrayCode | StaticDef | ContainerCode


def _notifies(code: Code) -> bool:
    """Whether what a code describes cannot change without a new version.

    Arrays are read each time; lists, dicts and foreign pytree nodes are compared.  Tuples cannot change,
    and States have versions.
    """
    parts = [code]
    for part in parts:  # grows
        if isinstance(part, ArrayCode):
            return False
        if isinstance(part, ContainerCode):
            form = part.definition
            if form.kind not in (Kind.TUPLE, Kind.STATE, Kind.PYTREE) or form.treedef is not None:
                return False
            parts += part.codes
    return True


Path: tp.TypeAlias = tuple[tp.Any, ...]


# From objects ---------------------------------------------------------------------------------------


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
    trees: int = Leaves.STRICT,
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
    VARIABLE, OBJECT, REF, CUSTOM = Kind.VARIABLE, Kind.OBJECT, Kind.REF, Kind.CUSTOM  # locals
    # A level is: children still to come, their State so far, its name above, id of the container,
    # and what is a leaf in plain containers (`STRICT`, `NUMBERS`, `EVERY`).
    children: tp.Iterator[tuple[tp.Any, tp.Any]] = enumerate(tuple(roots))
    level, above, container = traversal.nested, None, 0
    loose, inner_loose = Leaves.EVERY if trees or open_roots else Leaves.STRICT, int(trees)
    stack: list[tuple[tp.Any, ...]] = []
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
                        or len(token.names.status) != len(value._nnx_dict)
                        or token.mutable
                    ):
                        token = define(value)
                    if token.mutable:
                        traversal.mutable.append((number, token))
                    parts = token.names.data_values(value._nnx_dict)
                elif kind == CUSTOM:
                    traversal.exact = False
                    token, parts = define_custom(value)
                versions.append(version)
                tokens.append(token)
                if kind == VARIABLE or kind == REF:
                    leaves.append(value)
                    level[name] = value
                    continue
                names = token.names.data
                if not names:
                    continue
                opened, inner = 0, inner_loose
                if not inner and kind == OBJECT and value._nnx_frozen:
                    inner = Leaves.NUMBERS
            elif kind == _STATIC:
                tokens.append(value)
                continue
            elif value is None:
                tokens.append(static_def(None))
                continue
            elif kind == Kind.ARRAY or kind == Kind.OTHER:
                tokens.append(LEAF)
                leaves.append(value)
                level[name] = value
                continue
            else:  # a container
                opened = id(value)
                if opened in open_containers:
                    path = [*[outer[2] for outer in stack[2:]], above, name]
                    raise contains_itself(value, path[-len(stack) :])
                if kind == Kind.STATE:
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


# From definitions -----------------------------------------------------------------------------------

Frame = tuple[int, tp.Any]
"""Where a child sits: the frame of its parent, and its name there."""


class Decoded:
    """A token sequence, spelled out for rebuilding and for naming leaves."""

    def __init__(self, tokens: tp.Sequence[Token], num_roots: int, first: int) -> None:
        self.first = first
        self.node_defs: list[tp.Any] = [None] * first  # ObjectDef, VariableDef or REF_LEAF
        self.node_leaves: list[int] = [-1] * first  # number of the leaf a node is, or -1
        self.node_frames: list[Frame] = [(-1, None)] * first
        self.children: dict[int, list[Code]] = {}  # of each object
        self.frames: list[Frame] = [(-1, None)]  # of each object and container
        self.leaf_frames: list[Frame] = []
        self.leaf_nodes: list[int] = []  # node of each leaf, -1 for an array without Variable
        # What a plan must look at again: (object or -1, attribute or root number, code).
        self.raw_slots: list[tuple[int, tp.Any, Code]] = []
        self.roots: list[Code] = []
        self.node_tokens: list[int] = [-1] * first  # position of each node's definition
        self.node_tokens += [i for i, t in enumerate(tokens) if t is REF_LEAF or type(t) in _NODES]
        self._decode(iter(tokens), num_roots)
        self.num_leaves = len(self.leaf_nodes)
        self.has_arrays = -1 in self.leaf_nodes
        self.has_refs = any(
            d is REF_LEAF or (isinstance(d, VariableDef) and d.is_ref) for d in self.node_defs
        )
        self.raw_slots = [slot for slot in self.raw_slots if not _notifies(slot[2])]

    def with_tokens(self, tokens: tp.Sequence[Token], own: tp.Sequence[int]) -> Decoded:
        """The same graph with other, equal definitions at some positions."""
        nodes = {position: number for number, position in enumerate(self.node_tokens)}
        if not nodes.keys() >= set(own):  # inside containers
            return Decoded(tokens, len(self.roots), self.first)
        new = copy.copy(self)
        new.node_defs = [*self.node_defs]
        for name in ("fillers", "object_defs", "plain_objects"):
            new.__dict__.pop(name, None)
        for position in own:
            new.node_defs[nodes[position]] = tokens[position]
        return new

    def _decode(self, tokens: tp.Iterator[Token], num_roots: int) -> None:
        # A level is: names still to come, codes so far, frame number, number of the object (or -1).
        names: tp.Iterator[tp.Any] = iter(range(num_roots))
        codes: list[Code] = self.roots
        frame, owner = 0, -1
        stack: list[tuple[tp.Iterator[tp.Any], list[Code], int, int]] = []
        while True:
            name = next(names, MISSING)
            if name is MISSING:
                if not stack:
                    return
                names, codes, frame, owner = stack.pop()
                continue
            token: tp.Any = next(tokens)
            kind = type(token)
            here = (frame, name)
            if kind is int:
                codes.append(NodeCode(token))
            elif kind is VariableDef or token is REF_LEAF:
                leaf = self._leaf(here, len(self.node_defs))
                codes.append(NodeCode(self._node(token, here, leaf)))
            elif token is LEAF:
                code = ArrayCode(self._leaf(here, -1))
                codes.append(code)
                if owner >= 0:
                    self.raw_slots.append((owner, name, code))
            elif kind is StaticDef:
                codes.append(token)
            else:
                stack.append((names, codes, frame, owner))
                self.frames.append(here)
                if kind is ObjectDef:
                    number = self._node(token, here, -1)
                    codes.append(NodeCode(number))
                    names = iter(token.names.data)
                    codes, frame, owner = [], len(self.frames) - 1, number
                    self.children[number] = codes
                else:
                    box = ContainerCode(token)
                    codes.append(box)
                    if owner >= 0 or not frame:
                        self.raw_slots.append((owner, name, box))
                    names = iter(token.keys)
                    codes, frame, owner = box.codes, len(self.frames) - 1, -1

    def _node(self, definition: tp.Any, frame: Frame, leaf: int) -> int:
        self.node_defs.append(definition)
        self.node_leaves.append(leaf)
        self.node_frames.append(frame)
        return len(self.node_defs) - 1

    def _leaf(self, frame: Frame, node: int) -> int:
        self.leaf_frames.append(frame)
        self.leaf_nodes.append(node)
        return len(self.leaf_nodes) - 1

    @functools.cached_property
    def object_defs(self) -> list[ObjectDef]:
        """The definition of each object, in the order of `children`."""
        return [self.node_defs[number] for number in self.children]

    @functools.cached_property
    def fillers(self) -> list[tuple[int, ObjectDef, list[Code], Values | None]]:
        """For each object number, definition and codes; where all are nodes, how to pick them."""
        fillers = []
        for number, codes in self.children.items():
            nodes = tuple(code.number for code in codes if isinstance(code, NodeCode))
            pick = values_getter(nodes) if len(nodes) == len(codes) else None
            fillers.append((number, self.node_defs[number], codes, pick))
        return fillers

    @functools.cached_property
    def plain_objects(self) -> list[tp.Any]:
        """The static values that are plain objects, or contain some."""
        values = [
            v for d in self.node_defs if isinstance(d, ObjectDef) for v in d.template.values()
        ]
        return [value for value in values if note_hidden([value])]

    def below(self, code: Code) -> list[tuple[tp.Any, Code]]:
        """What is directly below an object or a container, by name; nothing for others."""
        if isinstance(code, ContainerCode):
            return [*zip(code.definition.keys, code.codes)]
        if not isinstance(code, NodeCode) or code.number not in self.children:
            return []
        names = self.node_defs[code.number].names.data
        return [*zip(names, self.children[code.number])]

    def leaf_of(self, code: Code) -> int:
        """The number of the leaf that a code is, or -1."""
        if isinstance(code, NodeCode):
            return self.node_leaves[code.number]
        return code.leaf if isinstance(code, ArrayCode) else -1

    def visit(self, start: Code | None = None) -> tp.Iterator[tuple[Path, Code]]:
        """Every code, with its path, parents first; what is below an object comes once.

        Starts from one code, or from the roots; their paths have the number of the root.
        """
        roots = enumerate(self.roots)
        pending = [((n,), root) for n, root in roots] if start is None else [((), start)]
        pending.reverse()
        entered: set[int] = set()
        while pending:
            path, code = pending.pop()
            yield path, code
            if isinstance(code, NodeCode):
                if code.number in entered or code.number not in self.children:
                    continue
                entered.add(code.number)
            elif not isinstance(code, ContainerCode):
                continue
            below = reversed(self.below(code))
            pending += [((*path, name), child) for name, child in below]

    def path(self, frame: Frame) -> Path:
        """The path of a frame, root number included."""
        parent, name = frame
        names = [name]
        while parent > 0:
            parent, name = self.frames[parent]
            names.append(name)
        names.reverse()
        return tuple(names)

    def leaf_paths(self, start: int = 0) -> tp.Iterator[Path]:
        """The path of each leaf in order, without its first `start` names."""
        last, above = 0, ()
        for frame, name in self.leaf_frames:
            if frame != last:
                parent, own = self.frames[frame] if frame else (-1, None)
                if parent == last:  # a step down or up, without going through a deep graph again
                    above = (*above, own)
                elif last and self.frames[last][0] == frame:
                    above = above[:-1]
                else:
                    above = self.path((parent, own)) if frame else ()
                last = frame
            yield (*above, name)[start:]


_NODES = (ObjectDef, VariableDef)

_set_dict = GraphNode.__dict__["__dict__"].__set__


def new_node(definition: ObjectDef, trace: tp.Any) -> tp.Any:
    """An object that a definition describes, or an instance of a registered class, unfilled."""
    if CUSTOM_NODES and definition.type in CUSTOM_NODES:
        return CUSTOM_NODES[definition.type].create_empty(definition.metadata)
    return new_shell(definition.type, definition, trace)


def build_nodes(
    decoded: Decoded,
    leaves: tp.Sequence[tp.Any],
    known: tp.Sequence[tp.Any] | None = None,
    recreate_variables: bool = True,
) -> list[tp.Any]:
    """All nodes of a decoded graph, made of `leaves`; `known[i]`, where not None, is node i itself.

    A leaf that is a Variable becomes the node; any other value is put into a new Variable, or, where
    Variables are not to be recreated, takes its place.
    """
    nodes: list[tp.Any] = [None] * len(decoded.node_defs) if known is None else list(known)
    trace, definitions = trace_state.value, decoded.node_defs
    for number, leaf in zip(decoded.leaf_nodes, leaves):
        if number >= 0 and nodes[number] is None:
            definition = definitions[number]
            if not recreate_variables or definition is REF_LEAF:
                nodes[number] = leaf
            elif not isinstance(leaf, Variable):
                nodes[number] = make(definition.for_variable(), leaf)
            elif definition.public is not None and _is_of_an_equal(leaf, definition):
                nodes[number] = make(definition.for_variable(), leaf._box.value)
            else:
                nodes[number] = leaf
    missing = [filler for filler in decoded.fillers if nodes[filler[0]] is None]
    for number, definition, _, _ in missing:
        nodes[number] = new_node(definition, trace)
    for number, definition, codes, pick in missing:
        values = [resolve(c, nodes, leaves) for c in codes] if pick is None else pick(nodes)
        fill(nodes[number], definition, values)
    return nodes


def _is_of_an_equal(variable: Variable[tp.Any], definition: VariableDef) -> bool:
    """Whether a Variable keeps metadata for itself that are equal to those of a private definition.

    A State that comes from a program of `jax.jit` has those of the call that was traced.
    """
    has = variable._box.definition
    return has.public is definition.public and not has.matches(definition)


def check_trace(node: tp.Any) -> None:
    """Raise TraceContextError where an object belongs to another trace than the one running."""
    check_level(node, getattr(node, "_nnx_trace", trace_state.value))


def fill(node: tp.Any, definition: ObjectDef, values: tp.Sequence[tp.Any]) -> None:
    """Give an empty object its attributes."""
    attributes = definition.new_template()
    attributes.update(zip(definition.names.data, values))
    if CUSTOM_NODES and definition.type in CUSTOM_NODES:
        pairs = tuple((k, attributes[k]) for k in definition.names.status)
        CUSTOM_NODES[definition.type].init(node, pairs)
    else:
        _set_dict(node, attributes)


def resolve(code: Code, nodes: tp.Sequence[tp.Any], leaves: tp.Sequence[tp.Any]) -> tp.Any:
    """The value that a code describes."""
    if isinstance(code, NodeCode):
        return nodes[code.number]
    if isinstance(code, ArrayCode):
        return leaves[code.leaf]
    if isinstance(code, StaticDef):
        return own_copy(code.value)
    boxes = [code]
    for box in boxes:  # grows
        boxes += [child for child in box.codes if isinstance(child, ContainerCode)]
    built: dict[Code, tp.Any] = {}
    other = lambda c: built[c] if isinstance(c, ContainerCode) else resolve(c, nodes, leaves)
    for box in reversed(boxes):  # most parts are nodes
        parts = [nodes[c.number] if isinstance(c, NodeCode) else other(c) for c in box.codes]
        built[box] = box.definition.build(parts)
    return built[code]


# Objects that were built in the running traces --------------------------------------------------


class _Entered(threading.local):
    """For each running trace of a thread, outermost first, the objects that were built in it."""

    def __init__(self) -> None:
        self.by_trace: list[tuple[TraceRef, weakref.WeakValueDictionary[int, tp.Any]]] = []


_entered = _Entered()


def note_entered(roots: tp.Iterable[tp.Any]) -> None:
    """Note objects that were built in the running trace; nothing outside of traces."""
    trace = trace_state.value
    if trace is EAGER:
        return
    by_trace = _entered.by_trace
    if not by_trace or by_trace[-1][0] is not trace:
        by_trace[:] = [pair for pair in by_trace if pair[0]() is not None and pair[0] is not trace]
        by_trace.append((trace, weakref.WeakValueDictionary()))
    objects = by_trace[-1][1]
    for root in roots:
        if isinstance(root, GraphNode):
            objects[id(root)] = root


def entered_objects() -> list[tp.Any]:
    """The objects built in the traces that are running, outermost trace first."""
    return [
        value
        for trace, objects in _entered.by_trace
        if trace() is not None
        for value in [*objects.values()]
    ]
