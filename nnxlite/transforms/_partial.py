"""`jit_partial` and `cached_partial`: functions with their first arguments given once.

In the reference these walk an object graph once instead of in every call.  Here no call of a transform
walks a graph that has not changed; the two are front ends of the same protocol, for programs that use
them.
"""

from __future__ import annotations

import functools
import inspect
import typing as tp

from nnxlite._base.config import Modes
from nnxlite._base.jax import as_integers
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._out import fixed_structure, structure_changed
from nnxlite.graph._functional import build
from nnxlite.graph._plan import view
from nnxlite.transforms._jit import JitWrapped, jit
from nnxlite.transforms._wrapper import Options, P, R, Unequal, name_of

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import JitKeywords, ModeKeywords

A = tp.TypeVar("A")


class JitPartial(Unequal, JitWrapped[P, R]):
    """A compiled function with its first arguments given, as `jit_partial` returns it."""

    name = "jit_partial"

    def __init__(self, fun: tp.Any, options: Options, partial_args: tuple[tp.Any, ...]) -> None:
        super().__init__(fun, options)
        self.partial_args = partial_args
        Inputs(partial_args).in_mode(options.modes.graph, self.name)

    def _inputs(self, args: tp.Any, kwargs: tp.Any) -> Inputs:
        return super()._inputs((*self.partial_args, *args), kwargs)

    def __reduce__(self) -> tp.Any:
        return JitPartial, (self.fun, self.options, self.partial_args)


@tp.overload
def jit_partial(
    fun: tp.Callable[tp.Concatenate[A, P], R],
    arg: A,
    /,
    **options: tp.Unpack[JitKeywords],
) -> JitPartial[P, R]: ...
@tp.overload
def jit_partial(
    fun: tp.Callable[..., R], *partial_args: tp.Any, **options: tp.Unpack[JitKeywords]
) -> JitPartial[..., R]: ...
def jit_partial(
    fun: tp.Callable[..., tp.Any], *partial_args: tp.Any, **options: tp.Any
) -> JitPartial[..., tp.Any]:
    """Compile a function and give it its first arguments.

    The arguments are read again in each call: changes made to the objects in between count.

    Args:
        fun: the function.
        partial_args: its first arguments.
        in_shardings, out_shardings: see `jit`; argument number 0 stands for all of `partial_args`, 1
            for the first further argument.
        static_argnums, static_argnames, donate_argnums, donate_argnames: the same.
        keep_unused, device, backend, inline, donate, max_traces, graph, graph_updates: see `jit`.

    Returns:
        A function of the further arguments, with the methods of a function under `jit`.

    Raises:
        ValueError: with `graph=False`, where an object or Variable is in several places of them.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> counter = nnx.Dict(n=nnx.Variable(jnp.int32(0)))
    >>> def add(counter, k):
    ...     counter.n += k
    >>> step = nnx.jit_partial(add, counter)
    >>> step(1), step(2), int(counter.n.value)
    (None, None, 3)
    """
    for name in ("static_argnums", "donate_argnums"):
        options[name] = _of_all(options.get(name), len(partial_args))
    return JitPartial(fun, jit(fun, **options).options, partial_args)


_OPTIONS = [p for p in inspect.signature(jit).parameters.values() if p.kind is p.KEYWORD_ONLY]
_GIVEN = inspect.signature(jit_partial)
jit_partial.__signature__ = _GIVEN.replace(  # type: ignore[attr-defined]
    parameters=[*list(_GIVEN.parameters.values())[:2], *_OPTIONS]
)


def _of_all(numbers: int | tp.Sequence[int] | None, count: int) -> list[int] | None:
    """Argument numbers of the whole function, where 0 stood for the first `count` arguments."""
    if numbers is None:
        return None
    out: list[int] = []
    for n in as_integers(numbers):
        out += range(count) if n == 0 else [n + count - 1 if n > 0 else n]
    return out


class CachedPartial(tp.Generic[P, R]):
    """A function with its first arguments given as clones, as `cached_partial` returns it."""

    def __init__(self, f: tp.Callable[..., tp.Any], cached_args: tuple[tp.Any, ...]) -> None:
        functools.update_wrapper(self, f)  # first: attributes of `f` give way to its own
        self._f = f
        seen = view(cached_args)
        self._clone = functools.partial(build, seen.graphdef, list(seen.leaves))
        self._renew()

    def _renew(self) -> None:
        """Make the clones."""
        self._args: tuple[tp.Any, ...] = self._clone()
        seen = Inputs(self._args)
        self._graphdef, self._nodes = seen.graphdef, seen.nodes()
        self._ids = frozenset(map(id, self._nodes))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with fixed_structure(self._ids):
            out = self._f(*self._args, *args, **kwargs)
        self._check()
        return out

    def _check(self) -> None:
        """Raise ValueError where a function that is not a transform changed a structure."""
        seen = Inputs(self._args)
        if seen.graphdef is self._graphdef:
            return
        before, now = self._graphdef.decoded.node_defs, seen.graphdef.decoded.node_defs
        others = (node for node, *defs in zip(self._nodes, before, now) if defs[0] is not defs[1])
        changed = next(others, self._args[0])
        self._renew()
        raise ValueError(structure_changed(changed, ("found after the call",)))

    def __repr__(self) -> str:
        return f"cached_partial({name_of(self._f)})"


@tp.overload
def cached_partial(
    f: tp.Callable[tp.Concatenate[A, P], R], arg: A, /, **modes: tp.Unpack[ModeKeywords]
) -> CachedPartial[P, R]: ...
@tp.overload
def cached_partial(
    f: tp.Callable[..., R], *cached_args: tp.Any, **modes: tp.Unpack[ModeKeywords]
) -> CachedPartial[..., R]: ...
def cached_partial(
    f: tp.Callable[..., tp.Any],
    *cached_args: tp.Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """A function with its first arguments given, whose structure must stay the same.

    The function gets clones of the objects, made once, that contain the same Variables: what it writes
    into them is visible to all users of the Variables. Changes of structure are allowed during a call,
    if they are undone before it ends.

    Args:
        f: a transformed function, such as one under `jit`.
        cached_args: its first arguments.
        graph, graph_updates: must be on.

    Returns:
        A function of the further arguments, with the result of `f`.

    Raises:
        ValueError: by a call that leaves an object with another structure; a transform has then
            written nothing. Also where `graph` or `graph_updates` is off.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> counter = nnx.Dict(n=nnx.Variable(jnp.int32(0)))
    >>> @nnx.jit
    ... def add(counter, k):
    ...     counter.n += k
    >>> step = nnx.cached_partial(add, counter)
    >>> step(1), step(2), int(counter.n.value)
    (None, None, 3)
    """
    if not Modes.of(graph, graph_updates).updates:
        raise ValueError(
            "cached_partial is a graph-mode-only API and requires graph=True and "
            "graph_updates=True; use jit_partial, or call the function itself."
        )
    return CachedPartial(f, cached_args)
