"""The model that a layer is part of.

A layer has no reference to the model that contains it.  But the objects that are being called are
arguments of the functions on the call stack, and the outermost one that contains the layer is the
model.  As this searches all of them, it is for errors, and for names that are given once in a trace.
"""

from __future__ import annotations

import types
import typing as tp

from nnxlite.graph import Path, iter_graph
from nnxlite.objects._pytree import Pytree

Paths: tp.TypeAlias = dict[int, tuple[Path, tp.Any]]
"""Objects with their paths, by `id`."""


def owner_of(layer: tp.Any, frame: types.FrameType | None) -> tuple[Pytree, Paths] | None:
    """The outermost object that contains a layer, and what is in it; None if there is none.

    Args:
        layer: an object.
        frame: where it was called.
    """
    owners: dict[int, Pytree] = {}
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        # Before Python 3.13 a frame keeps what `f_locals` returned, so it is read only where needed.
        values = frame.f_locals if names else {}
        for name in names:
            value = values.get(name)
            if isinstance(value, Pytree) and value is not layer:
                owners.pop(id(value), None)
                owners[id(value)] = value
        frame = frame.f_back
    for owner in reversed(owners.values()):
        paths = paths_in(owner)
        if id(layer) in paths:
            return owner, paths
    return None


def paths_in(owner: Pytree) -> Paths:
    """Everything in an object; nothing if that is half built."""
    try:
        return {id(value): (path, value) for path, value in iter_graph(owner)}
    except Exception:  # the message that needs the name matters more
        return {}
