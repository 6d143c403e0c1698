"""Plans: which mesh axes divide batches and arrays. Meshes, and what a spec means on one."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import typing as tp

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from nnxlite._base.text import mesh_text

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
    devices = jax.devices() if devices is None else list(devices)
    try:
        sizes = np.empty(len(devices)).reshape(tuple(axes.values())).shape if axes else None
    except ValueError:
        sizes = None
    if sizes is None:
        text = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"make_mesh: the axes {text or '()'} do not make a grid of {len(devices)} devices "
            f"({devices[0].platform}). The product of the sizes has to be that number; one size may be "
            "-1. For other devices give devices=, for virtual ones on a CPU set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8."
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, tuple(axes), axis_types=kinds, devices=devices)


def names_in(axes: tp.Any) -> tuple[str, ...]:
    """The names of mesh axes in one entry of a spec."""
    return () if axes is None else tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


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
