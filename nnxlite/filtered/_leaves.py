"""A tree as a list of leaves, and back, with its sharing.

Leaves are what a user would call so: arrays, numbers, functions and so on at the ends of a pytree,
and, in the graph objects of the tree, the values of Variables and of data attributes.  A Variable
(or object) with several paths is one: its value is one leaf, and the tree that is built again refers
to it by all of these paths.  None is not a leaf.

`Leaves` are the leaves of one tree; its `Form` is everything else, and builds trees of other leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as tp

import jax

from nnxlite._jax import PyTreeDef, key_name
from nnxlite.boundary import CallDef, Inner, Inputs, aliases, enter, is_root, leaves_below
from nnxlite.graph import GraphDef, Path

IsLeaf: tp.TypeAlias = tp.Callable[[tp.Any], bool]


class _Closed:
    """A part of a tree that is to be one leaf, whatever it is."""

    __slots__ = ("value",)

    def __init__(self, value: tp.Any) -> None:
        self.value = value


def close(tree: tp.Any, is_leaf: IsLeaf) -> tp.Any:
    """A tree in which the parts that `is_leaf` selects are closed: for `Leaves` each is one leaf."""
    return jax.tree_util.tree_map(
        lambda part: _Closed(part) if is_leaf(part) else part,
        tree,
        is_leaf=lambda part: is_root(part) or is_leaf(part),
    )


class Place(tp.NamedTuple):
    """Where a leaf is.

    Attributes:
        position: of the argument leaf or root (see `CallDef`) it belongs to.
        number: of the graph leaf it belongs to, None for a leaf outside of graph objects.
        path: of that graph leaf, from the root.
        inside: path from there, where the value of a Variable is itself a tree.
    """

    position: int
    number: int | None = None
    path: Path = ()
    inside: Path = ()


@dataclasses.dataclass(frozen=True)
class Form:
    """What a tree is besides its leaves, which are in order: those of graph objects come last.

    Attributes:
        treedef, where, graphdef: see `CallDef`.
        values: the structure of the list of values of the graph's leaves.
    """

    treedef: PyTreeDef
    where: tuple[int, ...]
    graphdef: GraphDef[tp.Any]
    values: PyTreeDef

    @functools.cached_property
    def call(self) -> CallDef:
        """The same for the boundary; not interned, as static data of a tree may be unhashable."""
        return CallDef(self.treedef, self.where, self.graphdef, None)

    def divided(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, list[tp.Any]]:
        """Leaves as the boundary takes them: those outside of objects, and values of graph leaves."""
        count = len(leaves) - self.values.num_leaves
        return leaves[:count], jax.tree_util.tree_unflatten(self.values, leaves[count:])

    def enter(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, Inner]:
        """The tree with these leaves, and what the boundary needs to let it out again."""
        return enter(self.call, *self.divided(leaves))

    def build(self, leaves: tp.Sequence[tp.Any]) -> tp.Any:
        """The tree with these leaves; its graph objects are new."""
        return self.enter(leaves)[0]

    @functools.cached_property
    def places(self) -> list[Place]:
        """The place of each leaf; the first one where it has several."""
        call, roots = self.call, set(self.where)
        out = [Place(i) for i in range(self.treedef.num_leaves) if i not in roots]
        values = jax.tree_util.tree_unflatten(self.values, [0] * self.values.num_leaves)
        owners, paths = call.leaf_roots(), call.leaf_paths()
        for (first, *keys), _ in jax.tree_util.tree_leaves_with_path(values):
            inside = tuple(map(key_name, keys))
            out.append(Place(self.where[owners[first.idx]], first.idx, paths[first.idx], inside))
        return out

    def further_places(self) -> tp.Iterator[tuple[int, Place]]:
        """The other places of leaves that have several, each with the number of the leaf."""
        leaves: dict[int | None, list[int]] = {}
        for leaf, place in enumerate(self.places):
            leaves.setdefault(place.number, []).append(leaf)
        for node, root, path in aliases(self.call):
            for number, end in leaves_below(self.call, node):
                for leaf in leaves.get(number, ()):
                    other = Place(self.where[root], number, (*path, *end))
                    yield leaf, other._replace(inside=self.places[leaf].inside)

    @functools.cached_property
    def position_paths(self) -> list[Path]:
        """The path of each argument leaf or root."""
        treedef = self.treedef
        tree = jax.tree_util.tree_unflatten(treedef, [0] * treedef.num_leaves)
        pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
        return [tuple(map(key_name, path)) for path, _ in pairs]

    def path(self, place: Place) -> Path:
        """A place as a path from the root of the tree."""
        return (*self.position_paths[place.position], *place.path, *place.inside)

    def paths(self) -> list[Path]:
        """The path of each leaf."""
        return list(map(self.path, self.places))

    def numbers(self, chosen: tp.Iterable[bool]) -> set[int]:
        """The graph leaves that have a chosen leaf in their values."""
        places = zip(self.places, chosen)
        return {p.number for p, wanted in places if wanted and p.number is not None}


class Leaves:
    """The leaves of a tree.

    Attributes:
        inputs: the tree on its way through the boundary.
        leaves: the leaves.
        form: everything else.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        inside, values = jax.tree_util.tree_flatten(inputs.values)
        outside = (x.value if type(x) is _Closed else x for x in inputs.plain)
        self.leaves: list[tp.Any] = [*outside, *inside]
        self.form = Form(inputs.treedef, inputs.where, inputs.graphdef, values)

    def variable(self, leaf: int) -> tp.Any:
        """What a Variable filter looks at: the Variable that contains a leaf, or the leaf itself."""
        number = self.form.places[leaf].number
        if number is None:
            return self.leaves[leaf]
        node = self.form.graphdef.decoded.leaf_nodes[number]
        return self.inputs.nodes()[node] if node >= 0 else self.inputs.values[number]


def leaves_of(tree: tp.Any) -> Leaves:
    """The leaves of any tree."""
    return Leaves(Inputs(tree))
