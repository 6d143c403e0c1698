"""Trees whose leaves are Variables: how training flattens, reads, writes and compares them.

Training works on two trees of the same structure, one of Variables and one of their values.
`flatten` makes a flat list from the first; optax and averages work on the second; `write_together`
stores the results.  Reading and writing here bypass the hooks of Variables, which are for the model's
own use.
"""

from __future__ import annotations

import typing as tp

import jax
import numpy as np

from nnxlite._base.errors import listed, path_text, short_type
from nnxlite._base.jax import is_ref, key_name
from nnxlite.variables._variable import Variable, is_variable, store_together

TreeDef: tp.TypeAlias = tp.Any  # to a type checker jax.tree_util.PyTreeDef is a value


def flatten(tree: tp.Any) -> tuple[list[tp.Any], TreeDef]:
    """The leaves of a tree, with Variables as leaves, and its structure."""
    return jax.tree.flatten(tree, is_leaf=is_variable)


def pairs(tree: tp.Any) -> list[tuple[tuple[tp.Any, ...], tp.Any]]:
    """The leaves of `flatten` with their paths, as names and indices."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)
    return [(tuple(map(key_name, path)), leaf) for path, leaf in found]


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


def compare(expected: tp.Any, got: tp.Any, *, what: str, of: str | None = None) -> str:
    """What is wrong with the paths of `got`, in words; empty if they are those of `expected`.

    Without `of`, a name for the expected ones, `got` may have further paths.
    """
    known, given = dict(pairs(expected)), dict(pairs(got))
    wrong = {f"missing from the {what}": [path for path in known if path not in given]}
    if of is not None:
        wrong[f"not among the {of}"] = [path for path in given if path not in known]
    return "; ".join(f"{t}: {listed(p, text=path_text)}" for t, p in wrong.items() if p)


def misshapen(tree: tp.Any, expected: list[tp.Any], got: list[tp.Any], what: str, of: str) -> str:
    """The leaves of `got` whose shape is not that of `expected`, in words; empty if none.

    A leaf may be a pytree of arrays; `tree` has the paths.
    """
    wrong = [n for n, two in enumerate(zip(expected, got, strict=True)) if _differ(*two)]
    paths = [path_text(path) for path, _ in pairs(tree)] if wrong else []
    text = lambda value: str(jax.tree.map(short_type, value))
    lines = [f"{paths[n]}: {what} {text(got[n])}, {of} {text(expected[n])}" for n in wrong]
    return listed(lines, between="; ")


def _differ(one: tp.Any, other: tp.Any) -> bool:
    """Whether two arrays, numbers or pytrees of them have other shapes."""
    (ones, treedef), (others, structure) = jax.tree.flatten(one), jax.tree.flatten(other)
    return treedef != structure or list(map(np.shape, ones)) != list(map(np.shape, others))
