"""Plans: walk once, then read leaves straight from the objects.

A `Plan` is a cached traversal: the interned `GraphDef`, weak references to the nodes, and their
versions.  It is valid while no node in it has changed structure: if the epoch of the process is the
same, that is certain; if it is another, the versions and definitions of the nodes decide.  Plain
containers and mutable static values have no version; their content is compared each time.  Where
static values alone have changed, a new plan is derived from the old one.

A plan is owned by its first root (slot `_nnx_plans`), and refers to everything weakly: it dies with
the root and keeps nothing alive.  Values are read and written through weak references to the boxes of
the Variables, which takes half as long as through the Variables themselves.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
import typing as tp
import weakref

from nnxlite._base.errors import GRAPH_MODE, path_text
from nnxlite._base.interning import Bounded, epoch, observe
from nnxlite.graph._defs import ContainerDef, ObjectDef, StaticDef, define_container
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._kinds import GraphNode, Kind, Leaves, flatten_container, is_static_item, kind_of
from nnxlite.graph._rebuild import ArrayCode, Code, NodeCode, Path, Traversal, traverse
from nnxlite.variables._definition import VariableDef
from nnxlite.variables._variable import Variable, store_together, versioned

PLANS_PER_ROOT = 8
"""How many plans one root caches, each for the other roots in a call."""

CALLS_PER_PLAN = 64
# CallDefs are interned weakly. A plan keeps those of its calls alive, and looks them up without hashing
# a whole definition (bench `dispatch`, steps of 72 arrays).


_ROOT: tp.Any = object()


class _Never:
    """Stands for a node without a version: an array reference, whose structure never changes."""

    _nnx_version = 0


_NEVER = _Never()


class Stale(Exception):
    """A plan no longer describes its objects."""


class Plan:
    """A cached traversal of some roots.

    Attributes:
        graphdef: the definition of the graph.
        refs: weak references to the nodes, by number.
        leaf_refs: weak references to the Variables and array references, in leaf order; None where
            an array has no Variable.
        trees: what is a leaf in plain containers; see `traverse`.
    """

    def __init__(
        self,
        roots: tuple[tp.Any, ...],
        traversal: Traversal,
        graphdef: GraphDef[tp.Any],
        start: int,
        trees: int,
    ) -> None:
        self.trees = trees
        ref = weakref.ref
        self.graphdef = graphdef
        self.epoch = start
        self.calls: Bounded[tp.Any, tp.Any] = Bounded(CALLS_PER_PLAN)
        self.refs: list[tp.Any] = list(map(ref, traversal.nodes))
        self.versions = traversal.versions
        self.roots: list[tp.Any] = list(map(ref, roots))
        self.states: list[tp.Any] = [(ref(state), version) for state, version in traversal.states]
        self.mutable = [
            (ref(versioned(traversal.nodes[number])), form) for number, form in traversal.mutable
        ]

    @functools.cached_property
    def carriers(self) -> list[tp.Any]:
        """Weak references to what carries the version of each node: Variables have a box for it.

        Raises Stale where a node is gone.
        """
        pairs = zip(self.nodes(), self.versions)
        try:
            return [weakref.ref(versioned(node) if version else _NEVER) for node, version in pairs]
        except TypeError:  # None
            raise Stale from None

    @functools.cached_property
    def boxes(self) -> list[tp.Any] | None:
        """Weak references to the boxes of the leaves, where all of these are Variables with arrays.

        Raises Stale where a node is gone.
        """
        decoded = self.graphdef.decoded
        if decoded.has_arrays or decoded.has_refs:
            return None
        return [self.carriers[node] for node in decoded.leaf_nodes]

    @functools.cached_property
    def leaf_refs(self) -> list[tp.Any]:
        """Weak references to Variables and array references in leaf order; None for other arrays."""
        return [self.refs[n] if n >= 0 else None for n in self.graphdef.decoded.leaf_nodes]

    @functools.cached_property
    def bare(self) -> list[tuple[int, tp.Any, tp.Any]]:
        """The arrays in attributes: number of the leaf, object, name."""
        slots = self.graphdef.decoded.raw_slots
        return sorted((c.leaf, self.refs[o], name) for o, name, c in slots if type(c) is ArrayCode)

    @functools.cached_property
    def containers(self) -> list[tuple[tp.Any, tp.Any, Code]]:
        """The containers that must be compared in each call: owner, name, code."""
        slots = [slot for slot in self.graphdef.decoded.raw_slots if type(slot[2]) is not ArrayCode]
        return [
            (self.refs[o], name, c) if o >= 0 else (self.roots[name], _ROOT, c)
            for o, name, c in slots
        ]

    @functools.cached_property
    def trace(self) -> tp.Any:
        """The trace that all nodes belong to, or None where they differ."""
        traces = {id(t): t for t in map(_trace_of, self.nodes())}
        return traces.popitem()[1] if len(traces) == 1 else None

    def is_of(self, roots: tp.Sequence[tp.Any]) -> bool:
        """Whether the plan was made of these very roots."""
        for ref, root in zip(self.roots, roots):
            if ref() is not root:
                return False
        return True

    def changes(self) -> dict[int, tuple[tp.Any, int]] | None:
        """The nodes with another definition than in this plan, by number, and their versions.

        None where another walk is needed. Plain containers are not compared.
        """
        start = epoch.now
        seen: set[int] = set()
        for ref, form in self.mutable:
            owner = ref()
            if owner is None:
                return None
            if type(form) is ObjectDef:
                if not form.is_of(owner, seen):
                    return None
            elif owner.definition is not form or tp.cast(VariableDef, form).current() is not form:
                return None
        if self.epoch == start:
            return {}
        decoded, changed = self.graphdef.decoded, dict[int, tuple[tp.Any, int]]()
        try:  # in this order: an edit writes a definition first, and then the version
            states = [ref()._nnx_version for ref, _ in self.states]
            versions = [ref()._nnx_version for ref in self.carriers]
            forms = [self.carriers[number]()._nnx_def for number in decoded.children]
        except (AttributeError, Stale):  # something is gone
            return None
        if states != [version for _, version in self.states]:
            return None
        if versions != self.versions:
            pairs = zip(versions, self.versions)
            for number in [n for n, (now, before) in enumerate(pairs) if now != before]:
                box = self.carriers[number]()
                if number in decoded.children or box is None:
                    return None
                version = observe(box)  # before the definition is read
                changed[number] = box.definition, version
        if forms != decoded.object_defs:
            for number, form, now in zip(decoded.children, decoded.object_defs, forms):
                if now is not form and not form.mutable:
                    changed[number] = now, versions[number]
        if not changed:
            self.epoch = start
        return changed

    def renewed(self, changed: dict[int, tuple[tp.Any, int]]) -> Plan | None:
        """A plan of the same roots with what `changes` gave; None where it takes another walk.

        Switching a model between training and evaluation is such a change, and happens in every
        epoch; a walk would take several times as long.
        """
        versions, tokens = [*self.versions], [*self.graphdef.tokens]
        decoded = self.graphdef.decoded
        for number, (new, version) in changed.items():
            old = decoded.node_defs[number]
            if new is None or new.mutable:
                return None
            if type(new) is ObjectDef and new.names is not old.names:
                return None
            versions[number], tokens[decoded.node_tokens[number]] = version, new
        plan = copy.copy(self)
        plan.graphdef = GraphDef(tokens, self.graphdef.num_roots)
        plan.calls = Bounded(CALLS_PER_PLAN)
        plan.versions, plan.epoch = versions, -1
        return plan

    def nodes(self) -> list[tp.Any]:
        """The nodes, by number."""
        return [ref() for ref in self.refs]

    def leaves(self) -> list[tp.Any]:
        """Variables, references and arrays in leaf order.

        Raises Stale when a plain container has changed, or a leaf is gone.
        """
        inside = self._contained()
        leaves = [None if ref is None else ref() for ref in self.leaf_refs]
        for number, owner, name in self.bare:
            leaves[number] = owner()._nnx_dict[name]
        for number, array in inside.items():
            leaves[number] = array
        if not all(map(operator.is_not, leaves, itertools.repeat(None))):
            raise Stale
        return leaves

    def values(self) -> list[tp.Any]:
        """The raw values in leaf order, Variables opened.

        Raises Stale as `leaves` does.
        """
        boxes = self.boxes
        if boxes is None:
            if len(self.bare) == len(self.leaf_refs):  # a frozen model: see the bench `filtered`
                return [owner()._nnx_dict[name] for _, owner, name in self.bare]
            return [x._box.value if isinstance(x, Variable) else x for x in self.leaves()]
        if self.containers:
            self._contained()
        try:
            return [box().value for box in boxes]
        except AttributeError:  # replaced in the `__dict__` of its owner, and gone
            raise Stale from None

    def write(self, at: tp.Sequence[int], new: tp.Sequence[tp.Any]) -> bool:
        """Write the values of some leaves; False, with nothing done, where not all are Variables."""
        boxes = self.boxes
        if boxes is None:
            return False
        try:
            for leaf, value in zip(at, new):
                box = boxes[leaf]()
                if box is not None:  # else nobody has the Variable any more
                    box.value = value
        except BaseException:  # an interrupt: write all, since some is written
            pairs = [(boxes[leaf](), value) for leaf, value in zip(at, new)]
            store_together([pair for pair in pairs if pair[0] is not None])
            raise
        return True

    def _contained(self) -> dict[int, tp.Any]:
        """The arrays in plain containers, by leaf number.

        Raises Stale where a container has changed from what its code says.
        """
        pending: list[tuple[tp.Any, Code, int]] = []
        for owner, name, code in self.containers:
            node = owner()
            if node is None:
                raise Stale
            if name is _ROOT:
                pending.append((node, code, Leaves.EVERY))
            else:
                frozen = getattr(node, "_nnx_frozen", False)
                loose = self.trees or (Leaves.NUMBERS if frozen else Leaves.STRICT)
                pending.append((node._nnx_dict[name], code, loose))
        out: dict[int, tp.Any] = {}
        while pending:
            value, code, loose = pending.pop()
            if isinstance(code, ArrayCode):
                if not _is_leaf(value, loose):
                    raise Stale
                out[code.leaf] = value
            elif isinstance(code, NodeCode):
                if self.refs[code.number]() is not value:
                    raise Stale
            elif isinstance(code, StaticDef):
                if not code.is_of(value):
                    raise Stale
            else:
                children = _children_as(value, code.definition)
                pending += [(c, child, loose) for c, child in zip(children, code.codes)]
        return out


def _children_as(value: tp.Any, form: ContainerDef) -> tp.Iterable[tp.Any]:
    """The children of a container; raises Stale where it is not of this form any more."""
    children = value
    try:
        same = type(value) is form.type
        if not same or (form.treedef is None and len(value) != len(form.keys)):
            raise Stale
        if form.kind in (Kind.DICT, Kind.STATE):
            children = [value[key] for key in form.keys]
        elif form.treedef is not None:
            _, children, treedef = flatten_container(value, form.kind)
            same = treedef == form.treedef
    except (KeyError, ValueError):  # another key, a static part that cannot be compared
        raise Stale from None
    own = form.public is not None
    if not same or (own and not define_container(value, form.kind)[0].matches(form)):
        raise Stale
    return form.in_order(children)


def _is_leaf(value: tp.Any, loose: int) -> bool:
    """Whether a root, or a child of a container, is a leaf."""
    kind = kind_of(value)
    if kind != Kind.OTHER:
        return kind == Kind.ARRAY
    return value is not None and not is_static_item(value, loose)


def _trace_of(node: tp.Any) -> tp.Any:
    if isinstance(node, Variable):
        return node._box.trace
    return getattr(node, "_nnx_trace", None)


_set_plans = GraphNode.__dict__["_nnx_plans"].__set__


Plans: tp.TypeAlias = Bounded[tuple[int, ...], tuple[Plan, Plan | None]]
"""The plans of a root. Key: the ids of all roots of the plan, and what is a leaf in plain containers.

