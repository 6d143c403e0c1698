"""Plans: which mesh axes divide batches and arrays. Meshes and specs. `Layout`: where each array is."""

from __future__ import annotations

import dataclasses
import difflib
import io
import math
import re
import typing as tp

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from nnxlite._base.text import human_bytes, mesh_text

__all__ = ["Layout", "Placement", "Plan", "make_mesh"]

Axes: tp.TypeAlias = "str | tuple[str, ...] | None"
AnyMesh: tp.TypeAlias = "Mesh | AbstractMesh"
Spec: tp.TypeAlias = tuple[tp.Any, ...]
Rule: tp.TypeAlias = "PartitionSpec | tp.Sequence[tp.Any] | None"

USUAL_AXES: dict[str, tuple[str, ...]] = {
    "data": ("data",),
    "fsdp": ("fsdp", "data"),
    "tensor": ("tensor", "model"),
}
"""The parts of a plan, and the mesh axes that they use by default: the first one that exists."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which axes of a mesh divide a model, and how.

    For each array the first of these decides: a rule whose pattern matches its path; the sharding
    annotation of its Variable; `tensor`, for the layers of this library. `fsdp` then divides an axis
    that none of these divides.

    Attributes:
        data: the mesh axis (or axes) along which batches are divided, and arrays are not.
        fsdp: the mesh axis (or axes) along which batches are divided, and arrays too: each along its
            largest axis that can be divided equally, an embedding along its rows.
        tensor: the mesh axis (or axes) for tensor parallelism: linear layers along the larger of their
            two sides (output features where both are equal), attention by heads, embeddings by
            vocabulary.
        rules: patterns of dotted paths (`blocks.*.kernel`; `**` stands for any number of segments), each
            with a spec, or None for an array that every device has as a whole. The first that matches
            counts, and is final.
        min_size: arrays with fewer elements are not divided by `fsdp`.

    >>> import nnxlite as nnx
    >>> nnx.Plan(fsdp="data", rules={"**.bias": None}).rules
    {'**.bias': None}
    """

    data: Axes = None
    fsdp: Axes = None
    tensor: Axes = None
    rules: tp.Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    min_size: int = 1024

    def __str__(self) -> str:
        parts = [f"{name}={'*'.join(names_in(axes))}" for name, axes in self.parts() if axes]
        if self.rules:
            parts.append(f"{len(self.rules)} {'rule' if len(self.rules) == 1 else 'rules'}")
        return ", ".join(parts) or "no parts"

    def parts(self) -> tuple[tuple[str, Axes], ...]:
        """The parts that name mesh axes, with these."""
        return tuple((part, getattr(self, part)) for part in USUAL_AXES)

    def batch_axes(self, mesh: AnyMesh) -> tuple[str, ...]:
        """The mesh axes along which batches are divided, in the order of the mesh.

        Args:
            mesh: the devices.

        Returns:
            Names of axes.
        """
        used = {*names_in(self.data), *names_in(self.fsdp)}
        return tuple(name for name in mesh.axis_names if name in used)


PlanLike: tp.TypeAlias = "Plan | str | tp.Iterable[str] | tp.Mapping[str, Rule]"


def as_plan(plan: PlanLike, mesh: AnyMesh, caller: str) -> Plan:
    """A plan from what a user may give in place of one, with axes that the mesh has.

    Raises ValueError for an unknown part or axis, TypeError for anything but a plan.
    """
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"{caller}: the mesh has to be a jax.sharding.Mesh, got {mesh!r}.")
    if isinstance(plan, tp.Mapping):
        plan = Plan(rules=dict(plan))
    elif not isinstance(plan, Plan):
        plan = _from_words(plan, mesh, caller)
    for part, axes in plan.parts():
        for name in names_in(axes):
            if name not in mesh.axis_names:
                raise ValueError(
                    f"{caller}: the plan uses the mesh axis {name!r} for {part!r}, and the mesh has "
                    f"the axes {mesh_text(mesh)}. Name one of these, or make a mesh with {name!r}."
                )
    both = {*names_in(plan.tensor)} & {*plan.batch_axes(mesh)}
    if both:
        raise ValueError(
            f"{caller}: the plan uses the mesh axis {sorted(both)[0]!r} for 'tensor' and to divide "
            "batches. Give each an axis of its own."
        )
    return plan


