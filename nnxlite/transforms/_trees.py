"""Trees of nodes and trees of states, for one's own use of JAX's transforms.

`to_tree` replaces the graph nodes of a pytree by `NodeStates` (definition and states), which are
ordinary pytrees; `from_tree` is the inverse.  All nodes of one tree share one numbering, so sharing is
kept both ways.  `prefix` turns filters into a prefix that matches a tree.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as tp

import jax

from nnxlite._base.config import GRAPH_MODE
from nnxlite._base.errors import path_text
from nnxlite._base.jax import key_name
from nnxlite._state._definition import State
from nnxlite.boundary._call_def import template_of
from nnxlite.boundary._context import MergeContext, SplitContext, merge_context, split_context
from nnxlite.boundary._inputs import Inputs, is_root
from nnxlite.boundary._labels import broadcast, labels
from nnxlite.boundary._prefixes import PrefixMapping
from nnxlite.filters import Filter
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import is_graph_node
from nnxlite.variables._definition import MISSING
from nnxlite.variables._variable import is_variable

KeyPath = tuple[tp.Any, ...]
SplitFn = tp.Callable[[SplitContext, KeyPath, tp.Any, tp.Any], tp.Any]
"""From context, key path, prefix and node to the tree that stands for the node."""
MergeFn = tp.Callable[[MergeContext, KeyPath, tp.Any, tp.Any], tp.Any]
"""From context, key path, prefix and the tree that stands for a node to the node."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["_graphdef", "states"],
    meta_fields=["metadata"],
)
@dataclasses.dataclass(frozen=True)
class NodeStates:
    """A split graph node: a pytree of its states, with the definition as static data.

    Args:
        _graphdef: the definition, or None.
        states: one or more states.
        metadata: anything hashable, static.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> node = nnx.NodeStates.from_split(*nnx.split(nnx.Dict(x=nnx.Param(1.0))))
    >>> jax.tree.leaves(node), list(node.state)
    ([1.0], ['x'])
    """

    _graphdef: GraphDef[tp.Any] | None
    states: tuple[tp.Any, ...]
    metadata: tp.Any = None

    @property
    def graphdef(self) -> GraphDef[tp.Any]:
        """The definition (ValueError where there is none)."""
        if self._graphdef is None:
            raise ValueError("No graphdef available: these NodeStates were made of states alone.")
        return self._graphdef

    @property
    def state(self) -> tp.Any:
        """The state (ValueError where there are several)."""
        if len(self.states) != 1:
            raise ValueError(f"Expected exactly one state, got {len(self.states)}; use .states.")
        return self.states[0]

    @classmethod
    def from_split(
        cls,
        graphdef: GraphDef[tp.Any] | None,
        state: tp.Any,
        /,
        *states: tp.Any,
        metadata: tp.Any = None,
    ) -> NodeStates:
        """What `nnx.split` gives, as one pytree.

        Args:
            graphdef: the definition.
            state, states: the states that were split with it.
            metadata: anything static.
        """
        return cls(graphdef, (state, *states), metadata)

    @classmethod
    def from_states(cls, state: tp.Any, *states: tp.Any) -> NodeStates:
        """States without a definition.

        Args:
            state, states: the States.
        """
        return cls(None, (state, *states), None)

    @classmethod
    def from_prefixes(
        cls, prefixes: tp.Iterable[tp.Any], /, *, metadata: tp.Any = None
    ) -> NodeStates:
        """A prefix for NodeStates: one setting for each state.

        Args:
            prefixes: the settings.
            metadata: anything static.
        """
        return cls(None, tuple(prefixes), metadata)

    def replace(self, **updates: tp.Any) -> NodeStates:
        """The same with other fields.

        Args:
            updates: fields by name.
        """
        return dataclasses.replace(self, **updates)


def is_tree_node(x: tp.Any) -> bool:
    """Whether a tree stands for a graph node."""
    return isinstance(x, NodeStates)


