"""What leaves a transform: leaves, and static data that says what they are; and how it is replayed.

After the transform its outputs are replayed on the caller's own objects: new values are written into
the same Variables, structure changes are made on the same objects, and new objects are made once.  All
checks come first: a call that is refused has written nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import operator
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import UNNAMED_AXES, path_text
from nnxlite._base.interning import Writes
from nnxlite._base.jax import PyTreeDef, new_ref, trace_state
from nnxlite._base.statics import ById, own_copy, with_atoms
from nnxlite.boundary._call_def import (
    CallDef,
    Inner,
    Partition,
    StaticLeaves,
    TreeForm,
    own_values,
    paths_of,
    static_leaves,
)
from nnxlite.boundary._inputs import Inputs
from nnxlite.graph._defs import REF_LEAF, ObjectDef, note_definition_of, note_edit
from nnxlite.graph._edit import note_arrays
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._kinds import GraphNode
from nnxlite.graph._rebuild import Code, NodeCode, Path, build_nodes, check_trace, resolve
from nnxlite.variables._definition import VariableDef, add_axis, add_unnamed_axis, remove_axis
from nnxlite.variables._variable import Variable, note_definition, note_raw


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A static value as a pytree without leaves."""

    value: tp.Any


class _Itself(dict[tuple[()], tp.Any]):
    """The static side of a `Fixed` or `OutDef`, from which `operator.getitem` gives it back.

    So no Python runs when a program returns: an interrupt that came meanwhile would be raised there, and
    what a call that donates has computed would be lost with what it was computed from.
    """

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self[()])


Source: tp.TypeAlias = int
"""Where an output leaf has its value from: the graph leaf of the arguments with this number, or, if it
is negative, the new value number `~source`."""

Edit: tp.TypeAlias = tuple[int, tuple[tp.Any, ...], tuple[tp.Any, ...]]
"""The structure changes of an object of the arguments: its number in the graph that leaves, the
attributes to write, and those to remove."""


def pick(source: Source, of_arguments: tp.Any, of_new: tp.Any) -> tp.Any:
    """The entry for a value, of a list for the graph leaves of the arguments and one for new values."""
    return of_arguments[source] if source >= 0 else of_new[~source]


@dataclasses.dataclass(frozen=True, eq=False)
class OutDef(TreeForm):
    """The static side of what leaves a transform: the form of its result, and what changed.

    Attributes:
        written: numbers of the input leaves (Variables, and arrays outside Variables) whose values are
            outputs, in order.
        graphdef: the graph below arguments and result as the function left it.
        origin: for each node the number it came in with, or None for a new one.
        sources: for each leaf where its value comes from.
        first_result: how many roots of the graph belong to the arguments; they are the first.
        edits: objects of the arguments whose structure changed.
        redefined: input Variables whose metadata changed: (input node, new definition).
        seen: the objects in the static values of the arguments that the trace saw; see `of_call`.
        static: the structure of all outputs, and the static leaves among them; None if all are arrays.
    """

    treedef: PyTreeDef
    where: tuple[int, ...]
    graphdef: GraphDef[tp.Any]
    origin: tp.Sequence[int | None]
    sources: tp.Sequence[Source]
    first_result: int
    written: tuple[int, ...] = ()
    edits: tuple[Edit, ...] = ()
    redefined: tuple[tuple[int, VariableDef], ...] = ()
    seen: tuple[ById, ...] = ()
    static: tuple[PyTreeDef, StaticLeaves] | None = None

    def _key(self) -> tp.Any:
        redefined = [(old, definition.shared) for old, definition in self.redefined]
        values = vars(self)
        if not self.restructures:
            # The graph is that of the arguments, in which a static object may have changed by itself.
            values = values | {"graphdef": None, "origin": tuple(self.known_roots)}
        return (*[values[f.name] for f in _FIELDS], *redefined)

    def __eq__(self, other: tp.Any) -> bool:
        return self is other or (isinstance(other, OutDef) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())

    @functools.cached_property
    def restructures(self) -> bool:
        """Whether anything but values changed, or the result has new objects."""
        return bool(self.edits or self.redefined) or any(old is None for old in self.known_roots)

    @functools.cached_property
    def roots(self) -> list[Code]:
        """Each root of the result, in the graph."""
        return self.graphdef.decoded.roots[self.first_result :][: len(self.where)]

    @functools.cached_property
    def known_roots(self) -> list[int | None]:
        """The number that each root of the result came in with; None for a new one."""
        return [self.origin[c.number] if isinstance(c, NodeCode) else None for c in self.roots]

    def split(self, outputs: tp.Any) -> tuple[tp.Any, tp.Any, tp.Any]:
        """Something for each output, as three lists: for the result, for written and for new values."""
        first = self.num_arrays
        last = first + len(self.written)
        return outputs[:first], outputs[first:last], outputs[last:]

    def of_call(self, inputs: Inputs) -> OutDef:
        """The same for a call with these arguments, which may have other, equal static values.

        A program runs for all calls of one structure.  Where the function put a settings object of its
        arguments into what it returned, each call gets its own.
        """
        mine = own_values(inputs.graphdef, inputs.static)
        instead = {
            id(seen.value): atom
            for seen, atom in zip(self.seen, mine)
            if seen.value is not None and seen.value is not atom
        }
        if not instead:
            return self
        swap = lambda definition: definition.swapped(instead)
        redefined = tuple((old, swap(definition)) for old, definition in self.redefined)
        static = self.static
        if static is not None:
            values = [with_atoms(value, instead) for value in static[1].values]
            static = static[0], dataclasses.replace(static[1], values=values)
        graphdef = self.graphdef.mapped(swap)
        return dataclasses.replace(self, graphdef=graphdef, redefined=redefined, static=static)

    def new_leaves(self) -> dict[int, int]:
        """The leaf of each value that did not come in, by its number."""
        return {~source: leaf for leaf, source in enumerate(self.sources) if source < 0}


