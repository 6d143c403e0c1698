"""Nested mappings as paths and leaves, and `FlatState`, the leaves of a State as a sequence.

Keys are sorted: numbers by value, then strings, then the rest.  That depends on nothing but the keys,
so that leaves have the same numbers in every process.  All walks are loops: depth is bounded by memory
alone.

An inner mapping is a `State` or a plain dict (which a pytree operation may leave inside a State);
the State classes make themselves known here.
"""

from __future__ import annotations

import collections.abc as abc
import typing as tp
from operator import itemgetter

import jax

from nnxlite._base.errors import non_exhaustive, path_text
from nnxlite._base.interning import Bounded
from nnxlite._base.jax import is_ref
from nnxlite._base.outline import Shown
from nnxlite._base.text import Text, sequence_node
from nnxlite.filters import Filter, filters_to_predicates, match_index
from nnxlite.variables._definition import MISSING
from nnxlite.variables._variable import Variable

if tp.TYPE_CHECKING:
    from nnxlite._state._definition import State

__all__ = ["FlatState", "filter_state", "split_state", "to_flat_state"]

V = tp.TypeVar("V")
A = tp.TypeVar("A")

Path: tp.TypeAlias = tuple[tp.Any, ...]
Pairs: tp.TypeAlias = abc.Iterable[tuple[Path, tp.Any]]
"""Leaves with their paths."""

Values: tp.TypeAlias = abc.Callable[[tp.Any], tuple[tp.Any, ...]]
"""What takes the values of a mapping (or a list) under some names."""

Order: tp.TypeAlias = tuple[Path, Values]
"""The keys of a mapping sorted, and what takes its values in that order."""

_orders: Bounded[Path, Order] = Bounded(4096)
# Key: the keys of a mapping, all of them text. Nothing to invalidate: an order depends on nothing else.
# Threads: each entry is a single write of a dict. Earned by a State that goes through `jax.jit`
# (`functional`): 7 % of a step, and 30 % of one that only reads.


def sort_key(key: tp.Any) -> tuple[tp.Any, ...]:
    """A key under which keys of different kinds have one order, the same in every process."""
    if isinstance(key, (int, float)):
        return (0, "", key)
    if isinstance(key, str):
        return (1, "", key)
    return (2, type(key).__qualname__, repr(key))


def sorted_keys(keys: abc.Iterable[tp.Any]) -> list[tp.Any]:
    """Keys in the order that depends on nothing but the keys.

    >>> from nnxlite._state._flat import sorted_keys
    >>> sorted_keys(["b", 10, "a", 9])
    [9, 10, 'a', 'b']
    """
    keys = list(keys)
    try:
        return sorted(keys)
    except (TypeError, ValueError):  # keys of different kinds
        return sorted(keys, key=sort_key)


def in_order(mapping: dict[tp.Any, tp.Any]) -> tuple[Path, abc.Sequence[tp.Any]]:
    """The keys of a mapping sorted, and its values in that order."""
    keys = tuple(mapping)
    ordered, values = _orders.get(keys) or _new_order(keys)
    return ordered, values(mapping)


def _new_order(keys: Path) -> Order:
    ordered = tuple(sorted_keys(keys))
    order = ordered, values_getter(ordered)
    if all(type(key) is str for key in keys):  # other keys may be equal and yet differ: 1 and True
        _orders[keys] = order
    return order


def values_getter(names: Path) -> Values:
    """A function that gives the values of a mapping (or a list) under these names."""
    if not names:
        return lambda mapping: ()
    if len(names) == 1:
        (name,) = names
        return lambda mapping: (mapping[name],)
    return itemgetter(*names)


Mapping: tp.TypeAlias = abc.Mapping[tp.Any, tp.Any]
Wrap: tp.TypeAlias = abc.Callable[[dict[tp.Any, tp.Any]], tp.Any]
"""What makes a State of a dict of leaves and States."""

STATES: list[tp.Any] = []
"""The classes of States, `State` itself first."""

INNER_MAPPINGS: set[type] = {dict}
"""The classes of what counts as an inner mapping once it is inside a State."""


def raw(node: tp.Any) -> dict[tp.Any, tp.Any]:
    """The dict of an inner mapping."""
    return node if type(node) is dict else node._mapping


