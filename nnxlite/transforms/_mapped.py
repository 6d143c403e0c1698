"""`vmap`, `pmap` and `shard_map`: one function over many slices.

The three differ only in the function of JAX that runs and in the kind of settings (axes, or partition
specs); see `_mapping`.
"""

from __future__ import annotations

import typing as tp

import jax
from jax.sharding import PartitionSpec

from nnxlite._base.errors import Modes, context_key
from nnxlite._base.jax import as_integer, as_integers
from nnxlite.boundary._labels import by_path, mentioned, refuse_foreign_axes
from nnxlite.transforms._call import R, Selection, inputs_in_mode
from nnxlite.transforms._mapping import Program, argument_settings, in_positions
from nnxlite.transforms._wrapper import (
    Decorator,
    G,
    Options,
    P,
    PmapKeywords,
    ShardMapKeywords,
    Transform,
    VmapKeywords,
    decorated,
    program,
)
from nnxlite.variables._definition import MISSING, PARTITION_NAME


def _map(mapped: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    options, bound = mapped.options, mapped.bound
    # With graph updates off `vmap` and `pmap` treat keyword arguments as JAX does: they have axis 0,
    # unless there are more settings than positional arguments.
    prefix = options.in_prefix
    wanted = len(prefix) if isinstance(prefix, (tuple, list)) else 0
    by_position = kwargs and (options.modes.updates or options.in_name != "in_axes")
    moves = not options.statics and (len(args) < wanted or by_position)
    args, kwargs = in_positions(mapped, args, kwargs, wanted, moves)
    statics = Selection(frozenset(options.statics), option="static_broadcasted_argnums")
    inputs = inputs_in_mode(bound, args, kwargs, options, static=statics)
    call = inputs.define(context_key())

    def make() -> Program:
        settings = options.constant, options.default
        by_leaf, by_root = argument_settings(call, bound, prefix, options.in_name, *settings)
        return Program(mapped, call, by_leaf, by_root)

    made = program(mapped, call.exactly, make)
    return made.run(inputs, made.mapped)


def _mapping(
    f: tp.Any,
    name: str,
    in_prefix: tp.Any,
    out_prefix: tp.Any,
    make: tp.Callable[..., tp.Any],
    jax_options: dict[str, tp.Any],
    modes: Modes,
    metadata: tp.Mapping[str, tp.Any] = {},
    statics: tuple[int, ...] = (),
) -> tp.Any:
    """A function under a mapping, or a decorator; TypeError for a setting that is not an axis.

    Args:
        f: the function.
        name: of the transform.
        in_prefix, out_prefix: the settings of the arguments and of the result.
        make, jax_options: the transform of JAX, and its options.
        modes, metadata, statics: see `vmap` and `pmap`.
    """
    prefixes = by_path(in_prefix), by_path(out_prefix)
    has_axes = make is not _sharded
    kind = "axes" if has_axes else "specs"
    if has_axes:
        refuse_foreign_axes(name, "in_axes", prefixes[0])
        refuse_foreign_axes(name, "out_axes", prefixes[1])
    # Of keyword arguments and outputs without a setting; and of what is the same in all slices.
    default, constant = (0, None) if has_axes else (PartitionSpec(), PartitionSpec())
    options = Options.of(
        name,
        modes,
        _map,
        in_name=f"in_{kind}",
        out_name=f"out_{kind}",
        in_prefix=prefixes[0],
        out_prefix=prefixes[1],
        default=default,
        constant=constant,
        order=mentioned(*prefixes, default, constant),
        meaning=None,
        by_leaf=None,
        make=make,
        jax_options=jax_options,
        metadata=dict(metadata) if PARTITION_NAME in metadata else {},
        statics=statics,
    )
    return decorated(Transform, f, options)


@tp.overload
def vmap(f: G, **options: tp.Unpack[VmapKeywords]) -> G: ...
@tp.overload
def vmap(f: tp.Callable[P, R], **options: tp.Unpack[VmapKeywords]) -> Transform[P, R]: ...
@tp.overload
def vmap(**options: tp.Unpack[VmapKeywords]) -> Decorator: ...
def vmap(
    f: tp.Any = MISSING,
    *,
    in_axes: tp.Any = 0,
    out_axes: tp.Any = 0,
    axis_name: tp.Hashable | None = None,
    axis_size: int | None = None,
    spmd_axis_name: tp.Hashable | None = None,
    transform_metadata: tp.Mapping[str, tp.Any] = {},
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Vectorise a function over an axis of its arguments.

    Args:
        f: the function, or a class to build stacked objects; without it a decorator is returned.
        in_axes: axis of each argument (a prefix); `None` broadcasts; `StateAxes` chooses by
            Variable. Keyword arguments count at their positions; those that have none are mapped over
            axis 0. What a bound method or a callable object carries is broadcast.
        out_axes: the same for the result. What is written into an argument keeps its input axis.
        axis_name, axis_size, spmd_axis_name: as in `jax.vmap`.
        transform_metadata: `{nnx.PARTITION_NAME: name}` names the axis in sharding annotations; other
            entries name it in the tuple that a Variable has in its metadata under the same key.
        graph, graph_updates: see `jit`.

    Returns:
        A function of the same arguments, whose results have the new axis; for a class, what makes
        stacked objects.

    Raises:
        ValueError: for a prefix that does not match, sizes that differ, a Variable shared under two
            axes, or one with axis None that is written differently by each slice.

    >>> import nnxlite as nnx, jax
    >>> models = nnx.vmap(lambda key: nnx.Linear(2, 3, rngs=nnx.Rngs(key)))(
    ...     jax.random.split(jax.random.key(0), 4))
    >>> models.kernel.shape
    (4, 2, 3)
    >>> nnx.vmap(lambda m, x: m(x))(models, jax.numpy.ones((4, 2))).shape
    (4, 3)

    Some Variables may be mapped and others not. Random streams are split first, one key for each slice:

    >>> axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    >>> nnx.vmap(lambda m, x: m(x), in_axes=(axes, None))(models, jax.numpy.ones(2)).shape
    (4, 3)
    >>> @nnx.split_rngs(splits=4)
    ... @nnx.vmap
    ... def create(rngs):
    ...     return nnx.Linear(2, 3, rngs=rngs)
    >>> create(nnx.Rngs(0)).bias.shape
    (4, 3)
    """
    given = {
        "axis_name": axis_name,
        "axis_size": as_integer(axis_size),
        "spmd_axis_name": spmd_axis_name,
    }
    modes = Modes.of(graph, graph_updates)
    axes = in_axes, out_axes
    return _mapping(f, "vmap", *axes, jax.vmap, given, modes, transform_metadata)


@tp.overload
def pmap(f: tp.Callable[P, R], **options: tp.Unpack[PmapKeywords]) -> Transform[P, R]: ...
@tp.overload
def pmap(**options: tp.Unpack[PmapKeywords]) -> Decorator: ...
def pmap(
    f: tp.Any = MISSING,
    *,
    axis_name: tp.Hashable | None = None,
    in_axes: tp.Any = 0,
    out_axes: tp.Any = 0,
    static_broadcasted_argnums: int | tp.Sequence[int] = (),
    devices: tp.Sequence[tp.Any] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | tp.Sequence[int] = (),
    transform_metadata: tp.Mapping[str, tp.Any] = {},
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Run a function on several devices, one slice of its arguments on each.

    Arguments as for `vmap` and `jax.pmap`. Donated arguments must not be objects: their Variables
    live on. An output with axis None is that of the first device, as in `jax.pmap`: make it equal on
    all of them (`jax.lax.pmean`) before it is written.

    Args:
        f: the function; without it a decorator is returned.
        axis_name, devices, backend, axis_size: as for `jax.pmap`.
        in_axes, out_axes, transform_metadata: as for `vmap`.
        static_broadcasted_argnums: numbers of arguments that are part of the program; hashable.
        donate_argnums: accepted for compatibility; results are the same without donation.
        graph, graph_updates: see `jit`.

    Returns:
        A function of the same arguments, whose results have an axis of one slice for each device.

    Raises:
        ValueError: as for `vmap`, and for static arguments that are unhashable or not given.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.pmap(lambda m, x: m(x), in_axes=(None, 0))(model, jnp.ones((1, 4, 2))).shape
    (1, 4, 3)
    """
    del donate_argnums  # results are the same without; buffers of objects must stay
    devices = None if devices is None else tuple(devices)
    given = {
        "axis_name": axis_name,
        "devices": devices,
        "backend": backend,
        "axis_size": as_integer(axis_size),
    }
    modes, statics = Modes.of(graph, graph_updates), as_integers(static_broadcasted_argnums)
    axes = in_axes, out_axes
    return _mapping(f, "pmap", *axes, jax.pmap, given, modes, transform_metadata, statics)


@tp.overload
def shard_map(f: tp.Callable[P, R], **options: tp.Unpack[ShardMapKeywords]) -> Transform[P, R]: ...
@tp.overload
def shard_map(**options: tp.Unpack[ShardMapKeywords]) -> Decorator: ...
def shard_map(
    f: tp.Any = MISSING,
    *,
    mesh: tp.Any,
    in_specs: tp.Any,
    out_specs: tp.Any,
    axis_names: tp.AbstractSet[tp.Any] = frozenset(),
    check_vma: bool = True,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Run a function on every shard of its arguments.

    Args:
        f: the function; without it a decorator is returned.
        mesh: the devices.
        in_specs: a `PartitionSpec` for each argument (a prefix); `StateSharding` chooses by
            Variable.
        out_specs: the same for the result. What is written into an argument keeps its input spec.
        axis_names, check_vma: as in `jax.shard_map`.
        graph, graph_updates: see `jit`.

    Returns:
        A function of the same arguments.

    Raises:
        ValueError: for specs that do not match the arguments, the result or the mesh, or differ for
            a shared Variable.

    >>> import nnxlite as nnx, jax
    >>> mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> P = jax.sharding.PartitionSpec
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> f = nnx.shard_map(lambda m, x: m(x), mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    >>> f(model, jax.numpy.ones((4, 2))).shape
    (4, 3)
    """
    given: dict[str, tp.Any] = {"mesh": mesh, "check_vma": check_vma}
    if axis_names:
        given["axis_names"] = frozenset(axis_names)
    modes = Modes.of(graph, graph_updates)
    return _mapping(f, "shard_map", in_specs, out_specs, _sharded, given, modes)


def _sharded(run: tp.Any, *, in_axes: tp.Any, out_axes: tp.Any, **given: tp.Any) -> tp.Any:
    specs = tuple([PartitionSpec() if spec is None else spec for spec in out_axes[1]])
    return jax.shard_map(run, in_specs=in_axes, out_specs=(PartitionSpec(), specs), **given)
