"""Programs in tree mode (`graph=False`, `set_graph_mode(False)`), in both libraries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.parity.programs import Programs, attempt, compare, mesh_of

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

program = Programs()

P = jax.sharding.PartitionSpec
X = jnp.arange(4.0)


def net(lib, n=4):
    """A module with a vector, a scalar, and a list of modules."""
    return lib.Dict(
        w=lib.Param(jnp.arange(float(n))),
        c=lib.BatchStat(jnp.zeros(())),
        inner=lib.List([lib.Dict(b=lib.Param(jnp.full(n, float(i)))) for i in range(2)]),
    )


def use(m, x):
    """Reads everything, writes `w` and the first `b`."""
    m.w[...] = m.w * 2
    m.inner[0].b[...] = m.inner[0].b + x
    return m.w * x + m.c + m.inner[1].b


def chosen(lib, some, other, make=net):
    """A module of settings, for the module that `make` makes."""
    return lib.prefix(make(lib), {lib.BatchStat: other, ...: some}, graph=False)


# Modules as prefixes -------------------------------------------------------------------------------


@program(newer=True)
def what_prefix_gives(lib):
    m = net(lib)
    seen = []

    def note(path, x):
        seen.append((path, type(x).__name__.removesuffix("Impl")))
        return len(seen)

    tree = {"m": m, "k": jnp.ones(2), "s": lib.state(m)}
    out = lib.prefix(tree, note, graph=False)
    shared = lib.Dict(a=m, b=m)
    axes = chosen(lib, 0, None)
    return [
        seen,
        out["m"].w,
        out["k"],
        out["m"].inner[1].b,
        out["s"]["inner"][1]["b"],
        type(out["m"]).__name__,
        type(out["s"]).__name__,
        (axes.w, axes.c, axes.inner[0].b),
        lib.prefix(shared, {...: 0}, graph=False).b.w,
        lib.prefix(m.w, {lib.Param: 3}, graph=False),
        attempt(lambda: lib.prefix(m, {lib.Param: 0}, graph=False)),
        jax.tree.structure(jax.tree.map(lambda x: 0, axes, is_leaf=lambda x: x is None))
        == jax.tree.structure(jax.tree.map(lambda x: 0, lib.prefix(m, {...: 1}, graph=False))),
    ]


@program(newer=True)
def prefix_for_plain_jax(lib):
    m, mesh = net(lib), mesh_of(2)
    read = lambda m, x: m.w * x + m.inner[1].b
    sharding = lambda *p: jax.NamedSharding(mesh, P(*p))
    state = lib.state(m)
    by_path = {lib.PathContains("c"): None, ...: 0}
    return [
        jax.vmap(read, in_axes=(chosen(lib, 0, None), 0))(m, X),
        jax.vmap(lambda s: s["w"] * 2, in_axes=(lib.prefix(state, by_path, graph=False),))(state),
        jax.vmap(lambda x: net(lib, 2), out_axes=chosen(lib, 1, None))(X).w,
        jax.jit(read, in_shardings=(chosen(lib, sharding("data"), sharding()), None))(m, X),
        jax.shard_map(
            read,
            mesh=mesh,
            in_specs=(chosen(lib, P("data"), P()), P("data")),
            out_specs=P("data"),
        )(m, X),
    ]


@program("tree", "both", newer=True)
def prefix_for_vmap_and_pmap(lib, mode):
    m, n = net(lib), net(lib, 2)
    axes = chosen(lib, 0, None)
    partial = chosen(lib, 0, None)
    partial.inner = 0
    with_array = lib.Dict(a=X, v=lib.BatchStat(2.0))
    array = lib.prefix(with_array, {lib.BatchStat: None, ...: 0}, graph=False)
    nested = lambda d: use(d["m"], d["x"][0])
    return [
        lib.vmap(use, in_axes=(axes, 0), **mode)(m, X),
        lib.vmap(use, in_axes=(partial, None), **mode)(m, 3.0),
        lib.vmap(nested, in_axes=({"m": axes, "x": [0]},), **mode)({"m": m, "x": [X]}),
        lib.pmap(use, in_axes=(axes, 0), **mode)(n, X[:2]),
        lib.vmap(lambda x: net(lib, 3), out_axes=chosen(lib, 1, None), **mode)(X),
        lib.vmap(lambda x: (x, net(lib, 3)), out_axes=(0, axes), **mode)(X),
        lib.vmap(lambda t: t.a * t.v, in_axes=(array,), **mode)(with_array),
        m,
        n,
    ]


@program("tree", "both", newer=True)
def prefix_for_scan(lib, mode):
    m = net(lib)
    axes = chosen(lib, 0, None)
    return [
        lib.scan(use, in_axes=(axes, 0), out_axes=0, **mode)(m, X),
        lib.scan(
            lambda c, m, x: (c + 1, use(m, x)),
            in_axes=(lib.Carry, axes, 0),
            out_axes=(lib.Carry, 0),
            **mode,
        )(0.0, m, X),
        lib.scan(lambda x: net(lib, 3), in_axes=0, out_axes=chosen(lib, 1, 0), **mode)(X),
        lib.scan(
            lambda x: net(lib, 3), in_axes=0, out_axes=chosen(lib, 0, 0), reverse=True, **mode
        )(X),
        attempt(
            lambda: lib.scan(
                lambda m, x: (m, x),
                in_axes=(chosen(lib, lib.Carry, None), 0),
                out_axes=(lib.Carry, 0),
                **mode,
            )(m, X)
        ),
        m,
    ]


@program("tree", "both", newer=True)
def prefix_for_jit_and_shard_map(lib, mode):
    m, mesh = net(lib), mesh_of(2)
    rows, whole = (jax.NamedSharding(mesh, P(*p)) for p in (("data",), ()))
    where = lambda v: v.get_raw_value().sharding.is_equivalent_to(rows, 1)
    shards = chosen(lib, rows, whole)
    out = [lib.jit(use, in_shardings=(shards, None), **mode)(m, X), where(m.w), where(m.inner[0].b)]
    new = lib.jit(lambda x: net(lib), out_shardings=shards, **mode)(X)
    out += [where(new.w), where(new.inner[1].b), new]
    specs = chosen(lib, P("data"), P())
    f = lib.shard_map(use, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"), **mode)
    g = lib.shard_map(lambda x: net(lib), mesh=mesh, in_specs=P("data"), out_specs=specs, **mode)
    return [*out, f(m, X), m, g(X)]


@program("updates", "plain", "tree", "both", newer=True)
def states_as_prefixes(lib, mode):
    m = net(lib)
    state = lib.state(m)
    pure = lib.as_pure(state)
    axes = lib.State({"w": 0, "c": None, "inner": 0})
    full = lib.prefix(pure, lambda path, x: 0 if x.ndim else None, graph=False)
    read = lambda s, x: s["w"] * x + s["inner"][0]["b"]
    return [
        lib.vmap(read, in_axes=(axes, 0), **mode)(state, X),
        lib.vmap(read, in_axes=(axes, 0), **mode)(pure, X),
        lib.vmap(read, in_axes=(full, 0), **mode)(pure, X),
        lib.vmap(read, in_axes=(full, 0), **mode)(state, X),
        lib.scan(read, in_axes=(full, 0), out_axes=0, **mode)(state, X),
        lib.vmap(lambda x: lib.state(net(lib, 3)), out_axes=axes, **mode)(X)["w"],
    ]


@program("tree", "both", newer=True)
def prefixes_that_do_not_fit(lib, mode):
    m = net(lib)
    other = lib.prefix(lib.Dict(w=lib.Param(1.0)), {...: 0}, graph=False)
    more = lib.prefix(lib.Dict(m=m, z=lib.Param(1.0)), {...: 0}, graph=False)
    run = lambda axes: attempt(lambda: lib.vmap(use, in_axes=(axes, 0), **mode)(m, X))
    return [
        run(other),
        run(more),
        run(lib.Param(0)),
        run(lib.State({"w": 0})),
        attempt(lambda: lib.vmap(use, in_axes=(None, other), **mode)(m, X)),
        attempt(lambda: lib.vmap(lambda x: m, out_axes=other, **mode)(X)),
        m,
    ]


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