def default_split_fn(ctx: SplitContext, path: KeyPath, prefix: tp.Any, x: tp.Any) -> tp.Any:
    """A node as `NodeStates`, with one state."""
    return NodeStates.from_split(*ctx.split(x))


def merge_tree_node(ctx: MergeContext, path: KeyPath, prefix: tp.Any, leaf: tp.Any) -> tp.Any:
    """The node that `NodeStates` stand for.

    Raises ValueError for anything else.
    """
    if not isinstance(leaf, NodeStates):
        raise ValueError(
            f"Expected NodeStates at '{path_text(map(key_name, path))}', got {type(leaf).__name__}. "
            "Pass a merge_fn that knows it, or an is_node_leaf that leaves it alone."
        )
    return ctx.merge(leaf.graphdef, *leaf.states)


def to_tree(
    tree: tp.Any,
    /,
    *,
    prefix: tp.Any = MISSING,
    split_fn: SplitFn = default_split_fn,
    map_non_graph_nodes: bool = False,
    ctxtag: tp.Hashable | None = None,
    check_aliasing: bool = True,
) -> tp.Any:
    """A pytree with `NodeStates` in place of its graph nodes (objects and Variables).

    Args:
        tree: any pytree.
        prefix: a prefix of it, handed to `split_fn` node by node.
        split_fn: what splits a node, by default into `NodeStates` with one state.
        map_non_graph_nodes: whether `split_fn` also sees other leaves.
        ctxtag: the tag of an active `update_context`, or None.
        check_aliasing: whether to raise where a shared node has two different prefixes.

    Returns:
        A new tree of the same structure.

    Raises:
        ValueError: where a shared node has two different prefixes, or for a prefix that does not match.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> node = nnx.Dict(x=nnx.Param(1.0))
    >>> a, (b, c) = nnx.from_tree(jax.tree.map(lambda x: 2 * x, nnx.to_tree((node, (node, 5)))))
    >>> a is b, a.x.value, c
    (True, 2.0, 10)
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_graph_node)
    settings = _settings(prefix, treedef)
    if check_aliasing and prefix is not MISSING:
        _refuse_inconsistent_prefixes(tree, prefix)
    with split_context(ctxtag) as ctx:
        out = [
            split_fn(ctx, path, setting, x) if map_non_graph_nodes or is_graph_node(x) else x
            for (path, x), setting in zip(pairs, settings)
        ]
    return jax.tree_util.tree_unflatten(treedef, out)


def from_tree(
    tree: tp.Any,
    /,
    *,
    prefix: tp.Any = MISSING,
    merge_fn: MergeFn = merge_tree_node,
    is_node_leaf: tp.Callable[[tp.Any], bool] = is_tree_node,
    is_leaf: tp.Callable[[tp.Any], bool] = is_tree_node,
    map_non_graph_nodes: bool = False,
    is_inner: bool | None = None,
    ctxtag: tp.Hashable | None = None,
) -> tp.Any:
    """The inverse of `to_tree`: graph nodes in place of what stands for them.

    Args:
        tree: what `to_tree` gave, with any leaves.
        prefix: a prefix of it, handed to `merge_fn` node by node.
        merge_fn: what puts a node together, by default from `NodeStates`.
        is_node_leaf: what stands for a node.
        is_leaf: nodes of the tree that are leaves.
        map_non_graph_nodes: whether `merge_fn` also sees other leaves.
        is_inner: with a `ctxtag`, whether this is the inside of the transform.
        ctxtag: the tag of an active `update_context`, or None.

    Returns:
        A tree of the same structure, with objects in place of their states.

    Raises:
        ValueError: for a prefix that does not match.

    >>> import nnxlite as nnx
    >>> tree = nnx.to_tree({"a": nnx.Param(1.0)})
    >>> nnx.from_tree(tree)["a"].value
    1.0
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    settings = _settings(prefix, treedef)
    with merge_context(ctxtag, is_inner) as ctx:
        out = [
            merge_fn(ctx, path, setting, x) if map_non_graph_nodes or is_node_leaf(x) else x
            for (path, x), setting in zip(pairs, settings)
        ]
    return jax.tree_util.tree_unflatten(treedef, out)


