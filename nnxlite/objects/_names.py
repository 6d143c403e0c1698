"""The name of a layer in a message: its class, and its path in the model that was called.

An error in eager code has no boundary around it that knows the model: there the objects that are being
called are arguments of the functions on the call stack.  Only an error reads it, and only as far as
JAX's frames: to read those would keep their tracers alive (before Python 3.13, a frame keeps what
`f_locals` returned).
"""

from __future__ import annotations

import inspect
import sys
import types
import typing as tp

from nnxlite._base.errors import path_text
from nnxlite.graph._rebuild import entered_objects
from nnxlite.objects._module import Module
from nnxlite.objects._pytree import Pytree
from nnxlite.objects._scopes import owner_of


def layer_name(layer: tp.Any) -> str:
    """For example "Linear at `blocks.1` of Net", or "Linear" if it is not part of another object."""
    return _name_in(layer, [*entered_objects(), *_on_the_stack(sys._getframe(1))])


def _name_in(layer: tp.Any, candidates: tp.Iterable[tp.Any]) -> str:
    name = type(layer).__name__
    found = owner_of(layer, candidates)
    if found is None:
        return name
    owner, path = found
    return f"{name} at `{path_text(path)}` of {type(owner).__name__}"


def note_layer(error: Exception, layer: tp.Any) -> None:
    """Add a note to an error raised by a function that a layer called: the name of that layer."""
    error.add_note(f"This was called by {layer_name(layer)}.")


def failing_layer(error: BaseException) -> str | None:
    """The name of the innermost module whose method an error came out of, if there is one.

    It is called by a function that the error has just reached: all frames below have ended, so that to
    read their arguments keeps nothing alive that they do not.
    """
    inner, owners = None, entered_objects()
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        frame = trace.tb_frame
        arguments = _arguments_of(frame)
        owners += arguments
        if arguments and isinstance(arguments[0], Module):
            code = frame.f_code
            method: tp.Any = getattr(type(arguments[0]), code.co_name, None)
            is_method = getattr(inspect.unwrap(method), "__code__", None) is code
            inner = arguments[0] if is_method else inner  # else it is a function of a module
        trace = trace.tb_next
    return None if inner is None else _name_in(inner, owners)


def _on_the_stack(frame: types.FrameType | None) -> list[tp.Any]:
    """The objects that are arguments of the running functions, outermost first, up to JAX's frames."""
    found: list[tp.Any] = []
    while frame is not None and not _is_jax(frame):
        found += reversed(_arguments_of(frame))
        frame = frame.f_back
    return found[::-1]


def _arguments_of(frame: types.FrameType) -> list[tp.Any]:
    """The objects among the arguments of a function that runs or has ended."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    values = frame.f_locals if names else {}
    return [value for name in names if isinstance(value := values.get(name), Pytree)]


def _is_jax(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "jax"
