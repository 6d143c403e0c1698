"""A tree as a list of leaves, and back, with its sharing.

Leaves are what a user expects: arrays, numbers, functions and so on at the ends of a pytree, and, in
its graph objects, the values of Variables and of data attributes; functions, text and other objects in
their containers are static.  A Variable (or object) with several paths is one: its value is one leaf,
and the rebuilt tree refers to it by all of these paths.  None is not a leaf.

`Leaves` are the leaves of one tree; its `Form` is everything else, and builds trees of other leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as tp

import jax

from nnxlite._jax import PyTreeDef, key_name
from nnxlite.boundary import (
    ArgumentLeaf,
    CallDef,
    Inner,
    Inputs,
    enter,
    further_places,
    is_root,
)
from nnxlite.graph import GraphDef, Path

IsLeaf: tp.TypeAlias = tp.Callable[[tp.Any], bool]


class _Closed:
    """A part of a tree that counts as one leaf."""

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


@dataclasses.dataclass(frozen=True)
class Form:
    """Everything about a tree except its leaves, of which those in graph objects come last.

    Attributes:
        treedef, where, graphdef, names: see `CallDef`.
        values: the structure of the list of values of the graph's leaves.
    """

    treedef: PyTreeDef
    where: tuple[int, ...]
    graphdef: GraphDef[tp.Any]
    values: PyTreeDef
    names: tuple[str, ...] | None = None

    @functools.cached_property
    def call(self) -> CallDef:
        """The tree for the boundary; not interned, because static data of a tree may be unhashable."""
        return CallDef(self.treedef, self.where, self.graphdef, None, True, self.names)

    def for_boundary(self, leaves: tp.Sequence[tp.Any]) -> list[tp.Any]:
        """Leaves in the form of the boundary, where a graph leaf may have a pytree as its value."""
        count = self.call.num_arrays
        return [*leaves[:count], *jax.tree_util.tree_unflatten(self.values, leaves[count:])]

    def enter(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, Inner]:
        """The tree with these leaves, and the objects that `leave` needs."""
        return enter(self.call, self.for_boundary(leaves))

    def build(self, leaves: tp.Sequence[tp.Any]) -> tp.Any:
        """The tree with these leaves; its graph objects are new."""
        return self.enter(leaves)[0]

    @functools.cached_property
    def inside(self) -> list[tuple[int, Path]]:
        """For each leaf in graph objects the number of its graph leaf, and its path in that value."""
        values = jax.tree_util.tree_unflatten(self.values, [0] * self.values.num_leaves)
        pairs = jax.tree_util.tree_leaves_with_path(values)
        return [(number.idx, tuple(map(key_name, keys))) for (number, *keys), _ in pairs]

    @functools.cached_property
    def places(self) -> list[ArgumentLeaf]:
        """The path of each leaf; the first one of a leaf with several."""
        places, count = self.call.leaves(), self.call.num_arrays
        return places[:count] + [
            places[count + number]._replace(path=(*places[count + number].path, *end))
            for number, end in self.inside
        ]

    @functools.cached_property
    def further_places(self) -> list[tuple[int, ArgumentLeaf]]:
        """The further paths of leaves that have several, each with the position of the leaf."""
        leaves: dict[int, list[tuple[int, Path]]] = {}
        for leaf, (number, end) in enumerate(self.inside, self.call.num_arrays):
            leaves.setdefault(number, []).append((leaf, end))
        return [
            (leaf, place._replace(path=(*place.path, *end)))
            for number, place in further_places(self.call)
            for leaf, end in leaves.get(number, ())
        ]

    def paths(self) -> list[Path]:
        """The path of each leaf."""
        return [place.path for place in self.places]

    def numbers(self, chosen: tp.Sequence[bool]) -> set[int]:
        """The graph leaves that have a chosen leaf in their values."""
        in_graph = zip(self.inside, chosen[self.call.num_arrays :])
        return {number for (number, _), wanted in in_graph if wanted}


class Leaves:
    """The leaves of a tree.

    Attributes:
        inputs: the tree, for the boundary.
        leaves: the leaves.
        form: everything else.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        inside, values = jax.tree_util.tree_flatten(inputs.values)
        outside = (x.value if type(x) is _Closed else x for x in inputs.arrays)
        self.leaves: list[tp.Any] = [*outside, *inside]
        self.form = _form(inputs, values)

    def variable(self, leaf: int) -> tp.Any:
        """What Variable filters see: the Variable that contains a leaf, or the leaf itself."""
        form = self.form
        if leaf < form.call.num_arrays:
            return self.leaves[leaf]
        number, _ = form.inside[leaf - form.call.num_arrays]
        node = form.graphdef.decoded.leaf_nodes[number]
        return self.inputs.nodes()[node] if node >= 0 else self.inputs.values[number]


def form_of(call: CallDef, values: PyTreeDef) -> Form:
    """The form of the arguments of a call, whose graph leaves have values of this structure."""
    return Form(call.treedef, call.where, call.graphdef, values, call.names)


def _form(inputs: Inputs, values: PyTreeDef) -> Form:
    """The form of a tree: the same object for equal ones, so that its paths are computed once.

    Key: the structure of the tree, and of the values in it. Nothing invalidates it. It is dropped with
    the interned CallDef, of which a plan keeps 64. Threads may make equal ones; the first one stays.
    Bench: a call of `filter_jit(donate="all-except-first")` with 72 arrays, 230 us for 1,280 without it.
    """
    form = Form(inputs.treedef, inputs.where, inputs.graphdef, values, inputs.names)
    try:
        call = inputs.define()
    except TypeError:  # static data of a pytree node that cannot be hashed
        return form
    return call.cache.get((Form, values)) or call.remember((Form, values), form)


def leaves_of(tree: tp.Any, names: tuple[str, ...] | None = None) -> Leaves:
    """The leaves of any tree; with names, one of the form of arguments `(args, kwargs)`."""
    return Leaves(Inputs(tree, trees=True, names=names))
