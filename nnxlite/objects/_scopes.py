"""The path of a module in the model that it is part of: in named scopes, and in messages.

A module has no reference to the model that contains it.  The boundary notes the objects that it builds
inside a trace, and `called` the modules whose calls are running; the outermost of these that contains
the module is the model.

While JAX records a program, each call of a module runs in a `jax.named_scope`: the outermost module by
its class, those inside it by their path.  So operations carry it in profiles, HLO and messages of JAX.
Outside of traces, and in the compiled program, it is nothing.
"""

from __future__ import annotations

import functools
import threading
import typing as tp

import jax
from jax.core import Tracer

from nnxlite._base.config import NAMED_SCOPES
from nnxlite._base.errors import listed, path_text
from nnxlite._base.jax import EAGER, drop_hidden_frames, is_recording, trace_state
from nnxlite.graph._rebuild import Path, entered_objects
from nnxlite.graph._walk import iter_graph
from nnxlite.variables._variable import Variable

C = tp.TypeVar("C", bound=tp.Callable[..., tp.Any])

Parts: tp.TypeAlias = dict[int, tuple[Path, tp.Any]]
"""What is in an object, with paths, by `id`."""


class _Calls(threading.local):
    """The modules whose calls are running in a thread, outermost first.

    With each, where its call has a scope, its parts as far as they are known.
    """

    def __init__(self) -> None:
        self.running: list[tuple[tp.Any, Parts | None]] = []


_calls = _Calls()


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
        return called(call, self, *args, **kwargs)

    return tp.cast(C, __call__)


def called(call: tp.Any, module: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
    """Call a module; inside a trace, in a scope with its name."""
    running = _calls.running
    again = bool(running) and running[-1][0] is module  # such as by `super().__call__`
    is_eager = trace_state.value is EAGER
    has_scope = not (is_eager or again) and NAMED_SCOPES.get() and is_recording()
    name = _scope_name(module, running) if has_scope else ""
    depth = len(running)
    try:
        running.append((module, {} if has_scope else None))
        if not has_scope:
            return call(module, *args, **kwargs)
        with jax.named_scope(name):
            return call(module, *args, **kwargs)
    except Exception as error:
        note_deleted(error, type(module).__name__, lambda: variables_by_path(module))
        if not is_eager and not hasattr(error, "_nnx_layer"):
            vars(error)["_nnx_layer"] = layer_name(module)  # of the innermost one
        drop_hidden_frames(error)
        raise
    finally:
        del running[depth:]  # also where an interrupt came before the first line


def _scope_name(module: tp.Any, running: list[tuple[tp.Any, Parts | None]]) -> str:
    """The path in the module whose call is running, or the class and path of the outermost model."""
    around = next(((m, parts) for m, parts in reversed(running) if parts is not None), None)
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
    """For example "Linear at `blocks.1` of Net", or "Linear" if no model that contains it is known."""
    name = type(layer).__name__
    found = owner_of(layer, [*entered_objects(), *(module for module, _ in _calls.running)])
    if found is None:
        return name
    owner, path = found
    return f"{name} at `{path_text(path)}` of {type(owner).__name__}"


def note_layer(error: Exception, layer: tp.Any) -> None:
    """Add a note to an error raised by a function that a layer called: the name of that layer."""
    error.add_note(f"This was called by {layer_name(layer)}.")


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
