"""Leaving a transform: what the function returned and what it wrote, as bare leaves.

Only what changed crosses: a Variable that still holds the value it came in with is not an output.
Structure changes (attributes, new objects, sharing, cycles) are found once, at trace time, and
travel as static data: the `OutDef`.  Outside, `replay` writes the values into the caller's own
Variables and repeats the structure changes on the caller's own objects.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import typing as tp

import jax

from nnxlite._errors import TraceContextError, path_text
from nnxlite._jax import PyTreeDef, describe_trace, is_ref, key_name, new_ref, trace_state
from nnxlite._statics import own_copy
from nnxlite._versions import epoch
from nnxlite.boundary._inputs import Inner, Inputs, is_root
from nnxlite.graph import (
    CUSTOM_NODES,
    DICT,
    LIST,
    REF_LEAF,
    STATE,
    Code,
    ContainerCode,
    Decoded,
    GraphDef,
    GraphNode,
    ObjectDef,
    StaticDef,
    container_items,
    fill,
    kind_of,
    new_shell,
    resolve,
    set_definition,
    traverse,
)
from nnxlite.variables import Variable, VariableDef, make, write_raw

Edit = tuple[int, tuple[tp.Any, ...], tuple[tp.Any, ...]]


@dataclasses.dataclass(frozen=True)
class OutGraph:
    """The graph below the arguments and results as the function left it.

    Attributes:
        graphdef: its definition; the first roots are those of the arguments.
        origin: for each node the number it came in with, or None for a new one.
        sources: for each leaf the number of the input leaf it still is (>= 0), or the complement of
            its position among the outputs `fresh`.
        edits: objects that came in and changed structure: (node, names to write, names to remove).
        first_result: number of the first root that belongs to the result.
        kinds: input Variables whose metadata changed: (input node, new definition).
    """

    graphdef: GraphDef[tp.Any]
    origin: tuple[int | None, ...]
    sources: tuple[int, ...]
    first_result: int
    edits: tuple[Edit, ...]
    kinds: tuple[tuple[int, VariableDef], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class OutDef:
    """The static side of what leaves a transform.

    Attributes:
        written: numbers of the input leaves (Variables, or places that hold an array) whose values
            are outputs, in order.
        treedef: of the result where it holds graph nodes, else None: it crosses as it is.
        where: positions of the roots among the leaves of the result.
        nodes: for each root of the result, without structure changes, its input node number.
        graph: the structure changes, or None.
        num_results: how many roots the result has.
    """

    written: tuple[int, ...]
    treedef: PyTreeDef | None
    where: tuple[int, ...]
    nodes: tuple[int, ...]
    graph: OutGraph | None

    def __eq__(self, other: tp.Any) -> bool:
        if not isinstance(other, OutDef) or (self.treedef is None) != (other.treedef is None):
            return False  # treedefs do not compare with None
        mine = (self.written, self.where, self.nodes, self.graph, self.treedef)
        return mine == (other.written, other.where, other.nodes, other.graph, other.treedef)

    def __hash__(self) -> int:
        return hash((self.written, self.where, self.nodes, self.graph, self.treedef))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Fixed:
    """A static value as a pytree without leaves: how an `OutDef` crosses a JAX transform."""

    value: tp.Any


class Outputs(tp.NamedTuple):
    """What leaves a transform.

    Attributes:
        definition: the static side.
        result: the result itself, or its ordinary leaves where it holds graph nodes.
        written: new values of input Variables, in the order of `definition.written`.
        fresh: values of leaves that did not come in.
    """

    definition: OutDef
    result: tp.Any
    written: list[tp.Any]
    fresh: list[tp.Any]

    def crossing(self) -> Crossing:
        """The same as it crosses a JAX transform: a static node, and trees of leaves."""
        definition, result, written, fresh = self
        return Fixed(definition), result, written, fresh


Crossing = tuple[Fixed, tp.Any, list[tp.Any], list[tp.Any]]
"""What leaves a transform: definition, result, written values, fresh values."""


def leave(
    inner: Inner,
    result: tp.Any,
    *,
    all_written: tp.Collection[int] = (),
    structure: bool = True,
    captured: bool = False,
) -> Outputs:
    """Take apart what a function left: its result and the state of its arguments.

    Args:
        inner: the arguments as they were rebuilt.
        result: what the function returned.
        all_written: input leaves that count as written in any case.
        structure: whether structure changes of the arguments are repeated outside, and arrays held
            without a Variable written back; else the result may not hold Variables of the arguments.
        captured: whether objects from outside, which the function captured, may leave it as copies.

    Raises:
        ValueError: for a result that holds what it must not.
    """
    leaves, treedef = jax.tree_util.tree_flatten(result, is_leaf=is_root)
    where = tuple(i for i, leaf in enumerate(leaves) if is_root(leaf))
    roots = [leaves[i] for i in where]
    plain = [leaf for leaf in leaves if not is_root(leaf)]
    apart = bool(where) and not structure
    if apart:
        _refuse_aliases(inner, result, roots)
    new = _written(inner, all_written)

    def outputs(nodes: tuple[int, ...], graph: OutGraph | None, fresh: list[tp.Any]) -> Outputs:
        at = tuple(sorted(new))
        written = [new[leaf] for leaf in at]
        if not where:
            return Outputs(OutDef(at, None, (), (), graph), result, written, fresh)
        return Outputs(OutDef(at, treedef, where, nodes, graph), plain, written, fresh)

    def keep_given() -> None:
        leaf_nodes = inner.call.graphdef.decoded.leaf_nodes
        for leaf in all_written:  # whatever became of its place, the buffer that came in is gone
            if leaf_nodes[leaf] < 0:
                new.setdefault(leaf, inner.values[leaf])

    if apart:
        graph, fresh = _result_graph(inner, roots, captured)
        keep_given()
        return outputs((), graph, fresh)
    if not _restructured(inner):
        numbers = {id(node): i for i, node in enumerate(inner.nodes)}
        known = [numbers.get(id(root)) for root in roots]
        if None not in known:
            return outputs(tp.cast(tuple[int, ...], tuple(known)), None, [])
    graph, fresh, changed = _graph_of(inner, roots, all_written, captured)
    if structure:
        new.update(changed)
    else:
        graph = dataclasses.replace(graph, edits=(), kinds=())
    keep_given()
    known = _known_roots(graph, len(roots))
    if known is not None and not graph.edits and not graph.kinds:
        return outputs(known, None, [])
    return outputs((), graph, fresh)


def only_structure_of(out: Outputs, nodes: tp.Container[int]) -> Outputs:
    """What leaves, with structure changes of some objects only, by their numbers afterwards."""
    definition, graph = out.definition, out.definition.graph
    if graph is None:
        return out
    kept = {graph.origin[new] for new in range(len(graph.origin)) if new in nodes}
    edits = tuple(edit for edit in graph.edits if edit[0] in nodes)
    kinds = tuple(kind for kind in graph.kinds if kind[0] in kept)
    graph = dataclasses.replace(graph, edits=edits, kinds=kinds)
    known = _known_roots(graph, len(definition.where))
    if known is None or edits or kinds:
        return out._replace(definition=dataclasses.replace(definition, graph=graph))
    definition = dataclasses.replace(definition, nodes=known, graph=None)
    return out._replace(definition=definition, fresh=[])


def refuse_foreign_result(out: Outputs, name: str = "the function") -> None:
    """Raise TypeError where a result holds something that JAX cannot return."""
    definition = out.definition
    leaves, treedef = jax.tree_util.tree_flatten(out.result)
    for number, leaf in enumerate(leaves):
        try:
            jax.typeof(leaf)
        except TypeError:
            if definition.treedef is not None:
                treedef = definition.treedef
                roots = set(definition.where)
                number = [i for i in range(treedef.num_leaves) if i not in roots][number]
            tree = jax.tree_util.tree_unflatten(treedef, range(treedef.num_leaves))
            path = jax.tree_util.tree_leaves_with_path(tree)[number][0]
            raise TypeError(
                f"{name} returned a value of type '{type(leaf).__name__}' at "
                f"'{path_text(map(key_name, path))}', which is not a valid JAX type. Return arrays, "
                "objects, or pytrees of these; static values can be attributes of objects."
            ) from None


def _known_roots(graph: OutGraph, count: int) -> tuple[int, ...] | None:
    """Input node numbers of the roots of the result, or None where one did not come in."""
    first = graph.first_result
    codes = graph.graphdef.decoded.roots[first : first + count]
    found = [graph.origin[c] if isinstance(c, int) and c >= 0 else None for c in codes]
    return None if None in found else tp.cast(tuple[int, ...], tuple(found))


def _written(inner: Inner, all_written: tp.Collection[int]) -> dict[int, tp.Any]:
    """New values of the input Variables that were written, by leaf number."""
    out: dict[int, tp.Any] = {}
    nodes, values = inner.nodes, inner.values
    for leaf, node in enumerate(inner.call.graphdef.decoded.leaf_nodes):
        if node < 0:
            continue
        variable = nodes[node]
        if isinstance(variable, Variable):
            value = variable._box.value
            if value is not values[leaf] or leaf in all_written:
                out[leaf] = value
    return out


def _restructured(inner: Inner) -> bool:
    """Whether anything but Variable values may have changed below the arguments."""
    decoded = inner.call.graphdef.decoded
    if decoded.raw_slots or decoded.has_containers:
        return True
    if inner.start != epoch.now:
        for watched, version in zip(inner.watched, inner.versions):
            if version and watched._nnx_version != version:
                return True
    for number, _ in decoded.children:
        definition: ObjectDef = decoded.node_defs[number]
        if definition.editable or definition.type in CUSTOM_NODES:
            return True
    return False


# Finding structure changes -----------------------------------------------------------------------


def _graph_of(
    inner: Inner, roots: list[tp.Any], all_written: tp.Collection[int], captured: bool
) -> tuple[OutGraph, list[tp.Any], dict[int, tp.Any]]:
    """The graph as it is now, compared with the one that came in.

    Returns the comparison, the values of leaves that did not come in, and, by leaf number, arrays
    that took the place of others.
    """
    arguments = inner.roots()
    every = [*arguments, *roots, *_detached(inner)]
    found = traverse(every, trees=inner.call.trees, open_roots=True)
    graphdef: GraphDef[tp.Any] = GraphDef(found.tokens, len(every))
    decoded = graphdef.decoded
    numbers = {id(node): i for i, node in enumerate(inner.nodes)}
    origin = tuple(numbers.get(id(node)) for node in found.nodes)
    if not captured:
        _refuse_captured(found.nodes, origin, graphdef)
    came_in = inner.call.graphdef.decoded
    arrays: dict[int, list[int]] = {}  # one value may have come in at several places
    for leaf, node in enumerate(came_in.leaf_nodes):
        if node < 0 and leaf not in all_written:
            arrays.setdefault(id(inner.values[leaf]), []).append(leaf)

    def source(leaf: tp.Any, node: int) -> int | None:
        if node < 0:
            same = arrays.get(id(leaf))
            return None if same is None else same.pop(0) if len(same) > 1 else same[0]
        old = origin[node]
        return None if old is None else came_in.node_leaves[old]

    sources = [source(leaf, node) for leaf, node in zip(found.leaves, decoded.leaf_nodes)]
    edits, moves = _edits(came_in, decoded, origin, sources)
    changed = {old: found.leaves[now] for old, now in moves.items()}
    fresh = _Fresh(inner)
    settled = {now: old for old, now in moves.items()}
    for number, leaf in enumerate(found.leaves):
        if number in settled:
            sources[number] = settled[number]
        elif sources[number] is None:
            sources[number] = fresh.source(leaf)
    kinds = tuple(
        (tp.cast(int, old), definition)
        for definition, old in zip(decoded.node_defs, origin)
        if old is not None
        and isinstance(definition, VariableDef)
        and definition is not came_in.node_defs[old]
    )
    every_source = tp.cast(tuple[int, ...], tuple(sources))
    graph = OutGraph(graphdef, origin, every_source, len(arguments), edits, kinds)
    return graph, fresh.values, changed


class _Fresh:
    """Values of leaves that did not come in. A reference leaves as the array it holds."""

    def __init__(self, inner: Inner) -> None:
        self.values: list[tp.Any] = []
        self._refs = {id(x): leaf for leaf, x in enumerate(inner.values) if is_ref(x)}

    def source(self, leaf: tp.Any) -> int:
        """Where the value of a leaf is found outside; see `OutGraph.sources`."""
        value = leaf._box.value if isinstance(leaf, Variable) else leaf
        number = ~len(self.values)
        if is_ref(value):
            number = self._refs.setdefault(id(value), number)
        if ~number == len(self.values):
            self.values.append(value[...] if is_ref(value) else value)
        return number


def _result_graph(
    inner: Inner, roots: list[tp.Any], captured: bool
) -> tuple[OutGraph, list[tp.Any]]:
    """The graph of a result whose objects are all new outside, and the values of its leaves."""
    found = traverse(roots, trees=inner.call.trees, open_roots=True)
    graphdef: GraphDef[tp.Any] = GraphDef(found.tokens, len(roots))
    origin = (None,) * len(found.nodes)
    if not captured:
        _refuse_captured(found.nodes, origin, graphdef)
    fresh = _Fresh(inner)
    sources = tuple(map(fresh.source, found.leaves))
    return OutGraph(graphdef, origin, sources, 0, (), ()), fresh.values


def _refuse_captured(
    nodes: list[tp.Any], origin: tuple[int | None, ...], graphdef: GraphDef[tp.Any]
) -> None:
    """Raise ValueError where an object from outside the transform would leave it."""
    here = trace_state.value
    for number, (node, old) in enumerate(zip(nodes, origin)):
        trace = node._box.trace if isinstance(node, Variable) else getattr(node, "_nnx_trace", here)
        if old is None and trace is not here:
            root, *path = graphdef.decoded.path(graphdef.decoded.node_frames[number])
            raise ValueError(
                f"Cannot return or store the {type(node).__name__} found at "
                f"'{path_text(path)}' (of value {root}) from a different trace level: it belongs "
                f"to {describe_trace(trace)}. Pass it to the transformed function as an argument "
                "instead of capturing it."
            )


def _refuse_aliases(inner: Inner, result: tp.Any, roots: list[tp.Any]) -> None:
    """Raise ValueError where a result holds a Variable of the arguments."""
    call = inner.call
    came_in = {
        id(inner.nodes[n]): i for i, n in enumerate(call.graphdef.decoded.leaf_nodes) if n >= 0
    }
    found = traverse(roots)
    decoded = GraphDef(found.tokens, len(roots)).decoded
    for node, frame in zip(decoded.leaf_nodes, decoded.leaf_frames):
        variable = found.nodes[node] if node >= 0 else None
        leaf = came_in.get(id(variable))
        if leaf is None:
            continue
        number, *below = decoded.path(frame)
        places = jax.tree_util.tree_leaves_with_path(result, is_leaf=is_root)
        above = [path for path, value in places if is_root(value)][number]
        raise ValueError(
            f"Duplicate {type(variable).__name__}: the result holds it at "
            f"'{path_text((*map(key_name, above), *below))}', and it came in at "
            f"'{call.graph_leaves()[leaf].text()}'. With "
            "graph_updates=False (or graph=False) only values leave: return the value "
            "(variable[...]); what is written into the Variable is kept in any case."
        )


def _detached(inner: Inner) -> list[tp.Any]:
    """What came in and may have changed: walked even where nothing refers to it any more.

    Edits of plain containers and of static values are not told by a version.
    """
    decoded = inner.call.graphdef.decoded
    loose = {owner for owner, _, code in decoded.raw_slots if not isinstance(code, int)}

    def changed(number: int) -> bool:
        node, version = inner.nodes[number], inner.versions[number]
        definition = decoded.node_defs[number]
        if isinstance(node, Variable):
            return node._box.definition is not definition
        if not version or not isinstance(node, GraphNode):
            return False
        return node._nnx_version != version or number in loose or bool(definition.editable)

    return [node for number, node in enumerate(inner.nodes) if changed(number)]


def _edits(
    came_in: Decoded,
    decoded: Decoded,
    origin: tuple[int | None, ...],
    sources: list[int | None],
) -> tuple[tuple[Edit, ...], dict[int, int]]:
    """Objects that came in, compared attribute by attribute.

    Returns the structure changes, and the leaves (old number: new number) that took the place of
    others.
    """
    children_in = dict(came_in.children)
    edits: list[Edit] = []
    moves: dict[int, int] = {}

    def moved(old: Code | None, now: Code) -> list[tuple[int, int]] | None:
        """The leaves that differ, or None where anything else does."""
        if isinstance(now, ContainerCode):
            if not isinstance(old, ContainerCode) or old.definition != now.definition:
                return None
            inside = [moved(a, b) for a, b in zip(old.codes, now.codes)]
            return None if None in inside else [m for part in inside for m in part or ()]
        if isinstance(now, StaticDef) or not isinstance(old, int) or (old < 0) != (now < 0):
            return [] if isinstance(now, StaticDef) and old == now else None
        if now >= 0:
            return [] if origin[now] == old else None
        return [] if sources[~now] == ~old else [(~old, ~now)]

    for number, codes in decoded.children:
        old = origin[number]
        if old is None:
            continue
        new_def: ObjectDef = decoded.node_defs[number]
        old_def: ObjectDef = came_in.node_defs[old]
        before = dict(zip(old_def.layout.data, children_in[old]))
        changes = {n: moved(before.get(n), code) for n, code in zip(new_def.layout.data, codes)}
        for change in changes.values():
            moves.update(change or ())
        names = [name for name, change in changes.items() if change is None]
        if names or new_def is not old_def:
            names += [
                name
                for name, value in new_def.template.items()
                if name not in old_def.template or old_def.template[name] is not value
            ]
            removed = tuple(n for n in old_def.layout.status if n not in new_def.layout.status)
            edits.append((number, tuple(names), removed))
    return tuple(edits), moves


# Replaying them outside --------------------------------------------------------------------------


def replay(inputs: Inputs, outputs: Outputs) -> tp.Any:
    """Write what left the transform into the caller's objects; returns the caller's result.

    Raises TraceContextError, before anything is written, where an object that must change belongs to
    another trace level.
    """
    return _replay(inputs, *outputs)


def replay_crossing(inputs: Inputs, crossing: Crossing) -> tp.Any:
    """`replay` of outputs as they crossed."""
    fixed, result, written, fresh = crossing
    return _replay(inputs, fixed.value, result, written, fresh)


def _replay(
    inputs: Inputs, definition: OutDef, result: tp.Any, written: list[tp.Any], fresh: list[tp.Any]
) -> tp.Any:
    if definition.graph is not None:
        outputs = Outputs(definition, result, written, fresh)
        return _replay_graph(inputs, outputs, definition.graph)
    if definition.written:
        _write(inputs, definition.written, written)
    if definition.treedef is None:
        return result
    leaves = list(result)
    nodes = inputs.nodes()
    for position, number in zip(definition.where, definition.nodes):
        leaves.insert(position, nodes[number])
    return jax.tree_util.tree_unflatten(definition.treedef, leaves)


def write_leaves(inputs: Inputs, new: tp.Mapping[int, tp.Any]) -> None:
    """Store values in the caller's Variables and objects, by leaf number.

    Raises TraceContextError, with nothing written, where one belongs to another trace level.
    """
    if new:
        _write(inputs, tuple(new), list(new.values()))


def _write(inputs: Inputs, at: tuple[int, ...], values: list[tp.Any]) -> None:
    """Store values in the caller's Variables, and arrays in the caller's objects."""
    plan, trace = inputs.plan, trace_state.value
    if plan is not None and plan.trace is trace and plan.write(at, values):
        return
    nodes = inputs.nodes()
    leaf_nodes = inputs.graphdef.decoded.leaf_nodes
    variables: list[tuple[tp.Any, tp.Any]] = []
    arrays: dict[int, tp.Any] = {}
    for leaf, value in zip(at, values):
        if leaf_nodes[leaf] < 0:
            arrays[leaf] = value
        else:
            variables.append((nodes[leaf_nodes[leaf]], value))
    for variable, _ in variables:
        if variable._box.trace is not trace:
            variable._refuse_write()
    places = _places(inputs.graphdef.decoded, nodes, arrays) if arrays else []
    for variable, value in variables:
        write_raw(variable, value)
    for node, name, code in places:
        custom = CUSTOM_NODES.get(type(node))
        if custom is None:
            attributes = node.__dict__
            attributes[name] = _with_arrays(attributes[name], code, arrays)
        else:
            held = dict(custom.flatten(node)[0])[name]
            custom.set_key(node, name, _with_arrays(held, code, arrays))


def _places(
    decoded: Decoded, nodes: list[tp.Any], arrays: dict[int, tp.Any]
) -> list[tuple[tp.Any, tp.Any, Code]]:
    """The attributes in which arrays are to be replaced: object, name, and what is there.

    Raises TraceContextError where an object belongs to another trace level.
    """
    places = []
    for owner, name, code in decoded.raw_slots:
        if owner >= 0 and not arrays.keys().isdisjoint(_array_leaves(code)):
            _check_trace(nodes[owner])
            places.append((nodes[owner], name, code))
    return places


def _array_leaves(code: Code) -> tp.Iterator[int]:
    if isinstance(code, ContainerCode):
        for child in code.codes:
            yield from _array_leaves(child)
    elif isinstance(code, int) and code < 0:
        yield ~code


def _with_arrays(held: tp.Any, code: Code, arrays: dict[int, tp.Any]) -> tp.Any:
    """What an attribute holds, with new arrays; lists, dicts and States are changed in place."""
    if not isinstance(code, ContainerCode):
        is_array = isinstance(code, int) and code < 0
        return arrays.get(~tp.cast(int, code), held) if is_array else held
    keys = code.definition.keys
    children = [child for _, child in container_items(held, kind_of(held))]
    new = [_with_arrays(child, c, arrays) for child, c in zip(children, code.codes)]
    if all(a is b for a, b in zip(children, new)):
        return held
    if code.definition.kind in (LIST, DICT, STATE):
        for key, before, after in zip(keys, children, new):
            if after is not before:
                held[key] = after
        return held
    return code.definition.build(new)


def _check_trace(node: tp.Any) -> None:
    """Raise TraceContextError where an object belongs to another trace level."""
    trace = trace_state.value
    belongs = getattr(node, "_nnx_trace", trace)
    if belongs is not trace:
        raise TraceContextError(
            type(node).__name__, None, describe_trace(belongs), describe_trace(trace)
        )


def _replay_graph(inputs: Inputs, outputs: Outputs, graph: OutGraph) -> tp.Any:
    outer = inputs.nodes()
    decoded = graph.graphdef.decoded
    trace = trace_state.value
    if _FIXED.get():
        _refuse_fixed(outer, graph)
    for old, _ in graph.kinds:
        if outer[old]._box.trace is not trace:
            outer[old]._refuse_write()
    for number, *_ in graph.edits:
        _check_trace(outer[tp.cast(int, graph.origin[number])])
    if outputs.definition.written:
        _write(inputs, outputs.definition.written, outputs.written)
    leaves = [
        inputs.values[source] if source >= 0 else outputs.fresh[~source] for source in graph.sources
    ]
    _make_refs(graph, leaves)
    nodes: list[tp.Any] = []
    for i, found in enumerate(decoded.node_defs):
        old = graph.origin[i]
        if old is not None:
            nodes.append(outer[old])
        elif isinstance(found, ObjectDef):
            custom = CUSTOM_NODES.get(found.type)
            if custom is None:
                nodes.append(new_shell(found.type, found, trace))
            else:
                nodes.append(custom.create_empty(found.metadata))
        elif isinstance(found, VariableDef):
            nodes.append(make(found, leaves[decoded.node_leaves[i]]))
        else:
            nodes.append(leaves[decoded.node_leaves[i]])
    for old, kind in graph.kinds:
        outer[old]._redefine(kind.metadata)
    codes_of = dict(decoded.children)
    for number, codes in decoded.children:
        if graph.origin[number] is None:
            values = [resolve(code, nodes, leaves) for code in codes]
            fill(nodes[number], decoded.node_defs[number], values)
    for number, names, removed in graph.edits:
        found = decoded.node_defs[number]
        codes = dict(zip(found.layout.data, codes_of[number]))
        _edit(nodes[number], found, names, removed, codes, nodes, leaves)
    definition = outputs.definition
    if definition.treedef is None:
        return outputs.result
    result = list(outputs.result)
    for position, code in zip(definition.where, decoded.roots[graph.first_result :]):
        result.insert(position, resolve(code, nodes, leaves))
    return jax.tree_util.tree_unflatten(definition.treedef, result)


def _make_refs(graph: OutGraph, leaves: list[tp.Any]) -> None:
    """Put new references in place of the arrays that left for references made inside."""
    decoded = graph.graphdef.decoded
    made: dict[int, tp.Any] = {}
    for node, leaf in enumerate(decoded.node_leaves) if decoded.has_refs else ():
        kind = decoded.node_defs[node]
        if kind is REF_LEAF or (isinstance(kind, VariableDef) and kind.is_ref):
            source, value = graph.sources[leaf], leaves[leaf]
            if source < 0 and not isinstance(value, jax.ShapeDtypeStruct):
                if source not in made:
                    made[source] = new_ref(value)
                leaves[leaf] = made[source]


_FIXED: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "nnxlite_fixed_structure", default=frozenset()
)


@contextlib.contextmanager
def fixed_structure(ids: frozenset[int]) -> tp.Iterator[None]:
    """Within the block, transforms refuse to change the structure of objects and Variables, by id.

    The refusal is a ValueError, raised before anything is written.
    """
    outer = _FIXED.get()
    token = _FIXED.set(outer | ids if outer else ids)
    try:
        yield
    finally:
        _FIXED.reset(token)


def _refuse_fixed(outer: list[tp.Any], graph: OutGraph) -> None:
    """Raise ValueError where the structure of a fixed object or Variable would change."""
    fixed = _FIXED.get()
    for number, names, removed in graph.edits:
        node = outer[tp.cast(int, graph.origin[number])]
        if id(node) in fixed:
            raise ValueError(structure_changed(node, (*names, *removed)))
    for old, _ in graph.kinds:
        if id(outer[old]) in fixed:
            raise ValueError(structure_changed(outer[old], ("metadata",)))


def structure_changed(node: tp.Any, names: tuple[tp.Any, ...]) -> str:
    """What is wrong when a function changes a structure that must stay as it is."""
    what = ", ".join(repr(name) for name in names)
    return (
        f"The graph structure of a {type(node).__name__} was changed where it must stay the same "
        f"({what}): it is among the arguments of cached_partial. Undo temporary changes before the "
        "function returns (nnx.pop removes what Module.sow stores), make attributes before "
        "cached_partial is called, or call the function itself."
    )


def _edit(
    node: tp.Any,
    found: ObjectDef,
    names: tuple[tp.Any, ...],
    removed: tuple[tp.Any, ...],
    codes: dict[tp.Any, Code],
    nodes: list[tp.Any],
    leaves: list[tp.Any],
) -> None:
    """Repeat the changes of one object on the caller's own."""
    custom = CUSTOM_NODES.get(found.type)
    if custom is not None:
        for name in removed:
            custom.pop_key(node, name)
        for name in names:
            value = resolve(codes[name], nodes, leaves) if name in codes else found.template[name]
            custom.set_key(node, name, value)
        return
    attributes = node.__dict__
    for name in removed:
        attributes.pop(name, None)
    for name in names:
        if name not in codes:
            attributes[name] = own_copy(found.template[name])
            continue
        value = resolve(codes[name], nodes, leaves)
        held = attributes.get(name)
        if type(held) is list and type(value) is list:
            held[:] = value
        elif type(held) is dict and type(value) is dict:
            held.clear()
            held.update(value)
        else:
            attributes[name] = value
    _set_status(node, found.layout.status)
    set_definition(node, found)


_set_status = GraphNode.__dict__["_nnx_status"].__set__
