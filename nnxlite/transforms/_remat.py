"""`remat`: compute again in the backward pass instead of keeping intermediate values."""

from __future__ import annotations

import typing as tp

import jax
from jax.tree_util import tree_leaves

from nnxlite._base.config import Modes
from nnxlite._base.jax import EAGER, as_integers, is_compiling, trace_state, without_literals
from nnxlite._base.typing import RematPolicy
from nnxlite.boundary._body import Body
from nnxlite.boundary._operands import describe
from nnxlite.boundary._out import Fixed, Outputs
from nnxlite.transforms._arguments import STATIC, positional
from nnxlite.transforms._call import Call
from nnxlite.transforms._programs import run_bodies
from nnxlite.transforms._wrapper import Decorator, Options, P, R, Transform, decorated
from nnxlite.variables._definition import MISSING

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import RematKeywords


def _remat(rematted: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    bound, options = rematted.bound, rematted.options
    if numbers := options.static_argnums:
        wanted = max(numbers) + 1
        args, kwargs = positional(bound.fun, args, kwargs, wanted, bound, True)
    updates = options.modes.updates
    call = Call.under(options, bound, args, kwargs, static_argnums=numbers, captured=updates)
    # A new function in each call: JAX's caches keep what they are keyed by, and with it all that
    # the user's function captured.
    run = describe(call.run_out, bound.fun, "remat")
    checkpointed: tp.Any = jax.checkpoint(
        run, prevent_cse=options.prevent_cse, policy=options.policy
    )
    with call.naming_arguments(STATIC):
        if trace_state.value is EAGER and is_compiling():
            return call.put_back(_run_eagerly(checkpointed, call.leaves))
        return call.put_back(without_literals(checkpointed(call.leaves)))


def _run_eagerly(run: tp.Callable[..., Outputs], leaves: list[tp.Any]) -> Outputs:
    """Run a function that nothing differentiates, as a compiled program."""
    closed, out = jax.make_jaxpr(run, return_shape=True)(leaves)
    body = Body(closed, (Fixed(None), out))
    return body.outputs(run_bodies(_once, "remat", [body], tree_leaves(leaves)))


def _once(
    settings: str, funs: list[tp.Callable[..., list[tp.Any]]], inputs: list[tp.Any]
) -> list[tp.Any]:
    return funs[0](*inputs)


@tp.overload
def remat(f: tp.Callable[P, R], **options: tp.Unpack[RematKeywords]) -> Transform[P, R]: ...
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
    options = Options.of(
        "remat",
        Modes.of(graph, graph_updates),
        _remat,
        static_argnums=as_integers(static_argnums),
        prevent_cse=prevent_cse,
        policy=policy,
    )
    return decorated(Transform, f, options)
