"""`make_jaxpr`, trees of split objects, and functions whose first arguments are given once.

`to_tree` replaces the graph nodes of a pytree by `NodeStates` (definition and states), which are
ordinary pytrees; `from_tree` is the inverse.  All nodes of one tree share one numbering, so sharing is
preserved both ways.  `prefix` turns filters into a prefix that matches a tree.

`jit_partial` and `cached_partial` give a function its first arguments once.  In the reference these walk
an object graph once instead of in every call.  Here no call of a transform walks a graph that has not
changed; the two are front ends of the same protocol.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing as tp

import jax

from nnxlite._base.errors import GRAPH_MODE, Modes, path_text
from nnxlite._base.jax import as_integers, key_name
from nnxlite._state._definition import State
from nnxlite.boundary._call_def import CallDef, replaced, template_of
from nnxlite.boundary._context import MergeContext, SplitContext, merge_context, split_context
from nnxlite.boundary._inputs import Inputs, is_root
from nnxlite.boundary._labels import PrefixMapping, broadcast, labels
from nnxlite.boundary._out import Outputs, fixed_structure, structure_changed
from nnxlite.filters import Filter
from nnxlite.graph._functional import build
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._kinds import is_graph_node
from nnxlite.graph._plan import view
from nnxlite.graph._rebuild import Path
from nnxlite.transforms._call import STATIC, Call
from nnxlite.transforms._jit import JitWrapped, jit
from nnxlite.transforms._wrapper import (
    JaxprKeywords,
    JitKeywords,
    ModeKeywords,
    Options,
    P,
    R,
    Transform,
    Unequal,
    decorated,
    name_of,
)
from nnxlite.variables._definition import MISSING
from nnxlite.variables._variable import is_variable

__all__ = ["NodeStates", "cached_partial", "from_tree", "jit_partial", "make_jaxpr", "prefix"]
__all__ += ["to_tree"]

if tp.TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr


@tp.overload
def make_jaxpr(
    f: tp.Callable[P, tp.Any], **options: tp.Unpack[JaxprKeywords]
) -> Transform[P, ClosedJaxpr]: ...
@tp.overload
def make_jaxpr(
    **options: tp.Unpack[JaxprKeywords],
) -> tp.Callable[[tp.Callable[P, tp.Any]], Transform[P, ClosedJaxpr]]: ...
def make_jaxpr(
    f: tp.Any = MISSING,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    static_argnums: int | tp.Sequence[int] = (),
) -> tp.Any:
    """A function that gives the jaxpr of `f` for its arguments; nothing is computed or changed.

    The inputs of the jaxpr are the leaves of the arguments in order; its outputs are the leaves of the
    result, and with `graph_updates` on, the new values of Variables that the function writes and
    of those it adds to its arguments.

    Args:
        f: the function; without it the result is a decorator.
        graph: False refuses shared references.
        graph_updates: whether what the function writes is among the outputs.
        static_argnums: arguments that JAX never sees.

    Returns:
        A function of the same arguments, which returns a `jax.core.ClosedJaxpr`.

    Raises:
        TypeError: for an argument that is not an array, object or pytree of these.

    >>> import nnxlite as nnx
    >>> jaxpr = nnx.make_jaxpr(lambda m: m.w + 1, graph_updates=False)(nnx.Dict(w=nnx.Param(2.0)))
    >>> [str(eqn.primitive) for eqn in jaxpr.eqns]
    ['add']
    """
    modes, numbers = Modes.of(graph, graph_updates), as_integers(static_argnums)
    return decorated(Transform, f, Options.of("make_jaxpr", modes, _jaxpr, static_argnums=numbers))


def _jaxpr(maker: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    options = maker.options
    numbers = options.static_argnums
    call = Call(options, maker.bound, args, kwargs, static_argnums=numbers, captured=True)
    order = _order(call.definition)

    def run(*ordered: tp.Any) -> list[tp.Any]:
        inner, result = call.run(replaced(ordered, order, ordered))
        out = call.leave(inner, result, foreign=False)
        shown = Inputs(result, call.definition.trees)
        every = shown.leaves
        leaves_out = [every[i] for i in _order(shown.define())]
        return [*leaves_out, *_updates(out)] if options.modes.updates else leaves_out

    with call.naming_arguments(STATIC):
        return jax.make_jaxpr(run)(*[call.leaves[i] for i in order])


def _order(call: CallDef) -> list[int]:
    """The numbers of the leaves in the order of the tree."""
    leaves = call.leaves()
    return sorted(range(len(leaves)), key=lambda i: leaves[i].position)


def _updates(out: Outputs) -> list[tp.Any]:
    """New values of what came in, and values that were added to it."""
    left, decoded = out.definition, out.definition.graphdef.decoded
    added = [
        out.new[~source]
        for source, frame in zip(left.sources, decoded.leaf_frames)
        if source < 0 and decoded.path(frame)[0] < left.first_result
    ]
    return [*out.written, *added]


# Trees of split objects ----------------------------------------------------------------------------


KeyPath = tuple[tp.Any, ...]
SplitFn = tp.Callable[[SplitContext, KeyPath, tp.Any, tp.Any], tp.Any]
"""From context, key path, prefix and node to the tree that stands for the node."""
MergeFn = tp.Callable[[MergeContext, KeyPath, tp.Any, tp.Any], tp.Any]
"""From context, key path, prefix and the tree that stands for a node to the node."""


@jax.tree_util.register_dataclass
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
    metadata: tp.Any = dataclasses.field(default=None, metadata={"static": True})

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
    if check_aliasing and prefix is not MISSING:
        call = Inputs(tree).define()
        labels(call, broadcast(prefix, call.template(), "prefix"), "prefix")
    with split_context(ctxtag) as ctx:
        one = functools.partial(split_fn, ctx)
        return _mapped(tree, is_graph_node, prefix, one, is_graph_node, map_non_graph_nodes)


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
    """The inverse of `to_tree`: graph nodes in place of their `NodeStates`.

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
    with merge_context(ctxtag, is_inner) as ctx:
        one = functools.partial(merge_fn, ctx)
        return _mapped(tree, is_leaf, prefix, one, is_node_leaf, map_non_graph_nodes)


