"""Leaving a transform: what the function returned and what it wrote, as bare leaves.

Only changes cross: a Variable that still has its input value is not an output.  Structure changes
(attributes, new objects, sharing, cycles) are detected once, at trace time, and cross as static data,
the `OutDef`.  `replay` repeats them outside.
"""

from __future__ import annotations

import operator
import typing as tp

import jax

from nnxlite._base.errors import path_text, short_type, warn_user
from nnxlite._base.jax import PyTreeDef, describe_trace, in_this_trace, is_ref, trace_state
from nnxlite._base.outline import array_text
from nnxlite._base.statics import ById, alike, captures
from nnxlite.boundary._call_def import CallDef, Inner, own_values, paths_of
from nnxlite.boundary._inputs import Inputs, is_root, positions
from nnxlite.boundary._out import Edit, OutDef, Outputs, Source, output_paths
from nnxlite.graph._compare import SHOWN, kind_at, worded
from nnxlite.graph._defs import CUSTOM_NODES, REF_LEAF, ObjectDef, StaticDef
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._kinds import GraphNode, refuse_hidden_writes
from nnxlite.graph._plan import refuse_sharing
from nnxlite.graph._rebuild import ArrayCode, Code, ContainerCode, Decoded, NodeCode, Path, traverse
from nnxlite.variables._definition import current_definition
from nnxlite.variables._variable import Variable


def leave(
    inner: Inner,
    result: tp.Any,
    *,
    name: str = "the function",
    foreign: bool = True,
    graph: bool = True,
    all_written: tp.Collection[int] = (),
    structure: bool = True,
    captured: bool = False,
) -> Outputs:
    """What leaves a function, as static data and leaves: its result and the state of its arguments.

    Args:
        inner: the arguments as they were rebuilt.
        result: what the function returned.
        name: of the transform and its function, for messages.
        foreign: whether the function may return and store what JAX cannot return.
        graph: whether the result may contain a Variable twice.
        all_written: input leaves that always count as written.
        structure: whether structure changes of the arguments are repeated outside, and arrays outside
            Variables written back; otherwise the result must not contain Variables of the arguments.
        captured: whether objects that the function captured may leave it, as copies.

    Raises:
        ValueError: for a result that contains an object or Variable that it must not contain.
        TypeError: for what JAX cannot return.
    """
    if not graph:  # objects without Variables may be there twice, as in the reference
        shown, caller = Inputs(result, trees=True), name.partition("(")[0]
        starts = shown.definition.root_paths
        refuse_sharing(shown.graphdef, caller, starts, " of the result", arrays=False)
    if inner.plain:
        refuse_hidden_writes(inner.plain)
    call = inner.call
    leaves, treedef = jax.tree_util.tree_flatten(result, is_leaf=is_root)
    where, others = positions(leaves)
    roots = [leaves[i] for i in where]
    left, new, changed = _graph_of(inner, roots, (treedef, where), all_written, captured, structure)
    written = _written(inner, all_written) | changed
    out = Outputs(left, [*[leaves[i] for i in others], *new]).with_written(written)
    if not foreign:
        _refuse_foreign(call, out, name)
    return out


def _written(inner: Inner, all_written: tp.Collection[int]) -> dict[int, tp.Any]:
    """New values of the input Variables that were written, by leaf number."""
    out: dict[int, tp.Any] = {}
    nodes, numbers = inner.nodes, inner.call.graphdef.decoded.leaf_nodes
    for leaf, (node, before) in enumerate(zip(numbers, inner.values)):
        variable = nodes[node] if node >= 0 else None
        if node < 0 or isinstance(variable, Variable):  # and not a reference
            value = before if variable is None else variable._box.value
            if value is not before or leaf in all_written:
                out[leaf] = value
    return out


# Structure changes -------------------------------------------------------------------------------


