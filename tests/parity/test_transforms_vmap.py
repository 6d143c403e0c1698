"""Programs with vmap, in both libraries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

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


def read_axes(lib, m, mode, axes):
    """`StateAxes`, or where updates are off the same as a prefix."""
    return lib.StateAxes(axes) if mode == {} else lib.prefix(m, axes, graph=mode.get("graph"))


@program(*all_modes)
def vmap_of_a_module_over_data(lib, mode):
    m = lib.Linear(2, 3, rngs=lib.Rngs(0))
    f = lib.vmap(lambda m, x: m(x), in_axes=(None, 0), **mode)
    return f(m, X), lib.vmap(lambda m, x: m(x), in_axes=(None, 1), out_axes=1, **mode)(m, X.T)


@program(*all_modes)
def vmap_makes_stacked_modules(lib, mode):
    @lib.vmap(**mode)
    def make(key):
        return lib.Linear(2, 3, rngs=lib.Rngs(key))

    m = make(jax.random.split(jax.random.key(0), 3))
    y = lib.vmap(lambda m, x: m(x), **mode)(m, X)
    return m, type(m).__name__, m.kernel.shape, m.in_features, y


@program("updates")
def vmap_of_a_class(lib, mode):
    m = lib.vmap(lib.Linear, in_axes=(None, None), axis_size=3, **mode)
    made = lib.vmap(models(lib).Vector, **mode)(jnp.ones((2, 3)), jnp.zeros(2))
    return callable(m), made, made.w.shape


@program(*all_modes)
def vmap_of_a_module_that_counts(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))
    y = lib.vmap(lambda m, x: m(x), **mode)(m, jnp.ones(3))
    return y, m


@program(*all_modes)
def vmap_with_axes_by_filter(lib, mode):
    m = models(lib).Vector()
    axes = read_axes(lib, m, mode, {lib.Param: 0, ...: None})
    y = lib.vmap(lambda m, x: m.w * x + m.c, in_axes=(axes, None), **mode)(m, 2.0)
    return y, m


@program(*all_modes)
def vmap_writes_a_broadcast_variable_equally(lib, mode):
    m = models(lib).Vector()
    axes = read_axes(lib, m, mode, {lib.Param: 0, ...: None})
    y = lib.vmap(lambda m, x: m(x), in_axes=(axes, 0), **mode)(m, jnp.ones(3))
    return y, m


@program(*all_modes)
def vmap_with_axes_by_path_and_kind(lib, mode):
    m = models(lib).Pair(jnp.ones((3, 4)))
    m.c = lib.Cache(jnp.arange(4.0))
    m.b[1][...] = jnp.arange(3.0) * 2
    if mode.get("graph") is False:
        m.b[0] = lib.Param(jnp.ones((3, 4)))
    axes = read_axes(lib, m, mode, {lib.PathContains("c"): 0, lib.Param: 1, ...: None})
    return lib.vmap(lambda m: m.a.sum() + m.b[1].sum() * m.c, in_axes=(axes,), **mode)(m)


@program("updates")
def vmap_with_axes_of_results(lib, mode):
    axes = lib.StateAxes({lib.Param: 1, lib.BatchStat: None, ...: 0})

    def make(w):
        m = models(lib).Vector(w)
        m.extra = lib.Cache(w * 2)
        return m, w.sum()

    m, s = lib.vmap(make, out_axes=(axes, 0), **mode)(jnp.ones((2, 3)))
    return m, m.w.shape, m.c.shape, m.extra.shape, s


@program("updates", "plain")
def vmap_of_one_module_twice(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))

    def f(a, b, x):
        a(x)
        return b["m"](x)

    return lib.vmap(f, **mode)(m, {"m": m}, jnp.ones(3)), m


@program("updates")
def vmap_returns_the_caller_own_objects(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))

    def f(m):
        m(1.0)
        return m, {"w": m.w, "new": lib.Param(m.w * 2)}

    out, rest = lib.vmap(f, **mode)(m)
    return out is m, rest["w"] is m.w, rest["new"], m


@program(*plain_modes)
def vmap_refuses_to_return_its_inputs(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))
    return attempt(lambda: lib.vmap(lambda m: m, **mode)(m))


@program("updates")
def vmap_that_adds_and_removes(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))

    def f(m, x):
        m.new = lib.Cache(m.w * x)
        m.size = 3
        m.nested = lib.Dict(v=lib.Param(x))
        m.alias = m.w
        del m.c

    lib.vmap(f, **mode)(m, jnp.arange(3.0))
    return m, m.size, m.alias is m.w, hasattr(m, "c"), list(lib.state(m))


@program("updates")
def vmap_that_adds_to_a_module_with_axes(lib, mode):
    m = models(lib).Vector()
    axes = lib.StateAxes({lib.Param: 0, lib.Cache: 1, ...: None})

    def f(m):
        m.new = lib.Cache(jnp.full(2, m.w[...]))

    lib.vmap(f, in_axes=(axes,), **mode)(m)
    return m, m.new.shape


@program("updates")
def vmap_that_sows(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))

    def f(m, x):
        m.sow(lib.Intermediate, "seen", x * 2)
        return m(x)

    y = lib.vmap(f, **mode)(m, jnp.arange(3.0))
    return y, lib.pop(m, lib.Intermediate), m


@program(*all_modes)
def vmap_with_an_axis_name(lib, mode):
    m = models(lib).Vector()

    def f(m, x):
        m.c[...] = jax.lax.pmean(x, "batch")
        return m.w * jax.lax.axis_index("batch") + jax.lax.psum(x, "batch")

    y = lib.vmap(f, in_axes=(None, 0), axis_name="batch", **mode)(m, jnp.arange(4.0))
    return y, m


@program(*all_modes)
def vmap_with_an_axis_size(lib, mode):
    m = models(lib).Vector()
    f = lib.vmap(lambda m: m.w * 2, in_axes=None, axis_size=4, **mode)
    return f(m), lib.vmap(lambda: jnp.ones(2), axis_size=3, **mode)()


@program(*all_modes)
def vmap_with_a_mesh_axis_name(lib, mode):
    m = models(lib).Vector(c=jnp.zeros(3))
    f = lib.jit(lib.vmap(lambda m, x: m(x), spmd_axis_name="data", **mode))
    with jax.set_mesh(mesh_of(1)):
        return f(m, jnp.ones(3)), m


@program("updates", "plain")
def vmap_as_decorators(lib, mode):
    @lib.vmap(in_axes=(None, 0), out_axes=1, **mode)
    def f(m, x):
        """Doc."""
        return m(x)

    class Ensemble(lib.Module):
        def __init__(self):
            self.w = lib.Param(jnp.arange(6.0).reshape(3, 2))

        @lib.vmap(in_axes=(0, None), **mode)
        def __call__(self, x):
            return self.w * x

    m = lib.Linear(2, 3, rngs=lib.Rngs(0))
    return f(m, X), f.__name__, f.__doc__, Ensemble()(jnp.array([1.0, 3.0]))


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


@program(*all_modes)
def vmap_of_dropout_with_split_rngs(lib, mode):
    drop = lib.Dropout(0.5, rngs=lib.Rngs(0))

    def f(drop, x):
        return drop(x)

    axes = read_axes(lib, drop, mode, {lib.RngState: 0, ...: None})
    run = lib.split_rngs(splits=3, **mode)(lib.vmap(f, in_axes=(axes, 0), **mode))
    return run(drop, jnp.ones((3, 8))), run(drop, jnp.ones((3, 8))), lib.state(drop)


@program("updates")
def vmap_of_some_streams(lib, mode):
    rngs = lib.Rngs(params=0, dropout=1)

    @lib.split_rngs(splits=4, only="params")
    @lib.vmap(in_axes=(lib.StateAxes({"params": 0, ...: None}),), **mode)
    def f(rngs):
        return jax.random.normal(rngs.params(), (2,)), jax.random.normal(rngs.dropout(), ())

    out = f(rngs)
    return out, rngs.params.count, rngs.dropout.count, lib.state(rngs)


@program("updates", "plain")
def vmap_with_rngs_forked_by_hand(lib, mode):
    rngs = lib.Rngs(0)
    forked = rngs.fork(split=3)
    f = lib.vmap(lambda rngs, x: jax.random.normal(rngs(), ()) + x, **mode)
    return f(forked, jnp.zeros(3)), f(forked, jnp.zeros(3)), lib.state(forked), lib.state(rngs)


@program(*plain_modes, newer=True)
def vmap_with_rngs_decorator(lib, mode):
    rngs = lib.Rngs(params=0, dropout=1)

    @lib.with_rngs(split={"params": 3}, broadcast={"dropout": 3}, **mode)
    @lib.vmap(in_axes=(0,), **mode)
    def f(rngs):
        return rngs.params.normal(()), rngs.dropout.normal(())

    return f(rngs), lib.state(rngs)


@program("updates", "plain")
def vmap_nested(lib, mode):
    @lib.vmap(**mode)
    @lib.vmap(**mode)
    def make(key):
        return lib.Linear(2, 2, rngs=lib.Rngs(key))

    m = make(jax.random.split(jax.random.key(0), (2, 3)))
    f = lib.vmap(lib.vmap(lambda m, x: m(x), in_axes=(0, None), **mode), in_axes=(0, None), **mode)
    return m.kernel.shape, f(m, X[0])


@program("updates", "plain")
def vmap_of_grad_of_each_example(lib, mode):
    m = lib.Linear(2, 1, rngs=lib.Rngs(0))
    g = lib.grad(lambda m, x: m(x).sum() ** 2, **mode)
    per_example = lib.vmap(g, in_axes=(None, 0), **mode)(m, X)
    return per_example, lib.jit(lib.vmap(lib.value_and_grad(lambda m, x: m(x).sum())))(
        stack_linears(lib), X
    )


def stack_linears(lib, n=3):
    return lib.vmap(lambda k: lib.Linear(2, 1, rngs=lib.Rngs(k)))(
        jax.random.split(jax.random.key(0), n)
    )


@program("updates")
def vmap_of_an_ensemble_in_training(lib, mode):
    models_ = stack(lib)

    @lib.vmap(**mode)
    def make_optimizer(m):
        return lib.Optimizer(m, optax.sgd(0.1), wrt=lib.Param)

    @lib.jit
    @lib.vmap(in_axes=(0, 0, None), **mode)
    def step(m, optimizer, x):
        loss, grads = lib.value_and_grad(lambda m: (m(x) ** 2).mean())(m)
        optimizer.update(m, grads)
        return loss

    optimizer = make_optimizer(models_)
    losses = [step(models_, optimizer, X) for _ in range(2)]
    return losses, models_, lib.state(optimizer)


@program("updates")
def vmap_with_prefixes_in_containers(lib, mode):
    m, n = models(lib).Vector(c=jnp.zeros(3)), models(lib).Vector()
    f = lambda d, t: (d["m"](t[0]) + d["n"].w.sum(), t[1])
    y = lib.vmap(f, in_axes=({"m": 0, "n": None}, (0, None)), out_axes=(0, 1), **mode)(
        {"m": m, "n": n}, (jnp.ones(3), jnp.arange(2.0))
    )
    return y, m, n


@program("updates", "plain")
def vmap_of_states_variables_and_lists(lib, mode):
    m = stack_linears(lib)
    graphdef, params = lib.split(m)
    f = lib.vmap(lambda s, x: lib.merge(graphdef, s)(x), **mode)
    v = lib.Param(jnp.arange(3.0))
    w = lib.vmap(lambda v: v * 2, **mode)(v)
    layers = lib.List([lib.Param(jnp.arange(3.0)), lib.Param(jnp.ones(3))])
    return f(params, X), w, lib.vmap(lambda p: p[0] + p[1], **mode)(layers)


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


@program("updates", "plain")
def vmap_writes_variables_directly(lib, mode):
    v, w = lib.Param(jnp.arange(3.0)), lib.BatchStat(jnp.zeros((2, 3)))

    def f(v, w):
        v[...] += 1
        w[...] = w[...] + v[...]

    lib.vmap(f, in_axes=(0, 1), **mode)(v, w)
    return v, w


@program("updates")
def vmap_with_negative_axes(lib, mode):
    m = models(lib).Vector(jnp.arange(6.0).reshape(2, 3), jnp.zeros((2, 3)))
    y = lib.vmap(lambda m, x: m(x), in_axes=-1, out_axes=-1, **mode)(m, jnp.ones((2, 3)))
    return y, m


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
