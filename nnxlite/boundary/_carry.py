"""What a loop body returns as its carry: the objects it was given, or others in their positions.

The values of a carry are carried by position.  An object or Variable that the body returns in its own
position is the caller's: its new value is carried, and after the loop it has the value that the last
iteration wrote.  In other positions the body may return new objects and Variables of the same kind, or
those of the carry in another order.  The next iteration gets the values in their new positions; after
the loop, everything is where a single run of the body would have put it, with the last values.
"""

from __future__ import annotations

import collections
import dataclasses
import typing as tp

from nnxlite._statics import alike
from nnxlite.boundary._inputs import CallDef, Inner
from nnxlite.boundary._outdef import CameIn, Edit, Fresh, Outputs, Source
from nnxlite.boundary._outputs import only_structure_of
from nnxlite.boundary._prefixes import leaves_of_code
from nnxlite.graph import (
    REF_LEAF,
    ArrayCode,
    Code,
    ContainerCode,
    NodeCode,
    ObjectDef,
    StaticDef,
)
from nnxlite.variables import VariableDef


class Handover(tp.NamedTuple):
    """How the graph leaves of a carry change from one iteration to the next.

    Attributes:
        slots: the graph leaves whose values change, each with the source of its next value.
        edits: the structure changes that the next iteration would see.
    """

    slots: tuple[tuple[int, Source], ...]
    edits: tuple[Edit, ...] = ()

    @property
    def leaves(self) -> tuple[int, ...]:
        """The graph leaves that change."""
        return tuple(leaf for leaf, _ in self.slots)

    def values(self, out: Outputs) -> list[tp.Any]:
        """The next values of these leaves, from the outputs of an iteration."""
        written = dict(zip(out.definition.written, out.written))
        return [source.pick(written, out.fresh) for _, source in self.slots]

    def by_source(self, values: tp.Iterable[tp.Any]) -> dict[Source, tp.Any]:
        """The last values of these leaves, by their sources in the last iteration."""
        return {source: value for (_, source), value in zip(self.slots, values)}


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
    inner: Inner,
    out: Outputs,
    pairs: tp.Sequence[tuple[int, int]],
    *,
    new_objects: bool = True,
    moves: bool = True,
    only_carry: bool = False,
    statics: bool = False,
    is_carried: tp.Callable[[int], bool] = lambda leaf: True,
) -> tuple[Outputs, Handover | str]:
    """How the carry of a loop changes, and the outputs with all values that it needs.

    Args:
        inner: the arguments.
        out: the outputs of the body.
        pairs: the roots of the carry: number among those of the arguments, and of the result.
        new_objects: whether new objects may take the positions of others.
        moves: whether objects of the arguments may be returned in other positions.
        only_carry: whether structure changes outside the carry are ignored.
        statics: whether an object may be replaced by one with other static attributes.
        is_carried: whether a leaf of the arguments belongs to the carry.

    Instead of a handover that is not possible, returns a text that says why.
    """
    definition = out.definition
    roots = inner.call.graphdef.decoded.roots
    if definition.graph is None and all(roots[a] == definition.nodes[b] for a, b in pairs):
        written = filter(is_carried, definition.written)
        return out, Handover(tuple((leaf, CameIn(leaf)) for leaf in written))
    matching = _Matching(inner.call, out, new_objects, moves, statics, is_carried)
    problem = matching.match_roots(pairs, only_carry)
    if problem is not None:
        return out, problem
    places = matching.places
    if only_carry:  # writes to Variables outside the carry are carried, too
        known = set(places.values())
        places |= {
            leaf: CameIn(leaf)
            for leaf in definition.written
            if leaf not in places and CameIn(leaf) not in known
        }
    written = dict(zip(definition.written, out.written))
    slots = [
        (leaf, places[leaf])
        for leaf in sorted(places)
        if is_carried(leaf) and (places[leaf] != CameIn(leaf) or leaf in written)
    ]
    needed = {source.leaf for _, source in slots if isinstance(source, CameIn)}
    written = {leaf: x for leaf, x in written.items() if leaf in needed or not is_carried(leaf)}
    for leaf in needed - written.keys():
        written[leaf] = inner.values[leaf]
    at = tuple(sorted(written))
    definition = dataclasses.replace(definition, written=at)
    out = out._replace(definition=definition, written=[written[leaf] for leaf in at])
    if only_carry:
        out = only_structure_of(out, matching.backward)
    return out, Handover(tuple(slots), tuple(matching.edits(only_carry)))


