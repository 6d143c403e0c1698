"""Nested mappings as flat ones keyed by path, and back (`nnx.traversals`).

A path is the tuple of keys that leads to a leaf, or, where a separator is given, the keys joined
by it.  `flatten_mapping` and `unflatten_mapping` are inverses, except that empty mappings are dropped
unless `keep_empty_nodes` represents them by `empty_node`.  All functions are iterative: depth is
limited by memory, not by Python's recursion limit.
"""

from __future__ import annotations

import collections.abc as abc
import typing as tp

from nnxlite._state import _flat
from nnxlite._state._flat import Path, empty_node


class IsLeaf(tp.Protocol):
    """A function that decides which mappings are leaves, by path.

    >>> import nnxlite as nnx
    >>> def is_pair(path, mapping):
    ...     return set(mapping) == {"mean", "var"}
    >>> nnx.traversals.flatten_mapping({"bn": {"mean": 0, "var": 1}}, is_leaf=is_pair)
    {('bn',): {'mean': 0, 'var': 1}}
    """

    def __call__(self, path: Path, mapping: abc.Mapping[tp.Any, tp.Any], /) -> bool:
        """Whether the mapping at this path is a leaf.

        Args:
            path: the keys that lead to the mapping.
            mapping: the mapping.
        """
        ...


def flatten_mapping(
    xs: abc.Mapping[tp.Any, tp.Any],
    /,
    *,
    keep_empty_nodes: bool = False,
    is_leaf: IsLeaf | None = None,
    sep: str | None = None,
) -> dict[tp.Any, tp.Any]:
    """A nested mapping as one dict from paths to leaves, in the order of the mapping.

    Args:
        xs: the mapping.
        keep_empty_nodes: represent empty inner mappings by `empty_node`.
        is_leaf: `is_leaf(path, mapping)` decides which mappings are leaves.
        sep: join the keys of a path, which must be strings, by this text.

    Returns:
        A dict whose keys are tuples, or strings with `sep`.

    Raises:
        TypeError: if `xs` is not a mapping, and for keys that `sep` cannot join.

    >>> import nnxlite as nnx
    >>> nnx.traversals.flatten_mapping({"a": {"b": 1, "c": {}}, "d": 2})
    {('a', 'b'): 1, ('d',): 2}
    >>> nnx.traversals.flatten_mapping({"a": {"b": 1}, "d": 2}, sep="/")
    {'a/b': 1, 'd': 2}
    """
    pairs = _pairs("flatten_mapping", xs, keep_empty_nodes, is_leaf)
    if sep is None:
        return dict(pairs)
    return {_joined(path, sep): leaf for path, leaf in pairs}


def flatten_to_sequence(
    xs: abc.Mapping[tp.Any, tp.Any], /, *, is_leaf: IsLeaf | None = None
) -> list[tuple[Path, tp.Any]]:
    """A nested mapping as a list of (path, leaf) pairs, in the order of the mapping.

    Args:
        xs: the mapping.
        is_leaf: as for `flatten_mapping`.

    Returns:
        A list of pairs.

    Raises:
        TypeError: if `xs` is not a mapping.

    >>> import nnxlite as nnx
    >>> nnx.traversals.flatten_to_sequence({"b": 1, "a": {"c": 2}})
    [(('b',), 1), (('a', 'c'), 2)]
    """
    return list(_pairs("flatten_to_sequence", xs, False, is_leaf))


def unflatten_mapping(
    xs: abc.Mapping[tp.Any, tp.Any] | abc.Iterable[tuple[tp.Any, tp.Any]],
    /,
    *,
    sep: str | None = None,
) -> dict[tp.Any, tp.Any]:
    """The nested dict for a mapping, or an iterable of pairs, from paths to leaves.

    Of two entries with the same path the later one is used.

    Args:
        xs: the mapping or the pairs.
        sep: the text that joins the keys of a path; without it paths are tuples.

    Returns:
        A nested dict.

    Raises:
        TypeError: for another argument or a path of another type, or if a path leads through a
            leaf.
        ValueError: for an empty path.

    >>> import nnxlite as nnx
    >>> nnx.traversals.unflatten_mapping({("a", "b"): 1, ("d",): 2})
    {'a': {'b': 1}, 'd': 2}
    """
    pairs = _flat.pairs_of("unflatten_mapping", xs)
    return _flat.nested([(_split(path, sep), {} if x is empty_node else x) for path, x in pairs])


def _pairs(
    function: str, xs: tp.Any, keep_empty_nodes: bool, is_leaf: IsLeaf | None
) -> abc.Iterator[tuple[Path, tp.Any]]:
    """The (path, leaf) pairs of a nested mapping, in its order."""
    if not isinstance(xs, abc.Mapping):
        raise TypeError(f"{function} needs a mapping, got {type(xs).__name__}.")
    if is_leaf is not None and is_leaf((), xs):
        return iter([((), xs)])

    def entries(prefix: list[tp.Any], key: tp.Any, value: tp.Any) -> tp.Any:
        whole = is_leaf is not None and is_leaf((*prefix, key), value)
        return None if whole else value.items()

    return _flat.walked(xs.items(), (abc.Mapping,), entries, keep_empty_nodes)


def _joined(path: Path, sep: str) -> str:
    for key in path:
        if not isinstance(key, str):
            raise TypeError(
                f"Cannot join the path {path} by sep={sep!r}: its key {key!r} is of type "
                f"{type(key).__name__}. Leave out sep, or make the keys strings."
            )
    return sep.join(path)


def _split(path: tp.Any, sep: str | None) -> Path:
    if sep is None:
        if isinstance(path, str):
            raise TypeError(
                f"The path {path!r} is a string: give its separator as sep=, or make it the "
                f"tuple {(path,)}."
            )
        keys = tuple(path)
    elif isinstance(path, str):
        keys = tuple(path.split(sep))
    else:
        raise TypeError(f"With sep={sep!r} a path must be a string, got {path!r}.")
    if not keys:
        raise ValueError("An empty path is not possible in a nested mapping.")
    return keys
