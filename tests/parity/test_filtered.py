"""Filtered trees and transforms beside Equinox, run as a black box."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

eqx = pytest.importorskip("equinox")

LEAVES = [
    jnp.ones(2),
    jnp.arange(2),
    np.ones(2, np.float32),
    np.float32(1),
    jax.random.key(0),
    1,
    1.0,
    1j,
    True,
    "a",
    None,
    len,
    jax.ShapeDtypeStruct((1,), jnp.float32),
]
PREDICATES = ["is_array", "is_inexact_array", "is_array_like", "is_inexact_array_like"]
MODEL = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
TREE = {"a": [jnp.ones(2), 1, "s"], "b": (2.0, None, jnp.arange(3)), "m": MODEL}


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if eqx.is_array(x):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=1e-6)
        else:
            assert x is y or x == y


@pytest.mark.parametrize("name", PREDICATES)
def test_predicates(name):
    assert [getattr(nnx, name)(x) for x in LEAVES] == [getattr(eqx, name)(x) for x in LEAVES]


SPECS = [
    True,
    False,
    eqx.is_array,
    eqx.is_inexact_array,
    {"a": [True, False, True], "b": eqx.is_array, "m": eqx.is_inexact_array},
    {"a": False, "b": (True, None, lambda x: True), "m": True},
]


@pytest.mark.parametrize("spec", SPECS)
def test_partition_and_combine(spec):
    mine, theirs = nnx.partition(TREE, spec), eqx.partition(TREE, spec)
    same(mine, theirs)
    same(nnx.combine(*mine), eqx.combine(*theirs))
    same(
        nnx.filter(TREE, spec, inverse=True, replace=0),
        eqx.filter(TREE, spec, inverse=True, replace=0),
    )


@pytest.mark.parametrize(
    ("where", "how"),
    [
        (lambda t: t["a"][0], {"replace": 3}),
        (lambda t: (t["a"], t["b"][1]), {"replace": (3, 4)}),
        (lambda t: t["m"].layers[0].weight, {"replace_fn": lambda w: w + 1}),
        (lambda t: [layer.bias for layer in t["m"].layers], {"replace_fn": lambda b: b * 0}),
    ],
)
def test_tree_at(where, how):
    same(nnx.tree_at(where, TREE, **how), eqx.tree_at(where, TREE, **how))


def test_errors_of_trees_in_both():
    for lib in (nnx, eqx):
        for call in (
            lambda lib=lib: lib.partition([1, (2, 3)], [True]),
            lambda lib=lib: lib.partition([1, 2], 3),
            lambda lib=lib: lib.combine([1, 2], [1, 2, 3]),
            lambda lib=lib: lib.apply_updates([1.0], [None, None]),
            lambda lib=lib: lib.tree_at(lambda t: (t[0], t[0][0]), [[1]], (1, 2)),
            lambda lib=lib: lib.tree_at(lambda t: t[0], [1]),
        ):
            with pytest.raises(ValueError):
                call()


def test_gradients_and_which_leaves_are_none():
    loss = lambda m, x: (jax.vmap(m)(x) ** 2).sum()
    x = jnp.ones((3, 2))
    same(nnx.filter_grad(loss)(MODEL, x), eqx.filter_grad(loss)(MODEL, x))
    same(nnx.filter_value_and_grad(loss)(MODEL, x), eqx.filter_value_and_grad(loss)(MODEL, x))
    for lib in (nnx, eqx):
        with pytest.raises(TypeError):
            lib.filter_grad(loss)(x=x, m=MODEL)


def test_products_and_jacobians():
    f = lambda x, y: (x * y, "a", y)
    arguments = (2.0, jnp.array(3.0)), (1.0, jnp.array(1.0))
    same(nnx.filter_jvp(f, *arguments), eqx.filter_jvp(f, *arguments))
    g = lambda x, n: (x**n, "a")
    mine, theirs = (lib.filter_vjp(g, jnp.array(2.0), 3) for lib in (nnx, eqx))
    same(mine[0], theirs[0])
    cotangent = (jnp.array(1.0), None)
    np.testing.assert_allclose(mine[1](cotangent)[0], theirs[1](cotangent)[0])
    assert mine[1](cotangent)[1] is theirs[1](cotangent)[1] is None
    h = lambda p: p[0] * p[2]
    for name in ("filter_jacfwd", "filter_jacrev"):
        tree = (jnp.ones(2), "x", 2.0)
        same(getattr(nnx, name)(h)(tree), getattr(eqx, name)(h)(tree))
    square = lambda x: (x**2).sum()
    same(nnx.filter_hessian(square)(jnp.ones(2)), eqx.filter_hessian(square)(jnp.ones(2)))


CALLS = [
    (jnp.array(1.0), 2, "a"),
    (jnp.array(2.0), 2, "a"),
    (jnp.array(2.0), 3, "a"),
    (jnp.array(2.0), 3, "b"),
    (np.float32(2.0), 3, "b"),
    (jnp.array(1), 2, "a"),
    (jnp.array(2.0), jnp.array(3), "b"),
    (jnp.array(2.0), jnp.array(4), "b"),
]


def test_jit_values_and_trace_counts():
    def traces_of(lib):
        traces, counts = [], []

        @lib.filter_jit
        def f(x, n, name):
            traces.append(None)
            return {name: x * n, "f": len}

        for call in CALLS:
            out = f(*call)
            assert out["f"] is len and out[call[2]] == call[0] * call[1]
            counts.append(len(traces))
        return counts

    assert traces_of(nnx) == traces_of(eqx)


def test_vmap():
    f = lambda x, y: (x + y, "a", 1)
    for axes in [(0, None), (None, 0), (0, 0)]:
        same(
            nnx.filter_vmap(f, in_axes=axes)(jnp.ones(3), jnp.arange(3.0)),
            eqx.filter_vmap(f, in_axes=axes)(jnp.ones(3), jnp.arange(3.0)),
        )
    make = lambda key: eqx.nn.Linear(2, 3, key=key)
    keys = jax.random.split(jax.random.key(0), 4)
    mine, theirs = nnx.filter_vmap(make)(keys), eqx.filter_vmap(make)(keys)
    same(mine, theirs)
    apply = lambda m, x: m(x)
    x = jnp.ones((4, 2))
    same(nnx.filter_vmap(apply)(mine, x), eqx.filter_vmap(apply)(theirs, x))


def test_shapes():
    f = lambda x, y, z: (x + 1, y, z, 1.0)
    arguments = (jnp.ones(2), 2, np.ones(1, np.float32))
    same(nnx.filter_eval_shape(f, *arguments), eqx.filter_eval_shape(f, *arguments))
    same(nnx.filter_make_jaxpr(f)(*arguments)[1:], eqx.filter_make_jaxpr(f)(*arguments)[1:])


@pytest.mark.parametrize(
    ("one", "other", "how"),
    [
        (jnp.ones(1), np.ones(1, np.float32), {}),
        (jnp.ones(1), np.ones(1, np.float32), {"typematch": True}),
        (1, 1.0, {}),
        (1, 1.0, {"typematch": True}),
        ((1,), [1], {}),
        (jnp.ones(1), jnp.ones(1) + 1e-3, {"atol": 1e-2}),
        (jnp.ones(1), jnp.ones(1) + 1e-3, {}),
        (jnp.full(1, jnp.nan), jnp.full(1, jnp.nan), {}),
        (jnp.ones(2), jnp.ones(3), {}),
        (TREE, TREE, {}),
    ],
)
def test_tree_equal(one, other, how):
    assert bool(nnx.tree_equal(one, other, **how)) == bool(eqx.tree_equal(one, other, **how))