_FIELDS = [f for f in dataclasses.fields(OutDef) if f.name not in ("redefined", "seen")]


class Outputs(tp.NamedTuple):
    """What leaves a transform; to JAX, a tuple of static data and values.

    Attributes:
        definition: the static side.
        values: of the array leaves of the result, of `definition.written`, and of leaves that did not
            come in. Without the static ones, if there are some.
    """

    definition: OutDef
    values: tp.Sequence[tp.Any]

    @property
    def written(self) -> tp.Sequence[tp.Any]:
        """New values of input leaves, in the order of `definition.written`."""
        return self.definition.split(self.values)[1]

    @property
    def new(self) -> tp.Sequence[tp.Any]:
        """Values of leaves that did not come in."""
        return self.definition.split(self.values)[2]

    def with_written(self, written: dict[int, tp.Any]) -> Outputs:
        """The same with other written leaves, given with their values."""
        arrays, _, new = self.definition.split(self.values)
        at = tuple(sorted(written))
        definition = dataclasses.replace(self.definition, written=at)
        return Outputs(definition, [*arrays, *[written[leaf] for leaf in at], *new])

    def as_arrays(self, is_array: tp.Callable[[tp.Any], bool]) -> Outputs:
        """The same with leaves that are not arrays as a part of the definition."""
        leaves, treedef = jax.tree_util.tree_flatten([*self.values])
        static = static_leaves(leaves, [not is_array(leaf) for leaf in leaves])
        if static is None:
            return self
        definition = dataclasses.replace(self.definition, static=(treedef, static))
        return Outputs(definition, static.split(leaves))

    def whole(self) -> tp.Sequence[tp.Any]:
        """The values with the static ones."""
        if self.definition.static is None:
            return self.values
        treedef, static = self.definition.static
        return jax.tree_util.tree_unflatten(treedef, static.join(self.values))


for _kind in (Fixed, OutDef):
    jax.tree_util.register_pytree_node(
        _kind, lambda fixed: ((), _Itself({(): fixed})), tp.cast(tp.Any, operator.getitem)
    )


# Paths ----------------------------------------------------------------------------------------------


