"""Transforms outside `jit`, from the second call on, and inside it; one layer called eagerly.

Each call makes the transformed function anew, as programs do; the function under it stays the same.
"""

from __future__ import annotations

import functools
import typing as tp
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.experimental.checkify
import jax.numpy as jnp
from jax import lax

from benchmarks.harness import Budget, Calls, Sampler, case
from benchmarks.models import WIDTH, dense_chain, dense_forward, dense_leaves, library

LIMIT = Budget(1.3, "limit")  # outside `jit`; inside, a transform costs what it does in JAX
TRACED = Budget(2.5, "limit"), Budget(0.15, "flax")  # what is traced in each call
STEPS = 5
X = jnp.ones(WIDTH)
XS = jnp.ones((STEPS, WIDTH))
PRED = jnp.array(True)
NUMBER = jnp.array(0)
ONE = jnp.array(1.0)
AUTO = (jax.sharding.AxisType.Auto,)

Leaves = list[jax.Array]


@dataclass(frozen=True)
class Work:
    """The same work written twice.

    `limit` takes the flat leaves of a chain of dense layers and returns what does the work: JAX's own
    transform of functions that stay the same. `objects` takes a library and its chain. `bodies` are the
    functions that a loop or branch traces in each eager call, with their arguments after the leaves:
    tracing these once is its limit then.
    """

    name: str
    limit: Callable[[Leaves], Callable[[], tp.Any]]
    objects: Callable[[tp.Any, tp.Any], tp.Any]
    bodies: tuple[tuple[Callable[..., tp.Any], tuple[tp.Any, ...]], ...] = ()


# The functions that are transformed ---------------------------------------------------------------


def call(model, x):
    """The model's output."""
    return model(x)


def loss(model, x):
    """A scalar of it."""
    return jnp.sum(model(x) ** 2)


def scan_body(model, carry, x):
    """One step of a recurrence through the model."""
    carry = model(carry + x)
    return carry, carry


def loop_test(state):
    """Whether to go on."""
    return state[2] < STEPS


def loop_body(state):
    """One step of a recurrence without inputs."""
    model, x, number = state
    return model, model(x), number + 1


def fori_body(number, state):
    """The same step, counted by the loop."""
    model, x = state
    return model, model(x)


def flat_fori_body(number, state):
    """`fori_body` without objects."""
    leaves, x = state
    return leaves, dense_forward(leaves, x)


def keep(model, x):
    """The other branch."""
    return x


def flat_loss(leaves, x):
    """`loss` without objects."""
    return jnp.sum(dense_forward(leaves, x) ** 2)


def flat_keep(leaves, x):
    """`keep` without objects."""
    return x


def flat_loop_test(leaves, x, number):
    """`loop_test` without objects."""
    return number < STEPS


def flat_loop_body(state):
    """`loop_body` without objects."""
    leaves, x, number = state
    return leaves, dense_forward(leaves, x), number + 1


