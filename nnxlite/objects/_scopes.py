"""The path of a module in the model that it is part of: in named scopes, and in messages.

A module has no reference to the model that contains it.  The boundary notes the objects that it builds
inside a trace, and the outermost one that contains the module is the model.

While JAX records a program, each call of a module runs in a `jax.named_scope`: the outermost module by
its class, those inside it by their path.  So operations carry it in profiles, HLO and messages of JAX.
Outside of traces, and in the compiled program, it is nothing.

An error in eager code has no boundary around it that knows the model: there the objects that are being
called are arguments of the functions on the call stack.  Only an error reads it, and only as far as
JAX's frames: to read those would keep their tracers alive (before Python 3.13, a frame keeps what
`f_locals` returned).
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import itertools
import sys
import traceback
import types
import typing as tp

import jax
from jax.core import Tracer

from nnxlite._base import jax as _jax
from nnxlite._base.config import NAMED_SCOPES
from nnxlite._base.errors import listed, path_text
from nnxlite.graph._kinds import GraphNode
from nnxlite.graph._rebuild import Path, entered_objects
from nnxlite.graph._walk import iter_graph
from nnxlite.variables._variable import Variable

C = tp.TypeVar("C", bound=tp.Callable[..., tp.Any])

Parts: tp.TypeAlias = dict[int, tuple[Path, tp.Any]]
"""What is in an object, with paths, by `id`."""


_running: contextvars.ContextVar[tuple[tp.Any, Parts] | None] = contextvars.ContextVar(
    "running", default=None
)
"""The module whose call is running, and its parts as far as they are known."""


def scoped(call: C) -> C:
    """The `__call__` of a module class, as one that names the operations it records.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> class Net(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs)])
    ...     def __call__(self, x):
    ...         return jnp.sin(self.layers[0](x))
    >>> net = Net(nnx.Rngs(0))
    >>> program = jax.make_jaxpr(lambda x: net(x))(jnp.ones((1, 2)))
    >>> [str(eqn.source_info.name_stack) for eqn in program.eqns][-3:]
    ['Net/layers/0', 'Net/layers/0', 'Net']
    """

    @functools.wraps(call)
    def __call__(self: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        # By way of the module: cloudpickle, which copies the globals of this function with a class
        # of the user's own, copies no module, and JAX's state can be neither copied nor pickled.
        try:
            if _jax.trace_state.value is not _jax.EAGER:
                return in_scope(call, self, *args, **kwargs)
            return call(self, *args, **kwargs)
        except Exception as error:
            note_deleted(error, type(self).__name__, lambda: variables_by_path(self))
            _jax.drop_hidden_frames(error)
            raise

    return tp.cast(C, __call__)


def in_scope(call: tp.Any, module: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
    """Call a module inside a trace."""
    around = _running.get()
    again = around is not None and around[0] is module  # such as by `super().__call__`
    if again or not NAMED_SCOPES.get() or not _jax.is_recording():
        return call(module, *args, **kwargs)
    name = _scope_name(module, around)
    token = _running.set((module, {}))
    try:
        with jax.named_scope(name):
            return call(module, *args, **kwargs)
    finally:
        _running.reset(token)


def _scope_name(module: tp.Any, around: tuple[tp.Any, Parts] | None) -> str:
    """The path in the module whose call is running, or the class and path of the outermost model."""
    if around is not None:
        parent, parts = around
        if id(module) not in parts:  # as where the call made it
            parts.update(parts_of(parent))
        if id(module) in parts:
            return "/".join(map(str, parts[id(module)][0]))
    owner, path = owner_of(module, entered_objects()) or (module, ())
    outermost = [type(owner).__name__] if around is None or not path else []
    return "/".join([*outermost, *map(str, path)])


def owner_of(layer: tp.Any, candidates: tp.Iterable[tp.Any]) -> tuple[tp.Any, Path] | None:
    """The first object of some that contains a layer, and its path there; None if there is none."""
    for owner in candidates:
        if owner is not layer:
            path, _ = parts_of(owner).get(id(layer), (None, None))
            if path is not None:
                return owner, path
    return None


def parts_of(owner: tp.Any) -> Parts:
    """Everything in an object; nothing if that is half built."""
    try:
        return {id(value): (path, value) for path, value in iter_graph(owner)}
    except Exception:  # the message that needs the name matters more
        return {}


def layer_name(layer: tp.Any) -> str:
    """For example "Linear at `blocks.1` of Net", or "Linear" if it is not part of another object."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    ours = itertools.takewhile(lambda frame: not _is_jax(frame), frames)
    running = [value for frame in ours for value in reversed(_arguments_of(frame))]
    return _name_in(layer, [*entered_objects(), *reversed(running)])


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
    """The name of the innermost object whose method an error came out of, if there is one.

    It is called by a function that the error has just reached: all frames below have ended, so that to
    read their arguments keeps nothing alive that they do not.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    owners = entered_objects() + [value for frame in frames for value in _arguments_of(frame)]
    for frame in reversed(frames):
        for first in _arguments_of(frame)[:1]:
            method: tp.Any = getattr(type(first), frame.f_code.co_name, None)
            if getattr(inspect.unwrap(method), "__code__", None) is frame.f_code:
                return _name_in(first, owners)  # else it is a function of an object
    return None


def _arguments_of(frame: types.FrameType) -> list[tp.Any]:
    """The objects among the arguments of a function that runs or has ended."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    values = frame.f_locals if names else {}
    return [value for name in names if isinstance(value := values.get(name), GraphNode)]


def _is_jax(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "jax"


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


def variables_by_path(owner: tp.Any) -> list[tuple[str, tp.Any]]:
    """The values of the Variables in an object."""
    parts = parts_of(owner).values()
    return [(path_text(path), v.get_raw_value()) for path, v in parts if isinstance(v, Variable)]
