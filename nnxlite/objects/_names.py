"""The name of a layer in a message: its class, and its path in the model that was called."""

from __future__ import annotations

import inspect
import sys
import types
import typing as tp

from nnxlite._errors import path_text
from nnxlite.objects._module import Module
from nnxlite.objects._owners import owner_of


def layer_name(layer: tp.Any, frame: types.FrameType | None = None) -> str:
    """For example "Linear at `blocks.1` of Net", or "Linear" if it is not part of another object.

    Args:
        layer: an object.
        frame: where it was called; by default the stack of the caller is searched.
    """
    name = type(layer).__name__
    found = owner_of(layer, frame or sys._getframe(1))
    if found is None:
        return name
    owner, paths = found
    path, _ = paths[id(layer)]
    return f"{name} at `{path_text(path)}` of {type(owner).__name__}"


def note_layer(error: Exception, layer: tp.Any) -> None:
    """Add a note to an error raised by a function that a layer called: the name of that layer."""
    error.add_note(f"This was called by {layer_name(layer)}.")


def failing_layer(error: BaseException) -> str | None:
    """The name of the innermost module whose method an error came out of, if there is one."""
    inner: tuple[tp.Any, types.FrameType] | None = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount][:1]
        owner = frame.f_locals.get(names[0]) if names else None
        if isinstance(owner, Module):
            method: tp.Any = getattr(type(owner), code.co_name, None)
            is_method = getattr(inspect.unwrap(method), "__code__", None) is code
            inner = (owner, frame) if is_method else inner  # else it is a function of a module
        trace = trace.tb_next
    return None if inner is None else layer_name(*inner)
