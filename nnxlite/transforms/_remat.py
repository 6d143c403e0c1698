"""`remat`: compute again in the backward pass instead of keeping intermediate values.

JAX's caches for the functions that it is given work here, too, where that is safe: a function that
captures only constants has one core, whose trace is reused; one that captures objects is traced each
time.
"""

from __future__ import annotations

import typing as tp

import jax

from nnxlite._config import Modes
from nnxlite._integers import as_integers
from nnxlite._jax import without_literals
from nnxlite._typing import RematPolicy
from nnxlite.boundary import CallDef, Crossing, describe
from nnxlite.closures import Surroundings
from nnxlite.transforms._arguments import positional_with_defaults, traced_context
from nnxlite.transforms._call import Call, Traceable
from nnxlite.transforms._core import Core, core_for
from nnxlite.transforms._wrapper import Decorator, P, R, Transformed, decorated
from nnxlite.variables import MISSING

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import RematKeywords


class RematOptions(tp.NamedTuple):
    """The options of `remat`, in one object."""

    name: str
    static_argnums: tuple[int, ...]
    prevent_cse: bool
    policy: RematPolicy | None
    modes: Modes


class Remat(Core):
    """The compiled side of a function under `remat`."""

    def _make_jitted(self, fun: tp.Callable[..., tp.Any]) -> None:
        self._stable = self._checkpointed()

    def _checkpointed(self) -> tp.Callable[..., tp.Any]:
        """JAX's transform of a new function, which it has not traced yet."""
        options: RematOptions = self.options
        body = describe(self._body, self.fun, "remat")
        return jax.checkpoint(
            body,
            prevent_cse=options.prevent_cse,
            policy=options.policy,
            static_argnums=(0, 1),
        )

    def _body(self, seen: Surroundings | None, call: CallDef, leaves: list[tp.Any]) -> Crossing:
        captured = self.options.modes.updates
        traceable = Traceable(self.fun, call, self.options, call.extra.statics, captured)
        return traceable.run_out(leaves)

    def run(self, call: CallDef, leaves: list[tp.Any]) -> Crossing:
        """Apply the transform to the leaves of a call."""
        seen = self.constants(call, call.by_side(leaves)[1])
        if seen is not None:
            return self._stable(seen, call, leaves)
        return self._checkpointed()(None, call, leaves)


class RematWrapped(Transformed[..., tp.Any]):
    """A function under `remat`."""

    options: RematOptions

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        bound, options = self.bound, self.options
        if numbers := options.static_argnums:
            wanted = max(numbers) + 1
            args, kwargs = positional_with_defaults(bound.fun, args, kwargs, bound, wanted)
        context = traced_context()
        call = Call.under(options, bound, args, kwargs, static_argnums=numbers, context=context)
        core = core_for(Remat, (bound.fun,), options)
        with call.naming_arguments(", or make it static with static_argnums"):
            crossing = core.run(call.definition, call.leaves)
        return call.put_back(without_literals(crossing))


@tp.overload
def remat(f: tp.Callable[P, R], **options: tp.Unpack[RematKeywords]) -> Transformed[P, R]: ...
@tp.overload
def remat(**options: tp.Unpack[RematKeywords]) -> Decorator: ...
def remat(
    f: tp.Any = MISSING,
    *,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: RematPolicy | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """A function that keeps few intermediate values for its gradient, and computes the rest again.

    Its value, its gradient and its effects on the arguments are those of the function itself.

    Args:
        f: the function; without it the result is a decorator.
        prevent_cse: as in `jax.checkpoint`; False is safe, and faster, in the body of a `scan`.
        static_argnums: arguments that JAX never sees, such as flags.
        policy: which intermediate values to keep, one of `jax.checkpoint_policies`.
        graph: False refuses shared references.
        graph_updates: False propagates values of Variables only, not structure.

    Returns:
        A function of the same arguments.

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
    modes = Modes.of(graph, graph_updates)
    options = RematOptions("remat", as_integers(static_argnums), prevent_cse, policy, modes)
    return decorated(RematWrapped, f, options)
