"""Axes of leaves: the specs of `filter_vmap` and `filter_pmap`, and their checks."""

from __future__ import annotations

import typing as tp

from nnxlite.filtered._crossing import Call, must_be_traced
from nnxlite.filtered._predicates import is_array_like
from nnxlite.filtered._specs import SpecKind
from nnxlite.transforms import axis_complaint


def _is_axis(answer: tp.Any) -> bool:
    return answer is None or isinstance(answer, int)


IN_AXES = SpecKind(
    "in_axes", _is_axis, "axes (ints or None), callables and Variable filters", 0, None
)
OUT_AXES = IN_AXES._replace(name="out_axes")


def is_mapped(axis: tp.Any) -> bool:
    """Whether a leaf is mapped; None and True pass it whole to every slice, False makes it static."""
    return axis is not None and not isinstance(axis, bool)


def check_axes(what: str, tree: Call, axes: list[tp.Any], axis_size: int | None) -> None:
    """Raise an error where the leaves of some arguments cannot be mapped over their axes.

    Args:
        what: the transform and its function, for messages.
        tree: the arguments.
        axes: of each leaf.
        axis_size: the size that the user gives, or None.

    Raises:
        TypeError: for a leaf that is not an array.
        ValueError: for a leaf without its axis, for axes of different sizes, or where no leaf is mapped.
    """
    names = [place.text() for place in tree.definition.leaves()]
    for name, leaf, axis in zip(names, tree.leaves, axes):
        if not (axis is None or axis is False or is_array_like(leaf)):
            raise must_be_traced(f"{what}: in_axes", name, leaf)
    mapped = [axis if is_mapped(axis) else None for axis in axes]
    complaint = axis_complaint(names, tree.leaves, mapped, axis_size)
    if complaint is not None:
        raise ValueError(f"{what}: {complaint}")
    if axis_size is None and not any(map(is_mapped, axes)):
        raise ValueError(
            f"{what}: no leaf of the arguments is mapped, so the size of the axis is unknown. Give an "
            "array an axis, or pass axis_size=."
        )
