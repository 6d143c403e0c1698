"""Names of axes in the metadata of Variables, and what a transform does to them.

A transform that adds an axis names it: `{PARTITION_NAME: name, other: name, ...}`. The first entry is
for the sharding annotation and the callbacks; each other one is for the tuple of names that a
Variable has under that entry of its metadata, if it has one.
"""

from __future__ import annotations

import typing as tp

from nnxlite.variables._definition import HOOKS
from nnxlite.variables._variable import Variable

PARTITION_NAME = "partition_name"
"""Key in `transform_metadata` for the name of the axis that a transform adds."""

Names: tp.TypeAlias = tp.Mapping[str, tp.Any]


def add_axis(variable: Variable[tp.Any], index: int, names: Names) -> None:
    """Put the names of a new axis into the metadata."""
    new: dict[str, tp.Any] = {}
    for key, name, axes in _axis_names(variable, names):
        longer = [*axes]
        longer += [None] * (index - len(longer))  # it may be shorter than the shape
        longer.insert(index if index >= 0 else index + len(longer) + 1, name)
        new[key] = tuple(longer)
    variable.add_axis(index, names[PARTITION_NAME])
    if new:
        variable.set_metadata(**new)


def remove_axis(variable: Variable[tp.Any], index: int, names: Names) -> None:
    """Take the names of a removed axis out of the metadata.

    Raises ValueError, with nothing changed, where that axis has another name.
    """
    new: dict[str, tp.Any] = {}
    for key, name, axes in _axis_names(variable, names):
        left = list(axes)
        removed = left.pop(index) if -len(left) <= index < len(left) else None
        if removed != name:
            where = "the sharding names" if key == "out_sharding" else "the names"
            under = "" if key == "out_sharding" else f" under {key!r}"
            raise ValueError(
                f"{type(variable).__name__} has {where} {tuple(axes)}{under}: axis {index} is "
                f"{removed!r}, not {name!r} as the transform says. Give both the same name."
            )
        new[key] = tuple(left)
    variable.remove_axis(index, names[PARTITION_NAME])
    if new:
        variable.set_metadata(**new)


def _axis_names(
    variable: Variable[tp.Any], names: Names
) -> tp.Iterator[tuple[str, tp.Any, tp.Iterable[tp.Any]]]:
    """Entries of the metadata that name axes: the key, the name of the axis there, all names."""
    metadata = variable.get_metadata() if len(names) > 1 else {}
    for key, name in names.items():
        axes = metadata.get(key)
        if key not in HOOKS and key != "out_sharding" and isinstance(axes, tuple):
            yield key, name, axes
    if variable.sharding_names is not None:
        yield "out_sharding", names[PARTITION_NAME], variable.sharding_names
