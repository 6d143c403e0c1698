"""Leaving a transform: what the function returned and what it wrote, as bare leaves.

Only changes cross: a Variable that still has its input value is not an output.  Structure changes
(attributes, new objects, sharing, cycles) are detected once, at trace time, and cross as static data,
the `OutDef`.  `replay` repeats them outside.
"""

from __future__ import annotations

import typing as tp

import jax

from nnxlite._base.errors import path_text, short_type
from nnxlite._base.jax import PyTreeDef, describe_trace, in_this_trace, is_ref, trace_state
from nnxlite._base.statics import ById, alike, captures
from nnxlite.boundary._call_def import CallDef, Inner, paths_of
from nnxlite.boundary._inputs import is_root, positions
from nnxlite.boundary._out import Edit, OutDef, Outputs, Source
from nnxlite.graph._defs import ObjectDef, StaticDef
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._kinds import CUSTOM_NODES, GraphNode, refuse_hidden_writes
from nnxlite.graph._rebuild import ArrayCode, Code, ContainerCode, Decoded, NodeCode, Path, traverse
from nnxlite.variables._definition import VariableDef, current_definition
from nnxlite.variables._variable import Variable


def leave(
    inner: Inner,
    result: tp.Any,
    *,
    all_written: tp.Collection[int] = (),
    structure: bool = True,
    captured: bool = False,
) -> Outputs:
    """What leaves a function, as static data and leaves: its result and the state of its arguments.

    Args:
        inner: the arguments as they were rebuilt.
        result: what the function returned.
        all_written: input leaves that always count as written.
        structure: whether structure changes of the arguments are repeated outside, and arrays outside
            Variables written back; otherwise the result must not contain Variables of the arguments.
        captured: whether objects that the function captured may leave it, as copies.

    Raises:
        ValueError: for a result that contains an object or Variable that it must not contain.
    """
    if inner.plain:
        refuse_hidden_writes(inner.plain)
    call = inner.call
    leaves, treedef = jax.tree_util.tree_flatten(result, is_leaf=is_root)
    where, others = positions(leaves)
    roots = [leaves[i] for i in where]
    written = _written(inner, all_written)
    numbers = {id(node): i for i, node in enumerate(inner.nodes)}
    known = [numbers.get(id(root)) for root in roots]
    definition, new = values_alone(call, treedef, where, known), list[tp.Any]()
    edited = _edited(inner) if structure else []
    if None in known or edited or (_is_unversioned(inner) if structure else where):
        left, new, changed = _graph_of(
            inner, roots, (treedef, where), all_written, edited, captured, structure
        )
        written.update(changed)
        definition, new = (left, new) if left.restructures else (definition, [])
    return Outputs(definition, [*[leaves[i] for i in others], *new]).with_written(written)


def values_alone(
    call: CallDef, treedef: PyTreeDef, where: tuple[int, ...], known: tp.Iterable[int | None]
) -> OutDef:
    """The definition where only values changed, given the nodes that are the roots of the result."""
    roots = tuple([NodeCode(tp.cast(int, number)) for number in known])
    graph = call.graphdef
    same = range(len(graph.decoded.node_defs)), range(graph.num_leaves)
    return OutDef(treedef, where, roots, graph, *same, len(call.where))


def _written(inner: Inner, all_written: tp.Collection[int]) -> dict[int, tp.Any]:
    """New values of the input Variables that were written, by leaf number."""
    out: dict[int, tp.Any] = {}
    for leaf, node in enumerate(inner.call.graphdef.decoded.leaf_nodes):
        before = value = inner.values[leaf]
        variable = inner.nodes[node] if node >= 0 else None
        if isinstance(variable, Variable):
            value = variable._box.value
        elif node >= 0:
            continue  # a reference
        if value is not before or leaf in all_written:
            out[leaf] = value
    return out


def _edited(inner: Inner) -> list[tp.Any]:
    """The nodes of the arguments of which anything but values and arrays may have changed.

    No version moves with edits of plain containers and mutable static values.
    """
    decoded = inner.call.graphdef.decoded
    loose = {owner for owner, _, code in decoded.raw_slots if not isinstance(code, ArrayCode)}

    def changed(number: int) -> bool:
        node, version = inner.nodes[number], inner.versions[number]
        definition = decoded.node_defs[number]
        if isinstance(node, Variable):
            return not current_definition(node._box).matches(definition)
        if not version or not isinstance(node, GraphNode):
            return False
        edited = node._nnx_version != version or node._nnx_def is not definition
        return edited or number in loose or bool(definition.mutable)

    return [node for number, node in enumerate(inner.nodes) if changed(number)]


