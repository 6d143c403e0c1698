"""`vmap`, `pmap` and `shard_map`: one function over many slices.

The three differ only in the function of JAX that runs and in the kind of settings (axes, or partition
specs).  Each leaf of the arguments gets its setting, and outputs leave in groups of equal setting.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing as tp

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnxlite._base.config import UNNAMED_AXES, Modes, context_key
from nnxlite._base.jax import as_integer, as_integers, is_tracing
from nnxlite.boundary._body import warn_of_streams, with_arrays
from nnxlite.boundary._call_def import CallDef, Inner, enter
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._labels import (
    Layout,
    broadcast,
    labels,
    mentioned,
    no_room,
    output_settings,
    pack,
    unpack,
)
from nnxlite.boundary._leave import leave
from nnxlite.boundary._out import Fixed, Outputs, pick, replay, write_leaves
from nnxlite.boundary._prefixes import by_path, refuse_foreign_axes
from nnxlite.boundary._refusals import refuse_foreign_outputs
from nnxlite.graph._graphdef import GraphDef
from nnxlite.transforms._arguments import (
    boxed_arguments,
    check_arguments,
    positional,
    refuse_shared_result,
    static_argument,
    unboxed,
)
from nnxlite.transforms._finish import has_several_cpus, raise_failed, wait_in_turn
from nnxlite.transforms._map_errors import MapNames, explained, marks_errors, passed_through
from nnxlite.transforms._wrapper import (
    Decorator,
    Options,
    P,
    R,
    Transform,
    Unbound,
    decorated,
    inputs_in_mode,
    name_of,
    program,
    weakly,
)
from nnxlite.variables._definition import MISSING, VariableDef
from nnxlite.variables._metadata import PARTITION_NAME, add_axis, add_unnamed_axis, remove_axis
from nnxlite.variables._variable import Variable

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import G, PmapKeywords, ShardMapKeywords, VmapKeywords

Make: tp.TypeAlias = tp.Callable[..., tp.Callable[..., tp.Any]]
"""Makes JAX's transform of a function, from the function, the settings of its arguments, those of its
outputs (None for the static data, and one for each group), and further options."""


RUN = inspect.signature(lambda leaves: None)


class Program:
    """A mapping of one function over arguments of one structure; it refers weakly to the function.

    Attributes:
        settings, values: that of each leaf of the arguments that crosses, and of the graph.
        roots: that of each root.
        order: all settings that an output may have.
        mapped: JAX's transform of the function, between leaves.
        last: the layout of its outputs in the last trace.
        shardings: a mesh, and the sharding of each graph leaf on it.
        warned: random streams that the user was warned of.
    """

    def __init__(self, mapped: Transform[..., tp.Any], call: CallDef) -> None:
        self._text, self._fun = repr(mapped), weakly(mapped.bound.fun)
        self.call, self.warned = call, program(mapped, "warned", set)
        options = self.options = mapped.options
        self._waits = options.name != "vmap" and has_several_cpus()  # see `_finish`
        self.last: Layout | None = None
        self.shardings: tuple[Mesh, list[NamedSharding]] | None = None
        settings = self._settings(mapped.bound)
        prefixes = options.in_prefix, options.out_prefix
        self.order = mentioned(*prefixes, options.default, options.constant)
        self.settings = labels(call, settings, options.in_name)
        self.values = call.by_side(self.settings)[1]
        self.roots = [settings[i] for i in call.where]
        run = functools.partial(self._run)  # which takes a name and a signature
        run.__name__ = name_of(mapped.__wrapped__)  # type: ignore[attr-defined]
        run.__signature__ = RUN  # type: ignore[attr-defined]  # which JAX asks for, and takes long
        self.mapped = options.make(run, (self.settings,), self.order, **options.jax_options)

    def __repr__(self) -> str:
        return self._text

    def _settings(self, bound: Unbound) -> list[tp.Any]:
        """The setting of each position of the arguments."""
        options, num_bound = self.options, len(bound.args)
        args, kwargs = self.call.template()
        prefix = options.in_prefix
        if isinstance(prefix, list):
            prefix = tuple(prefix)
        carried = jax.tree_util.tree_leaves(args[:num_bound])
        settings = [options.constant] * len(carried)
        settings += broadcast(prefix, args[num_bound:], options.in_name)
        for name in sorted(kwargs):
            setting = options.constant if name in bound.kwargs else options.default
            settings += [setting] * len(jax.tree_util.tree_leaves(kwargs[name]))
        if options.constant is not None:  # None means the same
            settings = [options.constant if s is None else s for s in settings]
        return settings

    def __call__(self, inputs: Inputs) -> tp.Any:
        """Run on the caller's objects and write back what changed."""
        try:
            layout, groups = self.mapped(inputs.leaves)
        except (TypeError, ValueError, IndexError) as error:
            if passed_through(error):
                raise  # by the function itself, or by this library
            names, options = MapNames(self.call, self.last), self.options
            raise explained(
                repr(self), options.in_name, options.out_name, error, self.settings, names, inputs
            ) from None
        except JaxRuntimeError as error:
            raise_failed(error)
            raise
        outputs = unpack(layout.value, groups)
        self._move_what_was_read(inputs, groups, outputs.definition.written)
        if self._waits:
            wait_in_turn(groups)
        return replay(inputs, outputs)

    def _move_what_was_read(
        self, inputs: Inputs, groups: tp.Any, written: tp.Sequence[int]
    ) -> None:
        """Keep arrays that were only read where they were moved, for the next call."""
        options = self.options
        mesh = _mesh_of(groups) if options.name == "pmap" else options.jax_options.get("mesh")
        if not isinstance(mesh, Mesh) or is_tracing() or not options.modes.updates:
            return
        if self.shardings is None or self.shardings[0] != mesh:
            self.shardings = (mesh, [_sharding(mesh, setting) for setting in self.values])
        moved = [_put(*pair) for pair in zip(inputs.values, self.shardings[1])]
        rest = set(range(len(moved))) - set(written)
        write_leaves(inputs, {i: moved[i] for i in rest if moved[i] is not inputs.values[i]})

    @marks_errors
    def _run(self, leaves: list[tp.Any]) -> tuple[Fixed, tuple[list[tp.Any], ...]]:
        options, call = self.options, self.call
        value_settings = self.values
        (args, kwargs), inner = enter(call, leaves)
        named = PARTITION_NAME in options.metadata
        if named:
            remove_axis_names(inner, value_settings, options.metadata)
        result = self._fun()(*args, **kwargs)
        refuse_shared_result(result, options.name, options.modes.graph)
        out = with_arrays(inner, leave(inner, result, structure=options.modes.updates))
        refuse_foreign_outputs(call, out, repr(self))
        settings = output_settings(
            call,
            out,
            value_settings,
            self.roots,
            options.out_prefix,
            options.out_name,
            options.default,
        )
        names = options.metadata if named else {}
        out = with_axis_names(inner, out, value_settings, out.definition.split(settings)[2], names)
        whole = [i for i in out.definition.written if _is_whole(value_settings[i])]
        self._warn_of_streams(whole)
        layout, groups = pack(out, settings, self.order)
        self.last = layout
        for number, (axis, group) in enumerate(zip(self.order, groups)):
            for i, value in enumerate(group):
                if no_room(axis, value, ""):
                    name = MapNames(call, layout).output(number, i)
                    raise ValueError(f"{self!r}: {no_room(axis, value, name)}")
        return Fixed(layout), groups

    def _warn_of_streams(self, written: list[int]) -> None:
        """Warn of the streams that draw alike, given the leaves that were written and are whole."""
        what = f"is broadcast under {self!r}: every slice draws the same keys"
        remedy = (
            "Give each slice its own with nnx.split_rngs(splits=...) and an axis for "
            f"nnx.RngState in {self.options.in_name}."
        )
        if self.options.name == "shard_map":
            if _num_shards(self.options.jax_options) == 1:
                return
            what = f"is replicated under {self!r}: every device draws the same keys"
            remedy = (
                "Where devices should draw different ones, pass a key that was drawn before the "
                "call, and mix jax.lax.axis_index into it with jax.random.fold_in."
            )
        warn_of_streams(self.call, written, self.warned, what, remedy)


