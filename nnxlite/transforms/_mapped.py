"""`vmap`, `pmap` and `shard_map`: one function over many slices.

The three differ in what JAX function runs and in what a setting is (an axis, or a partition spec);
everything else is shared: settings of arguments are settled leaf by leaf, outputs leave in groups
of equal setting.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import re
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnxlite._config import Modes
from nnxlite._errors import path_text
from nnxlite._jax import PyTreeDef, is_tracing, key_name
from nnxlite._statics import UnhashableStatic, replaced_functions, static_key
from nnxlite.boundary import (
    CallDef,
    Fixed,
    Inputs,
    Layout,
    Outputs,
    broadcast,
    by_path,
    enter,
    leave,
    mentioned,
    no_room,
    output_names,
    output_settings,
    pack,
    refuse_foreign_axes,
    refuse_foreign_result,
    refuse_non_arrays,
    replay,
    split_settings,
    unpack,
    warn_of_streams,
    with_arrays,
    write_leaves,
)
from nnxlite.graph import GraphDef
from nnxlite.transforms._arguments import (
    as_tuple,
    by_position,
    check_arguments,
    context_key,
    refuse_shared_result,
    static_argument,
)
from nnxlite.transforms._wrapper import (
    PerFunction,
    Transformed,
    Unbound,
    decorated,
    name_of,
    weakly,
)
from nnxlite.variables import (
    MISSING,
    PARTITION_NAME,
    Variable,
    VariableDef,
    add_axis,
    remove_axis,
)

Make: tp.TypeAlias = tp.Callable[..., tp.Callable[..., tp.Any]]
"""What makes JAX's transform of a function: of it, the settings of its arguments, those of its outputs
(None for the static data, and one for each group), and further options."""


class MapOptions(tp.NamedTuple):
    """The options of a mapping transform, as they travel together."""

    name: str
    in_prefix: tp.Any
    out_prefix: tp.Any
    in_name: str
    out_name: str
    default: tp.Any
    constant: tp.Any
    modes: Modes
    metadata: dict[str, tp.Any]
    make: Make
    jax_options: dict[str, tp.Any]


class MapCall(tp.NamedTuple):
    """What a mapping transform works out once for each structure of arguments."""

    plain: list[tp.Any]
    values: list[tp.Any]
    roots: list[tp.Any]
    order: tuple[tp.Any, ...]
    mapped: tp.Callable[..., tp.Any]
    last: list[Layout]
    shardings: list[tp.Any]  # a mesh, and where it puts each graph leaf


RUN = inspect.signature(lambda plain, values: None)


class MapCore:
    """What stands behind a mapped function; equal wrappers of one function share it.

    JAX's caches go by the functions that it is given: they hit where these are the same ones.
    """

    def __init__(
        self,
        name: str,
        bound: Unbound,
        options: MapOptions,
    ) -> None:
        self._fun = weakly(bound.fun)
        self._name = name
        self._num_bound = len(bound.args)
        self._bound_names = frozenset(bound.kwargs)
        self._options = options
        self._calls: collections.OrderedDict[CallDef, MapCall] = collections.OrderedDict()
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"{self._options.name}({self._name})"

    def __call__(self, inputs: Inputs, call: CallDef) -> tp.Any:
        """Run on the caller's objects and write back what changed."""
        settled = self._calls.get(call)
        if settled is None:
            settled = self._calls[call] = self._settle(call)
            if len(self._calls) > CALLS_KEPT:
                self._calls.popitem(last=False)
        try:
            layout, groups = settled.mapped(inputs.plain, inputs.values)
        except (TypeError, ValueError, IndexError) as error:
            if passed_through(error, MapCore._run):
                raise  # the function's own, or said by this library
            raise self._explained(error, call, settled, inputs) from None
        outputs = unpack(layout.value, groups)
        self._move_what_was_read(inputs, settled, groups, outputs.definition.written)
        return replay(inputs, outputs)

    def _move_what_was_read(
        self, inputs: Inputs, settled: MapCall, groups: tp.Any, written: tp.Sequence[int]
    ) -> None:
        """Leave arrays that were only read where they were put, for the next call."""
        options = self._options
        mesh = _mesh_of(groups) if options.name == "pmap" else options.jax_options.get("mesh")
        if not isinstance(mesh, Mesh) or is_tracing() or not options.modes.updates:
            return
        if settled.shardings[:1] != [mesh]:
            settled.shardings[:] = [mesh, [_sharding(mesh, s) for s in settled.values]]
        moved = [_moved(*pair) for pair in zip(inputs.values, settled.shardings[1])]
        rest = set(range(len(moved))) - set(written)
        write_leaves(inputs, {i: moved[i] for i in rest if moved[i] is not inputs.values[i]})

    def _settle(self, call: CallDef) -> MapCall:
        options, num_bound = self._options, self._num_bound
        args, kwargs = jax.tree_util.tree_unflatten(call.treedef, range(call.treedef.num_leaves))
        prefix = options.in_prefix
        if isinstance(prefix, list):
            prefix = tuple(prefix)
        carried = jax.tree_util.tree_leaves(args[:num_bound])
        settings = [options.constant] * len(carried)
        settings += broadcast(prefix, args[num_bound:], options.in_name)
        for name in sorted(kwargs):
            setting = options.constant if name in self._bound_names else options.default
            settings += [setting] * len(jax.tree_util.tree_leaves(kwargs[name]))
        if options.constant is not None:  # None is another way to say it
            settings = [options.constant if s is None else s for s in settings]
        plain, values = split_settings(call, settings, options.in_name)
        roots = [settings[i] for i in call.where]
        order = mentioned(prefix, options.out_prefix, options.default, options.constant)
        last: list[Layout] = []
        run = functools.partial(self._run, call, values, roots, order, last)
        run.__name__ = self._name  # type: ignore[attr-defined]
        run.__signature__ = RUN  # type: ignore[attr-defined]  # JAX asks, and it is long to work out
        mapped = options.make(run, (plain, values), order, **options.jax_options)
        return MapCall(plain, values, roots, order, mapped, last, [])

    def _run(
        self,
        call: CallDef,
        value_settings: list[tp.Any],
        roots: list[tp.Any],
        order: tuple[tp.Any, ...],
        last: list[Layout],
        plain: list[tp.Any],
        values: list[tp.Any],
    ) -> tuple[Fixed, tuple[list[tp.Any], ...]]:
        options = self._options
        (args, kwargs), inner = enter(call, plain, list(values))
        named = PARTITION_NAME in options.metadata
        if named:
            for leaf, node in enumerate(call.graphdef.decoded.leaf_nodes):
                variable = inner.nodes[node] if node >= 0 else None
                axis = value_settings[leaf]
                if isinstance(variable, Variable) and isinstance(axis, int):
                    axis = from_front(axis, inner.values[leaf])
                    remove_axis(variable, axis, options.metadata)
        result = self._fun()(*args, **kwargs)
        refuse_shared_result(result, options.name, options.modes.graph)
        out = with_arrays(inner, leave(inner, result, structure=options.modes.updates))
        refuse_foreign_result(out, repr(self))
        settings = output_settings(
            call, out, value_settings, roots, options.out_prefix, options.out_name, options.default
        )
        if named:
            out = _with_axis_names(inner, out, value_settings, settings.fresh, options.metadata)
        warn_of_streams(
            call,
            [leaf for leaf in out.definition.written if value_settings[leaf] is None],
            self._warned,
            f"is broadcast under {self!r}: every slice draws the same keys",
            "Give each slice its own with nnx.split_rngs(splits=...) and an axis for "
            f"nnx.RngState in {options.in_name}.",
        )
        layout, groups = pack(out, settings, order)
        last[:] = [layout]
        self._check_axes(call, layout, order, groups)
        return Fixed(layout), groups

    def _check_axes(
        self, call: CallDef, layout: Layout, order: tuple[tp.Any, ...], groups: tp.Any
    ) -> None:
        """Raise ValueError where an output has no room for the axis it is to get."""
        for number, (axis, group) in enumerate(zip(order, groups)):
            for i, value in enumerate(group):
                if no_room(axis, value, ""):
                    names = _output_names(call, layout, self._argument_names(call)[1])
                    raise ValueError(f"{self!r}: {no_room(axis, value, names[number, i])}")

    def _argument_names(self, call: CallDef) -> tuple[list[str], list[str]]:
        """Where the plain leaves and the graph leaves are found among the arguments."""
        num_bound = self._num_bound
        args, kwargs = jax.tree_util.tree_unflatten(call.treedef, range(call.treedef.num_leaves))
        names = []
        for path, _ in jax.tree_util.tree_leaves_with_path((args, kwargs)):
            first, *inside = [key_name(key) for key in path[1:]]
            if isinstance(first, int):
                first = first - num_bound if first >= num_bound else f"bound argument {first}"
            names.append((first, *inside))
        roots = set(call.where)
        plain = [path_text(name) for i, name in enumerate(names) if i not in roots]
        values = [
            path_text((*names[call.where[root]], *path))
            for root, path in zip(call.leaf_roots(), call.leaf_paths())
        ]
        return plain, values

    def _explained(
        self, error: Exception, call: CallDef, settled: MapCall, inputs: Inputs
    ) -> Exception:
        """JAX's complaint, with the places of the leaves it may mean."""
        options = self._options
        kind = TypeError if isinstance(error, TypeError) else ValueError
        remedy = "Pass an array, or let the function capture the value."
        if kind is TypeError:
            refuse_non_arrays(repr(self), call, inputs.plain, inputs.values, remedy)
        plain, values = self._argument_names(call)
        names, settings = [*plain, *values], [*settled.plain, *settled.values]
        sizes = _axis_complaint(names, [*inputs.plain, *inputs.values], settings)
        if sizes:
            return ValueError(f"{self!r}: {sizes}")
        outputs = _output_names(call, settled.last[0], values) if settled.last else {}
        found = re.search(r"out_axes\[1\]\[(\d+)\]\[(\d+)\]", str(error))
        if found is not None and outputs:
            return ValueError(
                f"{self!r}: got axis spec None but output was batched: "
                f"{outputs[int(found[1]), int(found[2])]} has axis None, and its value differs "
                "between the slices. Give it an axis, in out_axes, or with nnx.StateAxes in "
                "in_axes if it belongs to an argument."
            )
        text = str(error)
        for pattern, name in (
            (r", where args\[\d\] is bound to \S+ parameter '[^']*''?,", ""),
            (r"\b(?:plain|args\[0\])\[(\d+)\](?:\[[^]]*\])*", lambda i: repr(plain[int(i)])),
            (r"\b(?:values|args\[1\])\[(\d+)\](?:\[[^]]*\])*", lambda i: repr(values[int(i)])),
            (r"\bin_specs\[0\]\[(\d+)\]", lambda i: f"the spec of {plain[int(i)]!r}"),
            (r"\bin_specs\[1\]\[(\d+)\]", lambda i: f"the spec of {values[int(i)]!r}"),
            (r"\S+\(\*args\)\[1\]\[(\d+)\]\[(\d+)\]", lambda g, i: outputs[int(g), int(i)]),
            (r"\bout_specs\[1\](?:\[\d+\])*", "out_specs"),
        ):
            put = name if isinstance(name, str) else functools.partial(_put, name)
            text = re.sub(pattern, put, text)
        if options.out_name in text and outputs:
            order = settled.order
            shown = [f"{name}: {order[group]!r}" for (group, _), name in outputs.items()]
            what = f"{options.out_name} by output"
        else:
            shown = [f"{name!r}: {setting!r}" for name, setting in zip(names, settings)]
            what = f"{options.in_name} by argument"
        more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
        listed = f"\n{what}: {', '.join(shown[:SHOWN])}{more}." if shown else ""
        return kind(f"{self!r}: {text}{listed}")


