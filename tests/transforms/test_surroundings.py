"""Whatever a function depends on besides its arguments: when it changes, the next call sees it.

Each way returns a function of x that gives 2 * x, and a change after which it gives 3 * x.  Every
transform that finds a compiled program again by content must notice, and so must those that run Python
in each call; what JAX itself promises to trace once (`jit`, `pmap`, and their kin) need not.
"""

from __future__ import annotations

import operator
import typing as tp

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx

WAYS: dict[str, tp.Any] = {}
X = jnp.float32(1.0)
NUMBER: tp.Any = 2.0
HELPER: tp.Any = None


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


class Scale:
    n: tp.Any = 2.0

    def __init__(self, n=None):
        if n is not None:
            self.n = n

    def __call__(self, x):
        return x * self.n

    def scaled(self, x):
        return x * self.n

    def __float__(self):
        return self.n

    @property
    def double(self):
        return self.n * 1.0


def own_class(**space):
    return type("Own", (Scale,), space)


@way
def replaced_method(patch):
    own = own_class()
    return (lambda x: own(2.0)(x)), lambda: setattr(own, "__call__", lambda self, x: x * 3.0)


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

MESH = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
SPEC = jax.sharding.PartitionSpec()
XS = jnp.ones(1)


def with_rule(f):
    g = nnx.custom_vjp(lambda x: f(x), graph_updates=False)
    g.defvjp(lambda x: (f(x), None), lambda _, g: (f(g),))
    return g


EACH: dict[str, tp.Any] = {
    "vmap": (nnx.vmap, lambda g: g(XS)[0]),
    "scan with a carry": (lambda f: nnx.scan(lambda c, x: (f(c), x)), lambda g: g(X, XS)[0]),
    "switch": (lambda f: lambda x: nnx.switch(0, [f], x), lambda g: g(X)),
    "cond_fun of while_loop": (
        lambda f: lambda x: nnx.while_loop(lambda c: c < f(X), lambda c: c + 1.0, x),
        lambda g: g(X),
    ),
    "remat": (nnx.remat, lambda g: g(X)),
    "rule of custom_vjp": (lambda f: nnx.grad(with_rule(f)), lambda g: g(X)),
    "shard_map": (
        lambda f: nnx.shard_map(f, mesh=MESH, in_specs=SPEC, out_specs=SPEC),
        lambda g: g(X),
    ),
    "filter_vmap": (nnx.filter_vmap, lambda g: g(XS)[0]),
    "cond under grad": (lambda f: nnx.grad(lambda x: nnx.cond(True, f, f, x)), lambda g: g(X)),
}


@pytest.mark.parametrize("transform", EACH)
@pytest.mark.parametrize("name", WAYS)
def test_the_next_call_sees_the_change(name, transform, monkeypatch):
    wrap, run = EACH[transform]
    f, change = WAYS[name](monkeypatch)
    kept = wrap(f)
    assert [float(run(g)) for g in (kept, wrap(f))] == [2.0, 2.0]
    change()
    assert [float(run(g)) for g in (kept, wrap(f))] == [3.0, 3.0]


# What arguments bring along ------------------------------------------------------------------------

MODELS: dict[str, tp.Any] = {}


def brings(fun):
    MODELS[fun.__name__] = fun
    return fun


class Model(nnx.Module):
    """A module with one static attribute."""

    def __init__(self, held=None):
        self.held = held
        self.v = nnx.Param(jnp.float32(1))

    def __call__(self, x):
        return self.v.value * self.read() * x

    def read(self):
        return NUMBER


def model_class(**space):
    return type("OwnModel", (Model,), space)


@brings
def list_that_the_argument_holds(patch):
    m = model_class(read=lambda self: self.held[0])([2.0])
    return m, lambda: operator.setitem(m.held, 0, 3.0)


@brings
def class_of_a_layer(patch):
    m = nnx.Linear(
        1, 1, use_bias=False, kernel_init=nnx.initializers.constant(2.0), rngs=nnx.Rngs(0)
    )
    real = nnx.Linear.__call__

    def change():
        patch.setattr(nnx.Linear, "__call__", lambda self, x: 1.5 * real(self, x))

    return nnx.Sequential(m, lambda x: x[0]), change


@brings
def hook_of_a_variable(patch):
    patch.setitem(globals(), "HELPER", lambda value: value)
    v = nnx.Param(jnp.float32(1), on_get_value=lambda variable, value: HELPER(value))
    return Hooked(v), lambda: patch.setitem(globals(), "HELPER", lambda value: value * 1.5)


class Hooked(nnx.Module):
    def __init__(self, v):
        self.v = v

    def __call__(self, x):
        return 2 * self.v.get_value() * x


@jax.tree_util.register_pytree_node_class
class Pair:
    """A node of the user's, whose method reads a global."""

    def __init__(self, v, held=None):
        self.v, self.held = v, held

    def __call__(self, x):
        return self.v * x * (NUMBER if self.held is None else self.held.n)

    def tree_flatten(self):
        return (self.v,), self.held

    @classmethod
    def tree_unflatten(cls, held, children):
        return cls(*children, held)


@brings
def auxiliary_data_of_a_pytree_node(patch):
    held = Scale(2.0)
    return Pair(jnp.float32(1), held), lambda: setattr(held, "n", 3.0)


BRINGING = {
    "cond": lambda m: nnx.cond(True, apply, apply, m),
    "cond of a bound method": lambda m: nnx.cond(True, m.__call__, m.__call__, XS),
    "scan": lambda m: nnx.scan(lambda m, x: apply(m), in_axes=(None, 0), out_axes=0)(m, XS),
    "remat": lambda m: nnx.remat(apply)(m),
}


def apply(m):
    return jnp.reshape(m(XS), (1,))


@pytest.mark.parametrize("transform", BRINGING)
@pytest.mark.parametrize("name", MODELS)
def test_the_next_call_sees_what_its_argument_brings(name, transform, monkeypatch):
    run = BRINGING[transform]
    m, change = MODELS[name](monkeypatch)
    if transform == "cond of a bound method" and not isinstance(m, nnx.Module):
        pytest.skip("a pytree node is no operand then")
    assert [float(jnp.sum(run(m))) for _ in range(2)] == [2.0, 2.0]
    change()
    assert [float(jnp.sum(run(m))) for _ in range(2)] == [3.0, 3.0]
