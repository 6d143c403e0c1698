"""Programs with jit, branches and loops, and other forms of calls, in both libraries."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
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
def jit_of_keywords_and_defaults(lib, mode):
    m = models(lib).Counted()

    @lib.jit(**mode)
    def f(m, x=2.0, *args, k=3.0, **rest):
        return m(x) + k + sum(args) + sum(rest.values())

    out = [f(m), f(m, 1.0), f(m=m, x=1.0), f(m, 1.0, 2.0, 3.0, k=1.0, z=2.0, a=1.0)]
    return out, f.__name__, m


@program("updates", "plain", newer=True)
def jit_of_bound_methods_and_callables(lib, mode):
    m = models(lib).Counted()
    cls = models(lib).Counted
    return lib.jit(cls.make, **mode)(3.0), attempt(lambda: lib.jit(cls, **mode)(3.0)), m


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


# cond and switch ---------------------------------------------------------------------------------


@program("updates")
def fori_loop_that_returns_a_captured_object(lib, mode):
    m, start = models(lib).Counted(), models(lib).Counted()
    m.w[...] = 7.0
    out = lib.fori_loop(0, 2, lambda i, c: (m, c[1] + i), (start, 0), **mode)
    none = lib.fori_loop(0, 0, lambda i, c: m, start, **mode)
    return out, none, out[0] is m, out[0] is start, start, m


@program("plain", "tree")
def fori_loop_without_updates_keeps_its_variables(lib, mode):
    m = models(lib).Counted()
    return attempt(lambda: lib.fori_loop(0, 2, lambda i, c: m, models(lib).Counted(), **mode))


@program("updates", "plain")
def switch_between_layers(lib, mode):
    layers = lib.List([lib.Linear(2, 2, rngs=lib.Rngs(i)) for i in range(3)])
    branches = [lambda ls, x, i=i: ls[i](x) for i in range(3)]
    run = lambda i: lib.switch(i, branches, layers, X, **mode)
    return run(0), run(jnp.array(2)), run(7), run(-1), layers


@program(*all_modes)
def branch_refusals(lib, mode):
    m = models(lib).Counted()

    def adds(m):
        m.new = lib.Param(1.0)
        return 1.0

    def shape(m):
        m.w[...] = jnp.ones(2)
        return 1.0

    def fails(m):
        m.w[...] = 5.0
        raise KeyError("inside")

    one = lambda m: 1.0
    calls = {
        "types": lambda: lib.cond(True, one, lambda m: 1, m, **mode),
        "shapes": lambda: lib.cond(True, one, lambda m: jnp.ones(2), m, **mode),
        "trees": lambda: lib.cond(True, one, lambda m: (1.0,), m, **mode),
        "written shape": lambda: lib.cond(True, one, shape, m, **mode),
        "fails": lambda: lib.cond(True, one, fails, m, **mode),
        "vector": lambda: lib.cond(jnp.ones(2), one, one, m, **mode),
        "text": lambda: lib.cond("yes", one, one, m, **mode),
        "no branches": lambda: lib.switch(0, [], m, **mode),
        "float index": lambda: lib.switch(0.5, [one, one], m, **mode),
        "arity": lambda: lib.cond(True, one, one, **mode),
        "operand": lambda: lib.cond(True, lambda x: 1.0, lambda x: 1.0, "text", **mode),
    }
    if mode == {}:
        calls["adds"] = lambda: lib.cond(True, one, adds, m, **mode)
    return {name: attempt(call) for name, call in calls.items()}, m


# while_loop and fori_loop ------------------------------------------------------------------------


@program("updates")
def loops_that_make_new_objects(lib, mode):
    m = models(lib).Cell(1.0)
    out = lib.fori_loop(0, 3, lambda i, m: models(lib).Cell(m.value * 2), m)
    return out is m, out, m


@program(*all_modes)
def loop_refusals(lib, mode):
    m = models(lib).Counted()

    def shape(m):
        m.w[...] = jnp.ones(2)
        return m

    def drift(m):
        m.c[...] = m.c + 0.5
        return m

    def fails(m):
        m.w[...] = 5.0
        raise KeyError("inside")

    def run(body, start=m, test=lambda m: False):
        return (
            attempt(lambda: lib.while_loop(test, body, start, **mode)),
            attempt(lambda: lib.fori_loop(0, 2, lambda i, m: body(m), start, **mode)),
        )

    return {
        "shape": run(shape),
        "type": run(drift),
        "fails": run(fails),
        "nothing": run(lambda m: None)[: 1 if mode == {} else 2],
        "another tree": run(lambda m: (m, m))[: 1 if mode == {} else 2],
        "plain type": run(lambda x: x > 0, 1.0, lambda x: False),
        "plain shape": run(lambda x: jnp.ones(2), 1.0, lambda x: False),
        "plain tree": run(lambda x: (x, x), 1.0, lambda x: False),
        "vector test": attempt(
            lambda: lib.while_loop(lambda x: x > 0, lambda x: x, jnp.ones(2), **mode)
        ),
        "test not bool": attempt(lambda: lib.while_loop(lambda x: x, lambda x: x, 1.0, **mode)),
        "float bound": attempt(lambda: lib.fori_loop(0, 2.5, lambda i, x: x, 1.0, **mode)),
        "text": attempt(lambda: lib.fori_loop(0, 2, lambda i, x: x, "text", **mode)),
    }, m


@program("updates")
def new_states_in_a_carry(lib, mode):
    m = models(lib).Counted()
    zeros = jax.tree.map(lambda x: x * 0.0, lib.state(m, lib.Param))
    found = []
    for start in (zeros, lib.Cache(0.0), {"a": lib.Cache(0.0)}, lib.Dict(a=lib.Cache(0.0))):

        def body(i, carry):
            m, total = carry
            y = m(2.0)
            return m, jax.tree.map(lambda x: x + y, total)

        out = lib.fori_loop(0, 3, body, (m, start))
        found += [out, out[0] is m, out[1] is start, start]
    return found, m


@program("updates")
def loops_refuse_structure_changes(lib, mode):
    m = models(lib).Counted()

    def adds(m):
        m.new = lib.Param(1.0)
        return m

    def static(m):
        m.size = 3
        return m

    return [
        attempt(lambda: lib.fori_loop(0, 2, lambda i, m: adds(m), m)),
        attempt(lambda: lib.while_loop(lambda m: False, adds, m)),
        attempt(lambda: lib.fori_loop(0, 2, lambda i, m: static(m), m)),
        hasattr(m, "new"),
        hasattr(m, "size"),
    ]


@program()
def scan_that_replaces_a_part_by_one_with_other_settings(lib):
    class Part(lib.Module):
        def __init__(self, value, size):
            self.value = lib.Param(jnp.asarray(value))
            self.size = size

    class Whole(lib.Module):
        def __init__(self):
            self.part = Part(1.0, 1)
            self.seen = lib.Param(jnp.asarray(0.0))

    def body(m, x):
        m.seen[...] += m.part.value * m.part.size
        m.part = Part(m.part.value[...] + x, m.part.size + 1)
        return m, m.part.value[...]

    m = Whole()
    before = m.part
    out, ys = lib.scan(body)(m, jnp.arange(1.0, 4.0))
    return out is m, m.part is before, m, m.part.size, before, before.size, ys


# broadcast streams -------------------------------------------------------------------------------


@program(*all_modes)
def scan_with_a_broadcast_stream(lib, mode):
    net, rngs = models(lib).Block(lib.Rngs(0)), lib.Rngs(0)
    net.norm.use_running_average = True
    draw = lambda rngs, x: rngs.normal((2,)) + x
    step = lambda total, rngs, x: (total + rngs.normal(), rngs.fork().normal((2,)) + x)
    return [
        lib.scan(draw, in_axes=(None, 0), out_axes=0, **mode)(rngs, jnp.arange(3.0)),
        rngs.default.count,
        lib.scan(draw, in_axes=(None, None), out_axes=0, length=2, **mode)(rngs, 1.0),
        lib.scan(step, in_axes=(lib.Carry, None, 0), out_axes=(lib.Carry, 0), **mode)(
            0.0, rngs, jnp.arange(3.0)
        ),
        rngs,
        lib.scan(lambda m, x: m(x), in_axes=(None, 0), out_axes=0, **mode)(net, X[:, None]),
        net,
    ]


@program(*all_modes)
def a_condition_that_draws(lib, mode):
    rngs = lib.Rngs(0)
    test = lambda c: (c[1].normal() > -3.0) & (c[0] < 4.0)
    first = lib.while_loop(test, lambda c: (c[0] + 1.0, c[1]), (0.0, rngs), **mode)
    count = rngs.default.count[...]
    draw = lambda c: (c[0] + jnp.abs(c[1].normal()), c[1])
    return first, count, lib.while_loop(test, draw, (0.0, rngs), **mode)


@program()
def a_stream_of_several_axes(lib):
    rngs, xs = lib.Rngs(0), jnp.arange(3.0)
    draw = lambda rngs, x: rngs.normal() + x
    axes = lib.StateAxes({lib.RngKey: None, lib.RngCount: lib.Carry, ...: None})
    counted = lib.scan(draw, in_axes=(axes, 0), out_axes=0)(rngs, xs), rngs.default.count[...]
    axes = lib.StateAxes({lib.RngState: None, ...: 0})
    nested = lib.scan(
        lambda r, x: lib.scan(draw, in_axes=(None, 0), out_axes=0)(r, x),
        in_axes=(axes, 0),
        out_axes=0,
    )(rngs, jnp.ones((2, 3)))
    return counted, nested, rngs, lib.jit(lib.scan(draw, in_axes=(None, 0), out_axes=0))(rngs, xs)


@program()
def arguments_beside_the_carry(lib):
    carry = {"in_axes": lib.Carry, "out_axes": lib.Carry, "length": 3}
    return [
        attempt(lambda: lib.scan(lambda c: c, **carry)(1.0, 2.0)),
        attempt(lambda: lib.scan(lambda c, x: c, **carry)(1.0, 2.0)),
        attempt(lambda: lib.scan(lambda c, x=1: c, **carry)(1.0, x=2)),
        attempt(lambda: lib.scan(lambda c: c, **carry)()),
        lib.scan(lambda c: c + 1, **carry)(1.0),
    ]


@program("updates", "plain")
def functions_that_are_methods_and_partials(lib, mode):
    m = models(lib).Vector()
    cls = models(lib).Vector
    return [
        lib.jit(cls.__call__, **mode)(m, 1.0),
        lib.vmap(cls.__call__, in_axes=(None, 0), **mode)(m, jnp.ones(3)),
        lib.remat(cls.__call__, **mode)(m, 1.0),
        lib.cond(True, cls.__call__, lambda m, x: m.w * x, m, 1.0, **mode),
        lib.checkify(cls.__call__, **mode)(m, 1.0)[1],
        lib.jit(functools.partial(lambda k, m: m(k), 2.0), **mode)(m),
        lib.scan(functools.partial(lambda k, c, x: (c + k, x), 2.0), **mode)(0.0, jnp.ones(2)),
        lib.eval_shape(cls.__call__, m, 1.0, **mode),
        m,
    ]


@program("updates", "plain", "tree")
def arguments_by_name(lib, mode):
    m = models(lib).Counted()
    step = lambda i, m: (m(1.0), m)[1]
    return [
        lib.fori_loop(lower=0, upper=2, body_fun=step, init_val=m, **mode).c,
        lib.while_loop(
            cond_fun=lambda m: m.c[...] < 4, body_fun=lambda m: step(0, m), init_val=m, **mode
        ).c,
        attempt(lambda: lib.cond(pred=True, true_fun=lambda: 1.0, false_fun=lambda: 2.0, **mode)),
        attempt(lambda: lib.switch(index=0, branches=[lambda: 1.0, lambda: 2.0], **mode)),
        lib.jit(fun=lambda m: m.w * 1, **mode)(m),
        lib.vmap(f=lambda x: x * 2, **mode)(jnp.ones(2)),
        lib.scan(f=lambda c, x: (c + x, c), **mode)(0.0, jnp.ones(2)),
        lib.remat(f=lambda m: m.w * 1, **mode)(m),
        m,
    ]


@program("plain", "tree")
def choosers_that_are_variables(lib, mode):
    m = models(lib).Counted()
    flag, index = lib.Variable(jnp.array(True)), lib.Variable(jnp.array(1))
    return [
        lib.cond(flag, lambda m: m(1.0), lambda m: m.w * 3, m, **mode),
        lib.switch(index, [lambda m: m.w * 2, lambda m: m.w * 3], m, **mode),
        lib.fori_loop(0, index[...], lambda i, x: x + i, 1, **mode),
        lib.while_loop(lambda v: v[...] < 3, bump, index, **mode),
        index,
    ]


def bump(v):
    v[...] += 1
    return v


@program("updates", "plain")
def axes_in_other_containers(lib, mode):
    m = models(lib).Vector()
    f = lambda m, d: m.w * d["a"] + d["b"][0]
    d = {"a": jnp.ones(4), "b": [jnp.ones((3, 4))]}
    return [
        attempt(lambda: lib.vmap(f, in_axes=(None, {"a": 0, "b": [1]}), **mode)(m, d)),
        attempt(lambda: lib.vmap(f, in_axes=(None, {"a": 0}), **mode)(m, d)),
        attempt(
            lambda: lib.vmap(lambda x: {"a": x, "b": (x, x)}, out_axes={"a": 0, "b": 0}, **mode)(
                jnp.ones(2)
            )
        ),
        attempt(lambda: lib.vmap(lambda x: (x, 1.0), out_axes=(0, None), **mode)(jnp.ones(2))),
        attempt(lambda: lib.vmap(lambda x: x, in_axes=-1, out_axes=-1, **mode)(jnp.ones((2, 3)))),
        attempt(lambda: lib.vmap(lambda: 1.0, axis_size=2, **mode)()),
        attempt(lambda: lib.vmap(lambda x, *xs: x + sum(xs), **mode)(*[jnp.ones(2)] * 3)),
        attempt(lambda: lib.vmap(lambda x: None, **mode)(jnp.ones(2))),
    ]


@program("updates", "plain")
def axes_of_scan_in_other_containers(lib, mode):
    c = lib.Carry
    step = lambda c, x: (c + x["a"], x["b"])
    x = {"a": jnp.arange(3.0), "b": jnp.ones((2, 3))}
    return [
        attempt(lambda: lib.scan(step, in_axes=(c, {"a": 0, "b": 1}), **mode)(0.0, x)),
        attempt(
            lambda: lib.scan(step, in_axes=(c, {"a": 0, "b": -1}), out_axes=(c, -1), **mode)(0.0, x)
        ),
        attempt(lambda: lib.scan(lambda x: x * 2, in_axes=0, out_axes=0, **mode)(jnp.ones(2))),
        attempt(lambda: lib.scan(lambda x: x * 2, in_axes=(0,), out_axes=0, **mode)(jnp.ones(2))),
        attempt(
            lambda: lib.scan(
                lambda a, x, b: (x + a, {"y": b}),
                in_axes=(None, c, 0),
                out_axes=(c, {"y": 0}),
                **mode,
            )(1.0, 0.0, jnp.ones(2))
        ),
        attempt(lambda: lib.scan(lambda c, x: (c, x), **mode)(0.0, None)),
        attempt(lambda: lib.scan(lambda c, x: (c + 1, 1.0), length=2, **mode)(0.0, None)),
        attempt(lambda: lib.scan(lambda c, x: (c + 1, x), **mode)(0.0, jnp.ones(0))),
    ]


@program("updates", "plain")
def references_written_from_inside(lib, mode):
    v = lib.Variable(jnp.array(0.0), ref=True)

    def f(x):
        v[...] += 1
        return x * 2

    return [
        lib.jit(f, **mode)(1.0),
        lib.grad(f, **mode)(1.0),
        lib.remat(f, **mode)(1.0),
        lib.scan(lambda c, x: (f(c), x), **mode)(1.0, jnp.arange(3.0)),
        lib.fori_loop(0, 3, lambda i, x: f(x), 1.0, **mode),
        lib.cond(True, f, lambda x: x, 1.0, **mode),
        jax.lax.fori_loop(0, 3, lambda i, x: f(x), 1.0),
        jax.jit(lambda x: v.set_value(v[...] + x))(5.0),
        v[...],
    ]


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
