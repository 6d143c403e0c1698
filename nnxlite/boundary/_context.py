"""Numberings of several graphs, and update contexts: the boundary's protocol by hand.

Objects cross a transform of JAX that the user calls in four steps, two outside and two inside:

    (1) split  outside: objects to definition and state; the context remembers the objects
    (2) merge  inside:  new objects; the context remembers the number of each in step 1
    (3) split  inside:  objects as the function left them; the definition has their numbers of step 1
    (4) merge  outside: the objects of (1) are updated in place, and new ones are created

All calls of one step share one numbering, so that sharing between several objects is kept.  The
context drops the inside objects after (3), and everything else when it ends.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import typing as tp

from nnxlite._base.errors import GRAPH_MODE
from nnxlite._base.interning import Writes
from nnxlite._state._flat import FlatState
from nnxlite.boundary._out import note_changes
from nnxlite.filters import Filter
from nnxlite.graph._defs import children_by_name
from nnxlite.graph._functional import copies, leaves_of, listed_leaves, select
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._plan import View, refuse_sharing
from nnxlite.graph._rebuild import (
    Decoded,
    Traversal,
    build_nodes,
    check_trace,
    note_entered,
    resolve,
    traverse,
)
from nnxlite.variables._definition import MISSING
from nnxlite.variables._variable import Variable, make, note_definition, note_raw

__all__ = ["MergeContext", "SplitContext", "UpdateContext", "current_update_context", "flatten"]
__all__ += ["merge_context", "split_context", "unflatten", "update_context"]

N = tp.TypeVar("N")


class RefMap(tp.MutableMapping[tp.Any, tp.Any]):
    """A mapping whose keys are objects, compared by identity."""

    def __init__(self, mapping: tp.Any = (), /) -> None:
        self._items: dict[int, tuple[tp.Any, tp.Any]] = {}
        self.update(mapping or ())

    def __getitem__(self, key: tp.Any) -> tp.Any:
        try:
            return self._items[id(key)][1]
        except KeyError:
            raise KeyError(f"No entry for this {type(key).__name__} object.") from None

    def __setitem__(self, key: tp.Any, value: tp.Any) -> None:
        self._items[id(key)] = (key, value)

    def __delitem__(self, key: tp.Any) -> None:
        self[key]  # raises where there is none
        del self._items[id(key)]

    def __iter__(self) -> tp.Iterator[tp.Any]:
        return (key for key, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"RefMap({[(type(k).__name__, v) for k, v in self._items.values()]})"


class IndexMap(dict[int, tp.Any]):
    """A mapping from node numbers to objects."""

    @classmethod
    def from_refmap(cls, refmap: RefMap) -> IndexMap:
        """The inverse of a `RefMap` from objects to numbers."""
        return cls({number: node for node, number in refmap.items()})

    def to_refmap(self) -> RefMap:
        """The inverse mapping, from objects to numbers."""
        return RefMap((node, number) for number, node in self.items())


class _Numbering(tp.TypedDict, total=False):
    """The other keywords of `flatten`."""

    ref_index: tp.MutableMapping[tp.Any, int] | None
    ref_outer_index: tp.Mapping[tp.Any, int] | None
    graph: bool | None


@tp.overload
def flatten(
    node: N, /, *, with_paths: tp.Literal[True] = True, **more: tp.Unpack[_Numbering]
) -> tuple[GraphDef[N], FlatState[tp.Any]]: ...
@tp.overload
def flatten(
    node: N, /, *, with_paths: bool, **more: tp.Unpack[_Numbering]
) -> tuple[GraphDef[N], tp.Any]: ...
def flatten(
    node: N,
    /,
    *,
    with_paths: bool = True,
    ref_index: tp.MutableMapping[tp.Any, int] | None = None,
    ref_outer_index: tp.Mapping[tp.Any, int] | None = None,
    graph: bool | None = None,
) -> tuple[GraphDef[N], tp.Any]:
    """The definition of a graph and its leaves in order.

    Args:
        node: an object, or a pytree of objects.
        with_paths: True gives a `FlatState`, False a list: of raw values, and with `graph=False`
            of the leaves themselves.
        ref_index: filled with the number of each node; nodes already in it are referred to by
            number, so that several graphs can share one numbering.
        ref_outer_index: outer number of nodes, recorded in the definition.
        graph: False refuses shared references.

    Returns:
        `(graphdef, leaves)`, the leaves in the order of their paths.

    >>> import nnxlite as nnx
    >>> graphdef, flat = nnx.flatten(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> [path for path, leaf in flat]
    [('bias',), ('kernel',)]
    """
    trees, index = not GRAPH_MODE.given(graph), {} if ref_index is None else ref_index
    traversal = Traversal()
    traversal.nodes.extend(index)
    traversal.index.update((id(known), number) for known, number in index.items())
    first = len(traversal.nodes)
    leaves = traverse((node,), traversal, trees=trees).leaves
    own = traversal.nodes[first:]
    index.update(zip(own, itertools.count(first)))
    outer = None if ref_outer_index is None else tuple(map(ref_outer_index.get, own))
    definition: GraphDef[N] = GraphDef(traversal.tokens, 1, outer, first)
    if trees:
        refuse_sharing(definition, "flatten")
    if with_paths:
        return definition, FlatState.from_sorted_keys_values(definition.paths, leaves)
    if trees:
        return definition, leaves
    return definition, [x._box.value if isinstance(x, Variable) else x for x in leaves]


def unflatten(
    graphdef: GraphDef[N],
    state: tp.Any,
    /,
    *,
    index_ref: tp.MutableMapping[int, tp.Any] | None = None,
    outer_index_outer_ref: tp.Mapping[int, tp.Any] | None = None,
    copy_variables: bool = False,
    recreate_variables: bool = True,
) -> N:
    """Rebuild a graph from its definition and leaves; the inverse of `flatten`.

    Args:
        graphdef: the definition.
        state: a State, FlatState, or list of leaves in order.
        index_ref: filled with the node of each number; nodes already in it are used for references.
        outer_index_outer_ref: objects to fill again instead of creating new ones, by outer number.
        copy_variables: put values into new Variables.
        recreate_variables: False leaves values that come without a Variable as they are.

    Returns:
        The object, or the pytree of objects.

    Raises:
        ValueError: where the leaves do not fit the definition, or an earlier node is not given.
        TraceContextError: where an object to be refilled belongs to another trace level.

    >>> import nnxlite as nnx
    >>> graphdef, flat = nnx.flatten(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> nnx.unflatten(graphdef, flat).kernel.shape
    (2, 3)
    """
    is_list = isinstance(state, (list, tuple))
    leaves = listed_leaves(graphdef, state) if is_list else leaves_of(graphdef, (state,))
    if copy_variables:
        leaves = copies(leaves)
    decoded, first = graphdef.decoded, graphdef.first
    known: list[tp.Any] = [None] * len(decoded.node_defs)
    for number in range(first):
        if index_ref is None or number not in index_ref:
            raise ValueError(
                f"The definition refers to node {number} of an earlier one; pass the index_ref "
                "that unflatten filled for that one."
            )
        known[number] = index_ref[number]
    outside = outer_index_outer_ref or {}
    for number, outer in enumerate(graphdef.outer or (), first):
        known[number] = outside.get(outer) if outer is not None else None
    nodes = build_nodes(decoded, leaves, known, recreate_variables)
    writes = Writes()
    for number in range(first, len(known)):
        if known[number] is not None:
            _note_refill(writes, decoded, number, nodes, leaves)
    writes.make()
    if index_ref is not None:
        index_ref.update(enumerate(nodes))
    root = resolve(decoded.roots[0], nodes, leaves)
    note_entered((root,))
    return root  # type: ignore[return-value]


def _note_refill(
    writes: Writes, decoded: Decoded, number: int, nodes: list[tp.Any], leaves: list[tp.Any]
) -> None:
    """Note that a node that exists becomes what the definition and the leaves say."""
    node, definition = nodes[number], decoded.node_defs[number]
    if isinstance(node, Variable):
        value = leaves[decoded.node_leaves[number]]
        if not node._box.definition.matches(definition):
            note_definition(writes, node, definition.for_variable())
        note_raw(writes, node, value._box.value if isinstance(value, Variable) else value)
        return
    if number not in decoded.children:  # a reference
        return
    check_trace(node)
    after = definition.new_template()
    for name, code in zip(definition.names.data, decoded.children[number]):
        after[name] = resolve(code, nodes, leaves)
    before = children_by_name(node)
    removed = tuple(name for name in before if name not in after)
    after = {name: x for name, x in after.items() if before.get(name, MISSING) is not x}
    same = getattr(node, "_nnx_def", None) is definition and not definition.mutable
    if after or removed or not same:
        note_changes(writes, node, definition, after, removed)


@dataclasses.dataclass
class UpdateContext:
    """The record of one pass through the four steps; made by `update_context`.

    Attributes:
        tag: the name by which `split_context` and `merge_context` find the context.
        outer_ref_outer_index: numbers of the outside objects, since step 1.
        outer_index_inner_ref: inside objects by outside number, from step 2 to 3.
        outer_index_outer_ref: outside objects by number, since step 1.
        inner_ref_outer_index: the outside number of each inside object, from step 2 to 3.
        static_cache: accepted for compatibility.

    >>> import nnxlite as nnx
    >>> with nnx.update_context("step") as context:
    ...     type(context).__name__, context.tag
    ('UpdateContext', 'step')
    """

    tag: tp.Hashable
    outer_ref_outer_index: RefMap | None = None
    outer_index_inner_ref: IndexMap | None = None
    outer_index_outer_ref: IndexMap | None = None
    inner_ref_outer_index: RefMap | None = None
    static_cache: tp.MutableMapping[tp.Any, tp.Any] | None = None

    def flatten_end(self, ref_index: RefMap) -> None:
        """End a split: the first one numbers the outside objects, later ones drop those inside.

        Args:
            ref_index: the number of each node that was split.
        """
        if self.outer_ref_outer_index is None:
            self.outer_ref_outer_index = ref_index
            self.outer_index_outer_ref = IndexMap.from_refmap(ref_index)
        else:
            self.outer_index_inner_ref = None
            self.inner_ref_outer_index = None

    def unflatten_end(self, index_ref: IndexMap, inner_merge: bool) -> None:
        """End a merge: an inside one remembers the inside objects.

        Args:
            index_ref: the node of each number that was merged.
            inner_merge: whether this is the inside.
        """
        if inner_merge:
            self.outer_index_inner_ref = index_ref
            self.inner_ref_outer_index = index_ref.to_refmap()

    def _forget(self) -> None:
        self.outer_ref_outer_index = self.inner_ref_outer_index = self.static_cache = None
        self.outer_index_inner_ref = self.outer_index_outer_ref = None


_Active = tuple[tuple["UpdateContextManager", UpdateContext], ...]
_active: contextvars.ContextVar[_Active] = contextvars.ContextVar("nnxlite_contexts", default=())


def current_update_context(tag: tp.Hashable) -> UpdateContext:
    """The innermost active `UpdateContext` of a tag.

    Args:
        tag: the name that was given to `update_context`.

    Returns:
        The context.

    Raises:
        ValueError: where there is none.

    >>> import nnxlite as nnx
    >>> with nnx.update_context("step") as context:
    ...     nnx.current_update_context("step") is context
    True
    """
    active = _active.get()
    for _, context in reversed(active):
        if context.tag == tag:
            return context
    known = ", ".join(repr(context.tag) for _, context in active) or "none is active"
    raise ValueError(
        f"No update context found for tag {tag!r} (active tags: {known}). Open one with "
        f"`with nnxlite.update_context({tag!r}):` around all four steps."
    )


class UpdateContextManager(contextlib.ContextDecorator):
    """What `update_context` returns: a context manager, and a decorator that opens one for each call."""

    def __init__(self, tag: tp.Hashable) -> None:
        self.tag = tag

    def __enter__(self) -> UpdateContext:
        context = UpdateContext(self.tag)
        _active.set((*_active.get(), (self, context)))
        return context

    def __exit__(self, *exc: tp.Any) -> None:
        active = _active.get()
        last = next(entry for entry in reversed(active) if entry[0] is self)
        _active.set(tuple(entry for entry in active if entry is not last))
        last[1]._forget()

    def __repr__(self) -> str:
        return f"update_context({self.tag!r})"


def update_context(tag: tp.Hashable) -> UpdateContextManager:
    """A context in which objects cross a JAX transform by hand, changes of structure included.

    Inside the context call `split` outside the transform, `merge` and `split` inside, and `merge`
    outside again. The last merge returns the objects of the first split, with the changes that the
    function made to its own.

    Args:
        tag: a name; `split_context` and `merge_context` find the context by it.

    Returns:
        A context manager, which is a decorator too; its value is an `UpdateContext`.

    >>> import nnxlite as nnx, jax
    >>> class Foo(nnx.Module): ...
    >>> @jax.jit
    ... def f(graphdef, state):
    ...     with nnx.merge_context("loop", inner=True) as ctx:
    ...         inside = ctx.merge(graphdef, state)
    ...     inside.me = inside
    ...     inside.size = 3
    ...     with nnx.split_context("loop") as ctx:
    ...         return ctx.split(inside)
    >>> @nnx.update_context("loop")
    ... def g(foo):
    ...     with nnx.split_context("loop") as ctx:
    ...         graphdef, state = ctx.split(foo)
    ...     out = f(graphdef, state)
    ...     with nnx.merge_context("loop", inner=False) as ctx:
    ...         return ctx.merge(*out)
    >>> foo = Foo()
    >>> g(foo) is foo, foo.me is foo, foo.size
    (True, True, 3)
    """
    return UpdateContextManager(tag)


class _Step:
    """Base of the two kinds of step: usable only inside its `with` block."""

    _closed: bool = False

    def close(self) -> None:
        """End the step."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise AttributeError(
                f"This {type(self).__name__} has ended: call its methods inside the `with` block "
                "that made it."
            )


@dataclasses.dataclass
class SplitContext(_Step):
    """Splits several objects in one numbering; made by `split_context`.

    Attributes:
        ctxtag: the tag of the update context, or None.
        ref_index: the number of each node met so far.
        is_inner: whether this is step 3; None without an update context.

    >>> import nnxlite as nnx
    >>> with nnx.split_context() as ctx:
    ...     graphdef, state = ctx.split([nnx.Param(1.0)])
    >>> type(ctx).__name__, state[0].value
    ('SplitContext', 1.0)
    """

    ctxtag: tp.Hashable | None
    ref_index: RefMap
    is_inner: bool | None

    def split(self, node: tp.Any, *filters: Filter) -> tuple[tp.Any, ...]:
        """Like `nnxlite.split`; nodes met in an earlier call are only referred to.

        Args:
            node: an object, or a pytree of objects.
            filters: Variable types, strings, predicates, ...
        """
        graphdef, flat = self._numbered(node)
        return (graphdef, *select(View(graphdef, list, flat.leaves, None), filters))

    def flatten(
        self, node: tp.Any, *filters: Filter, with_paths: bool = True
    ) -> tuple[tp.Any, ...]:
        """Like `nnxlite.flatten`, in one numbering; with filters one FlatState for each.

        Args:
            node: an object, or a pytree of objects.
            filters: Variable types, strings, predicates, ...
            with_paths: False gives lists of leaves instead of FlatStates.

        Raises:
            ValueError: where a leaf is matched by no filter, or filters come without paths.
        """
        if filters and not with_paths:
            raise ValueError(
                "flatten sorts leaves by filter only with with_paths=True: pass it, or no filters."
            )
        graphdef, flat = self._numbered(node, with_paths)
        groups = flat.split(*filters) if filters else flat
        return (graphdef, *(groups if isinstance(groups, tuple) else (groups,)))

    def _numbered(self, node: tp.Any, with_paths: bool = True) -> tuple[GraphDef[tp.Any], tp.Any]:
        self._check_open()
        context = current_update_context(self.ctxtag) if self.is_inner else None
        outer = None if context is None else context.inner_ref_outer_index
        index = {"ref_index": self.ref_index, "ref_outer_index": outer}
        return flatten(node, with_paths=with_paths, graph=True, **index)


@contextlib.contextmanager
def split_context(ctxtag: tp.Hashable | None = None) -> tp.Iterator[SplitContext]:
    """A context that splits several objects in one numbering; step 1 or 3 of an update context.

    Args:
        ctxtag: the tag of an active update context, or None for none.

    Returns:
        A context manager; its value is a `SplitContext` with the method `split(node, *filters)`.

    Raises:
        ValueError: where no update context of this tag is active.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> with nnx.split_context() as ctx:
    ...     _, first = ctx.split([model])
    ...     _, second = ctx.split([model, nnx.Param(1.0)])
    >>> len(nnx.to_flat_state(first)), len(nnx.to_flat_state(second))
    (2, 1)
    """
    context = None if ctxtag is None else current_update_context(ctxtag)
    inner = None if context is None else context.outer_ref_outer_index is not None
    with contextlib.closing(SplitContext(ctxtag, RefMap(), inner)) as step:
        yield step
    if context is not None:
        context.flatten_end(step.ref_index)


@dataclasses.dataclass
class MergeContext(_Step):
    """Merges several objects in one numbering; made by `merge_context`.

    Attributes:
        ctxtag: the tag of the update context, or None.
        index_ref: the node of each number so far.
        is_inner: whether this is step 2; None without an update context.

    >>> import nnxlite as nnx
    >>> parts = nnx.split([nnx.Param(1.0)])
    >>> with nnx.merge_context() as ctx:
    ...     type(ctx).__name__, ctx.merge(*parts)[0].value
    ('MergeContext', 1.0)
    """

    ctxtag: tp.Hashable | None
    index_ref: IndexMap
    is_inner: bool | None

    def merge(self, graphdef: GraphDef[N], state: tp.Any, /, *states: tp.Any) -> N:
        """Like `nnxlite.merge`, with new Variables; outside into the objects of step 1.

        Args:
            graphdef: the definition.
            state, states: the states that were split with it.
        """
        leaves = leaves_of(graphdef, (state, *states))
        own = [
            make(x._box.definition, x._box.value) if isinstance(x, Variable) else x for x in leaves
        ]
        return self.unflatten(graphdef, own)

    def unflatten(self, graphdef: GraphDef[N], flat_state: tp.Any, /, *flat_states: tp.Any) -> N:
        """Like `nnxlite.unflatten`, in one numbering, with the Variables of the states.

        Args:
            graphdef: the definition.
            flat_state, flat_states: the leaves that were flattened with it.
        """
        self._check_open()
        leaves: tp.Any = flat_state
        if not isinstance(leaves, (list, tuple)):
            leaves = leaves_of(graphdef, (flat_state, *flat_states))
        outer = None
        if not self.is_inner and self.ctxtag is not None:
            outer = current_update_context(self.ctxtag).outer_index_outer_ref
        return unflatten(graphdef, leaves, index_ref=self.index_ref, outer_index_outer_ref=outer)


@contextlib.contextmanager
def merge_context(
    ctxtag: tp.Hashable | None = None, inner: bool | None = None
) -> tp.Iterator[MergeContext]:
    """A context that merges several objects in one numbering; step 2 or 4 of an update context.

    Args:
        ctxtag: the tag of an active update context, or None for none.
        inner: True for step 2, False for step 4; needed with a tag.

    Returns:
        A context manager; its value is a `MergeContext` with the method `merge(graphdef, *states)`.

    Raises:
        ValueError: where no update context of this tag is active, or `inner` is not given.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> with nnx.split_context() as ctx:
    ...     parts = [ctx.split(model), ctx.split(model.kernel)]
    >>> with nnx.merge_context() as ctx:
    ...     first, second = (ctx.merge(*part) for part in parts)
    >>> first.kernel is second
    True
    """
    context = None if ctxtag is None else current_update_context(ctxtag)
    if context is not None and inner is None:
        raise ValueError(
            "inner_merge must be specified when using ctxtag: pass merge_context(..., inner=True) "
            "inside the transformed function, inner=False outside."
        )
    with contextlib.closing(MergeContext(ctxtag, IndexMap(), inner)) as step:
        yield step
    if context is not None:
        context.unflatten_end(step.index_ref, bool(inner))
