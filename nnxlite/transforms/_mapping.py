"""The mapping of a function over slices, for every transform that maps one.

Each leaf of the arguments has a setting: an axis, or a partition spec.  JAX needs those of the outputs
before it calls the function, and what the function writes is known only afterwards.  So outputs leave in
groups, one for each setting that one may have; which leaf is in which group crosses as static data.
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

from nnxlite._base.errors import UNNAMED_AXES, listed
from nnxlite._base.jax import is_tracing
from nnxlite.boundary._body import warn_of_streams
from nnxlite.boundary._call_def import CallDef, Inner, Partition, enter
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._labels import broadcast, labels, output_settings
from nnxlite.boundary._leave import leave, refuse_non_arrays
from nnxlite.boundary._out import (
    Fixed,
    OutDef,
    Outputs,
    output_names,
    pick,
    refuse_no_room,
    replay,
    write_leaves,
)
from nnxlite.graph._graphdef import GraphDef
from nnxlite.transforms._call import (
    check_arguments,
    has_several_cpus,
    positional,
    raise_failed,
    wait_in_turn,
)
from nnxlite.transforms._wrapper import Transform, Unbound, name_of, program, weakly
from nnxlite.variables._definition import VariableDef, add_axis, add_unnamed_axis, remove_axis
from nnxlite.variables._variable import Variable

T = tp.TypeVar("T")

RUN = inspect.signature(lambda leaves, size=None: None)


def marks_errors(fun: tp.Callable[..., T]) -> tp.Callable[..., T]:
    """Mark what a function raises, for `passed_through`: JAX removes our frames from the traceback."""

    @functools.wraps(fun)
    def marked(*args: tp.Any, **kwargs: tp.Any) -> T:
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            with contextlib.suppress(Exception):  # an exception that takes no attributes
                error._nnx_marked = True  # type: ignore[attr-defined]
            raise

    return marked


class Layout(tp.NamedTuple):
    """The layout of outputs in groups, without their values.

    Attributes:
        definition: what leaves.
        partition: the group of each output: a setting.
        axes: their settings, where the group is not that setting: the axis is then in front.
    """

    definition: OutDef
    partition: Partition
    axes: tuple[tp.Any, ...]

    @classmethod
    def of(
        cls, out: Outputs, settings: tp.Sequence[tp.Any], order: tuple[tp.Any, ...]
    ) -> tuple[Fixed, tuple[list[tp.Any], ...]]:
        """Outputs as JAX is given them: their layout, and a group for each setting in `order`."""
        axes = tuple(settings)
        labels = axes if {*axes} <= {*order} else tuple([x if x in order else 0 for x in axes])
        layout = cls(out.definition, Partition(labels, order), axes)
        return Fixed(layout), layout.partition.split(out.values)

    def outputs(self, groups: tp.Sequence[tp.Sequence[tp.Any]]) -> Outputs:
        """The outputs, from their groups."""
        values = groups[0] if len(groups) == 1 else self.partition.join(*groups)
        if self.axes is not self.partition.labels:
            moved = zip(values, self.axes, self.partition.labels)
            values = [x if axis == at else jnp.moveaxis(x, at, axis) for x, axis, at in moved]
        return Outputs(self.definition, values)

    def names(self, call: CallDef) -> list[str]:
        """The names of the outputs."""
        names = output_names(call, self.definition)
        if self.definition.static is None:
            return names
        treedef, static = self.definition.static
        each = zip(names, treedef.children())
        return static.split([name for name, value in each for _ in range(value.num_leaves)])


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
        last: the layout of its outputs in the last trace.
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
        self.last: Layout | None = None
        self.settings, self.roots = settings, roots
        of_leaf = dict(zip([leaf.graph_leaf for leaf in call.leaves()], settings))
        self.values = [of_leaf.get(leaf) for leaf in range(call.graphdef.num_leaves)]
        run = functools.partial(self._run)  # which takes a name and a signature
        run.__name__ = name_of(mapped.__wrapped__)  # type: ignore[attr-defined]
        run.__signature__ = RUN  # type: ignore[attr-defined]  # which JAX asks for, and takes long
        # `jax.pmap` wants an argument that has the axis; `filter_pmap`, the size alone.
        sized = options.is_array is not None and options.make is jax.pmap
        size = options.jax_options["axis_size"] if sized else None
        self.size = () if size is None else (np.zeros(size, bool),)
        # Axes of the leaves, and of what gives the size; of the static data, and of each group.
        axes = {"in_axes": (settings, *[0] * len(self.size)), "out_axes": (None, options.order)}
        self.mapped = options.make(run, **axes, **options.jax_options)

    def run(self, inputs: Inputs, mapped: tp.Any) -> tp.Any:
        """Call JAX's function, or what it was compiled to, and write back what changed."""
        try:
            return self._finish(inputs, *mapped(inputs.leaves, *self.size))
        except (TypeError, ValueError, IndexError) as error:
            if passed_through(error):
                raise  # by the function itself, or by this library
            raise explained(self, error, inputs) from None
        except JaxRuntimeError as error:
            raise_failed(error)
            raise

    @marks_errors
    def _finish(self, inputs: Inputs, layout: Fixed, groups: tp.Any) -> tp.Any:
        if self.options.by_leaf is not None:  # JAX gives back NumPy arrays that pass through
            groups = [*map(jnp.asarray, groups[0])], groups[1]
        outputs = layout.value.outputs(groups)
        self._move_what_was_read(inputs, groups, outputs.definition.written)
        if self._waits:
            wait_in_turn(groups)
        return replay(inputs, outputs)

    def _move_what_was_read(
        self, inputs: Inputs, groups: tp.Any, written: tp.Container[int]
    ) -> None:
        """Keep arrays that were only read where they were moved, for the next call."""
        mesh = self.options.jax_options.get("mesh")
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

    @marks_errors
    def _run(
        self, leaves: list[tp.Any], size: tp.Any = None
    ) -> tuple[Fixed, tuple[list[tp.Any], ...]]:
        options, call = self.options, self.call
        (args, kwargs), inner = enter(call, leaves)
        names = options.metadata
        remove_axis_names(inner, self.values, names)
        result = self._fun()(*args, **kwargs)
        foreign, modes = options.by_leaf is not None, options.modes
        more = {"graph": modes.graph, "structure": modes.updates}
        out = leave(inner, result, name=self.name, foreign=foreign, **more)
        settings = output_settings(
            call,
            out,
            self.values,
            self.roots,
            options.out_prefix,
            options.out_name,
            options.default,
            _as_it_is if options.meaning is None else options.meaning(inner, out),
        )
        out = with_axis_names(inner, out, self.values, out.definition.split(settings)[2], names)
        whole = [i for i in out.definition.written if _is_whole(self.values[i])]
        self._warn_of_streams(whole)
        refuse_no_room(self.name, call, out, settings)
        if options.by_leaf is not None:
            out, settings = options.by_leaf(call, out, settings)
        fixed, groups = Layout.of(out, settings, options.order)
        self.last = fixed.value
        return fixed, groups

    def _warn_of_streams(self, written: list[int]) -> None:
        """Warn of the streams that draw alike, given the leaves that were written and are whole."""
        what = f"is broadcast under {self.name}: every slice draws the same keys"
        remedy = (
            "Give each slice its own with nnx.split_rngs(splits=...) and an axis for "
            f"nnx.RngState in {self.options.in_name}."
        )
        if self.options.name == "shard_map":
            if _num_shards(self.options.jax_options) == 1:
                return
            what = f"is replicated under {self.name}: every device draws the same keys"
            remedy = (
                "Where devices should draw different ones, pass a key that was drawn before the "
                "call, and mix jax.lax.axis_index into it with jax.random.fold_in."
            )
        warn_of_streams(self.call, written, self.warned, what, remedy)


