"""Named scopes: operations of a module carry its path, in profiles, HLO and messages of JAX.

While JAX records a program, each call of a module runs in a `jax.named_scope`: the outermost module by
its class, those inside it by their path.  Outside of traces, and in the compiled program, it is nothing.
"""

from __future__ import annotations

import contextvars
import functools
import typing as tp

import jax

from nnxlite import _jax
from nnxlite._config import NAMED_SCOPES
from nnxlite._jax import is_recording
from nnxlite.graph import Path, entered_objects
from nnxlite.objects._owners import Paths, note_deleted, owner_of, paths_in, variables_by_path

C = tp.TypeVar("C", bound=tp.Callable[..., tp.Any])


class _Call(tp.NamedTuple):
    """A call that is running: its module, where that is, and the other modules of the same model."""

    module: tp.Any
    path: Path
    owner: tp.Any
    paths: Paths


_running: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("running", default=None)


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
    again = around is not None and around.module is module  # such as by `super().__call__`
    if again or not NAMED_SCOPES.get() or not is_recording():
        return call(module, *args, **kwargs)
    names, here = _enter(module, around)
    token = _running.set(here)
    try:
        with jax.named_scope("/".join(names)):
            return call(module, *args, **kwargs)
    finally:
        _running.reset(token)


def _enter(module: tp.Any, around: _Call | None) -> tuple[list[str], _Call]:
    """The names of the scope of a call inside another one, or of the outermost one."""
    if around is not None:
        paths = around.paths
        if id(module) not in paths:  # as where the call made it
            paths = paths_in(around.owner)
        if id(module) in paths:
            path, _ = paths[id(module)]
            inside = path[: len(around.path)] == around.path
            names = [*map(str, path[len(around.path) :] if inside else path)]
            return names or [type(module).__name__], _Call(module, path, around.owner, paths)
    owner, paths = owner_of(module, entered_objects()) or (module, paths_in(module))
    path, _ = paths[id(module)] if id(module) in paths else ((), module)
    names = [*map(str, path)]
    copied = around is not None and type(owner) is type(around.module)  # by a transform
    if not (path and copied):
        names.insert(0, type(owner).__name__)
    return names, _Call(module, path, owner, paths)
