"""`Placement`: one entry of a layout."""

from __future__ import annotations

import dataclasses
import typing as tp

from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one array lies.

    Attributes:
        path: attribute names, keys and indices.
        shape: of the whole array.
        dtype: its name.
        spec: for each array axis the mesh axis (or axes) that divides it, or None.
        bytes: of the whole array.
        bytes_per_device: of the part on each device.
        why: what decided, or why every device has the whole array.

    >>> import nnxlite as nnx
    >>> mesh = nnx.make_mesh(data=-1)
    >>> layout = nnx.plan_layout(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), mesh, "fsdp")
    >>> kernel = next(entry for entry in layout.entries if entry.name == "kernel")
    >>> tuple(kernel.spec), kernel.why
    (('data', None), 'fsdp')
    """

    path: tuple[tp.Any, ...]
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes: int
    bytes_per_device: int
    why: str

    @property
    def name(self) -> str:
        """The path, joined by dots."""
        return ".".join(map(str, self.path))

    @property
    def is_replicated(self) -> bool:
        """Whether every device has the whole array."""
        return not any(self.spec)
