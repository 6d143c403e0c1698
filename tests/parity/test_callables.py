"""Programs with unusual callables: what they return of their closure, what their wrappers carry."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.parity.programs import ALL_MODES, Programs, attempt, compare, models

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

program = Programs()
X = jnp.ones(2)
P = jax.sharding.PartitionSpec()


# Captured objects that are returned ----------------------------------------------------------------


def captured_in(name, run, *modes):
    """Collect a program that runs a transform on functions that return what they have captured."""

    def returns(lib, mode, pick):
        m = models(lib).Counted()
        held = {"module": m, "variable": m.w, "inside": [m, jnp.float32(1.0)], "new": lib.List([m])}
        found = attempt(lambda: run(lib, lambda *_: held[pick], mode))
        same = any(
            x is m or x is m.w for x in jax.tree.leaves(found, is_leaf=lambda x: x is not found)
        )
        return found, same, m

    for pick, chosen in {
        "module": modes,
        "variable": modes[:1],
        "inside": modes[1:2],
        "new": modes[2:3],
    }.items():
        fun = functools.partial(returns, pick=pick)
        fun.__name__ = f"captured_{pick}_in_{name}"
        program(*chosen)(fun)


captured_in("cond", lambda lib, f, mode: lib.cond(True, f, f, X, **mode), *ALL_MODES)
captured_in("cond_of_nothing", lambda lib, f, mode: lib.cond(False, f, f, **mode), *ALL_MODES)
captured_in("switch", lambda lib, f, mode: lib.switch(1, [f, f], X, **mode), *ALL_MODES)
captured_in("eval_shape", lambda lib, f, mode: lib.eval_shape(f, X, **mode), *ALL_MODES)
captured_in("remat", lambda lib, f, mode: lib.remat(f, **mode)(X), *ALL_MODES)
captured_in("checkify", lambda lib, f, mode: lib.checkify(f, **mode)(X)[1], *ALL_MODES)
captured_in("jit", lambda lib, f, mode: lib.jit(f, **mode)(X), *ALL_MODES)
captured_in("vmap", lambda lib, f, mode: lib.vmap(f, **mode)(X), *ALL_MODES)
captured_in(
    "grad",
    lambda lib, f, mode: lib.grad(lambda x: (x.sum(), f()), has_aux=True, **mode)(X),
    *ALL_MODES,
)
captured_in("scan", lambda lib, f, mode: lib.scan(lambda c, x: (c, f()), **mode)(X, X), *ALL_MODES)


@program()
def captured_objects_that_differ_by_branch(lib):
    make = models(lib).Counted
    a, b = make(1.0), make(2.0)
    return [lib.cond(flag, lambda: a, lambda: b) for flag in (True, False)]


@program()
def a_captured_object_in_one_branch_and_an_operand_in_the_other(lib):
    m = models(lib).Counted()
    return attempt(lambda: lib.cond(True, lambda _: m, lambda m: m, m))


@program()
def a_captured_object_of_the_enclosing_jit(lib):
    m = models(lib).Counted()
    out = lib.jit(lambda m: lib.cond(m.w[...] > 0, lambda: m, lambda: m))(m)
    return out, out is m


# What wrappers carry ------------------------------------------------------------------------------

CARRYING = {
    "jit": lambda lib, f: lib.jit(f),
    "jit_tree": lambda lib, f: lib.jit(f, graph=False),
    "vmap": lambda lib, f: lib.vmap(f),
    "pmap": lambda lib, f: lib.pmap(f),
    "scan": lambda lib, f: lib.scan(f),
    "remat": lambda lib, f: lib.remat(f),
    "checkify": lambda lib, f: lib.checkify(f),
    "make_jaxpr": lambda lib, f: lib.make_jaxpr(f, graph_updates=False),
    "jit_partial": lambda lib, f: lib.jit_partial(f, X, graph=False),
    "cached_partial": lambda lib, f: lib.cached_partial(lib.jit(f), X),
    "cached_partial_of_a_function": lambda lib, f: lib.cached_partial(f, X),
    "split_rngs": lambda lib, f: lib.split_rngs(splits=2)(f),
    "shard_map": lambda lib, f: lib.shard_map(
        f, mesh=jax.make_mesh((1,), ("a",)), in_specs=P, out_specs=P
    ),
}


class Callable:
    """Its documentation."""

    def __init__(self):
        self.note = "text"

    def __call__(self, x):
        return x


def carries(lib, wrap):
    def fun(x):
        """Its documentation."""
        return x

    fun.note = "text"
    model = models(lib).Counted()
    model.note = "text"
    wrapped = wrap(lib, fun)
    names = wrapped.__name__, wrapped.__qualname__, wrapped.__module__, wrapped.__doc__
    return [wrap(lib, f).note for f in (fun, model, Callable())], names


for name, wrap in CARRYING.items():
    run = functools.partial(carries, wrap=wrap)
    run.__name__ = f"{name}_carries_attributes"
    program()(run)


@program()
def the_jitted_function_and_its_cache(lib):
    def f(m, x):
        return m(x)

    m = models(lib).Counted()
    jitted = lib.jit(f)
    partial = lib.cached_partial(jitted, m)
    decorated = functools.wraps(jitted)(lambda *args: jitted(*args))
    mapped = lib.vmap(jitted, in_axes=(None, 0))
    sizes = [jitted.jitted_fn._cache_size()]
    for call in (lambda: jitted(m, X), lambda: jitted(m, X), lambda: jitted(m, X[:1])):
        call()
        sizes.append(jitted.jitted_fn._cache_size())
    same = [g.jitted_fn is jitted.jitted_fn for g in (partial, decorated, mapped)]
    has = hasattr(functools.partial(jitted, m), "jitted_fn")
    jitted.jitted_fn.clear_cache()
    return sizes, same, has, jitted.jitted_fn._cache_size(), jitted.fun is f, partial.fun is f


@program("tree", "plain")
def a_compiled_partial(lib, mode):
    m, other = models(lib).Counted(), models(lib).Vector()
    partial = lib.jit_partial(lambda m, x: m(x), m, **mode)
    compiled = partial.lower(X).compile()
    traced = partial.trace(X).lower().compile()
    wrong = [
        attempt(functools.partial(compiled, *args)) for args in ((other, X), (X, X), (X[:1],), ())
    ]
    return compiled(X), traced(X), compiled(2 * X), wrong, m, partial.eval_shape(X)


@program("tree", "plain")
def numbers_count_the_arguments_of_a_partial_as_one(lib, mode):
    m = models(lib).Counted()
    out = []
    for given in ((m,), (m, X)):
        partial = lib.jit_partial(
            lambda m, *args: m(args[0] * args[-2]) + args[-1], *given, static_argnums=1, **mode
        )
        compiled = partial.lower(3, X).compile()
        out += [partial(2, X), compiled(X), m]
    donated = [X + i for i in range(4)]
    lib.jit_partial(lambda *xs: [x + 1 for x in xs], *donated[:2], donate_argnums=(0, 2), **mode)(
        *donated[2:]
    )
    return out, [x.is_deleted() for x in donated]


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
