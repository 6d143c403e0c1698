"""What the arguments of a call bring with them: classes with methods, and static values."""

from __future__ import annotations

import typing as tp

import jax
import numpy as np

from nnxlite._jax import Ref, Tracer
from nnxlite.boundary import CallDef
from nnxlite.closures._key import Surroundings, surroundings
from nnxlite.closures._trusted import CONSTANTS, is_trusted_class
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
    if not all(issubclass(kind, _ARRAYS) for kind in {*map(type, values)}):
        return None  # the leaves may bring something, too
    classes, statics = _brought_by(call)
    return surroundings(funs, classes, statics) if classes or statics else seen


def _brought_by(call: CallDef) -> tuple[list[type], list[tp.Any]]:
    """The classes of the user (and layers) among the arguments of a call, and their static values."""
    # Key: this function, in the cache of the interned CallDef, with which it dies. Nothing invalidates
    # it, as both are immutable. Threads: two may work it out twice.
    cached = call.cache.get(_brought_by)
    if cached is not None:
        return cached
    classes: dict[type, None] = {}
    statics: list[tp.Any] = [box.value for _, box in getattr(call.extra, "hidden", ())]
    trees = [call.treedef]
    for token in call.graphdef.tokens:
        if isinstance(token, (ObjectDef, VariableDef)):
            classes[token.type] = None
            statics += (token.template if type(token) is ObjectDef else token.metadata).values()
        elif isinstance(token, ContainerDef):
            classes[token.type] = None
            trees += [token.treedef] if token.treedef is not None else []
        elif isinstance(token, StaticDef):
            statics.append(token.value)
    while trees:
        tree = trees.pop()
        trees += tree.children()
        kind, auxiliary = tree.node_data() or (None, None)
        if kind not in (None, type(None), tuple, list, dict):
            classes[kind] = None
            statics.append(auxiliary)
    own = [c for c in classes if not is_trusted_class(c) or "nnxlite.nn" in c.__module__]
    unique = {id(value): value for value in statics if type(value) not in CONSTANTS}
    return call.remember(_brought_by, (own, [*unique.values()]))