def _is_unversioned(inner: Inner) -> bool:
    """Whether the arguments have parts that cannot notify: arrays, containers, registered classes."""
    decoded = inner.call.graphdef.decoded
    custom = (decoded.node_defs[n].type in CUSTOM_NODES for n in decoded.children if CUSTOM_NODES)
    return bool(decoded.raw_slots) or decoded.has_containers or any(custom)


# Structure changes -------------------------------------------------------------------------------


def _graph_of(
    inner: Inner,
    roots: list[tp.Any],
    result: tuple[PyTreeDef, tuple[int, ...]],
    all_written: tp.Collection[int],
    edited: list[tp.Any],
    captured: bool,
    structure: bool,
) -> tuple[OutDef, list[tp.Any], dict[int, tp.Any]]:
    """The graph as it is now, compared with that of the arguments; without `structure`, all new.

    Returns what leaves, the values that did not come in, and, by leaf number, arrays that replaced
    others.
    """
    arguments = inner.roots() if structure else []
    every = [*arguments, *roots, *edited]  # even if nothing refers to them any more
    walk = traverse(every, trees=inner.call.trees, open_roots=True)
    graphdef: GraphDef[tp.Any] = GraphDef(walk.tokens, len(every))
    decoded, came_in = graphdef.decoded, inner.call.graphdef.decoded
    numbers = {id(node): i for i, node in enumerate(inner.nodes)}
    origin = tuple(numbers.get(id(node)) for node in walk.nodes)
    if not structure:
        refuse_aliases(inner.call, origin, decoded, [paths_of(result[0])[i] for i in result[1]])
        origin = (None,) * len(origin)
    variables = [node for node in walk.nodes if isinstance(node, Variable)]
    own = all(variable._box.trace is trace_state.value for variable in variables)
    if not captured and (structure or not own):  # without Variables, objects are built again
        refuse_captured(walk.nodes, origin, decoded)
    refuse_dead_tracers(walk.nodes, decoded)
    arrays: dict[int, list[int]] = {}  # one array may be at several paths
    for leaf, node in enumerate(came_in.leaf_nodes):
        if node < 0 and leaf not in all_written and structure:
            arrays.setdefault(id(inner.values[leaf]), []).append(leaf)
    in_result = range(len(arguments), len(arguments) + len(roots))

    def source(number: int, leaf: tp.Any) -> Source | None:
        """The leaf that it was; None for a new one, as all arrays in the result are."""
        if (node := decoded.leaf_nodes[number]) >= 0:
            old = origin[node]
            return None if old is None else came_in.node_leaves[old]
        same = arrays.get(id(leaf))
        if same is None or decoded.path(decoded.leaf_frames[number])[0] in in_result:
            return None
        return same.pop(0) if len(same) > 1 else same[0]

    sources = [source(number, leaf) for number, leaf in enumerate(walk.leaves)]
    edits, moves = _edits(came_in, decoded, origin, sources)
    replaced = {now: old for old, now in moves.items()}
    new: list[tp.Any] = []
    refs: dict[int, Source] = {id(x): i for i, x in enumerate(inner.values) if is_ref(x)}

    def new_source(leaf: tp.Any) -> Source:
        value = leaf._box.value if isinstance(leaf, Variable) else leaf
        number: Source = ~len(new)
        found = refs.setdefault(id(value), number) if is_ref(value) else number
        if found == number:  # a reference leaves as the array in it
            new.append(value[...] if is_ref(value) else value)
        return found

    for number, leaf in enumerate(walk.leaves):
        if number in replaced:
            sources[number] = replaced[number]
        elif sources[number] is None:
            sources[number] = new_source(leaf)
    kinds = tuple(
        (tp.cast(int, old), definition)
        for definition, old in zip(decoded.node_defs, origin)
        if old is not None
        and isinstance(definition, VariableDef)
        and not definition.is_like(came_in.node_defs[old])
    )
    left = OutDef(
        *result,
        tuple(decoded.roots[in_result.start : in_result.stop]),
        graphdef,
        origin,
        tuple(tp.cast(list[Source], sources)),
        len(arguments),
        edits=edits,
        kinds=kinds,
        seen=tuple(map(ById, inner.call.graphdef.atoms())),
    )
    return left, new, {old: walk.leaves[now] for old, now in moves.items()}


