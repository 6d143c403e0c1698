"""The leaves of a tree, as a user of trees counts them.

Leaves are arrays, numbers, functions and so on at the ends of a pytree, and, in its graph objects, the
values of Variables and of data attributes; functions, text and other objects in their containers are
static.  A Variable (or object) with several paths is one: its value is one leaf, and the rebuilt tree
refers to it by all of these paths.  None is not a leaf.
"""

from __future__ import annotations

import typing as tp

from nnxlite.boundary import Inputs

IsLeaf: tp.TypeAlias = tp.Callable[[tp.Any], bool]


def leaves_of(tree: tp.Any, names: tuple[str, ...] | None = None) -> Inputs:
    """The leaves of any tree, and its `definition`; with names, one of the form `(args, kwargs)`."""
    return Inputs(tree, trees=True, names=names, inside=True)
