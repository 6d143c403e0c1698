"""What a loop body makes of its carry: the objects it was given, or new ones in their places.

An object or Variable that the body returns in its place is the caller's own: what was written into
it is carried, and it keeps what the last iteration wrote.  A State has no identity, nor has an array,
and a Variable may be replaced by a new one of its kind, as `jax.tree.map` does; then the values are
carried, and the result of the loop holds new Variables.  The same goes for a new Variable that takes
the place of another in an object that stays.
"""

from __future__ import annotations

import dataclasses
import typing as tp

from nnxlite.boundary._inputs import CallDef, Inner
from nnxlite.boundary._outputs import Edit, OutDef, OutGraph, Outputs
from nnxlite.graph._defs import REF_LEAF, ObjectDef, StaticDef
from nnxlite.graph._rebuild import Code, ContainerCode, Decoded
from nnxlite.variables import VariableDef


class Handover(tp.NamedTuple):
    """How the graph leaves of a carry change from one iteration to the next.

    Attributes:
        written: leaves of the caller's own objects that the body writes.
        replaced: leaves that something new takes the place of, each with the number of the fresh
            value it has then.
        edits: the structure changes that are no such replacements.
    """

    written: tuple[int, ...]
    replaced: tuple[tuple[int, int], ...]
    edits: tuple[Edit, ...] = ()

    @property
    def leaves(self) -> tuple[int, ...]:
        """The leaves that change."""
        return (*self.written, *[leaf for leaf, _ in self.replaced])

    def values(self, out: Outputs) -> list[tp.Any]:
        """The next values of these leaves, from what an iteration leaves."""
        written = dict(zip(out.definition.written, out.written))
        return [
            *[written[leaf] for leaf in self.written],
            *[out.fresh[number] for _, number in self.replaced],
        ]


TAKEN_OVER = (
    "puts Variables of its carry into new objects. Return the objects of the carry themselves, or "
    "new Variables"
)
ELSEWHERE = (
    "returns the objects of its carry in other places. Return each where it came in, or exchange "
    "their values"
)
SHARED = (
    "replaces a part of its carry that is shared with another. Replace it everywhere, or write "
    "into it"
)
OTHER = "replaces its carry by something of another structure"


def hand_over(
    call: CallDef,
    out: Outputs,
    pairs: tp.Sequence[tuple[int, int]],
    *,
    new_objects: bool = True,
    new_variables: bool = True,
    is_carried: tp.Callable[[int], bool] = lambda leaf: True,
) -> tuple[Outputs, Handover | str]:
    """How the carry of a loop changes, and what leaves without writes to what is replaced.

    Args:
        call: what came in.
        out: what a body leaves.
        pairs: the roots of the carry: number among those of the arguments, and of the result.
        new_objects: whether objects may be replaced.
        new_variables: whether Variables may be.
        is_carried: whether a leaf that came in belongs to the carry.

    Returns a text in place of the handover where there is none.
    """
    definition = out.definition
    if definition.graph is None:
        kept = all(call.graphdef.decoded.roots[a] == definition.nodes[b] for a, b in pairs)
        return out, Handover(definition.written, ()) if kept else ELSEWHERE
    replaced = _replaced(call, definition, pairs, new_objects, new_variables)
    if isinstance(replaced, str):
        return out, replaced
    rebound, edits = _rebound(call, definition.graph, is_carried)
    replaced |= rebound
    at = tuple(leaf for leaf in definition.written if leaf not in replaced)
    written = [x for leaf, x in zip(definition.written, out.written) if leaf not in replaced]
    out = out._replace(definition=dataclasses.replace(definition, written=at), written=written)
    return out, Handover(at, tuple(replaced.items()), edits)


