"""`vmap`, `pmap` and `shard_map`: one function over many slices.

The three differ in the function of JAX that runs, and in the settings: each leaf of the arguments has an
axis, or a partition spec.  JAX needs those of the outputs before it calls the function, and what the
function writes is known only afterwards.  So outputs leave in groups, one for each setting that one
may have; which leaf is in which group crosses as static data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import re
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnxlite._base.errors import Modes, context_key, listed
from nnxlite._base.jax import as_integer, as_integers, is_tracing
from nnxlite.boundary._body import warn_of_streams
from nnxlite.boundary._call_def import CallDef, Inner, StaticLeaves, enter, static_leaves
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._labels import (
    Meaning,
    by_path,
    mentioned,
    new_variables,
    output_settings,
    refuse_foreign_axes,
)
from nnxlite.boundary._leave import leave, refuse_non_arrays
from nnxlite.boundary._out import (
    Fixed,
    OutputGroups,
    Outputs,
    Source,
    output_paths,
    pick,
    refuse_bad_axes,
    remove_axis_names,
    replay,
    with_axis_names,
    write_leaves,
)
from nnxlite.graph._rebuild import Path
from nnxlite.transforms._call import (
    argument_settings,
    axis_complaint,
    axis_names_of,
    in_positions,
    inputs_in_mode,
)
from nnxlite.transforms._checks import has_several_cpus, raise_failed, wait_in_turn
from nnxlite.transforms._compiles import Lowered, Staged, refuse_other_structure
from nnxlite.transforms._wrapper import (
    Options,
    P,
    Q,
    R,
    Transform,
    both_forms,
    decorated,
    name_of,
    program,
    weakly,
)
from nnxlite.variables._definition import MISSING

__all__ = ["pmap", "shard_map", "vmap"]

RUN = inspect.signature(lambda leaves, size=None: None)


class Program:
    """A mapping of one function over arguments of one structure; it refers weakly to the function.

    Args:
        mapped: the function under the mapping.
        call: the arguments.
        settings: of each of their leaves.
        roots: of each of their roots.

    Attributes:
        values: the setting of each leaf of the graph.
        name: of the transform and its function.
        mapped: JAX's transform of the function, between leaves.
        last: its outputs in the last trace, in groups.
        warned: random streams that the user was warned of.
    """

    def __init__(
        self,
        mapped: Transform[..., tp.Any],
        call: CallDef,
        settings: list[tp.Any],
        roots: list[tp.Any],
    ) -> None:
        self.name, self._fun = repr(mapped), weakly(mapped.bound.fun)
        self.call, self.warned = call, program(mapped, "warned", set)
        options = self.options = mapped.options
        self._waits = options.make is not jax.vmap and has_several_cpus()  # see `wait_in_turn`
        self.last: OutputGroups | None = None
        self.settings, self.roots = settings, roots
        of_leaf = dict(zip([leaf.graph_leaf for leaf in call.leaves()], settings))
        self.values = [of_leaf.get(leaf) for leaf in range(call.graphdef.num_leaves)]
        run = functools.partial(self._marking)  # which takes a name and a signature
        run.__name__ = name_of(mapped.__wrapped__)  # type: ignore[attr-defined]
        run.__signature__ = RUN  # type: ignore[attr-defined]  # which JAX asks for, and takes long
        # `jax.pmap` wants an argument that has the axis; `filter_pmap`, the size alone.
        sized = options.is_array is not None and options.make is jax.pmap
        given = dict(options.jax_options)
        size = given["axis_size"] if sized else None
        self.size = () if size is None else (np.zeros(size, bool),)
        # Axes of the leaves, and of what gives the size; of the static data, and of each group.
        axes = {"in_axes": (settings, *[0] * len(self.size)), "out_axes": (None, options.order)}
        self.mapped = options.make(run, **axes, **given)

    def run(self, inputs: Inputs, mapped: tp.Any) -> tp.Any:
        """Call JAX's function, or what it was compiled to, and write back what changed."""
        try:
            try:
                fixed, groups = mapped(inputs.leaves, *self.size)
            except (TypeError, ValueError, IndexError) as error:
                if getattr(error, "_nnx_marked", False):
                    raise  # by the function itself, or by this library
                raise self._explained(error, inputs) from None
            return self._finish(inputs, fixed, groups)
        except JaxRuntimeError as error:
            raise_failed(error)
            raise

    def _explained(self, error: Exception, inputs: Inputs) -> Exception:
        """JAX's error, with the user's names for leaves."""
        options, last, call = self.options, self.last, self.call
        refuse_non_arrays(
            self.name, call, inputs.leaves, "Pass an array, or let the function capture the value."
        )
        arguments = [leaf.text() for leaf in call.leaves()]
        if options.kind == "axes":
            size = dict(options.jax_options)["axis_size"]
            if complaint := axis_complaint(arguments, inputs.leaves, self.settings, size):
                return ValueError(f"{self.name}: {complaint}")
        outputs = [] if last is None else last.names(call)
        positions = () if last is None else last.partition.positions
        output = lambda group, number: outputs[positions[int(group)][int(number)]]
        varying = re.search(r"out_axes\[1\]\[(\d+)\]\[(\d+)\]", str(error))
        if varying is not None:
            where = output(*varying.groups())
            return ValueError(
                f"{self.name}: got axis spec None but output was batched: {where} has axis None, and "
                "its value differs between the slices. Give it an axis, in out_axes, or with "
                "nnx.StateAxes in in_axes if it belongs to an argument."
            )
        text = _in_words(str(error), lambda i: repr(arguments[int(i)]), output)
        if f"out_{options.kind}" in text and last is not None:
            each = [f"{output}: {axis!r}" for output, axis in zip(outputs, last.axes)]
            what = f"out_{options.kind} by output"
        else:
            each = [f"{n!r}: {axis!r}" for n, axis in zip(arguments, self.settings)]
            what = f"in_{options.kind} by argument"
        tail = f"\n{what}: {listed(each, most=12)}." if each else ""
        kind = TypeError if isinstance(error, TypeError) else ValueError
        return kind(f"{self.name}: {text}{tail}")

    def _finish(self, inputs: Inputs, fixed: Fixed, groups: tp.Any) -> tp.Any:
        if self.options.is_array is not None:  # JAX gives back NumPy arrays that pass through
            groups = [*map(jnp.asarray, groups[0])], groups[1]
        outputs = fixed.value.outputs(groups)
        self._move_what_was_read(inputs, groups, outputs.definition.written)
        if self._waits:
            wait_in_turn(outputs.values)
        return replay(inputs, outputs)

    def _move_what_was_read(
        self, inputs: Inputs, groups: tp.Any, written: tp.Container[int]
    ) -> None:
        """Keep arrays that were only read where they were moved, for the next call."""
        mesh = dict(self.options.jax_options).get("mesh")
        if self.options.name == "pmap":  # which makes the mesh
            shardings = [getattr(x, "sharding", None) for x in jax.tree_util.tree_leaves(groups)]
            mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
        if not isinstance(mesh, Mesh) or is_tracing() or not self.options.modes.updates:
            return
        moved: dict[int, jax.Array] = {}
        for leaf, (value, setting) in enumerate(zip(inputs.values, self.values)):
            if leaf not in written and isinstance(value, jax.Array | np.ndarray):
                sharding = _sharding(mesh, setting)
                if getattr(value, "sharding", None) != sharding:
                    moved[leaf] = jax.device_put(value, sharding)
        write_leaves(inputs, moved)

    def _marking(self, leaves: list[tp.Any], size: tp.Any = None) -> tp.Any:
        """What JAX maps: `_run`, its errors marked, since JAX removes our frames from tracebacks."""
        try:
            return self._run(leaves)
        except Exception as error:
            with contextlib.suppress(Exception):  # an exception that takes no attributes
                error._nnx_marked = True  # type: ignore[attr-defined]
            raise

    def _run(self, leaves: list[tp.Any]) -> tuple[Fixed, tuple[list[tp.Any], ...]]:
        options, call = self.options, self.call
        (args, kwargs), inner = enter(call, leaves)
        names = dict(options.axis_names)
        remove_axis_names(inner, self.values, names)
        result = inner.run(self._fun(), *args, **kwargs)
        foreign, modes = options.is_array is not None, options.modes
        more = {"graph": modes.graph, "structure": modes.updates}
        out = leave(inner, result, name=self.name, foreign=foreign, **more)
        settings = output_settings(
            call,
            out,
            self.values,
            self.roots,
            options.out_prefix,
            f"out_{options.kind}",
            options.default,
            self._meaning(inner, out) if foreign else None,
        )
        out = with_axis_names(inner, out, self.values, out.definition.split(settings)[2], names)
        whole = [i for i in out.definition.written if _is_whole(self.values[i])]
        self._warn_of_streams(whole)
        refuse_bad_axes(self.name, call, out, settings)
        if foreign:
            out, settings = self._by_leaf(out, settings)
        fixed, groups = OutputGroups.of(out, settings, options.order)
        self.last = fixed.value
        return fixed, groups

    def _meaning(self, inner: Inner, out: Outputs) -> Meaning:
        """Gives the axis of a leaf that has a setting, by the path and source of the leaf."""

        def axis_of(setting: tp.Any, path: Path, variable: tp.Any, source: Source) -> int | None:
            leaves = jax.tree_util.tree_leaves(pick(source, inner.values, out.new))
            return self.options.axis_of(setting, path, variable, leaves[0] if leaves else None)

        return axis_of

    def _by_leaf(self, out: Outputs, settings: list[tp.Any]) -> tuple[Outputs, list[int | None]]:
        """The leaves of the outputs, of which those that are not arrays are static, and their axes."""
        variables = [*out.values[: len(out.values) - len(out.new)], *new_variables(out)]
        outputs = zip(output_paths(self.call, out.definition), variables, settings, out.values)
        leaves, treedef = jax.tree_util.tree_flatten([*out.values])
        axes = [
            self.options.axis_of(setting, path, variable, leaf)
            for path, variable, setting, value in outputs
            for leaf in jax.tree_util.tree_leaves(value)
        ]
        pairs = zip(axes, leaves)
        chosen = [axis is None and not self.options.is_array(leaf) for axis, leaf in pairs]
        static = static_leaves(leaves, chosen) or StaticLeaves((), (), (), True)
        definition = dataclasses.replace(out.definition, static=(treedef, static))
        return Outputs(definition, static.split(leaves)), static.split(axes)

    def _warn_of_streams(self, written: list[int]) -> None:
        """Warn of the streams that draw alike, given the leaves that were written and are whole."""
        what = f"is broadcast under {self.name}: every slice draws the same keys"
        remedy = (
            "Give each slice its own with nnx.split_rngs(splits=...) and an axis for "
            f"nnx.RngState in in_{self.options.kind}."
        )
        if self.options.name == "shard_map":
            given = dict(self.options.jax_options)
            mesh = given["mesh"]
            mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
            names = given.get("axis_names") or mesh.axis_names
            if math.prod(mesh.shape[name] for name in names) == 1:
                return
            what = f"is replicated under {self.name}: every device draws the same keys"
            remedy = (
                "Where devices should draw different ones, pass a key that was drawn before the "
                "call, and mix jax.lax.axis_index into it with jax.random.fold_in."
            )
        warn_of_streams(self.call, written, self.warned, what, remedy)