def _num_shards(given: tp.Mapping[str, tp.Any]) -> int:
    """How many shards `shard_map` runs a function on, given its options; called inside of it."""
    mesh = given["mesh"]
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
    names = given.get("axis_names") or mesh.axis_names
    return math.prod(mesh.shape[name] for name in names)


def _as_it_is(setting: tp.Any, *_: tp.Any) -> tp.Any:
    return setting


def _is_whole(setting: tp.Any) -> bool:
    """Whether an axis, or a spec, gives each slice or device the whole of an array."""
    return setting is None or (isinstance(setting, PartitionSpec) and not any(setting))


def in_positions(
    mapped: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any, wanted: int, moves: tp.Any
) -> tuple[tp.Any, tp.Any]:
    """The arguments of a call at the positions for which there are settings.

    Args:
        mapped, args, kwargs: the call.
        wanted: for how many positions there are settings.
        moves: whether arguments by keyword move to their positions, and defaults fill these.

    Raises TypeError where the function cannot be called with these arguments.
    """
    bound = mapped.bound
    if moves:
        args, kwargs = positional(bound.fun, args, kwargs, wanted, bound, True)
    if wanted and len(args) != wanted:
        every, keywords = (*bound.args, *args), {**bound.kwargs, **kwargs}
        check_arguments(mapped.name, bound.fun, every, keywords)
    return args, kwargs


