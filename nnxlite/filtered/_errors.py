"""Errors of the filtered transforms, which name leaves by their paths."""

from __future__ import annotations

import typing as tp

from nnxlite._errors import path_text, short_type
from nnxlite.boundary import ArgumentLeaf, Inner, leave
from nnxlite.filtered._leaves import Leaves
from nnxlite.variables import Variable


def not_a_prefix(
    what: str, tree: Leaves, place: ArgumentLeaf, part: tp.Any, *leaf: tp.Any
) -> ValueError:
    """The error for an object in a spec that does not match the tree.

    Args:
        what: the spec.
        tree, place: the tree, and a leaf for which the spec has no answer.
        part: the object in the spec.
        leaf: the leaf, where the tree has a leaf in place of an object.
    """
    start = tree.form.call.paths()[place.position]
    root, kind = tree.text_of(place._replace(path=start)), type(part).__name__
    if leaf:
        problem = f"it has a {kind} for '{root}', where the tree has a leaf {short_type(*leaf)}"
    else:
        problem = f"the {kind} given for '{root}' says nothing about '{path_text(place.below)}'"
    return ValueError(f"{what} is not a prefix of the tree: {problem}.")


def two_answers(
    what: str, tree: Leaves, leaf: int, place: ArgumentLeaf, one: tp.Any, other: tp.Any
) -> ValueError:
    """The error for a shared leaf that gets different answers at two paths."""
    variable, first = tree.variable(leaf), tree.form.places[leaf]
    kind = type(variable).__name__ if isinstance(variable, Variable) else "leaf"
    return ValueError(
        f"Inconsistent {what} for a shared {kind}: at '{tree.text_of(first)}' it is "
        f"{one!r}, at '{tree.text_of(place)}' it is {other!r}. A shared {kind} is one leaf: "
        "give both places the same answer, or do not share it."
    )


def must_be_traced(what: str, where: str, value: tp.Any) -> TypeError:
    """The error for a leaf that must be traced and is not an array."""
    return TypeError(
        f"{what}: the leaf at '{where}' must be traced, but {short_type(value)} "
        f"{value!r} is neither an array nor a number."
    )


def refuse_writes(inner: Inner, what: str) -> None:
    """Raise ValueError where a function changed its arguments and the change would be dropped."""
    definition = leave(inner, None).definition
    if definition.written or definition.graph is not None:
        leaves = inner.call.graph_leaves()
        names = ", ".join(f"'{path_text(leaves[i].below)}'" for i in definition.written[:5])
        raise ValueError(
            f"{what} changes its arguments ({names or 'their structure'}), and the change cannot "
            "leave it. Return the new value instead, and write it outside."
        )
