"""Editing objects in place: `update`, `pop`, `set_metadata`.

Every edit is worked out whole before the first write, so that a refused one changes nothing.
"""

from __future__ import annotations

import dataclasses
import operator
import typing as tp
from collections.abc import Mapping, MutableSequence

import jax
import numpy as np

from nnxlite._base.errors import path_text, short_type
from nnxlite._base.jax import is_ref, same_shape, trace_state
from nnxlite._base.versions import Writes
from nnxlite._state._definition import State
from nnxlite._state._flat import FlatState, to_pure_dict
from nnxlite.filters import Filter, to_predicate
from nnxlite.graph._defs import StaticDef
from nnxlite.graph._functional import AnyState, root_leaves
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._graphstate import GraphState
from nnxlite.graph._kinds import OBJECT, PYTREE, GraphNode, kind_of
from nnxlite.graph._plan import Plan, Stale, usual_plan, view
from nnxlite.graph._rebuild import Code, Path, check_trace
from nnxlite.graph._traverse import (
    NODES,
    children_by_name,
    children_of,
    define_container,
    is_edited_in_place,
    is_static_child,
    note_edit,
)
from nnxlite.graph._walk import iter_graph
from nnxlite.variables._definition import MISSING, set_value
from nnxlite.variables._variable import Variable, note_definition, note_raw


class Place(tp.NamedTuple):
    """A node, its name, and the place above it (None for the root)."""

    node: tp.Any
    name: tp.Any
    above: Place | None

    def path(self, *names: tp.Any) -> Path:
        """The names that lead here, and further ones."""
        path = list(reversed(names))
        place = self
        while place.above is not None:
            path.append(place.name)
            place = place.above
        return tuple(reversed(path))


Pending: tp.TypeAlias = tuple[Place, tp.Mapping[tp.Any, tp.Any], tp.Any]
"""A node to be updated: its place, its children by name, and what is brought for them."""


def _check_trace(place: Place) -> None:
    """Refuse to change an object, or a container in one, of another trace than the one running."""
    while not isinstance(place.node, GraphNode) and place.above is not None:
        place = place.above
    check_trace(place.node)


def update(node: tp.Any, state: tp.Any, /, *states: tp.Any) -> None:
    """Write the leaves of one or more states into an object graph, in place.

    Every object and Variable of the graph stays the same object. A state may contain a part of the
    leaves; a whole Variable at a new path is added to the object there, and one at the path of an
    array or a number takes its place.

    Args:
        node: an object, or a pytree of objects.
        state: a State, FlatState, or nested dict, of Variables or plain values.
        states: further ones; a later one counts where paths agree.

    Raises:
        ValueError: for an unknown path, for a value that is not an array where there is one, and for
            a value of another shape where the shape is fixed (a reference) or annotated; nothing is
            written then.
        TypeError: where `node` has no leaves to write, or a state is not one.
        TraceContextError: when called from another trace level than the objects' own.

    >>> import nnxlite as nnx, jax
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.update(model, jax.tree.map(lambda x: 0 * x, nnx.state(model)))
    >>> float(model.kernel.sum())
    0.0
    """
    writes = Writes()
    note_update(writes, node, state, *states)
    writes.make()


def note_update(writes: Writes, node: tp.Any, *states: tp.Any) -> None:
    """Note what `update` does."""
    if not isinstance(node, Variable) and kind_of(node) not in NODES:
        raise TypeError(f"update takes an object, or a pytree of objects, got {short_type(node)}.")
    if isinstance(node, Variable):
        states = _for_variable(node, states)
    work = _Update(node)
    for given in states:
        work.collect(given)
    work.note(writes)


def _for_variable(variable: Variable[tp.Any], states: tuple[tp.Any, ...]) -> tuple[tp.Any, ...]:
    """What states bring for a root that is a Variable: one value, or none.

    Raises ValueError where more than one brings a value.
    """
    holds_mapping = isinstance(variable._box.value, Mapping)
    if len(states) == 1 and type(states[0]) is dict and holds_mapping:
        return states
    leaves = root_leaves(states)
    if len(leaves) > 1:
        raise ValueError(
            f"update: Expected exactly one non-empty state for a {type(variable).__name__}, got "
            f"{len(leaves)}: {', '.join(map(short_type, leaves))}. A root that is a Variable has "
            "one value: pass the one to be written."
        )
    return tuple(leaves)


