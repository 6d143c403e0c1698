"""The name of a layer in a message: its class, and its path in the model that was called."""

from __future__ import annotations

import sys
import types
import typing as tp

from nnxlite._errors import path_text
from nnxlite.graph import iter_graph
from nnxlite.objects._module import Module
from nnxlite.objects._pytree import Pytree


def layer_name(layer: tp.Any, frame: types.FrameType | None = None) -> str:
    """For example "Linear at `blocks.1` of Net", or "Linear" if it is not part of another object.

    A layer has no reference to the model that contains it.  But the objects that are being called
    are arguments of the functions on the call stack, and the outermost one that contains the layer
    is the model.  As this searches all of them, it is for errors only.

    Args:
        layer: an object.
        frame: where it was called; by default the stack of the caller is searched.
    """
    name = type(layer).__name__
    for owner in _owners(frame or sys._getframe(1), layer):
        try:
            path = next((path for path, value in iter_graph(owner) if value is layer), None)
        except Exception:  # such an object is half built; the error at hand matters more
            continue
        if path:
            return f"{name} at `{path_text(path)}` of {type(owner).__name__}"
    return name


def note_layer(error: Exception, layer: tp.Any) -> None:
    """Add a note to an error raised by a function that a layer called: the name of that layer."""
    error.add_note(f"This was called by {layer_name(layer)}.")


def failing_layer(error: BaseException) -> str | None:
    """The name of the innermost module whose method an error came out of, if there is one."""
    inner: tuple[tp.Any, types.FrameType] | None = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount][:1]
        owner = frame.f_locals.get(names[0]) if names else None
        if isinstance(owner, Module):
            inner = owner, frame
        trace = trace.tb_next
    return None if inner is None else layer_name(*inner)


def _owners(frame: types.FrameType | None, layer: tp.Any) -> list[Pytree]:
    """The objects among the arguments of all functions on the call stack, the outermost first."""
    owners: dict[int, Pytree] = {}
    while frame is not None:
        code, values = frame.f_code, frame.f_locals
        for name in code.co_varnames[: code.co_argcount]:
            value = values.get(name)
            if isinstance(value, Pytree) and value is not layer:
                owners.pop(id(value), None)
                owners[id(value)] = value
        frame = frame.f_back
    return list(reversed(owners.values()))
