"""Nested mappings: the one order of their keys, walking and building them, comparing their leaves.

Keys are sorted: numbers by value, then strings, then the rest.  That depends on nothing but the keys,
so that leaves are counted off alike in every process.  All walks are loops: depth is bounded by memory
alone.

An inner mapping is a `State` or a plain dict (which a pytree operation may leave inside a State);
the State classes make themselves known here.
"""

from __future__ import annotations

import collections.abc as abc
import typing as tp
from operator import itemgetter

import jax

from nnxlite._base.errors import path_text
from nnxlite._base.interning import Bounded
from nnxlite._base.jax import is_ref
from nnxlite.variables._definition import MISSING
from nnxlite.variables._variable import Variable

Path: tp.TypeAlias = tuple[tp.Any, ...]
Pairs: tp.TypeAlias = abc.Iterable[tuple[Path, tp.Any]]
"""Leaves with their paths."""

Order: tp.TypeAlias = tuple[Path, abc.Callable[[dict[tp.Any, tp.Any]], abc.Sequence[tp.Any]]]
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

    >>> from nnxlite._state._walk import sorted_keys
    >>> sorted_keys(["b", 10, "a", 9])
    [9, 10, 'a', 'b']
    """
    keys = list(keys)
    try:
        return sorted(keys)
    except TypeError:  # keys of different kinds
        return sorted(keys, key=sort_key)


def in_order(mapping: dict[tp.Any, tp.Any]) -> tuple[Path, abc.Sequence[tp.Any]]:
    """The keys of a mapping sorted, and its values in that order."""
    keys = tuple(mapping)
    ordered, values = _orders.get(keys) or _new_order(keys)
    return ordered, values(mapping)


def _new_order(keys: Path) -> Order:
    ordered = tuple(sorted_keys(keys))
    order = ordered, (itemgetter(*ordered) if len(ordered) > 1 else _values)
    if all(type(key) is str for key in keys):  # other keys may be equal and yet differ: 1 and True
        _orders[keys] = order
    return order


def _values(mapping: dict[tp.Any, tp.Any]) -> Path:
    return tuple(mapping.values())


Mapping: tp.TypeAlias = abc.Mapping[tp.Any, tp.Any]
Wrap: tp.TypeAlias = abc.Callable[[dict[tp.Any, tp.Any]], tp.Any]
"""What makes a State of a dict of leaves and States."""

STATES: list[tp.Any] = []
"""The classes of States, `State` itself first."""

NODES: set[type] = {dict}
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
            if type(value) in NODES or isinstance(value, abc.Mapping):
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
        if NODES.isdisjoint(map(type, node.values())):
            continue
        for key, value in node.items():
            if type(value) in NODES and set(map(type, inner := raw(value))) in _SORTABLE:
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
        todo += [v for v in raw(node).values() if type(v) in NODES]
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
        if type(value) not in NODES:
            return None
        return value.items() if as_given else zip(*in_order(raw(value)))

    return list(walked(entries(None, None, state), tuple(NODES), entries))


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
