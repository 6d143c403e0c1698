"""`partition` and `combine`: a tree split into two by its leaves, and joined again."""

from __future__ import annotations

import dataclasses
import typing as tp

import jax

from nnxlite.boundary._inputs import Inputs, is_root
from nnxlite.filtered._crossing import IsLeaf, leaves_of
from nnxlite.filtered._specs import MASK, answers
from nnxlite.filtered._walk import combined, first_given

T = tp.TypeVar("T")


def filter(
    pytree: T,
    filter_spec: tp.Any,
    inverse: bool = False,
    replace: tp.Any = None,
    is_leaf: IsLeaf | None = None,
) -> T:
    """A tree with only the leaves that a spec selects, and None for the others.

    Graph objects in the tree keep their types and sharing; the result has new ones. A shared
    Variable is one leaf. Static attributes are not leaves and stay.

    Args:
        pytree: any pytree, or a graph object.
        filter_spec: a bool, a function of a leaf, a Variable filter (`nnx.Param`, ...), or a pytree
            of these that is a prefix of the tree.
        inverse: return the leaves that the spec does not select instead.
        replace: what to put in place of the other leaves.
        is_leaf: parts for which it is true are leaves.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: for a spec that is not a prefix of the tree, or one that selects a shared Variable
            by one path and not by another.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter([jnp.array(1.0), "name"], nnx.is_array)
    [Array(1., dtype=float32, weak_type=True), None]
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.filter(model, nnx.PathContains("bias")).kernel.value is None
    True
    """
    chosen, rest = partition(pytree, filter_spec, replace, is_leaf)
    return rest if inverse else chosen


def _leaves(tree: tp.Any, spec: tp.Any, is_leaf: IsLeaf | None) -> Inputs:
    """The leaves of a tree; `is_leaf` is called only for parts below the literals of the spec."""
    if is_leaf is None:
        return leaves_of(tree)
    ends = lambda part: is_root(part) or MASK.is_literal(part)
    stops = lambda part: is_root(part) or is_leaf(part)
    close = lambda part: _Closed(part) if is_leaf(part) else part
    below = lambda _, part: jax.tree_util.tree_map(close, part, is_leaf=stops)
    try:
        closed = jax.tree_util.tree_map(below, spec, tree, is_leaf=ends)
    except ValueError:  # the spec is not a prefix, and `answers` has a better message for it
        closed = tree
    parts = leaves_of(closed)
    parts.arrays = [x.value if type(x) is _Closed else x for x in parts.arrays]
    return parts


@dataclasses.dataclass
class _Closed:
    """A part of a tree that counts as one leaf."""

    value: tp.Any


def partition(
    pytree: T,
    filter_spec: tp.Any,
    replace: tp.Any = None,
    is_leaf: IsLeaf | None = None,
) -> tuple[T, T]:
    """The leaves that a spec selects and the rest, as two trees; see `filter`.

    `combine` is the inverse.

    Args:
        pytree: any pytree, or a graph object.
        filter_spec, replace, is_leaf: as for `filter`.

    Returns:
        Two trees of the same structure, with `replace` in place of the leaves of the other.

    Raises:
        ValueError: as for `filter`.

    >>> import nnxlite as nnx
    >>> nnx.partition([1, "a", 2.5], lambda x: isinstance(x, str))
    ([None, 'a', None], [1, None, 2.5])
    >>> nnx.combine(*nnx.partition([1, "a", 2.5], lambda x: isinstance(x, str)))
    [1, 'a', 2.5]
    """
    tree = _leaves(pytree, filter_spec, is_leaf)
    mask = answers(tree, filter_spec)
    call, leaves = tree.definition, tree.leaves
    chosen = call.build([x if m else replace for x, m in zip(leaves, mask)])
    rest = call.build([replace if m else x for x, m in zip(leaves, mask)])
    return chosen, rest


def combine(*pytrees: T, is_leaf: IsLeaf | None = None) -> T:
    """One tree of several: at each leaf the first value that is not None.

    Args:
        pytrees: trees of one structure, up to None.
        is_leaf: parts for which it is true are leaves.

    Returns:
        A tree of the structure of the trees; graph objects in it are new.

    Raises:
        ValueError: for trees of different structure, naming the path; or for no trees.

    >>> import nnxlite as nnx
    >>> nnx.combine([None, 2, 3], [1, None, 4])
    [1, 2, 3]
    """
    if not pytrees:
        raise ValueError("combine needs at least one pytree.")
    return combined(first_given, pytrees, "combine", is_leaf)
