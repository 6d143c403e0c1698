"""What leaves a transform: leaves, and static data that says what they are."""

from __future__ import annotations

import dataclasses
import functools
import typing as tp

import jax

from nnxlite._base.jax import PyTreeDef
from nnxlite._base.statics import ById
from nnxlite.boundary._call_def import CallDef, StaticLeaves, paths_of, static_leaves, template_of
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._rebuild import Code, NodeCode, Path
from nnxlite.variables._definition import VariableDef


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A static value as a pytree without leaves."""

    value: tp.Any


# It is its own static data: nothing is made when a program returns (`register_dataclass`: 1.5 us more).
jax.tree_util.register_pytree_node(Fixed, lambda fixed: ((), fixed), lambda fixed, _: fixed)


Source: tp.TypeAlias = int
"""Where an output leaf has its value from: the graph leaf of the arguments with this number, or, if it
is negative, the new value number `~source`."""

Edit: tp.TypeAlias = tuple[int, tuple[tp.Any, ...], tuple[tp.Any, ...]]
"""The structure changes of an object of the arguments: its number in the graph that leaves, the
attributes to write, and those to remove."""


def pick(source: Source, of_arguments: tp.Any, of_new: tp.Any) -> tp.Any:
    """The entry for a value, of a list for the graph leaves of the arguments and one for new values."""
    return of_arguments[source] if source >= 0 else of_new[~source]


@dataclasses.dataclass(frozen=True, eq=False)
class OutDef:
    """The static side of what leaves a transform.

    Attributes:
        treedef, where: of the result, with roots as leaves, and the positions of these.
        roots: each root of the result, in the graph.
        written: numbers of the input leaves (Variables, and arrays outside Variables) whose values are
            outputs, in order.
        graphdef: the graph below arguments and result as the function left it; that of the arguments,
            where only values changed.
        origin: for each node the number it came in with, or None for a new one.
        sources: for each leaf where its value comes from.
        first_result: how many roots of the graph belong to the arguments; they are the first.
        edits: objects of the arguments whose structure changed.
        kinds: input Variables whose metadata changed: (input node, new definition).
        seen: the objects in the static values of the arguments that the trace saw; see `of_call`.
        static: the structure of all outputs, and the static leaves among them; None if all are arrays.
    """

    treedef: PyTreeDef
    where: tuple[int, ...]
    roots: tuple[Code, ...]
    graphdef: GraphDef[tp.Any]
    origin: tp.Sequence[int | None]
    sources: tp.Sequence[Source]
    first_result: int
    written: tuple[int, ...] = ()
    edits: tuple[Edit, ...] = ()
    kinds: tuple[tuple[int, VariableDef], ...] = ()
    seen: tuple[ById, ...] = ()
    static: tuple[PyTreeDef, StaticLeaves] | None = None

    def _key(self) -> tp.Any:
        kinds = [(old, definition.shared) for old, definition in self.kinds]
        values = vars(self)
        return (*[values[f.name] for f in _FIELDS], *kinds)

    def __eq__(self, other: tp.Any) -> bool:
        return self is other or (isinstance(other, OutDef) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())

    @functools.cached_property
    def restructures(self) -> bool:
        """Whether anything but values changed, or the result has new objects."""
        return bool(self.edits or self.kinds) or any(old is None for old in self.known_roots())

    def known_roots(self) -> list[int | None]:
        """The number that each root of the result came in with; None for a new one."""
        return [self.origin[c.number] if isinstance(c, NodeCode) else None for c in self.roots]

    @functools.cached_property
    def num_arrays(self) -> int:
        """How many leaves of the result are outputs: those that are not roots."""
        return self.treedef.num_leaves - len(self.where)

    def split(self, outputs: tp.Any) -> tuple[tp.Any, tp.Any, tp.Any]:
        """Something for each output, as three lists: for the result, for written and for new values."""
        first = self.num_arrays
        last = first + len(self.written)
        return outputs[:first], outputs[first:last], outputs[last:]

    def result(self, arrays: tp.Iterable[tp.Any], roots: tp.Iterable[tp.Any]) -> tp.Any:
        """The result with these leaves and these roots."""
        leaves = [*arrays]
        for position, root in zip(self.where, roots):
            leaves.insert(position, root)
        return jax.tree_util.tree_unflatten(self.treedef, leaves)

    def of_call(self, graphdef: GraphDef[tp.Any]) -> OutDef:
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

    def new_leaves(self) -> dict[int, int]:
        """The leaf of each value that did not come in, by its number."""
        return {~source: leaf for leaf, source in enumerate(self.sources) if source < 0}


_FIELDS = [f for f in dataclasses.fields(OutDef) if f.name not in ("kinds", "seen")]


class Outputs(tp.NamedTuple):
    """What leaves a transform; to JAX, a pytree of the values.

    Attributes:
        definition: the static side.
        values: of the array leaves of the result, of `definition.written`, and of leaves that did not
            come in. Without the static ones, if there are some.
    """

    definition: OutDef
    values: tp.Sequence[tp.Any]

    @property
    def written(self) -> tp.Sequence[tp.Any]:
        """New values of input leaves, in the order of `definition.written`."""
        return self.definition.split(self.values)[1]

    @property
    def new(self) -> tp.Sequence[tp.Any]:
        """Values of leaves that did not come in."""
        return self.definition.split(self.values)[2]

    def with_written(self, written: dict[int, tp.Any]) -> Outputs:
        """The same with other written leaves, given with their values."""
        arrays, _, new = self.definition.split(self.values)
        at = tuple(sorted(written))
        definition = dataclasses.replace(self.definition, written=at)
        return Outputs(definition, [*arrays, *[written[leaf] for leaf in at], *new])

    def as_arrays(self, is_array: tp.Callable[[tp.Any], bool]) -> Outputs:
        """The same with leaves that are not arrays as a part of the definition."""
        leaves, treedef = jax.tree_util.tree_flatten([*self.values])
        static = static_leaves(leaves, [not is_array(leaf) for leaf in leaves])
        if static is None:
            return self
        definition = dataclasses.replace(self.definition, static=(treedef, static))
        return Outputs(definition, static.split(leaves))

    def whole(self) -> tp.Sequence[tp.Any]:
        """The values with the static ones."""
        if self.definition.static is None:
            return self.values
        treedef, static = self.definition.static
        return jax.tree_util.tree_unflatten(treedef, static.join(self.values))


def _with_keys(out: Outputs) -> tp.Any:
    """The values with keys for JAX's messages: `['loss']` of the result, `.written[0]`, `.new[0]`."""
    left = out.definition
    paths = jax.tree_util.tree_leaves_with_path(template_of(left.treedef))
    keys = [jax.tree_util.keystr(path) for path, i in paths if i not in left.where]
    keys += [f".written[{i}]" for i in range(len(left.written))]
    if left.static is not None:
        keys = []
    keys += [f".new[{i}]" for i in range(len(out.values) - len(keys))]
    return [*zip(keys, out.values)], left


