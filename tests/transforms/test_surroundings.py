"""Whatever a function depends on besides its arguments: when it changes, the next call sees it.

Each way returns a function of x that gives 2 * x, and a change after which it gives 3 * x.  Every
transform that finds a compiled program again by content must notice, and so must those that run Python
in each call; what JAX itself promises to trace once (`jit`, `pmap`, and their kin) need not.
"""

from __future__ import annotations

import operator

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.transforms.models import EACH

WAYS = {}
X = jnp.float32(1.0)
NUMBER = 2.0


def way(fun):
    WAYS[fun.__name__] = fun
    return fun


@way
def global_number(patch):
    return (lambda x: x * NUMBER), lambda: patch.setitem(globals(), "NUMBER", 3.0)


@way
def cell(patch):
    n = 2.0

    def change():
        nonlocal n
        n = 3.0

    return (lambda x: x * n), change


@way
def replaced_method(patch):
    class Scale:
        def __call__(self, x):
            return x * 2.0

    return (lambda x: Scale()(x)), lambda: setattr(Scale, "__call__", lambda self, x: x * 3.0)


@way
def replaced_library_function(patch):
    real = jnp.negative
    return (lambda x: -2 * jnp.negative(x)), lambda: patch.setattr(
        jnp, "negative", lambda x: 1.5 * real(x)
    )


@way
def captured_variable(patch):
    v = nnx.Param(jnp.float32(2))
    return (lambda x: x * v.value), lambda: v.set_value(jnp.float32(3))


# The transforms ----------------------------------------------------------------------------------


def with_rule(f):
    g = nnx.custom_vjp(lambda x: f(x), graph_updates=False)
    g.defvjp(lambda x: (f(x), None), lambda _, g: (f(g),))
    return nnx.grad(g)


NAMES = ["vmap", "scan", "switch", "remat", "shard_map", "filter_vmap"]
WRAPPED = {
    **{name: EACH[name] for name in NAMES},
    "cond_fun of while_loop": lambda f: lambda x: nnx.while_loop(
        lambda c: c < f(X), lambda c: c + 1.0, x
    ),
    "rule of custom_vjp": with_rule,
    "cond under grad": lambda f: nnx.grad(lambda x: nnx.cond(True, f, f, x)),
}  # fmt: skip


@pytest.mark.parametrize("transform", WRAPPED)
@pytest.mark.parametrize("name", WAYS)
def test_the_next_call_sees_the_change(name, transform, monkeypatch):
    wrap = WRAPPED[transform]
    f, change = WAYS[name](monkeypatch)
    cached = wrap(f)
    assert [float(g(X)) for g in (cached, wrap(f))] == [2.0, 2.0]
    change()
    assert [float(g(X)) for g in (cached, wrap(f))] == [3.0, 3.0]


# What arguments bring along ------------------------------------------------------------------------


class Model(nnx.Module):
    def __init__(self):
        self.factors, self.v = [2.0], nnx.Param(jnp.float32(1))

    def __call__(self, x):
        return self.v.value * self.factors[0] * x


def list_in_the_argument(patch):
    m = Model()
    return m, lambda: operator.setitem(m.factors, 0, 3.0)


def class_of_the_argument(patch):
    real = Model.__call__
    change = lambda: patch.setattr(Model, "__call__", lambda self, x: 1.5 * real(self, x))
    return Model(), change


@pytest.mark.parametrize("transform", ["cond", "scan", "remat", "cond of a bound method"])
@pytest.mark.parametrize("bring", [list_in_the_argument, class_of_the_argument])
def test_the_next_call_sees_what_its_argument_brings(bring, transform, monkeypatch):
    m, change = bring(monkeypatch)
    run = lambda: float(EACH[transform](lambda m: m(X))(m))
    if transform not in EACH:
        run = lambda: float(nnx.cond(True, m.__call__, m.__call__, X))
    assert [run(), run()] == [2.0, 2.0]
    change()
    assert [run(), run()] == [3.0, 3.0]
