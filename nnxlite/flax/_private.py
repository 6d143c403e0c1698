"""What libraries ask of Flax's objects and Variables beyond their public names.

Keras, for one, stores values in `variable._raw_value`, mirrors attributes into the dict `_var_metadata`,
and gives objects another trace through `_trace_state`. Here each of these is a property over what the
core has: there is one value, one definition and one trace. So what is written through one name is read
through the others, and plans notice it.
"""

from __future__ import annotations

import collections
import operator
import typing as tp

from nnxlite._base.interning import LOCK
from nnxlite._base.jax import trace_state
from nnxlite.graph import _walk
from nnxlite.graph._defs import KeptElsewhere, definition, own_status, set_definition
from nnxlite.graph._rebuild import Path, check_trace
from nnxlite.objects._pytree import INITIALIZING, Pytree, set_initializing
from nnxlite.tracers import TraceState
from nnxlite.variables._variable import Variable


class _Trace(TraceState):
    """The trace that an object or the box of a Variable belongs to; it moves with `_jax_trace`."""

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: tp.Any, name: str) -> None:
        self._owner, self._name = owner, name

    @property
    def _jax_trace(self) -> tp.Any:
        return getattr(self._owner, self._name)

    @_jax_trace.setter
    def _jax_trace(self, trace: tp.Any) -> None:
        object.__setattr__(self._owner, self._name, trace)

    def __reduce__(self) -> tp.Any:
        return TraceState, ()


class PytreeState:
    """The trace of an object, and whether it is being made; `PytreeState()` has the running trace.

    Put into the `__dict__` of an object under `_pytree__state`, it gives the object its trace.
    """

    initializing = property(operator.attrgetter("_initializing"))
    is_setup = property(operator.attrgetter("_is_setup"))
    trace_state = property(operator.attrgetter("_trace_state"))

    def __init__(self, initializing: bool = False, is_setup: bool = False) -> None:
        self._initializing, self._is_setup = initializing, is_setup
        self._trace_state = TraceState()

    def __repr__(self) -> str:
        return f"PytreeState(trace_state={self._trace_state})"


class _StateOf(PytreeState):
    """That of an object. What is being made has an attribute more, so clones and traces agree."""

    def __init__(self, node: tp.Any) -> None:
        self._node, self._is_setup, self._trace_state = node, False, _Trace(node, "_nnx_trace")

    _initializing = property(
        lambda self: INITIALIZING in vars(self._node),
        lambda self, value: set_initializing(self._node, value),
    )


def _set_state(node: tp.Any, state: tp.Any) -> None:
    object.__setattr__(node, "_nnx_trace", state._trace_state._jax_trace)


def _statuses(node: tp.Any) -> tp.Mapping[str, bool]:
    """Which attributes are data, by name; its own two names included, as in Flax."""
    status = definition(node).names.status
    return _Statuses({"_pytree__state": True, **status, "_pytree__nodes": False})


