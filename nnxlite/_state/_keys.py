"""The one order of keys: numbers by value, then strings, then the rest.

It depends on nothing but the keys, so that leaves are counted off alike in every process.
"""

from __future__ import annotations

import collections.abc as abc
import typing as tp
from operator import itemgetter

V = tp.TypeVar("V")

Path: tp.TypeAlias = tuple[tp.Any, ...]
Order: tp.TypeAlias = tuple[Path, abc.Callable[[dict[tp.Any, tp.Any]], abc.Sequence[tp.Any]]]
"""The keys of a mapping sorted, and what takes its values in that order."""

_orders: dict[Path, Order] = {}
_ORDERS_KEPT = 4096
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


def _path_rank(path: Path) -> tuple[tp.Any, ...]:
    return tuple([sort_key(key) for key in path])


def sorted_keys(keys: abc.Iterable[tp.Any]) -> list[tp.Any]:
    """Keys in the order that depends on nothing but the keys.

    >>> from nnxlite._state._keys import sorted_keys
    >>> sorted_keys(["b", 10, "a", 9])
    [9, 10, 'a', 'b']
    """
    keys = list(keys)
    try:
        return sorted(keys)
    except TypeError:  # keys of different kinds
        return sorted(keys, key=sort_key)


def sorted_pairs(pairs: abc.Iterable[tuple[Path, V]]) -> list[tuple[Path, V]]:
    """Pairs of path and leaf in the order of the paths."""
    pairs = list(pairs)
    try:
        return sorted(pairs, key=lambda pair: pair[0])
    except TypeError:
        return sorted(pairs, key=lambda pair: _path_rank(pair[0]))


def in_order(mapping: dict[tp.Any, tp.Any]) -> tuple[Path, abc.Sequence[tp.Any]]:
    """The keys of a mapping sorted, and its values in that order."""
    keys = tuple(mapping)
    ordered, values = _orders.get(keys) or _new_order(keys)
    return ordered, values(mapping)


def _new_order(keys: Path) -> Order:
    ordered = tuple(sorted_keys(keys))
    order = ordered, (itemgetter(*ordered) if len(ordered) > 1 else _values)
    if all(type(key) is str for key in keys):  # other keys may be equal and yet differ: 1 and True
        if len(_orders) >= _ORDERS_KEPT:
            _orders.clear()
        _orders[keys] = order
    return order


def _values(mapping: dict[tp.Any, tp.Any]) -> Path:
    return tuple(mapping.values())