class _Update:
    """What is to be written into a graph: gathered and checked whole, then written.

    Attributes:
        variables: what keeps their values, new raw values, and, where more is to be done than keeping
            the value, the Variable itself and whose metadata it takes over (or None).
        references: array references with their new contents.
        bindings: new children of objects and containers, by their place.
        frozen: what takes the place of frozen objects, by their ids.
        first: whether no earlier state has brought a value that a Variable is to have.
    """

    def __init__(self, root: tp.Any) -> None:
        self.root = Place(root, None, None)
        self.trace = trace_state.value
        self.variables: list[tuple[tp.Any, tp.Any, tp.Any, Variable[tp.Any] | None]] = []
        self.references: list[tuple[tp.Any, tp.Any]] = []
        self.bindings: dict[tp.Any, tuple[Place, dict[tp.Any, tp.Any]]] = {}
        self.frozen: dict[int, _Changed] = {}
        self.plan: Plan | None = None

    # gathering -------------------------------------------------------------------------------

    def collect(self, given: tp.Any) -> None:
        """Note and check everything that one state brings."""
        if isinstance(given, GraphState):
            given = given._state
        if isinstance(given, FlatState):
            given = given.to_nested_state()
        self.first = not self.variables
        root = self.root
        if isinstance(root.node, Variable):
            self._variable(root.node, given, root)
        elif not isinstance(given, Mapping):
            raise TypeError(
                "update takes states (State, FlatState or nested dicts), got "
                f"{type(given).__name__}."
            )
        elif not self._all_at_once(given):
            self._walk(given)

    def _all_at_once(self, given: tp.Any) -> bool:
        """Pair a State of exactly the shape of a plan with its Variables; False if it is not."""
        plan = self.plan = usual_plan(self.root.node)
        try:
            if plan is None or plan.boxes is None:  # some leaf is not a Variable, or is a reference
                return False
            leaves = plan.leaves()
        except Stale:
            return False
        values = plan.graphdef.program().read(given)
        if values is None:
            return False
        for number, (variable, value) in enumerate(zip(leaves, values)):
            self._variable(variable, value, number)
        return True

    def _walk(self, given: tp.Any) -> None:
        """Go down state and objects together."""
        pending: list[Pending] = [(self.root, children_by_name(self.root.node), given)]
        while pending:
            place, children, mapping = pending.pop()
            items = mapping._mapping.items() if isinstance(mapping, State) else mapping.items()
            for name, value in items:
                child = children.get(name, MISSING)
                if isinstance(child, Variable):
                    self._variable(child, value, place, name)
                elif type(value) is State and kind_of(child) == OBJECT:
                    below = tuple.__new__(Place, (child, name, place))  # quicker than Place(...)
                    pending.append((below, child._nnx_dict, value))
                else:
                    self._child(place, name, child, value, pending)

    def _child(
        self,
        place: Place,
        name: tp.Any,
        child: tp.Any,
        value: tp.Any,
        pending: list[Pending],
    ) -> None:
        """What a state contains for a child that is not a Variable."""
        if child is MISSING or (child is None and isinstance(value, Variable)):
            self._add(place, name, value)
        elif is_static_child(place.node, name, child):
            raise self._unknown(place, (name,), value, "is static")
        elif child is None and value is not None:
            raise self._unknown(place, (name,), value, "is None")
        elif kind_of(child) not in NODES:
            self._leaf(place, name, child, value)
        elif isinstance(value, Mapping):
            pending.append((Place(child, name, place), children_by_name(child), value))
        else:
            raise self._unknown(place, (name,), value, "holds a node, not a leaf")

    def _variable(
        self, variable: Variable[tp.Any], value: tp.Any, place: Place | int, *names: tp.Any
    ) -> None:
        """Note a Variable, at a place or with the number of its leaf, and its new value."""
        box, model = variable._box, None
        old, definition = box.value, box.definition
        if isinstance(value, Variable):
            model = value if value._box.definition is not definition else None
            value = value._box.value
        if value is old and model is None and self.first:
            return
        plain = value is old or (
            type(value) is type(old) and not definition.is_ref and same_shape(old, value)
        )
        if not plain:
            if isinstance(value, State) and not isinstance(old, State):
                value = to_pure_dict(value)  # a Variable may hold a dict
            self._check_fit(place, names, old, value, model or variable)
        if box.trace is not self.trace:
            variable._check_level()
        special = None if plain and model is None else variable
        self.variables.append((box, value, special, model))

    def _leaf(self, place: Place, name: tp.Any, old: tp.Any, value: tp.Any) -> None:
        """Note a new value of a leaf that is not a Variable: an array, a reference, a number, text.

        A Variable takes its place, unless it is a reference, which others may hold.
        """
        if isinstance(value, Variable):
            if not is_ref(old):
                _check_trace(place)
                self._bound(place)[name] = value
                return
            value = value.get_raw_value()
        if value is old:
            return
        if isinstance(value, Mapping) and _shape_of(old) is None:
            raise self._unknown(place, (name,), value, "holds a leaf, not a node")
        self._check_fit(place, (name,), old, value)
        _check_trace(place)
        if is_ref(old):
            self.references.append((old, value))
        else:
            self._bound(place)[name] = value

    def _add(self, place: Place, name: tp.Any, value: tp.Any) -> None:
        """Note a whole Variable for a path that does not exist."""
        node = place.node
        if not isinstance(value, Variable) or type(node) is list or not is_edited_in_place(node):
            raise self._unknown(place, (name,), value)
        if isinstance(node, MutableSequence):
            size = len(tp.cast(tp.Sized, node))
            new = [n for n in self._bound(place) if isinstance(n, int) and n >= size]
            if name != size + len(new):
                raise self._unknown(place, (name,), value, "is not the next item of a list")
        _check_trace(place)
        if kind_of(node) == OBJECT and name not in place.node._nnx_status:
            place.node._nnx_decide(name, value)  # raises where the attribute is declared static
        self._bound(place)[name] = value

    def _bound(self, place: Place) -> dict[tp.Any, tp.Any]:
        """The new children noted for a place."""
        if not is_edited_in_place(place.node):
            return self._changed(place).children
        key = None if place.above is None else (id(place.above.node), place.name)
        return self.bindings.setdefault(key, (place, {}))[1]

    def _changed(self, place: Place) -> _Changed:
        """The replacement of a node that cannot be changed: one for all paths of a frozen object."""
        if place.above is None:
            name = type(place.node).__name__
            if kind_of(place.node) == OBJECT:
                raise dataclasses.FrozenInstanceError(
                    f"update cannot change {name}, a frozen module, in place. Make another one of the "
                    "state, nnx.merge(nnx.graphdef(module), state), or pass the object that contains it."
                )
            raise ValueError(
                f"update cannot change an array inside a {name} in place; pass the object that holds it."
            )
        above = self._bound(place.above)
        changed = above.get(place.name)
        if type(changed) is not _Changed:
            shared = kind_of(place.node) == OBJECT
            changed = self.frozen.get(id(place.node)) if shared else None
            if changed is None:
                changed = _Changed(place.node)
                if shared:
                    self.frozen[id(place.node)] = changed
            above[place.name] = changed
        return changed

    def _rebind(self) -> None:
        """Note the other paths of the frozen objects that are replaced."""
        entered: set[int] = set()
        pending = [self.root]
        places: list[Place] = []
        while pending:
            place = pending.pop()
            if kind_of(place.node) == OBJECT:
                places.append(place)
                if id(place.node) in entered:
                    continue
                entered.add(id(place.node))
            pending += [Place(child, name, place) for name, child in children_of(place.node)]
        known = 0
        while known != len(self.frozen):  # those of a frozen object may be in another one
            known = len(self.frozen)
            for place in places:
                if id(place.node) in self.frozen:
                    _check_trace(place)
                    self._changed(place)

    # checking --------------------------------------------------------------------------------

    def _check_fit(
        self,
        place: Place | int,
        names: Path,
        old: tp.Any,
        new: tp.Any,
        variable: Variable[tp.Any] | None = None,
    ) -> None:
        """Refuse what is not an array where there is one, and an array whose shape must not change.

        A Variable takes any shape, unless its annotation (that of `variable`, which has the metadata
        it will have) names its axes.  A reference keeps shape and dtype.
        """
        shape, given = _shape_of(old), _shape_of(new)
        if shape is None:
            return
        if given is None:
            raise self._unknown(place, names, new, f"holds an array of shape {shape}")
        reference = is_ref(old)
        boxed = kind_of(new) == PYTREE and kind_of(old) != PYTREE and _is_box(new)
        if not boxed and not reference and len(shape) == len(given):
            return
        where = f"'{path_text(self._path(place, names))}'"
        if boxed:
            raise ValueError(
                f"update: {where} of {type(self.root.node).__name__} holds an array of shape "
                f"{shape}, the state brings a {type(new).__qualname__} of {type(new).__module__}, "
                "which is not an array but contains one, as a Variable of another library does. Bring "
                "the arrays themselves: a State of Flax becomes a dict of them with "
                "flax.nnx.to_pure_dict(state)."
            )
        if reference and shape != given:
            raise ValueError(
                f"update: the reference at {where} has shape {shape}, the state brings "
                f"{short_type(new)} of shape {given}. The shape of a reference is fixed: bring a "
                "value of the same shape, or assign a new reference to the attribute."
            )
        if reference and getattr(new, "dtype", old.dtype) != old.dtype:
            raise ValueError(
                f"update: the reference at {where} has dtype {old.dtype}, the state brings "
                f"{short_type(new)}. Bring a value of the same dtype."
            )
        axes = None if variable is None else variable.sharding_names
        axes = getattr(axes, "spec", axes)  # of a NamedSharding
        if axes and not isinstance(axes, str) and len(axes) != len(given):
            raise ValueError(
                f"update: the value at {where} has shape {shape} and its axes are annotated as "
                f"{axes}, the state brings {short_type(new)} of shape {given}. Bring a Variable "
                "with the annotation of its axes (variable.replace(value, sharding=...)), or "
                "change that of the object first (variable.set_metadata(out_sharding=...))."
            )

    def _path(self, place: Place | int, names: Path) -> Path:
        if isinstance(place, Place):
            return place.path(*names)
        return tp.cast(Plan, self.plan).graphdef.leaf_path(place)

    def _unknown(
        self, place: Place | int, names: Path, value: tp.Any, why: str = "does not exist"
    ) -> ValueError:
        remedy = "Remove it from the state, or bring a Variable to be added to an existing object."
        if isinstance(place, Place) and isinstance(names[-1], str) and names[-1].isdecimal():
            if int(names[-1]) in children_by_name(place.node):
                remedy = (
                    f"The key there is the number {int(names[-1])}, not a text: files have only keys of "
                    "text. Pass nnx.restore_int_paths(state), which makes numbers of them."
                )
        return ValueError(
            f"update: the path '{path_text(self._path(place, names))}' of "
            f"{type(self.root.node).__name__} {why}, but the state holds a {short_type(value)} "
            f"there. {remedy}"
        )

    # noting ----------------------------------------------------------------------------------

    def note(self, writes: Writes) -> None:
        """Note everything that is to be written."""
        if all(special is None for _, _, special, _ in self.variables):
            writes.add_all([(set_value, box, value) for box, value, _, _ in self.variables])
        else:  # the last one for each Variable: it brings the metadata as well as the value
            last = {id(entry[0]): entry for entry in self.variables}
            for box, value, special, model in last.values():
                if special is None:
                    writes.add(set_value, box, value)
                    continue
                if model is not None:
                    note_definition(writes, special, special._definition_like(model))
                note_raw(writes, special, value)
        for ref, value in self.references:
            writes.add_foreign(operator.setitem, ref, ..., value[...] if is_ref(value) else value)
        if self.frozen:
            self._rebind()
        for place, children in self.bindings.values():
            made = {n: v.made() if type(v) is _Changed else v for n, v in children.items()}
            note_edit(writes, place.node, made)


