"""The name of a layer in a message: its class, and its path in the model that was called."""

from __future__ import annotations

import sys
import types
import typing as tp

from nnxlite._errors import path_text
from nnxlite.graph import iter_graph
from nnxlite.objects import Pytree


def layer_name(layer: tp.Any) -> str:
    """For example "Linear at `blocks.1` of Net", or "Linear" where no object on the way holds it.

    A layer does not know who holds it.  Its message does: the objects that are being called are
    arguments of the functions under way, and the outermost one that holds the layer is the model.
    This is for errors only, since it goes through all of them.
    """
    name = type(layer).__name__
    for owner in _owners(sys._getframe(1), layer):
        try:
            path = next((path for path, value in iter_graph(owner) if value is layer), None)
        except Exception:  # an object in a state that cannot be read has an error of its own
            continue
        if path:
            return f"{name} at `{path_text(path)}` of {type(owner).__name__}"
    return name


def note_layer(error: Exception, layer: tp.Any) -> None:
    """Add a line to an error that came out of what a layer called: which layer called it."""
    error.add_note(f"This was called by {layer_name(layer)}.")


def _owners(frame: types.FrameType | None, layer: tp.Any) -> list[Pytree]:
    """The objects among the arguments of all functions under way, the outermost first."""
    found: dict[int, Pytree] = {}
    while frame is not None:
        code, values = frame.f_code, frame.f_locals
        for name in code.co_varnames[: code.co_argcount]:
            value = values.get(name)
            if isinstance(value, Pytree) and value is not layer:
                found.pop(id(value), None)
                found[id(value)] = value
        frame = frame.f_back
    return list(reversed(found.values()))
