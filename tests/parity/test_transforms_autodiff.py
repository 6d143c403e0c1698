"""Programs with derivatives, rematerialization, shapes, partials and trees, in both libraries.

Each program takes the library and returns what a user would look at; both must return the same.
"""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

from tests.parity.layers import ref
from tests.parity.programs import ALL_MODES, PLAIN_MODES, Programs, compare, plain

import nnxlite as nnx  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

program = Programs()
in_plain_modes = program(*PLAIN_MODES)
in_all_modes = program(*ALL_MODES)


@functools.cache
def models(lib):
    """The modules of the programs, made with one of the libraries."""

    class Counted(lib.Module):
        def __init__(self):
            self.w = lib.Param(jnp.array([1.0, 2.0]))
            self.c = lib.BatchStat(jnp.array(3.0))

        def __call__(self, x):
            self.c[...] += 1
            return self.w[...] * x * self.c[...]

    class Foo(lib.Module):
        def __init__(self, x=1.0, y=2.0):
            self.x = lib.Param(jnp.array(x))
            self.y = lib.Param(jnp.array(y))
            self.n = lib.BatchStat(jnp.array(0.0))

    class Net(lib.Module):
        def __init__(self, rngs):
            self.layer = lib.Linear(2, 3, rngs=rngs)
            self.norm = lib.BatchNorm(3, rngs=rngs)
            self.drop = lib.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(jnp.tanh(self.norm(self.layer(x))))

    class Tied(lib.Module):
        def __init__(self):
            self.a = lib.Param(jnp.array([1.0, -2.0]))
            self.b = self.a

        def __call__(self, x):
            return jnp.sin(self.a[...]) * self.b[...] * x

    return types.SimpleNamespace(Counted=Counted, Foo=Foo, Net=Net, Tied=Tied)


# vjp ---------------------------------------------------------------------------------------------


@in_plain_modes
def vjp_of_a_module_and_an_array(lib, mode):
    m = models(lib).Counted()
    y, pull = lib.vjp(lambda m, x: m(x), m, jnp.array([1.0, 3.0]), **mode)
    return y, pull(jnp.array([1.0, 10.0])), pull(jnp.ones(2)), m


@in_plain_modes
def vjp_with_aux(lib, mode):
    m = models(lib).Counted()
    y, pull, aux = lib.vjp(lambda m, x: (m(x), {"k": x * 2}), m, jnp.ones(2), has_aux=True, **mode)
    return y, pull(jnp.ones(2)), aux, m


@in_plain_modes
def vjp_later_forms(lib, mode):
    m = models(lib).Counted()
    out = []
    for later in (lib.vjp(lambda m: m(2.0), **mode), lib.vjp(**mode)(lambda m: m(2.0))):
        y, pull = later(m)
        out.append((y, pull(jnp.ones(2)), m))
    return out


@in_plain_modes
def vjp_of_a_network_with_dropout_and_statistics(lib, mode):
    net = models(lib).Net(lib.Rngs(0))

    @lib.jit
    def run(net, x):
        y, pull = lib.vjp(lambda net, x: net(x), net, x, **mode)
        d_net, d_x = pull(jnp.ones((4, 3)))
        return y, d_x, d_net.layer.kernel[...], d_net.norm.scale[...], d_net.norm.mean[...]

    return run(net, jnp.arange(8.0).reshape(4, 2)), lib.state(net)


@in_plain_modes
def vjp_of_an_unbound_method(lib, mode):
    cls = models(lib).Counted
    m = cls()
    y, pull = lib.vjp(cls.__call__, m, 2.0, **mode)
    return y, pull(jnp.ones(2)), m


@in_plain_modes
def vjp_of_integers(lib, mode):
    y, pull = lib.vjp(lambda n, x: n * x, 2, jnp.array([1.0, 2.0]), **mode)
    d_n, d_x = pull(jnp.ones(2))
    return y, d_n.dtype == jax.dtypes.float0, d_x


@program("plain")
def vjp_of_a_shared_module(lib, mode):
    m = models(lib).Counted()
    y, pull = lib.vjp(lambda a, b: a(1.0) + b["m"](2.0), m, {"m": m}, **mode)
    d_a, d_b = pull(jnp.ones(2))
    return y, d_a, d_a is d_b["m"], m


