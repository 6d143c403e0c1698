"""What a `PartitionSpec` means on a mesh."""

from __future__ import annotations

import math

import numpy as np
from jax.sharding import PartitionSpec

from nnxlite.layouts._plan import AnyMesh, names_in


def spec_text(spec: PartitionSpec) -> str:
    """A spec as one would say it: `(data, -)`, or `replicated`."""
    if not any(spec):
        return "replicated"
    return "(" + ", ".join("*".join(names_in(part)) or "-" for part in spec) + ")"


def names_in_spec(spec: PartitionSpec) -> list[str]:
    """The mesh axes that a spec uses."""
    return [name for part in spec for name in names_in(part)]


def ways(spec: PartitionSpec, mesh: AnyMesh) -> int:
    """Into how many parts a spec divides an array."""
    return math.prod(mesh.shape[name] for name in names_in_spec(spec))


def parts_of(spec: PartitionSpec, axes: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    """Which part of an array each device has, by its number in the mesh."""
    names = [name for name, _ in axes]
    place = np.indices([size for _, size in axes])
    used = [names.index(name) for name in names_in_spec(spec)]
    parts = np.zeros([size for _, size in axes], int)
    for axis in used:
        parts = parts * axes[axis][1] + place[axis]
    return tuple(int(part) for part in parts.ravel())
