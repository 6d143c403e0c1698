"""The functional API: objects to definition and state, and back.

`split` and `merge` are inverse to each other; `state` and `update` read and write the leaves of
objects that stay where they are.  All of them read through plans, so a second call on unchanged
objects costs a few tens of nanoseconds per leaf.

`State` contains the object's own Variables, not copies: `split` shares, `clone` copies.
"""

from __future__ import annotations

import copy as copy_lib
import operator
import typing as tp
from collections.abc import Iterator, Mapping, MutableMapping

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import listed, non_exhaustive, path_text
from nnxlite._base.jax import ApplyCaller, flatten_one_level, is_ref, new_ref
from nnxlite._state._definition import State
from nnxlite._state._flat import FlatState
from nnxlite._state.traversals import flatten_to_sequence
from nnxlite.filters import Filter
from nnxlite.graph._compare import compare, differences_text
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._kinds import is_data
from nnxlite.graph._plan import View, checked_view
from nnxlite.graph._rebuild import Path, build_nodes, note_entered, resolve
from nnxlite.variables._definition import MISSING
from nnxlite.variables._variable import Variable, make

__all__ = ["GraphState", "PureState", "call", "clone", "graphdef"]
__all__ += ["merge", "split", "state", "unpack", "variables"]

N = tp.TypeVar("N")
AnyState: tp.TypeAlias = State[tp.Any, tp.Any]


PureState = tuple[GraphDef[N], AnyState]
"""A definition and the whole state of a graph, as `split` gives it without filters."""


_SLOTS = ("_graphdef", "_state")


class GraphState(MutableMapping[tp.Any, tp.Any], tp.Generic[N]):
    """A definition together with (a part of) its state, as `unpack` gives it.

    It reads and writes like the state, and has the same key paths as a pytree; `merge` takes it in
    place of definition and state.

    >>> import nnxlite as nnx
    >>> packed = nnx.unpack(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> packed.bias is packed["bias"], nnx.merge(packed).out_features
    (True, 3)
    """

    __slots__ = _SLOTS

    _graphdef: GraphDef[N]
    _state: tp.Any

    def __init__(self, _graphdef: GraphDef[N], _state: tp.Any) -> None:
        self._graphdef = _graphdef
        self._state = _state

    def __getitem__(self, key: tp.Any) -> tp.Any:
        return self._state[key]

    def __setitem__(self, key: tp.Any, value: tp.Any) -> None:
        self._state[key] = value

    def __delitem__(self, key: tp.Any) -> None:
        del self._state[key]

    def __iter__(self) -> Iterator[tp.Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def setdefault(self, key: tp.Any, default: tp.Any = None) -> tp.Any:
        """See `State.setdefault`.

        Args:
            key: the key.
            default: a leaf, or a mapping, which becomes a State.
        """
        return self._state.setdefault(key, default)

    def __getattr__(self, name: str) -> tp.Any:
        if name in _SLOTS or (name.startswith("_") and name not in self._state):
            raise AttributeError(f"'GraphState' object has no attribute {name!r}")
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: tp.Any) -> None:
        if name in _SLOTS:
            object.__setattr__(self, name, value)
        else:
            setattr(self._state, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._state, name)

    def __repr__(self) -> str:
        return f"GraphState({self._graphdef!r}, {self._state!r})"


def _with_keys(packed: GraphState) -> tp.Any:
    """The children of the state under their own keys; the state of a leaf is one child."""
    graphdef, state = packed._graphdef, packed._state
    if not isinstance(state, State):
        return ((jax.tree_util.GetAttrKey("_state"), state),), (graphdef, None)
    children, treedef = flatten_one_level(state)
    return children, (graphdef, treedef)


def _unflatten(static: tp.Any, children: tp.Any) -> GraphState:
    graphdef, treedef = static
    if treedef is None:
        return GraphState(graphdef, *children)
    return GraphState(graphdef, jax.tree_util.tree_unflatten(treedef, children))


jax.tree_util.register_pytree_with_keys(GraphState, _with_keys, _unflatten)