class MapWrapped(Transformed):
    """A function mapped over slices of its arguments, as `vmap` and its kin return it."""

    options: MapOptions

    def __init__(self, fun: tp.Any, options: MapOptions) -> None:
        super().__init__(fun, options)
        self._core = core_for(self.bound, name_of(fun), options)

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        options, bound = self.options, self.bound
        prefix = options.in_prefix
        wanted = len(prefix) if isinstance(prefix, (tuple, list)) else 0
        if len(args) < wanted or (kwargs and self._settings_reach_keywords()):
            args, kwargs = by_position(bound.fun, args, kwargs, bound, wanted)
        if wanted and len(args) != wanted and options.in_name == "in_axes":
            every, keywords = (*bound.args, *args), {**bound.kwargs, **kwargs}
            check_arguments(options.name, bound.fun, every, keywords)
        inputs = self.inputs(args, kwargs)
        return self._core(inputs, inputs.define(context_key()))

    def _settings_reach_keywords(self) -> bool:
        """Whether keyword arguments get the settings of their positions.

        With graph updates off `vmap` and `pmap` are called as JAX's: their keyword arguments have
        axis 0, unless there are more settings than positional arguments.
        """
        return self.options.in_name != "in_axes" or self.options.modes.updates


_cores: PerFunction[MapCore] = PerFunction()
CALLS_KEPT = 64
"""For how many kinds of arguments a core keeps what it worked out."""