def _graph_of(
    inner: Inner,
    roots: list[tp.Any],
    result: tuple[PyTreeDef, tuple[int, ...]],
    all_written: tp.Collection[int],
    captured: bool,
    structure: bool,
) -> tuple[OutDef, list[tp.Any], dict[int, tp.Any]]:
    """The graph as it is now, compared with that of the arguments.

    Without `structure` all is new but Variables of the arguments whose metadata changed.

    Returns what leaves, the values that did not come in, and, by leaf number, arrays that replaced
    others.
    """
    numbers = {id(node): i for i, node in enumerate(inner.nodes)}
    known = [numbers.get(id(root)) for root in roots]
    if structure and None not in known and _is_as_entered(inner):
        return _unchanged(inner.call, result, tp.cast(list[int], known)), [], {}
    arguments = inner.roots() if structure else []
    came_in = inner.call.graphdef.decoded
    changed = [  # Variables whose metadata the function changed
        (number, current_definition(x._box))
        for number, (x, before) in enumerate(zip(inner.nodes, came_in.node_defs))
        if isinstance(x, Variable) and not current_definition(x._box).is_like(before)
    ]
    walk = traverse([*arguments, *roots], trees=inner.call.trees, open_roots=True)
    leaving = inner.nodes if structure else [inner.nodes[number] for number, _ in changed]
    detached = [x for x in leaving if id(x) not in walk.index]  # they may have been edited before
    traverse(detached, walk, trees=inner.call.trees, open_roots=True)
    every = len(arguments) + len(roots) + len(detached)
    graphdef: GraphDef[tp.Any] = GraphDef(walk.tokens, every)
    decoded = graphdef.decoded
    origin = tuple(numbers.get(id(node)) for node in walk.nodes)
    if not structure:
        refuse_aliases(inner.call, origin, decoded, [paths_of(result[0])[i] for i in result[1]])
        # No Variable of the arguments is in the result.
        origin = tuple([i if isinstance(x, Variable) else None for i, x in zip(origin, walk.nodes)])
    here = trace_state.value
    foreign = any(isinstance(x, Variable) and x._box.trace is not here for x in walk.nodes)
    if not captured and (structure or foreign):  # without Variables, objects are built again
        refuse_captured(walk.nodes, origin, decoded)
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

    before = [source(number, leaf) for number, leaf in enumerate(walk.leaves)]
    edits, moves = _edits(came_in, decoded, origin, before)
    new_nodes = {number for number, old in enumerate(origin) if old is None}
    check_dead_tracers(walk.nodes, decoded, new_nodes | {number for number, *_ in edits})
    known = [moves.get(number, leaf) for number, leaf in enumerate(before)]
    sources, new = _new_values(inner, walk.leaves, known)
    seen = tuple(map(ById, own_values(inner.call.graphdef, inner.call.static)))
    graph = graphdef, origin, sources, len(arguments)
    left = OutDef(*result, *graph, edits=edits, redefined=tuple(changed), seen=seen)
    return left, new, {old: walk.leaves[now] for now, old in moves.items()}


def _new_values(
    inner: Inner, leaves: list[tp.Any], known: list[Source | None]
) -> tuple[tuple[Source, ...], list[tp.Any]]:
    """The source of each leaf, and the values that did not come in: of a reference the array in it.

    Args:
        inner: the arguments as they were rebuilt.
        leaves: those that leave.
        known: the leaf of the arguments that each of them was; None for a new one.
    """
    new, sources = list[tp.Any](), list[Source]()
    refs: dict[int, Source] = {id(x): i for i, x in enumerate(inner.values) if is_ref(x)}
    for leaf, source in zip(leaves, known):
        value = leaf._box.value if isinstance(leaf, Variable) else leaf
        if source is None and is_ref(value):
            source = refs.get(id(value))
        if source is None:
            refs[id(value)] = source = ~len(new)
            new.append(value[...] if is_ref(value) else value)
        sources.append(source)
    return tuple(sources), new


def _is_as_entered(inner: Inner) -> bool:
    """Whether the arguments are the same graph, whatever values their Variables have now.

    False where only the walk would tell. Most functions change no structure and return arrays: without
    the walk an eager `vmap` is a tenth faster (bench `eager`).
    """
    decoded, nodes = inner.call.graphdef.decoded, inner.nodes
    if not all(isinstance(code, NodeCode) for code in decoded.roots):
        return False
    for number, definition, _, pick in decoded.fillers:
        node: tp.Any = nodes[number]
        if pick is None or definition.mutable or definition.type in CUSTOM_NODES:
            return False
        names, attributes = definition.names, node._nnx_dict
        if node._nnx_def is not definition or len(attributes) != len(names.status):
            return False
        if not all(map(operator.is_, names.data_values(attributes), pick(nodes))):
            return False
    for number in decoded.leaf_nodes:
        definition: tp.Any = decoded.node_defs[number]
        if definition is REF_LEAF or definition.public is not None:
            return False
        if nodes[number]._box.definition is not definition:
            return False
    return True


def _unchanged(
    call: CallDef, result: tuple[PyTreeDef, tuple[int, ...]], roots: list[int]
) -> OutDef:
    """What leaves where the arguments are as they were; `roots` of the result are nodes of theirs."""
    first, graphdef = len(call.where), call.graphdef
    decoded = graphdef.decoded
    origin, sources = tuple(range(len(decoded.node_defs))), tuple(range(decoded.num_leaves))
    if roots:
        graphdef = GraphDef((*graphdef.tokens, *roots), first + len(roots))
    seen = tuple(map(ById, own_values(call.graphdef, call.static)))
    return OutDef(*result, graphdef, origin, sources, first, seen=seen)