def _is_whole(setting: tp.Any) -> bool:
    """Whether an axis, or a spec, gives each slice or device the whole of an array."""
    return setting is None or (isinstance(setting, PartitionSpec) and not any(setting))


def _map(mapped: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    options, bound = mapped.options, mapped.bound
    if options.statics:
        option = "static_broadcasted_argnums"
        box = lambda value, number: static_argument(value, number, mapped.__wrapped__)
        args = boxed_arguments(args, options.statics, repr(mapped), option, box)
    prefix = options.in_prefix
    wanted = len(prefix) if isinstance(prefix, (tuple, list)) else 0
    # With graph updates off `vmap` and `pmap` treat keyword arguments as JAX does: they have axis 0,
    # unless there are more settings than positional arguments.
    by_position = kwargs and (options.in_name != "in_axes" or options.modes.updates)
    if not options.statics and (len(args) < wanted or by_position):
        args, kwargs = positional(bound.fun, args, kwargs, wanted, bound, True)
    if wanted and len(args) != wanted and options.in_name == "in_axes":
        every, keywords = (*bound.args, *args), {**bound.kwargs, **kwargs}
        check_arguments(options.name, bound.fun, every, keywords)
    inputs = inputs_in_mode(bound, args, kwargs, options)
    unboxed(inputs)
    call = inputs.define(context_key())
    return program(mapped, call.exactly, lambda: Program(mapped, call))(inputs)


def _mesh_of(outputs: tp.Any) -> tp.Any:
    """The mesh that JAX has made for a `pmap`; None where no output is on it."""
    shardings = (getattr(x, "sharding", None) for x in jax.tree_util.tree_leaves(outputs))
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)


