"""Plans: which mesh axes divide batches and arrays."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing as tp

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from nnxlite._base.text import mesh_text

Axes: tp.TypeAlias = "str | tuple[str, ...] | None"
AnyMesh: tp.TypeAlias = "Mesh | AbstractMesh"
Rule: tp.TypeAlias = "PartitionSpec | tp.Sequence[tp.Any] | str | None"

USUAL_AXES: dict[str, tuple[str, ...]] = {
    "data": ("data",),
    "fsdp": ("fsdp", "data"),
    "tensor": ("tensor", "model"),
}
"""The parts of a plan, and the mesh axes that they use by default: the first one that exists."""

WORDS = ("column", "row", "replicated")
"""The words that a rule can be instead of a spec."""


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
        tensor: the mesh axis (or axes) for tensor parallelism: linear layers by columns (output
            features) or rows (input features), attention by heads, embeddings by vocabulary.
        rules: patterns of dotted paths (`blocks.*.kernel`; `**` stands for any number of segments), each
            with a spec, a "column", "row" or "replicated" in place of one, or None, which means the same
            as "replicated". The first that matches counts, and is final.
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


def names_in(axes: tp.Any) -> tuple[str, ...]:
    """The names of mesh axes in one entry of a spec."""
    return () if axes is None else tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


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
    axes: dict[str, str] = {}
    for word in words:
        if word not in USUAL_AXES:
            near = difflib.get_close_matches(str(word), USUAL_AXES, n=1)
            meant = f" Was {near[0]!r} meant?" if near else ""
            raise ValueError(
                f"{caller}: no plan is called {word!r}; there are "
                f"{', '.join(map(repr, USUAL_AXES))} and combinations such as 'fsdp+tensor'.{meant}"
            )
        axes[word] = _usual_axis(word, mesh, caller)
    return dataclasses.replace(Plan(), **axes)


def _usual_axis(word: str, mesh: AnyMesh, caller: str) -> str:
    usual = USUAL_AXES[word]
    for name in usual:
        if name in mesh.axis_names:
            return name
    if len(mesh.axis_names) == 1:
        return mesh.axis_names[0]
    raise ValueError(
        f"{caller}: the plan {word!r} uses the mesh axis {' or '.join(map(repr, usual))}, and the mesh "
        f"has the axes {mesh_text(mesh)}. Say which one: nnx.Plan({word}={mesh.axis_names[0]!r})."
    )