def _is_whole(setting: tp.Any) -> bool:
    """Whether an axis, or a spec, gives each slice or device the whole of an array."""
    return setting is None or (isinstance(setting, PartitionSpec) and not any(setting))


@functools.lru_cache(maxsize=256)
def _sharding(mesh: Mesh, setting: tp.Any) -> NamedSharding:
    """The sharding on a mesh of an array with a spec, or an axis."""
    if isinstance(setting, int):
        setting = PartitionSpec(*[None] * setting, *mesh.axis_names)
    return NamedSharding(mesh, setting or PartitionSpec())


def _in_words(
    text: str, argument: tp.Callable[[str], str], output: tp.Callable[[str, str], str]
) -> str:
    """A message of JAX with the user's names in place of its own."""
    for pattern, name in (
        (r", where args\[\d\] is bound to \S+ parameter '[^']*''?,", lambda: ""),
        (r"\b(?:leaves|args\[0\])\[(\d+)\](?:\[[^]]*\])*", argument),
        (r"\bin_specs\[0\]\[(\d+)\]", lambda i: f"the spec of {argument(i)}"),
        (r"\S+\(\*args\)\[1\]\[(\d+)\]\[(\d+)\]", output),
        (r"\bout_specs\[1\](?:\[\d+\])*", lambda: "out_specs"),
    ):
        text = re.sub(pattern, lambda found, name=name: name(*found.groups()), text)
    return text