@program("plain")
def vjp_of_tied_weights(lib, mode):
    m = models(lib).Tied()
    y, pull = lib.vjp(lambda m, x: m(x), m, 2.0, **mode)
    d_m, d_x = pull(jnp.ones(2))
    return y, d_m.a, d_m.a is d_m.b, d_x


@in_plain_modes
def vjp_of_variables_and_states(lib, mode):
    m = models(lib).Foo()
    y, pull = lib.vjp(lambda v, s: v * s["y"], m.x, lib.state(models(lib).Foo()), **mode)
    return y, pull(1.0)


@in_plain_modes
def vjp_inside_jit_and_grad(lib, mode):
    m = models(lib).Counted()

    @lib.jit
    def step(m):
        y, pull = lib.vjp(lambda m: m(1.0), m, **mode)
        return y, pull(y)

    first = step(m)

    def loss(m):
        _, pull = lib.vjp(lambda x: m.w[...] * x**3, jnp.array(2.0), **mode)
        return pull(jnp.ones(2))[0]

    return first, m, lib.grad(loss)(m)


@in_plain_modes
def vjp_of_captured_values(lib, mode):
    m = models(lib).Foo()
    y, pull = lib.vjp(lambda x: m.y * x, 3.0, **mode)
    return y, pull(1.0)


@in_plain_modes
def vjp_that_fails_changes_nothing(lib, mode):
    m = models(lib).Foo()

    def f(m):
        m.n[...] = 5.0
        raise KeyError("inside")

    try:
        lib.vjp(f, m, **mode)
    except KeyError:
        return m


# jvp ---------------------------------------------------------------------------------------------


@in_plain_modes
def jvp_of_a_module_and_an_array(lib, mode):
    m = models(lib).Counted()
    x = jnp.array([1.0, 3.0])
    out = lib.jvp(lambda m, x: m(x), (m, x), (jax.tree.map(jnp.ones_like, m), x), **mode)
    return out, m


@in_plain_modes
def jvp_with_aux(lib, mode):
    m = models(lib).Counted()
    f = lambda m: (m(2.0), m.c * 2)
    return lib.jvp(f, (m,), (jax.tree.map(jnp.ones_like, m),), has_aux=True, **mode), m


@in_plain_modes
def jvp_later_forms(lib, mode):
    m = models(lib).Foo()
    t = jax.tree.map(jnp.ones_like, m)
    f = lambda m: m.x * m.y
    return lib.jvp(f, **mode)((m,), (t,)), lib.jvp(**mode)(f)([m], [t])


@in_plain_modes
def jvp_with_a_variable_as_result(lib, mode):
    m = models(lib).Foo()
    return lib.jvp(lambda m: lib.Param(m.x * 3), (m,), (jax.tree.map(jnp.ones_like, m),), **mode)


@in_plain_modes
def jvp_of_what_is_written(lib, mode):
    m = models(lib).Foo()

    def f(m):
        m.n[...] = m.x[...] * 4
        return m.n * 1.0

    return lib.jvp(f, (m,), (jax.tree.map(jnp.ones_like, m),), **mode), m


@program("plain")
def jvp_of_a_shared_module(lib, mode):
    m = models(lib).Counted()
    t = jax.tree.map(jnp.ones_like, m)
    return lib.jvp(lambda a, b: a(1.0) + b(2.0), (m, m), (t, t), **mode), m


@in_plain_modes
def jvp_of_integers(lib, mode):
    zero = np.zeros((), jax.dtypes.float0)
    return lib.jvp(lambda n, x: n * x, (2, 3.0), (zero, 1.0), **mode)


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


def sine(lib, mode, write=None, nondiff=(), fwd_calls=True):
    """`sin(x) y a` with ten times its gradient."""
    updates = mode == {}

    @lib.custom_vjp(nondiff_argnums=nondiff, **mode)
    def f(m, a):
        if write is not None:
            write(m)
        return jnp.sin(m.x[...]) * m.y[...] * a

    def fwd(m, a):
        y = f(m, a) if fwd_calls else jnp.sin(m.x[...]) * m.y[...] * a
        return y, (m, a)

    def bwd(*args):
        m, a = args[-2]
        g = args[-1][1] if updates else args[-1]
        if updates:
            d_m = jax.tree.map(lambda x: x, args[-1][0][0])
            d_m["x"][...] += 10 * jnp.cos(m.x[...]) * m.y[...] * a * g
            d_m["y"][...] += 10 * jnp.sin(m.x[...]) * a * g
        else:
            d_m = jax.tree.map(jnp.zeros_like, m)
            d_m.x[...] = 10 * jnp.cos(m.x[...]) * m.y[...] * a * g
            d_m.y[...] = 10 * jnp.sin(m.x[...]) * a * g
        return (d_m,) if 1 in nondiff else (d_m, 10 * jnp.sin(m.x[...]) * m.y[...] * g)

    f.defvjp(fwd, bwd)
    return f