def argument_settings(
    call: CallDef,
    bound: Unbound,
    prefix: tp.Any,
    what: str,
    constant: tp.Any = None,
    default: tp.Any = None,
) -> tuple[list[tp.Any], list[tp.Any]]:
    """The setting of each leaf, and of each root, of the arguments of a call.

    Args:
        call, bound: the arguments, and the function, whose own ones are constant.
        prefix, what: the settings of positional arguments.
        constant: the setting that means the same as None.
        default: that of keyword arguments.
    """
    args, kwargs = call.template()
    count = lambda tree: len(jax.tree_util.tree_leaves(tree))
    own = len(bound.args)
    settings = [constant] * count(args[:own])
    prefix = tuple(prefix) if isinstance(prefix, list) else prefix
    settings += [constant if s is None else s for s in broadcast(prefix, args[own:], what)]
    for name in sorted(kwargs):
        settings += [constant if name in bound.kwargs else default] * count(kwargs[name])
    return labels(call, settings, what), [settings[i] for i in call.where]


@functools.lru_cache(maxsize=256)
def _sharding(mesh: Mesh, setting: tp.Any) -> NamedSharding:
    """The sharding on a mesh of an array with a spec, or an axis."""
    if isinstance(setting, int):
        setting = PartitionSpec(*[None] * setting, *mesh.axis_names)
    return NamedSharding(mesh, setting or PartitionSpec())


def _from_front(axis: int, slice_: tp.Any) -> int:
    """The non-negative number of an axis of a whole array, given a slice of it."""
    rank = getattr(slice_, "ndim", None)
    return axis if axis >= 0 or rank is None else axis + rank + 1


def _mapped_variables(
    inner: Inner, settings: list[tp.Any]
) -> tp.Iterator[tuple[Variable[tp.Any], int, tp.Any]]:
    """The Variables of the arguments that have an axis, with the axis, and the value of a slice."""
    for leaf, node in enumerate(inner.call.graphdef.decoded.leaf_nodes):
        variable = inner.nodes[node] if node >= 0 else None
        if isinstance(variable, Variable) and isinstance(settings[leaf], int):
            yield variable, settings[leaf], inner.values[leaf]


def remove_axis_names(
    inner: Inner, value_settings: list[tp.Any], names: tp.Mapping[str, tp.Any]
) -> None:
    """Remove the mapped axis from the annotations of Variables, which inside are slices."""
    for variable, axis, value in _mapped_variables(inner, value_settings) if names else ():
        remove_axis(variable, _from_front(axis, value), names)


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
    shape_of = lambda value: getattr(value, "shape", None)
    copies = [
        (variable.sharding_names, shape_of(value))
        for variable, _, value in _mapped_variables(inner, value_settings)
        if variable.sharding_names is not None
    ]
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
            elif old is None and (carrier.sharding_names, shape_of(slice_)) not in copies:
                add_unnamed_axis(carrier, _from_front(axis, slice_), getattr(slice_, "ndim", 0))
            definition = tokens[decoded.node_tokens[node]] = carrier._box.definition
        if old is not None and definition is not came_in[old]:
            kinds.append((old, definition))
    graphdef: GraphDef[tp.Any] = GraphDef(tokens, left.graphdef.num_roots)
    return out._replace(definition=dataclasses.replace(left, graphdef=graphdef, kinds=tuple(kinds)))