def scan(nnx, model):
    """The model broadcast, five steps."""
    axes = {"in_axes": (None, nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}
    return nnx.scan(scan_body, **axes)(model, X, XS)


def flat_scan(leaves):
    """The leaves are constants of the loop."""

    def body(carry, x):
        carry = dense_forward(leaves, carry + x)
        return carry, carry

    return lambda: jax.lax.scan(body, X, XS)


def while_loop(nnx, model):
    """The model in the carry, five steps."""
    return nnx.while_loop(loop_test, loop_body, (model, X, NUMBER))[1]


def through_forward(model, x):
    """`loss`, and what its rule needs."""
    return loss(model, x), (model, x)


def flat_through_forward(leaves, x):
    """`through_forward` without objects."""
    return flat_loss(leaves, x), (leaves, x)


def through_backward(kept, cotangent):
    """A rule that passes the cotangent on to the input, and nothing to the model or its leaves."""
    model, x = kept
    return jax.tree.map(jnp.zeros_like, model), cotangent * x


@functools.cache
def through(nnx):
    """`loss` with that rule; `nnx` may be JAX itself."""
    if nnx is jax:
        fun = jax.custom_vjp(flat_loss)
        fun.defvjp(flat_through_forward, through_backward)
    else:
        fun = nnx.custom_vjp(loss, graph_updates=False)
        fun.defvjp(through_forward, through_backward)
    return fun


def on_rows(transform, function):
    """`shard_map` over one device: the leaves whole, the rows of the input dealt out."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=AUTO, devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec
    return transform(function, mesh=mesh, in_specs=(spec(), spec("rows")), out_specs=spec("rows"))


def checked(nnx, model):
    """The error it may have met is thrown."""
    error, y = nnx.checkify(checked_call)(model, X)
    error.throw()
    return y


def checked_call(model, x):
    """`call` where the input must be positive."""
    jax.experimental.checkify.check(jnp.all(x > 0), "input is not positive")
    return model(x)


def flat_checked(leaves):
    """`checked` without objects."""

    def run():
        error, y = jax.experimental.checkify.checkify(flat_checked_call)(leaves, X)
        error.throw()
        return y

    return run


def flat_checked_call(leaves, x):
    """`checked_call` without objects."""
    jax.experimental.checkify.check(jnp.all(x > 0), "input is not positive")
    return dense_forward(leaves, x)


WORKS = (
    Work(
        "grad",
        lambda leaves: lambda: jax.grad(flat_loss)(leaves, X),
        lambda nnx, model: nnx.grad(loss)(model, X),
    ),
    Work(
        "vmap, the model broadcast",
        lambda leaves: lambda: jax.vmap(dense_forward, in_axes=(None, 0))(leaves, XS),
        lambda nnx, model: nnx.vmap(call, in_axes=(None, 0))(model, XS),
    ),
    Work("scan, the model broadcast", flat_scan, scan, ((dense_forward, (X,)),)),
    Work(
        "cond",
        lambda leaves: lambda: jax.lax.cond(PRED, dense_forward, flat_keep, leaves, X),
        lambda nnx, model: nnx.cond(PRED, call, keep, model, X),
        ((dense_forward, (X,)), (flat_keep, (X,))),
    ),
    Work(
        "while_loop",
        lambda leaves: (
            lambda: jax.lax.while_loop(loop_test, flat_loop_body, (leaves, X, NUMBER))[1]
        ),
        while_loop,
        ((dense_forward, (X,)), (flat_loop_test, (X, NUMBER))),
    ),
    Work(
        "switch",
        lambda leaves: (
            lambda: jax.lax.switch(NUMBER, (dense_forward, flat_keep, flat_keep), leaves, X)
        ),
        lambda nnx, model: nnx.switch(NUMBER, (call, keep, keep), model, X),
        ((dense_forward, (X,)), (flat_keep, (X,)), (flat_keep, (X,))),
    ),
    Work(
        "fori_loop",
        lambda leaves: lambda: jax.lax.fori_loop(0, STEPS, flat_fori_body, (leaves, X))[1],
        lambda nnx, model: nnx.fori_loop(0, STEPS, fori_body, (model, X))[1],
        ((dense_forward, (X,)),),
    ),
    Work(
        "vjp",
        lambda leaves: lambda: jax.vjp(flat_loss, leaves, X)[1](ONE)[1],
        lambda nnx, model: nnx.vjp(loss, model, X)[1](ONE)[1],
    ),
    Work(
        "jvp",
        lambda leaves: lambda: jax.jvp(lambda x: flat_loss(leaves, x), (X,), (X,))[1],
        lambda nnx, model: nnx.jvp(lambda x: loss(model, x), (X,), (X,))[1],
    ),
    Work(
        "remat",
        lambda leaves: lambda: jax.checkpoint(dense_forward)(leaves, X),
        lambda nnx, model: nnx.remat(call)(model, X),
        ((dense_forward, (X,)),),
    ),
    Work(
        "custom_vjp",
        lambda leaves: lambda: jax.grad(through(jax), argnums=1)(leaves, X),
        lambda nnx, model: nnx.grad(through(nnx), argnums=1)(model, X),
    ),
)
OUTSIDE = (
    Work(
        "pmap, one device",
        lambda leaves: lambda: jax.pmap(dense_forward, in_axes=(None, 0))(leaves, XS[:1]),
        lambda nnx, model: nnx.pmap(call, in_axes=(None, 0))(model, XS[:1]),
    ),
    Work("checkify", flat_checked, checked),
)
INSIDE = (
    Work(
        "shard_map",
        lambda leaves: lambda: on_rows(jax.shard_map, dense_forward)(leaves, XS),
        lambda nnx, model: on_rows(nnx.shard_map, call)(model, XS),
    ),
)


# Outside jit, and inside --------------------------------------------------------------------------


def waiting(run: Callable[[], tp.Any]) -> Sampler:
    """Wait for all that is computed."""
    return Calls(lambda: jax.block_until_ready(run()))


def eager_limit(work: Work) -> Sampler:
    """JAX's own transform, called again and again, or the traces of its bodies, as new functions."""
    leaves = dense_leaves()
    if not work.bodies:
        return waiting(work.limit(leaves))

    def trace():
        for body, arguments in work.bodies:
            jax.make_jaxpr(lambda *args, body=body: body(*args))(leaves, *arguments)

    return Calls(trace)


def eager_objects(work: Work, name: str) -> Sampler:
    """A library's transform; a gradient's State is waited for like any pytree."""
    nnx = library(name)
    model = dense_chain(nnx)
    return waiting(lambda: work.objects(nnx, model))


def jitted_limit(work: Work) -> Sampler:
    """The compiled work on a flat list of leaves."""
    leaves, step = dense_leaves(), jax.jit(lambda leaves: work.limit(leaves)())
    return waiting(lambda: step(leaves))


def jitted_objects(work: Work, name: str) -> Sampler:
    """The compiled work on the model."""
    nnx = library(name)
    model = dense_chain(nnx)
    step = nnx.jit(lambda model: work.objects(nnx, model))
    return waiting(lambda: step(model))


def register(bench: str, work: Work, limit: tp.Any, objects: tp.Any, *budgets: Budget) -> None:
    """A case for one work, outside `jit` or inside."""

    @case(bench, work.name, *budgets)
    def contenders():
        return {
            "limit": lambda: limit(work),
            "nnxlite": lambda: objects(work, "nnxlite"),
            "flax": lambda: objects(work, "flax"),
        }


for each in WORKS + OUTSIDE:
    register("eager", each, eager_limit, eager_objects, *(TRACED if each.bodies else (LIMIT,)))
for each in WORKS + INSIDE:
    register("jitted", each, jitted_limit, jitted_objects)


@case("eager", f"Linear({WIDTH}, {WIDTH})(x)", LIMIT)
def layer():
    """The limit is the same sequence of JAX calls: layers have no compiled functions inside."""

    def limit():
        kernel, bias = dense_leaves(1)
        numbers = (((XS.ndim - 1,), (0,)), ((), ()))
        shape = (1,) * (XS.ndim - 1) + bias.shape
        return waiting(lambda: lax.dot_general(XS, kernel, numbers) + lax.reshape(bias, shape))

    def build(name: str):
        nnx = library(name)
        linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        return waiting(lambda: linear(XS))

    return {
        "limit": limit,
        "nnxlite": lambda: build("nnxlite"),
        "flax": lambda: build("flax"),
    }
