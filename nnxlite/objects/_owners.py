"""The model that a layer is part of.

A layer has no reference to the model that contains it.  Inside a trace, the boundary has noted the
objects that it built there, and the outermost one that contains the layer is the model.  An error in
eager code has no boundary around it: there the objects that are being called are arguments of the
functions on the call stack.  Only an error reads it, and only as far as the frames of JAX, which would
otherwise keep the tracers in them alive (before Python 3.13 a frame keeps what `f_locals` returned).
"""

from __future__ import annotations

import types
import typing as tp

from nnxlite.graph import Path, iter_graph
from nnxlite.objects._pytree import Pytree

Paths: tp.TypeAlias = dict[int, tuple[Path, tp.Any]]
"""Objects with their paths, by `id`."""


def owner_of(layer: tp.Any, candidates: tp.Iterable[tp.Any]) -> tuple[Pytree, Paths] | None:
    """The first object of some that contains a layer, and what is in it; None if there is none."""
    for owner in candidates:
        if owner is not layer:
            paths = paths_in(owner)
            if id(layer) in paths:
                return owner, paths
    return None


def on_the_stack(frame: types.FrameType | None) -> list[tp.Any]:
    """The objects that are arguments of the running functions, outermost first, up to JAX's frames."""
    found: list[tp.Any] = []
    while frame is not None and not _is_jax(frame):
        found += reversed(arguments_of(frame))
        frame = frame.f_back
    return found[::-1]


def arguments_of(frame: types.FrameType) -> list[tp.Any]:
    """The objects among the arguments of a function that runs or has ended."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    values = frame.f_locals if names else {}
    return [value for name in names if isinstance(value := values.get(name), Pytree)]


def _is_jax(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "jax"


def paths_in(owner: Pytree) -> Paths:
    """Everything in an object; nothing if that is half built."""
    try:
        return {id(value): (path, value) for path, value in iter_graph(owner)}
    except Exception:  # the message that needs the name matters more
        return {}
