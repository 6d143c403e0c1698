"""What leaves a transform: leaves, and static data that says what they are."""

from __future__ import annotations

import dataclasses
import typing as tp

import jax

from nnxlite._base.jax import PyTreeDef
from nnxlite._base.statics import ById
from nnxlite.boundary._call_def import CallDef, StaticLeaves, paths_of, static_leaves
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._rebuild import NodeCode, Path
from nnxlite.variables._definition import VariableDef


class Edit(tp.NamedTuple):
    """The structure changes of an object of the arguments.

    Attributes:
        node: its number in the graph that leaves.
        names: attributes to write.
        removed: attributes to remove.
    """

    node: int
    names: tuple[tp.Any, ...]
    removed: tuple[tp.Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CameIn:
    """A source: the value is that of a graph leaf of the arguments, or replaces it."""

    leaf: int

    def pick(self, of_arguments: tp.Any, of_fresh: tp.Any) -> tp.Any:
        """The entry for this value, of a list for graph leaves and one for new values."""
        return of_arguments[self.leaf]


@dataclasses.dataclass(frozen=True, slots=True)
class Fresh:
    """A source: the value did not come in, but is one of the outputs `fresh`."""

    number: int

    def pick(self, of_arguments: tp.Any, of_fresh: tp.Any) -> tp.Any:
        """The entry for this value, of a list for graph leaves and one for new values."""
        return of_fresh[self.number]


Source: tp.TypeAlias = CameIn | Fresh
"""Where the value of an output leaf comes from."""


@dataclasses.dataclass(frozen=True, eq=False)
class OutGraph:
    """The graph below the arguments and results as the function left it.

    Attributes:
        graphdef: its definition; the first roots are those of the arguments.
        origin: for each node the number it came in with, or None for a new one.
        sources: for each leaf where its value comes from.
        edits: objects of the arguments whose structure changed.
        first_result: number of the first root that belongs to the result.
        kinds: input Variables whose metadata changed: (input node, new definition).
        seen: the objects in the static values of the arguments that the trace saw; see `of_call`.
    """

    graphdef: GraphDef[tp.Any]
    origin: tuple[int | None, ...]
    sources: tuple[Source, ...]
    first_result: int
    edits: tuple[Edit, ...]
    kinds: tuple[tuple[int, VariableDef], ...]
    seen: tuple[ById, ...] = ()

    def _key(self) -> tp.Any:
        kinds = [(old, definition.shared) for old, definition in self.kinds]
        parts = (self.graphdef, self.origin, self.sources, self.first_result, self.edits)
        return (*parts, *kinds)

    def __eq__(self, other: tp.Any) -> bool:
        return self is other or (isinstance(other, OutGraph) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())

    def of_call(self, graphdef: GraphDef[tp.Any]) -> OutGraph:
        """The same for a call with this graph, which may have other, equal static values.

        A program runs for all calls of one structure.  Where the function put a settings object of its
        arguments into what it returned, each call gets its own.
        """
        mine = graphdef.atoms()
        instead = {
            id(seen.value): atom
            for seen, atom in zip(self.seen, mine)
            if seen.value is not None and seen.value is not atom
        }
        if not instead:
            return self
        swap = lambda definition: definition.swapped(instead)
        kinds = tuple((old, swap(definition)) for old, definition in self.kinds)
        return dataclasses.replace(self, graphdef=self.graphdef.mapped(swap), kinds=kinds)

    def fresh_leaves(self) -> dict[int, int]:
        """The leaf of each value that did not come in, by its number."""
        return {s.number: leaf for leaf, s in enumerate(self.sources) if isinstance(s, Fresh)}


@dataclasses.dataclass(frozen=True, eq=False)
class OutDef:
    """The static side of what leaves a transform.

    Attributes:
        written: numbers of the input leaves (Variables, and arrays outside Variables) whose values are
            outputs, in order.
        treedef: of a result with graph nodes; None for any other, which crosses as it is.
        where: positions of the roots among the leaves of the result.
        nodes: without structure changes, each root of the result, among the nodes that came in.
        graph: the structure changes, or None.
        static: the structure of all outputs, and the static leaves among them; None if all are arrays.
    """

    written: tuple[int, ...]
    treedef: PyTreeDef | None
    where: tuple[int, ...]
    nodes: tuple[NodeCode, ...]
    graph: OutGraph | None
    static: tuple[PyTreeDef, StaticLeaves] | None = None

    def __eq__(self, other: tp.Any) -> bool:
        if not isinstance(other, OutDef) or (self.treedef is None) != (other.treedef is None):
            return False  # treedefs do not compare with None
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tp.Any:
        return self.written, self.where, self.nodes, self.graph, self.treedef, self.static


def output_roots(call: CallDef, definition: OutDef) -> list[Path]:
    """The paths of the roots of what leaves: of the arguments, then those of the result."""
    roots = call.root_paths()
    if definition.treedef is not None:
        of_result = paths_of(definition.treedef)
        roots += [("result", *of_result[position]) for position in definition.where]
    return roots


def came_from(call: CallDef, graph: OutGraph, root: int) -> Path:
    """The number of a root of the arguments, and a path: where an object was that left on its own."""
    code = tp.cast(NodeCode, graph.graphdef.decoded.roots[root])
    decoded = call.graphdef.decoded
    return decoded.path(decoded.node_frames[tp.cast(int, graph.origin[code.number])])


def output_paths(call: CallDef, definition: OutDef, treedef: PyTreeDef) -> list[Path]:
    """The path of each output: array leaves of the result, written leaves, new values.

    Args:
        call, definition: the arguments, and what leaves.
        treedef: of the result, with roots as leaves.
    """
    of_result = enumerate(paths_of(treedef))
    paths = [("result", *path) for i, path in of_result if i not in definition.where]
    came_in, graph = call.graph_leaves(), definition.graph
    paths += [came_in[leaf].path for leaf in definition.written]
    if graph is None:
        return paths
    decoded, leaves = graph.graphdef.decoded, graph.fresh_leaves()
    roots = output_roots(call, definition)
    for number in sorted(leaves):
        root, *path = decoded.path(decoded.leaf_frames[leaves[number]])
        if root >= len(roots):
            root, *above = came_from(call, graph, root)
            path = [*above, *path]
        paths.append((*roots[root], *path))
    return paths


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A static value as a pytree without leaves: how an `OutDef` crosses a JAX transform."""

    value: tp.Any


# It is its own static data: nothing is made when a program returns (`register_dataclass`: 1.5 us more).
jax.tree_util.register_pytree_node(Fixed, lambda fixed: ((), fixed), lambda fixed, _: fixed)


class Outputs(tp.NamedTuple):
    """What leaves a transform.

    Attributes:
        definition: the static side.
        result: the result itself, or its array leaves where it has graph nodes.
        written: new values of input Variables, in the order of `definition.written`.
        fresh: values of leaves that did not come in.
    """

    definition: OutDef
    result: tp.Any
    written: list[tp.Any]
    fresh: list[tp.Any]

    @property
    def treedef(self) -> PyTreeDef:
        """Of the result, with roots as leaves."""
        return self.definition.treedef or jax.tree_util.tree_structure(self.result)

    def values(self) -> list[tp.Any]:
        """The value of each output, in the order of `output_paths`."""
        return [*jax.tree_util.tree_leaves(self.result), *self.written, *self.fresh]

    def crossing(self, is_array: tp.Callable[[tp.Any], bool] | None = None) -> Crossing:
        """The outputs as they cross a JAX transform: a static node, and trees of leaves.

        Leaves that are not arrays are part of the static node, where `is_array` decides about them;
        without it all leaves are arrays, or JAX refuses them.
        """
        definition, result, written, fresh = self
        if is_array is not None:
            leaves, treedef = jax.tree_util.tree_flatten((result, written, fresh))
            static = static_leaves(leaves, [not is_array(leaf) for leaf in leaves])
            if static is not None:
                definition = dataclasses.replace(definition, static=(treedef, static))
                result, written, fresh = static.split(leaves), [], []
        return Fixed(definition), result, written, fresh


Crossing = tuple[Fixed, tp.Any, list[tp.Any], list[tp.Any]]
"""What leaves a transform: definition, result, written values, fresh values.

Where some leaves are static, the arrays of all three are in the place of the result.
"""


def outputs_of(crossing: Crossing) -> Outputs:
    """The inverse of `Outputs.crossing`."""
    fixed, *parts = crossing
    if fixed.value.static is not None:
        treedef, static = fixed.value.static
        parts = jax.tree_util.tree_unflatten(treedef, static.join(parts[0]))
    return Outputs(fixed.value, *parts)
