"""`shard`, `init_sharded`, `plan_layout`: deciding where arrays lie, and putting them there."""

from __future__ import annotations

import typing as tp

import jax
from jax.sharding import AxisType

from nnxlite._base.errors import warn_user
from nnxlite._base.jax import is_tracing, new_ref
from nnxlite._base.text import mesh_text
from nnxlite._state._definition import from_flat_state
from nnxlite.graph._edit import update
from nnxlite.sharding._decide import Leaf, decide, leaves_of
from nnxlite.sharding._layout import Layout
from nnxlite.sharding._plan import AnyMesh, PlanLike, as_plan
from nnxlite.transforms._compiles import eval_shape
from nnxlite.variables._definition import PLACEMENT

M = tp.TypeVar("M")


def plan_layout(tree: tp.Any, mesh: AnyMesh, plan: PlanLike) -> Layout:
    """The sharding that `shard` would give each array of a model on a mesh. Nothing is moved.

    Args:
        tree: a module, also an abstract one of `nnx.eval_shape`; or a tuple of objects, such as
            `(model, optimizer)`: the optimizer's state is divided like the parameters.
        mesh: the devices; a `jax.sharding.AbstractMesh` stands for devices that this machine lacks.
        plan: "data", "fsdp", "tensor", a combination such as "fsdp+tensor", a mapping from
            patterns of paths to specs, or a `Plan`.

    Returns:
        A `Layout`, which prints as a table.

    Raises:
        ValueError: for a mesh axis that does not exist or does not divide an array equally, a rule that
            matches nothing, rules that disagree about a shared Variable, or a plan that divides nothing.
        TypeError: if `mesh` is not a mesh, or `plan` not a plan.

    >>> import nnxlite as nnx, jax
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    >>> build = lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0))
    >>> nnx.plan_layout(nnx.eval_shape(build), mesh, "fsdp+tensor").bytes_per_device
    2105344
    """
    return _decided(tree, mesh, plan, "plan_layout")[1]


def _decided(tree: tp.Any, mesh: AnyMesh, plan: PlanLike, caller: str) -> tuple[list[Leaf], Layout]:
    decided = as_plan(plan, mesh, caller)
    leaves = leaves_of(tree)
    return leaves, decide(tree, leaves, mesh, decided, caller)


def shard(tree: tp.Any, mesh: AnyMesh, plan: PlanLike) -> Layout:
    """Put the arrays of a model on a mesh, in place, as a plan says.

    Each Variable keeps its spec as metadata, and a jitted function that writes the Variable leaves the
    new value where the old one was. Arrays that are in the right place already are not moved. If an
    array is refused, none is moved.

    Args:
        tree: a module, or a tuple of objects such as `(model, optimizer)`. An optimizer that is made
            afterwards is laid out like its model. In an abstract model (of `nnx.eval_shape`) each
            `jax.ShapeDtypeStruct` gets its sharding; to be filled by `nnx.checkpoint.restore` or
            `nnx.load_safetensors`, which read straight into it.
        mesh: the devices.
        plan: as for `plan_layout`.

    Returns:
        A `Layout`, which says where each array is and prints as a table.

    Raises:
        ValueError: as `plan_layout`; and inside a transform.
        TypeError: as `plan_layout`; and for arrays on an abstract mesh.

    >>> import nnxlite as nnx
    >>> mesh = nnx.make_mesh(data=-1)
    >>> model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    >>> layout = nnx.shard(model, mesh, "fsdp")
    >>> tuple(model.kernel.value.sharding.spec)
    ('data',)
    """
    if is_tracing():
        raise ValueError(
            "shard: an array inside a transform has no placement yet. Call it outside, or build the "
            "model by nnx.init_sharded."
        )
    leaves, layout = _decided(tree, mesh, plan, "shard")
    if isinstance(mesh, jax.sharding.Mesh):
        _warn_of_explicit_axes(layout)
    else:
        for leaf, entry in zip(leaves, layout):
            if not isinstance(leaf.value, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"shard: {entry.name} is an array, and an abstract mesh has no devices for it. Give "
                    "a jax.sharding.Mesh, or only ask for the layout: nnx.plan_layout."
                )
    new = [_placed(leaf.value, layout.sharding_of(entry)) for leaf, entry in zip(leaves, layout)]
    _write(tree, leaves, new)
    _keep_specs(leaves, layout)
    return layout


def _warn_of_explicit_axes(layout: Layout) -> None:
    if AxisType.Explicit in layout.mesh.axis_types and not all(
        entry.is_replicated for entry in layout
    ):
        warn_user(
            f"shard: the axes of the mesh ({mesh_text(layout.mesh)}) are explicit, which is the default "
            "of jax.make_mesh: JAX then refuses operations on divided arrays for which it cannot tell "
            "the sharding of the result. Make the mesh by nnx.make_mesh, with automatic axes, unless "
            "the model is written for explicit ones."
        )


def _placed(value: tp.Any, sharding: tp.Any) -> tp.Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    if getattr(value, "sharding", None) == sharding and value.committed:
        return value
    return jax.device_put(value, sharding)


def _write(tree: tp.Any, leaves: list[Leaf], new: list[tp.Any]) -> None:
    moved = [(leaf, value) for leaf, value in zip(leaves, new) if value is not leaf.value]
    arrays = {id(leaf.value): value for leaf, value in moved}
    for leaf, _ in moved:
        if (variable := leaf.variable) is None:
            continue
        old = variable.get_raw_value()
        if variable.ref:
            variable.set_raw_value(new_ref(arrays[id(leaf.value)]))
        else:
            variable.set_raw_value(jax.tree.map(lambda x: arrays.get(id(x), x), old))
    bare = {leaf.path: value for leaf, value in moved if leaf.variable is None}
    if bare:
        update(tree, from_flat_state(bare))


def _keep_specs(leaves: list[Leaf], layout: Layout) -> None:
    for leaf, entry in zip(leaves, layout):
        variable = leaf.variable
        if variable is None or leaf.keys:
            continue
        if variable.get_metadata().get(PLACEMENT) != entry.spec:
            variable.set_metadata(PLACEMENT, entry.spec)


def init_sharded(build: tp.Callable[[], M], mesh: jax.sharding.Mesh, plan: PlanLike) -> M:
    """The model that a function builds, with every array created where a plan puts it.

    The function runs in one compiled program, in which each device computes its own part of each array;
    none of them ever contains the whole model.

    Args:
        build: a function without arguments that returns a model, or a tuple such as
            `(model, optimizer)`. The optimizer's state is divided like the parameters.
        mesh: the devices.
        plan: as for `plan_layout`.

    Returns:
        What `build()` returns. `nnx.shard(model, mesh, plan)` then moves nothing, and returns the
        layout.

    Raises:
        ValueError: as `plan_layout`; and inside a transform.
        TypeError: as `plan_layout`.

    >>> import nnxlite as nnx
    >>> mesh = nnx.make_mesh(data=-1)
    >>> model = nnx.init_sharded(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)), mesh, "fsdp")
    >>> tuple(model.kernel.value.sharding.spec)
    ('data',)
    """
    if is_tracing():
        raise ValueError("init_sharded: call it outside of transforms, or only build() inside.")
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"init_sharded: the mesh has to be a jax.sharding.Mesh, got {mesh!r}.")
    model = eval_shape(build)
    leaves, layout = _decided(model, mesh, plan, "init_sharded")
    shardings = [layout.sharding_of(entry) for entry in layout]
    made = jax.jit(lambda: [leaf.value for leaf in leaves_of(build())], out_shardings=shardings)()
    _write(model, leaves, made)
    _keep_specs(leaves, layout)
    return model