jax.tree_util.register_pytree_with_keys(
    Outputs,
    _with_keys,
    lambda definition, values: tuple.__new__(Outputs, (definition, values)),
    lambda out: (out.values, out.definition),
)


# Paths ----------------------------------------------------------------------------------------------


def output_roots(call: CallDef, definition: OutDef) -> list[Path]:
    """The paths of the roots of what leaves: of the arguments, then those of the result."""
    of_result = paths_of(definition.treedef)
    roots = call.root_paths()[: definition.first_result]
    return roots + [("result", *of_result[position]) for position in definition.where]


def came_from(call: CallDef, definition: OutDef, root: int) -> Path:
    """The number of a root of the arguments, and a path: where an object was that left on its own."""
    code = tp.cast(NodeCode, definition.graphdef.decoded.roots[root])
    decoded = call.graphdef.decoded
    return decoded.path(decoded.node_frames[tp.cast(int, definition.origin[code.number])])


def output_paths(call: CallDef, definition: OutDef) -> list[Path]:
    """The path of each output: array leaves of the result, written leaves, new values."""
    of_result = enumerate(paths_of(definition.treedef))
    paths = [("result", *path) for i, path in of_result if i not in definition.where]
    came_in, leaves = call.graph_leaves(), definition.new_leaves()
    paths += [came_in[leaf].path for leaf in definition.written]
    decoded, roots = definition.graphdef.decoded, output_roots(call, definition)
    for number in sorted(leaves):
        root, *path = decoded.path(decoded.leaf_frames[leaves[number]])
        if root >= len(roots):
            root, *above = came_from(call, definition, root)
            path = [*above, *path]
        paths.append((*roots[root], *path))
    return paths
