"""Programs with vmap, pmap, shard_map and scan, in both libraries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
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


@program(*plain_modes)
def vmap_refuses_to_return_its_inputs(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))
    return attempt(lambda: lib.vmap(lambda m: m, **mode)(m))


@program("updates")
def vmap_that_sows(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))

    def f(m, x):
        m.sow(lib.Intermediate, "seen", x * 2)
        return m(x)

    y = lib.vmap(f, **mode)(m, jnp.arange(3.0))
    return y, lib.pop(m, lib.Intermediate), m


@program("updates", "plain")
def vmap_of_keywords(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))

    def f(m, x, k=0.0):
        return m(x) + k

    return [
        attempt(lambda: lib.vmap(f, in_axes=0, **mode)(m, jnp.ones(3), k=jnp.arange(3.0))),
        attempt(lambda: lib.vmap(f, **mode)(m, x=jnp.ones(3), k=jnp.zeros(3))),
        m,
    ]


@program("updates")
def vmap_of_some_streams(lib, mode):
    rngs = lib.Rngs(params=0, dropout=1)

    @lib.split_rngs(splits=4, only="params")
    @lib.vmap(in_axes=(lib.StateAxes({"params": 0, ...: None}),), **mode)
    def f(rngs):
        return jax.random.normal(rngs.params(), (2,)), jax.random.normal(rngs.dropout(), ())

    out = f(rngs)
    return out, rngs.params.count, rngs.dropout.count, lib.state(rngs)


@program(*plain_modes, newer=True)
def vmap_with_rngs_decorator(lib, mode):
    rngs = lib.Rngs(params=0, dropout=1)

    @lib.with_rngs(split={"params": 3}, broadcast={"dropout": 3}, **mode)
    @lib.vmap(in_axes=(0,), **mode)
    def f(rngs):
        return rngs.params.normal(()), rngs.dropout.normal(())

    return f(rngs), lib.state(rngs)


@program("updates", "plain")
def vmap_moves_the_axes_of_states_of_arrays(lib, mode):
    s = lib.State({"a": jnp.ones((2, 3)), "b": {"c": jnp.arange(4.0).reshape(2, 2)}})
    return [
        lib.vmap(lambda s: s, out_axes=1, **mode)(s),
        lib.vmap(lambda s: {"q": s, "a": s["a"]}, in_axes=1, out_axes={"q": 0, "a": -1}, **mode)(
            lib.State({"a": s["a"]})
        ),
        s,
    ]


@program("updates")
def vmap_names_the_axis_it_adds(lib, mode):
    init = lib.with_partitioning(lib.initializers.ones_init(), ("in", "out"))
    seen = []

    @lib.split_rngs(splits=3)
    @lib.vmap(transform_metadata={lib.PARTITION_NAME: "layers"}, **mode)
    def make(rngs):
        m = lib.Linear(2, 2, kernel_init=init, rngs=rngs)
        seen.append(m.kernel.sharding_names)
        return m

    @lib.vmap(in_axes=(0, None), transform_metadata={lib.PARTITION_NAME: "layers"}, **mode)
    def run(m, x):
        seen.append(m.kernel.sharding_names)
        return m(x)

    with lib.use_eager_sharding(False):
        m = make(lib.Rngs(0))
        y = run(m, X)
    return (
        seen,
        m.kernel.sharding_names,
        m.kernel.shape,
        y,
        lib.get_partition_spec(lib.state(m))["kernel"].get_value(),
    )


@program()
def transform_metadata_by_itself(lib):
    seen = []
    v = lib.Param(jnp.ones((3, 2)), sharding_names=("layers", "in"), eager_sharding=False)

    @lib.transform_metadata(in_axes=(0, None), out_axes=1, partition="layers")
    def f(v, x):
        seen.append(v.sharding_names)
        return lib.Param(jnp.ones((2, 3)), sharding_names=("a", "b"), eager_sharding=False)

    out = f(v, 1.0)
    return seen, v.sharding_names, out.sharding_names


@program(*all_modes)
def vmap_refusals(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))
    single = models(lib).Vector()
    call = lambda m, x: m.w * x
    return [
        attempt(lambda: lib.vmap(call, **mode)(m, jnp.ones(4))),
        attempt(lambda: lib.vmap(call, **mode)(m, 1.0)),
        attempt(lambda: lib.vmap(call, in_axes=(0, 0, 0), **mode)(m, jnp.ones(3))),
        attempt(lambda: lib.vmap(call, in_axes=(0,), **mode)(m, jnp.ones(3))),
        attempt(lambda: lib.vmap(call, in_axes=(3, 0), **mode)(m, jnp.ones(3))),
        attempt(lambda: lib.vmap(call, in_axes=("a", 0), **mode)(m, jnp.ones(3))),
        attempt(lambda: lib.vmap(call, in_axes=None, **mode)(m, 1.0)),
        attempt(lambda: lib.vmap(call, out_axes=None, **mode)(m, jnp.ones(3))),
        attempt(lambda: lib.vmap(call, out_axes=(0, 0), **mode)(m, jnp.ones(3))),
        attempt(lambda: lib.vmap(call, out_axes=2, **mode)(m, jnp.ones(3))),
        attempt(lambda: lib.vmap(lambda m, x: m(x), **mode)(single, jnp.ones(3))),
        attempt(lambda: lib.vmap(lambda m, x: "text", **mode)(m, jnp.ones(3))),
        attempt(lambda: lib.vmap(lambda m, x: m.missing, **mode)(m, jnp.ones(3))),
        m,
    ]


@program("updates", "plain")
def vmap_refuses_to_lose_writes(lib, mode):
    m = models(lib).Vector()

    def f(m, x):
        m.c[...] = x

    def closed(x):
        m.c[...] = x

    return (
        attempt(lambda: lib.vmap(f, in_axes=(None, 0), **mode)(m, jnp.ones(3))),
        attempt(lambda: lib.vmap(closed, **mode)(jnp.ones(3))),
        m,
    )


@program("updates", "plain")
def vmap_refuses_inconsistent_axes(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))
    n = models(lib).Pair()
    n.b[1] = m.w
    f = lambda a, b: jnp.ones(())
    first = lib.StateAxes({lib.Param: 0, ...: None}) if not mode else 0
    return (
        attempt(lambda: lib.vmap(f, in_axes=(0, None), axis_size=3, **mode)(m, m)),
        attempt(lambda: lib.vmap(f, in_axes=(0, {"x": None}), **mode)(m, {"x": m.w})),
        attempt(lambda: lib.vmap(f, in_axes=(first, 0), **mode)(m, m)),
        attempt(lambda: lib.vmap(f, in_axes=(0, None), **mode)(m, n)),
    )


@program("updates")
def vmap_refuses_axes_without_a_filter(lib, mode):
    m = models(lib).Vector()
    axes = lib.StateAxes({lib.Param: 0})
    return attempt(lambda: lib.vmap(lambda m: m.w * 1, in_axes=(axes,), **mode)(m))


@program(*plain_modes)
def vmap_without_updates_loses_structure(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))

    def f(m):
        m.new = lib.Param(jnp.ones(2))
        m.size = 3
        m.c[...] += 5
        return m.w * 2

    return lib.vmap(f, **mode)(m), hasattr(m, "new"), hasattr(m, "size"), m


def stack(lib, n=3, **options):
    """Blocks with a leading axis."""

    @lib.split_rngs(splits=n)
    @lib.vmap(**options)
    def make(rngs):
        return models(lib).Block(rngs)

    return make(lib.Rngs(0))


# pmap and shard_map -------------------------------------------------------------------------------


@program(*all_modes)
def pmap_with_static_and_donated_arguments(lib, mode):
    f = lib.pmap(
        lambda x, k, y: x * k + y,
        static_broadcasted_argnums=1,
        donate_argnums=(2,),
        in_axes=(0, None, 0),
        **mode,
    )
    return f(jnp.arange(2.0), 3, jnp.ones(2)), f(jnp.arange(2.0), 4, jnp.ones(2))


@program("updates", "plain")
def pmap_refusals(lib, mode):
    m = models(lib).Vector()
    return (
        attempt(lambda: lib.pmap(lambda m, x: m.w * x, in_axes=(None, 0), **mode)(m, jnp.ones(99))),
        attempt(lambda: lib.pmap(lambda m, x: m(x), in_axes=(0,), **mode)(m, jnp.ones(3))),
    )


@program(*plain_modes)
def shard_map_by_prefix(lib, mode):
    m = models(lib).Vector(jnp.arange(4.0))
    specs = lib.prefix(m, {lib.Param: P("data"), ...: P()}, graph=mode.get("graph"))
    f = lambda m: m.w * (m.c + 2)
    g = lib.shard_map(f, mesh=mesh_of(2), in_specs=(specs,), out_specs=P("data"), **mode)
    return attempt(lambda: g(m))


@program("updates", "plain")
def shard_map_with_its_options(lib, mode):
    m = models(lib).Vector(jnp.arange(4.0))
    f = lib.shard_map(
        lambda m, x: jax.lax.psum(m.w * x, "data"),
        mesh=mesh_of(2, 2, names=("data", "model")),
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names=frozenset({"data"}),
        check_vma=False,
        **mode,
    )
    return lib.jit(f)(m, jnp.arange(2.0))


@program("updates", "plain")
def shard_map_refusals(lib, mode):
    m = models(lib).Vector()
    mesh = mesh_of(2)
    f = lambda m, x: x * 1
    options = dict(mesh=mesh, out_specs=P("data"), **mode)
    return (
        attempt(lambda: lib.shard_map(f, in_specs=(P(), P("data")), **options)(m, jnp.ones(3))),
        attempt(lambda: lib.shard_map(f, in_specs=(P(), P("other")), **options)(m, jnp.ones(4))),
        attempt(lambda: lib.shard_map(f, in_specs=(P(),), **options)(m, jnp.ones(4))),
        attempt(lambda: lib.shard_map(f, in_specs=(P("data"), P()), **options)(m, jnp.ones(4))),
    )


# scan --------------------------------------------------------------------------------------------


@program(*all_modes)
def scan_with_the_carry_in_other_places(lib, mode):
    m = models(lib).Vector()
    options = dict(in_axes=(None, 0, lib.Carry), out_axes=(0, lib.Carry, 1), **mode)
    f = lambda m, x, c: (m.w * x, c + x, jnp.stack([c, x]))
    g = lib.scan(lambda c: (c + 1, c * 2), in_axes=lib.Carry, out_axes=(lib.Carry, 0), length=3)
    h = lib.scan(lambda x, m: m.w * x, in_axes=(0, None), out_axes=1, **mode)
    return lib.scan(f, **options)(m, jnp.arange(4.0), 0.0), g(1.0), h(jnp.arange(2.0), m)


@program(*all_modes)
def scan_options(lib, mode):
    m = models(lib).Vector()
    step = lambda c, x: (c * 0.5 + x, c)
    out = [
        lib.scan(step, reverse=True, **mode)(1.0, jnp.arange(3.0)),
        lib.scan(step, unroll=2, **mode)(1.0, jnp.arange(4.0)),
        lib.scan(step, unroll=True, **mode)(1.0, jnp.arange(4.0)),
        lib.scan(step, length=3, _split_transpose=False, **mode)(1.0, jnp.arange(3.0)),
        lib.scan(lambda m: (m, m(1.0)), length=2, in_axes=lib.Carry, **mode)(m)[1],
        lib.scan(lambda c, x: (c + 1, x), **mode)(0, {"a": jnp.ones(2), "b": (jnp.ones((2, 1)),)}),
        lib.scan(lambda c, x: (c + 1, None), **mode)(0, jnp.ones(2)),
    ]
    return out, m


@program(*plain_modes)
def scan_with_constants_by_prefix(lib, mode):
    m = models(lib).Vector(c=7.0)
    axes = lib.prefix(m, {lib.Param: 0, ...: None}, graph=mode.get("graph"))
    f = lib.scan(lambda c, m: (c + m.w * m.c, c), in_axes=(lib.Carry, axes), **mode)
    return attempt(lambda: f(1.0, m)), m


@program("updates", "plain")
def scan_over_references(lib, mode):
    m = lib.Dict(v=lib.Param(jnp.arange(6.0).reshape(3, 2), ref=True), w=lib.Param(jnp.ones(3)))
    f = lambda c, m: (c + m["v"][...].sum() * m["w"][...], m["v"][...] * c)
    scanned = lib.scan(f, in_axes=(lib.Carry, 0), out_axes=(lib.Carry, 0), **mode)
    return scanned(1.0, m), lib.jit(scanned, **mode)(1.0, m), m["w"], m["v"][...]


@program("updates")
def scan_makes_modules(lib, mode):
    f = lambda c, key: (c + 1, lib.Linear(2, 2, rngs=lib.Rngs(key)))
    count, layers = lib.scan(f, **mode)(0, jax.random.split(jax.random.key(0), 3))
    by_axis = lib.scan(
        lambda c, x: (c + 1, models(lib).Vector(x, c)),
        out_axes=(lib.Carry, lib.StateAxes({lib.Param: 1, ...: 0})),
        **mode,
    )
    return count, layers, layers.kernel.shape, by_axis(0.0, jnp.ones((3, 2)))


@program("updates")
def scan_with_an_axis_name_in_metadata(lib, mode):
    v = lib.Param(jnp.ones((3, 2)), sharding_names=("layers", "in"), eager_sharding=False)
    seen = []

    @lib.scan(transform_metadata={lib.PARTITION_NAME: "layers"}, **mode)
    def f(c, v):
        seen.append(v.sharding_names)
        return c + v.sum(), None

    return f(0.0, v), set(seen), v.sharding_names


@program("updates", "plain")
def scan_refusals(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))
    carry, xs = lib.Carry, jnp.ones(3)
    step = lambda c, x: (c, x)
    calls = {
        "sizes": lambda: lib.scan(step, **mode)(0.0, (jnp.ones(2), jnp.ones(3))),
        "length": lambda: lib.scan(step, length=2, **mode)(0.0, xs),
        "no length": lambda: lib.scan(lambda c: c, in_axes=carry, out_axes=carry, **mode)(0.0),
        "scalar": lambda: lib.scan(step, **mode)(0.0, 1.0),
        "no carry out": lambda: lib.scan(step, out_axes=(0, 0), **mode)(0.0, xs),
        "no carry in": lambda: lib.scan(step, in_axes=(0, 0), **mode)(xs, xs),
        "two carries": lambda: lib.scan(step, in_axes=(carry, carry), **mode)(0.0, xs),
        "nested carry": lambda: lib.scan(step, in_axes=((carry,), 0), **mode)((0.0,), xs),
        "broadcast out": lambda: lib.scan(step, out_axes=(carry, None), **mode)(0.0, xs),
        "drifting type": lambda: lib.scan(lambda c, x: (c > 0, x), **mode)(0.0, xs),
        "drifting shape": lambda: lib.scan(lambda c, x: (jnp.ones(2), x), **mode)(0.0, xs),
        "drifting tree": lambda: lib.scan(lambda c, x: ((c, c), x), **mode)(0.0, xs),
        "three results": lambda: lib.scan(lambda c, x: (c, x, x), **mode)(0.0, xs),
        "too many axes": lambda: lib.scan(step, in_axes=(carry, 0, 0), **mode)(0.0, xs),
        "no such axis": lambda: lib.scan(step, in_axes=(carry, 2), **mode)(0.0, xs),
        "new carry": lambda: lib.scan(lambda c, x: (models(lib).Vector(c=jnp.zeros(3)), x), **mode)(
            m, xs
        ),
        "carry and scan": lambda: lib.scan(lambda c, x: (c, x.w * 1), **mode)(m, m),
    }
    return {name: attempt(call) for name, call in calls.items()}, m


@program("updates")
def scan_with_new_variables_in_its_carry(lib, mode):
    xs = jnp.arange(1.0, 4.0)
    graphdef, state = lib.split(models(lib).Counted())

    def run(state, x):
        m = lib.merge(graphdef, state)
        y = m(x)
        return lib.state(m), y

    v = lib.Cache(1.0)

    def overwritten(c, x):
        c[...] = c * 2
        return lib.Cache(c + x), x

    shared = lambda c, x: ((lib.Cache(c[0] + c[1]),) * 2, x)
    apart = lambda c, x: ((lib.Cache(c[0] + 1), lib.Cache(c[1] + 2)), x)
    return [
        lib.scan(run)(state, xs),
        lib.scan(lambda c, x: (jax.tree.map(lambda a: a + x, c), x))(v, xs),
        lib.scan(overwritten)(v, xs),
        lib.scan(shared)((v, v), xs)[0],
        attempt(lambda: lib.scan(apart)((v, v), xs)),
        attempt(lambda: lib.scan(lambda c, x: (lib.Param(c + 1), x))(v, xs)),
        attempt(lambda: lib.scan(lambda c, x: (lib.Cache(c + 1, note=2), x))(v, xs)),
        attempt(lambda: lib.scan(lambda c, x: (c + 1, x))(v, xs)),
        attempt(lambda: lib.scan(lambda c, x: (lib.Dict(a=c.a + 1), x))(lib.Dict(a=v), xs)),
        state,
        v,
    ]


@program("updates")
def scan_refuses_changes_of_its_carry(lib, mode):
    m = models(lib).Vector()
    xs = jnp.ones(3)

    def adds(m, x):
        m.new = lib.Param(x)
        return m, x

    def changes_shape(m, x):
        m.c[...] = jnp.ones(2)
        return m, x

    def changes_type(m, x):
        m.c[...] = m.c[...] > 0
        return m, x

    return (
        attempt(lambda: lib.scan(adds, **mode)(m, xs)),
        attempt(lambda: lib.scan(changes_shape, **mode)(m, xs)),
        attempt(lambda: lib.scan(changes_type, **mode)(m, xs)),
    )


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
