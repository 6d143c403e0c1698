"""Axes of leaves: the specs of `filter_vmap` and `filter_pmap`, and their checks."""

from __future__ import annotations

import typing as tp

import numpy as np

from nnxlite._errors import listed, short_type
from nnxlite.filtered._crossing import Call, must_be_traced
from nnxlite.filtered._predicates import is_array_like
from nnxlite.filtered._specs import SpecKind


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
    sizes = set() if axis_size is None else {axis_size}
    mapped = []
    for place, leaf, axis in zip(tree.definition.leaves(), tree.leaves, axes):
        if axis is None or axis is False:
            continue
        if not is_array_like(leaf):
            raise must_be_traced(f"{what}: in_axes", place.text(), leaf)
        if axis is True:
            continue
        shape = np.shape(leaf)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{what}: in_axes: the leaf at '{place.text()}' is {short_type(leaf)} and has "
                f"no axis {axis}."
            )
        sizes.add(shape[axis])
        mapped.append((place, leaf, axis))
    if len(sizes) > 1:
        text = lambda one: f"'{one[0].text()}' {short_type(one[1])}: axis {one[2]!r}"
        given = "" if axis_size is None else f", axis_size={axis_size}"
        raise ValueError(
            f"{what}: inconsistent sizes for array axes to be mapped. Mapped leaves: "
            f"{listed(mapped, SHOWN, text, between='; ')}{given}."
        )
    if not sizes:
        raise ValueError(
            f"{what}: no leaf of the arguments is mapped, so the size of the axis is unknown. Give an "
            "array an axis, or pass axis_size=."
        )


SHOWN = 12
"""How many leaves a message lists."""