def _settings(prefix: tp.Any, treedef: tp.Any) -> list[tp.Any]:
    if prefix is MISSING:
        return [MISSING] * treedef.num_leaves
    return broadcast(prefix, template_of(treedef), "prefix")


def _refuse_inconsistent_prefixes(tree: tp.Any, prefix: tp.Any) -> None:
    """Raise ValueError where a shared node has two different prefixes."""
    call = Inputs(tree).define()
    settings = broadcast(prefix, call.template(), "prefix")
    labels(call, settings, "prefix")


def prefix(
    node: tp.Any,
    filter_map: tp.Mapping[Filter, tp.Any] | tp.Callable[[Path, tp.Any], tp.Any],
    /,
    *,
    graph: bool | None = None,
) -> tp.Any:
    """A prefix that matches a tree, with settings chosen by filter.

    It can be given wherever a transform takes a prefix: `in_axes` of `vmap`, `in_shardings` of `jit`.

    Args:
        node: any pytree of objects and arrays.
        filter_map: from filters to settings, the first that matches decides; or a function of path
            and leaf.
        graph: False gives objects of the same classes that hold settings in place of Variables and
            arrays; JAX's own transforms take them as well.

    Returns:
        The tree with settings in place of Variables and arrays; in place of each object, a State of
        settings. A shared leaf has the setting of its first path; the others have no leaf.

    Raises ValueError where no filter matches.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> node = nnx.Dict(x=nnx.Param(jnp.ones(3)), y=nnx.BatchStat(2.0))
    >>> axes = nnx.prefix(node, {nnx.Param: 0, ...: None})
    >>> nnx.vmap(lambda node: node.x * node.y, in_axes=(axes,))(node).tolist()
    [2.0, 2.0, 2.0]
    >>> axes = nnx.prefix(node, {nnx.Param: 0, ...: None}, graph=False)
    >>> axes.x, axes.y
    (0, None)
    >>> jax.vmap(lambda node: node.x * node.y, in_axes=(axes,))(node).tolist()
    [2.0, 2.0, 2.0]
    """
    choose = filter_map if callable(filter_map) else PrefixMapping(filter_map).map_prefix
    graph = GRAPH_MODE.given(graph)
    closed = _is_closed if graph else is_variable
    pairs, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=closed)
    leaves = [(tuple(map(key_name, keys)), x) for keys, x in pairs]
    out = [None if is_root(x) else choose(path, x) for path, x in leaves]
    where = [i for i, (_, x) in enumerate(leaves) if is_root(x)]
    for group in [where] if graph else [[i] for i in where]:
        for i, setting in zip(group, _node_prefixes([leaves[i] for i in group], choose)):
            out[i] = setting
    return jax.tree_util.tree_unflatten(treedef, out)


def _is_closed(x: tp.Any) -> bool:
    return is_root(x) and not isinstance(x, State)


def _node_prefixes(
    roots: list[tuple[Path, tp.Any]], choose: tp.Callable[[Path, tp.Any], tp.Any]
) -> list[tp.Any]:
    """The settings of objects and Variables with one numbering, given with their paths."""
    inputs = Inputs([x for _, x in roots])
    settings: list[dict[Path, tp.Any]] = [{} for _ in roots]
    for place, x in zip(inputs.define().graph_leaves(), inputs.variables()):
        root = tp.cast(int, place.root)
        settings[root][place.below] = choose((*roots[root][0], *place.below), x)
    return [by_path[()] if () in by_path else State.from_flat_path(by_path) for by_path in settings]
