"""Derivatives where one Variable has several places, and of what a custom rule's function writes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.parity.programs import PLAIN, PLAIN_MODES, Programs, compare, models

pytestmark = pytest.mark.filterwarnings("ignore")

program = Programs()
in_plain_modes = program(*PLAIN_MODES)


def places(lib, x):
    """The leaves of a tree of Variables, with what is one Variable in two places."""
    leaves = jax.tree.leaves(x, is_leaf=lambda v: isinstance(v, lib.Variable))
    return [next(i for i, other in enumerate(leaves) if other is leaf) for leaf in leaves]


def product(d):
    a, b = jax.tree.leaves(d, is_leaf=lambda v: hasattr(v, "get_metadata"))
    return a[...] * b[...] * 3


def shared(lib):
    return lib.Param(jnp.asarray(2.0))


@program("updates", "plain")
def a_variable_twice_in_a_container(lib, mode):
    p = shared(lib)
    trees = {"a": p, "b": p}, [p, p], (p, p), {"x": [p], "y": {"z": p}}
    found = [lib.grad(product, **mode)(tree) for tree in trees]
    norms = [optax.global_norm(grads) for grads in found]
    return found, [places(lib, grads) for grads in found], norms, p


@program("updates", "plain")
def a_variable_as_two_arguments(lib, mode):
    p = shared(lib)
    grads = lib.value_and_grad(lambda a, b: a[...] * b[...] * 3, argnums=(0, 1), **mode)(p, p)
    return grads, places(lib, grads)


@program()
def a_variable_as_two_arguments_in_another_order(lib):
    p = shared(lib)
    loss = lambda x, a, b: x * a[...] * b[...] * 3
    return [lib.grad(loss, argnums=order)(1.0, p, p) for order in [(1, 2), (2, 1), (-1, -2, 0)]]


@program("updates", "plain")
def a_variable_in_a_module_and_beside_it(lib, mode):
    m = models(lib).Counted()
    before = lib.grad(lambda d: d["a"][...] * d["m"].w[...], **mode)({"a": m.w, "m": m})
    after = lib.grad(lambda d: d["z"][...] * d["m"].w[...], **mode)({"m": m, "z": m.w})
    return before, after, places(lib, before), places(lib, after)


@program()
def a_diff_state_over_a_container(lib):
    p, stat = shared(lib), lib.BatchStat(jnp.asarray(3.0))
    only = lib.DiffState(0, lib.Param)
    m = models(lib).Counted()
    loss = lambda d: d["a"][...] * d["b"][...] * d["c"][...]
    grads = lib.grad(loss, argnums=only)({"a": p, "b": p, "c": stat})
    return grads, lib.grad(lambda ms: ms[0].w * ms[1].w, argnums=only)([m, m])


@program("updates", "plain")
def a_state_with_a_shared_variable(lib, mode):
    p = shared(lib)
    return lib.grad(lambda s: s["a"] * s["b"]["c"], **mode)(lib.State({"a": p, "b": {"c": p}}))


@program()
def a_custom_rule_over_a_shared_variable(lib):
    seen = []

    @lib.custom_vjp
    def f(a, b):
        return product([a, b["x"]])

    def bwd(residual, g):
        seen.append(g)
        return jax.tree.map(lambda x: x + 7.0, g[0])

    f.defvjp(lambda a, b: (f(a, b), None), bwd)
    p = shared(lib)
    return lib.grad(lambda d: f(d["a"], d))({"a": p, "x": p}), seen


@program()
def a_custom_rule_that_returns_shared_variables(lib):
    seen = []

    @lib.custom_vjp
    def f(m):
        new = lib.Param(m.w * 2)
        return [new, new, models(lib).Counted(0.0), m]

    def bwd(residual, g):
        seen.append(g)
        ((d_m,), (d_new, *_)) = g
        d_m["w"][...] += 10 * d_new[...]
        return (d_m,)

    f.defvjp(lambda m: (f(m), None), bwd)
    loss = lambda m: f(m)[0][...] + f(m)[3].w[...] * 100
    return lib.grad(loss)(models(lib).Counted()), seen


# what the function of a custom rule writes, without graph updates ---------------------------------


def writer(lib, mode, seen, bwd, nondiff=()):
    """A function that writes statistics, a weight and a plain Variable."""

    @lib.custom_vjp(nondiff_argnums=nondiff, **mode)
    def f(m, x, d):
        m.c[...] += m.w * x
        d["v"][...] = x * 2
        return m.w * x

    def fwd(m, x, d):
        return f(m, x, d), (m, jnp.asarray(x), d)

    f.defvjp(fwd, functools.partial(bwd, seen))
    return f


def sevens(residual):
    return jax.tree.map(lambda x: jnp.full_like(x, 7), residual)


def named(seen, residual, g, updates_g):
    seen.append((g, updates_g))
    return sevens(residual)


def by_keyword(seen, residual, g, *, updates_g):
    seen.append((g, updates_g))
    return sevens(residual)


def any_keywords(seen, residual, g, **more):
    seen.append((g, more))
    return sevens(residual)


def without(seen, residual, g):
    seen.append(g)
    return sevens(residual)


def arguments(lib):
    return models(lib).Counted(), jnp.asarray(3.0), {"v": shared(lib), "u": shared(lib)}


@in_plain_modes
def a_rule_gets_the_cotangents_of_what_is_written(lib, mode):
    out = []
    for bwd in (named, by_keyword, any_keywords):
        seen, (m, x, d) = [], arguments(lib)
        f = writer(lib, mode, seen, bwd)
        loss = lambda m, x, d: f(m, x, d) + 10 * m.c[...] + 100 * d["v"][...]  # noqa: B023
        out += [lib.grad(loss, argnums=(0, 1, 2), **mode)(m, x, d), seen, m, d]
    return out


@in_plain_modes
def a_rule_without_the_argument_and_values_that_nobody_uses(lib, mode):
    seen, (m, x, d) = [], arguments(lib)
    f = writer(lib, mode, seen, without)
    return lib.grad(f, argnums=(0, 1, 2), **mode)(m, x, d), m, d, seen


@in_plain_modes
def statistics_that_are_not_differentiated(lib, mode):
    m, x, d = arguments(lib)
    f = writer(lib, mode, [], without)

    def loss(w, d):
        m = models(lib).Counted(0.0)
        m.w[...] = w
        return sum(f(m, x, d) for _ in range(3)) + 10 * m.c[...]

    return lib.grad(lambda w, d: loss(w, d), argnums=0, **mode)(2.0, d)


@in_plain_modes
def a_nondifferentiated_argument_has_no_updates(lib, mode):
    seen = []

    @lib.custom_vjp(nondiff_argnums=(0,), **mode)
    def f(k, m, x):
        m.c[...] += k
        return m.w * x

    def bwd(k, residual, g, *, updates_g):
        seen.append((k, g, updates_g))
        return sevens(residual)

    f.defvjp(lambda k, m, x: (f(k, m, x), (m, x)), bwd)
    m = models(lib).Counted()
    loss = lambda m, x: f(2, m, x) + 10 * m.c[...]
    return lib.grad(loss, argnums=(0, 1), **mode)(m, jnp.asarray(3.0)), seen, m


@program()
def with_updates_there_is_no_such_argument(lib):
    seen = []
    f = lib.custom_vjp(lambda m: m(2.0))

    def bwd(residual, g, **more):
        seen.append((g, more))
        return g[0]

    f.defvjp(lambda m: (f(m), None), bwd)
    m = models(lib).Counted()
    return lib.grad(lambda m: f(m) + 10 * m.c[...])(m), m, seen


@program()
def results_of_a_custom_rule_are_trees(lib):
    @lib.custom_vjp(graph=False)
    def f(m):
        new = lib.Param(m.w * 2)
        return new, new

    f.defvjp(lambda m: (f(m), None), lambda residual, g: (None,))
    try:
        lib.grad(lambda m: f(m)[0][...], **PLAIN)(models(lib).Counted())
    except ValueError:
        return "raised"


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
