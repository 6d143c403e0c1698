"""Programs with other forms of calls of the transforms, in both libraries."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.parity.programs import Programs, attempt, compare, models

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

program = Programs()


@program("updates", "plain")
def functions_that_are_methods_and_partials(lib, mode):
    m = models(lib).Vector()
    cls = models(lib).Vector
    return [
        lib.jit(cls.__call__, **mode)(m, 1.0),
        lib.vmap(cls.__call__, in_axes=(None, 0), **mode)(m, jnp.ones(3)),
        lib.remat(cls.__call__, **mode)(m, 1.0),
        lib.cond(True, cls.__call__, lambda m, x: m.w * x, m, 1.0, **mode),
        lib.checkify(cls.__call__, **mode)(m, 1.0)[1],
        lib.jit(functools.partial(lambda k, m: m(k), 2.0), **mode)(m),
        lib.scan(functools.partial(lambda k, c, x: (c + k, x), 2.0), **mode)(0.0, jnp.ones(2)),
        lib.eval_shape(cls.__call__, m, 1.0, **mode),
        m,
    ]


@program("updates", "plain", "tree")
def arguments_by_name(lib, mode):
    m = models(lib).Counted()
    step = lambda i, m: (m(1.0), m)[1]
    return [
        lib.fori_loop(lower=0, upper=2, body_fun=step, init_val=m, **mode).c,
        lib.while_loop(
            cond_fun=lambda m: m.c[...] < 4, body_fun=lambda m: step(0, m), init_val=m, **mode
        ).c,
        attempt(lambda: lib.cond(pred=True, true_fun=lambda: 1.0, false_fun=lambda: 2.0, **mode)),
        attempt(lambda: lib.switch(index=0, branches=[lambda: 1.0, lambda: 2.0], **mode)),
        lib.jit(fun=lambda m: m.w * 1, **mode)(m),
        lib.vmap(f=lambda x: x * 2, **mode)(jnp.ones(2)),
        lib.scan(f=lambda c, x: (c + x, c), **mode)(0.0, jnp.ones(2)),
        lib.remat(f=lambda m: m.w * 1, **mode)(m),
        m,
    ]


@program("plain", "tree")
def choosers_that_are_variables(lib, mode):
    m = models(lib).Counted()
    flag, index = lib.Variable(jnp.array(True)), lib.Variable(jnp.array(1))
    return [
        lib.cond(flag, lambda m: m(1.0), lambda m: m.w * 3, m, **mode),
        lib.switch(index, [lambda m: m.w * 2, lambda m: m.w * 3], m, **mode),
        lib.fori_loop(0, index[...], lambda i, x: x + i, 1, **mode),
        lib.while_loop(lambda v: v[...] < 3, bump, index, **mode),
        index,
    ]


def bump(v):
    v[...] += 1
    return v


@program("updates", "plain")
def axes_in_other_containers(lib, mode):
    m = models(lib).Vector()
    f = lambda m, d: m.w * d["a"] + d["b"][0]
    d = {"a": jnp.ones(4), "b": [jnp.ones((3, 4))]}
    return [
        attempt(lambda: lib.vmap(f, in_axes=(None, {"a": 0, "b": [1]}), **mode)(m, d)),
        attempt(lambda: lib.vmap(f, in_axes=(None, {"a": 0}), **mode)(m, d)),
        attempt(
            lambda: lib.vmap(lambda x: {"a": x, "b": (x, x)}, out_axes={"a": 0, "b": 0}, **mode)(
                jnp.ones(2)
            )
        ),
        attempt(lambda: lib.vmap(lambda x: (x, 1.0), out_axes=(0, None), **mode)(jnp.ones(2))),
        attempt(lambda: lib.vmap(lambda x: x, in_axes=-1, out_axes=-1, **mode)(jnp.ones((2, 3)))),
        attempt(lambda: lib.vmap(lambda: 1.0, axis_size=2, **mode)()),
        attempt(lambda: lib.vmap(lambda x, *xs: x + sum(xs), **mode)(*[jnp.ones(2)] * 3)),
        attempt(lambda: lib.vmap(lambda x: None, **mode)(jnp.ones(2))),
    ]


@program("updates", "plain")
def axes_of_scan_in_other_containers(lib, mode):
    c = lib.Carry
    step = lambda c, x: (c + x["a"], x["b"])
    x = {"a": jnp.arange(3.0), "b": jnp.ones((2, 3))}
    return [
        attempt(lambda: lib.scan(step, in_axes=(c, {"a": 0, "b": 1}), **mode)(0.0, x)),
        attempt(
            lambda: lib.scan(step, in_axes=(c, {"a": 0, "b": -1}), out_axes=(c, -1), **mode)(0.0, x)
        ),
        attempt(lambda: lib.scan(lambda x: x * 2, in_axes=0, out_axes=0, **mode)(jnp.ones(2))),
        attempt(lambda: lib.scan(lambda x: x * 2, in_axes=(0,), out_axes=0, **mode)(jnp.ones(2))),
        attempt(
            lambda: lib.scan(
                lambda a, x, b: (x + a, {"y": b}),
                in_axes=(None, c, 0),
                out_axes=(c, {"y": 0}),
                **mode,
            )(1.0, 0.0, jnp.ones(2))
        ),
        attempt(lambda: lib.scan(lambda c, x: (c, x), **mode)(0.0, None)),
        attempt(lambda: lib.scan(lambda c, x: (c + 1, 1.0), length=2, **mode)(0.0, None)),
        attempt(lambda: lib.scan(lambda c, x: (c + 1, x), **mode)(0.0, jnp.ones(0))),
    ]


@program("updates", "plain")
def references_written_from_inside(lib, mode):
    v = lib.Variable(jnp.array(0.0), ref=True)

    def f(x):
        v[...] += 1
        return x * 2

    return [
        lib.jit(f, **mode)(1.0),
        lib.grad(f, **mode)(1.0),
        lib.remat(f, **mode)(1.0),
        lib.scan(lambda c, x: (f(c), x), **mode)(1.0, jnp.arange(3.0)),
        lib.fori_loop(0, 3, lambda i, x: f(x), 1.0, **mode),
        lib.cond(True, f, lambda x: x, 1.0, **mode),
        jax.lax.fori_loop(0, 3, lambda i, x: f(x), 1.0),
        jax.jit(lambda x: v.set_value(v[...] + x))(5.0),
        v[...],
    ]


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
