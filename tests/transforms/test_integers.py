"""Integers of NumPy, and concrete ones of JAX, are integers wherever a transform takes a number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

X, ROWS = jnp.arange(3.0), jnp.arange(6.0).reshape(3, 2)


def scaled(x, k):
    return x.sum() * k


def under_custom_vjp(number):
    fun = nnx.custom_vjp(scaled, nondiff_argnums=(number,))
    fun.defvjp(lambda x, k: (scaled(x, k), ()), lambda k, _, g: (g[1] * k * jnp.ones(3),))
    return nnx.grad(lambda x: fun(x, 3))(X)


def stack(count):
    keys = jax.random.split(jax.random.key(0), count)
    return nnx.vmap(lambda key: nnx.Linear(3, 2, rngs=nnx.Rngs(key)))(keys)


def layers(axes):
    return nnx.vmap(lambda m, x: m(x), in_axes=(axes, None))(stack(3), X)


CALLS = {
    "jit, static": lambda i: nnx.jit(scaled, static_argnums=i(1))(X, 3),
    "jit, donated": lambda i: nnx.jit(lambda x: 2 * x, donate_argnums=i(0))(jnp.array(X)),
    "jit, traces": lambda i: nnx.jit(scaled, max_traces=i(1))(X, 3.0),
    "jit_partial": lambda i: nnx.jit_partial(scaled, X, static_argnums=i(1))(3),
    "grad": lambda i: nnx.grad(scaled, argnums=i(0))(X, 3.0),
    "grad, several": lambda i: nnx.value_and_grad(scaled, argnums=(i(0), i(1)))(X, 3.0),
    "DiffState": lambda i: nnx.grad(
        lambda m: m(X).sum(), argnums=nnx.DiffState(i(0), nnx.PathContains("bias"))
    )(nnx.Linear(3, 2, rngs=nnx.Rngs(0))),
    "vmap, in": lambda i: nnx.vmap(scaled, in_axes=(i(1), None))(ROWS, 2.0),
    "vmap, inside a dict": lambda i: nnx.vmap(lambda d: d["a"], in_axes=({"a": i(1)},))({"a": ROWS}),
    "vmap, out": lambda i: nnx.vmap(lambda x: x, out_axes=i(1))(ROWS),
    "vmap, size": lambda i: nnx.vmap(lambda x: x, in_axes=None, axis_size=i(4))(X),
    "vmap, StateAxes": lambda i: layers(nnx.StateAxes({nnx.Param: i(0)})),
    "vmap, an object of axes": lambda i: layers(nnx.prefix(stack(3), {nnx.Param: i(0)})),
    "scan": lambda i: nnx.scan(
        lambda c, x: (c + x.sum(), x), in_axes=(nnx.Carry, i(1)), out_axes=(nnx.Carry, i(0))
    )(0.0, ROWS),
    "scan, length": lambda i: nnx.scan(lambda c, _: (c + 1, c), length=i(4))(0.0, None),
    "fori_loop": lambda i: nnx.fori_loop(i(0), i(3), lambda j, c: c + j, 0, unroll=i(1)),
    "switch": lambda i: nnx.switch(i(1), [lambda x: x, lambda x: 2 * x], 3.0),
    "remat": lambda i: nnx.remat(scaled, static_argnums=i(1))(X, 3),
    "custom_vjp": lambda i: under_custom_vjp(i(1)),
    "make_jaxpr": lambda i: nnx.make_jaxpr(scaled, static_argnums=i(1))(X, 3).out_avals,
    "pmap": lambda i: nnx.pmap(scaled, in_axes=(i(0), None), axis_size=i(1))(X[None], 3.0),
    "pmap, static": lambda i: nnx.pmap(
        scaled, in_axes=(0, None), static_broadcasted_argnums=i(1), donate_argnums=i(0)
    )(X[None], 3),
    "filter_jit": lambda i: nnx.filter_jit(scaled, max_traces=i(1))(X, 3),
    "filter_vmap": lambda i: nnx.filter_vmap(scaled, in_axes=(i(1), None))(ROWS, 2.0),
    "split_rngs": lambda i: nnx.split_rngs(splits=i(3))(
        nnx.vmap(lambda rngs: rngs.params.uniform(()))
    )(nnx.Rngs(0)),
    "padding": lambda i: nnx.Conv(2, 3, i(3), padding=i(1), strides=i(1), rngs=nnx.Rngs(0))(ROWS[None]),
}  # fmt: skip
KINDS = {
    "uint8": np.uint8,
    "array": lambda number: np.array(number, np.int32),
    "jax": lambda number: jnp.array(number, jnp.int32),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_kind_of_integer(call):
    expected = CALLS[call](int)
    for make in KINDS.values():
        found = CALLS[call](make)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_array_of_numbers_is_several():
    assert nnx.jit(scaled, static_argnums=np.array([1]))(X, 3) == scaled(X, 3)
    assert nnx.remat(scaled, static_argnums=np.array([1]))(X, 3) == scaled(X, 3)