def _edits(
    came_in: Decoded,
    decoded: Decoded,
    origin: tuple[int | None, ...],
    sources: list[Source | None],
) -> tuple[tuple[Edit, ...], dict[int, int]]:
    """Compare the objects of the arguments attribute by attribute.

    Returns the structure changes, and the leaves (old number: new number) that replaced others.
    """
    edits: list[Edit] = []
    moves: dict[int, int] = {}

    def moved(old: Code | None, now: Code) -> list[tuple[int, int]] | None:
        """The leaves that differ, or None where anything else does."""
        if isinstance(now, ContainerCode):
            if not isinstance(old, ContainerCode) or not now.definition.matches(old.definition):
                return None
            inside = [moved(a, b) for a, b in zip(old.codes, now.codes)]
            return None if None in inside else [m for part in inside for m in part or ()]
        match old, now:
            case NodeCode(before), NodeCode(after):
                return [] if origin[after] == before else None
            case ArrayCode(before), ArrayCode(after):
                return [] if sources[after] == before else [(before, after)]
            case StaticDef(), StaticDef():
                return [] if alike(old.value, now.value) else None
            case _:
                return None

    for number, codes in decoded.children.items():
        old = origin[number]
        if old is None:
            continue
        new_def: ObjectDef = decoded.node_defs[number]
        old_def: ObjectDef = came_in.node_defs[old]
        before = dict(came_in.below(NodeCode(old)))
        changes = {n: moved(before.get(n), code) for n, code in zip(new_def.layout.data, codes)}
        for change in changes.values():
            moves.update(change or ())
        names = [name for name, change in changes.items() if change is None]
        if new_def is not old_def:
            names += [name for name in new_def.template if new_def.differs(name, old_def)]
        same = new_def.layout is old_def.layout and alike(new_def.metadata, old_def.metadata)
        if names or not same:
            removed = tuple(n for n in old_def.layout.status if n not in new_def.layout.status)
            edits.append((number, tuple(names), removed))
    return tuple(edits), moves


# Refusals -------------------------------------------------------------------------------------------


def refuse_captured(nodes: list[tp.Any], origin: tuple[int | None, ...], decoded: Decoded) -> None:
    """Raise ValueError where the outputs contain an object from outside the transform."""
    here = trace_state.value
    for number, (node, old) in enumerate(zip(nodes, origin)):
        trace = node._box.trace if isinstance(node, Variable) else getattr(node, "_nnx_trace", here)
        if old is None and trace is not here:
            root, *path = decoded.path(decoded.node_frames[number])
            copy = "nnx.clone(captured)"
            if isinstance(node, Variable):
                copy = "nnx.merge(graphdef, state, copy=True) of a captured state, " + copy
            raise ValueError(
                "Cannot extract graph node from different trace level: the "
                f"{type(node).__name__} at '{path_text(path)}' (of value {root}) is returned or "
                f"stored, and belongs to {describe_trace(trace)}. Pass it to the transformed function "
                f"as an argument instead of capturing it, or return a copy: {copy}."
            )


def refuse_dead_tracers(nodes: list[tp.Any], decoded: Decoded) -> None:
    """Raise ValueError where a static attribute of an object that leaves captures a tracer."""
    for number, node in enumerate(nodes):
        for name, value in node._nnx_dict.items() if isinstance(node, GraphNode) else ():
            tracer = _captured_tracer(value)
            if tracer is None:
                continue
            at = path_text((*decoded.path(decoded.node_frames[number])[1:], name))
            advice = getattr(node, "_nnx_captures_advice", "")
            raise ValueError(
                f"The {type(node).__name__} that leaves the transform captures a tracer "
                f"{short_type(tracer)} in its static attribute '{at}', which is dead outside. "
                + (advice or "Store the value in an nnx.Variable of the object, and read it there.")
            )


def _captured_tracer(value: tp.Any) -> tp.Any:
    """A tracer of this trace that a function in a static value captures, or None."""
    todo, seen = [value], dict[int, tp.Any]()
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (str, jax.Array, Variable, GraphNode)):
            continue
        if is_ref(item):
            continue
        seen[id(item)] = item
        if isinstance(item, dict):  # an element that is an array is data
            todo += item.values()
        elif isinstance(item, (tuple, list)) and not hasattr(item, "update"):
            todo += item
        else:
            dead = next(filter(in_this_trace, captures(item)), None)
            if dead is not None:
                return dead
    return None


def refuse_aliases(
    call: CallDef, origin: tuple[int | None, ...], decoded: Decoded, roots: list[Path]
) -> None:
    """Raise ValueError where a result contains a Variable of the arguments.

    Args:
        call: the arguments.
        origin: for each node of the result the number that it came in with, or None.
        decoded, roots: the graph of the result, and the paths of its roots.
    """
    for number, old in enumerate(origin):
        leaf = -1 if old is None else call.graphdef.decoded.node_leaves[old]
        if leaf < 0:
            continue
        root, *path = decoded.path(decoded.node_frames[number])
        raise ValueError(
            f"Duplicate {decoded.node_defs[number].type.__name__} found at paths: "
            f"'{path_text((*roots[root], *path))}' of the result, "
            f"'{call.graph_leaves()[leaf].text()}' of the arguments. A transform with "
            "graph_updates=False (or graph=False) does not support Variable aliasing, only values "
            "leave: return the value (variable[...]); what is written into the Variable is kept in "
            "any case."
        )
