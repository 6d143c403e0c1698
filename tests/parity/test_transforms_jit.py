"""Programs with jit, in both libraries."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.parity.programs import (
    Programs,
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


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
