"""Walking and building nested mappings, iteratively: depth is bounded by memory alone.

An inner mapping is a `State` or a plain dict (which a pytree operation may leave inside a State);
the State classes make themselves known here.
"""

from __future__ import annotations

import collections.abc as abc
import typing as tp

from nnxlite._errors import path_text
from nnxlite._state._keys import Path, in_order

Mapping: tp.TypeAlias = abc.Mapping[tp.Any, tp.Any]
Wrap: tp.TypeAlias = abc.Callable[[dict[tp.Any, tp.Any]], tp.Any]
"""What makes a State of a dict of leaves and States."""

STATES: set[type] = set()
"""The classes of States."""

NODES: set[type] = {dict}
"""The classes of what counts as an inner mapping once it is inside a State."""

MISSING: tp.Any = object()


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


def adopted(mapping: dict[tp.Any, tp.Any], wrap: Wrap) -> dict[tp.Any, tp.Any]:
    """The dict itself, every dict below it wrapped in place."""
    nodes = [mapping]
    for node in nodes:  # grows on the way
        for key, value in node.items():
            if type(value) is dict:
                node[key] = wrap(value)
                nodes.append(value)
            elif type(value) not in STATES and isinstance(value, abc.Mapping):
                node[key] = wrap(transformed(value, wrap))
    return mapping


_SORTABLE: tuple[set[type], ...] = (set(), {str}, {int})


def as_dicts(mapping: dict[tp.Any, tp.Any]) -> dict[tp.Any, tp.Any]:
    """The mapping with plain dicts in place of inner States, where their keys have JAX's order."""
    nodes = [dict(mapping)]
    for node in nodes:  # grows on the way
        for key, value in node.items():
            if type(value) in NODES:
                inner = raw(value)
                if set(map(type, inner)) in _SORTABLE:
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


def flat(state: Mapping, *, as_given: bool = False) -> tuple[list[Path], list[tp.Any]]:
    """The paths and leaves of a State, sorted; `as_given` leaves keys in the order they have."""
    parts = _as_given if as_given else in_order
    paths: list[Path] = []
    leaves: list[tp.Any] = []
    prefix: list[tp.Any] = []  # one list for all levels: a path is only spelled out for a leaf
    stack = [iter(zip(*parts(raw(state)), strict=True))]
    while stack:
        for key, value in stack[-1]:
            if type(value) in NODES:
                prefix.append(key)
                stack.append(iter(zip(*parts(raw(value)), strict=True)))
                break
            paths.append((*prefix, key))
            leaves.append(value)
        else:
            stack.pop()
            if prefix:
                prefix.pop()
    return paths, leaves


def _as_given(mapping: Mapping) -> tuple[tp.Any, tp.Any]:
    return mapping.keys(), mapping.values()


def nested(
    paths: abc.Iterable[Path], leaves: abc.Iterable[tp.Any], wrap: Wrap | None
) -> dict[tp.Any, tp.Any]:
    """The nested mapping of these leaves; the later one counts where a path comes twice.

    Cheapest when the paths are sorted: only the part in which two neighbours differ is walked.

    Raises TypeError when a path leads through a leaf.
    """
    root: dict[tp.Any, tp.Any] = {}
    chain = [root]  # the dicts on the way to the last leaf
    last: Path = ()
    for path, leaf in zip(paths, leaves, strict=True):
        parent = path[:-1]
        if parent != last:
            common = _common(parent, last)
            del chain[common + 1 :]
            for key in parent[common:]:
                chain.append(_step(chain[-1], key, path, wrap))
            last = parent
        chain[-1][path[-1]] = leaf
    return root


def _common(a: Path, b: Path) -> int:
    """How many keys two different paths share at the start."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    i = 0
    while a[i] == b[i]:
        i += 1
    return i


def _step(
    mapping: dict[tp.Any, tp.Any], key: tp.Any, path: Path, wrap: Wrap | None
) -> dict[tp.Any, tp.Any]:
    """The inner dict under a key, made if there is none."""
    value = mapping.get(key, MISSING)
    if value is MISSING:
        inner: dict[tp.Any, tp.Any] = {}
        mapping[key] = inner if wrap is None else wrap(inner)
        return inner
    if wrap is not None and type(value) is dict:
        value = mapping[key] = wrap(transformed(value, wrap))
    if type(value) in NODES:
        return raw(value)
    raise TypeError(
        f"The path '{path_text(path)}' leads through the key {key!r}, which holds a leaf "
        f"({type(value).__name__}) already: one path cannot be the beginning of another."
    )