def _replaced(
    call: CallDef,
    definition: OutDef,
    pairs: tp.Sequence[tuple[int, int]],
    new_objects: bool,
    new_variables: bool,
) -> dict[int, int] | str:
    """Leaves that are replaced, each with the number of its fresh value."""
    graph = tp.cast(tp.Any, definition.graph)
    before, after = call.graphdef.decoded, tp.cast(Decoded, graph.graphdef.decoded)
    children = dict(before.children), dict(after.children)
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    kept: list[Code] = []
    found: dict[int, int] = {}
    pending: list[tuple[Code, Code, bool]] = [
        (before.roots[a], after.roots[graph.first_result + b], False) for a, b in pairs
    ]
    while pending:
        old, new, inside = pending.pop()
        if isinstance(old, ContainerCode):
            if not isinstance(new, ContainerCode) or old.definition != new.definition:
                return OTHER
            pending.extend((a, b, inside) for a, b in zip(old.codes, new.codes))
        elif isinstance(old, StaticDef) or not isinstance(new, int):
            if old != new:
                return OTHER
        elif old < 0:
            if new >= 0 or found.setdefault(~old, ~graph.sources[~new]) != ~graph.sources[~new]:
                return OTHER
        elif old in forward or new in backward:
            if forward.get(old) != new or backward.get(new) != old:
                return SHARED
        elif new < 0:
            return OTHER
        else:
            forward[old], backward[new] = new, old
            if graph.origin[new] == old:
                if inside:
                    return TAKEN_OVER
                kept.append(old)
                continue
            if graph.origin[new] is not None:
                return ELSEWHERE
            kind = after.node_defs[new]
            if kind is not before.node_defs[old] or kind is REF_LEAF:
                return OTHER
            if isinstance(kind, ObjectDef):
                if not new_objects:
                    return OTHER
                pending.extend((a, b, True) for a, b in zip(children[0][old], children[1][new]))
            elif not new_variables:
                return OTHER
            else:
                found[before.node_leaves[old]] = ~graph.sources[after.node_leaves[new]]
    if found:
        carried = {a for a, _ in pairs}
        rest = [code for root, code in enumerate(before.roots) if root not in carried]
        below = _nodes_below(before, children[0], [*kept, *rest])
        if any(graph.origin[new] is None and old in below for old, new in forward.items()):
            return SHARED
    return found


def _rebound(
    call: CallDef, graph: OutGraph, is_carried: tp.Callable[[int], bool]
) -> tuple[dict[int, int], tuple[Edit, ...]]:
    """Leaves whose Variables were replaced in objects that stay, and what else was edited."""
    before, after = call.graphdef.decoded, graph.graphdef.decoded
    children = dict(before.children), dict(after.children)
    stay = set(graph.origin)
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    more: list[Edit] = []

    def replaces(old: int, new: int) -> bool:
        kind = before.node_defs[old]
        return (
            isinstance(kind, VariableDef)
            and kind is after.node_defs[new]
            and old not in stay
            and is_carried(before.node_leaves[old])
            and forward.setdefault(old, new) == new
            and backward.setdefault(new, old) == old
        )

    for number, names, removed in graph.edits:
        origin = tp.cast(int, graph.origin[number])
        olds = dict(zip(before.node_defs[origin].layout.data, children[0][origin]))
        news = dict(zip(after.node_defs[number].layout.data, children[1][number]))
        rest = []
        for name in names:
            known = name in olds and name in news
            pairs = _pairs(graph, olds[name], news[name]) if known else None
            if pairs is None or not all(replaces(*pair) for pair in pairs):
                rest.append(name)
        if rest or removed:
            more.append((number, tuple(rest), removed))
    leaves = {
        before.node_leaves[old]: ~graph.sources[after.node_leaves[new]]
        for old, new in forward.items()
    }
    return leaves, tuple(more)


def _pairs(graph: OutGraph, old: Code, new: Code) -> list[tuple[int, int]] | None:
    """The nodes of one attribute and the new ones in their places; None where it is another."""
    if isinstance(old, ContainerCode) and isinstance(new, ContainerCode):
        found = [_pairs(graph, a, b) for a, b in zip(old.codes, new.codes)]
        if old.definition != new.definition or None in found:
            return None
        return [pair for pairs in found for pair in pairs or ()]
    if not isinstance(old, int) or not isinstance(new, int):
        return [] if old == new else None
    if old < 0 or new < 0:
        return [] if old < 0 and new < 0 and graph.sources[~new] == ~old else None
    origin = graph.origin[new]
    return [(old, new)] if origin is None else [] if origin == old else None


def _nodes_below(decoded: Decoded, children: dict[int, list[Code]], codes: list[Code]) -> set[int]:
    """The nodes at or below some codes."""
    found: set[int] = set()
    pending = list(codes)
    while pending:
        code = pending.pop()
        if isinstance(code, ContainerCode):
            pending.extend(code.codes)
        elif isinstance(code, int) and code >= 0 and code not in found:
            found.add(code)
            pending.extend(children.get(code, ()))
    return found


def with_arrays(inner: Inner, out: Outputs) -> Outputs:
    """What leaves, where arrays that the result took over from the arguments leave as new ones.

    Arrays have no identity: a result that holds one that came in is no other than one that holds a
    copy.
    """
    definition, graph = out.definition, out.definition.graph
    if graph is None:
        return out
    decoded = graph.graphdef.decoded
    sources, fresh = list(graph.sources), []
    for leaf, source in enumerate(sources):
        root = decoded.path(decoded.leaf_frames[leaf])[0]
        if source < 0 or (decoded.leaf_nodes[leaf] < 0 and root >= graph.first_result):
            fresh.append(inner.values[source] if source >= 0 else out.fresh[~source])
            sources[leaf] = ~(len(fresh) - 1)
    new = dataclasses.replace(graph, sources=tuple(sources))
    return out._replace(definition=dataclasses.replace(definition, graph=new), fresh=fresh)
