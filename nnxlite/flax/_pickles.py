"""Pickles that programs wrote under Flax: their objects are rebuilt as ours.

A pickle names classes of `flax.nnx...`, which are ours under the hook, makes an empty object of each,
and gives it the attributes that it had there. `install` puts a `__setstate__` in front of that of each
class that understands what Flax wrote and what we write; nothing of this is in the classes themselves.

Values, metadata, attributes and their statuses are taken over as they are. `_pytree__nodes` has the
statuses there, `_pytree__state` what an object knows of its trace, and a List has its items under names.
A `GraphDef` is refused: it is a list of records there.
"""

from __future__ import annotations

import functools
import typing as tp

from nnxlite._state._definition import State
from nnxlite._state._flat import FlatState
from nnxlite.boundary._labels import DiffState, StateAxes, StateSharding
from nnxlite.graph._graphdef import GraphDef
from nnxlite.objects import _pytree
from nnxlite.objects._containers import List
from nnxlite.objects._pytree import Pytree
from nnxlite.tracers import TraceState
from nnxlite.variables._kinds import is_array_ref
from nnxlite.variables._variable import Variable

NODES, STATE = "_pytree__nodes", "_pytree__state"


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
    ours: tp.Any = cls.__setstate__

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


def _new_graphdef(cls: tp.Any, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
    """`GraphDef(...)`; a pickle of Flax gives no arguments, and the records of another layout later."""
    if not (args or kwargs):
        raise TypeError(
            "A pickled GraphDef of Flax cannot be read here: pickle the state alone (nnx.state), and "
            "make the GraphDef from the model (nnx.graphdef(nnx.eval_shape(make)))."
        )
    return _graphdef_of(cls, *args, **kwargs)


_graphdef_of: tp.Any = GraphDef.__new__


def install() -> None:
    """Teach the classes to read what Flax wrote."""
    _adapted(Variable, variable_state)
    _adapted(Pytree, object_state)
    more: tp.Any = {
        State: lambda self, state: State.__init__(self, state["_mapping"], _copy=False),
        FlatState: lambda self, state: FlatState.__init__(
            self, zip(state[1]["_keys"], state[1]["_values"]), sort=False
        ),
        TraceState: lambda self, state: self.__init__(),  # the present trace
        **dict.fromkeys((StateAxes, StateSharding, DiffState), _refilled),
    }
    for cls, setstate in more.items():
        cls.__setstate__ = setstate
    tp.cast(tp.Any, GraphDef).__new__ = _new_graphdef