def transformed(
    mapping: Mapping, wrap: Wrap | None, leaf: abc.Callable[[tp.Any], tp.Any] | None = None
) -> dict[tp.Any, tp.Any]:
    """A copy of a nested mapping: inner mappings wrapped, leaves transformed.

    Raises ValueError when a mapping contains itself.
    """
    root: dict[tp.Any, tp.Any] = {}
    stack = [(root, iter(mapping.items()), id(mapping))]
    inside = {id(mapping)}
    while stack:
        target, items, identity = stack[-1]
        for key, value in items:
            if type(value) in INNER_MAPPINGS or isinstance(value, abc.Mapping):
                if id(value) in inside:
                    raise ValueError(f"The mapping under {key!r} contains itself; no State can.")
                inner: dict[tp.Any, tp.Any] = {}
                target[key] = inner if wrap is None else wrap(inner)
                inside.add(id(value))
                stack.append((inner, iter(value.items()), id(value)))
                break
            target[key] = value if leaf is None else leaf(value)
        else:
            stack.pop()
            inside.discard(identity)
    return root


_SORTABLE: tuple[set[type], ...] = (set(), {str}, {int})


def as_dicts(mapping: dict[tp.Any, tp.Any]) -> dict[tp.Any, tp.Any]:
    """The mapping with plain dicts in place of inner States, where their keys have JAX's order."""
    nodes = [dict(mapping)]
    for node in nodes:  # grows on the way
        if INNER_MAPPINGS.isdisjoint(map(type, node.values())):
            continue
        for key, value in node.items():
            if type(value) in INNER_MAPPINGS and set(map(type, inner := raw(value))) in _SORTABLE:
                node[key] = inner = dict(inner)
                nodes.append(inner)
    return nodes[0]


def reaches(start: Mapping, target: Mapping) -> bool:
    """Whether `target` is `start` or an inner mapping of it."""
    todo: list[tp.Any] = [start]
    while todo:
        node = todo.pop()
        if node is target:
            return True
        todo += [v for v in raw(node).values() if type(v) in INNER_MAPPINGS]
    return False