# The transforms -----------------------------------------------------------------------------------


def _prepared(
    mapped: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any
) -> tuple[Inputs, Program]:
    """The arguments of a call of a mapped function, and its program."""
    options = mapped.options
    inputs, call, settings = options.resolve(mapped, args, kwargs)
    make = lambda: Program(mapped, call, *settings())
    # `filter_vmap` may have functions among its static leaves, which live no longer than the call.
    is_cached = options.is_array is None or options.make is jax.pmap
    return inputs, program(mapped, call.exactly, make) if is_cached else make()


def run_mapped(mapped: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    """Call a mapped function."""
    inputs, made = _prepared(mapped, args, kwargs)
    return made.run(inputs, made.mapped)


class Mapped(Transform[P, R]):
    """A function over slices of its arguments, one on each device, as `pmap` returns it."""

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[R]:
        """Lower the function for these arguments, without running it."""
        return Lowered.of("lower", self, args, kwargs)

    def staged(self, args: tp.Any, kwargs: tp.Any, program: CallDef | None = None) -> Staged:
        """A call, ready for JAX; see `Staged`."""
        inputs, made = _prepared(self, args, kwargs)
        if program is not None:
            refuse_other_structure(self, program, made.call)
        groups = inputs.leaves, *made.size
        return Staged(made.call, made.mapped, groups, functools.partial(made.run, inputs))


class MappedForms(tp.Protocol[Q]):
    """`BothForms` of a transform that returns a `Mapped`."""

    @tp.overload
    def __call__(
        self, f: tp.Callable[P, R], /, *args: Q.args, **options: Q.kwargs
    ) -> Mapped[P, R]: ...
    @tp.overload
    def __call__(
        self, *args: Q.args, **options: Q.kwargs
    ) -> tp.Callable[[tp.Callable[P, R]], Mapped[P, R]]: ...


def mapped_forms(transform: tp.Callable[tp.Concatenate[tp.Any, Q], tp.Any]) -> MappedForms[Q]:
    """See `both_forms`."""
    return tp.cast(tp.Any, transform)


Resolved: tp.TypeAlias = tuple[Inputs, CallDef, tp.Callable[[], tuple[list[tp.Any], list[tp.Any]]]]
"""The arguments of a call, its key, and what gives the settings of their leaves and roots."""


def _by_prefix(mapped: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> Resolved:
    options, bound = mapped.options, mapped.bound
    # With graph updates off `vmap` and `pmap` treat keyword arguments as JAX does: they have axis 0,
    # unless there are more settings than positional arguments.
    prefix = options.in_prefix
    wanted = len(prefix) if isinstance(prefix, (tuple, list)) else 0
    by_position = kwargs and (options.modes.updates or options.kind != "axes")
    moves = not options.statics and (len(args) < wanted or by_position)
    args, kwargs = in_positions(mapped, args, kwargs, wanted, moves)
    statics, option = options.statics, "static_broadcasted_argnums"
    inputs = inputs_in_mode(bound, args, kwargs, options, False, statics, option)
    call, what, same = inputs.define(context_key()), f"in_{options.kind}", options.constant
    return inputs, call, lambda: argument_settings(call, bound, prefix, what, same, options.default)


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
        run_mapped,
        resolve=_by_prefix,
        kind=kind,
        in_prefix=prefixes[0],
        out_prefix=prefixes[1],
        default=default,
        constant=constant,
        order=mentioned(*prefixes, default, constant),
        make=make,
        jax_options=tuple(jax_options.items()),
        axis_names=axis_names_of(metadata),
        statics=frozenset(statics),
    )
    return decorated(Mapped if make is jax.pmap else Transform, f, options)


@both_forms
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
    return _mapping(f, "vmap", in_axes, out_axes, jax.vmap, given, modes, transform_metadata)


@mapped_forms
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
        A function of the same arguments, whose results have an axis of one slice for each device. It has
        the method `lower` of a function under `jax.pmap`.

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
    return _mapping(
        f, "pmap", in_axes, out_axes, jax.pmap, given, modes, transform_metadata, statics
    )


@both_forms
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