def output_roots(call: CallDef, definition: OutDef) -> list[Path]:
    """The path of each root of what leaves: of the arguments, of the result, and those on their own."""
    of_result, of_arguments = paths_of(definition.treedef), call.root_paths()
    roots = of_arguments[: definition.first_result]
    roots += [("result", *of_result[position]) for position in definition.where]
    for root in range(len(roots), definition.graphdef.num_roots):
        number, *path = came_from(call, definition, root)
        roots.append((*of_arguments[number], *path))
    return roots


def came_from(call: CallDef, definition: OutDef, root: int) -> Path:
    """The number of a root of the arguments, and a path: where an object was that left on its own."""
    code = tp.cast(NodeCode, definition.graphdef.decoded.roots[root])
    decoded = call.graphdef.decoded
    return decoded.path(decoded.node_frames[tp.cast(int, definition.origin[code.number])])


def output_paths(call: CallDef, definition: OutDef) -> list[Path]:
    """The path of each output: array leaves of the result, written leaves, new values."""
    of_result = enumerate(paths_of(definition.treedef))
    paths = [("result", *path) for i, path in of_result if i not in definition.where]
    came_in, leaves = call.graph_leaves(), definition.new_leaves()
    paths += [came_in[leaf].path for leaf in definition.written]
    decoded, roots = definition.graphdef.decoded, output_roots(call, definition)
    for number in sorted(leaves):
        root, *path = decoded.path(decoded.leaf_frames[leaves[number]])
        paths.append((*roots[root], *path))
    return paths


def output_names(call: CallDef, definition: OutDef) -> list[str]:
    """The names of all outputs, for messages; see `output_paths`."""
    of_result, written, new = definition.split(output_paths(call, definition))
    names = [f"the result '{path_text(path[1:])}'" for path in of_result]
    names += [f"the value at '{path_text(path)}'" for path in written]
    return names + [f"the new Variable '{path_text(path)}'" for path in new]


def refuse_bad_axes(what: object, call: CallDef, out: Outputs, axes: tp.Sequence[tp.Any]) -> None:
    """Raise ValueError where the axis of an output is out of bounds: its slices have too few.

    Args:
        what: the transform and its function, for the message.
        call, out: the arguments, and the outputs.
        axes: the setting of each output.
    """
    for number, (axis, value) in enumerate(zip(axes, out.values)):
        if not isinstance(axis, int) or axis in (0, -1):
            continue
        for shape in map(np.shape, jax.tree_util.tree_leaves(value)):
            if not -len(shape) - 1 <= axis <= len(shape):
                raise ValueError(
                    f"{what}: axis {axis} of {output_names(call, out.definition)[number]} is out of "
                    f"bounds: each slice of it has shape {shape}. Give it another axis, in out_axes "
                    "or, if it belongs to an argument, in in_axes."
                )


# Replay ---------------------------------------------------------------------------------------------


def replay(inputs: Inputs, outputs: Outputs) -> tp.Any:
    """Write the outputs of a transform into the caller's objects; returns the caller's result.

    Raises TraceContextError, before anything is written, where an object that must change belongs to
    another trace level.
    """
    definition, values = outputs
    if definition.restructures or definition.static is not None:
        definition = definition.of_call(inputs)
        values = Outputs(definition, values).whole()
    if definition.restructures:
        return _replay_graph(inputs, definition, values)
    first = definition.num_arrays
    if definition.where:
        nodes = inputs.nodes()
        known = tp.cast(list[int], definition.known_roots)
        result = definition.tree(values[:first], [nodes[number] for number in known])
    else:
        result = definition.treedef.unflatten(values[:first])
    if definition.written:
        _write(inputs, definition.written, values[first:])
    return result


def write_leaves(inputs: Inputs, new: tp.Mapping[int, tp.Any]) -> None:
    """Store values in the caller's Variables and objects, by leaf number.

    Raises TraceContextError, with nothing written, where one belongs to another trace level.
    """
    if new:
        _write(inputs, tuple(new), list(new.values()))


