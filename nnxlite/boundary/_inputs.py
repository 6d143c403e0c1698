"""Entering a transform: arguments to leaves, and back to new objects inside.

The arguments are flattened as JAX would, except that graph objects, Variables and States are not
opened: they are the *roots* of one graph with one numbering, so that an object in two
arguments is one object inside.  What crosses is

* `arrays`: the leaves of the argument pytrees that are not part of the graph, in order,
* `values`: the raw values of the graph's leaves, in leaf order,
* a `CallDef`: everything static, interned, so that equal calls are one key for JAX's caches.
"""

from __future__ import annotations

import operator
import typing as tp

import jax

from nnxlite._base.interning import Bounded
from nnxlite._base.jax import PyTreeDef
from nnxlite.boundary._call_def import (
    FLAT,
    ArgumentLeaf,
    CallDef,
    Names,
    OwnCall,
    StaticArgument,
    StaticLeaves,
    call_def,
    put,
    static_leaves,
)
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._kinds import GraphNode, Kind, classify, kind_by_type, kind_of
from nnxlite.graph._plan import Stale, View, find_plan, refuse_sharing, view
from nnxlite.graph._rebuild import Code, Decoded, NodeCode, Path
from nnxlite.variables._variable import Variable

_ROOTS = frozenset({Kind.OBJECT, Kind.VARIABLE, Kind.STATE, Kind.CUSTOM, Kind.REF})


def is_root(value: tp.Any) -> bool:
    """Whether a value enters a transform as (part of) a graph."""
    kind = kind_by_type.get(type(value))
    return (classify(value) if kind is None else kind) in _ROOTS


