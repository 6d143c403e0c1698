"""Trees whose leaves are Variables: how training flattens, reads, writes and compares them.

Training works on two trees of the same structure, one of Variables and one of their values.
`flatten` makes a flat list from the first; optax and averages work on the second; `write_together`
stores the results.  Reading and writing here bypass the hooks of Variables, which are for the model's
own use.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import MOST_PATHS, listed, path_text, short_type
from nnxlite._base.jax import is_ref, key_name
from nnxlite.variables._variable import Variable, is_variable, store_together

Path: tp.TypeAlias = tuple[tp.Any, ...]
TreeDef: tp.TypeAlias = tp.Any  # to a type checker jax.tree_util.PyTreeDef is a value


def flatten(tree: tp.Any) -> tuple[list[tp.Any], TreeDef]:
    """The leaves of a tree, with Variables as leaves, and its structure."""
    return jax.tree.flatten(tree, is_leaf=is_variable)


def pairs(tree: tp.Any) -> list[tuple[Path, tp.Any]]:
    """The leaves of a tree with their paths; Variables are leaves."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)
    return [(tuple(key_name(entry) for entry in path), leaf) for path, leaf in found]


def paths(tree: tp.Any) -> list[Path]:
    """The path of each leaf of `flatten`, as names and indices."""
    return [path for path, _ in pairs(tree)]


def read(leaf: tp.Any) -> tp.Any:
    """The stored value of a Variable, read from its reference if it has one; other leaves unchanged."""
    if not isinstance(leaf, Variable):
        return leaf
    value = leaf.get_raw_value()
    return value[...] if is_ref(value) else value


def write_together(pairs: tp.Iterable[tuple[Variable[tp.Any], tp.Any]]) -> None:
    """Store values in Variables; in those without a reference in one step, which nothing interrupts."""
    pairs = list(pairs)
    for variable, _ in pairs:
        if not variable.ref:
            variable._check_level()
    for variable, value in pairs:
        if variable.ref:
            variable.get_raw_value()[...] = value
    store_together([(variable._box, value) for variable, value in pairs if not variable.ref])


def wide_dtype(value: tp.Any) -> tp.Any:
    """The dtype, of 32 bits or more, to compute with a floating or complex value in; None for others."""
    number = type(value) if isinstance(value, (float, complex)) else None
    dtype = getattr(value, "dtype", number)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return None
    dtype = jax.dtypes.canonicalize_dtype(dtype)  # 32 bits for 64, unless JAX has those
    return dtype if dtype.itemsize >= 4 else jnp.dtype("float32")


def pure(tree: tp.Any) -> tp.Any:
    """The tree with each Variable replaced by its value."""
    return jax.tree.map(read, tree, is_leaf=is_variable)


def compare(expected: tp.Any, got: tp.Any, *, what: str, of: str | None = None) -> str:
    """What is wrong with the paths of `got`, in words; empty if they are those of `expected`.

    Without `of`, a name for the expected ones, `got` may have further paths.
    """
    expected_paths, got_paths = paths(expected), paths(got)
    lines = [_difference(f"missing from the {what}", expected_paths, got_paths)]
    if of is not None:
        lines.append(_difference(f"not among the {of}", got_paths, expected_paths))
    return "; ".join(line for line in lines if line)


def _difference(title: str, some: tp.Iterable[Path], others: tp.Iterable[Path]) -> str:
    others = set(others)
    only = [path_text(p) for p in some if p not in others]
    return f"{title}: {listed(only)}" if only else ""


def _shape(value: tp.Any) -> tp.Any:
    """The shape of an array (also abstract) or number; for another pytree, all shapes in it."""
    if hasattr(value, "shape"):
        return value.shape
    leaves, treedef = jax.tree.flatten(value)
    if jax.tree_util.treedef_is_leaf(treedef):
        return np.shape(value)
    return treedef, tuple(_shape(leaf) for leaf in leaves)


def _text(value: tp.Any) -> str:
    """A value in a few words; for a pytree, each leaf in a few words."""
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
