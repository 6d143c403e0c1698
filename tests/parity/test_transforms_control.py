"""Programs with branches and loops, in both libraries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.parity.programs import (
    Programs,
    X,
    attempt,
    compare,
    models,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

program = Programs()
all_modes = ("updates", "plain", "tree")


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


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