def _sharding(mesh: Mesh, setting: tp.Any) -> NamedSharding:
    """The sharding on a mesh of an array with a spec, or an axis."""
    if isinstance(setting, int):
        setting = PartitionSpec(*[None] * setting, *mesh.axis_names)
    return NamedSharding(mesh, setting or PartitionSpec())


def _put(value: tp.Any, sharding: NamedSharding) -> tp.Any:
    """The value with a sharding, where it is an array."""
    if not isinstance(value, jax.Array | np.ndarray):
        return value
    same = getattr(value, "sharding", None) == sharding
    return value if same else jax.device_put(value, sharding)


def _from_front(axis: int, slice_: tp.Any) -> int:
    """The non-negative number of an axis of a whole array, given a slice of it."""
    rank = getattr(slice_, "ndim", None)
    return axis if axis >= 0 or rank is None else axis + rank + 1


def remove_axis_names(
    inner: Inner, value_settings: list[tp.Any], names: tp.Mapping[str, tp.Any]
) -> None:
    """Remove the mapped axis from the annotations of Variables, which inside are slices."""
    for leaf, node in enumerate(inner.call.graphdef.decoded.leaf_nodes):
        variable = inner.nodes[node] if node >= 0 else None
        axis = value_settings[leaf]
        if isinstance(variable, Variable) and isinstance(axis, int):
            remove_axis(variable, _from_front(axis, inner.values[leaf]), names)


def with_axis_names(
    inner: Inner,
    out: Outputs,
    value_settings: list[tp.Any],
    new_settings: list[tp.Any],
    names: tp.Mapping[str, tp.Any],
) -> Outputs:
    """Outputs whose Variables' annotations have the mapped axis again.

    Without a name for it, new Variables get None there, as the annotation would be short of an axis
    otherwise. An annotation that was copied from an argument has the axis already.
    """
    left = out.definition
    if not left.restructures:
        return out
    copies = [] if names else _mapped_annotations(inner, value_settings)
    annotated = UNNAMED_AXES.get()
    decoded, tokens = left.graphdef.decoded, list(left.graphdef.tokens)
    came_in = inner.call.graphdef.decoded.node_defs
    kinds: list[tuple[int, VariableDef]] = []
    for node, definition in enumerate(decoded.node_defs):
        if not isinstance(definition, VariableDef):
            continue
        source, old = left.sources[decoded.node_leaves[node]], left.origin[node]
        axis = pick(source, value_settings, new_settings)
        if isinstance(axis, int) and (
            names or (annotated and "out_sharding" in definition.metadata)
        ):
            carrier = definition.type.from_metadata(None, definition.metadata)
            slice_ = pick(source, inner.values, out.new)
            if names:
                add_axis(carrier, _from_front(axis, slice_), names)
            elif old is None and (carrier.sharding_names, _shape(slice_)) not in copies:
                add_unnamed_axis(carrier, _from_front(axis, slice_), getattr(slice_, "ndim", 0))
            definition = tokens[decoded.node_tokens[node]] = carrier._box.definition
        if old is not None and definition is not came_in[old]:
            kinds.append((old, definition))
    graphdef: GraphDef[tp.Any] = GraphDef(tokens, left.graphdef.num_roots)
    return out._replace(definition=dataclasses.replace(left, graphdef=graphdef, kinds=tuple(kinds)))


