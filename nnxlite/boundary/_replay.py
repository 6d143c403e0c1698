"""After a transform: its outputs are replayed on the caller's own objects.

New values are written into the same Variables, structure changes are made on the same objects, and new
objects are made once.  All checks come first: a call that is refused has written nothing.
"""

from __future__ import annotations

import operator
import typing as tp

import jax

from nnxlite._base.jax import new_ref, trace_state
from nnxlite._base.statics import own_copy
from nnxlite._base.versions import Writes
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._outdef import OutDef, Outputs, Source, pick
from nnxlite.boundary._refusals import refuse_fixed
from nnxlite.graph._defs import REF_LEAF, ObjectDef, note_definition_of
from nnxlite.graph._kinds import GraphNode
from nnxlite.graph._rebuild import (
    ArrayCode,
    Code,
    ContainerCode,
    NodeCode,
    add_nodes,
    check_trace,
    resolve,
)
from nnxlite.graph._traverse import children_by_name, children_of, is_edited_in_place, note_edit
from nnxlite.variables._definition import VariableDef
from nnxlite.variables._variable import note_definition, note_raw


def replay(inputs: Inputs, outputs: Outputs) -> tp.Any:
    """Write the outputs of a transform into the caller's objects; returns the caller's result.

    Raises TraceContextError, before anything is written, where an object that must change belongs to
    another trace level.
    """
    definition, values = outputs
    if definition.static is not None:
        values = outputs.whole()
    if definition.restructures:
        return _replay_graph(inputs, definition.of_call(inputs.graphdef), values)
    first, written = definition.num_arrays, definition.written
    nodes = inputs.nodes() if definition.where else ()
    result = definition.result(values[:first], [nodes[old] for old in definition.known_roots()])
    if written:
        _write(inputs, written, values[first:])
    return result


def write_leaves(inputs: Inputs, new: tp.Mapping[int, tp.Any]) -> None:
    """Store values in the caller's Variables and objects, by leaf number.

    Raises TraceContextError, with nothing written, where one belongs to another trace level.
    """
    if new:
        _write(inputs, tuple(new), list(new.values()))


def _write(inputs: Inputs, at: tuple[int, ...], values: list[tp.Any]) -> None:
    """Store values in the caller's Variables, and arrays in the caller's objects."""
    plan = inputs.plan
    if plan is not None and plan.trace is trace_state.value and plan.write(at, values):
        return
    writes = Writes()
    _note_values(writes, inputs, at, values)
    writes.make()


def _note_values(writes: Writes, inputs: Inputs, at: tuple[int, ...], values: list[tp.Any]) -> None:
    """Collect the writes of values, after checking that they are allowed."""
    nodes, decoded = inputs.nodes(), inputs.graphdef.decoded
    arrays: dict[int, tp.Any] = {}
    for leaf, value in zip(at, values):
        if decoded.leaf_nodes[leaf] < 0:
            arrays[leaf] = value
        else:
            note_raw(writes, nodes[decoded.leaf_nodes[leaf]], value)
    for owner, name, code in decoded.raw_slots if arrays else ():
        if owner < 0 or arrays.keys().isdisjoint(_array_leaves(code)):
            continue
        node = nodes[owner]
        check_trace(node)
        new = _with_arrays(children_by_name(node)[name], code, arrays, writes)
        if isinstance(node, GraphNode):
            writes.add(node._nnx_dict.__setitem__, name, new)
        else:
            note_edit(writes, node, {name: new})


def _array_leaves(code: Code) -> tp.Iterator[int]:
    if isinstance(code, ContainerCode):
        for child in code.codes:
            yield from _array_leaves(child)
    elif isinstance(code, ArrayCode):
        yield code.leaf


def _with_arrays(held: tp.Any, code: Code, arrays: dict[int, tp.Any], writes: Writes) -> tp.Any:
    """The value of an attribute, with new arrays; lists, dicts and States are changed in place."""
    if not isinstance(code, ContainerCode):
        return arrays.get(code.leaf, held) if isinstance(code, ArrayCode) else held
    keys = code.definition.keys
    children = [child for _, child in children_of(held)]
    new = [_with_arrays(child, c, arrays, writes) for child, c in zip(children, code.codes)]
    if all(a is b for a, b in zip(children, new)):
        return held
    if is_edited_in_place(held):
        note = writes.add if type(held) in (list, dict) else writes.add_foreign
        for key, before, after in zip(keys, children, new):
            if after is not before:
                note(operator.setitem, held, key, after)
        return held
    return code.definition.build(new)


def _replay_graph(inputs: Inputs, left: OutDef, values: tp.Sequence[tp.Any]) -> tp.Any:
    outer = inputs.nodes()
    decoded = left.graphdef.decoded
    refuse_fixed(outer, left)
    for old, _ in left.kinds:
        outer[old]._check_level()
    for number, *_ in left.edits:
        check_trace(outer[tp.cast(int, left.origin[number])])
    writes = Writes()
    arrays, written, new = left.split(values)
    if written:
        _note_values(writes, inputs, left.written, written)
    leaves = [pick(source, inputs.values, new) for source in left.sources]
    _make_refs(left, leaves)
    nodes = [None if old is None else outer[old] for old in left.origin]
    add_nodes(decoded, leaves, nodes)
    for old, kind in left.kinds:
        note_definition(writes, outer[old], kind.for_variable().keeping(outer[old]._box.definition))
    for number, names, removed in left.edits:
        node_def, codes = decoded.node_defs[number], dict(decoded.below(NodeCode(number)))
        values = {
            name: resolve(codes[name], nodes, leaves)
            if name in codes
            else own_copy(node_def.template[name])
            for name in names
        }
        _note_edit(writes, nodes[number], node_def, values, removed)
    result = left.result(arrays, [resolve(code, nodes, leaves) for code in left.roots])
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


def _note_edit(
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
        held = attributes.get(name) if name in node_def.layout.data else None
        if type(held) is list and type(value) is list:
            writes.add(held.__setitem__, slice(None), value)
        elif type(held) is dict and type(value) is dict:
            writes.add(held.clear)
            writes.add(held.update, value)
        else:
            writes.add(attributes.__setitem__, name, value)
    writes.add(_set_status, node, node_def.layout.status)
    # One that is private has values of the trace, where the object keeps its own.
    note_definition_of(writes, node, node_def if node_def.public is None else None)


_set_status = GraphNode.__dict__["_nnx_status"].__set__
