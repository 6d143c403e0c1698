"""A tree taken apart into leaves, and put together again, with sharing kept.

Leaves are what a user would call so: arrays, numbers, functions and so on at the ends of a pytree,
and, in the graph objects found in it, the values of Variables and of data attributes.  A Variable
(or object) met twice is one: it has one value among the leaves, and what is put together has it in
both places.  None is no leaf.
"""

from __future__ import annotations

import functools
import typing as tp

import jax

from nnxlite._jax import key_name
from nnxlite.boundary import CallDef, Inner, Inputs, aliases, enter, is_root, leaves_below
from nnxlite.graph import Path

IsLeaf: tp.TypeAlias = tp.Callable[[tp.Any], bool]


class _Closed:
    """A part that `is_leaf` wants to be one leaf, whatever it is."""

    __slots__ = ("value",)

    def __init__(self, value: tp.Any) -> None:
        self.value = value


def _closed(is_leaf: IsLeaf, value: tp.Any) -> tp.Any:
    return _Closed(value) if is_leaf(value) else value


def close(tree: tp.Any, is_leaf: IsLeaf) -> tp.Any:
    """A tree with the parts that are leaves closed; those of `Apart` are the parts again."""
    wanted = lambda value: is_root(value) or is_leaf(value)
    return jax.tree_util.tree_map(functools.partial(_closed, is_leaf), tree, is_leaf=wanted)


class Leaf(tp.NamedTuple):
    """One leaf.

    Attributes:
        position: of the argument leaf or root (see `CallDef`) it belongs to.
        number: of the graph leaf it belongs to, or None for an ordinary leaf.
        variable: the Variable that holds it, or the leaf itself.
    """

    position: int
    number: int | None
    variable: tp.Any


class Apart:
    """A tree taken apart.

    Attributes:
        inputs: the tree on its way through the boundary.
        leaves: the leaves; ordinary ones first, then those of the graph.
        num_plain: how many of them are ordinary ones.
        defs: the structure of the value of each graph leaf.
    """

    def __init__(self, tree: tp.Any) -> None:
        self.inputs = inputs = Inputs(tree)
        self._fill([x.value if type(x) is _Closed else x for x in inputs.plain])

    @classmethod
    def of(cls, inputs: Inputs) -> Apart:
        """The leaves of a tree that is on its way through the boundary already."""
        self = cls.__new__(cls)
        self.inputs = inputs
        self._fill(inputs.plain)
        return self

    def _fill(self, plain: list[tp.Any]) -> None:
        inputs = self.inputs
        self.leaves: list[tp.Any] = [*plain]
        self.num_plain = len(plain)
        self.defs: list[tp.Any] = []
        for value in inputs.values:
            parts, treedef = jax.tree_util.tree_flatten(value)
            self.leaves += parts
            self.defs.append(treedef)

    @functools.cached_property
    def call(self) -> CallDef:
        """The static side; its own object, for it may hold values that cannot be hashed."""
        inputs = self.inputs
        return CallDef(inputs.treedef, inputs.where, inputs.graphdef, None)

    def groups(self, leaves: tp.Sequence[tp.Any]) -> tuple[list[tp.Any], list[tp.Any]]:
        """Leaves as the boundary wants them: ordinary ones, and values of graph leaves."""
        plain, rest = list(leaves[: self.num_plain]), iter(leaves[self.num_plain :])
        values = [
            jax.tree_util.tree_unflatten(d, [next(rest) for _ in range(d.num_leaves)])
            for d in self.defs
        ]
        return plain, values

    def enter(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, Inner]:
        """The tree of other leaves, and what the boundary must know to let it out again."""
        return enter(self.call, *self.groups(leaves))

    def build(self, leaves: tp.Sequence[tp.Any]) -> tp.Any:
        """The tree of other leaves, its graph objects new ones."""
        return self.enter(leaves)[0]

    def without_values(self, leaves: list[tp.Any]) -> Apart:
        """The same form with other leaves, and nothing that refers to the present ones."""
        new = Apart.__new__(Apart)
        new.leaves, new.num_plain, new.defs = leaves, self.num_plain, self.defs
        new.call, new.paths, new.position_paths = self.call, self.paths, self.position_paths
        new.places = [place._replace(variable=None) for place in self.places]
        return new

    def other_paths(self) -> set[Path]:
        """Further paths of leaves that are found in several places."""
        starts, inside = self.position_paths, self.call.leaf_paths()
        own = [(*starts[self.call.where[r]], *p) for r, p in zip(self.call.leaf_roots(), inside)]
        below: dict[Path, list[Path]] = {}
        for path in self.paths[self.num_plain :]:
            for base in own:
                if path[: len(base)] == base:
                    below.setdefault(base, []).append(path[len(base) :])
        return {
            (*starts[self.call.where[root]], *path, *tail, *end)
            for node, root, path in aliases(self.call)
            for number, tail in leaves_below(self.call, node)
            for end in below.get(own[number], ())
        }

    @functools.cached_property
    def places(self) -> list[Leaf]:
        """Where each leaf is found."""
        roots = set(self.call.where)
        positions = [i for i in range(self.call.treedef.num_leaves) if i not in roots]
        out = [Leaf(p, None, x) for p, x in zip(positions, self.leaves)]
        if not self.defs:
            return out
        nodes, leaf_nodes = self.inputs.nodes(), self.call.graphdef.decoded.leaf_nodes
        for number, (treedef, root) in enumerate(zip(self.defs, self.call.leaf_roots())):
            node = leaf_nodes[number]
            variable = nodes[node] if node >= 0 else self.inputs.values[number]
            out += [Leaf(self.call.where[root], number, variable)] * treedef.num_leaves
        return out

    @functools.cached_property
    def position_paths(self) -> list[Path]:
        """The path of each argument leaf or root."""
        treedef = self.call.treedef
        tree = jax.tree_util.tree_unflatten(treedef, [0] * treedef.num_leaves)
        found, _ = jax.tree_util.tree_flatten_with_path(tree)
        return [tuple(map(key_name, path)) for path, _ in found]

    @functools.cached_property
    def paths(self) -> list[Path]:
        """The path of each leaf."""
        starts, inside = self.position_paths, self.call.leaf_paths()
        out = list(map(starts.__getitem__, [p.position for p in self.places[: self.num_plain]]))
        rest: list[Path] = []
        for number, (treedef, root) in enumerate(zip(self.defs, self.call.leaf_roots())):
            base = (*starts[self.call.where[root]], *inside[number])
            value = jax.tree_util.tree_unflatten(treedef, range(treedef.num_leaves))
            for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]:
                rest.append((*base, *map(key_name, path)))
        return out + rest