def refuse_replaced(call: CallDef, handover: Handover, name: str) -> None:
    """Raise ValueError where a Variable of the carry was replaced by another one.

    Args:
        call: the arguments.
        handover: how the carry changes.
        name: of the loop.
    """
    for leaf, source in handover.slots:
        if source != CameIn(leaf) and call.graphdef.decoded.leaf_nodes[leaf] >= 0:
            where = call.graph_leaves()[leaf].text()
            raise ValueError(
                f"{name} Variable identity must be preserved across iterations, but the body puts "
                f"another Variable in the place of '{where}'. With graph_updates=False (or "
                "graph=False) only values are carried: write into the Variable (variable[...] = "
                "value)."
            )


@dataclasses.dataclass
class _Attempt:
    """A match in progress: what is still to be matched, and what has been matched so far.

    Attributes:
        pending: pairs of codes, and whether they are below a new object.
        nodes: pairs of nodes that were matched.
        leaves: the leaves whose sources were recorded.
        edited: objects that stay and whose attributes changed.
    """

    pending: list[tuple[Code, Code, bool]]
    nodes: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    leaves: list[int] = dataclasses.field(default_factory=list)
    edited: list[int] = dataclasses.field(default_factory=list)


class _Matching:
    """What a body returns in the positions of its arguments.

    Attributes:
        places: for each leaf the source of its next value, as in `Handover.slots`.
    """

    def __init__(
        self,
        call: CallDef,
        out: Outputs,
        new_objects: bool,
        moves: bool,
        statics: bool,
        is_carried: tp.Callable[[int], bool],
    ) -> None:
        graph = out.definition.graph
        self.before = self.after = call.graphdef.decoded
        self.origin: tp.Sequence[int | None] = range(len(self.before.node_defs))
        self.sources: tp.Sequence[Source] = [*map(CameIn, range(self.before.num_leaves))]
        self.arguments: tp.Sequence[Code] = self.before.roots
        self.results: tp.Sequence[Code] = out.definition.nodes
        self._edits: dict[int, Edit] = {}
        if graph is not None:
            self.after, self.origin, self.sources = (
                graph.graphdef.decoded,
                graph.origin,
                graph.sources,
            )
            self.arguments = self.after.roots[: graph.first_result]
            self.results = self.after.roots[graph.first_result :]
            self._edits = {edit.node: edit for edit in graph.edits}
        self.children = dict(self.before.children), dict(self.after.children)
        self.new_objects, self.moves, self.is_carried = new_objects, moves, is_carried
        self.statics = statics
        self.in_edit = False
        self.forward: dict[int, int] = {}
        self.backward: dict[int, int] = {}
        self.places: dict[int, Source] = {}
        self._edited: collections.deque[int] = collections.deque()
        self._left: dict[int, tuple[tp.Any, ...]] = {}

    def match_roots(self, pairs: tp.Sequence[tuple[int, int]], only_carry: bool) -> str | None:
        """Match the roots of the carry, then others with carried leaves; returns the problem."""
        carry = [(self.before.roots[a], self.results[b], False) for a, b in pairs]
        problem = self._match(carry) or self._match_edited()
        if problem or only_carry:
            return problem
        carried = {a for a, _ in pairs}
        self.in_edit = False
        for root, (old, new) in enumerate(zip(self.before.roots, self.arguments)):
            in_part = any(self.is_carried(leaf) for leaf, _ in leaves_of_code(self.before, old))
            if root not in carried and in_part and self._match([(old, new, False)]) is SHARED:
                return SHARED
        return self._match_edited()

    def edits(self, only_carry: bool) -> tp.Iterator[Edit]:
        """The structure changes that are not replacements."""
        for number, (_, names, removed) in self._edits.items():
            if number not in self.backward:
                if not only_carry:
                    yield Edit(number, names, removed)
            elif self.origin[number] == self.backward[number]:
                left = self._left.get(number, ())
                if left or removed:
                    yield Edit(number, left, removed)

    def _match_edited(self) -> str | None:
        """Match, attribute by attribute, objects that stay and were edited."""
        self.in_edit = True
        while self._edited:
            number = self._edited.popleft()
            old = self.backward[number]
            _, names, _ = self._edits[number]
            before, after = self.before.node_defs[old], self.after.node_defs[number]
            olds = dict(zip(before.layout.data, self.children[0][old]))
            news = dict(zip(after.layout.data, self.children[1][number]))
            left = []
            for name in (*(n for n in olds if n not in names), *names):
                known = name in olds and name in news
                problem = self._match([(olds[name], news[name], False)]) if known else OTHER
                if problem is SHARED:
                    return SHARED
                if problem:
                    left.append(name)
            self._left[number] = tuple(left)
        return None

    def _match(self, pending: list[tuple[Code, Code, bool]]) -> str | None:
        """Match pairs of codes and what is below; a match that fails is undone."""
        attempt = _Attempt(pending)
        problem = None
        while attempt.pending and problem is None:
            old, new, inside = attempt.pending.pop()
            if isinstance(old, ContainerCode):
                if not isinstance(new, ContainerCode) or not new.definition.matches(old.definition):
                    problem = OTHER
                else:
                    attempt.pending.extend((a, b, inside) for a, b in zip(old.codes, new.codes))
            elif isinstance(old, ArrayCode) and isinstance(new, ArrayCode):
                problem = self._place(old.leaf, self.sources[new.leaf], attempt)
            elif isinstance(old, NodeCode) and isinstance(new, NodeCode):
                problem = self._match_nodes(old.number, new.number, inside, attempt)
            else:
                problem = OTHER
                if isinstance(old, StaticDef) and isinstance(new, StaticDef):
                    problem = None if alike(old.value, new.value) else OTHER
        if problem is None:
            self._edited.extend(attempt.edited)
            return None
        for old, new in attempt.nodes:
            del self.forward[old], self.backward[new]
        for leaf in attempt.leaves:
            del self.places[leaf]
        return problem

    def _match_nodes(self, old: int, new: int, inside: bool, attempt: _Attempt) -> str | None:
        """Match two nodes; what is below them becomes pending. Returns the problem."""
        if old in self.forward or new in self.backward:
            if self.forward.get(old) == new and self.backward.get(new) == old:
                return None
            return ELSEWHERE if self.origin[new] is not None else SHARED
        self.forward[old], self.backward[new] = new, old
        attempt.nodes.append((old, new))
        problem, stays = self._refusal(old, new, inside), self.origin[new] == old
        if problem is not None:
            return problem
        if not isinstance(self.before.node_defs[old], ObjectDef):
            leaf = self.before.node_leaves[old]
            return self._place(leaf, self.sources[self.after.node_leaves[new]], attempt)
        if stays and new in self._edits:
            attempt.edited.append(new)
        else:
            below = zip(self.children[0][old], self.children[1][new])
            attempt.pending.extend((a, b, inside or not stays) for a, b in below)
        return None

    def _refusal(self, old: int, new: int, inside: bool) -> str | None:
        """Why a node may not replace another one; None if it may."""
        origin = self.origin[new]
        if origin == old:
            return TAKEN_OVER if inside and not self.moves else None
        if origin is not None and not self.moves:
            return TAKEN_OVER if inside else ELSEWHERE
        kind, known = self.after.node_defs[new], self.before.node_defs[old]
        if kind is REF_LEAF or not (kind is known or (self.statics and _alike(known, kind))):
            return OTHER
        if isinstance(kind, ObjectDef):
            return None if self.new_objects or self.in_edit else OTHER
        return None if isinstance(kind, VariableDef) and not kind.is_ref else OTHER

    def _place(self, leaf: int, source: Source, attempt: _Attempt) -> str | None:
        """Record the source of the next value of a leaf; returns the problem."""
        if leaf not in self.places:
            both = {leaf, source.leaf} if isinstance(source, CameIn) else {leaf}
            if source != CameIn(leaf) and not all(map(self.is_carried, both)):
                return OTHER
            self.places[leaf] = source
            attempt.leaves.append(leaf)
        return None if self.places[leaf] == source else OTHER


def _alike(a: tp.Any, b: tp.Any) -> bool:
    """Whether two objects differ in static attributes alone."""
    both = isinstance(a, ObjectDef) and isinstance(b, ObjectDef)
    return both and a.type is b.type and a.layout.data == b.layout.data


def with_arrays(inner: Inner, out: Outputs) -> Outputs:
    """The outputs, with arrays of the arguments that are in the result as new arrays.

    Arrays have no identity: a result with an array that came in is the same as one with a copy.
    """
    definition, graph = out.definition, out.definition.graph
    if graph is None:
        return out
    decoded = graph.graphdef.decoded
    sources, fresh = list(graph.sources), list(out.fresh)
    for leaf, source in enumerate(sources):
        root = decoded.path(decoded.leaf_frames[leaf])[0]
        is_array = decoded.leaf_nodes[leaf] < 0
        if isinstance(source, CameIn) and is_array and root >= graph.first_result:
            sources[leaf] = Fresh(len(fresh))
            fresh.append(inner.values[source.leaf])
    new = dataclasses.replace(graph, sources=tuple(sources))
    return out._replace(definition=dataclasses.replace(definition, graph=new), fresh=fresh)
