"""`pipeline`: the layers of a model on several devices, which work on several parts of a batch at once.

The schedule is GPipe's (Huang et al. 2019, https://arxiv.org/abs/1811.06965).  In each tick every stage
applies its layers to one microbatch and hands the result to the next stage:

    tick        0    1    2    3    4
    stage 0    m0   m1   m2    -    -
    stage 1     -   m0   m1   m2    -
    stage 2     -    -   m0   m1   m2

The backward pass is the derivative of this loop: the same schedule from the last tick to the first.  A
stage is idle in `(stages - 1) / (microbatches + stages - 1)` of the ticks: it computes on whatever
microbatch it has, and the result is dropped.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from nnxlite._base.errors import path_text, short_type
from nnxlite._base.jax import current_mesh, is_tracing
from nnxlite.boundary._prefixes import Carry
from nnxlite.filters import Not
from nnxlite.graph._edit import update
from nnxlite.graph._functional import flat_pairs, merge, split, state
from nnxlite.sharding._stacked import num_layers
from nnxlite.transforms._jit import jit
from nnxlite.transforms._mapped import shard_map
from nnxlite.transforms._scan import scan
from nnxlite.transforms._shapes import remat
from nnxlite.transforms._wrapper import name_of
from nnxlite.variables._kinds import Param

A = tp.TypeVar("A")
L = tp.TypeVar("L")


def pipeline(
    f: tp.Callable[[L, A], A],
    layers: L,
    x: A,
    *,
    microbatches: int,
    axis: str = "stage",
    mesh: tp.Any = None,
    recompute: bool = False,
) -> A:
    """Apply stacked layers one after the other, each device those of its stage.

    The result, its gradients, and what the layers write are those of a loop over the microbatches in
    which all layers are applied to one, then to the next.

    Args:
        f: `f(layer, x)` applies one layer; the result has the structure, shapes and dtypes of `x`.
            With `nnx.remat(f)`, each layer keeps only its input for the gradient.
        layers: one layer whose arrays have a leading axis for all layers, as `nnx.stack_layers`
            returns it.  Their number is a multiple of the number of stages.
        x: an array (batch, ...), or a pytree of such arrays.
        microbatches: number of parts of the batch; it divides the batch.  Microbatch `i` has the rows
            i, i + microbatches, i + 2 microbatches, ..., so that a batch that is sharded over other
            axes of the mesh is so in each part, too.
        axis: the mesh axis of the stages.
        mesh: the mesh; the one of `jax.set_mesh` by default.
        recompute: keep only the input of each stage for the gradient, and compute the rest again.

    Returns:
        What the last layer returns, like `x`.

    Raises:
        ValueError: for a mesh that is missing or has no such axis, for numbers that do not divide, if
            `layers` is not a stack of layers, or if `f` writes a Param or adds a Variable.
        TypeError: if the result of `f` is not like `x`.

    >>> import jax, jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> mesh = jax.make_mesh((1,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> layers = nnx.stack_layers([nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(4)])
    >>> call, x = lambda layer, x: layer(x), jnp.ones((6, 2))
    >>> y = nnx.pipeline(call, layers, x, microbatches=3, mesh=mesh)
    >>> bool(jnp.allclose(y, nnx.Sequential(*nnx.unstack_layers(layers))(x), atol=1e-6))
    True
    """
    mesh = current_mesh() if mesh is None else mesh
    stages = _num_stages(axis, mesh)
    _check_numbers(layers, x, microbatches, stages, axis)

    def stage(layers: tp.Any, x: tp.Any) -> tp.Any:
        return scan(lambda x, layer: f(layer, x), in_axes=(Carry, 0), out_axes=Carry)(x, layers)

    apply = remat(stage) if recompute else stage
    hops = [(i, i + 1) for i in range(stages - 1)]

    def run(layers: tp.Any, parts: tp.Any) -> tp.Any:
        here = lax.axis_index(axis)
        graphdef, params, rest = split(layers, Param, ...)

        def tick(carry: tp.Any, number: jax.Array) -> tp.Any:
            received, rest = carry
            part = jnp.minimum(number, microbatches - 1)
            first = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, part, keepdims=False), parts)
            inside = merge(graphdef, params, rest, copy=True)
            y = apply(inside, _chosen(here == 0, first, received))
            written = _written(f, inside, params, rest)
            busy = (here <= number) & (number < here + microbatches)
            rest = _chosen(busy, written, rest)
            return (jax.tree.map(lambda y: lax.ppermute(y, axis, hops), y), rest), y

        # Idle stages get a microbatch, too: zeros might make their gradients NaN.
        start = jax.tree.map(lambda x: x[0], parts)
        ticks = jnp.arange(microbatches + stages - 1)
        (_, rest), out = lax.scan(tick, (start, rest), ticks)
        update(layers, rest)
        last = here == stages - 1
        return jax.tree.map(lambda y: _from(last, y[stages - 1 :], axis), out)

    along, whole = PartitionSpec(axis), PartitionSpec()
    sharded = shard_map(
        run,
        mesh=mesh,
        in_specs=(along, whole),
        out_specs=whole,
        axis_names={axis},
        # Stages have different microbatches, so JAX cannot verify that the result is replicated.
        check_vma=False,
    )
    call = sharded if is_tracing() else jit(sharded)
    out = call(layers, jax.tree.map(lambda x: _parts(x, microbatches), x))
    return jax.tree.map(_joined, out)


def _num_stages(axis: str, mesh: tp.Any) -> int:
    if mesh is None:
        raise ValueError(
            f"pipeline needs a mesh with the axis {axis!r}. Pass mesh=..., or call it within "
            "jax.set_mesh(mesh)."
        )
    if axis not in mesh.axis_names:
        raise ValueError(
            f"pipeline: the mesh with axes {tuple(mesh.axis_names)} has no axis {axis!r}. Name the one "
            f"of the stages, as in axis={next(iter(mesh.axis_names), 'stage')!r}."
        )
    return mesh.shape[axis]


def _check_numbers(layers: tp.Any, x: tp.Any, microbatches: int, stages: int, axis: str) -> None:
    count = num_layers(layers, "pipeline")
    if count % stages:
        raise ValueError(
            f"pipeline: {count} layers cannot be divided among {stages} stages, the devices along the "
            f"mesh axis {axis!r}. Take a multiple of {stages} layers, or a mesh with another number "
            "of stages."
        )
    shapes: list[tuple[int, ...]] = [
        tuple(getattr(leaf, "shape", ())) for leaf in jax.tree.leaves(x)
    ]
    sizes = {shape[:1] for shape in shapes}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            "pipeline: the arrays of x need a leading batch axis of one size; their shapes are "
            f"{shapes}."
        )
    batch = shapes[0][0]
    if microbatches < 1 or batch % microbatches:
        raise ValueError(
            f"pipeline: a batch of {batch} cannot be divided into {microbatches} microbatches (x has "
            f"the shapes {shapes}). Take a divisor of {batch}; at least {stages}, the number of "
            "stages, keeps them busy."
        )


def _written(f: tp.Any, layers: tp.Any, params: tp.Any, rest: tp.Any) -> tp.Any:
    """The state, without parameters, that a stage leaves.

    Raises ValueError if it wrote a parameter, or did more than write values.
    """
    after = state(layers)
    known = {path: leaf for part in (params, rest) for path, leaf in flat_pairs(part)}
    for path, leaf in flat_pairs(after):
        if path not in known:
            raise ValueError(
                f"pipeline: {name_of(f)} adds the {type(leaf).__name__} '{path_text(path)}' to its "
                "layer, and stages can only write to what is there. Return the value as a part of x, "
                "or make the Variable before."
            )
        if isinstance(leaf, Param) and leaf.get_raw_value() is not known[path].get_raw_value():
            raise ValueError(
                f"pipeline: {name_of(f)} writes the Param '{path_text(path)}' ({short_type(leaf)}), "
                "whose gradient would not be that of the value it has. Make it another kind of "
                "Variable."
            )
    return state(layers, Not(Param))


def _chosen(condition: jax.Array, one: tp.Any, other: tp.Any) -> tp.Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _from(here: jax.Array, y: jax.Array, axis: str) -> jax.Array:
    """The array of the device where `here` is True, on all devices along the axis."""
    y = jnp.where(here, y, jnp.zeros_like(y))
    return (
        lax.psum(y.astype(jnp.int32), axis).astype(bool) if y.dtype == bool else lax.psum(y, axis)
    )


def _parts(x: jax.Array, microbatches: int) -> jax.Array:
    """(batch, ...) as (microbatches, rows, ...), where a sharding of the batch is one of the rows."""
    rows = x.shape[0] // microbatches
    return jnp.swapaxes(x.reshape(rows, microbatches, *x.shape[1:]), 0, 1)


def _joined(y: jax.Array) -> jax.Array:
    y = jnp.swapaxes(y, 0, 1)
    return y.reshape(-1, *y.shape[2:])