def count(m):
    m.n[...] += 1


@in_all_modes
def custom_vjp_of_a_module(lib, mode):
    f = sine(lib, mode)
    m = models(lib).Foo()
    return f(m, 3.0), lib.grad(f)(m, 3.0), lib.grad(f, argnums=(0, 1))(m, 3.0)


@in_all_modes
def custom_vjp_that_writes(lib, mode):
    f = sine(lib, mode, count)
    m = models(lib).Foo()
    f(m, 3.0)
    return lib.grad(f)(m, 3.0), m


@in_all_modes
def custom_vjp_whose_forward_rule_does_not_write(lib, mode):
    f = sine(lib, mode, count, fwd_calls=False)
    m = models(lib).Foo()
    return lib.grad(f)(m, 3.0), m


@in_all_modes
def custom_vjp_under_jit(lib, mode):
    f = sine(lib, mode, count)
    m = models(lib).Foo()
    return lib.jit(lib.grad(f))(m, 3.0), lib.grad(lib.jit(f))(m, 3.0), m


@in_all_modes
def custom_vjp_without_an_argument(lib, mode):
    f = sine(lib, mode, nondiff=(1,))
    return lib.grad(f)(models(lib).Foo(), 3.0)


@in_all_modes
def custom_vjp_with_keywords(lib, mode):
    f = sine(lib, mode)
    m = models(lib).Foo()
    return f(m, a=3.0), lib.grad(lambda m: f(a=3.0, m=m))(m)


@in_all_modes
def custom_vjp_value_and_grad_with_more_around(lib, mode):
    f = sine(lib, mode, count)
    m = models(lib).Foo()
    return lib.value_and_grad(lambda m: f(m, 3.0) ** 2 + f(m, 1.0))(m), m


@in_plain_modes
def custom_vjp_of_a_whole_module_left_out(lib, mode):
    @lib.custom_vjp(nondiff_argnums=(0,), **mode)
    def f(m, x):
        return m.x * x

    f.defvjp(lambda m, x: (f(m, x), x), lambda m, x, g: (m.y * g,))
    return lib.grad(f, argnums=1)(models(lib).Foo(), 3.0)


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
def custom_vjp_of_a_structure_change(lib):
    @lib.custom_vjp
    def f(m):
        m.size = 3
        return m.x * 2.0

    f.defvjp(lambda m: (f(m), None), lambda r, g: (jax.tree.map(lambda v: v + g[1], g[0][0]),))
    m = models(lib).Foo()
    return lib.grad(f)(m), m.size


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
def remat_of_a_network(lib, mode):
    net = models(lib).Net(lib.Rngs(0))
    x = jnp.arange(8.0).reshape(4, 2)
    f = lib.jit(lib.grad(lib.remat(lambda net, x: (net(x) ** 2).sum(), **mode)))
    return f(net, x), f(net, x), lib.state(net)


@in_all_modes
def remat_with_options(lib, mode):
    policy = jax.checkpoint_policies.dots_saveable
    f = lib.remat(
        lambda m, x, k: m(x).sum() * (2 if k else 3),
        static_argnums=(2,),
        policy=policy,
        prevent_cse=False,
        **mode,
    )
    m = models(lib).Counted()
    return f(m, 2.0, True), lib.grad(lambda m: f(m, 2.0, False))(m), m


@in_all_modes
def remat_as_a_decorator_of_a_method(lib, mode):
    class Outer(lib.Module):
        def __init__(self):
            self.inner = models(lib).Counted()

        @lib.remat(**mode)
        def __call__(self, x):
            return self.inner(x)

    m = Outer()
    return m(2.0), lib.grad(lambda m: m(1.0).sum())(m), lib.state(m)


@program("updates")
def remat_with_static_keywords(lib, mode):
    class Outer(lib.Module):
        def __init__(self):
            self.inner = models(lib).Counted()

        @functools.partial(lib.remat, static_argnums=(2,), **mode)
        def __call__(self, x, train=True):
            return self.inner(x) if train else x

    m = Outer()
    ys = m(2.0), m(2.0, train=True), m(2.0, train=False), m(train=False, x=3.0), m(2.0, True)
    ys = [jnp.asarray(y) for y in ys]  # eagerly JAX returns a literal for what is constant
    return ys, lib.grad(lambda m: m(1.0, train=True).sum())(m), lib.state(m)


