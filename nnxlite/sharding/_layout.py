"""`Layout`: where each array is on a mesh, as a table and as shardings."""

from __future__ import annotations

import dataclasses
import io
import math
import typing as tp

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from nnxlite._base.text import human_bytes, mesh_text
from nnxlite.sharding._plan import AnyMesh, Plan, spec_text, ways

MOST_ROWS = 60
"""How many rows the text of a layout has; those of the largest arrays."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The sharding of one array on a mesh: an entry of a `Layout`.

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


@dataclasses.dataclass(frozen=True, repr=False)
class Layout:
    """The sharding of each array on a mesh; `nnx.shard` and `nnx.plan_layout` return it.

    Printed it is a table: path, shape, spec, bytes on each device, and why. Layers that are divided
    alike are one line.

    Attributes:
        mesh: the devices.
        plan: what decided.
        entries: a `Placement` for each array, in the order of the model.

    >>> import nnxlite as nnx
    >>> mesh = nnx.make_mesh(data=-1)
    >>> layout = nnx.plan_layout(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), mesh, "fsdp")
    >>> layout.bytes, [entry.name for entry in layout.replicated]
    (16640, ['bias'])
    """

    mesh: AnyMesh
    plan: Plan
    entries: tuple[Placement, ...]

    def __iter__(self) -> tp.Iterator[Placement]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def bytes(self) -> int:
        """Of all arrays, each counted once."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def bytes_per_device(self) -> int:
        """Of the parts on one device."""
        return sum(entry.bytes_per_device for entry in self.entries)

    @property
    def replicated(self) -> tuple[Placement, ...]:
        """The arrays that every device has as a whole; `why` says the reason."""
        return tuple(entry for entry in self.entries if entry.is_replicated)

    @property
    def batch(self) -> NamedSharding:
        """The sharding of batches: their first axis is divided by `data` and `fsdp`."""
        axes = self.plan.batch_axes(self.mesh)
        spec = PartitionSpec(*([axes] if len(axes) > 1 else axes))
        return NamedSharding(tp.cast(jax.sharding.Mesh, self.mesh), spec)

    def sharding_of(self, entry: Placement) -> NamedSharding:
        """The sharding of one array.

        Args:
            entry: one of `entries`.

        Returns:
            A `NamedSharding`.
        """
        mesh, spec = tp.cast(jax.sharding.Mesh, self.mesh), list(entry.spec)
        # As JAX writes those of results, which must compare equal: whole where axes are explicit.
        while spec and spec[-1] is None and AxisType.Explicit not in mesh.axis_types:
            spec.pop()
        return NamedSharding(mesh, PartitionSpec(*spec))

    @tp.overload
    def put(self, batch: np.ndarray | jax.Array) -> jax.Array: ...
    @tp.overload
    def put(self, batch: tp.Any) -> tp.Any: ...
    def put(self, batch: tp.Any) -> tp.Any:
        """A batch on the mesh, divided along its first axis; scalars are copied to every device.

        Args:
            batch: a pytree of arrays that every process has as a whole.

        Returns:
            The same tree of `jax.Array`s.

        Raises:
            ValueError: for an array whose first axis cannot be divided equally.

        >>> import nnxlite as nnx, numpy as np
        >>> mesh = nnx.make_mesh(data=-1)
        >>> layout = nnx.plan_layout(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), mesh, "data")
        >>> layout.put({"x": np.zeros((8, 2))})["x"].sharding == layout.batch
        True
        """
        number = ways(self.plan.batch_axes(self.mesh), self.mesh)

        def put(path: tp.Any, x: tp.Any) -> jax.Array:
            if np.ndim(x) and np.shape(x)[0] % number:
                where = jax.tree_util.keystr(path)
                raise ValueError(
                    f"put: batch{where} has {np.shape(x)[0]} rows, which {number} devices "
                    f"({self.batch.spec[0]!r}) cannot divide equally. Drop or pad the last batch."
                )
            whole = NamedSharding(self.batch.mesh, PartitionSpec())
            return jax.device_put(x, self.batch if np.ndim(x) else whole)

        return jax.tree_util.tree_map_with_path(put, batch)

    def _rows(self) -> list[tuple[str, list[Placement]]]:
        """Arrays that differ in indices of their paths only, and are divided alike, under one name."""
        rows: dict[tp.Any, list[Placement]] = {}
        for entry in self.entries:
            name = ".".join("*" if isinstance(key, int) else str(key) for key in entry.path)
            key = name, entry.shape, entry.dtype, entry.spec, entry.why
            rows.setdefault(key, []).append(entry)
        return [(_common_name(same), same) for same in rows.values()]

    def __repr__(self) -> str:
        from rich.console import Console

        file = io.StringIO()
        console = Console(file=file, width=200, force_terminal=False, force_jupyter=False)
        console.print(self)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def __rich__(self) -> tp.Any:
        """What rich prints."""
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        every = self._rows()
        largest = sorted(every, key=lambda row: -sum(entry.bytes for entry in row[1]))[:MOST_ROWS]
        kept = {id(same) for _, same in largest}
        shown = [row for row in every if id(row[1]) in kept]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("path", "", "shape", "dtype", "spec"):
            table.add_column(heading, overflow="fold", justify="right" if not heading else "left")
        table.add_column("each device", justify="right")
        table.add_column("why")
        for name, same in shown:
            entry = same[0]
            count = f"{len(same)} x" if len(same) > 1 else ""
            size = human_bytes(entry.bytes_per_device * len(same))
            shape = str(entry.shape).replace(",)", ")")
            cells = (name, count, shape, entry.dtype, spec_text(entry.spec), size)
            table.add_row(*map(Text, (*cells, entry.why)))
        head = f"Layout on {_devices(self.mesh)}; plan: {self.plan}"
        whole = sum(entry.bytes for entry in self.replicated)
        total = f"{human_bytes(self.bytes_per_device)} on each device, of {human_bytes(self.bytes)}"
        if whole:
            number = len(self.replicated)
            arrays = f"{number:,} array{'s' if number != 1 else ''}"
            total += f"; {human_bytes(whole)} in {arrays} on every device"
        if left := len(every) - len(shown):
            total = f"... and {left} rows of smaller arrays\n{total}"
        return Group(Text(head), table, Text(total))


def _common_name(entries: list[Placement]) -> str:
    keys = zip(*(entry.path for entry in entries))
    return ".".join(str(same[0]) if len(set(same)) == 1 else "*" for same in keys)


def _devices(mesh: AnyMesh) -> str:
    number = math.prod(mesh.shape.values())
    kind = "abstract " if isinstance(mesh, AbstractMesh) else ""
    return f"{number:,} {kind}device{'s' if number != 1 else ''} ({mesh_text(mesh)})"