class _EmptyNode:
    """Represents an empty mapping in a flat one; there is one such object."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "empty_node"

    def __reduce__(self) -> str:
        return "empty_node"


empty_node = _EmptyNode()
"""Represents an empty mapping among the values of a flattened one."""

Entries: tp.TypeAlias = abc.Callable[[list[tp.Any], tp.Any, tp.Any], tp.Any]
"""The (key, value) pairs of an inner mapping, given the keys that lead to it; None for a leaf."""


def walked(
    pairs: abc.Iterable[tuple[tp.Any, tp.Any]],
    kinds: tuple[type, ...],
    entries: Entries,
    keep_empty_nodes: bool = False,
) -> abc.Iterator[tuple[Path, tp.Any]]:
    """The (path, leaf) pairs of a nested mapping, depth first; mappings are of these kinds."""
    prefix: list[tp.Any] = []  # one list for all levels: only a leaf needs its path as a tuple
    stack = [iter(pairs)]
    while stack:
        for key, value in stack[-1]:
            inner = entries(prefix, key, value) if isinstance(value, kinds) else None
            if inner is not None and (value or not keep_empty_nodes):
                prefix.append(key)
                stack.append(iter(inner))
                break
            yield (*prefix, key), value if inner is None else empty_node
        else:
            stack.pop()
            if prefix:
                prefix.pop()


def flat(state: Mapping, *, as_given: bool = False) -> list[tuple[Path, tp.Any]]:
    """The paths and leaves of a State, sorted; `as_given` leaves keys in the order they have."""

    def entries(prefix: tp.Any, key: tp.Any, value: tp.Any) -> tp.Any:
        if type(value) not in INNER_MAPPINGS:
            return None
        return value.items() if as_given else zip(*in_order(raw(value)))

    return list(walked(entries(None, None, state), tuple(INNER_MAPPINGS), entries))


def nested(pairs: Pairs, wrap: Wrap | None = None) -> dict[tp.Any, tp.Any]:
    """The nested mapping of these leaves; the later one counts where a path comes twice.

    A mapping that is a leaf is copied before it gets further entries.  Raises TypeError when a path
    leads through another leaf.
    """
    root: dict[tp.Any, tp.Any] = {}
    made: dict[int, tuple[tp.Any, dict[tp.Any, tp.Any]]] = {}  # what is made here, by identity
    for path, leaf in pairs:
        node = root
        for key in path[:-1]:
            value = node.get(key, empty_node)
            if id(value) not in made:
                inner = _copied(value, path, key)
                value = node[key] = inner if wrap is None else wrap(inner)
                made[id(value)] = value, inner
            node = made[id(value)][1]
        node[path[-1]] = leaf
    return root


def _copied(value: tp.Any, path: Path, key: tp.Any) -> dict[tp.Any, tp.Any]:
    if value is empty_node:
        return {}
    if isinstance(value, abc.Mapping):
        return dict(value)
    raise TypeError(
        f"The path '{path_text(path)}' leads through the key {key!r}, which holds a leaf "
        f"({type(value).__name__}) already: one path cannot be the beginning of another."
    )


def state_of(pairs: Pairs) -> tp.Any:
    """The State of these leaves; see `nested`."""
    wrap = STATES[0]._nnx_wrap
    return wrap(nested(pairs, wrap))


def content(leaf: tp.Any) -> tp.Any:
    """The raw value of a Variable, or another leaf, read out of its reference where it lives in one."""
    value: tp.Any = leaf.get_raw_value() if isinstance(leaf, Variable) else leaf
    return value[...] if is_ref(value) else value


def same(a: Mapping, b: Mapping) -> bool:
    """Whether two nested mappings have the same keys and equal leaves."""
    todo: list[tuple[Mapping, Mapping]] = [(a, b)]
    while todo:
        a, b = todo.pop()
        if a is b:
            continue
        if len(a) != len(b):
            return False
        for key, x in a.items():
            y = b.get(key, MISSING)
            if isinstance(x, abc.Mapping) and isinstance(y, abc.Mapping):
                todo.append((x, y))
            elif not same_leaf(x, y):
                return False
    return True


def same_leaf(x: tp.Any, y: tp.Any) -> bool:
    """Whether two leaves are equal: Variables by class, metadata and value, arrays by content."""
    if x is y:
        return True
    if x is MISSING or y is MISSING:
        return False
    if isinstance(x, Variable) and isinstance(y, Variable):
        return (
            type(x) is type(y)
            and x.get_metadata() == y.get_metadata()
            and same_leaf(content(x), content(y))
        )
    if hasattr(x, "dtype") and hasattr(y, "dtype"):
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        if isinstance(x, jax.ShapeDtypeStruct) or isinstance(y, jax.ShapeDtypeStruct):
            return bool(x == y)
        return bool((x == y).all())
    return bool(x == y)


def as_state(function: str, state: tp.Any) -> tp.Any:
    """The argument as a State; other mappings are copied into one."""
    if type(state) in STATES:
        return state
    if isinstance(state, FlatState):
        return state.to_nested_state()
    if isinstance(state, abc.Mapping):
        return STATES[0](state)
    raise TypeError(
        f"{function} needs a State (or another mapping), got {type(state).__name__}. For an object "
        "with Variables in it, take nnx.state(object) first."
    )


# Flat states ------------------------------------------------------------------------------------

FlatItems: tp.TypeAlias = abc.Mapping[Path, V] | abc.Iterable[tuple[Path, V]]
"""Leaves with their paths: a FlatState is one."""


class FlatState(Shown, abc.Sequence[tuple[Path, V]]):
    """The leaves of a State as a sequence of (path, leaf) pairs; a pytree of the leaves.

    Args:
        items: a mapping, or an iterable of pairs, from paths to leaves.
        sort: whether to bring them into the order of paths; False when they are in it.

    >>> import nnxlite as nnx
    >>> flat = nnx.FlatState([(("b",), 1), (("a", "c"), 2)], sort=True)
    >>> flat.paths, flat.leaves
    ((('a', 'c'), ('b',)), [2, 1])
    """

    __slots__ = ("_paths", "_leaves", "__weakref__")

    _paths: tuple[Path, ...]
    _leaves: list[V]

    def __init__(self, items: FlatItems[V], /, *, sort: bool) -> None:
        pairs = [(tuple(path), leaf) for path, leaf in pairs_of("FlatState", items)]
        if sort:
            try:
                pairs.sort(key=lambda pair: pair[0])
            except (TypeError, ValueError):  # keys of different kinds
                pairs.sort(key=lambda pair: [sort_key(key) for key in pair[0]])
        self._paths = tuple([path for path, _ in pairs])
        self._leaves = [leaf for _, leaf in pairs]

    @staticmethod
    def from_sorted_keys_values(
        keys: abc.Sequence[Path], values: abc.Sequence[A], /
    ) -> FlatState[A]:
        """A FlatState of paths that are sorted already, which is not checked.

        A list of values is taken over, not copied.  Raises ValueError where there are not as many
        values as paths.

        Args:
            keys: the paths.
            values: the leaves, in their order.
        """
        if len(keys) != len(values):
            raise ValueError(f"A FlatState of {len(keys)} paths cannot have {len(values)} leaves.")
        new: FlatState[A] = object.__new__(FlatState)
        new._paths = tuple(keys)
        new._leaves = values if type(values) is list else list(values)
        return new

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths, in order."""
        return self._paths

    @property
    def leaves(self) -> list[V]:
        """The leaves, in the order of the paths."""
        return self._leaves

    @tp.overload
    def __getitem__(self, index: int) -> tuple[Path, V]: ...
    @tp.overload
    def __getitem__(self, index: slice) -> FlatState[V]: ...
    def __getitem__(self, index: int | slice) -> tuple[Path, V] | FlatState[V]:
        if isinstance(index, slice):
            return FlatState.from_sorted_keys_values(self._paths[index], self._leaves[index])
        return self._paths[index], self._leaves[index]

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> abc.Iterator[tuple[Path, V]]:
        return iter(zip(self._paths, self._leaves, strict=True))

    def __contains__(self, item: object) -> bool:
        return any(
            type(item) is tuple and len(item) == 2 and p == item[0] and same_leaf(x, item[1])
            for p, x in self
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType] - leaves may be mutable

    def __eq__(self, other: object) -> bool:
        """Whether paths and leaves are equal; leaves compare as in `State`."""
        if not isinstance(other, FlatState):
            return NotImplemented
        return self._paths == other._paths and all(map(same_leaf, self._leaves, other._leaves))

    def __reduce__(self) -> tp.Any:
        return FlatState.from_sorted_keys_values, (self._paths, self._leaves)

    __str__ = Shown.__repr__

    def __nnx_text__(self) -> Text:
        return sequence_node(self, self)

    def to_nested_state(self) -> State[tp.Any, V]:
        """The State of the same leaves; the inverse of `to_flat_state`."""
        return state_of(self)

    def split(self, first: Filter, /, *filters: Filter) -> tp.Any:
        """See `nnx.split_state`.

        Args:
            first, filters: Variable types, strings, predicates, ...
        """
        return _divided(self, (first, *filters), _sorted, exhaustive=True)

    def filter(self, first: Filter, /, *filters: Filter) -> tp.Any:
        """See `nnx.filter_state`.

        Args:
            first, filters: Variable types, strings, predicates, ...
        """
        return _divided(self, (first, *filters), _sorted, exhaustive=False)

    @staticmethod
    def merge(
        flat_state: abc.Iterable[tuple[Path, A]], /, *flat_states: abc.Iterable[tuple[Path, A]]
    ) -> FlatState[A]:
        """One FlatState of the leaves of all.

        A path that several have comes once for each, in their order; in `to_nested_state` the last
        one counts.

        Args:
            flat_state, flat_states: FlatStates, or pairs of path and leaf.
        """
        if not flat_states and isinstance(flat_state, FlatState):
            return flat_state
        pairs = [pair for flat in (flat_state, *flat_states) for pair in flat]
        return FlatState(pairs, sort=True)


