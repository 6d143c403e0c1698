"""Editing objects in place: `update`, `pop`, `set_metadata`.

Every edit is worked out whole before the first write, so that a refused one changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import typing as tp
from collections.abc import Mapping, MutableSequence

import jax
import numpy as np

from nnxlite._base.errors import path_text, short_type
from nnxlite._base.interning import Writes
from nnxlite._base.jax import is_ref, same_shape, trace_state
from nnxlite._state._definition import State, to_pure_dict
from nnxlite._state._flat import FlatState
from nnxlite.filters import Filter, to_predicate
from nnxlite.graph._defs import (
    StaticDef,
    children_by_name,
    is_edited_in_place,
    is_static_child,
    note_edit,
)
from nnxlite.graph._functional import AnyState, GraphState, root_leaves
from nnxlite.graph._kinds import NODES, GraphNode, Kind, Leaves, kind_of
from nnxlite.graph._plan import Stale, usual_plan, view
from nnxlite.graph._rebuild import (
    ArrayCode,
    Code,
    ContainerCode,
    Decoded,
    NodeCode,
    Path,
    check_trace,
)
from nnxlite.graph._walk import iter_graph
from nnxlite.variables._definition import MISSING, set_value
from nnxlite.variables._variable import Variable, note_definition, note_raw

__all__ = ["pop", "set_metadata", "update"]

Below: tp.TypeAlias = list[tuple[tp.Any, Code]]
"""Children by name."""


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
    """What is to be written into a graph: gathered and checked whole, then noted.

    A later state takes the place of an earlier one, leaf by leaf.

    Attributes:
        again: whether an earlier state brought something.
        values: the writes of Variables that get another value and nothing else, by their ids.
        others: the Variables with more to be done, their values, and whose metadata they take over.
        bare: the new values of leaves that are not Variables, by path, with the object around each.
        added: the nodes that get Variables at new names, by their ids, and these Variables.
        brought: the path and the value of each leaf in the present state, by what it is one of.
    """

    def __init__(self, root: tp.Any) -> None:
        self.root = root
        self.trace = trace_state.value
        self.again = False
        self.values: dict[int, tuple[tp.Any, ...]] = {}
        self.others: dict[int, tuple[Variable[tp.Any], tp.Any, Variable[tp.Any] | None]] = {}
        self.bare: dict[Path, tuple[tp.Any, tp.Any]] = {}
        self.added: dict[int, tuple[tp.Any, dict[tp.Any, tp.Any]]] = {}
        self.brought: dict[tp.Any, tuple[Path, tp.Any]] = {}

    # gathering -------------------------------------------------------------------------------

    def collect(self, given: tp.Any) -> None:
        """Note and check everything that one state brings."""
        self.again, self.brought = bool(self.others or self.values), {}
        if isinstance(self.root, Variable):
            self._variable(self.root, given)
            return
        if isinstance(given, GraphState):
            given = given._state
        if isinstance(given, FlatState):
            given = given.to_nested_state()
        if not isinstance(given, Mapping):
            raise TypeError(
                "update takes states (State, FlatState or nested dicts), got "
                f"{type(given).__name__}."
            )
        plan = usual_plan(self.root)
        with contextlib.suppress(Stale, ValueError):  # refused: again by name, to say where
            if plan is not None and plan.boxes is not None:  # all leaves are Variables
                leaves, values = plan.leaves(), plan.graphdef.program().read(given)
                if values is not None:
                    for variable, value in zip(leaves, values):
                        self._variable(variable, value)
                    return
        self._by_name(given)

    def _by_name(self, given: tp.Any) -> None:
        """Go down a state and the objects together."""
        pending: list[tuple[Path, tp.Any, tp.Any, tp.Any]] = [((), self.root, self.root, given)]
        while pending:
            above, node, owner, mapping = pending.pop()
            owner = node if isinstance(node, GraphNode) else owner
            children = children_by_name(node)
            items = mapping._mapping.items() if isinstance(mapping, State) else mapping.items()
            for name, value in items:
                path, child = (*above, name), children.get(name, MISSING)
                if isinstance(child, Variable):
                    first, _ = self.brought.setdefault(id(child), (path, value))
                    if first is path or not self._has_come(id(child), path, value):
                        self._variable(child, value, path)
                elif type(value) is State and kind_of(child) == Kind.OBJECT:  # quick
                    pending.append((path, child, owner, value))
                elif child is MISSING or (child is None and isinstance(value, Variable)):
                    self._add(path, node, owner, value)
                elif is_static_child(node, name, child):
                    raise self._unknown(path, value, "is static")
                elif child is None and value is not None:
                    raise self._unknown(path, value, "is None")
                elif kind_of(child) not in NODES:
                    self._has_come((id(node), name), path, value)
                    self._bare(path, child, owner, value)
                elif isinstance(value, Mapping):
                    pending.append((path, child, owner, value))
                else:
                    raise self._unknown(path, value, "holds a node, not a leaf")

    def _variable(self, variable: Variable[tp.Any], value: tp.Any, path: Path = ()) -> None:
        """Note the new value of a Variable, and the Variable that it comes with."""
        box, model = variable._box, None
        old, definition = box.value, box.definition
        if isinstance(value, Variable):
            model = value if value._box.definition is not definition else None
            value = value._box.value
        if self.again:
            self.others.pop(id(variable), None)
            self.values.pop(id(variable), None)
        if value is old and model is None:
            return
        plain = value is old or (
            type(value) is type(old) and not definition.is_ref and same_shape(old, value)
        )
        if not plain:
            if isinstance(value, State) and not isinstance(old, State):
                value = to_pure_dict(value)  # a Variable may hold a dict
            self._check_fit(path, old, value, model or variable)
        if box.trace is not self.trace:
            variable._check_level()
        if plain and model is None:
            self.values[id(variable)] = set_value, box, value
        else:
            self.others[id(variable)] = variable, value, model

    def _bare(self, path: Path, old: tp.Any, owner: tp.Any, value: tp.Any) -> None:
        """Note a new value of a leaf that is not a Variable: an array, a reference, a number, text.

        A Variable takes its place, unless it is a reference, which others may hold.
        """
        if isinstance(value, Variable) and is_ref(old):
            value = value.get_raw_value()
        self.bare.pop(path, None)
        if value is old:
            return
        if not isinstance(value, Variable):
            if isinstance(value, Mapping) and _shape_of(old) is None:
                raise self._unknown(path, value, "holds a leaf, not a node")
            self._check_fit(path, old, value)
        self.bare[path] = value, owner

    def _add(self, path: Path, node: tp.Any, owner: tp.Any, value: tp.Any) -> None:
        """Note a whole Variable for a path without a leaf."""
        name = path[-1]
        if not isinstance(value, Variable) or type(node) is list or not is_edited_in_place(node):
            raise self._unknown(path, value, node=node)
        _, added = self.added.setdefault(id(node), (node, {}))
        if isinstance(tp.cast(tp.Any, node), MutableSequence):
            size = len(node)
            if name != size + len([n for n in added if isinstance(n, int) and n >= size]):
                raise self._unknown(path, value, "is not the next item of a list", node)
        check_trace(owner)
        self._has_come((id(node), name), path, value)
        if kind_of(node) == Kind.OBJECT and name not in node._nnx_status:
            node._nnx_decided(name, value)  # raises where the attribute is declared static
        added[name] = value

    # checking --------------------------------------------------------------------------------

    def _has_come(self, leaf: tp.Any, path: Path, value: tp.Any) -> bool:
        """Whether the state brings this for a leaf at another path, too, and metadata nowhere but there.

        Raises ValueError where that value is not known to be equal.
        """
        first, given = self.brought.setdefault(leaf, (path, value))
        if given is not value and not _are_equal(given, value):
            raise ValueError(
                f"update: '{path_text(first)}' and '{path_text(path)}' of {type(self.root).__name__} "
                f"are one leaf, the state brings {short_type(given)} for the one and another value, "
                f"{short_type(value)}, for the other. Remove one of them from the state, or bring "
                "equal values (while JAX traces: the same array)."
            )
        return first is not path and not isinstance(value, Variable)

    def _check_fit(
        self, path: Path, old: tp.Any, new: tp.Any, variable: Variable[tp.Any] | None = None
    ) -> None:
        """Refuse what is not an array where there is one, and an array whose shape must not change.

        A Variable takes any shape, unless its annotation (that of `variable`, which has the metadata
        it will have) names its axes.  A reference keeps shape and dtype.
        """
        shape, given = _shape_of(old), _shape_of(new)
        if shape is None:
            return
        if given is None:
            raise self._unknown(path, new, f"holds an array of shape {shape}")
        reference = is_ref(old)
        boxed = kind_of(new) == Kind.PYTREE and kind_of(old) != Kind.PYTREE and _is_box(new)
        if not boxed and not reference and len(shape) == len(given):
            return
        if boxed:
            raise ValueError(
                f"update: '{path_text(path)}' of {type(self.root).__name__} holds an array of shape "
                f"{shape}, the state brings a {type(new).__qualname__} of {type(new).__module__}, "
                "which is not an array but contains one, as a Variable of another library does. Bring "
                "the arrays themselves: a State of Flax becomes a dict of them with "
                "flax.nnx.to_pure_dict(state)."
            )
        if reference and shape != given:
            raise ValueError(
                f"update: the reference at '{path_text(path)}' has shape {shape}, the state brings "
                f"{short_type(new)} of shape {given}. The shape of a reference is fixed: bring a "
                "value of the same shape, or assign a new reference to the attribute."
            )
        if reference and getattr(new, "dtype", old.dtype) != old.dtype:
            raise ValueError(
                f"update: the reference at '{path_text(path)}' has dtype {old.dtype}, the state brings "
                f"{short_type(new)}. Bring a value of the same dtype."
            )
        axes = None if variable is None else variable.sharding_names
        axes = getattr(axes, "spec", axes)  # of a NamedSharding
        if axes and not isinstance(axes, str) and len(axes) != len(given):
            raise ValueError(
                f"update: the value at '{path_text(path)}' has shape {shape} and its axes are "
                f"annotated as {axes}, the state brings {short_type(new)} of shape {given}. Bring a "
                "Variable with the annotation of its axes (variable.replace(value, sharding=...)), "
                "or change that of the object first (variable.set_metadata(out_sharding=...))."
            )

    def _unknown(
        self, path: Path, value: tp.Any, why: str = "does not exist", node: tp.Any = None
    ) -> ValueError:
        remedy = "Remove it from the state, or bring a Variable to be added to an existing object."
        name = path[-1] if path else None
        if isinstance(name, str) and name.isdecimal():
            if int(name) in children_by_name(node):
                remedy = (
                    f"The key there is the number {int(name)}, not a text: files have only keys of "
                    "text. Pass nnx.restore_int_paths(state), which makes numbers of them."
                )
        return ValueError(
            f"update: the path '{path_text(path)}' of {type(self.root).__name__} {why}, but the state "
            f"holds a {short_type(value)} there. {remedy}"
        )

    # noting ----------------------------------------------------------------------------------

    def note(self, writes: Writes) -> None:
        """Note everything that is to be written."""
        writes.add_all(self.values.values())
        for variable, value, model in self.others.values():
            if model is not None:
                note_definition(writes, variable, variable._definition_like(model))
            note_raw(writes, variable, value)
        if self.bare:
            self._note_bare(writes)
        for node, children in self.added.values():
            note_edit(writes, node, children)

    def _note_bare(self, writes: Writes) -> None:
        # Numbers in lists are leaves, too, for an update.
        graphdef, nodes, leaves, *_ = view(self.root, trees=Leaves.EVERY)
        decoded = graphdef.decoded
        below = functools.cache(lambda code: dict(decoded.below(code)))
        arrays: dict[int, tp.Any] = {}
        for path, (value, owner) in self.bare.items():
            code = decoded.roots[0]
            for name in path:
                code = below(code)[name]
            number = decoded.leaf_of(code)
            if is_ref(leaves[number]):
                check_trace(owner)
                new = value[...] if is_ref(value) else value
                writes.add_foreign(operator.setitem, leaves[number], ..., new)
            else:
                arrays[number] = value
        if arrays:
            note_arrays(writes, decoded, nodes(), arrays, self.root)


def note_arrays(
    writes: Writes,
    decoded: Decoded,
    nodes: tp.Sequence[tp.Any],
    arrays: tp.Mapping[int, tp.Any],
    root: tp.Any = None,
) -> None:
    """Note that leaves without a Variable get other values, by leaf number.

    Objects, lists, dicts and States are changed in place.  A tuple or a frozen object is replaced by
    another one, everywhere.

    Args:
        writes: where the writes are noted.
        decoded: the definition of the graph.
        nodes: its nodes, by number.
        arrays: the new values, by leaf number.
        root: the root, where there is one.

    Raises TraceContextError where an object belongs to another trace level, ValueError for a tuple and
    FrozenInstanceError for a frozen object that nothing contains.
    """
    made: dict[Code, tp.Any] = {}

    def changes(value: tp.Any, below: Below, owner: tp.Any) -> dict[tp.Any, tp.Any]:
        """The children of a value that others take the place of, by name."""
        before = children_by_name(value)
        after = [(name, new_of(before[name], child, owner)) for name, child in below]
        changed = {name: new for name, new in after if new is not before[name]}
        if changed:
            check_trace(owner)
        return changed

    def new_of(value: tp.Any, code: Code, owner: tp.Any) -> tp.Any:
        """The value itself, or what takes its place."""
        if isinstance(code, ArrayCode):
            return arrays.get(code.leaf, value)
        if isinstance(code, NodeCode):
            if is_edited_in_place(value):
                return value
            owner = value
        if code not in made:
            made[code] = value  # an object may contain itself
            changed = changes(value, decoded.below(code), owner)
            if changed and isinstance(code, NodeCode):
                made[code] = value._nnx_replaced(changed)
            elif changed and is_edited_in_place(value):
                note_edit(writes, value, changed)
            elif changed and isinstance(code, ContainerCode):
                children = {**children_by_name(value), **changed}
                made[code] = code.definition.build([children[k] for k in code.definition.keys])
        return made[code]

    slots: dict[int, Below] = {}
    for number, name, code in decoded.raw_slots:
        if number >= 0:
            slots.setdefault(number, []).append((name, code))
    if not all(is_edited_in_place(nodes[number]) for number in slots):
        slots = {number: decoded.below(NodeCode(number)) for number in decoded.children}
    for number, below in slots.items():
        node = nodes[number]
        if not is_edited_in_place(node):
            new_of(node, NodeCode(number), node)
        elif changed := changes(node, below, node):
            note_edit(writes, node, changed)
    if root is None or new_of(root, decoded.roots[0], root) is root:
        return
    name = type(root).__name__
    if kind_of(root) == Kind.OBJECT:
        raise dataclasses.FrozenInstanceError(
            f"update cannot change {name}, a frozen module, in place. Make another one of the "
            "state, nnx.merge(nnx.graphdef(module), state), or pass the object that contains it."
        )
    raise ValueError(
        f"update cannot change an array inside a {name} in place; pass the object that holds it."
    )


def _are_equal(one: tp.Any, other: tp.Any) -> bool:
    """Whether two values of a leaf are known to be equal; traced ones are not."""
    bare = lambda value: value._box.value if isinstance(value, Variable) else value
    (leaves, tree), (others, other_tree) = map(jax.tree_util.tree_flatten, map(bare, (one, other)))
    same = lambda x, y: x is y or np.all((x == y) | ((x != x) & (y != y)))
    try:
        shapes = [[*map(np.shape, each)] for each in (leaves, others)]
        return tree == other_tree and shapes[0] == shapes[1] and all(map(same, leaves, others))
    except Exception:  # traced, deleted
        return False


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
    graphdef, _, leaves, *_ = view(node)
    programs, _ = graphdef.groups(filters, leaves)
    chosen = {number for program in programs for number in program.leaves}
    holders: dict[int, tuple[tp.Any, dict[tp.Any, None]]] = {}  # a list may be at several paths
    decoded = graphdef.decoded
    trail: list[tuple[tp.Any, tp.Any, tp.Any]] = []  # down to here: node, object around, children
    for path, code in decoded.visit(decoded.roots[0]) if chosen else ():
        number = decoded.leaf_of(code)
        if isinstance(code, StaticDef) or (number >= 0 and number not in chosen):
            continue
        del trail[len(path) :]
        holder, owner, children = trail[-1] if trail else (None, node, {})
        if number < 0:
            value = children[path[-1]] if path else node
            inner = value if isinstance(value, GraphNode) else owner
            trail.append((value, inner, children_by_name(value)))
            continue
        if not is_edited_in_place(holder):
            raise ValueError(
                f"pop: '{path_text(path)}' is inside a {type(holder).__name__}, "
                "which cannot lose an element. Hold it in an attribute, a list or a dict."
            )
        check_trace(owner)
        holders.setdefault(id(holder), (holder, {}))[1][path[-1]] = None
    states = tuple(p.build([leaves[number] for number in p.leaves]) for p in programs)
    writes = Writes()
    for holder, removed in holders.values():
        note_edit(writes, holder, {}, removed)
    writes.make()
    return states[0] if len(states) == 1 else states


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