@tp.overload
def split(
    node: N, first: Filter = ..., /, *, graph: bool | None = None
) -> tuple[GraphDef[N], AnyState]: ...
@tp.overload  # mypy cannot unpack a tuple of unknown length into names
def split(
    node: N, first: Filter, second: Filter, /, *, graph: bool | None = None
) -> tuple[GraphDef[N], AnyState, AnyState]: ...
@tp.overload
def split(
    node: N, first: Filter, second: Filter, third: Filter, /, *, graph: bool | None = None
) -> tuple[GraphDef[N], AnyState, AnyState, AnyState]: ...
@tp.overload
def split(
    node: N, /, *filters: Filter, graph: bool | None = None
) -> tuple[GraphDef[N], *tuple[AnyState, ...]]: ...
def split(
    node: N, *filters: Filter, graph: bool | None = None
) -> tuple[GraphDef[N], *tuple[tp.Any, ...]]:
    """The definition of a graph and its leaves, as one State, or one for each filter.

    Args:
        node: an object, Variable, or a pytree of them.
        filters: Variable types, strings, predicates, ...; each leaf goes to the first that matches.
        graph: False refuses shared references.

    Returns:
        `(graphdef, state)` or `(graphdef, state_1, ..., state_n)`. A node that is itself a leaf is
        its own state.

    Raises:
        ValueError: when a leaf is matched by no filter.

    >>> import nnxlite as nnx
    >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    >>> graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    >>> sorted(params), sorted(rest)
    (['bias', 'scale'], ['mean', 'var'])

    A State may go through JAX's own transforms, and the model comes back:

    >>> doubled = jax.tree.map(lambda x: 2 * x, params)
    >>> float(nnx.merge(graphdef, doubled, rest).scale[0])
    2.0
    """
    seen = checked_view(node, graph, "split")
    return (seen.graphdef, *select(seen, filters))


def select(seen: View, filters: tuple[Filter, ...], *, exhaustive: bool = True) -> list[tp.Any]:
    """The leaves of a view of one root: one State for each filter, or without filters one of all.

    Raises ValueError when a leaf is left over and `exhaustive` is True.
    """
    leaves = seen.leaves
    if not filters:
        if seen.nested is not None:
            return [seen.nested.get(0, State({}))]
        is_leaf = seen.graphdef.is_leaf
        return [leaves[0] if is_leaf else seen.graphdef.program().build(leaves)]
    programs, rest = seen.graphdef.groups(filters, leaves)
    if rest and exhaustive:
        paths = seen.graphdef.paths
        raise ValueError(non_exhaustive(filters, [(paths[i], leaves[i]) for i in rest]))
    if seen.graphdef.is_leaf:
        return [leaves[0] if p.leaves else State({}) for p in programs]
    return [p.build([leaves[i] for i in p.leaves]) for p in programs]


@tp.overload
def state(node: tp.Any, first: Filter = ..., /, *, graph: bool | None = None) -> AnyState: ...
@tp.overload
def state(
    node: tp.Any, first: Filter, second: Filter, /, *, graph: bool | None = None
) -> tuple[AnyState, AnyState]: ...
@tp.overload
def state(
    node: tp.Any, first: Filter, second: Filter, third: Filter, /, *, graph: bool | None = None
) -> tuple[AnyState, AnyState, AnyState]: ...
@tp.overload
def state(node: tp.Any, /, *filters: Filter, graph: bool | None = None) -> tp.Any: ...
def state(node: tp.Any, *filters: Filter, graph: bool | None = None) -> tp.Any:
    """The leaves of a graph: one State, or a tuple with one for each filter if there are several.

    The States contain the Variables themselves: a write to one of them is a write to the model. Use
    `nnx.pure` for the arrays, and `nnx.update` to put values back.

    Args:
        node: an object, or a pytree of objects.
        filters: Variable types, strings, predicates, ...; each leaf goes to the first that matches,
            and leaves that none matches are left out. Without filters, all leaves.
        graph: False refuses shared references.

    Returns:
        A State for one filter or none, a tuple of States for several. Its paths are those of the
        attributes, sorted.

    >>> import nnxlite as nnx
    >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    >>> sorted(nnx.state(model, nnx.BatchStat))
    ['mean', 'var']

    Several filters divide the leaves:

    >>> params, rest = nnx.state(model, nnx.Param, ...)
    >>> sorted(params), sorted(rest)
    (['bias', 'scale'], ['mean', 'var'])
    >>> params["scale"] is model.scale
    True
    """
    seen = checked_view(node, graph, "state")
    states = select(seen, filters, exhaustive=False)
    return states[0] if len(states) == 1 else tuple(states)