def core_for(bound: Unbound, name: str, options: MapOptions) -> MapCore:
    """The core of a function under some options; the same one as before where that is possible."""
    new = functools.partial(MapCore, name, bound, options)
    replaced = replaced_functions() if options.name == "pmap" else ()  # its programs are kept
    try:
        key = static_key((name, len(bound.args), *bound.kwargs, options)), replaced
    except UnhashableStatic:
        return new()
    return _cores.get(bound.fun, key, new)


def _mesh_of(outputs: tp.Any) -> tp.Any:
    """The mesh that JAX has made for a `pmap`; None where nothing on it came out."""
    shardings = (getattr(x, "sharding", None) for x in jax.tree_util.tree_leaves(outputs))
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)


def _sharding(mesh: Mesh, setting: tp.Any) -> NamedSharding:
    """Where a spec, or an axis, puts an array on a mesh."""
    if isinstance(setting, int):
        setting = PartitionSpec(*[None] * setting, *mesh.axis_names)
    return NamedSharding(mesh, setting or PartitionSpec())


def _moved(value: tp.Any, sharding: NamedSharding) -> tp.Any:
    """The value with a sharding, where it is an array."""
    if not isinstance(value, jax.Array | np.ndarray):
        return value
    same = getattr(value, "sharding", None) == sharding
    return value if same else jax.device_put(value, sharding)


