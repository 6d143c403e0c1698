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

import jax
from jax.core import Tracer

from nnxlite._errors import listed, path_text
from nnxlite.graph import Path, iter_graph
from nnxlite.objects._pytree import Pytree
from nnxlite.variables import Variable

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


def note_deleted(
    error: Exception, of: str, named: tp.Callable[[], tp.Iterable[tuple[str, tp.Any]]]
) -> None:
    """Add a note to JAX's error for a deleted array: which arrays are gone, and how to keep a copy.

    Args:
        error: any error; only that one gets the note, once.
        of: what was called.
        named: gives its arrays, or pytrees of arrays, by name.
    """
    if type(error) is not RuntimeError or "has been deleted" not in str(error):
        return
    if any(_COPY in note for note in getattr(error, "__notes__", ())):
        return  # of a module inside this one
    gone = [
        name for name, value in named() if any(map(_is_deleted, jax.tree_util.tree_leaves(value)))
    ]
    if gone:
        error.add_note(
            f"The arrays at {listed(gone)} of {of} are gone: a call that donates has reused their "
            "memory. An object that nnx.clone or nnx.merge has made shares its arrays with the first. "
            f"{_COPY}, before that call, makes a copy with arrays of its own."
        )


_COPY = "nnx.clone(model, arrays=True)"


def _is_deleted(leaf: tp.Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def variables_by_path(owner: Pytree) -> list[tuple[str, tp.Any]]:
    """The values of the Variables in an object."""
    values = (value for value in paths_in(owner).values())
    return [(path_text(path), v.get_raw_value()) for path, v in values if isinstance(v, Variable)]