With each is the one that was valid before, since a model that alternates between two modes has two.
Invalidated by versions and definitions; bound: PLANS_PER_ROOT. The former plan is earned by training
with an evaluation after every ten steps (bench `loops`): 15 %.
"""


class View(tp.NamedTuple):
    """The present state of some roots: definition, nodes by number, leaves in order.

    `nested` is the State of each root by number, where the roots have just been walked; it belongs
    to the caller.
    """

    graphdef: GraphDef[tp.Any]
    nodes: tp.Callable[[], list[tp.Any]]
    leaves: list[tp.Any]
    plan: Plan | None
    nested: dict[tp.Any, tp.Any] | None = None


def view(*roots: tp.Any, trees: int = Leaves.STRICT, open_roots: bool = False) -> View:
    """Definition, nodes and leaves of some roots, from a plan where there is one.

    See `traverse` for the options.
    """
    plan = find_plan(roots, trees)
    if plan is not None:
        try:
            return View(plan.graphdef, plan.nodes, plan.leaves(), plan)
        except Stale:
            pass
    start = epoch.now
    traversal = traverse(roots, trees=trees, open_roots=open_roots)
    graphdef: GraphDef[tp.Any] = GraphDef(traversal.tokens, len(roots))
    plan = None
    if traversal.exact and isinstance(roots[0], GraphNode):
        with contextlib.suppress(TypeError):  # something that cannot be referred to weakly
            plan = Plan(roots, traversal, graphdef, start, trees)
            plans = roots[0]._nnx_plans
            if plans is None:
                _set_plans(roots[0], plans := Bounded(PLANS_PER_ROOT))
            plans[(*map(id, roots), int(trees))] = plan, None
    return View(graphdef, lambda: traversal.nodes, traversal.leaves, plan, traversal.nested)


def nodes_by_number(root: tp.Any) -> tuple[GraphDef[tp.Any], tp.Callable[[int], tp.Any]]:
    """The definition of a root, and its nodes by number, None for one that is gone.

    Unlike a view it does not read the leaves, which after a training step have left the
    processor's cache: reading them takes ten times as long as the rest of a change of mode.
    """
    plan = find_plan((root,))
    if plan is not None and not plan.containers:
        return plan.graphdef, lambda number: plan.refs[number]()
    seen = view(root)
    return seen.graphdef, seen.nodes().__getitem__


def find_plan(roots: tp.Sequence[tp.Any], trees: int = Leaves.STRICT) -> Plan | None:
    """The plan of some roots, if there is one and it is still valid.

    Does not check plain containers: `Plan.leaves` and `Plan.values` do.
    """
    first = roots[0]
    plans = first._nnx_plans if isinstance(first, GraphNode) else None
    if plans is None:
        return None
    key = (*map(id, roots), int(trees))
    known = plans.get(key)
    if known is None and trees:
        known = plans.get(key := (*key[:-1], Leaves.STRICT))
        if known is not None and known[0].graphdef.has_static_items:
            return None
    if known is None or not known[0].is_of(roots):
        return None
    plan, before = known
    changed = plan.changes()
    if changed is not None and not changed:
        return plan
    if before is not None and before.changes() == {}:
        now = before
    else:
        now = plan.renewed(changed) if changed and not plan.mutable else None
    if now is not None:
        plans[key] = now, plan
    return now


def usual_plan(root: tp.Any) -> Plan | None:
    """The plan of an object; None for its first use, and for everything else.

    For operations that need no plan: making one pays from the second time on (`update` in the bench
    `functional`, first and later times).
    """
    if not isinstance(root, GraphNode):
        return None
    if root._nnx_plans is None:
        _set_plans(root, Bounded(PLANS_PER_ROOT))
        return None
    return find_plan((root,)) or view(root).plan


def checked_view(node: tp.Any, graph: bool | None, caller: str) -> View:
    """A view of one root; with `graph=False` it is one of a tree, and sharing is refused.

    Raises ValueError naming the paths of a shared node when `graph` is False.
    """
    if GRAPH_MODE.given(graph):
        return view(node)
    seen = view(node, trees=True)
    refuse_sharing(seen.graphdef, caller)
    return seen


def refuse_sharing(
    graphdef: GraphDef[tp.Any],
    caller: str,
    roots: tp.Callable[[], tp.Sequence[Path]] | None = None,
    owner: str = "",
    arrays: bool = True,
) -> None:
    """Raise ValueError when a definition refers to a node with state twice.

    Args:
        graphdef: the definition.
        caller: the function that refuses it.
        roots: gives the paths of its roots.
        owner: words for what has these paths.
        arrays: whether arrays outside Variables count as state.
    """
    shared = graphdef.shared(arrays)
    if shared is None:
        return
    definition = graphdef.decoded.node_defs[shared]
    name = definition.type.__name__ if hasattr(definition, "type") else "array reference"
    if roots is None:
        starts = [(n,) for n in range(graphdef.num_roots)] if graphdef.num_roots > 1 else [()]
        mode = "Tree mode (graph=False) does not support shared references"
    else:
        starts = roots()
        mode = f"nnxlite.{caller} with graph=False does not support Variable aliasing"
    paths = [path for path, code in graphdef.decoded.visit() if code == NodeCode(shared)]
    shown = ", ".join(repr(path_text((*starts[root], *below))) for root, *below in paths)
    raise ValueError(
        f"Duplicate {name} found at paths{owner}: {shown}. {mode}: objects must form a tree. Remove "
        f"the sharing, or pass graph=True to nnxlite.{caller}."
    )