class Inputs:
    """Arguments on their way into a transform.

    A transform of objects takes `leaves` as they are: each Variable is one, and all must be arrays. One
    of any pytrees (`filter_jit` and its kin) asks with `inside=True` for what a user of trees calls a
    leaf: those inside the value of a Variable, too, and of any type. It then either captures those that
    it does not trace (as `filter_grad` does), or, where it has a program to find again, makes them part
    of the key. From then on `leaves` are the others, and `enter` adds these:

    >>> import jax.numpy as jnp
    >>> from nnxlite.boundary._call_def import enter
    >>> from nnxlite.boundary._inputs import Inputs
    >>> inputs = Inputs((jnp.ones(2), "relu", 3), inside=True)
    >>> inputs.make_static([not isinstance(x, jnp.ndarray) for x in inputs.leaves], "f")
    >>> call = inputs.define()
    >>> [leaf.text() for leaf in call.leaves()], call.static.values
    (['0'], ['relu', 3])
    >>> enter(call, ["traced"])[0]
    ('traced', 'relu', 3)

    Attributes:
        treedef, where: see `CallDef`.
        arrays: the leaves that are not part of the graph.
        values: the raw values of the graph's leaves.
        graphdef: the graph below the roots.
        plan: the plan behind it, if there is one.
        nodes: gives the caller's own objects and Variables, by node number.
        trees, names, structure, static: see `CallDef`.
    """

    def __init__(
        self,
        tree: tp.Any,
        trees: bool = False,
        names: Names = None,
        inside: bool = False,
        flat: tuple[tp.Sequence[tp.Any], CallForm] | None = None,
    ) -> None:
        """The leaves of a tree; see `CallDef`. `flat` is what is known of the tree: leaves and form."""
        if flat is None:
            leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_root)
            flat = leaves, (treedef, *positions(leaves))
        leaves, (self.treedef, self.where, others) = flat
        self.names = names
        self.roots = tuple(map(leaves.__getitem__, self.where))
        self.arrays = [*map(leaves.__getitem__, others)]
        self._read_graph(trees, inside)

    @classmethod
    def of_call(
        cls,
        args: tuple[tp.Any, ...],
        kwargs: dict[str, tp.Any],
        names: Names,
        trees: bool = False,
        inside: bool = False,
    ) -> Inputs:
        """`Inputs((args, kwargs), trees, names, inside)`, faster where no argument is a container."""
        if kwargs:
            keywords = sorted(kwargs)
            leaves = (*args, *[kwargs[name] for name in keywords])
            key = (len(args), *keywords, *map(type, leaves))
        else:
            leaves = args
            key = tuple(map(type, args))
        form = _forms.get(key) or _form_of(key, args, kwargs, leaves)
        return cls((args, kwargs), trees, names, inside, form and (leaves, form))

    def _read_graph(self, trees: bool, inside: bool = False) -> None:
        self.trees, self.structure, self.static = trees, FLAT, None
        roots = self.roots
        if not roots:
            self.graphdef, self.values, self.plan = _EMPTY, [], None
            self.nodes: tp.Callable[[], list[tp.Any]] = list
            return
        plan = find_plan(roots, trees)
        try:
            if plan is None:
                raise Stale
            self.values = plan.values()
            self.graphdef, self.plan, self.nodes = plan.graphdef, plan, plan.nodes
        except Stale:
            seen: View = view(*roots, trees=trees, open_roots=True)
            self.graphdef, self.nodes, self.plan = seen.graphdef, seen.nodes, seen.plan
            self.values = [x._box.value if isinstance(x, Variable) else x for x in seen.leaves]
        # Most values are arrays: asking each class once takes a fifth of the time (bench `filtered`).
        if inside and not all(issubclass(kind, jax.Array) for kind in {*map(type, self.values)}):
            leaves, structure = jax.tree_util.tree_flatten(self.values)
            if len(leaves) != len(self.values) or any(map(operator.is_not, leaves, self.values)):
                self.structure = structure

    def in_mode(self, graph: bool, caller: str) -> Inputs:
        """These inputs, their roots taken as trees where `graph` is False.

        Args:
            graph: whether sharing is allowed.
            caller: the transform.

        Raises ValueError naming the paths of a shared node.
        """
        if not graph:
            self.trees = True
            if self.graphdef.has_static_items:
                self._read_graph(True, self.structure is not FLAT)
            roots = None if self.names is None else lambda: self.define().root_paths()
            refuse_sharing(self.graphdef, caller, roots)
        return self

    @property
    def leaves(self) -> list[tp.Any]:
        """The leaves that cross, in the order of `CallDef.leaves`."""
        values = self.values
        if self.structure is not FLAT:
            values = jax.tree_util.tree_leaves(values)
        leaves = [*self.arrays, *values]
        return leaves if self.static is None else self.static.split(leaves)

    def make_static(self, chosen: tp.Iterable[tp.Any], what: object = None) -> None:
        """Make the leaves for which `chosen` is true part of the key, instead of leaves that cross.

        Args:
            chosen: something for each leaf.
            what: the function of the key, for messages; without it, unhashable leaves count by identity.

        Raises ValueError naming the path of a leaf that is unhashable.
        """
        leaves = self.leaves

        def refuse(number: int) -> ValueError:
            path = self.definition.leaves()[number].text()
            return ValueError(
                f"{what!r}: the static leaf at '{path}' of the arguments is unhashable: it is of "
                f"type '{type(leaves[number]).__name__}'. Static leaves are part of the key of a "
                "compiled program. Pass a hashable value, such as a tuple or frozenset, or an array."
            )

        self.static = static_leaves(leaves, chosen, None if what is None else refuse)

    def unbox(self) -> None:
        """Make the static arguments, which are boxed, part of the key."""
        boxes = {n: leaf for n, leaf in enumerate(self.arrays) if type(leaf) is StaticArgument}
        if boxes:
            values, keys, exact = zip(*[(box.value, box.key, box.exact) for box in boxes.values()])
            put(self.arrays, boxes, values)
            self.static = StaticLeaves(tuple(boxes), values, keys, all(exact))

    def variables(self) -> list[tp.Any]:
        """What Variable filters see of each leaf: the Variable that contains it, or the leaf itself."""
        nodes, of_leaves = self.nodes(), self.graphdef.decoded.leaf_nodes
        seen = [nodes[n] if n >= 0 else value for n, value in zip(of_leaves, self.values)]
        if self.structure is not FLAT:
            seen = [seen[number] for number, _ in self.definition.value_leaves()]
        leaves = [*self.arrays, *seen]
        return leaves if self.static is None else self.static.split(leaves)

    @property
    def definition(self) -> CallDef:
        """What `define_always` gives without anything else in the key."""
        return self.define_always()

    def define_always(self, extra: tp.Any = None) -> CallDef:
        """Like `define(extra)`, but never refused: unhashable static data of a tree are its own."""
        try:
            return self.define(extra)
        except TypeError:
            return OwnCall(None, *self._key(extra))

    def define(self, extra: tp.Any = None) -> CallDef:
        """The CallDef of these arguments.

        Args:
            extra: what else the transform adds to the key.

        Raises TypeError where that, or static data of the tree, is unhashable.
        """
        plan = self.plan
        if plan is None:
            return call_def(*self._key(extra))
        key = (self.treedef, self.where, extra, self.trees, self.names, self.structure, self.static)
        known = plan.calls.get(key)
        if known is None:
            known = call_def(*self._key(extra))
            if not known.shared.own_tree and (self.static is None or self.static.exact):
                plan.calls[key] = known
        return known

    def _key(self, extra: tp.Any) -> tp.Any:
        """The parts of a CallDef, in their order."""
        for node in self.nodes():
            if isinstance(node, GraphNode):
                node._nnx_sort()
        more = (extra, self.trees, self.names, self.structure, self.static)
        return (self.treedef, self.where, self.graphdef, *more)


