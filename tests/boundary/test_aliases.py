"""Results that hold Variables of the arguments, or one twice, where only values leave a transform."""

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.messages import refused, rows

PLAIN, TREE = {"graph_updates": False}, {"graph": False}


def show(m):
    m.n[...] += 1
    return {"seen": nnx.Dict(w=m.w)}


def twice(x):
    p = nnx.Param(x)
    return {"a": nnx.Dict(w=p), "b": [p]}


def aux(x):
    return x.sum(), twice(x)


def knot(x):
    node = nnx.Dict(x=x)
    node.inner = nnx.Dict(again=node)
    return {"a": node}


def shared(x):
    node = nnx.Dict(w=nnx.Param(x))
    return {"a": nnx.Dict(n=node, scale=2), "b": [node]}


@rows("""
    nnx.jit(show, **PLAIN)(m)
        ValueError: Duplicate Param found at paths: 'seen.w' of the result, 'm.w' of the arguments. A
            transform with graph_updates=False (or graph=False) does not support Variable aliasing,
            only values leave
    nnx.vmap(show, **TREE)(m)
        ValueError: 'seen.w' of the result, 'm.w' of the arguments
    nnx.remat(show, **PLAIN)(m)
        ValueError: 'seen.w' of the result, 'm.w' of the arguments
    nnx.cond(True, lambda t: show(*t), lambda t: show(*t), (m,), **TREE)
        ValueError: 'seen.w' of the result, 't.0.w' of the arguments
    nnx.eval_shape(show, m, **PLAIN)
        ValueError: 'seen.w' of the result, 'm.w' of the arguments
    nnx.checkify(show, **TREE)(m)
        ValueError: 'seen.w' of the result, 'm.w' of the arguments
    nnx.jit(lambda v: v, **PLAIN)(m.w)
        ValueError: Duplicate Param found at paths: '<root>' of the result, 'v' of the arguments
    nnx.jit(twice, **TREE)(x)
        ValueError: Duplicate Param found at paths of the result: 'a.w', 'b.0'. nnxlite.jit with
            graph=False does not support Variable aliasing: objects must form a tree. Remove the
            sharing, or pass graph=True to nnxlite.jit
    nnx.switch(0, [twice, twice], x, **TREE)
        ValueError: 'a.w', 'b.0'. nnxlite.switch with graph=False
    nnx.grad(aux, has_aux=True, **TREE)(x)
        ValueError: '1.a.w', '1.b.0'. nnxlite.grad with graph=False
    nnx.vjp(aux, x, has_aux=True, **TREE)
        ValueError: '1.a.w', '1.b.0'. nnxlite.vjp with graph=False
    nnx.scan(twice, in_axes=0, out_axes=0, **TREE)(x)
        ValueError: 'a.w', 'b.0'. nnxlite.scan with graph=False
    nnx.jit(knot, **TREE)(x)
        ValueError: Duplicate Dict found at paths of the result: 'a', 'a.inner.again'
    nnx.vmap(shared, **TREE)(x)
        ValueError: Duplicate Dict found at paths of the result: 'a.n', 'b.0'
""")
def test_refusals(line, message):
    m = nnx.Dict(w=nnx.Param(jnp.ones(2)), n=nnx.BatchStat(jnp.zeros(2)))
    refused(line, message, {**globals(), "m": m, "x": jnp.ones(2)})


@pytest.mark.parametrize("mode", [{}, PLAIN], ids=str)
def test_new_objects_in_a_result_may_share_where_graphs_are_on(mode):
    for transform in (nnx.jit, nnx.vmap, nnx.remat):
        out = transform(twice, **mode)(jnp.ones(2))
        assert out["a"]["w"] is out["b"][0]
        transform(knot, **mode)(jnp.ones(2))
