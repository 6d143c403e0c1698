"""Programs with checks, shapes, partials, trees and contexts, in both libraries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from tests.parity.programs import (
    Programs,
    attempt,
    compare,
    models,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

program = Programs()
all_modes = ("updates", "plain", "tree")


# checkify, eval_shape, make_jaxpr ----------------------------------------------------------------


@program(*all_modes)
def checkify_of_index_and_user_errors(lib, mode):
    v = lib.Param(jnp.arange(3.0))
    errors = checkify.index_checks | checkify.user_checks
    error, y = lib.checkify(lambda v, i: v[...][i], errors=errors, **mode)(v, 5)
    return error.get() is not None, attempt(error.throw), y.shape


@program(*all_modes)
def shape_refusals(lib, mode):
    m = models(lib).Counted()
    return [
        attempt(lambda: lib.eval_shape(lambda m: m(1.0), **mode)),
        attempt(lambda: lib.eval_shape(lambda m: "text", m, **mode)),
        attempt(lambda: lib.eval_shape(lambda m: m.missing, m, **mode)),
        attempt(lambda: lib.eval_shape(lambda m, x: m(x), m, "text", **mode)),
        attempt(lambda: lib.checkify(lambda m: "text", **mode)(m)),
    ], m


# jit_partial, cached_partial, call ---------------------------------------------------------------


@program()
def cached_partial_of_other_transforms(lib):
    m = models(lib).Counted()
    xs = jnp.arange(3.0)
    f = lib.cached_partial(lib.vmap(lambda m, x: m.w * x, in_axes=(None, 0)), m)
    g = lib.cached_partial(lib.jit(lib.value_and_grad(lambda m, x: m(x))), m)
    return attempt(lambda: f(xs)), attempt(lambda: g(2.0)), m


@program()
def call_of_graphdef_and_state(lib):
    graphdef, state = lib.split(models(lib).Counted())
    y, (graphdef, state) = lib.call((graphdef, state))(2.0)
    caller = lib.call((graphdef, state))
    z, (_, after) = caller(x=3.0)
    w, (_, again) = caller(1.0)
    return y, z, after, w, again


@program()
def call_of_methods(lib):
    class Model(lib.Module):
        def __init__(self):
            self.inner = models(lib).Counted()

        def twice(self, x):
            return self.inner(x) + self.inner(x)

    graphdef, params, rest = lib.split(Model(), lib.Param, ...)
    y, (_, state) = lib.call((graphdef, lib.merge_state(params, rest))).twice(1.0)
    z, _ = lib.call((graphdef, state)).inner(2.0)
    w, (_, after) = graphdef.apply(params, rest).inner.__call__(1.0)
    return y, state, z, w, after


# trees, contexts, compat -------------------------------------------------------------------------


@program()
def trees_of_non_graph_nodes(lib):
    seen = []

    def split_fn(ctx, path, prefix, x):
        seen.append((str(path), prefix, type(x).__name__))
        return lib.NodeStates.from_split(*ctx.split(x)) if isinstance(x, lib.Module) else x

    m = models(lib).Counted()
    tree = lib.to_tree((m, {"x": 1.0}), prefix=(0, 1), split_fn=split_fn, map_non_graph_nodes=True)
    return seen, len(jax.tree.leaves(tree))


@program()
def contexts_are_nested(lib):
    a, b = models(lib).Counted(), models(lib).Counted()
    with lib.update_context("outer"), lib.update_context("inner"):
        with lib.split_context("outer") as outer, lib.split_context("inner") as inner:
            one, two = outer.split(a), inner.split(b, lib.Param, ...)
        with lib.merge_context("inner", inner=True) as inner:
            c = inner.merge(*two)
        c.w[...] = 9.0
        with lib.split_context("inner") as inner:
            two = inner.split(c)
        with lib.merge_context("inner", inner=False) as inner:
            same = inner.merge(*two) is b
        with lib.merge_context("outer", inner=True) as outer:
            copy = outer.merge(*one)
    return same, b, copy is a, copy


@program()
def compat_transforms(lib):
    m = models(lib).Counted()
    c = lib.compat
    with lib.set_graph_mode(False), lib.set_graph_updates(False):
        out = [
            c.vmap(lambda m, x: (setattr(m, "seen", True), m(x))[1], in_axes=(None, 0))(
                m, jnp.ones(2)
            ),
            c.cond(True, lambda m: m, lambda m: m, m) is m,
            c.scan(lambda m, x: (m, m(x)))(m, jnp.ones(2))[0] is m,
            c.fori_loop(0, 2, lambda i, m: (m(1.0), m)[1], m) is m,
            c.while_loop(lambda m: m.c[...] < 9, lambda m: (m(1.0), m)[1], m) is m,
            c.value_and_grad(lambda m: m(1.0))(m),
            c.remat(lambda m: m)(m) is m,
            c.eval_shape(lambda m: m, m),
            c.switch(0, [lambda m: m.w * 1, lambda m: m.w * 2], m),
        ]
    return out, m.seen, m


@program()
def settings_of_modes(lib):
    m = models(lib).Counted()
    m.alias = m.w

    def adds(m):
        m.new = 1

    with lib.set_graph_updates(False):
        lib.jit(adds)(m)
        kept = hasattr(m, "new")
        lib.jit(adds, graph_updates=True)(m)
    with lib.set_graph_mode(False):
        refused = attempt(lambda: lib.jit(lambda m: m.w * 1)(m)), attempt(lambda: lib.split(m))
        allowed = lib.jit(lambda m: m.w * 1, graph=True, graph_updates=True)(m)
    return kept, m.new, refused, allowed


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