# Errors, with the user's names in place of positions in lists of leaves ---------------------------

SHOWN = 12
"""How many settings a message lists."""


def explained(program: Program, error: Exception, inputs: Inputs) -> Exception:
    """JAX's error for a mapped function, with the user's names for leaves.

    Args:
        program: the mapping.
        error: JAX's error.
        inputs: the arguments.
    """
    name, options, layout, axes = program.name, program.options, program.last, program.settings
    kind = TypeError if isinstance(error, TypeError) else ValueError
    remedy = "Pass an array, or let the function capture the value."
    refuse_non_arrays(name, program.call, inputs.leaves, remedy)
    arguments = [leaf.text() for leaf in program.call.leaves()]
    if options.in_name == "in_axes":
        sizes = axis_complaint(arguments, inputs.leaves, axes, options.jax_options["axis_size"])
        if sizes:
            return ValueError(f"{name}: {sizes}")
    outputs = [] if layout is None else layout.names(program.call)
    positions = () if layout is None else layout.partition.positions
    output = lambda group, number: outputs[positions[int(group)][int(number)]]
    varying = re.search(r"out_axes\[1\]\[(\d+)\]\[(\d+)\]", str(error))
    if varying is not None and layout is not None:
        return ValueError(
            f"{name}: got axis spec None but output was batched: {output(*varying.groups())} has "
            "axis None, and its value differs between the slices. Give it an axis, in out_axes, or "
            "with nnx.StateAxes in in_axes if it belongs to an argument."
        )
    text = _in_words(str(error), lambda i: repr(arguments[int(i)]), output)
    if options.out_name in text and layout is not None:
        each = [f"{output}: {axis!r}" for output, axis in zip(outputs, layout.axes)]
        what = f"{options.out_name} by output"
    else:
        each = [f"{n!r}: {axis!r}" for n, axis in zip(arguments, axes)]
        what = f"{options.in_name} by argument"
    tail = f"\n{what}: {listed(each, SHOWN)}." if each else ""
    return kind(f"{name}: {text}{tail}")


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
        text = re.sub(pattern, functools.partial(_named, name), text)
    return text


def _named(name: tp.Callable[..., str], match: re.Match[str]) -> str:
    return name(*match.groups())


def axis_complaint(
    names: list[str],
    leaves: list[tp.Any],
    axes: tp.Sequence[tp.Any],
    size: int | None,
    size_name: str = "axis_size",
) -> str | None:
    """The problem with the sizes of mapped (or scanned) axes; None if there is none.

    Args:
        names, leaves, axes: the leaves of the arguments.
        size: the size that the user gives.
        size_name: the name of that option.
    """
    sizes: dict[int, list[str]] = {}
    verb = "scan" if size_name == "length" else "map"
    for name, leaf, axis in zip(names, leaves, axes):
        for part in jax.tree_util.tree_leaves(leaf) if isinstance(axis, int) else ():
            shape = jax.typeof(part).shape
            if not -len(shape) <= axis < len(shape):
                return (
                    f"was asked to {verb} over axis {axis} of '{name}', which implies that its rank "
                    f"should be at least {axis + 1 if axis >= 0 else -axis}, but its shape is "
                    f"{shape}. Give it another axis, or None to pass it whole."
                )
            sizes.setdefault(shape[axis], []).append(name)
    if not sizes and size is None:
        return (
            f"got no values to {verb} over and `{size_name}` not provided. Pass {size_name}, or at "
            f"least one non-None value in in_axes or {size_name}."
        )
    parts = [f"{size} at {listed(at, most=3, text=repr)}" for size, at in sizes.items()]
    if size is not None and any(other != size for other in sizes):
        return (
            f"got `{size_name}` argument of {size} which disagrees with leading axis sizes "
            f"{[*sizes]} ({', '.join(parts)}). Leave `{size_name}` out, or give arrays of that size."
        )
    if len(sizes) < 2:
        return None
    return (
        f"got inconsistent sizes for array axes to be mapped: {', '.join(parts)}. Give all the "
        "same size, or None to what is passed whole."
    )


def passed_through(error: BaseException) -> bool:
    """Whether an exception was raised during a call of a function under `marks_errors`."""
    return getattr(error, "_nnx_marked", False)
