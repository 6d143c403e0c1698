"""The structure of arguments and results as JSON: dicts, lists, tuples, named tuples and None.

What has been exported is called in processes that know none of the classes, so that no other containers
are possible.  The leaves are stored in a list; a structure names them by their number.
"""

from __future__ import annotations

import collections
import typing as tp

import jax

from nnxlite._base.errors import short_type

Structure: tp.TypeAlias = tp.Any
"""A number for a leaf, None, or [kind, names, structures]."""


def flatten(tree: tp.Any, what: str, first: int = 0) -> tuple[list[tp.Any], Structure, list[str]]:
    """The leaves of a tree, its structure with numbers from `first`, and their paths as text.

    Raises TypeError for a container that cannot be stored, naming `what`.
    """
    leaves: list[tp.Any] = []
    paths: list[str] = []

    def visit(node: tp.Any, path: str) -> Structure:
        if node is None:
            return None
        fields = getattr(node, "_fields", None)
        if fields is not None and isinstance(node, tuple):
            names = [type(node).__name__, *fields]
            return ["namedtuple", names, [visit(x, f"{path}.{n}") for n, x in zip(names[1:], node)]]
        if type(node) in (list, tuple):
            kind = type(node).__name__
            return [kind, [], [visit(x, f"{path}[{i}]") for i, x in enumerate(node)]]
        if type(node) is dict:
            wrong = [key for key in node if not isinstance(key, str)]
            if wrong:
                raise TypeError(
                    f"export: {path} is a dict with the key {wrong[0]!r}; keys have to be strings."
                )
            names = sorted(node)
            return ["dict", names, [visit(node[name], f"{path}[{name!r}]") for name in names]]
        if not jax.tree_util.all_leaves([node]):
            raise TypeError(
                f"export: {path} is a {short_type(node)}, which a process without this class could "
                "not make. Use dicts, lists, tuples and named tuples of arrays."
            )
        leaves.append(node)
        paths.append(path)
        return first + len(leaves) - 1

    return leaves, visit(tree, what), paths


def leaves_of(structure: tp.Any) -> list[int]:
    """The numbers of the leaves of a structure, in order; ValueError for anything else."""
    if structure is None:
        return []
    if type(structure) is int:
        return [structure]
    kind, names, children = structure if isinstance(structure, list) else (None, None, None)
    if not isinstance(names, list) or not isinstance(children, list):
        raise ValueError(f"{repr(structure)[:80]} is not the structure of a tree")
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{repr(names)[:80]} are not names")
    right = {
        "dict": len(set(names)) == len(names) == len(children),
        "list": not names,
        "tuple": not names,
        "namedtuple": len(names) == 1 + len(children) and all(map(str.isidentifier, names)),
    }
    if not isinstance(kind, str) or not right.get(kind, False):
        raise ValueError(f"{repr(kind)[:80]} of {repr(names)[:80]} is not the structure of a tree")
    return [number for child in children for number in leaves_of(child)]


def unflatten(structure: Structure, leaves: tp.Sequence[tp.Any]) -> tp.Any:
    """The tree of a structure and leaves."""
    if structure is None:
        return None
    if isinstance(structure, int):
        return leaves[structure]
    kind, names, children = structure
    values = [unflatten(child, leaves) for child in children]
    if kind == "dict":
        return dict(zip(names, values, strict=True))
    if kind == "namedtuple":
        return collections.namedtuple(names[0], names[1:])(*values)
    return tuple(values) if kind == "tuple" else values


def matching(structure: Structure, tree: tp.Any, path: str) -> tp.Iterator[tp.Any]:
    """The leaves of a tree that must have a structure.

    Raises ValueError, naming the path and both structures, if they differ.
    """
    if structure is None or isinstance(structure, int):
        if (structure is None) is not (tree is None):
            expected = "None" if structure is None else "an array"
            raise ValueError(f"{path} must be {expected}; got {short_type(tree)}.")
        if tree is not None:
            yield tree
        return
    kind, names, children = structure
    if kind == "dict":
        if not isinstance(tree, dict) or sorted(tree, key=str) != names:
            got = f"keys {sorted(tree, key=str)}" if isinstance(tree, dict) else short_type(tree)
            raise ValueError(f"{path} must be a dict with the keys {names}; got {got}.")
        for name, child in zip(names, children):
            yield from matching(child, tree[name], f"{path}[{name!r}]")
        return
    if not isinstance(tree, (list, tuple)) or len(tree) != len(children):
        got = f"{len(tree)}" if isinstance(tree, (list, tuple)) else short_type(tree)
        raise ValueError(f"{path} must be a {kind} of {len(children)}; got {got}.")
    labels = [f".{name}" for name in names[1:]] or [f"[{i}]" for i in range(len(children))]
    for label, child, value in zip(labels, children, tree):
        yield from matching(child, value, path + label)
