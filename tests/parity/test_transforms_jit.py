"""Programs with jit, in both libraries."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.parity.programs import (
    Programs,
    X,
    attempt,
    compare,
    mesh_of,
    models,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

program = Programs()
plain_modes = ("plain", "tree")
all_modes = ("updates", "plain", "tree")


@program("updates", "tree")
def jit_of_a_network(lib, mode):
    net = models(lib).Net(lib.Rngs(0))
    f = lib.jit(lambda net, x: net(x), **mode)
    return f(net, X), f(net, X), lib.state(net)


@program("updates", "tree")
def jit_of_a_training_step(lib, mode):
    net = models(lib).Net(lib.Rngs(0))
    optimizer = lib.Optimizer(net, optax.adam(1e-2), wrt=lib.Param)
    metrics = lib.MultiMetric(loss=lib.metrics.Average("loss"))

    @lib.jit(**mode)
    def step(net, optimizer, metrics, x):
        params = lib.DiffState(0, lib.Param)
        loss, grads = lib.value_and_grad(lambda net: (net(x) ** 2).mean(), argnums=params)(net)
        optimizer.update(net, grads)
        metrics.update(loss=loss)
        return loss

    losses = [step(net, optimizer, metrics, X) for _ in range(3)]
    return losses, lib.state(net), lib.state(optimizer), metrics.compute()


@program(*all_modes)
def jit_counts_its_traces(lib, mode):
    traces = []

    @lib.jit(static_argnames=("k",), **mode)
    def f(m, x, k=1):
        traces.append(k)
        return m(x) * k

    m, other = models(lib).Counted(), models(lib).Counted()
    out = [f(m, 1.0), f(m, 2.0), f(other, 1.0), f(m, 1.0, k=2), f(m, 1.0, 2), f(m, jnp.ones(2))]
    other.size = 3
    return out, f(other, 1.0), len(traces)


@program(*all_modes)
def jit_with_static_arguments(lib, mode):
    m = models(lib).Counted()
    f = lib.jit(lambda m, op, x, *, n: op(m(x)) * n, static_argnums=1, static_argnames="n", **mode)
    g = lib.jit(lambda m, *, flag: m(1.0) if flag else 0.0, static_argnames=["flag"], **mode)
    h = lib.jit(lambda k, m: m(1.0) * k, static_argnums=(0,), **mode)
    return f(m, jnp.sin, 2.0, n=3), g(m, flag=True), g(m, flag=False), h(2, m), m


@program("updates", "plain")
def jit_with_donated_arguments(lib, mode):
    m = models(lib).Counted(jnp.ones(3))

    def f(m, x):
        m.w[...] = m.w + x
        return m.w * 1

    by_number = lib.jit(f, donate_argnums=0, **mode)
    by_name = lib.jit(f, donate_argnames=("x",), **mode)
    return by_number(m, 1.0), by_name(m, jnp.ones(3)), m


@program(*all_modes)
def jit_other_options(lib, mode):
    m = models(lib).Counted()
    f = lambda m, x, y: m(x)
    return [
        lib.jit(f, keep_unused=True, **mode)(m, 1.0, 2.0),
        lib.jit(f, inline=True, **mode)(m, 1.0, 2.0),
        lib.jit(lib.jit(f, inline=True, **mode), **mode)(m, 1.0, 2.0),
        m,
    ]


@program(*all_modes)
def jit_of_keywords_and_defaults(lib, mode):
    m = models(lib).Counted()

    @lib.jit(**mode)
    def f(m, x=2.0, *args, k=3.0, **rest):
        return m(x) + k + sum(args) + sum(rest.values())

    out = [f(m), f(m, 1.0), f(m=m, x=1.0), f(m, 1.0, 2.0, 3.0, k=1.0, z=2.0, a=1.0)]
    return out, f.__name__, m


@program(*all_modes)
def jit_of_methods(lib, mode):
    class Model(lib.Module):
        def __init__(self):
            self.c = lib.Variable(jnp.array(0))

        @lib.jit(**mode)
        def count(self, by):
            """Count."""
            self.c[...] += by

        @functools.partial(lib.jit, static_argnums=1, **mode)
        def power(self, n):
            return (self.c + 1) ** n

    m = Model()
    m.count(2)
    Model.count(m, 3)
    return m.c, m.power(2), Model.count.__doc__, Model.count.__name__


@program("updates", "plain", newer=True)
def jit_of_bound_methods_and_callables(lib, mode):
    m = models(lib).Counted()
    cls = models(lib).Counted
    return lib.jit(cls.make, **mode)(3.0), attempt(lambda: lib.jit(cls, **mode)(3.0)), m


@program(*all_modes)
def jit_makes_modules(lib, mode):
    @lib.jit(static_argnums=1, **mode)
    def make(key, n):
        return lib.Linear(2, n, rngs=lib.Rngs(key)), {"cell": models(lib).Cell(1.0)}

    linear, rest = make(jax.random.key(0), 3)
    return linear, linear.out_features, rest, rest["cell"].next


@program("updates")
def jit_changes_structure(lib, mode):
    m = models(lib).Counted()
    w = m.w

    @lib.jit
    def f(m, x):
        m.extra = lib.Dict(a=lib.Param(x), b=lib.List([m.w, lib.Cache(x * 2)]))
        m.name = "changed"
        m.array = lib.data(x + 1)
        m.me = m
        del m.c
        return m.extra, m.w

    extra, same = f(m, 3.0)
    return (
        extra is m.extra,
        same is w,
        m.extra.b[0] is w,
        m.me is m,
        m.name,
        m.array,
        hasattr(m, "c"),
        [path for path, _ in lib.to_flat_state(lib.state(m))],
        extra,
    )


@program("updates")
def jit_swaps_and_replaces(lib, mode):
    a, b = models(lib).Counted(1.0), models(lib).Counted(2.0)
    wa, wb, cb = a.w, b.w, b.c

    @lib.jit
    def f(a, b):
        a.w, b.w = b.w, a.w
        a.w[...] += 10
        b.c = lib.Cache(jnp.ones(2))
        a.other = b

    f(a, b)
    return a.w is wb, b.w is wa, b.c is cb, a.other is b, a, b


@program("updates")
def jit_builds_a_linked_list(lib, mode):
    @lib.jit(static_argnums=1)
    def grow(cell, n):
        for i in range(n):
            cell.next = models(lib).Cell(cell.value + i)
            cell = cell.next
        return cell

    first = models(lib).Cell(1.0)
    last = grow(first, 3)
    closed = lib.jit(lambda a, b: setattr(b, "next", a))
    closed(first, last)
    return last.next is first, first.next.next.next is last, lib.state(first)


@program("updates")
def jit_edits_lists_and_dicts(lib, mode):
    m = lib.Dict(a=lib.List([lib.Param(jnp.array(1.0)), lib.Param(2.0)]), b=lib.Param(3.0))
    first, b = m.a[0], m.b

    @lib.jit
    def f(m):
        m.a.append(lib.Param(m.b * 2))
        m["c"] = m.a.pop(0)
        m.a[0][...] = 7.0
        del m["b"]

    f(m)
    return m["c"] is first, len(m.a), "b" in m, b, m


@program("updates", "plain")
def jit_keeps_sharing_between_arguments(lib, mode):
    a, b = models(lib).Counted(), models(lib).Counted()
    b.w = a.w
    seen = []

    @lib.jit(**mode)
    def f(a, pair, w):
        seen.append((a.w is pair[1].w, a is pair[0], w is a.w))
        w[...] += 1
        return a.w * pair[1].w

    return f(a, (a, b), a.w), seen, a.w, b.w is a.w


@program("updates", "plain")
def jit_of_states_variables_and_containers(lib, mode):
    m = models(lib).Net(lib.Rngs(0))
    graphdef, params, rest = lib.split(m, lib.Param, ...)
    f = lib.jit(lambda graphdef, params, rest, x: lib.merge(graphdef, params, rest)(x), **mode)
    v = lib.Param(jnp.ones(2))

    @lib.jit(**mode)
    def write(v, tree):
        v[...] = v * 2
        tree["x"][0][...] = 5.0
        return tree["y"]

    w = lib.Variable(jnp.zeros(()))
    return f(graphdef, params, rest, X), write(v, {"x": [w], "y": (1, None, 2.0)}), v, w


@program(*all_modes)
def jit_returns_nothing_and_containers(lib, mode):
    m = models(lib).Counted()
    f = lib.jit(lambda m: None, **mode)
    g = lib.jit(lambda m: (m.w * 1, [None, {"a": 1, "b": ()}]), **mode)
    return f(m), g(m), lib.jit(lambda: 3, **mode)()


@program("updates", "plain")
def jit_nested_in_transforms(lib, mode):
    m = models(lib).Counted()

    @lib.jit(**mode)
    def inner(m, x):
        return m(x)

    @lib.jit(**mode)
    def outer(m, x):
        y = inner(m, x)
        grads = lib.grad(lambda m: inner(m, 1.0), **mode)(m)
        return y + inner(m, y), grads

    return outer(m, 1.0), lib.vmap(inner, in_axes=(None, 0), **mode)(m, jnp.ones(3)), m


@program("updates", "plain")
def jit_with_shardings(lib, mode):
    mesh = mesh_of(2)
    data, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    m = models(lib).Counted(jnp.ones(4))
    f = lib.jit(lambda m, x: m.w * x, in_shardings=(whole, data), out_shardings=data, **mode)
    y = f(m, jnp.ones(4))
    return y, str(y.sharding.spec)


@program("updates")
def jit_with_shardings_by_filter(lib, mode):
    mesh = mesh_of(2)
    shardings = lib.StateSharding(
        {lib.Param: NamedSharding(mesh, P("data")), ...: NamedSharding(mesh, P())}
    )

    @lib.jit(in_shardings=(shardings, None), out_shardings=None)
    def f(m, x):
        m.w[...] = m.w * x
        return m.w.sum()

    @lib.jit(out_shardings=shardings)
    def make():
        return models(lib).Counted(jnp.ones(4))

    m, made = models(lib).Counted(jnp.ones(4)), make()
    return f(m, 2.0), str(m.w[...].sharding.spec), str(made.w[...].sharding.spec), m


@program("updates", "plain")
def jit_ahead_of_time(lib, mode):
    m = models(lib).Counted()
    f = lib.jit(lambda m, x: m(x), **mode)
    compiled = f.lower(m, 1.0).compile()
    return compiled(m, 2.0), m, f.eval_shape(m, 1.0) if hasattr(f, "eval_shape") else None


@program("updates", "plain")
def jit_ahead_of_time_with_static_arguments(lib, mode):
    m = models(lib).Counted()
    f = lib.jit(lambda m, x, n=2: m(x) * n, static_argnames="n", **mode)
    compiled = f.lower(m, 1.0, n=3).compile()
    outcomes = [compiled(m, 2.0)]
    for args, kwargs in (((3,), {}), ((), {"n": 3})):
        try:
            outcomes.append(compiled(m, 2.0, *args, **kwargs))
        except TypeError:
            outcomes.append("refused")
    return outcomes, m


@program(*all_modes)
def jit_refusals(lib, mode):
    m = models(lib).Counted()
    f = lambda m, x: m(x)

    def kept(m):
        m.c[...] = 9
        raise KeyError("inside")

    def branches(m):
        return 1 if m.w > 0 else 2

    other = models(lib).Counted()

    def captured(x):
        other.c[...] += 1

    calls = [
        lambda: lib.jit(f, **mode)(m),
        lambda: lib.jit(f, **mode)(m, "text"),
        lambda: lib.jit(f, static_argnums=5, **mode)(m, 1.0),
        lambda: lib.jit(f, static_argnums=1, **mode)(m, jnp.ones(2)),
        lambda: lib.jit(f, static_argnames="y", **mode)(m, 1.0),
        lambda: lib.jit(kept, **mode)(m),
        lambda: lib.jit(branches, **mode)(m),
        lambda: lib.jit(captured, **mode)(1.0),
        lambda: lib.jit(lambda m: "text", **mode)(m),
        lambda: lib.jit(lambda m: m.missing, **mode)(m),
        lambda: lib.jit(lambda m: setattr(m.w, "value", "text"), **mode)(m),
    ]
    return [attempt(call) for call in calls], m.w, other


@program(*plain_modes)
def jit_without_updates_refuses_aliases(lib, mode):
    m = models(lib).Counted()

    return [
        attempt(lambda: lib.jit(lambda m: m, **mode)(m)),
        attempt(lambda: lib.jit(lambda m: {"w": m.w}, **mode)(m)),
        attempt(lambda: lib.jit(lambda a, b: a.w * b.w, **mode)(m, m)),
        attempt(lambda: lib.cond(True, lambda m: m, lambda m: m, m, **mode)),
        attempt(lambda: lib.vmap(lambda m: m, in_axes=None, axis_size=2, **mode)(m)),
        attempt(lambda: lib.remat(lambda m: m.w, **mode)(m)),
        attempt(lambda: lib.grad(lambda m: (m.w * 1.0, m), has_aux=True, **mode)(m)),
        attempt(lambda: lib.checkify(lambda m: m.w, **mode)(m)),
        m,
    ]


@program("updates")
def jit_leaks_are_refused(lib, mode):
    kept = []

    @lib.jit
    def f(m):
        kept.append(m)
        return m(1.0)

    f(models(lib).Counted())
    return attempt(lambda: setattr(kept[0], "size", 3))


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