variables = state
"""The same as `state`: States that contain the Variables themselves."""


def graphdef(node: N, /, *, graph: bool | None = None) -> GraphDef[N]:
    """The definition of a graph.

    Args:
        node: an object, or a pytree of objects.
        graph: False refuses shared references.

    Returns:
        A `GraphDef`: hashable, and equal for graphs of equal structure.

    >>> import nnxlite as nnx
    >>> a, b = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    >>> nnx.graphdef(a) == nnx.graphdef(b)
    True
    """
    return checked_view(node, graph, "graphdef").graphdef


@tp.overload
def unpack(node: N, first: Filter = ..., /, *, graph: bool | None = None) -> GraphState[N]: ...
@tp.overload
def unpack(
    node: N, first: Filter, second: Filter, /, *filters: Filter, graph: bool | None = None
) -> tuple[GraphState[N], ...]: ...
def unpack(node: tp.Any, *filters: Filter, graph: bool | None = None) -> tp.Any:
    """Like `split`, with the definition inside: a `GraphState`, or a tuple for several filters.

    Args:
        node: an object, or a pytree of objects.
        filters: Variable types, strings, predicates, ...; each leaf goes to the first that matches.
        graph: False refuses shared references.

    Returns:
        A `GraphState` for one filter or none, a tuple of them for several; `merge` takes them.

    Raises:
        ValueError: when a leaf is matched by no filter.

    >>> import nnxlite as nnx
    >>> params, rest = nnx.unpack(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Param, ...)
    >>> type(params).__name__, type(nnx.merge(params, rest)).__name__
    ('GraphState', 'BatchNorm')
    """
    definition, *states = split(node, *filters, graph=graph)
    packed = tuple(GraphState(definition, s) for s in states)
    return packed[0] if len(packed) == 1 else packed


def merge(
    graphdef_or_graphstate: GraphDef[N] | GraphState[N],
    /,
    *states: tp.Any,
    copy: bool = False,
    recreate_variables: bool = True,
) -> N:
    """Rebuild the objects that a definition describes, around the leaves in the given states.

    Args:
        graphdef_or_graphstate: from `split`, or a `GraphState` from `unpack`.
        states: the states of `split`, in any order; nested dicts of arrays are fine too, as is one
            list of leaves in their order.
        copy: put the values into new Variables instead of using those in the states.
        recreate_variables: False leaves a value that a state contains without a Variable as it is,
            instead of putting it into a Variable of the kind that the definition names.

    Returns:
        The object, or the pytree of objects, that was split: new objects of the same structure.

    Raises:
        ValueError: when the states lack a leaf of the definition, or hold one too many, and when
            `GraphState` objects belong to different definitions.

    >>> import nnxlite as nnx
    >>> model = nnx.merge(*nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
    >>> model.kernel.shape
    (2, 3)
    """
    definition, states = _unpacked(graphdef_or_graphstate, states)
    leaves = leaves_of(definition, states)
    if copy:
        leaves = copies(leaves)
    return build(definition, leaves, recreate_variables)


def _unpacked(
    first: GraphDef[N] | GraphState[N], states: tuple[tp.Any, ...]
) -> tuple[GraphDef[N], tuple[tp.Any, ...]]:
    """The definition and the states given to `merge`.

    Raises TypeError where the first is neither a definition nor a GraphState, ValueError where the
    others are not GraphStates of the same definition.
    """
    if isinstance(first, GraphDef):
        return first, states
    if not isinstance(first, GraphState):
        raise TypeError(
            f"merge: Expected a GraphDef or GraphState object, got: {type(first).__name__}."
        )
    for number, other in enumerate(states, 1):
        if not isinstance(other, GraphState):
            raise ValueError(
                f"merge: Expected GraphState object, got {type(other).__name__} as argument "
                f"{number}. Give merge the GraphStates of one unpack, or a definition and states."
            )
        if other._graphdef is not first._graphdef:
            raise ValueError(
                f"merge: GraphDef must be the same for all GraphState objects; that of argument "
                f"{number} differs from that of argument 0: "
                f"{differences_text(compare(first._graphdef, other._graphdef))}. Merge what one "
                "unpack gave; to put values into another object use nnxlite.update."
            )
    return first._graphdef, tuple(s._state for s in (first, *states))


