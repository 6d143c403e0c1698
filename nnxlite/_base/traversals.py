"""Nested mappings as flat ones keyed by path, and back (`nnx.traversals`).

A path is the tuple of keys that leads to a leaf, or, where a separator is given, the keys joined
by it.  `flatten_mapping` and `unflatten_mapping` are inverses, except that empty mappings are dropped
unless `keep_empty_nodes` represents them by `empty_node`.  All functions are iterative: depth is
limited by memory, not by Python's recursion limit.
"""

from __future__ import annotations

import collections.abc as abc
import typing as tp

Path: tp.TypeAlias = tuple[tp.Any, ...]


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


class _EmptyNode:
    """Represents an empty mapping in a flat one; there is one such object."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "empty_node"

    def __reduce__(self) -> str:
        return "empty_node"


empty_node = _EmptyNode()
"""Represents an empty mapping among the values of a flattened one."""


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
    _check_mapping("flatten_mapping", xs)
    pairs = _walk(xs, keep_empty_nodes, is_leaf)
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
    _check_mapping("flatten_to_sequence", xs)
    return list(_walk(xs, False, is_leaf))


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
    if not isinstance(xs, abc.Iterable):
        raise TypeError(
            "unflatten_mapping needs a mapping or an iterable of (path, leaf) pairs, got "
            f"{type(xs).__name__}."
        )
    root: dict[tp.Any, tp.Any] = {}
    # The dicts made here, by identity: a dict that is a leaf is copied before it gets entries.
    made = {id(root): root}
    for path, leaf in xs.items() if isinstance(xs, abc.Mapping) else xs:
        keys = _split(path, sep)
        node = root
        for depth, key in enumerate(keys[:-1], 1):
            inner = node.get(key, empty_node)
            if id(inner) not in made:
                inner = node[key] = _new_node(inner, keys, depth)
                made[id(inner)] = inner
            node = inner
        node[keys[-1]] = {} if leaf is empty_node else leaf
    return root


def _check_mapping(function: str, xs: tp.Any) -> None:
    if not isinstance(xs, abc.Mapping):
        raise TypeError(f"{function} needs a mapping, got {type(xs).__name__}.")


def _walk(
    xs: abc.Mapping[tp.Any, tp.Any], keep_empty_nodes: bool, is_leaf: IsLeaf | None
) -> abc.Iterator[tuple[Path, tp.Any]]:
    """The (path, leaf) pairs of a nested mapping, depth first."""
    if is_leaf is not None and is_leaf((), xs):
        yield (), xs
        return
    prefix: list[tp.Any] = []  # one list for all levels: only a leaf needs its path as a tuple
    stack = [iter(xs.items())]
    while stack:
        for key, value in stack[-1]:
            path: Path = ()
            if isinstance(value, abc.Mapping):
                if is_leaf is None or not is_leaf(path := (*prefix, key), value):
                    if value:
                        prefix.append(key)
                        stack.append(iter(value.items()))
                        break
                    if not keep_empty_nodes:
                        continue
                    value = empty_node
            yield path or (*prefix, key), value
        else:
            stack.pop()
            if prefix:
                prefix.pop()


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


def _new_node(value: tp.Any, keys: Path, depth: int) -> dict[tp.Any, tp.Any]:
    """A dict for `keys[:depth]`, to replace `value` (`empty_node` if there is none)."""
    if value is empty_node:
        return {}
    if isinstance(value, abc.Mapping):
        return dict(value)
    raise TypeError(
        f"The path {keys} leads through {keys[:depth]}, which is a leaf of type "
        f"{type(value).__name__} already."
    )
