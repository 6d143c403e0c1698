"""`GraphState`: a definition together with (a part of) its state, in one mapping and one pytree."""

from __future__ import annotations

import typing as tp
from collections.abc import Iterator, MutableMapping

import jax

from nnxlite._base.jax import flatten_one_level
from nnxlite._state._definition import State
from nnxlite.graph._graphdef import GraphDef

N = tp.TypeVar("N")

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