def build(
    definition: GraphDef[N], leaves: tp.Sequence[tp.Any], recreate_variables: bool = True
) -> N:
    """The root of the graph that a definition and its leaves make."""
    decoded = definition.decoded
    nodes = build_nodes(decoded, leaves, recreate_variables=recreate_variables)
    root = resolve(decoded.roots[0], nodes, leaves)
    note_entered((root,))
    return root  # type: ignore[return-value]


def leaves_of(definition: GraphDef[tp.Any], states: tp.Sequence[tp.Any]) -> list[tp.Any]:
    """The leaves of a definition, in order, looked up in states.

    Raises ValueError naming the paths that are missing or unknown.
    """
    if definition.is_leaf:
        given = root_leaves(states)
        if len(given) != 1:
            raise ValueError(f"Incorrect number of leaves, expected 1 leaf, but got {len(given)}.")
        return given
    if len(states) == 1 and isinstance(states[0], FlatState):
        given = states[0]
        if given.paths == definition.paths:
            return list(given.leaves)
    if len(states) == 1 and isinstance(states[0], (list, tuple)):
        return listed_leaves(definition, states[0])
    leaves = definition.program().read(*states)
    return _leaves_by_path(definition, states) if leaves is None else leaves


def listed_leaves(definition: GraphDef[tp.Any], given: tp.Sequence[tp.Any]) -> list[tp.Any]:
    """The leaves of a definition, given in order; raises ValueError for another number of them."""
    if len(given) != definition.num_leaves:
        raise ValueError(
            f"Incorrect number of leaves, expected {definition.num_leaves} leaves, but got "
            f"{len(given)} in the {type(given).__name__}. Pass one for each path of the "
            "definition, in their order."
        )
    return list(given)


def root_leaves(states: tp.Iterable[tp.Any]) -> list[tp.Any]:
    """What states bring for a root that is itself a leaf; empty ones bring nothing.

    Raises ValueError where a FlatState has a leaf below the root.
    """
    leaves: list[tp.Any] = []
    for given in states:
        if isinstance(given, GraphState):
            given = given._state
        if isinstance(given, FlatState):
            below = [path_text(path) for path in given.paths if path]
            if below:
                raise ValueError(
                    f"The root is a leaf, but the FlatState has leaves below it: {below[:8]}. Pass "
                    "the FlatState that flatten gave for this root."
                )
            leaves.extend(given.leaves)
        elif not (isinstance(given, Mapping) and not given):
            leaves.append(given)
    return leaves


def _leaves_by_path(definition: GraphDef[tp.Any], states: tp.Sequence[tp.Any]) -> list[tp.Any]:
    numbers = {path: i for i, path in enumerate(definition.paths)}
    out: list[tp.Any] = [MISSING] * len(numbers)
    surplus: list[Path] = []
    for given in states:
        for path, leaf in flat_pairs(given, numbers):
            number = numbers.get(path)
            if number is None:
                surplus.append(path)
            else:
                out[number] = leaf
    missing = [path for path, number in numbers.items() if out[number] is MISSING]
    if missing or surplus:
        parts = [
            f"{word} {listed(paths, text=lambda path: repr(path_text(path)))}"
            for word, paths in (("missing", missing), ("unknown", surplus))
            if paths
        ]
        got = len(numbers) - len(missing) + len(surplus)
        raise ValueError(
            f"Incorrect number of leaves, expected {len(numbers)} leaves, but got {got} in the "
            f"states: {'; '.join(parts)}. Pass the states that belong to this GraphDef, all "
            "of them."
        )
    return out


def flat_pairs(given: tp.Any, stops: tp.Container[Path] = ()) -> tp.Iterator[tuple[Path, tp.Any]]:
    """The (path, leaf) pairs of a State, FlatState, or nested mapping.

    A mapping at one of the paths in `stops` is a leaf: the value of a Variable.

    Raises TypeError for anything else.
    """
    if isinstance(given, FlatState):
        return iter(given)
    if not isinstance(given, Mapping):
        raise TypeError(
            "Expected a State (or a nested dict of leaves), got "
            f"{type(given).__name__}. split and state give one."
        )
    return iter(flatten_to_sequence(given, is_leaf=lambda path, _: path != () and path in stops))