def _sorted(pairs: list[tuple[Path, tp.Any]]) -> FlatState[tp.Any]:
    paths, leaves = [path for path, _ in pairs], [leaf for _, leaf in pairs]
    return FlatState.from_sorted_keys_values(paths, leaves)


jax.tree_util.register_pytree_node(
    FlatState,
    lambda flat: (flat._leaves, flat._paths),
    lambda paths, leaves: FlatState.from_sorted_keys_values(paths, list(leaves)),
)


def pairs_of(what: str, items: tp.Any) -> abc.Iterable[tuple[tp.Any, tp.Any]]:
    """The pairs of path and leaf in a mapping, or those that are given; raises TypeError for others."""
    if not isinstance(items, abc.Iterable):
        raise TypeError(
            f"{what} needs a mapping from paths to leaves, or an iterable of (path, leaf) pairs, "
            f"got {type(items).__name__}."
        )
    return items.items() if isinstance(items, abc.Mapping) else items


def _divided(
    pairs: Pairs,
    filters: tuple[Filter, ...],
    made: tp.Callable[[list[tuple[Path, tp.Any]]], tp.Any],
    *,
    exhaustive: bool,
) -> tp.Any:
    """The leaves that each filter is the first to match, as `made` of them; a tuple for several.

    With `exhaustive`, raises ValueError where one is left over.
    """
    predicates = filters_to_predicates(filters)
    groups: list[list[tuple[Path, tp.Any]]] = [[] for _ in (*predicates, None)]
    for path, leaf in pairs:
        index = match_index(predicates, path, leaf)
        groups[-1 if index is None else index].append((path, leaf))
    rest = groups.pop()
    if exhaustive and rest:
        raise ValueError(non_exhaustive(filters, rest))
    states = [made(group) for group in groups]
    return tuple(states) if len(states) > 1 else states[0]


