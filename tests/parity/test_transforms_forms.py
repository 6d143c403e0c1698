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


@program("updates", "plain")
def captured_objects_that_are_read(lib, mode):
    m = models(lib).Vector()
    xs = jnp.ones(2)
    return [
        lib.jit(lambda x: m.w * x, **mode)(2.0),
        lib.vmap(lambda x: m.w * x, **mode)(xs),
        lib.grad(lambda x: m.w.sum() * x, **mode)(2.0),
        lib.scan(lambda c, x: (c + 1, m.w * x), **mode)(0.0, xs),
        lib.fori_loop(0, 2, lambda i, x: x * m.w, jnp.ones(3), **mode),
        lib.while_loop(lambda x: x.sum() < m.w.sum(), lambda x: x * m.w, jnp.ones(3), **mode),
        lib.eval_shape(lambda x: m.w * x, 1.0, **mode),
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
def stacks_of_transforms(lib, mode):
    m = models(lib).Vector()
    loss = lambda m, x: (m.w * x).sum() ** 2
    a = lib.jit(lib.vmap(lib.grad(loss, **mode), in_axes=(None, 0), **mode), **mode)
    b = lib.grad(lambda m: lib.vmap(loss, in_axes=(None, 0), **mode)(m, jnp.arange(2.0)).sum())
    c = lib.vmap(lib.jit(loss, **mode), in_axes=(None, 0), **mode)
    slope = lambda x: lambda m: lib.grad(loss)(m, x)
    d = lib.jit(lambda m: lib.cond(True, slope(1.0), slope(2.0), m))
    e = jax.jit(lambda s: lib.grad(loss)(lib.merge(lib.graphdef(m), s), 1.0))
    f = lib.vmap(lambda x: lib.fori_loop(0, 2, lambda i, y: y * x, 1.0, **mode), **mode)
    g = jax.vmap(lambda x: lib.scan(lambda c, y: (c + x * y, c), **mode)(0.0, jnp.ones(2)))
    xs = jnp.arange(2.0)
    return a(m, xs), b(m), c(m, xs), d(m), e(lib.state(m)), f(xs), g(xs), m


@program("updates")
def generators_and_exceptions_between(lib, mode):
    m = models(lib).Counted()

    @lib.jit
    def f(m):
        def steps():
            for i in range(3):
                yield m(float(i))

        total = sum(steps())
        try:
            lib.vmap(lambda x: 1 / 0)(jnp.ones(2))
        except ZeroDivisionError:
            total = total * 2
        return total

    return f(m), m


@program("updates")
def recursion_through_jit(lib, mode):
    first = models(lib).Cell(1.0)
    first.next = models(lib).Cell(2.0)
    first.next.next = models(lib).Cell(3.0)

    @lib.jit
    def total(cell):
        cell.value[...] += 1
        rest = total(cell.next) if cell.next is not None else 0.0
        return cell.value * 2 + rest

    return total(first), first


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


@program("updates", "plain")
def rnn_inside(lib, mode):
    rnn = lib.RNN(lib.GRUCell(2, 3, rngs=lib.Rngs(0)), return_carry=True)
    x = jnp.ones((2, 4, 2))
    carry, y = lib.jit(lambda rnn, x: rnn(x), **mode)(rnn, x)
    grads = lib.grad(lambda rnn: rnn(x)[1].sum())(rnn)
    return (
        carry,
        y,
        grads,
        attempt(
            lambda: lib.vmap(lambda rnn, x: rnn(x)[1], in_axes=(None, 0), **mode)(rnn, x[:, None])
        ),
    )


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
