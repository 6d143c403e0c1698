"""Programs with derivatives, shapes, partials, trees and contexts, in both libraries."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import nnxlite as nnx
from tests.parity.layers import ref
from tests.parity.programs import (
    ALL_MODES,
    PLAIN_MODES,
    Programs,
    attempt,
    compare,
    models,
    plain,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

program = Programs()
all_modes = ("updates", "plain", "tree")
in_plain_modes = program(*PLAIN_MODES)
in_all_modes = program(*ALL_MODES)


# vjp ---------------------------------------------------------------------------------------------


@in_plain_modes
def vjp_of_a_network_with_dropout_and_statistics(lib, mode):
    net = models(lib).Net(lib.Rngs(0))

    @lib.jit
    def run(net, x):
        y, pull = lib.vjp(lambda net, x: net(x), net, x, **mode)
        d_net, d_x = pull(jnp.ones((4, 2)))
        return y, d_x, d_net.layers[0].kernel[...], d_net.norm.scale[...], d_net.norm.mean[...]

    return run(net, jnp.arange(8.0).reshape(4, 2)), lib.state(net)


# jvp ---------------------------------------------------------------------------------------------


@in_plain_modes
def jvp_refusals(lib, mode):
    m = models(lib).Foo()
    bad = [
        (1.0, 1.0),
        ((1.0,), (1.0, 2.0)),
        ((1.0,), (jnp.ones(2),)),
        ((1,), (1,)),
    ]
    out = []
    for primals, tangents in bad:
        try:
            lib.jvp(lambda *x: 1.0, primals, tangents, **mode)
        except Exception as error:
            out.append(type(error).__name__)
    return out, m


@program()
def grad_of_a_variable_given_bare_and_in_an_object(lib):
    m = lib.Dict(e=lib.Variable(jnp.array(2.0)), p=lib.Param(jnp.array(3.0)))
    first = lambda a: a[0] * a[1]["e"] * a[1]["p"]
    second = lambda a: a[1] * a[0]["e"] * a[0]["p"]
    return [
        lib.grad(first)([m["e"], m]),
        lib.grad(second)([m, m["e"]]),
        lib.grad(first)([m["p"], m]),
        lib.grad(lambda v, m: v * m["e"] * m["p"], argnums=(0, 1))(m["e"], m),
        lib.grad(lambda a: a["v"] * a["m"]["p"])({"v": m["e"], "m": m}),
    ]


# custom_vjp --------------------------------------------------------------------------------------


@program()
def custom_vjp_cotangents_of_inputs(lib):
    seen = []

    @lib.custom_vjp
    def f(m, x, d):
        m.x[...] = m.x[...] * 2
        return {"y": m.x * x, "v": lib.Param(m.y * 3)}

    def bwd(residual, g):
        seen.append(g)
        (d_m, none, d_d), d_out = g
        return d_m, None, {"m": d_d["m"], "k": None}

    f.defvjp(lambda m, x, d: (f(m, x, d), None), bwd)
    m, other = models(lib).Foo(), models(lib).Foo()

    def loss(m, other):
        out = f(m, 3.0, {"m": other, "k": 2.0})
        return out["y"] + out["v"] * 5 + m.x * 7

    grads = lib.grad(loss, argnums=(0, 1))(m, other)
    return seen, grads, m


@program()
def custom_vjp_called_too_early(lib):
    f = lib.custom_vjp(lambda m: m.x * 1.0)
    try:
        f(models(lib).Foo())
    except ValueError:
        return "refused"


@in_plain_modes
def custom_vjp_has_no_diff_state_without_updates(lib, mode):
    only = lib.DiffState(0, lib.Param)
    try:
        f = lib.custom_vjp(lambda m: m.x * 1.0, nondiff_argnums=(only,), **mode)
        f.defvjp(lambda m: (f(m), None), lambda r, g: (None,))
        f(models(lib).Foo())
    except ValueError:
        return "refused"


# remat -------------------------------------------------------------------------------------------


@in_all_modes
def remat_refuses_numbers_out_of_range(lib, mode):
    try:
        lib.remat(lambda m, x: x, static_argnums=5, **mode)(models(lib).Foo(), 1.0)
    except ValueError:
        return "refused"


# eval_shape, make_jaxpr, checkify ----------------------------------------------------------------


@program("plain")
def make_jaxpr_of_a_module(lib, mode):
    m = models(lib).Counted()
    one = lib.make_jaxpr(lambda m, x: (m(x), x), **mode)(m, 2.0)
    two = lib.make_jaxpr(static_argnums=1, **mode)(lambda m, k: m(1.0) * k)(m, 3)
    return str(one), str(two), m


# partials ----------------------------------------------------------------------------------------


@program()
def cached_partial_clones(lib):
    m = models(lib).Counted(jnp.ones(2))
    f = lib.cached_partial(lib.jit(lambda m, n, x: (m, n(x))), m)
    clone, y = f(m, 2.0)
    m.w[...] = jnp.zeros(2)
    return clone is m, clone.w is m.w, y, f(models(lib).Counted(), 1.0)[1], m


@program()
def cached_partial_refuses_structure_changes(lib):
    out = []
    for change in (lambda m: setattr(m, "size", 3), lambda m: setattr(m, "v", lib.Param(1.0))):
        m = models(lib).Counted()

        @lib.jit
        def f(m, change=change):
            m.c[...] = 9.0
            change(m)

        try:
            lib.cached_partial(f, m)()
        except ValueError:
            out.append(plain(lib, m))
    return out


# trees and contexts ------------------------------------------------------------------------------


@program()
def trees_with_split_and_merge_functions(lib):
    m = models(lib).Counted()
    seen = []
    axes = lib.StateAxes({lib.Param: 0, ...: None})

    def split_fn(ctx, path, prefix, x):
        seen.append((str(path), type(prefix).__name__, type(x).__name__))
        return lib.NodeStates.from_split(*ctx.split(x, *prefix.filters), metadata=prefix.axes)

    tree = lib.to_tree(({"m": m}, 2.0), prefix=(axes, 7), split_fn=split_fn)

    def merge_fn(ctx, path, prefix, leaf):
        seen.append((str(path), prefix, type(leaf).__name__))
        return ctx.merge(leaf.graphdef, *leaf.states)

    return seen, tree, lib.from_tree(tree, prefix=(0, 1), merge_fn=merge_fn)


@program()
def node_states(lib):
    m = models(lib).Counted()
    two = lib.NodeStates.from_split(*lib.split(m, lib.Param, ...), metadata="x")
    out = [two, two.replace(metadata=None), lib.NodeStates.from_prefixes((0, None))]
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(two)]
    for get in (lambda: two.state, lambda: lib.NodeStates.from_states(*two.states).graphdef):
        try:
            get()
        except ValueError:
            out.append("refused")
    return out, paths


@program()
def contexts_refuse(lib):
    out = []
    for enter in (
        lambda: lib.split_context("no"),
        lambda: lib.merge_context("no", inner=True),
    ):
        try:
            with enter():
                pass
        except ValueError as error:
            out.append(str(error)[:36])
    try:
        lib.current_update_context("no")
    except ValueError as error:
        out.append(str(error)[:36])
    with lib.update_context("yes"):
        try:
            with lib.merge_context("yes"):
                pass
        except ValueError as error:
            out.append(str(error)[:24])
    return out


def compat_names(lib):
    return {n for n, f in vars(lib.compat).items() if isinstance(f, functools.partial)}


def test_compat_has_the_names_of_the_reference():
    assert compat_names(ref) <= compat_names(nnx)


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