def _write(inputs: Inputs, at: tuple[int, ...], values: tp.Sequence[tp.Any]) -> None:
    """Store values in the caller's Variables, and arrays in the caller's objects."""
    plan = inputs.plan
    if plan is not None and plan.trace is trace_state.value and plan.write(at, values):
        return
    writes = Writes()
    _note_values(writes, inputs, at, values)
    writes.make()


def _note_values(
    writes: Writes, inputs: Inputs, at: tuple[int, ...], values: tp.Sequence[tp.Any]
) -> None:
    """Collect the writes of values, after checking that they are allowed."""
    nodes, decoded = inputs.nodes(), inputs.graphdef.decoded
    arrays: dict[int, tp.Any] = {}
    for leaf, value in zip(at, values):
        if decoded.leaf_nodes[leaf] < 0:
            arrays[leaf] = value
        else:
            note_raw(writes, nodes[decoded.leaf_nodes[leaf]], value)
    if arrays:
        note_arrays(writes, decoded, nodes, arrays)


def _replay_graph(inputs: Inputs, left: OutDef, values: tp.Sequence[tp.Any]) -> tp.Any:
    outer = inputs.nodes()
    decoded = left.graphdef.decoded
    refuse_fixed(outer, left)
    for old, _ in left.redefined:
        outer[old]._check_level()
    for number, *_ in left.edits:
        check_trace(outer[tp.cast(int, left.origin[number])])
    writes = Writes()
    arrays, written, new = left.split(values)
    if written:
        _note_values(writes, inputs, left.written, written)
    leaves = [pick(source, inputs.values, new) for source in left.sources]
    _make_refs(left, leaves)
    known = [None if old is None else outer[old] for old in left.origin]
    nodes = build_nodes(decoded, leaves, known)
    for old, form in left.redefined:
        note_definition(writes, outer[old], form.for_variable().keeping(outer[old]._box.definition))
    for number, names, removed in left.edits:
        node_def, codes = decoded.node_defs[number], dict(decoded.below(NodeCode(number)))
        changed = {
            name: resolve(codes[name], nodes, leaves)
            if name in codes
            else own_copy(node_def.template[name])
            for name in names
        }
        note_changes(writes, nodes[number], node_def, changed, removed)
    result = left.tree(arrays, [resolve(code, nodes, leaves) for code in left.roots])
    writes.make()
    return result


def _make_refs(left: OutDef, leaves: list[tp.Any]) -> None:
    """Make new references of the arrays that crossed for references made inside."""
    decoded = left.graphdef.decoded
    made: dict[Source, tp.Any] = {}
    for node, leaf in enumerate(decoded.node_leaves) if decoded.has_refs else ():
        kind = decoded.node_defs[node]
        if kind is REF_LEAF or (isinstance(kind, VariableDef) and kind.is_ref):
            source, value = left.sources[leaf], leaves[leaf]
            if source < 0 and not isinstance(value, jax.ShapeDtypeStruct):
                if source not in made:
                    made[source] = new_ref(value)
                leaves[leaf] = made[source]


def note_changes(
    writes: Writes,
    node: tp.Any,
    node_def: ObjectDef,
    values: dict[tp.Any, tp.Any],
    removed: tuple[tp.Any, ...],
) -> None:
    """Collect the writes that repeat the changes of one object on the caller's own."""
    if not isinstance(node, GraphNode):
        note_edit(writes, node, values, removed)
        return
    attributes = node._nnx_dict
    for name in removed:
        writes.add(attributes.pop, name, None)
    for name, value in values.items():
        old = attributes.get(name) if name in node_def.names.data else None
        if type(old) is list and type(value) is list:
            writes.add(old.__setitem__, slice(None), value)
        elif type(old) is dict and type(value) is dict:
            writes.add(old.clear)
            writes.add(old.update, value)
        else:
            writes.add(attributes.__setitem__, name, value)
    writes.add(_set_status, node, node_def.names.status)
    # One that is private has values of the trace, where the object keeps its own.
    note_definition_of(writes, node, node_def if node_def.public is None else None)


_set_status = GraphNode.__dict__["_nnx_status"].__set__


_FIXED: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "nnxlite_fixed_structure", default=frozenset()
)