class _Changed:
    """A tuple, frozen object, or other node that cannot change, and children it shall have instead."""

    def __init__(self, node: tp.Any) -> None:
        self.node = node
        self.children: dict[tp.Any, tp.Any] = {}
        self._new: tp.Any = MISSING

    def made(self) -> tp.Any:
        """A new node with the children it shall have; the same one each time."""
        if self._new is not MISSING:
            return self._new
        new = {n: p.made() if type(p) is _Changed else p for n, p in self.children.items()}
        kind = kind_of(self.node)
        if kind == OBJECT:
            self._new = self.node._nnx_replaced(new)
        else:
            definition, _ = define_container(self.node, kind)
            children = {**children_by_name(self.node), **new}
            self._new = definition.build([children[key] for key in definition.keys])
        return self._new


def _shape_of(value: tp.Any) -> tuple[int, ...] | None:
    """The shape of an array or scalar, None for anything else."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return shape
    return () if isinstance(value, (bool, int, float, complex, np.generic)) else None


def _is_box(value: tp.Any) -> bool:
    """Whether a pytree contains one array and nothing else, and says that it is as good as that array.

    A pytree that computes its array, such as a quantized one, is a value of its own, and so is one that
    refuses to be an array, such as a quantity with a unit.
    """
    leaves = jax.tree.leaves(value)
    if len(leaves) != 1 or not hasattr(value, "__jax_array__"):
        return False
    try:
        return value.__jax_array__() is leaves[0]
    except Exception:
        return False


@tp.overload
def pop(node: tp.Any, first: Filter, /) -> AnyState: ...
@tp.overload
def pop(node: tp.Any, first: Filter, second: Filter, /) -> tuple[AnyState, AnyState]: ...
@tp.overload
def pop(
    node: tp.Any, first: Filter, second: Filter, /, *filters: Filter
) -> tuple[AnyState, ...]: ...
def pop(node: tp.Any, *filters: Filter) -> tp.Any:
    """Remove the leaves that match from a graph and return them: one State for each filter.

    A shared Variable is removed everywhere and returned at its first path.

    Args:
        node: an object, or a pytree of objects, which is changed in place.
        filters: Variable types, strings, predicates, ...; each leaf goes to the first that matches.

    Returns:
        A State for one filter, a tuple of States for several.

    Raises:
        ValueError: without filters, or for a leaf inside a tuple, which cannot lose an element.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> biases = nnx.pop(model, nnx.PathContains("bias"))
    >>> list(biases), hasattr(model, "bias")
    (['bias'], False)
    """
    if not filters:
        raise ValueError("Expected at least one filter: nnx.pop(node, nnx.Intermediate).")
    if kind_of(node) not in NODES:
        raise TypeError(f"pop takes an object, or a pytree of objects, got {short_type(node)}.")
    seen = view(node)
    leaves = seen.leaves
    programs, _ = seen.graphdef.groups(filters, leaves)
    chosen = {number for program in programs for number in program.leaves}
    holders = list(_holders(node, seen.graphdef, chosen)) if chosen else []
    for place, name in holders:
        if not is_edited_in_place(place.node):
            raise ValueError(
                f"pop: '{path_text(place.path(name))}' is inside a {type(place.node).__name__}, "
                "which cannot lose an element. Hold it in an attribute, a list or a dict."
            )
        _check_trace(place)
    states = tuple(p.build([leaves[number] for number in p.leaves]) for p in programs)
    names: dict[int, tuple[tp.Any, list[tp.Any]]] = {}
    for place, name in holders:
        names.setdefault(id(place.node), (place.node, []))[1].append(name)
    writes = Writes()
    for holder, removed in names.values():
        note_edit(writes, holder, {}, removed)
    writes.make()
    return states[0] if len(states) == 1 else states


def _holders(
    node: tp.Any, graphdef: GraphDef[tp.Any], chosen: tp.Container[int]
) -> tp.Iterator[tuple[Place, tp.Any]]:
    """Every owner of one of the chosen leaves, with the name of the leaf there."""
    decoded = graphdef.decoded
    pending: list[tuple[Place, Code]] = [(Place(node, None, None), decoded.roots[0])]
    entered: set[Code] = {decoded.roots[0]}
    while pending:
        place, code = pending.pop()
        children = children_by_name(place.node)
        for name, child in decoded.below(code):
            leaf = decoded.leaf_of(child)
            if leaf in chosen:
                yield place, name
            elif leaf < 0 and child not in entered and not isinstance(child, StaticDef):
                entered.add(child)
                pending.append((Place(children[name], name, place), child))


def set_metadata(node: tp.Any, /, *, only: Filter = Variable, **metadata: tp.Any) -> None:
    """Set metadata entries on every Variable of a graph that matches `only`.

    Args:
        node: an object, or a pytree of objects.
        only: a filter for the Variables; by default all.
        metadata: the entries.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.set_metadata(model, only=nnx.Param, frozen=True)
    >>> model.kernel.frozen
    True
    """
    predicate = to_predicate(only)
    chosen = [
        value
        for path, value in iter_graph(node)
        if isinstance(value, Variable) and predicate(path, value)
    ]
    for variable in chosen:
        variable._check_level("metadata")
        variable._check_fixed(metadata)
    for variable in chosen:
        variable.set_metadata(**metadata)