SHOWN = 12
"""How many settings a message lists."""


def _put(name: tp.Callable[..., str], match: re.Match[str]) -> str:
    return name(*match.groups())


def _axis_complaint(names: list[str], leaves: list[tp.Any], axes: list[tp.Any]) -> str | None:
    """What is wrong with the sizes of mapped axes; None where nothing is."""
    sizes: dict[int, list[str]] = {}
    for name, leaf, axis in zip(names, leaves, axes):
        for part in jax.tree_util.tree_leaves(leaf) if isinstance(axis, int) else ():
            shape = jnp.shape(part)
            if not -len(shape) <= axis < len(shape):
                return (
                    f"was asked to map over axis {axis} of '{name}', which implies that its rank "
                    f"should be at least {axis + 1 if axis >= 0 else -axis}, but its shape is "
                    f"{shape}. Give it another axis, or None to pass it whole."
                )
            sizes.setdefault(shape[axis], []).append(name)
    if len(sizes) < 2:
        return None
    parts = [f"{size} at {_listed(places)}" for size, places in sizes.items()]
    return (
        f"got inconsistent sizes for array axes to be mapped: {', '.join(parts)}. Give all the "
        "same size, or None to what is passed whole."
    )


def _listed(places: list[str]) -> str:
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    return ", ".join(map(repr, places[:3])) + more