def copies(leaves: tp.Iterable[tp.Any]) -> list[tp.Any]:
    """Copies of Variables and references, and the other leaves; each reference is copied once."""
    refs: dict[int, tp.Any] = {}

    def own(value: tp.Any) -> tp.Any:
        if is_ref(value) and id(value) not in refs:
            refs[id(value)] = new_ref(value[...])
        return refs.get(id(value), value)

    def copied(leaf: tp.Any) -> tp.Any:
        if not isinstance(leaf, Variable):
            return own(leaf)
        box = leaf._box
        return make(box.definition, own(box.value) if box.definition.is_ref else box.value)

    return [*map(copied, leaves)]


def clone(node: N, variables: bool = True, *, arrays: bool = False, graph: bool | None = None) -> N:
    """A copy of a graph: new objects, Variables and references, the same arrays; shared as before.

    Args:
        node: an object, or a pytree of objects.
        variables: False keeps the original's Variables and references in the copy.
        arrays: True copies the arrays as well, those of NumPy and numbers as arrays of JAX.
        graph: False refuses shared references.

    Returns:
        A graph of the same structure.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> copy = nnx.clone(model)
    >>> copy.kernel is model.kernel, copy.kernel.value is model.kernel.value
    (False, True)
    """
    seen = checked_view(node, graph, "clone")
    leaves: tp.Sequence[tp.Any] = seen.leaves
    if variables:
        leaves = copies(leaves)
    if arrays:
        leaves = [_with_own_arrays(leaf) for leaf in leaves]
    return build(seen.graphdef, leaves)


def _with_own_arrays(leaf: tp.Any) -> tp.Any:
    def own(x: tp.Any) -> tp.Any:
        if isinstance(x, jax.Array):
            return jnp.copy(x)  # the method of keys fails while JAX records
        if is_ref(x) or not (is_data(x) or isinstance(x, (int, float, complex, np.generic))):
            return x
        try:
            return jnp.array(x)
        except TypeError:  # text, dates or objects of NumPy
            return copy_lib.deepcopy(x)

    if not isinstance(leaf, Variable):
        return own(leaf)
    box = leaf._box
    return leaf if box.definition.is_ref else leaf.replace(jax.tree.map(own, box.value))


class Proxy:
    """Stands for an attribute path of an object that will be merged when the proxy is called."""

    __slots__ = ("_nnx_graph", "_nnx_parts", "_nnx_path")

    def __init__(self, parts: tuple[tp.Any, ...], graph: bool | None, path: Path = ()) -> None:
        self._nnx_parts, self._nnx_graph, self._nnx_path = parts, graph, path

    def __getattr__(self, name: str) -> Proxy:
        path = (*self._nnx_path, operator.attrgetter(name))
        return Proxy(self._nnx_parts, self._nnx_graph, path)

    def __getitem__(self, key: tp.Any) -> Proxy:
        path = (*self._nnx_path, operator.itemgetter(key))
        return Proxy(self._nnx_parts, self._nnx_graph, path)

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        node = target = merge(*self._nnx_parts)
        for step in self._nnx_path:
            target = step(target)
        return target(*args, **kwargs), split(node, graph=self._nnx_graph)

    def __repr__(self) -> str:
        return f"Proxy{self._nnx_path}"


def call(
    graphdef_state: tuple[GraphDef[N], *tuple[tp.Any, ...]], /
) -> ApplyCaller[tuple[GraphDef[N], AnyState]]:
    """A proxy for an object given as `(graphdef, state)`.

    Calling it, or a method reached through attributes and indices, merges the object, runs the
    method, and returns `(output, (graphdef, state))`.

    Args:
        graphdef_state: the pair that `split` returns.

    Returns:
        A proxy with the attributes, items and methods of the object.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> parts = nnx.split({"a": nnx.Linear(2, 3, rngs=nnx.Rngs(0))})
    >>> y, parts = nnx.call(parts)["a"](jnp.ones((1, 2)))
    >>> y.shape
    (1, 3)
    """
    return tp.cast(tp.Any, Proxy((*graphdef_state,), None))
