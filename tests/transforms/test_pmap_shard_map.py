"""pmap and shard_map on eight virtual devices: values, collectives, state, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.transforms.models import Foo, snapshot

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


def mesh_of(*axes):
    sizes = {"a": DEVICES} if not axes else dict(axes)
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


MESH = mesh_of()
BY_KIND = nnx.StateSharding({nnx.BatchStat: P("a"), ...: P()})


def sharded(f, in_specs, out_specs, **options):
    return nnx.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options)


# pmap --------------------------------------------------------------------------------------------


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
    make = nnx.pmap(lambda key: nnx.Linear(2, 3, rngs=nnx.Rngs(key)))
    keys = jax.random.split(jax.random.key(0), DEVICES)
    built, expected = make(keys), nnx.vmap(lambda k: nnx.Linear(2, 3, rngs=nnx.Rngs(k)))(keys)
    np.testing.assert_array_equal(built.kernel.value, expected.kernel.value)

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
    for _ in range(3):
        mapped(m, "ab", xs)
    assert seen == ["ab", "abc", "ab"]  # JAX traces again for arrays that are on all devices
    negative = nnx.pmap(in_axes=(None, None, 0), static_broadcasted_argnums=(-2,))(f)
    assert negative(m, "a", xs).tolist() == (2 * xs).tolist()
    two = nnx.pmap(lambda x: x + 1, devices=jax.devices()[2:4])(jnp.arange(2.0))
    assert {d.id for d in two.sharding.device_set} == {2, 3}
    with pytest.raises(ValueError, match=r"at least one argument with a mapped axis\.$"):
        nnx.pmap(lambda: 1.0, axis_size=2)()
    assert repr(nnx.pmap(call)) == "pmap(call)"


def test_static_arguments_of_a_method_that_writes():
    class Counted(Row):
        def scaled(self, how, x):
            self.n[...] += len(how)
            return self.w * x

    model = Counted()
    scaled = nnx.pmap(model.scaled, static_broadcasted_argnums=0)
    assert repr(scaled).startswith("pmap(") and scaled.__name__ == "scaled"
    for how, total in (("ab", 2), ("abc", 5)):
        assert scaled(how, jnp.arange(8.0)).tolist() == [[i, 2 * i] for i in range(8)]
        assert model.n[...] == total


@pytest.mark.parametrize(
    ("match", "fun", "args", "error", "options"),
    [
        (
            r"pmap\(call\): got inconsistent sizes .* 4 at 'x', 8 at 'm.n', 'm.w'\. Give all",
            call,
            (jnp.ones(4),),
            ValueError,
            {},
        ),
        (r"pmap\(call\): .* axis 2 of 'x', .* its shape is", call, (1.0,), ValueError, {"in_axes": 2}),
        (r"partitioned 8 times, but the dimension size is 9", call, (jnp.ones(9),), ValueError,
         {"in_axes": (None, 0)}),
        (r"in_axes is not a prefix of the arguments", call, (jnp.ones(8),), ValueError,
         {"in_axes": (0,)}),
        (r"pmap\(call\): cannot interpret argument 'x' as an array, it is of type 'str'", call, ("x",),
         TypeError, {}),
        (r"returned a value of type 'object' at '<root>'", lambda m, x: object(), (jnp.ones(8),),
         TypeError, {}),
        (r"axis 3 of the result '<root>' is out of bounds", call, (jnp.ones(8),), ValueError,
         {"out_axes": 3}),
        (r"pmap\(call\): static_broadcasted_argnums has 4, but the call has 2", call,
         (jnp.ones(8),), ValueError, {"static_broadcasted_argnums": 4}),
        (r"Static argument 'x' of call is unhashable: it is of type 'list'", call, ([1],), ValueError,
         {"static_broadcasted_argnums": 1}),
        (r"Static argument 'm' of call holds a Row", call, (jnp.ones(8),), ValueError,
         {"static_broadcasted_argnums": 0}),
        (r"^inside", lambda m, x: (m(x), 1 // 0), (jnp.ones(8),), ZeroDivisionError, {}),
    ],
    ids=["sizes", "axis", "devices", "prefix", "argument", "result", "out_axes", "range",
         "unhashable", "object", "failure"],
)  # fmt: skip
def test_bad_input_of_pmap_changes_nothing(match, fun, args, error, options):
    m = Row(DEVICES)
    before = snapshot(m)
    with pytest.raises(error, match=None if error is ZeroDivisionError else match):
        nnx.pmap(fun, **options)(m, *args)
    assert snapshot(m) == before
    with pytest.raises(TypeError, match="pmap in_axes must be an int, None"):
        nnx.pmap(fun, in_axes="i")


# shard_map ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("mode", [{}, {"graph_updates": False}, {"graph": False}])
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
    mesh = mesh_of(("rows", 4), ("columns", 2))
    m = nnx.Dict(w=nnx.Param(jnp.arange(8.0).reshape(2, 4)), b=nnx.Param(jnp.ones(4)))
    x = jnp.arange(16.0).reshape(8, 2)
    specs = nnx.StateSharding({nnx.PathContains("w"): P("columns"), ...: P()})

    def matmul(m, x):
        return jax.lax.psum(x @ m.w, "columns") + m.b

    apply = nnx.shard_map(
        matmul, mesh=mesh, in_specs=(specs, P("rows", "columns")), out_specs=P("rows")
    )
    np.testing.assert_allclose(apply(m, x), x @ m.w.value + m.b.value)
    partly = nnx.shard_map(
        lambda m, x: x * m.b.sum(),
        mesh=mesh,
        in_specs=(None, P("rows")),  # None is another way to say P()
        out_specs=P("rows"),
        axis_names={"rows"},
    )
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


def test_what_is_only_read_stays_where_shard_map_put_it():
    mesh = mesh_of()
    model = Row(DEVICES)
    model.bare = jnp.ones(DEVICES)
    spec = nnx.StateSharding({nnx.Param: P("a"), nnx.BatchStat: P("a"), ...: P()})
    run = nnx.shard_map(lambda m, x: m.w * x, mesh=mesh, in_specs=(spec, P("a")), out_specs=P("a"))
    x = jnp.ones((DEVICES, 2))
    with pytest.raises(ValueError):
        run(model, jnp.ones(3))
    assert model.w.value.sharding.num_devices == 1
    run(model, x)
    place = {name: getattr(model, name).sharding.spec for name in ("w", "n", "bare")}
    assert place == {"w": P("a"), "n": P("a"), "bare": P()}
    placed = model.w.value
    run(model, x)
    assert model.w.value is placed
    model.w.value = jnp.ones((DEVICES, 2))  # a new value on one device is moved again
    run(model, x)
    assert model.w.sharding.spec == P("a")
    off = nnx.shard_map(
        lambda m: m.w.value, mesh=mesh, in_specs=P("a"), out_specs=P("a"), graph_updates=False
    )
    other = Row(DEVICES)
    off(other)
    assert other.w.value.sharding.num_devices == 1


def test_what_is_only_read_stays_where_pmap_put_it():
    model = Row(2)
    model.bare, model.columns = jnp.ones(3), nnx.Cache(np.ones((3, 2)))
    axes = nnx.StateAxes({nnx.Cache: 1, nnx.Variable: 0, ...: None})
    run = nnx.pmap(lambda m, x: m.w * x + m.columns.sum(), in_axes=(axes, 0), axis_name="a")
    with pytest.raises(ValueError):
        run(model, jnp.ones(3))
    assert model.w.value.sharding.num_devices == 1
    result = run(model, jnp.ones((2, 2)))
    place = {name: getattr(model, name).sharding.spec for name in ("w", "n", "bare", "columns")}
    assert place == {"w": P("a"), "n": P("a"), "bare": P(), "columns": P(None, "a")}
    assert model.w.sharding == result.sharding
    placed = model.w.value
    run(model, jnp.ones((2, 2)))
    assert model.w.value is placed
    other = Row(2)
    nnx.pmap(lambda m: m.w * 2, graph_updates=False)(other)
    nnx.jit(nnx.pmap(lambda m: m.w * 2))(other)
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


@pytest.mark.parametrize(
    ("match", "fun", "in_specs", "out_specs", "x", "error"),
    [
        ((r"(?s)passed 'x' of shape float32\[7\] corresponds to the spec of 'x' of value P\('a',\).*"
         r"8 does not evenly divide 7.*in_specs by argument: 'x': P\('a',\), 'm.n': P\(\)"),
         call, (P(), P("a")), P("a"), jnp.ones(7), ValueError),
        (r"(?s)the spec of 'm.n' is P\('a',\) which has length 1, but the passed 'm.n' has shape",
         call, (P("a"), P("a")), P("a"), jnp.ones(8), ValueError),
        (r"(?s)the spec of 'x' refers to 'z'", call, (P(), P("z")), P(), jnp.ones(8), ValueError),
        (r"(?s)shard_map\(call\): .*the spec of 'x' is x of type str", call, (P(), "x"), P(),
         jnp.ones(8), TypeError),
        ((r"(?s)out_specs is P\(\) which implies .*check_vma=False.*out_specs by output: "
         r"the result '<root>': P\('a',\), the value at 'm.n': P\(\)"),
         writes_apart, (P(), P("a")), P("a"), jnp.ones(8), ValueError),
        (r"(?s)but the result '1' has shape float32\[\], which has rank 0",
         lambda m, x: (x, x.sum()), (P(), P("a")), P("a"), jnp.ones(8), ValueError),
        (r"in_specs is not a prefix of the arguments.* nnx.StateSharding chooses", call, (P(),) * 3,
         P(), jnp.ones(8), ValueError),
        (r"out_specs is not a prefix of the result: .* is PyTreeDef\(\*\)\. Give", lambda m, x: x,
         (P(), P("a")), (P(), P()), jnp.ones(8), ValueError),
        (r"No sharding found for Param at 'w'", call, (nnx.StateSharding({nnx.BatchStat: P()}), P()),
         P(), jnp.ones(8), ValueError),
        (r"different out_specs for a shared Param: at 'm.w' it is P\(\), .* at 'w' it is P\('a',\)",
         lambda m, x: m, (P(), P("a")), P("a"), jnp.ones(8), ValueError),
        (r"shard_map\(call\): cannot interpret argument 'x'", call, (P(), P("a")), P("a"), "x",
         TypeError),
        (r"returned a value of type 'str' at '0'", lambda m, x: ("x", x), (P(), P("a")), P("a"),
         jnp.ones(8), TypeError),
        ("zero", lambda m, x: (m(x), 1 // 0), (P(), P("a")), P("a"), jnp.ones(8), ZeroDivisionError),
    ],
    ids=["sizes", "rank", "axis", "type", "replicated", "result-rank", "prefix", "out-prefix",
         "no-match", "shared", "argument", "result", "failure"],
)  # fmt: skip
def test_bad_input_of_shard_map_changes_nothing(match, fun, in_specs, out_specs, x, error):
    m = Row()
    before = snapshot(m)
    with pytest.raises(error, match=match):
        sharded(fun, in_specs, out_specs)(m, x)
    assert snapshot(m) == before


def test_one_variable_under_two_specs_is_refused():
    m = Row(8)
    match = r"different in_specs for a shared Param: at 'a.w' it is P\('a',\), at 'b.w' it is P\(\)"
    with pytest.raises(ValueError, match=match):
        sharded(lambda a, b: None, (P("a"), P()), P())(m, m)
    with pytest.raises(ValueError, match="Duplicate Row"):
        sharded(lambda a, b: None, P("a"), P(), graph=False)(m, m)
    with pytest.raises(TypeError, match=r"shard_map\(call\): .*requires a `jax.sharding.Mesh`"):
        nnx.shard_map(call, mesh=3, in_specs=P(), out_specs=P())(m, 1.0)


def test_check_vma_can_be_turned_off():
    m = Row()
    sharded(writes_apart, (P(), P("a")), P("a"), check_vma=False)(m, jnp.ones(8))
    assert float(m.n.value) == 1.0


# Inside shard_map ----------------------------------------------------------------------------------

EIGHT = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def in_shards(f, x, jit, check):
    mapped = nnx.shard_map(f, mesh=EIGHT, in_specs=P("d"), out_specs=P("d"), check_vma=check)
    return (nnx.jit(mapped) if jit else mapped)(x)


@pytest.mark.parametrize(("jit", "check"), [(False, True), (True, False)])
@pytest.mark.parametrize(
    "loop",
    [
        lambda x: nnx.scan(lambda y: y * 2, in_axes=0, out_axes=0)(x),
        lambda x: nnx.scan(lambda y: y * 2, in_axes=1, out_axes=1)(x),
        lambda x: nnx.scan(lambda c, y: (c + y, y * 2), in_axes=(nnx.Carry, 0))(x[0], x)[1],
        lambda x: nnx.fori_loop(0, 2, lambda i, y: y + x / 2, x),
        lambda x: nnx.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1],
        lambda x: nnx.cond(True, lambda x: x * 2, lambda x: x, x),
        lambda x: nnx.remat(lambda x: x * 2)(x),
    ],
    ids=["scan", "axis", "carry", "fori_loop", "while_loop", "cond", "remat"],
)
def test_loops_over_the_data_of_one_device(loop, jit, check):
    x = jnp.arange(48.0).reshape(16, 3)
    np.testing.assert_allclose(in_shards(loop, x, jit, check), 2 * x)


@pytest.mark.parametrize(("jit", "check"), [(False, True), (True, False)])
def test_custom_rules_inside(jit, check):
    sine = nnx.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (sine(x), x), lambda x, g: (3 * g[1] * jnp.cos(x),))
    filtered = nnx.filter_custom_vjp(jnp.sin)
    filtered.defvjp(lambda x: (filtered(x), x), lambda x, g, y: 3 * g * jnp.cos(x))
    tangent = nnx.filter_custom_jvp(jnp.sin)
    tangent.defjvp(lambda x, t: (tangent(x[0]), 3 * t[0] * jnp.cos(x[0])))
    x = jnp.arange(8.0)
    for f in (sine, filtered, tangent):
        np.testing.assert_allclose(in_shards(f, x, jit, check), jnp.sin(x), rtol=1e-6)
        slope = in_shards(lambda x: nnx.grad(lambda x: f(x).sum())(x), x, jit, check)  # noqa: B023
        np.testing.assert_allclose(slope, 3 * jnp.cos(x), rtol=1e-5)