@contextlib.contextmanager
def fixed_structure(ids: frozenset[int]) -> tp.Iterator[None]:
    """Within the block, transforms refuse to change the structure of objects and Variables, by id.

    The refusal is a ValueError, raised before anything is written.
    """
    outer = _FIXED.get()
    token = _FIXED.set(outer | ids if outer else ids)
    try:
        yield
    finally:
        _FIXED.reset(token)


def refuse_fixed(outer: list[tp.Any], left: OutDef) -> None:
    """Raise ValueError where the structure of a fixed object or Variable would change."""
    fixed = _FIXED.get()
    if not fixed:
        return
    changes = [(left.origin[number], (*names, *more)) for number, names, more in left.edits]
    changes += [(old, ("metadata",)) for old, _ in left.redefined]
    for old, names in changes:
        node = outer[tp.cast(int, old)]
        if id(node) in fixed:
            raise ValueError(structure_changed(node, names))


def structure_changed(node: tp.Any, names: tuple[tp.Any, ...]) -> str:
    """The message for a function that changes a structure that must stay the same."""
    what = ", ".join(repr(name) for name in names)
    return (
        f"The graph structure of a {type(node).__name__} was changed where it must stay the same "
        f"({what}): it is among the arguments of cached_partial. Undo temporary changes before the "
        "function returns (nnx.pop removes what Module.sow stores), make attributes before "
        "cached_partial is called, or call the function itself."
    )


# Groups, and the axis that a transform maps --------------------------------------------------------


class OutputGroups(tp.NamedTuple):
    """Outputs in groups, without their values.

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
        """Outputs as JAX is given them: which groups, and the values of each, in `order`."""
        axes = tuple(settings)
        labels = axes if {*axes} <= {*order} else tuple([x if x in order else 0 for x in axes])
        groups = cls(out.definition, Partition(labels, order), axes)
        return Fixed(groups), groups.partition.split(out.values)

    def outputs(self, groups: tp.Sequence[tp.Sequence[tp.Any]]) -> Outputs:
        """The outputs, from their groups."""
        values = groups[0] if len(groups) == 1 else self.partition.join(*groups)
        if self.axes is not self.partition.labels:
            values = [*map(axis_moved, values, self.partition.labels, self.axes)]
        return Outputs(self.definition, values)

    def names(self, call: CallDef) -> list[str]:
        """The names of the outputs."""
        names = output_names(call, self.definition)
        if self.definition.static is None:
            return names
        treedef, static = self.definition.static
        each = zip(names, treedef.children())
        return static.split([name for name, value in each for _ in range(value.num_leaves)])


def axis_moved(x: tp.Any, source: int, target: int) -> tp.Any:
    """An array with an axis moved."""
    return x if source == target else jnp.moveaxis(x, source, target)


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
    ]
    decoded, tokens = left.graphdef.decoded, list(left.graphdef.tokens)
    came_in = inner.call.graphdef.decoded.node_defs
    redefined: list[tuple[int, VariableDef]] = []
    for node, definition in enumerate(decoded.node_defs):
        if not isinstance(definition, VariableDef):
            continue
        source, old = left.sources[decoded.node_leaves[node]], left.origin[node]
        axis = pick(source, value_settings, new_settings)
        annotated = "out_sharding" in definition.metadata and UNNAMED_AXES.get()
        if isinstance(axis, int) and (names or annotated):
            carrier = definition.type.from_metadata(None, definition.metadata)
            slice_ = pick(source, inner.values, out.new)
            if names:
                add_axis(carrier, _from_front(axis, slice_), names)
            elif old is None and (carrier.sharding_names, shape_of(slice_)) not in copies:
                add_unnamed_axis(carrier, _from_front(axis, slice_), getattr(slice_, "ndim", 0))
            definition = tokens[decoded.node_tokens[node]] = carrier._box.definition
        if old is not None and definition is not came_in[old]:
            redefined.append((old, definition))
    graphdef: GraphDef[tp.Any] = GraphDef(tokens, left.graphdef.num_roots)
    left = dataclasses.replace(left, graphdef=graphdef, redefined=tuple(redefined))
    return out._replace(definition=left)