_OPENED = frozenset({Kind.LIST, Kind.TUPLE, Kind.DICT, Kind.PYTREE})

CallForm = tuple[PyTreeDef, tuple[int, ...], tuple[int, ...]]
"""The treedef of some arguments, and the positions of the roots and of the other leaves."""

_forms: Bounded[tp.Any, CallForm] = Bounded(1024)
# Key: the types of the arguments, none of them a container, and the names of keywords. Nothing to
# invalidate: only types whose kind is final are cached. Threads: each entry is a single write of a dict.
# Earned by decoding (`loops`) and by a step that reads 200 arrays (`dispatch`): 5 % of a call each.

_EMPTY: GraphDef[tp.Any] = GraphDef((), 0)


def positions(leaves: tp.Sequence[tp.Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of the roots and of the ordinary leaves."""
    roots: list[int] = []
    others: list[int] = []
    kinds = kind_by_type
    for position, leaf in enumerate(leaves):
        kind = kinds.get(type(leaf))
        (roots if (classify(leaf) if kind is None else kind) in _ROOTS else others).append(position)
    return tuple(roots), tuple(others)


def _form_of(
    key: tp.Any, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any], leaves: tuple[tp.Any, ...]
) -> CallForm | None:
    """The form of some arguments; None where one is a container.

    It is cached under the types of the arguments, where the kind of each type is final.
    """
    if any(leaf is None or kind_of(leaf) in _OPENED for leaf in leaves):
        return None
    treedef = jax.tree_util.tree_structure(((0,) * len(args), dict.fromkeys(kwargs, 0)))
    form = treedef, *positions(leaves)
    if all(type(leaf) in kind_by_type for leaf in leaves):
        _forms[key] = form
    return form


def further_leaves(call: CallDef) -> list[tuple[int, ArgumentLeaf]]:
    """The further paths of the leaves that have several, each with the number of the leaf."""
    return call.cache.get_or_make("further", lambda: _further_leaves(call))


def _further_leaves(call: CallDef) -> list[tuple[int, ArgumentLeaf]]:
    numbers: dict[int | None, list[tuple[int, Path]]] = {}
    for number, leaf in enumerate(call.leaves()):
        numbers.setdefault(leaf.graph_leaf, []).append((number, leaf.inside))
    decoded, paths, seen = call.graphdef.decoded, call.paths(), set[Code]()
    further: list[tuple[int, ArgumentLeaf]] = []
    for (root, *path), code in decoded.visit():
        for graph_leaf, tail in leaves_of_code(decoded, code) if code in seen else ():
            position, below = call.where[root], (*path, *tail)
            for number, inside in numbers.get(graph_leaf, ()):
                at = (*paths[position], *below, *inside)
                leaf = ArgumentLeaf(position, root, below, at, graph_leaf, inside)
                further.append((number, leaf))
        if isinstance(code, NodeCode):
            seen.add(code)
    return further


def leaves_of_code(decoded: Decoded, code: Code) -> list[tuple[int, Path]]:
    """The leaves at or below what a code describes, each with its path from there, the last one first.

    Messages name the first that is wrong, so in most models a kernel and not a bias.
    """
    pairs = [(decoded.leaf_of(below), path) for path, below in decoded.visit(code)]
    return [(leaf, path) for leaf, path in reversed(pairs) if leaf >= 0]
