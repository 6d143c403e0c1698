"""vmap, pmap, shard_map, and scan by axes: state, what is written, specs, static arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.transforms.models import Foo

DEVICES = 8


class Row(nnx.Module):
    """A parameter and a statistic, with a leading axis where a size is given."""

    def __init__(self, *shape):
        self.w = nnx.Param(jnp.arange(1.0, 3.0) * jnp.ones((*shape, 2)))
        self.n = nnx.BatchStat(jnp.zeros(shape))

    def __call__(self, x):
        self.n[...] += 1
        return self.w * x


def call(m, x):
    return m(x)


MESH = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
BY_KIND = nnx.StateSharding({nnx.BatchStat: P("a"), ...: P()})


def sharded(f, in_specs, out_specs, mesh=MESH, **options):
    return nnx.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


# Any axes -----------------------------------------------------------------------------------------

KINDS = {"p": nnx.Param, "b": nnx.BatchStat, "c": nnx.Cache}
NAMES = st.sampled_from([*KINDS])
AXES = st.sampled_from([0, 1, None, nnx.Carry])


def mapped(name, f, axes):
    """The function under a transform, for a model whose Variables have these axes, and an array."""
    by_kind = nnx.StateAxes({KINDS[n]: axis for n, axis in axes.items()})
    if name == "filter_vmap":
        by_kind = nnx.Any(*[KINDS[n] for n, axis in axes.items() if axis == 0])
        return nnx.filter_vmap(f, in_axes=(by_kind, 0))
    if name == "vmap":
        return nnx.vmap(f, in_axes=(by_kind, 0))
    return nnx.scan(f, in_axes=(by_kind, 0), out_axes=0)


@settings(max_examples=30)
@given(
    st.sampled_from(["scan", "vmap", "filter_vmap"]),
    st.tuples(AXES, AXES, AXES),
    st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=3),
)
def test_L5_maps_and_scans_do_what_a_loop_of_python_over_slices_does(name, axes, program):
    """What has an axis is sliced; what is carried goes from one to the next, the rest is read."""
    allowed = {"scan": [0, 1, None, nnx.Carry], "vmap": [0, 1, None], "filter_vmap": [0, None]}
    axes = {n: a if a in allowed[name] else None for n, a in zip(KINDS, axes)}

    def f(m, x):
        for target, source in program:
            if axes[target] is not None:
                m[target].value = (m[target].value + x * m[source].value.sum()) % 16
        return sum(v.value.sum() for v in m.values())

    values = {n: np.arange(9.0, dtype=np.float32).reshape(3, 3) + i for i, n in enumerate(KINDS)}
    model = nnx.Dict({n: kind(jnp.array(values[n])) for n, kind in KINDS.items()})
    variables, xs = dict(model), np.arange(1.0, 4.0, dtype=np.float32)
    ys = mapped(name, f, axes)(model, xs)
    for i, x in enumerate(xs):
        whole = lambda n: not isinstance(axes[n], int)
        views = {n: v if whole(n) else np.moveaxis(v, axes[n], 0)[i] for n, v in values.items()}
        slices = nnx.Dict({n: nnx.Variable(view) for n, view in views.items()})
        assert ys[i] == f(slices, x)
        for n, view in views.items():
            view[...] = slices[n].value
    assert all(model[n] is v for n, v in variables.items())
    assert {n: v.value.tolist() for n, v in model.items()} == {
        n: value.tolist() for n, value in values.items()
    }


# vmap ---------------------------------------------------------------------------------------------


def test_what_is_added_or_returned_has_the_axis_of_its_kind():
    def f(m, x):
        m.seen = nnx.Param(x * jnp.ones(2))
        return nnx.Dict(w=nnx.Param(x * jnp.ones(2)), n=nnx.Variable(5.0), k=nnx.BatchStat(x))

    m, axes = nnx.Dict(), nnx.StateAxes({nnx.Param: 1, nnx.BatchStat: 0, ...: None})
    out = nnx.vmap(f, in_axes=(axes, 0), out_axes=axes)(m, jnp.arange(4.0))
    assert m.seen.value.tolist() == out.w.value.tolist() == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert out.k.value.tolist() == [0.0, 1.0, 2.0, 3.0] and out.n.value == 5.0


def test_a_class_builds_a_stack():
    inside = nnx.vmap(nnx.Linear, in_axes=(None, None), axis_size=2)
    assert inside(2, 3, rngs=nnx.Rngs(0).fork(split=2)).kernel.shape == (2, 2, 3)


def test_names_and_sizes_of_the_axis():
    m, scaled = Foo(2.0), lambda m, x: jax.lax.psum(m.x * x, "i")
    total = nnx.vmap(scaled, in_axes=(None, 0), out_axes=None, axis_name="i")
    assert float(total(m, jnp.arange(4.0))) == 12.0
    by_index = lambda m: jax.lax.axis_index("i") * m.x
    sized = nnx.vmap(by_index, in_axes=None, axis_name="i", axis_size=3)
    assert sized(m).tolist() == [0.0, 2.0, 4.0]
    assert nnx.vmap(lambda: nnx.Param(jnp.ones(2)), axis_size=3)().shape == (3, 2)


@pytest.mark.parametrize("name", [None, "a"])
def test_spmd_axis_name_reaches_the_compiler(name):
    whole = jax.NamedSharding(MESH, P())
    f = lambda m, x: jax.lax.with_sharding_constraint(m.x * x, whole)
    mapped = nnx.vmap(f, in_axes=(None, 0), spmd_axis_name=name)
    jaxpr = nnx.make_jaxpr(mapped, graph_updates=False)(Foo(), jnp.ones((8, 4)))
    (eqn,) = [e for e in jaxpr.eqns if str(e.primitive) == "sharding_constraint"]
    assert (eqn.params["sharding"].spec == P("a")) == (name is not None)


@pytest.mark.parametrize("split", [nnx.split_rngs(splits=4), nnx.fork_rngs(split=4)])
def test_streams_of_their_own_are_no_cause_for_a_warning(split):
    axes = nnx.StateAxes({nnx.RngState: 0, ...: None})
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    rows = split(nnx.vmap(call, in_axes=(axes, 0)))(drop, jnp.ones((4, 32)))
    assert len({tuple(row) for row in rows.tolist()}) == 4


def test_filters_by_path_need_not_match_the_other_places_of_a_shared_variable():
    m = nnx.Dict(a=nnx.Param(jnp.arange(2.0)), b=nnx.Param(jnp.ones(3)))
    m.c = m.a
    axes = nnx.StateAxes({nnx.PathContains("a"): 0, nnx.PathContains("b"): None})
    assert nnx.vmap(lambda m: m.a + m.b.sum() + m.c, in_axes=axes)(m).tolist() == [3, 5]


# pmap ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [{}, {"graph_updates": False}, {"graph": False}])
def test_every_device_runs_its_slice(mode):
    m, xs = Row(DEVICES), jnp.arange(8.0)
    n = m.n
    out = nnx.pmap(call, **mode)(m, xs)
    np.testing.assert_allclose(out, m.w.value * xs[:, None])
    assert m.n is n and n.value.tolist() == [1.0] * 8
    again = nnx.pmap(call, **mode).lower(m, xs).compile()(m, xs)
    assert again.tolist() == out.tolist() and n.value.tolist() == [2.0] * 8
    assert len(out.sharding.device_set) == DEVICES


def test_collectives_and_state_by_variable():
    m = Row()
    m.n.value = jnp.zeros(8)
    axes = nnx.StateAxes({nnx.BatchStat: 0, ...: None})

    def step(m, x):
        m.n[...] += x
        m.w.value = m.w * jax.lax.pmean(x, "i")
        return jax.lax.psum(m.n[...], "i")

    mapped = nnx.pmap(step, axis_name="i", in_axes=(axes, 0), out_axes=None)
    assert float(mapped(m, jnp.arange(8.0))) == 28.0
    assert m.n.value.tolist() == list(range(8)) and m.w.value.tolist() == [3.5, 7.0]


def test_construction_structure_and_sharing():
    built = nnx.pmap(lambda x: nnx.Dict(w=nnx.Param(x * jnp.ones(2))))(jnp.arange(8.0))
    assert built.w.value.tolist() == [[i, i] for i in range(8)]

    def grow(a, b):
        assert a is b["again"]
        a.new, a.size = nnx.Param(a.w * 2), 3
        return b["again"]

    m = Row(DEVICES)
    assert nnx.pmap(grow)(m, {"again": m}) is m
    assert m.size == 3 and m.new.value.tolist() == (2 * m.w.value).tolist()


def test_static_arguments_devices_and_keywords():
    seen = []

    def f(m, name, x, k=1.0):
        seen.append(name)
        return m.x * x * len(name) * k

    m, xs = Foo(2.0), jnp.arange(8.0)
    mapped = nnx.pmap(f, in_axes=(None, None, 0), static_broadcasted_argnums=1)
    assert mapped(m, "ab", xs).tolist() == (4 * xs).tolist()
    assert mapped(m, "abc", xs, k=jnp.ones(8)).tolist() == (6 * xs).tolist()
    mapped(m, "ab", xs), mapped(m, "ab", xs)
    assert seen == ["ab", "abc", "ab"]  # JAX traces again for arrays that are on all devices
    negative = nnx.pmap(in_axes=(None, None, 0), static_broadcasted_argnums=(-2,))(f)
    assert negative(m, "a", xs).tolist() == (2 * xs).tolist()
    two = nnx.pmap(lambda x: x + 1, devices=jax.devices()[2:4])(jnp.arange(2.0))
    assert {d.id for d in two.sharding.device_set} == {2, 3}


# shard_map ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [{}, {"graph_updates": False}, {"graph": False}])
@pytest.mark.parametrize("outer", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_every_shard_runs_and_what_is_written_keeps_its_spec(outer, mode):
    m, xs = Row(), jnp.arange(16.0)
    m.n.value = jnp.zeros(8)
    n = m.n

    def step(m, x):
        assert m.w.shape == (2,) and m.n.shape == (1,) and x.shape == (2,)
        m.n[...] += x.sum()
        m.w.value = m.w * jax.lax.psum(x.sum(), "a")
        return m.w * x

    w = m.w.value
    out = outer(sharded(step, (BY_KIND, P("a")), P("a"), **mode))(m, xs)
    np.testing.assert_allclose(out, xs * jnp.tile(w, 8) * 120)
    assert m.n is n and n.value.tolist() == xs.reshape(8, 2).sum(1).tolist()
    assert m.w.value.tolist() == (w * 120).tolist()
    assert n.value.sharding.spec == P("a") and m.w.value.sharding.spec == P()


def test_two_mesh_axes_and_automatic_ones():
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    m = nnx.Dict(w=nnx.Param(jnp.arange(8.0).reshape(2, 4)), b=nnx.Param(jnp.ones(4)))
    x = jnp.arange(16.0).reshape(8, 2)
    specs = nnx.StateSharding({nnx.PathContains("w"): P("columns"), ...: P()})

    def matmul(m, x):
        return jax.lax.psum(x @ m.w, "columns") + m.b

    apply = sharded(matmul, (specs, P("rows", "columns")), P("rows"), mesh)
    np.testing.assert_allclose(apply(m, x), x @ m.w.value + m.b.value)
    scaled = lambda m, x: x * m.b.sum()  # below, None is another way to say P()
    partly = sharded(scaled, (None, P("rows")), P("rows"), mesh, axis_names={"rows"})
    np.testing.assert_allclose(nnx.jit(partly)(m, x), 4 * x)


def test_gradients_are_those_without_shards():
    m, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (16, 2))

    def loss(m, x):
        return jnp.mean(jnp.tanh(m(x)) ** 2)

    mean = lambda m, x: jax.lax.pmean(loss(m, x), "a")
    grads = nnx.jit(nnx.grad(sharded(mean, (P(), P("a")), P())))(m, x)
    expected = nnx.grad(loss)(m, x)
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(grads[name].value, expected[name].value, atol=1e-6)


def test_results_and_new_variables():
    def make(x):
        return nnx.Dict(w=nnx.Param(x), n=nnx.BatchStat(jax.lax.psum(x.sum(), "a")))

    spec = nnx.StateSharding({nnx.Param: P("a"), ...: P()})
    out = sharded(make, P("a"), spec)(jnp.arange(8.0))
    assert out.w.value.tolist() == list(range(8)) and float(out.n.value) == 28.0

    def grow(m, x):
        m.total = nnx.BatchStat(x)  # follows the prefix of its argument
        m.size = 3
        return {"m": m}

    m = Row()
    m.n.value = jnp.zeros(8)
    assert sharded(grow, (BY_KIND, P("a")), BY_KIND)(m, jnp.arange(8.0))["m"] is m
    assert m.total.value.tolist() == list(range(8)) and m.size == 3


BY_NAME = nnx.StateSharding({"columns": P(None, "a"), nnx.Variable: P("a"), ...: P()})
AXES_BY_NAME = nnx.StateAxes({"columns": 1, nnx.Variable: 0, ...: None})
MAPS = {
    "shard_map": lambda f, **mode: sharded(f, (BY_NAME, P("a")), P("a"), **mode),
    "pmap": lambda f, **mode: nnx.pmap(f, in_axes=(AXES_BY_NAME, 0), axis_name="a", **mode),
}


@pytest.mark.parametrize("name", MAPS)
def test_what_is_only_read_stays_where_the_call_put_it(name):
    def scaled(m, x):
        return m.w * x + m.columns.sum()

    model, other, x = Row(DEVICES), Row(DEVICES), jnp.ones((DEVICES, 2))
    for m in (model, other):
        m.bare, m.columns = jnp.ones(3), nnx.Cache(np.ones((3, DEVICES)), tag="columns")
    run = MAPS[name](scaled)
    with pytest.raises(ValueError):
        run(model, jnp.ones(3))
    assert model.w.value.sharding.num_devices == 1
    result = run(model, x)
    place = {name: getattr(model, name).sharding.spec for name in ("w", "n", "bare", "columns")}
    assert place == {"w": P("a"), "n": P("a"), "bare": P(), "columns": P(None, "a")}
    assert model.w.sharding == result.sharding
    placed = model.w.value
    run(model, x)
    assert model.w.value is placed
    model.w.value = jnp.ones((DEVICES, 2))  # a new value on one device is moved again
    run(model, x)
    assert model.w.sharding.spec == P("a")
    MAPS[name](scaled, graph_updates=False)(other, x)
    nnx.jit(MAPS[name](scaled))(other, x)
    assert other.w.value.sharding.num_devices == 1


def test_specs_from_a_state_of_shardings_and_keywords():
    m = Row()
    m.n.value = jnp.zeros(8)
    specs = nnx.state(m)
    specs["w"], specs["n"] = specs["w"].replace(P()), specs["n"].replace(P("a"))
    f = sharded(lambda m, x, *, k: m.n + x * k, (nnx.StateSharding(specs), P("a")), P("a"))
    assert f(m, x=jnp.arange(8.0), k=2.0).tolist() == (2 * jnp.arange(8.0)).tolist()
    assert repr(f).startswith("shard_map(test_specs")


def writes_apart(m, x):
    m.n.value = x.sum()
    return x


def test_check_vma_can_be_turned_off():
    m = Row()
    sharded(writes_apart, (P(), P("a")), P("a"), check_vma=False)(m, jnp.ones(8))
    assert float(m.n.value) == 1.0


# Inside shard_map ---------------------------------------------------------------------------------


def in_shards(f, x, jit, check):
    mapped = sharded(f, P("a"), P("a"), check_vma=check)
    return (nnx.jit(mapped) if jit else mapped)(x)


LOOPS = {
    "scan": lambda x: nnx.scan(lambda y: y * 2, in_axes=0, out_axes=0)(x),
    "axis": lambda x: nnx.scan(lambda y: y * 2, in_axes=1, out_axes=1)(x),
    "carry": lambda x: nnx.scan(lambda c, y: (c + y, y * 2), in_axes=(nnx.Carry, 0))(x[0], x)[1],
    "fori_loop": lambda x: nnx.fori_loop(0, 2, lambda i, y: y + x / 2, x),
    "while_loop": lambda x: nnx.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] * 2), (0, x)
    )[1],
    "cond": lambda x: nnx.cond(True, lambda x: x * 2, lambda x: x, x),
    "remat": lambda x: nnx.remat(lambda x: x * 2)(x),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_over_the_data_of_one_device(name):
    x = jnp.arange(48.0).reshape(16, 3)
    np.testing.assert_allclose(in_shards(LOOPS[name], x, False, True), 2 * x)
    if name in ("carry", "fori_loop"):
        np.testing.assert_allclose(in_shards(LOOPS[name], x, True, False), 2 * x)


@pytest.mark.parametrize(("jit", "check"), [(False, True), (True, False)])
def test_custom_rules_inside(jit, check):
    sine = nnx.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (sine(x), x), lambda x, g: (3 * g[1] * jnp.cos(x),))
    filtered = nnx.filter_custom_vjp(jnp.sin)
    filtered.defvjp(lambda x: (filtered(x), x), lambda x, g, y: 3 * g * jnp.cos(x))
    tangent = nnx.filter_custom_jvp(jnp.sin)
    tangent.defjvp(lambda x, t: (tangent(x[0]), 3 * t[0] * jnp.cos(x[0])))
    x = jnp.arange(8.0)

    def all_of(x):
        slopes = [nnx.grad(lambda x, f=f: f(x).sum())(x) for f in (sine, filtered, tangent)]
        return jnp.stack([sine(x), filtered(x), tangent(x), *slopes], 1)

    expected = [jnp.sin(x)] * 3 + [3 * jnp.cos(x)] * 3
    np.testing.assert_allclose(in_shards(all_of, x, jit, check), jnp.stack(expected, 1), rtol=1e-5)