@program()
def remat_of_a_structure_change(lib):
    m = models(lib).Counted()

    def f(m, x):
        m.new = lib.Param(m.w * x)
        m.size = 3
        return m

    return lib.remat(f)(m, 2.0) is m, m.new, m.size


@program("updates", "plain")
def remat_of_a_shared_module(lib, mode):
    m = models(lib).Counted()
    return lib.remat(lambda a, b: a(1.0) + b(1.0), **mode)(m, m), m


@in_all_modes
def remat_refuses_numbers_out_of_range(lib, mode):
    try:
        lib.remat(lambda m, x: x, static_argnums=5, **mode)(models(lib).Foo(), 1.0)
    except ValueError:
        return "refused"


# eval_shape, make_jaxpr, checkify ----------------------------------------------------------------


@in_all_modes
def eval_shape_of_an_initializer(lib, mode):
    rngs = lib.Rngs(0)
    x = jax.ShapeDtypeStruct((4, 2), jnp.float32)

    def init(rngs, x):
        m = lib.Linear(2, 3, rngs=rngs)
        return m, m(x)

    return lib.eval_shape(init, rngs, x, **mode), lib.state(rngs)


@in_all_modes
def eval_shape_changes_nothing(lib, mode):
    m = models(lib).Counted()
    return lib.eval_shape(lambda m, *, x: m(x), m, x=jnp.ones(2), **mode), m


@in_all_modes
def eval_shape_of_an_abstract_model(lib, mode):
    m = lib.eval_shape(models(lib).Counted, **mode)
    return m, lib.eval_shape(lambda m: (m(1.0), None, 2), m, **mode)


@program()
def eval_shape_of_the_argument_itself(lib):
    m = models(lib).Counted()

    def f(m):
        m.new = lib.Param(jnp.ones(3))
        return m

    out = lib.eval_shape(f, m)
    return out is m, out, m


@program("plain")
def make_jaxpr_of_a_module(lib, mode):
    m = models(lib).Counted()
    one = lib.make_jaxpr(lambda m, x: (m(x), x), **mode)(m, 2.0)
    two = lib.make_jaxpr(static_argnums=1, **mode)(lambda m, k: m(1.0) * k)(m, 3)
    return str(one), str(two), m


@in_all_modes
def checkify_of_a_module(lib, mode):
    m = models(lib).Counted()

    def f(m, x):
        checkify.check(x > 0, "x must be positive, got {x}", x=x)
        return m(x)

    good, y = lib.checkify(f, **mode)(m, jnp.array(2.0))
    bad, z = lib.checkify(f, **mode)(m, jnp.array(-2.0))
    return good.get(), y, bad.get().splitlines()[0][:30], z, m


@program()
def checkify_with_other_errors(lib):
    m = models(lib).Counted()
    error, _ = lib.checkify(lambda m: jnp.log(-m.w), errors=checkify.float_checks)(m)
    return error.get().split(" (")[0]


# partials ----------------------------------------------------------------------------------------


@in_plain_modes
def jit_partial_of_a_module(lib, mode):
    m = models(lib).Counted()
    f = lib.jit_partial(lambda m, k, x: m(x) * k, m, 3, static_argnums=1, **mode)
    first = f(1.0)
    m.w[...] = jnp.zeros(2)
    return first, f(x=2.0), m


def train(lib, wrap):
    m = models(lib).Net(lib.Rngs(0))
    optimizer = lib.Optimizer(m, optax.sgd(0.1), wrt=lib.Param)
    x = jnp.arange(8.0).reshape(4, 2)

    def step(m, optimizer, x):
        loss, grads = lib.value_and_grad(lambda m: (m(x) ** 2).mean())(m)
        optimizer.update(m, grads)
        return loss

    step = wrap(step, m, optimizer)
    return [step(x) for _ in range(3)], lib.state(m), optimizer.step


@program("plain")
def jit_partial_training(lib, mode):
    return train(lib, functools.partial(lib.jit_partial, **mode))


@program()
def cached_partial_training(lib):
    return train(lib, lambda step, *args: lib.cached_partial(lib.jit(step), *args))