class _Statuses(dict[str, bool]):
    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(sorted(self.items())))

    def update(self, other: tp.Any) -> tp.Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A new one with these entries as well: static data does not change."""
        return type(self)({**self, **other})


def _set_statuses(node: tp.Any, statuses: tp.Mapping[str, bool]) -> None:
    """Give attributes that exist another status."""
    own = own_status(node)
    own.update({name: bool(s) for name, s in statuses.items() if name in own})
    set_definition(node, None)


class Metadata(collections.UserDict[str, tp.Any]):
    """The metadata of a Variable, read and written in place."""

    def __init__(self, variable: Variable[tp.Any]) -> None:
        # An AttributeError where the Variable is only being made, as by a `__setstate__`.
        self._variable, self._box = variable, tp.cast(tp.Any, variable._box)

    @property
    def data(self) -> dict[str, tp.Any]:  # type: ignore[override]  # what UserDict reads
        return self._box.definition.metadata

    def __setitem__(self, name: str, value: tp.Any) -> None:
        with LOCK:
            self._variable._define_as({**self.data, name: value})

    def __delitem__(self, name: str) -> None:
        with LOCK:
            entries = dict(self.data)
            del entries[name]
            self._variable._define_as(entries)

    def __or__(self, other: tp.Any) -> tp.Any:
        return {**self, **other}

    def copy(self) -> tp.Any:
        """A dict of the entries."""
        return dict(self)

    __copy__: tp.Any = copy

    def __reduce__(self) -> tp.Any:
        return dict, (self.copy(),)


def _filled(variable: tp.Any) -> tp.Any:
    """The box of a Variable; a new one where it is only being made, as by a `__setstate__`."""
    if not hasattr(variable, "_box"):
        Variable.__setstate__(variable, {"value": None, "metadata": dict(_DEFAULTS)})
    return variable._box


_DEFAULTS = Variable(None).get_metadata()


def _set_raw(variable: tp.Any, value: tp.Any) -> None:
    _filled(variable).value = value


def _set_trace(variable: tp.Any, state: tp.Any) -> None:
    _filled(variable).trace = state._jax_trace


def _replace_metadata(variable: tp.Any, entries: tp.Mapping[str, tp.Any]) -> None:
    _filled(variable)
    required = variable.get_metadata(exclude_required=False)
    kept = {name: required[name] for name in Variable.required_metadata}
    variable._define_as({**kept, **entries})


_getstate = Variable.__getstate__


def _getstate_with_names(variable: tp.Any) -> dict[str, tp.Any]:
    """The state with the value and the metadata under the names of Flax as well."""
    state = _getstate(variable)
    return {**state, "_raw_value": state["value"], "_var_metadata": dict(state["metadata"])}


_refuse = Pytree._nnx_refuse


def _refuse_unless_valid(node: tp.Any, name: tp.Any) -> None:
    """Refuse a change from another trace level, unless a class has its own say in it."""
    if type(node)._check_valid_context is _check_valid_context:
        _refuse(node, name)
    node._check_valid_context(
        lambda: f"Cannot mutate '{type(node).__name__}' from different trace level"
    )


def _check_valid_context(node: tp.Any, error_msg: tp.Callable[[], str]) -> None:
    """Raise TraceContextError where the object belongs to another trace than the one running."""
    check_trace(node)


class _IsPytree:
    """Whether a class is a pytree of JAX, as an attribute of the class."""

    def __get__(self, node: tp.Any, cls: tp.Any) -> bool:
        return cls._nnx_is_pytree


def install() -> None:
    """Give the classes these names."""
    state, statuses = KeptElsewhere(_StateOf, _set_state), KeptElsewhere(_statuses, _set_statuses)
    variable, pytree = tp.cast(tp.Any, Variable), tp.cast(tp.Any, Pytree)
    variable._raw_value = property(lambda self: self._box.value, _set_raw)
    variable._trace_state = property(lambda self: _Trace(self._box, "trace"), _set_trace)
    variable._var_metadata = property(Metadata, _replace_metadata)
    variable._can_update = property(lambda self: self._box.trace is trace_state.value)
    variable._check_can_update = variable._check_level
    variable.__getstate__ = _getstate_with_names
    pytree._pytree__state = pytree._object__state = state
    pytree._pytree__nodes = pytree._object__nodes = statuses
    pytree._pytree__is_pytree = _IsPytree()
    pytree._check_valid_context = _check_valid_context
    pytree._nnx_refuse = _refuse_unless_valid


def iter_graph(node: tp.Any, /, *, graph: bool | None = None) -> tp.Iterator[tuple[Path, tp.Any]]:
    """`nnx.iter_graph`, with the two private attributes that each object has in Flax."""
    for path, value in _walk.iter_graph(node, graph=graph):
        if isinstance(value, Pytree):
            yield (*path, "_pytree__nodes"), _statuses(value)
            yield (*path, "_pytree__state"), _StateOf(value)
        yield path, value


NAMES = {
    "": {"iter_graph": iter_graph},
    "graph": {"iter_graph": iter_graph},
    "object": {"ObjectState": PytreeState, "PytreeState": PytreeState},
    "variablelib": {"VariableMeta": type(Variable)},  # pickles of Flax name it
}
"""Names below `flax.nnx` that nnxlite does not have otherwise, by the path of the submodule."""