def passed_through(error: BaseException, fun: tp.Any) -> bool:
    """Whether an exception was raised during a call of a function."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not fun.__code__:
        trace = trace.tb_next
    return trace is not None


def _output_names(call: CallDef, layout: Layout, values: list[str]) -> dict[tuple[int, int], str]:
    """What each output is, by its place in the groups that `pack` made."""
    definition = layout.definition
    treedef = tp.cast(PyTreeDef, layout.treedef or definition.treedef)
    names = output_names(call, definition, treedef, values)
    places = (layout.result, layout.written, layout.fresh)
    return {place: name for part, ns in zip(places, names) for place, name in zip(part, ns)}


def from_front(axis: int, slice_: tp.Any) -> int:
    """The number from the front of an axis of the whole, given one slice of it."""
    rank = getattr(slice_, "ndim", None)
    return axis if axis >= 0 or rank is None else axis + rank + 1


def _with_axis_names(
    inner: tp.Any,
    out: Outputs,
    value_settings: list[tp.Any],
    fresh_settings: list[tp.Any],
    names: tp.Mapping[str, tp.Any],
) -> Outputs:
    """Outputs whose Variables' annotations have the mapped axis again."""
    graph = out.definition.graph
    if graph is None:
        return out
    decoded = graph.graphdef.decoded
    tokens = list(graph.graphdef.tokens)
    variable_tokens = [i for i, t in enumerate(tokens) if isinstance(t, VariableDef)]
    changed: dict[int, VariableDef] = {}
    node_of_token = [i for i, d in enumerate(decoded.node_defs) if isinstance(d, VariableDef)]
    for token, node in zip(variable_tokens, node_of_token):
        leaf = decoded.node_leaves[node]
        source = graph.sources[leaf]
        axis = value_settings[source] if source >= 0 else fresh_settings[~source]
        if isinstance(axis, int):
            found = tp.cast(VariableDef, tokens[token])
            carrier = found.type.from_metadata(None, found.metadata)
            slice_ = inner.values[source] if source >= 0 else out.fresh[~source]
            add_axis(carrier, from_front(axis, slice_), names)
            changed[node] = tokens[token] = carrier._box.definition
    came_in = inner.call.graphdef.decoded
    kinds = tuple(
        (old, changed.get(node, decoded.node_defs[node]))
        for node, old in enumerate(graph.origin)
        if old is not None
        and isinstance(decoded.node_defs[node], VariableDef)
        and changed.get(node, decoded.node_defs[node]) is not came_in.node_defs[old]
    )
    new = dataclasses.replace(
        graph, graphdef=GraphDef(tokens, graph.graphdef.num_roots), kinds=kinds
    )
    return out._replace(definition=dataclasses.replace(out.definition, graph=new))


def axis_options(
    name: str,
    in_axes: tp.Any,
    out_axes: tp.Any,
    modes: Modes,
    metadata: dict[str, tp.Any],
    make: Make,
    given: dict[str, tp.Any],
) -> MapOptions:
    """The options of a transform with axes; TypeError where something is no axis."""
    in_axes, out_axes = by_path(in_axes), by_path(out_axes)
    refuse_foreign_axes(name, "in_axes", in_axes)
    refuse_foreign_axes(name, "out_axes", out_axes)
    names = ("in_axes", "out_axes")
    return MapOptions(name, in_axes, out_axes, *names, 0, None, modes, metadata, make, given)


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
            Variable.
            Keyword arguments count at their positions; those that have none are mapped over
            axis 0. What a bound method or a callable object carries is broadcast.
        out_axes: the same for the result. What is written into an argument keeps its input axis.
        axis_name, axis_size, spmd_axis_name: as in `jax.vmap`.
        transform_metadata: `{nnx.PARTITION_NAME: name}` names the axis in sharding annotations; other
            entries name it in the tuple that a Variable has in its metadata under the same key.
        graph, graph_updates: see `jit`.

    Raises:
        ValueError: for a prefix that does not fit, sizes that differ, a Variable shared under two
            axes, or one with axis None that is written differently by each slice.

    >>> import nnxlite as nnx, jax
    >>> models = nnx.vmap(lambda key: nnx.Linear(2, 3, rngs=nnx.Rngs(key)))(
    ...     jax.random.split(jax.random.key(0), 4))
    >>> models.kernel.shape
    (4, 2, 3)
    >>> nnx.vmap(lambda m, x: m(x))(models, jax.numpy.ones((4, 2))).shape
    (4, 3)
    """
    given = {"axis_name": axis_name, "axis_size": axis_size, "spmd_axis_name": spmd_axis_name}
    modes, metadata = Modes.of(graph, graph_updates), dict(transform_metadata)
    options = axis_options("vmap", in_axes, out_axes, modes, metadata, _vmapped, given)
    return decorated(MapWrapped, f, options)


def _vmapped(run: tp.Any, in_axes: tp.Any, order: tuple[tp.Any, ...], **given: tp.Any) -> tp.Any:
    return jax.vmap(run, in_axes=in_axes, out_axes=(None, order), **given)


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
    live on. What leaves with axis None is what the first device has, as in `jax.pmap`: make it equal
    on all of them (`jax.lax.pmean`) before it is written.
    """
    del donate_argnums  # results are the same without; buffers of objects must stay
    devices = None if devices is None else tuple(devices)
    given = {"axis_name": axis_name, "devices": devices, "backend": backend, "axis_size": axis_size}
    modes, metadata = Modes.of(graph, graph_updates), dict(transform_metadata)
    options = axis_options("pmap", in_axes, out_axes, modes, metadata, _pmapped, given)
    statics = as_tuple(static_broadcasted_argnums)
    if not statics:
        return decorated(MapWrapped, f, options)
    if f is MISSING:
        return lambda fun: _with_statics(fun, options, statics)
    return _with_statics(f, options, statics)


