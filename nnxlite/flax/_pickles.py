"""Pickles that programs wrote under Flax: their objects are rebuilt as ours.

A pickle names classes of `flax.nnx...`, which are ours under the hook, makes an empty object of each,
and gives it the attributes that it had there. `install` puts a `__setstate__` in front of that of each
class that understands what Flax wrote and what we write; nothing of this is in the classes themselves.

Values, metadata, attributes and their statuses are taken over as they are. `_pytree__nodes` has the
statuses there, `_pytree__state` what an object knows of its trace, and a List has its items under names.
A `GraphDef` is a list of records there: objects with empty Variables are built of them, and defined.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as tp

import jax
import numpy as np

from nnxlite._state._definition import State
from nnxlite._state._flat import FlatState
from nnxlite.boundary._labels import DiffState, StateAxes, StateSharding
from nnxlite.flax import _private
from nnxlite.flax._private import PytreeState
from nnxlite.graph._functional import graphdef
from nnxlite.graph._graphdef import GraphDef, NodeDef, NodeRef, Static, VariableRecord
from nnxlite.objects import _pytree
from nnxlite.objects._containers import List
from nnxlite.objects._pytree import Pytree
from nnxlite.tracers import TraceState
from nnxlite.training.metrics import Struct
from nnxlite.variables._kinds import is_array_ref
from nnxlite.variables._variable import Variable

NODES, STATE = "_pytree__nodes", "_pytree__state"

SetState = tp.Callable[[tp.Any, tp.Any], None]


jax.tree_util.register_pytree_node(
    PytreeState, lambda state: ((), (False, False)), lambda static, _: PytreeState(*static)
)


class GenericPytree:
    """The type that Flax notes for a pytree node without identity in a `GraphDef`."""


class IndexesPytreeDef(tp.NamedTuple):
    """The keys of such a node, with the positions of their values, and its treedef."""

    key_index: dict[tp.Any, int]
    treedef: tp.Any


@dataclasses.dataclass(frozen=True)
class ArrayRefDef:
    """The array reference of a Variable in a `GraphDef` of Flax."""

    index: int = 0
    outer_index: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class NodeAttr:
    """An attribute that is a node or a Variable, in a `GraphDef` of Flax."""


@dataclasses.dataclass(frozen=True, slots=True)
class LeafAttr:
    """An attribute that is an array, in a `GraphDef` of Flax."""


GRAPH = {
    **_private.GRAPH,
    **{c.__name__: c for c in (GenericPytree, IndexesPytreeDef, ArrayRefDef, NodeAttr, LeafAttr)},
}
VARIABLE = {"VariableMeta": type(Variable)}
"""Classes that pickles of Flax name and that have no other use here."""


def variable_state(variable: tp.Any, state: tp.Any) -> tp.Any:
    """The state of a Variable, as ours."""
    if "_var_metadata" not in state:
        return state
    value = state["_raw_value"]
    value = value[...] if is_array_ref(value) else value  # ours makes its own reference
    return {"value": value, "metadata": dict(state["_var_metadata"])}


def object_state(node: tp.Any, state: tp.Any) -> tp.Any:
    """The state of an object, as ours."""
    if not isinstance(state, dict) or NODES not in state:
        return state
    name_of = _item_name if isinstance(node, List) else lambda name: name
    status = {name_of(name): is_data for name, is_data in state[NODES].items()}
    inner = {NODES, STATE} | ({"_length"} if isinstance(node, List) else set())
    attributes = {name_of(k): value for k, value in state.items() if k not in inner}
    return {**attributes, _pytree._STATUS: {k: status[k] for k in attributes if k in status}}


def _item_name(name: tp.Any) -> tp.Any:
    return int(name) if isinstance(name, str) and name.isdecimal() else name


def _adapted(cls: tp.Any, translate: tp.Callable[[tp.Any, tp.Any], tp.Any]) -> None:
    """Make `__setstate__` of a class understand the states of Flax."""
    ours: SetState = cls.__setstate__

    @functools.wraps(ours)
    def __setstate__(self: tp.Any, state: tp.Any) -> None:
        ours(self, translate(self, state))

    cls.__setstate__ = __setstate__


def _refilled(self: tp.Any, state: tp.Any) -> None:
    """`__setstate__` of settings by filter, whose filters Flax does not make predicates of."""
    if "_predicates" in state or "_predicate" in state:
        self.__dict__.update(state)
    elif "argnum" in state:
        self.__init__(state["argnum"], state["filter"])
    else:
        settings = state["_axes"] if "_axes" in state else state["_shardings"]
        self.__init__(zip(state["_filters"], settings))


def _slots(self: tp.Any, state: tp.Any) -> None:
    """`__setstate__` of a record, from values in order or by name."""
    by_name = isinstance(state, dict)
    for number, field in enumerate(dataclasses.fields(self)):
        value = state.get(field.name) if by_name else state[number]
        object.__setattr__(self, field.name, value)


def _new_graphdef(cls: tp.Any, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
    """`GraphDef(...)`; without arguments an empty one, for a pickle to fill."""
    return _graphdef_of(cls, *args, **kwargs) if args or kwargs else object.__new__(cls)


_graphdef_of: tp.Any = GraphDef.__new__


def _fill_graphdef(self: tp.Any, state: tp.Any) -> None:
    """`__setstate__` of a `GraphDef`: the definition of objects that are built of the records."""
    nodes, attributes, _ = state
    made: tp.Any = graphdef(_Builder(nodes, attributes).build())
    self.__dict__.update(made.__dict__, _structure=made.structure)


class _Builder:
    """Builds objects of the records of a `GraphDef`, with Variables that contain nothing."""

    def __init__(self, nodes: tp.Iterable[tp.Any], attributes: tp.Iterable[tp.Any]) -> None:
        self.nodes = iter(nodes)
        self.attributes = iter(attributes)
        self.known: dict[int, tp.Any] = {}

    def build(self) -> tp.Any:
        """The next node."""
        record = next(self.nodes)
        if isinstance(record, NodeRef):
            return self.known[record.index]
        if isinstance(record, VariableRecord):
            metadata = dict(record.metadata)
            value = jax.new_ref(np.zeros(())) if metadata.get("ref") else np.zeros(())
            made = record.type.from_metadata(value, metadata)
        elif isinstance(record.type, type) and issubclass(record.type, Pytree):
            made = Pytree.__new__(record.type)
            self.known[record.index] = made
            items = self.items(record.num_attributes)
            state: dict[tp.Any, tp.Any] = {k: value for k, value, _ in items}
            state.setdefault(NODES, {})
            state[NODES] = {**{k: is_data for k, _, is_data in items}, **state[NODES]}
            Pytree.__setstate__(made, state)
        else:
            made = self.container(record, [pair[:2] for pair in self.items(record.num_attributes)])
        if record.index is not None:
            self.known[record.index] = made
        return made

    def items(self, count: int) -> list[tuple[tp.Any, tp.Any, bool]]:
        """The next attributes: name, value, and whether it is data."""
        items = []
        for _ in range(count):
            name, attribute = next(self.attributes)
            if isinstance(attribute, NodeAttr):
                items.append((name, self.build(), True))
            elif isinstance(attribute, LeafAttr):
                items.append((name, np.zeros(()), True))
            else:
                items.append((name, attribute.value, False))
        return items

    def container(self, record: NodeDef, items: list[tuple[tp.Any, tp.Any]]) -> tp.Any:
        """A container or a pytree node with these items."""
        kind, values = record.type, [value for _, value in items]
        if kind is GenericPytree:
            form, kind = record.metadata, record.metadata.treedef.node_data()[0]
            if issubclass(kind, Struct):  # JAX crashes: ours are registered in another way
                self.refuse(kind)
            if form.key_index:
                by_name = dict(items)
                values = [by_name[k] for k in sorted(form.key_index, key=form.key_index.get)]
            return jax.tree_util.tree_unflatten(form.treedef, values)
        if kind in (list, tuple):
            return kind(values)
        if kind is type(None):
            return None
        if kind is dict or kind is State:
            return kind(dict(items))
        self.refuse(kind)

    def refuse(self, kind: type) -> tp.NoReturn:
        """Raise TypeError for a container that cannot be built."""
        raise TypeError(
            f"A pickled GraphDef of Flax contains a node of type {kind.__name__!r}, which cannot be "
            "read here: pickle the state alone (nnx.state), and make the GraphDef from the model."
        )


def install() -> None:
    """Teach the classes to read what Flax wrote."""
    _adapted(Variable, variable_state)
    _adapted(Pytree, object_state)
    more: tp.Any = {
        State: lambda self, state: State.__init__(self, state["_mapping"], _copy=False),
        FlatState: lambda self, state: FlatState.__init__(
            self, zip(state[1]["_keys"], state[1]["_values"]), sort=False
        ),
        GraphDef: _fill_graphdef,
        TraceState: lambda self, state: self.__init__(),  # the present trace
        **dict.fromkeys((StateAxes, StateSharding, DiffState), _refilled),
        **dict.fromkeys((NodeDef, NodeRef, VariableRecord, Static), _slots),
    }
    for cls, setstate in more.items():
        cls.__setstate__ = setstate
    tp.cast(tp.Any, GraphDef).__new__ = _new_graphdef