def _edits(
    came_in: Decoded, decoded: Decoded, origin: tuple[int | None, ...], sources: list[Source | None]
) -> tuple[tuple[Edit, ...], dict[int, int]]:
    """Compare the objects of the arguments attribute by attribute.

    Returns the structure changes, and the leaves (new number: old number) that replaced others.
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
                return [] if sources[after] == before else [(after, before)]
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
        changes = {n: moved(before.get(n), code) for n, code in zip(new_def.names.data, codes)}
        for change in changes.values():
            moves.update(change or ())
        names = [name for name, change in changes.items() if change is None]
        if new_def is not old_def:
            names += [name for name in new_def.template if new_def.differs(name, old_def)]
        same = new_def.names is old_def.names and alike(new_def.metadata, old_def.metadata)
        if names or not same:
            removed = tuple(n for n in old_def.names.status if n not in new_def.names.status)
            edits.append((number, tuple(names), removed))
    return tuple(edits), moves


# Refusals -------------------------------------------------------------------------------------------


def refuse_captured(nodes: list[tp.Any], origin: tuple[int | None, ...], decoded: Decoded) -> None:
    """Raise ValueError where the outputs contain an object from outside that can change."""
    here = trace_state.value
    for number, (node, old) in enumerate(zip(nodes, origin)):
        trace = node._box.trace if isinstance(node, Variable) else getattr(node, "_nnx_trace", here)
        if old is None and trace is not here and not getattr(node, "_nnx_frozen", False):
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


def check_dead_tracers(nodes: list[tp.Any], decoded: Decoded, changed: tp.Collection[int]) -> None:
    """Raise ValueError where an optimizer that changed captures a tracer; warn for other objects.

    Their function may never run outside, as an initializer that a layer has used.
    """
    warning = ""
    for number in sorted(changed):
        node = nodes[number]
        for name, value in node._nnx_dict.items() if isinstance(node, GraphNode) else ():
            tracer = _captured_tracer(value)
            advice = getattr(node, "_nnx_captures_advice", "")
            if tracer is None or (warning and not advice):  # many layers may be made alike
                continue
            at = path_text((*decoded.path(decoded.node_frames[number])[1:], name))
            problem = (
                f"The {type(node).__name__} that leaves the transform captures a tracer "
                f"{short_type(tracer)} in its static attribute '{at}', which is dead outside. "
            )
            if advice:
                raise ValueError(problem + advice)
            store = "Store the value in an nnx.Variable of the object, and read it there."
            warning = problem + store
    if warning:
        warn_user(warning)


def _captured_tracer(value: tp.Any) -> tp.Any:
    """A tracer of this trace that a function in a static value captures, or None."""
    todo, seen = [value], dict[int, tp.Any]()
    while todo:
        item = todo.pop()
        leaf = isinstance(item, (str, jax.Array, Variable, GraphNode))
        if leaf or id(item) in seen or is_ref(item):
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
        if root >= len(roots):  # of the arguments alone
            continue
        raise ValueError(
            f"Duplicate {decoded.node_defs[number].type.__name__} found at paths: "
            f"'{path_text((*roots[root], *path))}' of the result, "
            f"'{call.graph_leaves()[leaf].text()}' of the arguments. A transform with "
            "graph_updates=False (or graph=False) does not support Variable aliasing, only values "
            "leave: return the value (variable[...]); what is written into the Variable is kept in "
            "any case."
        )


def _refuse_foreign(call: CallDef, out: Outputs, name: str) -> None:
    """Raise TypeError where a function returned or stored something that JAX cannot return.

    Args:
        call: the arguments, with the user's names.
        out: the outputs.
        name: of the transform and the function.
    """
    for number, value in enumerate(out.values):
        for leaf in filter(is_foreign, jax.tree_util.tree_leaves(value)):
            path = output_paths(call, out.definition)[number]
            if number < out.definition.num_arrays:
                raise not_returnable(name, path[1:], leaf)
            raise TypeError(
                f"{name} stored a value of type '{type(leaf).__name__}' at '{path_text(path)}', which "
                "is not a valid JAX type. Store an array; to make an attribute static, assign "
                "nnx.static(value)."
            )


def not_returnable(name: str, path: Path, value: tp.Any) -> TypeError:
    """The error for a leaf, of what a function returned, that JAX cannot return."""
    at = f" at '{path_text(path)}'" if path else ""
    return TypeError(
        f"{name} returned a value of type '{type(value).__name__}'{at}, which is not a valid JAX "
        "type. Return arrays, objects, or pytrees of these; static values can be attributes of "
        "objects."
    )


def refuse_non_arrays(
    name: str, call: CallDef, leaves: tp.Sequence[tp.Any], remedy: str, inside: str | None = None
) -> None:
    """Raise TypeError naming the first leaf of the arguments that JAX does not accept.

    Called after JAX refused the arguments; returns if JAX had another reason.

    Args:
        name: of the transform.
        call, leaves: the arguments.
        remedy: what to do instead.
        inside: the same for a leaf inside a module or container, where it differs.
    """
    for leaf, value in zip(call.leaves(), leaves):
        for part in filter(is_foreign, jax.tree_util.tree_leaves(value)):
            path = leaf.text()
            if inside is not None and not path.isidentifier():
                remedy = inside
            raise TypeError(
                f"{name}: cannot interpret argument '{path}' as an array, it is of type "
                f"'{type(part).__name__}'. {remedy}"
            ) from None


def is_foreign(value: tp.Any) -> bool:
    """Whether JAX does not accept a value as an array."""
    try:
        jax.typeof(value)
    except TypeError:
        return True
    return False


def tree_difference(before: PyTreeDef, after: PyTreeDef, *words: tp.Sequence[str]) -> str:
    """How two pytree structures differ: the paths that only one has, or both where one has no paths.

    Args:
        before, after: the structures.
        words: for each of them what its leaves are.

    >>> import jax
    >>> from nnxlite.boundary._leave import tree_difference
    >>> before, after = map(jax.tree.structure, ({"a": 1, "b": 2}, {"a": 1, "c": (2, 3)}))
    >>> tree_difference(before, after, ["an array"] * 2, ["an array"] * 3)
    "without 'b', with 'c.0', 'c.1'"
    """
    old, new = (dict.fromkeys(map(path_text, paths_of(tree))) for tree in (before, after))
    parts = []
    for word, one, other in (("without", old, new), ("with", new, old)):
        missing = [repr(path) for path in one if path not in other]
        if missing:
            more = ", ..." if len(missing) > SHOWN else ""
            parts.append(f"{word} {', '.join(missing[:SHOWN])}{more}")
    if parts and path_text(()) not in {**old, **new}:
        return ", ".join(parts)
    texts = [*map(tree_text, (before, after), words)]
    return f"{texts[1]} in place of {texts[0]}"


def tree_text(treedef: PyTreeDef, words: tp.Sequence[str]) -> str:
    """A pytree structure as Python would print it, with words for its leaves.

    >>> import jax
    >>> from nnxlite.boundary._leave import tree_text
    >>> tree_text(jax.tree.structure([1, None]), ["a State"])
    '[a State, None]'
    """
    text = repr(jax.tree_util.tree_unflatten(treedef, map(_Word, words)))
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


_LONGEST = 200


class _Word(str):
    """Text that prints without quotes in a container."""

    __repr__ = str.__str__


def edits_text(call: CallDef, left: OutDef) -> str:
    """The structure changes that a function made to its arguments, in words."""
    out = []
    for number, names, removed in left.edits:
        where = node_text(call, tp.cast(int, left.origin[number]))
        out.append(f"attributes {[*names, *removed]} of {where}")
    out += [f"metadata of {node_text(call, old)}" for old, _ in left.redefined]
    return ", ".join(out) or "no structure"


def node_text(call: CallDef, node: int) -> str:
    """The path of an object among the arguments."""
    decoded = call.graphdef.decoded
    root, *below = decoded.path(decoded.node_frames[node])
    return f"'{path_text((*call.root_paths()[root], *below))}'"


def code_text(code: Code, decoded: Decoded) -> str:
    """What is at some path of a graph: the class of an object or container, an array, a value."""
    return worded(kind_at(decoded, code))


def result_words(call: CallDef, out: Outputs) -> list[str]:
    """What each leaf of a result is: an object, a State, or the type of an array."""
    left = out.definition
    words = [described(x) for x in left.split(out.values)[0]]
    for position, code, old in zip(left.where, left.roots, left.known_roots):
        new = f"a new {code_text(code, left.graphdef.decoded)}"
        words.insert(position, new if old is None else node_text(call, old))
    return words


def described(value: tp.Any) -> str:
    """A leaf (or small tree) by type and shape."""

    def one(x: tp.Any) -> str:
        return array_text(x if hasattr(x, "shape") and hasattr(x, "dtype") else jax.typeof(x))

    leaves, treedef = jax.tree_util.tree_flatten(value)
    if treedef == jax.tree_util.tree_structure(0):
        return one(leaves[0])
    return str(jax.tree_util.tree_unflatten(treedef, [one(x) for x in leaves]))
