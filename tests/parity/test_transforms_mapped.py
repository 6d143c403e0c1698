"""Programs with pmap, shard_map and scan, in both libraries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
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


def stack(lib, n=3, **options):
    """Blocks with a leading axis."""

    @lib.split_rngs(splits=n)
    @lib.vmap(**options)
    def make(rngs):
        return models(lib).Block(rngs)

    return make(lib.Rngs(0))


# pmap and shard_map -------------------------------------------------------------------------------


@program(*all_modes)
def pmap_of_a_module_over_data(lib, mode):
    m = models(lib).Vector()
    f = lib.pmap(lambda m, x: m(x), in_axes=(None, 0), **mode)
    return f(m, jnp.arange(2.0)), m


@program("updates", "plain")
def pmap_makes_and_runs_replicas(lib, mode):
    make = lib.pmap(lambda key: lib.Linear(2, 2, rngs=lib.Rngs(key)), **mode)
    m = make(jax.random.split(jax.random.key(0), 2))
    return m, lib.pmap(lambda m, x: m(x), axis_size=2, **mode)(m, X[:2])


@program("updates")
def pmap_with_axes_by_filter_and_a_name(lib, mode):
    m = models(lib).Vector()
    axes = lib.StateAxes({lib.Param: None, lib.BatchStat: None, ...: 0})

    @lib.pmap(axis_name="batch", in_axes=(axes, 0), out_axes=0, **mode)
    def f(m, x):
        m.c[...] = jax.lax.psum(x.sum(), "batch")
        return m.w * x

    return f(m, X[:2, :1]), m


@program("updates", "plain")
def pmap_of_a_training_step(lib, mode):
    m = lib.Linear(2, 1, rngs=lib.Rngs(0))
    optimizer = lib.Optimizer(m, optax.sgd(0.1), wrt=lib.Param)

    @lib.pmap(axis_name="batch", in_axes=(None, None, 0), out_axes=0, **mode)
    def step(m, optimizer, x):
        loss, grads = lib.value_and_grad(lambda m: (m(x) ** 2).mean())(m)
        optimizer.update(m, jax.lax.pmean(grads, "batch"))
        return loss

    return step(m, optimizer, X[:2]), m


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


@program(*all_modes)
def shard_map_over_data(lib, mode):
    m = lib.Linear(2, 3, rngs=lib.Rngs(0))
    f = lib.shard_map(
        lambda m, x: m(x), mesh=mesh_of(2), in_specs=(P(), P("data")), out_specs=P("data"), **mode
    )
    return f(m, jnp.ones((4, 2))), lib.jit(f)(m, jnp.ones((4, 2)))


@program(*all_modes)
def shard_map_over_one_module(lib, mode):
    m = models(lib).Vector(jnp.arange(4.0), jnp.zeros(4))
    seen = []

    @lib.shard_map(mesh=mesh_of(2), in_specs=P("data"), out_specs=P("data"), **mode)
    def f(m):
        seen.append((m.w.shape, m.c.shape))
        return m(2.0)

    return f(m), seen, m


@program("updates")
def shard_map_by_filter(lib, mode):
    m = models(lib).Vector(jnp.arange(4.0))
    specs = lib.StateSharding({lib.Param: P("data"), ...: P()})

    @lib.shard_map(mesh=mesh_of(2), in_specs=(specs, P()), out_specs=P("data"), **mode)
    def f(m, x):
        m.c[...] += jax.lax.psum(m.w.sum(), "data")
        return m.w * x

    return f(m, 3.0), m


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


@program("updates")
def shard_map_makes_modules(lib, mode):
    out = lib.StateSharding({lib.Param: P("data"), ...: P()})

    @lib.shard_map(mesh=mesh_of(2), in_specs=P("data"), out_specs=out, **mode)
    def make(w):
        return models(lib).Vector(w, jnp.zeros(()))

    m = make(jnp.arange(4.0))
    return m, m.w.shape


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


@program("updates", "plain")
def scan_over_layers(lib, mode):
    @lib.vmap
    def make(key):
        return lib.Linear(2, 2, rngs=lib.Rngs(key))

    layers = make(jax.random.split(jax.random.key(0), 3))
    f = lib.scan(lambda x, m: jnp.tanh(m(x)), in_axes=(lib.Carry, 0), out_axes=lib.Carry, **mode)
    loss = lambda m: f(X, m).sum()
    return f(X, layers), lib.grad(loss)(layers), lib.jit(f)(X, layers)


@program("updates")
def scan_over_blocks_with_everything(lib, mode):
    blocks = stack(lib)

    @lib.scan(in_axes=(0, lib.Carry), out_axes=(lib.Carry, 0), **mode)
    def f(block, x):
        x = block(x)
        return x, x.sum()

    return f(blocks, X), f(blocks, X), blocks


@program("updates")
def scan_over_layers_with_shared_state(lib, mode):
    axes = lib.StateAxes({(lib.Param, "dropout"): 0, lib.RngState: 0, ...: lib.Carry})

    @lib.split_rngs(splits=3)
    @lib.vmap(out_axes=lib.StateAxes({(lib.Param, lib.RngState): 0, ...: None}))
    def make(rngs):
        return models(lib).Block(rngs)

    blocks = make(lib.Rngs(0))

    @lib.scan(in_axes=(axes, lib.Carry), out_axes=lib.Carry, **mode)
    def f(block, x):
        return block(x)

    return attempt(lambda: f(blocks, X)), blocks


@program(*all_modes)
def scan_with_a_module_as_carry(lib, mode):
    m = models(lib).Vector()

    @lib.scan(**mode)
    def f(m, x):
        return m, m(x)

    out, y = f(m, jnp.arange(3.0))
    return out.c is m.c, y, m


@program(*all_modes)
def scan_with_a_tree_of_carries(lib, mode):
    m = models(lib).Vector()

    def f(carry, x):
        y = carry["m"](carry["total"])
        return {"m": carry["m"], "total": y * x}, (y, x)

    out, ys = lib.scan(f, **mode)({"m": m, "total": jnp.zeros(3)}, jnp.arange(4.0))
    return out["total"], out["m"].c is m.c, ys, m


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


@program("updates", "plain")
def scan_with_other_axes(lib, mode):
    m = models(lib).Vector(jnp.arange(6.0).reshape(2, 3), jnp.zeros((2, 3)))
    f = lib.scan(
        lambda c, m: (c + 1, m(c)), in_axes=(lib.Carry, 1), out_axes=(lib.Carry, 1), **mode
    )
    return f(1.0, m), m


@program("updates")
def scan_with_axes_by_filter(lib, mode):
    m = models(lib).Vector()
    axes = lib.StateAxes({lib.Param: 0, ...: lib.Carry})
    f = lib.scan(lambda m, x: m(x), in_axes=(axes, 0), out_axes=0, **mode)
    return attempt(lambda: f(m, jnp.ones(3))), m


@program("updates")
def scan_with_constants_by_filter(lib, mode):
    m = models(lib).Vector(c=7.0)
    axes = lib.StateAxes({lib.Param: 0, ...: None})
    f = lib.scan(lambda c, m: (c + m.w * m.c, c), in_axes=(lib.Carry, axes), **mode)
    return f(1.0, m), m


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
def scan_that_adds_to_scanned_objects(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))

    def f(c, m):
        m.new = lib.Cache(c * m.w)
        m.size = 3
        m.sow(lib.Intermediate, "seen", c)
        return c + 1, None

    lib.scan(f, **mode)(0.0, m)
    return m, m.size


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
def scan_as_a_method(lib, mode):
    class Stack(lib.Module):
        def __init__(self):
            self.w = lib.Param(jnp.arange(1.0, 4.0))
            self.total = lib.BatchStat(jnp.zeros(3))

        @lib.scan(in_axes=(0, lib.Carry), out_axes=lib.Carry, **mode)
        def run(self, x):
            self.total[...] = x
            return x * self.w

    m = Stack()
    return m.run(2.0), m


@program("updates")
def scan_training_loop(lib, mode):
    m = lib.Linear(2, 1, rngs=lib.Rngs(0))
    optimizer = lib.Optimizer(m, optax.adam(0.1), wrt=lib.Param)

    def step(carry, x):
        m, optimizer = carry
        loss, grads = lib.value_and_grad(lambda m: (m(x) ** 2).mean())(m)
        optimizer.update(m, grads)
        return (m, optimizer), loss

    _, losses = lib.jit(lib.scan(step, **mode))((m, optimizer), X[:, None])
    return losses, m, lib.state(optimizer)


@program("updates", "plain")
def scan_of_an_rnn_with_dropout(lib, mode):
    cell = lib.LSTMCell(2, 3, rngs=lib.Rngs(0))
    drop = lib.Dropout(0.5, rngs=lib.Rngs(1))
    axes = {"in_axes": (None, lib.Carry, 1), "out_axes": (lib.Carry, 1)}
    carry = cell.initialize_carry((2, 2), lib.Rngs(2))
    f = lib.scan(lambda cell, carry, x: cell(carry, x), **axes, **mode)
    g = lib.scan(lambda drop, x: (drop, drop(x)), **mode)
    return f(cell, carry, jnp.ones((2, 4, 2))), g(drop, jnp.ones((3, 4)))[1], drop


@program("updates", "plain")
def scan_nested_with_vmap_and_remat(lib, mode):
    m = models(lib).Vector(jnp.ones((2, 3)), jnp.zeros((2, 3)))

    @lib.scan(in_axes=(lib.Carry, 0), out_axes=lib.Carry, **mode)
    @lib.remat
    def inner(x, m):
        return jnp.sin(m(x))

    f = lib.vmap(inner, in_axes=(0, None), **mode)
    return attempt(lambda: f(jnp.arange(2.0)[:, None] * jnp.ones(3), m)), lib.grad(
        lambda m: inner(jnp.ones(3), m).sum()
    )(m)


@program("updates", "plain")
def scan_with_shared_objects(lib, mode):
    m = models(lib).Vector()

    def f(carry, x):
        a, b = carry
        a(x)
        return (a, b), b(x)

    (a, b), ys = lib.scan(f, **mode)((m, m), jnp.ones(2))
    return ys, a.c is b.c, a.c is m.c, m


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
def scan_that_accumulates_gradients(lib, mode):
    m, counted = lib.Linear(2, 3, rngs=lib.Rngs(0)), models(lib).Counted()
    xs = jnp.arange(12.0).reshape(2, 3, 2)
    zeros = jax.tree.map(jnp.zeros_like, lib.state(m, lib.Param))

    def step(carry, x):
        m, counted, total = carry
        loss, grads = lib.value_and_grad(lambda m: (m(x) ** 2).sum())(m)
        return (m, counted, jax.tree.map(jnp.add, total, grads)), counted(loss)

    (a, b, total), ys = lib.scan(step)((m, counted, zeros), xs)
    (_, _, again), _ = lib.jit(lib.scan(step))((m, counted, zeros), xs)
    return a is m, b is counted, total, ys, again, zeros, counted


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
def loops_over_variables_that_hold_pytrees(lib, mode):
    v = lib.Cache({"a": jnp.zeros(2), "b": (jnp.ones(()),)})
    m = lib.Dict(v=lib.Cache({"a": jnp.zeros(2)}))

    def write(m, x):
        m.v.value = {"a": m.v.value["a"] + x}
        return m, x

    return [
        lib.scan(lambda c, x: (jax.tree.map(lambda a: a + x, c), x))(v, jnp.arange(3.0)),
        lib.fori_loop(0, 2, lambda i, c: jax.tree.map(lambda a: a * 2, c), v),
        lib.scan(write)(m, jnp.arange(3.0))[0] is m,
        lib.fori_loop(0, 2, lambda i, m: write(m, 1.0)[0], m) is m,
        m,
        v,
    ]


@program("updates", "plain")
def scan_with_a_state_of_arrays_as_carry(lib, mode):
    s = lib.State({"a": jnp.ones(2), "b": {"c": jnp.zeros(())}})

    def body(s, x):
        new = jax.tree.map(lambda a: a, s)
        new["a"] = s["a"] + x
        return new, jax.tree.map(lambda a: a * 2, s)

    return lib.scan(body, **mode)(s, jnp.arange(3.0)), s


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