def _pmapped(run: tp.Any, in_axes: tp.Any, order: tuple[tp.Any, ...], **given: tp.Any) -> tp.Any:
    return jax.pmap(run, in_axes=in_axes, out_axes=(None, order), **given)


def _with_statics(
    f: tp.Callable[..., tp.Any], options: MapOptions, statics: tuple[int, ...]
) -> tp.Callable[..., tp.Any]:
    """A mapped function some of whose positional arguments are constants of the program."""
    by_statics: dict[tp.Any, MapWrapped] = {}

    @functools.wraps(f)
    def wrapper(*args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        for number in statics:
            if not -len(args) <= number < len(args):
                raise ValueError(
                    f"pmap({name_of(f)}): static_broadcasted_argnums has {number}, but the call "
                    f"has {len(args)} positional arguments."
                )
        numbers = sorted({number % len(args) for number in statics})
        fixed = {number: static_argument(args[number], number, f) for number in numbers}
        key = tuple(fixed.items())
        if key not in by_statics:
            prefix = options.in_prefix
            if isinstance(prefix, (tuple, list)):
                prefix = tuple(p for i, p in enumerate(prefix) if i not in fixed)

            def fun(*rest: tp.Any, **named: tp.Any) -> tp.Any:
                every = list(rest)
                for number in numbers:
                    every.insert(number, fixed[number].value)
                return f(*every, **named)

            fun.__qualname__ = name_of(f)
            by_statics[key] = MapWrapped(fun, options._replace(in_prefix=prefix))
        return by_statics[key](*[a for i, a in enumerate(args) if i not in fixed], **kwargs)

    return wrapper


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
        mesh: the devices.
        in_specs: a `PartitionSpec` for each argument (a prefix); `StateSharding` chooses by
            Variable.
        out_specs: the same for the result. What is written into an argument keeps its input spec.
        axis_names, check_vma: as in `jax.shard_map`.
        graph, graph_updates: see `jit`.

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
    spec = PartitionSpec()
    options = MapOptions(
        "shard_map",
        by_path(in_specs),
        by_path(out_specs),
        "in_specs",
        "out_specs",
        spec,
        spec,
        Modes.of(graph, graph_updates),
        {},
        _sharded,
        given,
    )
    return decorated(MapWrapped, f, options)


def _sharded(run: tp.Any, in_specs: tp.Any, order: tuple[tp.Any, ...], **given: tp.Any) -> tp.Any:
    whole = PartitionSpec()
    specs = tuple(whole if s is None else s for s in order)
    return jax.shard_map(run, in_specs=in_specs, out_specs=(whole, specs), **given)