def _from_words(plan: tp.Any, mesh: AnyMesh, caller: str) -> Plan:
    try:
        words = re.split(r"[+,\s]+", plan.strip()) if isinstance(plan, str) else list(plan)
    except TypeError:
        raise TypeError(
            f"{caller}: a plan is a text such as 'fsdp+tensor', a mapping of path patterns to specs, or "
            f"an nnx.Plan, got {plan!r}."
        ) from None
    axes: dict[str, tp.Any] = {}
    for word in words:
        if word not in USUAL_AXES:
            near = difflib.get_close_matches(str(word), USUAL_AXES, n=1)
            meant = f" Was {near[0]!r} meant?" if near else ""
            raise ValueError(
                f"{caller}: no plan is called {word!r}; there are "
                f"{', '.join(map(repr, USUAL_AXES))} and combinations such as 'fsdp+tensor'.{meant}"
            )
        usual, names = USUAL_AXES[word], mesh.axis_names
        found = [name for name in usual if name in names] or (names if len(names) == 1 else ())
        if not found:
            raise ValueError(
                f"{caller}: the plan {word!r} uses the mesh axis {' or '.join(map(repr, usual))}, and "
                f"the mesh has the axes {mesh_text(mesh)}. Say which one: nnx.Plan({word}={names[0]!r})."
            )
        axes[word] = found[0]
    return Plan(**axes)


# Meshes and specs --------------------------------------------------------------------------------


def make_mesh(*, devices: tp.Sequence[tp.Any] | None = None, **axes: int) -> Mesh:
    """A mesh of devices whose axes are automatic: the compiler divides what a program computes.

    `jax.make_mesh` makes explicit axes by default, for programs that say how each result is divided.

    Args:
        devices: the devices; by default all there are, of all processes.
        axes: the size of each axis by its name, in order; one of them may be -1, for all devices that
            the others leave.

    Returns:
        A `jax.sharding.Mesh`.

    Raises:
        ValueError: for sizes that are not those of the devices.

    >>> import nnxlite as nnx, jax
    >>> mesh = nnx.make_mesh(data=-1, model=1)
    >>> mesh.axis_names, mesh.size == jax.device_count()
    (('data', 'model'), True)
    """
    devices = jax.devices() if devices is None else [*np.ravel(np.array(devices))]
    try:
        sizes = np.empty(len(devices)).reshape(tuple(axes.values())).shape if axes else None
    except ValueError:
        sizes = None
    if not (sizes and devices):
        text = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"make_mesh: the axes {text or '()'} do not make a grid of {len(devices)} devices "
            f"({''.join(device.platform for device in devices[:1])}). The product of the sizes has to "
            "be that number; one size may be -1. For other devices give devices=, for virtual ones on a "
            "CPU set XLA_FLAGS=--xla_force_host_platform_device_count=8."
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, tuple(axes), axis_types=kinds, devices=devices)


def names_in(axes: tp.Any) -> tuple[str, ...]:
    """The names of mesh axes in one entry of a spec."""
    if axes is None:
        return ()
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def ways(axes: tp.Any, mesh: AnyMesh) -> int:
    """Into how many parts an entry of a spec divides an axis."""
    return math.prod(mesh.shape[name] for name in names_in(axes))


def spec_text(spec: tp.Iterable[tp.Any]) -> str:
    """A spec as one would say it: `(data, -)`, or `replicated`."""
    entries = ["*".join(names_in(part)) for part in spec]
    return f"({', '.join(entry or '-' for entry in entries)})" if any(entries) else "replicated"


def full_spec(shape: tuple[int, ...], spec: tp.Iterable[tp.Any], mesh: AnyMesh, begin: str) -> Spec:
    """A spec with an entry for each array axis.

    Raises ValueError, with JAX's reason, where it does not match the array or the mesh.
    """
    spec = tuple(tuple(part) if isinstance(part, list) else part for part in spec)
    reason = ""
    if len(spec) > len(shape):
        reason = f"{len(spec)} entries for {len(shape)} axes."
    else:
        try:
            NamedSharding(tp.cast(Mesh, mesh), PartitionSpec(*spec)).shard_shape(shape)
        except Exception as error:  # a mesh axis twice is an error without a public class
            reason = str(error)
    if reason:
        raise ValueError(
            f"{begin} divides shape {shape} as {spec} on the mesh {mesh_text(mesh)}: {reason} Give one "
            "entry for each array axis: None, or axes of the mesh whose sizes divide it equally. "
            "Logical names are mapped to mesh axes by nnx.logical_axis_rules."
        )
    return (*spec, *[None] * (len(shape) - len(spec)))


# Layouts -----------------------------------------------------------------------------------------

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