def _mapped(
    tree: tp.Any,
    is_leaf: tp.Callable[[tp.Any], bool],
    prefix: tp.Any,
    one: tp.Callable[[KeyPath, tp.Any, tp.Any], tp.Any],
    chosen: tp.Callable[[tp.Any], bool],
    every: bool,
) -> tp.Any:
    """A tree with other leaves in place of the chosen ones, from key path, prefix and leaf."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    settings = [MISSING] * len(pairs)
    if prefix is not MISSING:
        settings = broadcast(prefix, template_of(treedef), "prefix")
    new = [
        one(path, setting, x) if every or chosen(x) else x
        for (path, x), setting in zip(pairs, settings)
    ]
    return jax.tree_util.tree_unflatten(treedef, new)


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
    closed = (lambda x: is_root(x) and not isinstance(x, State)) if graph else is_variable
    pairs, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=closed)
    out: list[tp.Any] = []
    for group in [pairs] if graph else [[pair] for pair in pairs]:  # each with one numbering
        inputs = Inputs([x for _, x in group])
        by_path: list[dict[Path, tp.Any]] = [{} for _ in group]
        for place, x in zip(inputs.define().leaves(), inputs.variables()):
            path = (*map(key_name, group[place.position][0]), *place.below)
            by_path[place.position][place.below] = choose(path, x)
        out += [x[()] if () in x else State.from_flat_path(x) for x in by_path]
    return jax.tree_util.tree_unflatten(treedef, out)


# Functions with arguments given once ---------------------------------------------------------------


A = tp.TypeVar("A")


class JitPartial(Unequal, JitWrapped[P, R]):
    """A compiled function with its first arguments given, as `jit_partial` returns it."""

    name = "jit_partial"

    def __init__(self, fun: tp.Any, options: Options, partial_args: tuple[tp.Any, ...]) -> None:
        super().__init__(fun, options)
        self.partial_args = partial_args
        Inputs(partial_args).in_mode(options.modes.graph, self.name)

    def _inputs(self, args: tp.Any, kwargs: tp.Any) -> Inputs:
        return super()._inputs((*self.partial_args, *args), kwargs)

    def __reduce__(self) -> tp.Any:
        return JitPartial, (self.fun, self.options, self.partial_args)


@tp.overload
def jit_partial(
    fun: tp.Callable[tp.Concatenate[A, P], R],
    arg: A,
    /,
    **options: tp.Unpack[JitKeywords],
) -> JitPartial[P, R]: ...
@tp.overload
def jit_partial(
    fun: tp.Callable[..., R], *partial_args: tp.Any, **options: tp.Unpack[JitKeywords]
) -> JitPartial[..., R]: ...
def jit_partial(
    fun: tp.Callable[..., tp.Any], *partial_args: tp.Any, **options: tp.Any
) -> JitPartial[..., tp.Any]:
    """Compile a function and give it its first arguments.

    The arguments are read again in each call: changes made to the objects in between count.

    Args:
        fun: the function.
        partial_args: its first arguments.
        in_shardings, out_shardings: see `jit`; argument number 0 stands for all of `partial_args`, 1
            for the first further argument.
        static_argnums, static_argnames, donate_argnums, donate_argnames: the same.
        keep_unused, device, backend, inline, donate, max_traces, graph, graph_updates: see `jit`.

    Returns:
        A function of the further arguments, with the methods of a function under `jit`.

    Raises:
        ValueError: with `graph=False`, where an object or Variable is in several places of them.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> counter = nnx.Dict(n=nnx.Variable(jnp.int32(0)))
    >>> def add(counter, k):
    ...     counter.n += k
    >>> step = nnx.jit_partial(add, counter)
    >>> step(1), step(2), int(counter.n.value)
    (None, None, 3)
    """
    for name in ("static_argnums", "donate_argnums"):
        options[name] = _of_all(options.get(name), len(partial_args))
    return JitPartial(fun, jit(fun, **options).options, partial_args)


_OPTIONS = [p for p in inspect.signature(jit).parameters.values() if p.kind is p.KEYWORD_ONLY]
_GIVEN = inspect.signature(jit_partial)
jit_partial.__signature__ = _GIVEN.replace(  # type: ignore[attr-defined]
    parameters=[*list(_GIVEN.parameters.values())[:2], *_OPTIONS]
)


def _of_all(numbers: int | tp.Sequence[int] | None, count: int) -> list[int] | None:
    """Argument numbers of the whole function, where 0 stood for the first `count` arguments."""
    if numbers is None:
        return None
    out: list[int] = []
    for n in as_integers(numbers):
        out += range(count) if n == 0 else [n + count - 1 if n > 0 else n]
    return out


class CachedPartial(tp.Generic[P, R]):
    """A function with its first arguments given as clones, as `cached_partial` returns it."""

    def __init__(self, f: tp.Callable[..., tp.Any], cached_args: tuple[tp.Any, ...]) -> None:
        functools.update_wrapper(self, f)  # first: attributes of `f` give way to its own
        self._f = f
        seen = view(cached_args)
        self._clone = functools.partial(build, seen.graphdef, list(seen.leaves))
        self._renew()

    def _renew(self) -> None:
        """Make the clones."""
        self._args: tuple[tp.Any, ...] = self._clone()
        seen = Inputs(self._args)
        self._graphdef, self._nodes = seen.graphdef, seen.nodes()
        self._ids = frozenset(map(id, self._nodes))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with fixed_structure(self._ids):
            out = self._f(*self._args, *args, **kwargs)
        self._check()
        return out

    def _check(self) -> None:
        """Raise ValueError where a function that is not a transform changed a structure."""
        seen = Inputs(self._args)
        if seen.graphdef is self._graphdef:
            return
        before, now = self._graphdef.decoded.node_defs, seen.graphdef.decoded.node_defs
        others = (node for node, *defs in zip(self._nodes, before, now) if defs[0] is not defs[1])
        changed = next(others, self._args[0])
        self._renew()
        raise ValueError(structure_changed(changed, ("found after the call",)))

    def __repr__(self) -> str:
        return f"cached_partial({name_of(self._f)})"


@tp.overload
def cached_partial(
    f: tp.Callable[tp.Concatenate[A, P], R], arg: A, /, **modes: tp.Unpack[ModeKeywords]
) -> CachedPartial[P, R]: ...
@tp.overload
def cached_partial(
    f: tp.Callable[..., R], *cached_args: tp.Any, **modes: tp.Unpack[ModeKeywords]
) -> CachedPartial[..., R]: ...
def cached_partial(
    f: tp.Callable[..., tp.Any],
    *cached_args: tp.Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """A function with its first arguments given, whose structure must stay the same.

    The function gets clones of the objects, made once, that contain the same Variables: what it writes
    into them is visible to all users of the Variables. Changes of structure are allowed during a call,
    if they are undone before it ends.

    Args:
        f: a transformed function, such as one under `jit`.
        cached_args: its first arguments.
        graph, graph_updates: must be on.

    Returns:
        A function of the further arguments, with the result of `f`.

    Raises:
        ValueError: by a call that leaves an object with another structure; a transform has then
            written nothing. Also where `graph` or `graph_updates` is off.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> counter = nnx.Dict(n=nnx.Variable(jnp.int32(0)))
    >>> @nnx.jit
    ... def add(counter, k):
    ...     counter.n += k
    >>> step = nnx.cached_partial(add, counter)
    >>> step(1), step(2), int(counter.n.value)
    (None, None, 3)
    """
    if not Modes.of(graph, graph_updates).updates:
        raise ValueError(
            "cached_partial is a graph-mode-only API and requires graph=True and "
            "graph_updates=True; use jit_partial, or call the function itself."
        )
    return CachedPartial(f, cached_args)