def to_flat_state(state: abc.Mapping[tp.Any, V]) -> FlatState[V]:
    """The leaves of a State, sorted by path; the inverse of `from_flat_state`.

    Args:
        state: a State or nested mapping.

    Returns:
        A `FlatState`: a sequence of pairs (path, leaf).

    Raises:
        TypeError: for something that is not a mapping.

    >>> import nnxlite as nnx
    >>> list(nnx.to_flat_state(nnx.State({"b": {"c": 1}, "a": 2})))
    [(('a',), 2), (('b', 'c'), 1)]
    """
    return _sorted(flat(as_state("to_flat_state", state)))


@tp.overload
def split_state(state: Mapping, first: Filter, /) -> State[tp.Any, tp.Any]: ...
@tp.overload
def split_state(
    state: Mapping, first: Filter, second: Filter, /, *filters: Filter
) -> tuple[State[tp.Any, tp.Any], ...]: ...
def split_state(state: Mapping, first: Filter, /, *filters: Filter) -> tp.Any:
    """One State for each filter: the leaves that it is the first to match.

    Args:
        state: a State or nested mapping.
        first, filters: Variable types, strings, predicates, ...; a leaf goes to the first that
            matches.

    Returns:
        A State for one filter and a tuple for several; `merge_state` is the inverse.

    Raises:
        ValueError: when a leaf is left over, or `...` is not the last filter.
        TypeError: for something that is not a mapping or not a filter.

    >>> import nnxlite as nnx
    >>> state = nnx.State({"a": nnx.Param(1), "b": nnx.BatchStat(2)})
    >>> params, rest = nnx.split_state(state, nnx.Param, ...)
    >>> list(params), list(rest)
    (['a'], ['b'])
    """
    pairs = flat(as_state("split_state", state))
    return _divided(pairs, (first, *filters), state_of, exhaustive=True)


@tp.overload
def filter_state(state: Mapping, first: Filter, /) -> State[tp.Any, tp.Any]: ...
@tp.overload
def filter_state(
    state: Mapping, first: Filter, second: Filter, /, *filters: Filter
) -> tuple[State[tp.Any, tp.Any], ...]: ...
def filter_state(state: Mapping, first: Filter, /, *filters: Filter) -> tp.Any:
    """As `split_state`, but leaves that no filter matches are left out.

    Args:
        state: a State or nested mapping.
        first, filters: Variable types, strings, predicates, ...; a leaf goes to the first that
            matches.

    Returns:
        A State for one filter, a tuple of States for several.

    Raises:
        TypeError: for something that is not a mapping or not a filter.

    >>> import nnxlite as nnx
    >>> state = nnx.State({"a": nnx.Param(1), "b": nnx.BatchStat(2)})
    >>> list(nnx.filter_state(state, nnx.BatchStat))
    ['b']
    """
    pairs = flat(as_state("filter_state", state))
    return _divided(pairs, (first, *filters), state_of, exhaustive=False)