@program()
def cached_partial_clones(lib):
    m = models(lib).Counted()
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


@program()
def cached_partial_allows_temporary_changes(lib):
    m = models(lib).Counted()

    @lib.jit
    def f(m, x):
        m.sow(lib.Intermediate, "i", x)
        m.flag = 1
        del m.flag
        return lib.pop(m, lib.Intermediate)["i"].get_value()[0] + m(x)

    g = lib.cached_partial(f, m)
    return g(1.0), g(2.0), m


@in_plain_modes
def cached_partial_needs_updates(lib, mode):
    try:
        lib.cached_partial(lib.jit(lambda m: None), models(lib).Foo(), **mode)()
    except ValueError:
        return "refused"


# trees and contexts ------------------------------------------------------------------------------


@program()
def trees_there_and_back(lib):
    m = models(lib).Tied()
    tree = lib.to_tree((m, 3, [m, {"v": m.a}, jnp.ones(1)]))
    a, three, (b, rest, ones) = lib.from_tree(tree)
    return len(jax.tree.leaves(tree)), a is b, rest["v"] is a.a, three, a, ones


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
def trees_refuse_inconsistent_prefixes(lib):
    m = models(lib).Foo()
    out = []
    for tree, prefix in (((m, {"a": m}), (0, 1)), ((m.x, m), (0, 1)), ((m, 1), (0, 0, 0))):
        try:
            lib.to_tree(tree, prefix=prefix)
        except ValueError:
            out.append("refused")
    lib.to_tree((m, {"a": m}), prefix=(0, 0))
    lib.to_tree((m, {"a": m}), prefix=(0, 1), check_aliasing=False)
    return out


@program()
def trees_of_states_under_jax(lib):
    m = models(lib).Foo()
    tree = jax.jit(lambda t: jax.tree.map(lambda x: x * 2, t))(lib.to_tree((lib.state(m), m.x)))
    state, x = lib.from_tree(tree)
    return state, x, state["x"] is x


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
def update_context_by_hand(lib):
    m = models(lib).Foo()

    @jax.jit
    def f(graphdef, state):
        with lib.merge_context("ctx", inner=True) as ctx:
            m = ctx.merge(graphdef, state)
        m.x[...] = m.x[...] + 1
        m.size = 3
        m.me = m
        m.new = lib.Param(m.y * 2)
        m.x.set_metadata("tag", "t")
        del m.n
        with lib.split_context("ctx") as ctx:
            return ctx.split(m)

    @lib.update_context("ctx")
    def run(m):
        with lib.split_context("ctx") as ctx:
            parts = ctx.split(m)
        out = f(*parts)
        with lib.merge_context("ctx", inner=False) as ctx:
            return ctx.merge(*out)

    x = m.x
    return run(m) is m, m.me is m, m.x is x, m.size, hasattr(m, "n"), lib.state(m), x.tag


@program()
def update_context_of_several_objects(lib):
    m, other = models(lib).Foo(), models(lib).Tied()
    other.x = m.x
    with lib.update_context("ctx") as context:
        with lib.split_context("ctx") as ctx:
            first, second = ctx.split(m, lib.Param, ...), ctx.split(other)
        with lib.merge_context("ctx", inner=True) as ctx:
            a, b = ctx.merge(*first), ctx.merge(*second)
        shared = a.x is b.x, a.x is m.x
        b.x[...] = 7.0
        b.friend = a
        same = lib.current_update_context("ctx") is context
        with lib.split_context("ctx") as ctx:
            first, second = ctx.split(a), ctx.split(b)
        with lib.merge_context("ctx", inner=False) as ctx:
            a, b = ctx.merge(*first), ctx.merge(*second)
    return shared, same, a is m, b is other, b.friend is m, m.x, len(second[1])


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


@program()
def compat_functions(lib):
    m = models(lib).Tied()
    with lib.set_graph_mode(False), lib.set_graph_updates(False):
        leaves = len(jax.tree.leaves(lib.compat.split(m)[1]))

        @lib.compat.jit
        def grow(m):
            m.new = lib.Param(m.a * 2)
            return m

        same = grow(m) is m
        grads = lib.compat.grad(lambda m: m(1.0).sum())(m)
    return leaves, same, m.new, grads


def compat_names(lib):
    return {n for n, f in vars(lib.compat).items() if isinstance(f, functools.partial)}


def test_compat_has_the_names_of_the_reference():
    assert compat_names(ref) <= compat_names(nnx)


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
