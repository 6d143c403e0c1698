"""Trees whose leaves are Variables: taken apart, read, written and compared in one place.

Everything in training works on two trees of the same shape, one of Variables and one of plain
values.  `flatten` goes from the first to a flat list; the values go through optax or an average as
the second; `write` puts results back.  Reading and writing here are raw: callbacks of a Variable
belong to the model's own use of it, not to its training.
"""

from __future__ import annotations

import typing as tp

import jax
import numpy as np

from nnxlite._errors import path_text, short_type
from nnxlite._jax import is_ref, key_name
from nnxlite.variables import Variable

Path: tp.TypeAlias = tuple[tp.Any, ...]
TreeDef: tp.TypeAlias = tp.Any  # to a type checker jax.tree_util.PyTreeDef is a value
MOST_PATHS = 8  # how many paths a message names


def is_variable(value: tp.Any) -> bool:
    """Whether a value is a Variable (the leaves of the trees here)."""
    return isinstance(value, Variable)


def flatten(tree: tp.Any) -> tuple[list[tp.Any], TreeDef]:
    """The leaves of a tree, Variables whole, and its structure."""
    return jax.tree.flatten(tree, is_leaf=is_variable)


def paths(tree: tp.Any) -> list[Path]:
    """The path of each leaf of `flatten`, as plain names."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)
    return [tuple(key_name(entry) for entry in path) for path, _ in found]


def read(leaf: tp.Any) -> tp.Any:
    """The stored value of a Variable, out of its reference if it has one; other leaves as is."""
    if not isinstance(leaf, Variable):
        return leaf
    value = leaf.get_raw_value()
    return value[...] if is_ref(value) else value


def write(variable: Variable[tp.Any], value: tp.Any) -> None:
    """Store a value in a Variable, or in the reference that it holds."""
    if variable.ref:
        variable.get_raw_value()[...] = value
    else:
        variable.set_raw_value(value)


def pure(tree: tp.Any) -> tp.Any:
    """The tree with each Variable replaced by its value."""
    return jax.tree.map(read, tree, is_leaf=is_variable)


def compare(expected: tp.Any, got: tp.Any, *, what: str, of: str | None = None) -> str:
    """What is wrong with the paths of `got`, in words; empty when they are those of `expected`.

    Where `of` does not name the expected ones, `got` may have more.
    """
    wanted, found = paths(expected), paths(got)
    lines = [_difference(f"missing from the {what}", wanted, found)]
    if of is not None:
        lines.append(_difference(f"not among the {of}", found, wanted))
    return "; ".join(line for line in lines if line)


def _difference(title: str, some: tp.Iterable[Path], others: tp.Iterable[Path]) -> str:
    others = set(others)
    only = [path_text(p) for p in some if p not in others]
    if not only:
        return ""
    more = f" and {len(only) - MOST_PATHS} more" if len(only) > MOST_PATHS else ""
    return f"{title}: {', '.join(only[:MOST_PATHS])}{more}"


def _shape(value: tp.Any) -> tp.Any:
    """The shape of an array, abstract or not; of a Python number, too; those in another pytree."""
    if hasattr(value, "shape"):
        return value.shape
    leaves, treedef = jax.tree.flatten(value)
    if jax.tree_util.treedef_is_leaf(treedef):
        return np.shape(value)
    return treedef, tuple(_shape(leaf) for leaf in leaves)


def _text(value: tp.Any) -> str:
    """A value in a few words, the leaves of a pytree one by one."""
    if jax.tree_util.all_leaves([value]):
        return short_type(value)
    return str(jax.tree.map(short_type, value))


def misshapen(
    tree: tp.Any, expected: tp.Sequence[tp.Any], got: tp.Sequence[tp.Any], *, what: str, of: str
) -> str:
    """The leaves of `got` whose shape is not that of `expected`, in words; empty if none."""
    wrong = [
        f"{path_text(path)}: {what} {_text(b)}, {of} {_text(a)}"
        for path, a, b in zip(paths(tree), expected, got, strict=True)
        if _shape(a) != _shape(b)
    ]
    more = f"; and {len(wrong) - MOST_PATHS} more" if len(wrong) > MOST_PATHS else ""
    return "; ".join(wrong[:MOST_PATHS]) + more
