"""Programs with vmap, in both libraries."""

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


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
