"""`remat`: compute again in the backward pass instead of remembering.

What JAX caches per function it is given holds here too, where that is safe: a function that captures
only constants has one core, whose trace is reused; one that captures objects is traced each time.
"""

from __future__ import annotations

import functools
import typing as tp

import jax

from nnxlite.boundary import (
    CallDef,
    Crossing,
    Inputs,
    enter,
    leave,
    replay_crossing,
)
from nnxlite.graph._functional import resolve_mode
from nnxlite.transforms._callables import (
    MISSING,
    Hidden,
    Unbound,
    bind_modes,
    by_position,
    hide,
    name_of,
    naming_arguments,
    refuse_shared_result,
    resolve_updates,
    reveal,
    traced_context,
    unbind,
)
from nnxlite.transforms._core import Core, core_for
from nnxlite.transforms._surroundings import Surroundings

Policy = tp.Callable[..., bool]


class RematOptions(tp.NamedTuple):
    """The options of `remat`, as they travel together."""

    prevent_cse: bool
    policy: Policy | None
    graph: bool | None
    graph_updates: bool | None


class CallKey(tp.NamedTuple):
    """What besides the arguments' structure identifies a call.

    Attributes:
        context: the settings that the function can see.
        hidden: the static arguments.
    """

    context: tuple[tuple[str, tp.Any], ...]
    hidden: Hidden


class Remat(Core):
    """What stands behind a function under `remat`."""

    def __init__(
        self,
        funs: tuple[tp.Callable[..., tp.Any], ...],
        options: RematOptions,
        seen: Surroundings | None = None,
    ) -> None:
        super().__init__(funs, options, seen)
        self._stable = self._checkpointed(self._body)

    def _checkpointed(self, body: tp.Callable[..., tp.Any]) -> tp.Callable[..., tp.Any]:
        options: RematOptions = self.options
        return jax.checkpoint(
            body, prevent_cse=options.prevent_cse, policy=options.policy, static_argnums=(0, 1)
        )

    def _body(
        self,
        seen: Surroundings | None,
        call: CallDef,
        plain: list[tp.Any],
        values: list[tp.Any],
    ) -> Crossing:
        (args, kwargs), inner = enter(call, plain, list(values))
        args = reveal(args, call.extra.hidden)
        result = self.fun(*args, **kwargs)
        refuse_shared_result(result, "remat", self.options.graph)
        updates = resolve_updates(self.options.graph_updates, self.options.graph)
        out = leave(inner, result, structure=updates, captured=updates)
        return out.crossing()

    def run(self, call: CallDef, plain: list[tp.Any], values: list[tp.Any]) -> Crossing:
        """Apply the transform to the leaves of a call."""
        seen = self.constants(call, values)
        if seen is not None:
            return self._stable(seen, call, plain, values)
        return self._checkpointed(functools.partial(self._body))(None, call, plain, values)


class RematWrapped:
    """A function under `remat`."""

    def __init__(
        self,
        fun: tp.Callable[..., tp.Any],
        static_argnums: tuple[int, ...],
        options: RematOptions,
    ) -> None:
        functools.update_wrapper(self, fun)  # first: attributes of `fun` give way to its own
        self._fun, self._args, self._kwargs = unbind(fun)
        self._static = static_argnums
        self._options = options
        self.__wrapped__ = fun

    def __get__(self, instance: tp.Any, owner: tp.Any = None) -> tp.Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"remat({name_of(self._fun)})"

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        hidden: Hidden = ()
        if self._static:
            wanted = max(self._static) + 1
            bound = Unbound(self._fun, self._args, self._kwargs)
            args, kwargs = by_position(self._fun, args, kwargs, bound, wanted)
            args, hidden = hide(args, self._static, len(self._args), repr(self))
        inputs = Inputs.of_call((*self._args, *args), {**self._kwargs, **kwargs})
        if not resolve_mode(self._options.graph):
            inputs.as_trees("remat")
        call = inputs.define(CallKey(traced_context(), hidden))
        core = core_for(Remat, (self._fun,), self._options)
        with naming_arguments(repr(self), inputs, ", or make it static with static_argnums"):
            crossing = core.run(call, inputs.plain, inputs.values)
        return replay_crossing(inputs, crossing)


def remat(
    f: tp.Any = MISSING,
    *,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: Policy | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """A function that remembers little for its gradient, and computes the rest again.

    Value, gradient, and what the function leaves in its arguments are those of the function itself.

    Args:
        f: the function; without it the result is a decorator.
        prevent_cse: as in `jax.checkpoint`; False is safe, and faster, in the body of a `scan`.
        static_argnums: arguments that JAX never sees, such as flags.
        policy: which intermediate values to remember, one of `jax.checkpoint_policies`.
        graph: False refuses shared references.
        graph_updates: False propagates values of Variables only, not structure.

    Raises:
        ValueError: for a number in `static_argnums` that the call has no argument for.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> loss = lambda m, x: jnp.sin(m(x)).sum()
    >>> one = nnx.grad(loss)(model, jnp.ones((1, 2)))
    >>> two = nnx.grad(nnx.remat(loss))(model, jnp.ones((1, 2)))
    >>> bool((one["kernel"].value == two["kernel"].value).all())
    True
    """
    if isinstance(static_argnums, int):
        static_argnums = (static_argnums,)
    options = RematOptions(prevent_cse, policy, *bind_modes(graph, graph_updates))
    if f is MISSING:
        return lambda fun: RematWrapped(fun, tuple(static_argnums), options)
    return RematWrapped(f, tuple(static_argnums), options)