def _mapped_annotations(inner: Inner, settings: list[tp.Any]) -> list[tuple[tp.Any, tp.Any]]:
    """The annotations of the arguments that are mapped, each with the shape of a slice."""
    nodes = [
        inner.nodes[node] if node >= 0 else None for node in inner.call.graphdef.decoded.leaf_nodes
    ]
    return [
        (node.sharding_names, _shape(value))
        for node, axis, value in zip(nodes, settings, inner.values)
        if isinstance(node, Variable) and isinstance(axis, int) and node.sharding_names is not None
    ]


def _shape(value: tp.Any) -> tp.Any:
    return getattr(value, "shape", None)


def _mapping(
    f: tp.Any,
    name: str,
    kind: tp.Literal["axes", "specs"],
    in_prefix: tp.Any,
    out_prefix: tp.Any,
    make: Make,
    jax_options: dict[str, tp.Any],
    modes: Modes,
    metadata: tp.Mapping[str, tp.Any] = {},
    statics: tuple[int, ...] = (),
) -> tp.Any:
    """A function under a mapping, or a decorator; TypeError for a setting that is not an axis.

    Args:
        f: the function.
        name: of the transform.
        kind: the kind of settings that it takes.
        in_prefix, out_prefix: the settings of the arguments and of the result.
        make, jax_options: the transform of JAX, and its options.
        modes, metadata, statics: see `vmap` and `pmap`.
    """
    axes = kind == "axes"
    prefixes = by_path(in_prefix), by_path(out_prefix)
    names = f"in_{kind}", f"out_{kind}"
    if axes:
        for what, prefix in zip(names, prefixes):
            refuse_foreign_axes(name, what, prefix)
    options = Options.of(
        name,
        modes,
        _map,
        in_name=names[0],
        out_name=names[1],
        in_prefix=prefixes[0],
        out_prefix=prefixes[1],
        default=0 if axes else PartitionSpec(),  # of keyword arguments, and of outputs without one
        constant=None if axes else PartitionSpec(),  # of what is the same in all slices
        make=make,
        jax_options=jax_options,
        metadata=dict(metadata),
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
    return _mapping(
        f, "vmap", "axes", in_axes, out_axes, _vmapped, given, modes, transform_metadata
    )


def _vmapped(run: tp.Any, in_axes: tp.Any, order: tuple[tp.Any, ...], **given: tp.Any) -> tp.Any:
    return jax.vmap(run, in_axes=in_axes, out_axes=(None, order), **given)


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
    return _mapping(f, "pmap", "axes", *axes, _pmapped, given, modes, transform_metadata, statics)


def _pmapped(run: tp.Any, in_axes: tp.Any, order: tuple[tp.Any, ...], **given: tp.Any) -> tp.Any:
    return jax.pmap(run, in_axes=in_axes, out_axes=(None, order), **given)


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
    return _mapping(f, "shard_map", "specs", in_specs, out_specs, _sharded, given, modes)


def _num_shards(given: tp.Mapping[str, tp.Any]) -> int:
    """How many shards `shard_map` runs a function on, given its options; called inside of it."""
    mesh = given["mesh"]
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
    names = given.get("axis_names") or mesh.axis_names
    return math.prod(mesh.shape[name] for name in names)


def _sharded(run: tp.Any, in_specs: tp.Any, order: tuple[tp.Any, ...], **given: tp.Any) -> tp.Any:
    whole = PartitionSpec()
    specs = tuple(whole if s is None else s for s in order)
    return jax.shard_map(run, in_specs=in_specs, out_specs=(whole, specs), **given)
