"""Results that hold Variables of the arguments: refused where only values leave a transform."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import nnxlite as nnx

MODES = [{"graph_updates": False}, {"graph": False}]
MESSAGE = (
    r"Duplicate Param found at paths: 'seen.w' of the result, 'm.w' of the arguments\. A transform with "
    r"graph_updates=False \(or graph=False\) does not support Variable aliasing, only values leave"
)


def counter():
    return nnx.Dict(w=nnx.Param(jnp.ones(2)), n=nnx.BatchStat(jnp.zeros(2)))


def show(m):
    m.n[...] += 1
    return {"seen": nnx.Dict(w=m.w)}


RUNS = {
    "jit": lambda m, **mode: nnx.jit(show, **mode)(m),
    "vmap": lambda m, **mode: nnx.vmap(show, **mode)(m),
    "remat": lambda m, **mode: nnx.remat(show, **mode)(m),
    "cond": lambda m, **mode: nnx.cond(True, lambda t: show(*t), lambda t: show(*t), (m,), **mode),
    "eval_shape": lambda m, **mode: nnx.eval_shape(show, m, **mode),
    "checkify": lambda m, **mode: nnx.checkify(show, **mode)(m)[1],
}


@pytest.mark.parametrize("mode", MODES, ids=["plain", "tree"])
@pytest.mark.parametrize("name", RUNS)
def test_results_hold_no_variable_of_the_arguments(name, mode):
    m = counter()
    message = MESSAGE.replace("'m.w'", "'t.0.w'") if name == "cond" else MESSAGE
    with pytest.raises(ValueError, match=message):
        RUNS[name](m, **mode)
    assert m.n[...].tolist() == [0, 0]
    assert (RUNS[name](m)["seen"].w is m.w) == (name != "eval_shape")


@pytest.mark.parametrize("mode", MODES, ids=["plain", "tree"])
def test_a_variable_that_is_the_argument_itself_is_no_result(mode):
    message = "Duplicate Param found at paths: '<root>' of the result, 'v' of the arguments"
    with pytest.raises(ValueError, match=message):
        nnx.jit(lambda v: v, **mode)(nnx.Param(jnp.ones(2)))


def twice(x):
    p = nnx.Param(x)
    return {"a": nnx.Dict(w=p), "b": [p]}


def aux(x):
    return x.sum(), twice(x)


RESULTS = {
    "jit": lambda x, **mode: nnx.jit(twice, **mode)(x),
    "vmap": lambda x, **mode: nnx.vmap(twice, **mode)(x),
    "remat": lambda x, **mode: nnx.remat(twice, **mode)(x),
    "cond": lambda x, **mode: nnx.cond(True, twice, twice, x, **mode),
    "switch": lambda x, **mode: nnx.switch(0, [twice, twice], x, **mode),
    "eval_shape": lambda x, **mode: nnx.eval_shape(twice, x, **mode),
    "grad": lambda x, **mode: nnx.grad(aux, has_aux=True, **mode)(x)[1],
    "vjp": lambda x, **mode: nnx.vjp(aux, x, has_aux=True, **mode)[2],
    "scan": lambda x, **mode: nnx.scan(twice, in_axes=0, out_axes=0, **mode)(x),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_trees_where_graphs_are_off(name):
    message = (
        r"Duplicate Param found at paths of the result: '(1\.)?a\.w', '(1\.)?b\.0'\. "
        rf"nnxlite\.{name} with graph=False does not support Variable aliasing: "
        rf"objects must form a tree\. Remove the sharing, or pass graph=True to nnxlite\.{name}"
    )
    with pytest.raises(ValueError, match=message):
        RESULTS[name](jnp.ones(2), graph=False)
    for mode in ({}, {"graph_updates": False}):
        out = RESULTS[name](jnp.ones(2), **mode)
        assert out["a"]["w"] is out["b"][0]


def knot(x):
    node = nnx.Dict(x=x)
    node.inner = nnx.Dict(again=node)
    return {"a": node}


def shared(x):
    node = nnx.Dict(w=nnx.Param(x))
    return {"a": nnx.Dict(n=node, scale=2), "b": [node]}


@pytest.mark.parametrize("transform", [nnx.jit, nnx.vmap, nnx.remat])
def test_results_that_contain_an_object_twice_are_no_trees(transform):
    for fun, paths in ((knot, "'a', 'a.inner.again'"), (shared, "'a.n', 'b.0'")):
        with pytest.raises(
            ValueError, match=f"Duplicate Dict found at paths of the result: {paths}"
        ):
            transform(fun, graph=False)(jnp.ones(2))
        transform(fun, graph_updates=False)(jnp.ones(2))
