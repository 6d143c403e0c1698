"""Trees whose leaves are Variables: how training flattens, reads, writes and compares them.

Training works on two trees of the same structure, one of Variables and one of their values.
`flatten` makes a flat list from the first, `content` gives the value of a leaf; optax and averages work
on the second; `write_together` stores the results.  Reading and writing here bypass the hooks of
Variables, which are for the model's own use.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import listed, path_text, short_type
from nnxlite._base.jax import key_name
from nnxlite.variables._variable import is_variable, store_together


def flatten(tree: tp.Any) -> tuple[list[tp.Any], tp.Any]:
    """The leaves of a tree, with Variables as leaves, and its structure."""
    return jax.tree.flatten(tree, is_leaf=is_variable)


def pairs(tree: tp.Any) -> list[tuple[tuple[tp.Any, ...], tp.Any]]:
    """The leaves of `flatten` with their paths, as names and indices."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)
    return [(tuple(map(key_name, path)), leaf) for path, leaf in found]


def write_together(pairs: tp.Iterable[tuple[tp.Any, tp.Any]]) -> None:
    """Store values in those leaves that are Variables.

    In those without a reference it is one step, which nothing interrupts.
    """
    pairs = [pair for pair in pairs if is_variable(pair[0])]
    boxed = [(variable, value) for variable, value in pairs if not variable.ref]
    for variable, _ in boxed:
        variable._check_level()
    for variable, value in pairs:
        if variable.ref:
            variable.get_raw_value()[...] = value
    store_together([(variable._box, value) for variable, value in boxed])


def is_inexact(value: tp.Any) -> bool:
    """Whether a value is a floating or complex number, or an array of them."""
    return jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.inexact)


def compare(expected: tp.Any, got: tp.Any, what: str, of: str | None = None) -> str:
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
    form = lambda value: jax.tree.flatten(jax.tree.map(np.shape, value))
    wrong = [n for n, (a, b) in enumerate(zip(expected, got, strict=True)) if form(a) != form(b)]
    paths = [path_text(path) for path, _ in pairs(tree)] if wrong else []
    text = lambda value: str(jax.tree.map(short_type, value))
    lines = [f"{paths[n]}: {what} {text(got[n])}, {of} {text(expected[n])}" for n in wrong]
    return listed(lines, between="; ")
