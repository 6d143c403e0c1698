"""Programs with checks, shapes, partials, trees and contexts, in both libraries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import checkify

from tests.parity.programs import (
    Programs,
    X,
    attempt,
    compare,
    models,
    plain,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

program = Programs()
plain_modes = ("plain", "tree")
all_modes = ("updates", "plain", "tree")


# checkify, eval_shape, make_jaxpr ----------------------------------------------------------------


@program(*all_modes)
def checkify_under_jit(lib, mode):
    m = models(lib).Counted()

    @lib.jit(**mode)
    def f(m, x):
        checkify.check(x > 0, "positive, please")
        m.w[...] = x
        return m.w * 2

    g = lib.checkify(f, **mode)
    error, y = g(m, -1.0)
    fine, z = g(m, 1.0)
    return attempt(error.throw), y, fine.get(), z, m


@program(*all_modes)
def checkify_of_index_and_user_errors(lib, mode):
    v = lib.Param(jnp.arange(3.0))
    errors = checkify.index_checks | checkify.user_checks
    error, y = lib.checkify(lambda v, i: v[...][i], errors=errors, **mode)(v, 5)
    return error.get() is not None, attempt(error.throw), y.shape


@program("updates", "plain")
def eval_shape_of_a_training_step(lib, mode):
    net = models(lib).Net(lib.Rngs(0))
    before = plain(lib, lib.state(net))
    f = lambda net, x: lib.value_and_grad(lambda net: (net(x) ** 2).mean())(net)
    out = lib.eval_shape(f, net, jax.ShapeDtypeStruct((3, 2), jnp.float32), **mode)
    return out[0], out[1], before, lib.state(net)


@program("updates")
def eval_shape_of_a_cycle(lib, mode):
    def make():
        a, b = models(lib).Cell(1.0), models(lib).Cell(jnp.ones(2))
        a.next, b.next = b, a
        return a, b

    a, b = lib.eval_shape(make)
    return a.next is b, b.next is a, a


@program("updates", "plain")
def eval_shape_then_fill(lib, mode):
    m = lib.eval_shape(lambda: lib.Linear(2, 3, rngs=lib.Rngs(0)), **mode)
    graphdef, state = lib.split(m)
    full = lib.merge(graphdef, jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), state))
    return m.kernel.shape, full(X), m


@program("plain", "both")
def make_jaxpr_and_what_it_leaves(lib, mode):
    m = models(lib).Counted()
    one = lib.make_jaxpr(lambda m, x: m(x), **mode)(m, 1.0)
    return str(one), m


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


@program("plain", "both")
def jit_partial_options(lib, mode):
    m = models(lib).Counted(jnp.ones(2))
    f = lib.jit_partial(lambda m, x, *, k=1: m(x) * k, m, static_argnames="k", **mode)
    g = lib.jit_partial(
        lambda m, x: m(x), m, donate_argnums=(1,), keep_unused=True, inline=True, **mode
    )
    return f(1.0), f(1.0, k=3), g(jnp.ones(2)), m


@program("plain", "both")
def jit_partial_of_a_loop(lib, mode):
    net = models(lib).Net(lib.Rngs(0))
    optimizer = lib.Optimizer(net, optax.sgd(0.1), wrt=lib.Param)
    traces = []

    def step(net, optimizer, x):
        traces.append(0)
        loss, grads = lib.value_and_grad(lambda net: (net(x) ** 2).mean())(net)
        optimizer.update(net, grads)
        return loss

    run = lib.jit_partial(step, net, optimizer, **mode)
    return [run(X) for _ in range(3)], len(traces), lib.state(net)


@program()
def cached_partial_with_mutation(lib):
    m = models(lib).Counted()
    rngs = lib.Rngs(0)

    @lib.jit
    def f(m, rngs, x, k=1.0):
        m.w[...] += rngs.normal(())
        return m(x) * k

    g = lib.cached_partial(f, m, rngs)
    out = [g(1.0), g(1.0, k=2.0), g(x=3.0)]
    m.w[...] = 0.0
    return out, g(1.0), m, lib.state(rngs)


@program()
def cached_partial_of_other_transforms(lib):
    m = models(lib).Counted()
    xs = jnp.arange(3.0)
    f = lib.cached_partial(lib.vmap(lambda m, x: m.w * x, in_axes=(None, 0)), m)
    g = lib.cached_partial(lib.jit(lib.value_and_grad(lambda m, x: m(x))), m)
    return attempt(lambda: f(xs)), attempt(lambda: g(2.0)), m


@program()
def cached_partial_with_shared_objects(lib):
    m = models(lib).Counted()
    pair = lib.List([m, m.w])

    @lib.jit
    def f(m, pair, x):
        pair[1][...] += x
        return m.w * 1, pair[0] is m

    g = lib.cached_partial(f, m, pair)
    return g(1.0)[0], g(2.0)[0], m, pair[1] is m.w


@program()
def cached_partial_after_a_failure(lib):
    m = models(lib).Counted()

    @lib.jit
    def f(m, x):
        m.c[...] = 7
        if x.ndim:
            raise KeyError("inside")
        return m.c * 1

    g = lib.cached_partial(f, m)
    bad = attempt(lambda: g(jnp.ones(2)))
    return bad, plain(lib, m.c), g(jnp.ones(())), m


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
def trees_of_plain_leaves(lib):
    tree = lib.to_tree({"a": 1, "b": (jnp.ones(2), None), "c": lib.Param(1.0)})
    back = lib.from_tree(tree)
    return type(tree["c"]).__name__, tree["a"], tree["b"], back


@program()
def trees_through_jax(lib):
    m = models(lib).Counted(jnp.ones(3))
    out = jax.vmap(lambda t: jax.tree.map(lambda x: x * 2, t), in_axes=0)(
        lib.to_tree({"w": m.w, "s": lib.state(m, lib.Param)})
    )
    return lib.from_tree(out)


@program()
def trees_with_a_context(lib):
    m = models(lib).Counted()

    @lib.update_context("tag")
    def run(m):
        tree = lib.to_tree((m, m), ctxtag="tag")

        @jax.jit
        def inside(tree):
            a, b = lib.from_tree(tree, ctxtag="tag", is_inner=True)
            a(1.0)
            b.new = lib.Param(a.w * 2)
            return lib.to_tree((a, b), ctxtag="tag")

        return lib.from_tree(inside(tree), ctxtag="tag", is_inner=False)

    a, b = run(m)
    return a is m, b is m, m


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
def contexts_survive_failures(lib):
    m = models(lib).Counted()

    @lib.update_context("tag")
    def run(m):
        with lib.split_context("tag") as ctx:
            ctx.split(m)
        raise KeyError("inside")

    return attempt(lambda: run(m)), attempt(lambda: lib.current_update_context("tag")), m


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
def contexts_flatten_without_paths(lib):
    m = models(lib).Counted()
    with lib.split_context() as ctx:
        graphdef, flat = ctx.flatten(m)
        again, leaves = ctx.flatten(models(lib).Counted(), with_paths=False)
    return list(flat.paths), leaves, lib.merge(graphdef, lib.from_flat_state(flat))


@program()
def one_context_for_splits_without_a_tag(lib):
    m = models(lib).Counted()
    other = models(lib).Cell(1.0)
    other.next = m
    with lib.split_context() as ctx:
        one, two = ctx.split(m), ctx.split(other, lib.Param, ...)
    with lib.merge_context() as ctx:
        a, b = ctx.merge(*one), ctx.merge(*two)
    return b.next is a, a is m, [len(jax.tree.leaves(s)) for s in two[1:]]


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
