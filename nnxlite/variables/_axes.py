"""Names of axes in the metadata of Variables, and what a transform does to them.

A transform that adds an axis names it: `{PARTITION_NAME: name, other: name, ...}`. The first entry is
for the sharding annotation and the callbacks; each other one is for the tuple of names that a
Variable has under that entry of its metadata, if it has one.
"""

from __future__ import annotations

import typing as tp

from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite.variables._definition import HOOKS
from nnxlite.variables._variable import Variable

PARTITION_NAME = "partition_name"
"""Key in `transform_metadata` for the name of the axis that a transform adds."""

Names: tp.TypeAlias = tp.Mapping[str, tp.Any]


def add_axis(variable: Variable[tp.Any], index: int, names: Names) -> None:
    """Put the names of a new axis into the metadata."""
    new: dict[str, tp.Any] = {}
    for key, name, axes in _axis_names(variable, names):
        longer = [*_names_in(axes)]
        longer += [None] * (index - len(longer))  # it may be shorter than the shape
        longer.insert(index if index >= 0 else index + len(longer) + 1, name)
        new[key] = _annotation(axes, longer)
    variable.add_axis(index, names[PARTITION_NAME])
    if new:
        variable.set_metadata(**new)


def add_unnamed_axis(variable: Variable[tp.Any], index: int, ndim: int) -> None:
    """Put None for a new axis into the annotation, if that is one for `ndim` axes without it."""
    annotation = variable.sharding_names
    if isinstance(annotation, Format):
        annotation = annotation.sharding
    names = _names_in(annotation)
    if isinstance(names, (tuple, list, PartitionSpec)) and len(names) <= ndim:
        padded = [*names, *[None] * (index - len(names))]
        variable.set_metadata(
            out_sharding=_annotation(annotation, (*padded[:index], None, *padded[index:]))
        )


def remove_axis(variable: Variable[tp.Any], index: int, names: Names) -> None:
    """Take the names of a removed axis out of the metadata.

    Raises ValueError, with nothing changed, where that axis has another name.
    """
    new: dict[str, tp.Any] = {}
    for key, name, axes in _axis_names(variable, names):
        left = list(_names_in(axes))
        removed = left.pop(index) if -len(left) <= index < len(left) else None
        if removed != name:
            where = "the sharding names" if key == "out_sharding" else "the names"
            under = "" if key == "out_sharding" else f" under {key!r}"
            raise ValueError(
                f"{type(variable).__name__} has {where} {tuple(_names_in(axes))}{under}: axis {index} "
                f"is {removed!r}, not {name!r} as the transform says. Give both the same name."
            )
        new[key] = _annotation(axes, left)
    variable.remove_axis(index, names[PARTITION_NAME])
    if new:
        variable.set_metadata(**new)


def changed_names(annotation: tp.Any, change: tp.Callable[[tuple[tp.Any, ...]], tp.Any]) -> tp.Any:
    """A sharding annotation of the same kind with other names: `change` of those that it has."""
    if isinstance(annotation, Format):  # its layout is for other axes
        annotation = annotation.sharding
    return _annotation(annotation, change(tuple(_names_in(annotation))))


def _axis_names(
    variable: Variable[tp.Any], names: Names
) -> tp.Iterator[tuple[str, tp.Any, tp.Any]]:
    """Entries of the metadata that name axes: the key, the name of the axis there, the entry."""
    metadata = variable.get_metadata() if len(names) > 1 else {}
    for key, name in names.items():
        axes = metadata.get(key)
        if key not in HOOKS and key != "out_sharding" and isinstance(axes, tuple):
            yield key, name, axes
    annotation, name = variable.sharding_names, names[PARTITION_NAME]
    if isinstance(annotation, NamedSharding) and name not in annotation.mesh.axis_names:
        name = None  # it has a mesh, and only that mesh's axes have names
    if annotation is not None:
        yield "out_sharding", name, annotation


def _names_in(annotation: tp.Any) -> tp.Iterable[tp.Any]:
    return annotation.spec if isinstance(annotation, NamedSharding) else annotation


def _annotation(before: tp.Any, names: tp.Iterable[tp.Any]) -> tp.Any:
    """An annotation of the same kind with other names."""
    if not isinstance(before, NamedSharding):
        return tuple(names)
    return NamedSharding(before.mesh, PartitionSpec(*names), memory_kind=before.memory_kind)
