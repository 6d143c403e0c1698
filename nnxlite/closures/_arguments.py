"""What the arguments of a call bring with them: classes with methods, and static values."""

from __future__ import annotations

import typing as tp

import jax
import numpy as np

from nnxlite._jax import Ref, Tracer
from nnxlite.boundary import CallDef
from nnxlite.closures._key import Surroundings, surroundings
from nnxlite.closures._trusted import CONSTANTS, LAYERS, is_trusted_class
from nnxlite.graph import ContainerDef, ObjectDef, StaticDef
from nnxlite.variables import VariableDef

_ARRAYS = (jax.Array, Tracer, Ref, np.ndarray, np.generic, bool, int, float, complex)


def surroundings_of_call(
    funs: tp.Iterable[tp.Any], seen: Surroundings, call: CallDef, values: tp.Iterable[tp.Any]
) -> Surroundings | None:
    """What functions see, and what the arguments of a call bring with them; None if it may change.

    Args:
        funs: the functions.
        seen: what they see without arguments.
        call: the arguments.
        values: their graph leaves.
    """
    brought = _brought_by(call)
    if not all(issubclass(kind, _ARRAYS) for kind in {*map(type, values)}):
        pytrees = [value for value in values if not isinstance(value, _ARRAYS)]
        leaves, treedef = jax.tree_util.tree_flatten(pytrees)
        if not all(isinstance(leaf, _ARRAYS) for leaf in leaves):
            return None  # the leaves may bring something, too
        brought = [x + y for x, y in zip(brought, _to_be_seen(*_nodes_of([treedef])))]
    return surroundings(funs, *brought) if any(brought) else seen


def _brought_by(call: CallDef) -> tuple[list[type], list[tp.Any]]:
    """The classes of the user (and layers) among the arguments of a call, and their static values."""
    # Key: this function, in the cache of the interned CallDef, with which it dies. Nothing invalidates
    # it, as both are immutable. Threads: two may work it out twice.
    cached = call.cache.get(_brought_by)
    if cached is not None:
        return cached
    classes: list[type] = []
    statics: list[tp.Any] = [box.value for _, box in getattr(call.extra, "statics", ())]
    trees = [call.treedef]
    for token in call.graphdef.tokens:
        if isinstance(token, (ObjectDef, VariableDef)):
            classes.append(token.type)
            statics += (token.template if type(token) is ObjectDef else token.metadata).values()
        elif isinstance(token, ContainerDef):
            classes.append(token.type)
            trees += [token.treedef] if token.treedef is not None else []
        elif isinstance(token, StaticDef):
            statics.append(token.value)
    of_trees = _nodes_of(trees)
    return call.remember(_brought_by, _to_be_seen(classes + of_trees[0], statics + of_trees[1]))


def _nodes_of(trees: list[tp.Any]) -> tuple[list[type], list[tp.Any]]:
    """The types of the nodes of some treedefs, and their static values."""
    classes: list[type] = []
    statics: list[tp.Any] = []
    while trees:
        tree = trees.pop()
        trees += tree.children()
        kind, auxiliary = tree.node_data() or (None, None)
        if kind not in (None, type(None), tuple, list, dict):
            classes.append(kind)
            statics.append(auxiliary)
    return classes, statics


def _to_be_seen(classes: list[type], statics: list[tp.Any]) -> tuple[list[type], list[tp.Any]]:
    """Those of some classes and static values that a function may see more through than their type."""
    own = dict.fromkeys(
        c for c in classes if not is_trusted_class(c) or c.__module__.startswith(LAYERS)
    )
    unique = {id(value): value for value in statics if type(value) not in CONSTANTS}
    return [*own], [*unique.values()]
