"""jit: what it writes, what can be wrapped, options, modes, donation, ahead of time."""

import copy
import functools
import inspect
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import nnxlite as nnx
from tests.sharding.meshes import mesh_of
from tests.transforms.models import Counted, Foo, Tied, refuses, snapshot, values

X = jnp.array([1.0, 2.0])
MODES = [{}, {"graph_updates": False}, {"graph": False}]


def call(m, x):
    return m(x)


@nnx.jit
def forward(m, x):
    return m(x)


# Values, structure --------------------------------------------------------------------------------


def test_a_variable_written_with_its_own_value_is_no_output():
    @nnx.jit
    def same(m):
        m.x.value = m.x.value
        m.y[...] = m.y[...]

    assert len(same.trace(Foo()).jaxpr.out_avals) == 0


@pytest.mark.parametrize("mode", MODES)
def test_values_grow_shrink_and_change_type(mode):
    @functools.partial(nnx.jit, **mode)
    def change(m):
        m.x.value = jnp.ones((2, 3))
        m.y.value = {"a": m.y.value, "b": jnp.arange(2)}
        m.n.value = None

    m = Foo()
    before = (m.x, m.y, m.n)
    change(m)
    assert all(a is b for a, b in zip((m.x, m.y, m.n), before))
    assert m.x.shape == (2, 3) and m.n.value is None
    assert values(m.y.value) == [2.0, [0, 1]]


@pytest.mark.parametrize("content", [{"c": 1}, {"a": 0, "b": 1}, {}])
def test_a_plain_dict_stays_the_callers_own(content):
    @nnx.jit
    def edit(m):
        old = m.parts["a"]
        m.parts = {k: old if k == "a" else nnx.Param(jnp.zeros(2)) for k in content}

    model = nnx.Dict(parts=nnx.data({"a": nnx.Param(jnp.ones(2))}))
    held, variable = model.parts, model.parts["a"]
    edit(model)
    assert model.parts is held and set(held) == set(content)
    assert "a" not in held or held["a"] is variable


def test_without_updates_a_captured_object_without_variables_is_returned_as_a_new_one():
    m = nnx.Dict(size=3, table=jnp.arange(2.0))
    out = nnx.jit(lambda x: m, graph_updates=False)(1.0)
    assert out is not m and out.size == 3 and out.table.tolist() == [0, 1]


# What can be wrapped ------------------------------------------------------------------------------


class Built(Foo):
    """Methods compiled in the class body."""

    @nnx.jit
    def __call__(self, by):
        return self.scaled(self, by)

    @classmethod
    @nnx.jit(static_argnums=0)
    def build(cls, x):
        return cls(x)

    @staticmethod
    @nnx.jit(static_argnames="times", donate="written")
    def scaled(m, by, times=1):
        m.n[...] += by * times
        return m.n * 1.0


def test_methods_of_a_class_and_static_ones():
    m = Built.build(4.0)
    assert type(m) is Built and float(m.x.value) == 4.0
    assert float(Built.scaled(m, 1.0, times=2)) == 2.0 and float(m.scaled(m, 1.0)) == 3.0
    assert float(m(1.0)) == 4.0 and float(nnx.jit(m)(1.0)) == 5.0
    assert nnx.jit(lambda self: self + 1)(self=1) == 2


def test_numbers_count_from_the_first_argument_that_is_still_to_be_given():
    def scaled(m, by, times):
        m.n[...] += by * times
        return m.n * 1.0

    m = type("Net", (Foo,), {"scaled": scaled})()
    bound, method = nnx.jit(functools.partial(scaled, m), static_argnums=1), nnx.jit(m.scaled)
    assert float(bound(1.0, 2)) == 2.0 and float(method(by=1.0, times=2.0)) == 4.0
    assert float(nnx.jit(m.scaled, static_argnums=1)(1.0, 3)) == float(m.n.value) == 7.0


@pytest.mark.parametrize("fun", [forward, Built.scaled], ids=["function", "method"])
def test_a_decorated_function_is_pickled_by_its_name(fun):
    """As functions are: a pool of processes takes it, and a copy is the function itself."""
    assert pickle.loads(pickle.dumps(fun)) is fun
    assert copy.deepcopy(fun) is fun


@pytest.mark.parametrize("module", [__name__, None])
def test_a_decorated_function_that_no_module_has_is_not_pickled_by_its_name(module):
    local = nnx.jit(lambda m, x: m(x))
    local.__module__ = module
    with pytest.raises((pickle.PicklingError, AttributeError), match="<lambda>"):
        pickle.dumps(local)


def test_what_a_method_carries_is_not_mapped_by_a_wrapper_inside():
    class Scale(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.arange(3.0))

        def scaled(self, x):
            return self.w * x

    model, x = Scale(), jnp.arange(5.0)
    by_name = functools.partial(lambda x, *, model: model.scaled(x), model=model)
    for fun in (model.scaled, by_name):
        out = nnx.jit(nnx.vmap(fun))(x)
        np.testing.assert_array_equal(out, x[:, None] * np.arange(3.0))


# Options ------------------------------------------------------------------------------------------


def test_static_arguments_by_number_and_name():
    seen, f = [], lambda x, n: seen.append(n) or sum([x] * n)
    for options in ({"static_argnums": -1}, {"static_argnames": ("n",)}):
        assert nnx.jit(f, **options)(X, 3).tolist() == [3.0, 6.0]
        assert nnx.jit(f, **options)(X, n=3).tolist() == [3.0, 6.0]
    assert set(map(type, seen)) == {int}
    first = nnx.jit(lambda *xs: [x for x in xs if type(x) is not int], static_argnums=(0, -1))
    assert [x.item() for x in first(1, 2.0, 3.0, 4)] == [2.0, 3.0]

    @nnx.jit(static_argnames="names")
    def pick(m, *, names, **more):
        return [getattr(m, name) * more["scale"] for name in names]

    assert values(pick(Foo(), names=("x", "y"), scale=2.0)) == [2.0, 4.0]


ROWS, WHOLE = (NamedSharding(mesh_of(), PartitionSpec(*axes)) for axes in (("data",), ()))


def test_results_have_the_very_sharding_that_was_asked_for():
    specs = nnx.StateSharding({nnx.PathContains("w"): ROWS, ...: None})

    @nnx.jit(in_shardings=(WHOLE, ROWS), out_shardings=(specs, WHOLE))
    def make(m, x):
        traces.append(x.shape)
        m.count[...] += 1
        return nnx.Dict(w=nnx.Param(x), n=nnx.Variable(0)), x * m.w.sum()

    traces, m = [], Counted()
    for _ in range(2):
        made, y = make(m, jnp.ones(8))
        assert made.w.sharding == ROWS and y.sharding == WHOLE and y.tolist() == [3.0] * 8
    assert traces == [(8,)] and float(m.count.value) == 5.0


def test_out_shardings_where_the_result_depends_on_shapes():
    @nnx.jit(out_shardings=ROWS)
    def f(x):
        runs.append(len(x))
        if len(x) == 4:
            raise ValueError("four")
        return x if len(x) == 8 else {"a": x, "b": x + 1}

    runs = []
    for x in (jnp.ones(8), jnp.ones(16), jnp.ones(8)):
        assert {y.sharding for y in jax.tree.leaves(f(x))} == {ROWS}
    runs.clear()
    with refuses(ValueError, "four"):
        f(jnp.ones(4))
    assert runs == [4]


def test_a_variable_that_was_placed_and_is_now_on_another_mesh_is_written():
    mesh = jax.make_mesh((2,), ("other",), axis_types=(jax.sharding.AxisType.Auto,))
    model = nnx.Dict(w=nnx.Param(jnp.arange(4.0), nnx_placement=PartitionSpec("data")))
    moved = NamedSharding(mesh, PartitionSpec("other"))
    model.w.value = jax.device_put(model.w.value, moved)
    nnx.jit(lambda model: model.w.set_value(model.w * 2))(model)
    assert model.w.value.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("option", [{"backend": "cpu"}, {"device": jax.devices("cpu")[3]}])
def test_device_and_backend(option):
    with pytest.warns(DeprecationWarning):
        jitted = nnx.jit(call, **option)
    m = Counted()
    y = jitted(m, X)
    assert y.tolist() == [4.0, 16.0] and float(m.count.value) == 4.0
    if "device" in option:
        assert y.devices() == m.count.value.devices() == {option["device"]}


@pytest.mark.parametrize("options", [{}, {"donate": "written"}])
@pytest.mark.parametrize("ahead", [False, True])
def test_arrays_on_other_devices_are_told_of_by_argument(ahead, options):
    here, there = jax.devices("cpu")[:2]
    m = Counted()
    nnx.update(m, jax.device_put(nnx.state(m), here))
    jitted = nnx.jit(call, **options)
    if ahead:
        jitted = jitted.lower(m, jax.device_put(X, here)).compile()
    before = snapshot(m)
    texts = ["rgument x "] if ahead else ["rgument x ", "of call", "argument m."]
    with refuses(ValueError, *texts):
        jitted(m, jax.device_put(X, there))
    assert snapshot(m) == before


PLACED, DONATING = nnx.jit(in_shardings=(WHOLE,)), nnx.jit(donate="written")


@pytest.mark.parametrize("jit", [nnx.jit, PLACED, DONATING, nnx.filter_jit])
def test_clear_cache(jit):
    traces, m = [], Foo()
    jitted = jit(lambda m: traces.append(None) or m.x * 1)
    jitted(m), jitted(m)
    assert len(traces) == 1
    jitted.clear_cache()
    assert jitted._cache_size() == 0
    jitted(m)
    assert len(traces) == 2


def test_a_refused_call_leaves_no_trace_for_the_next_one():
    def by_factor(m):
        m.x.value = m.y.value * factor[0]

    factor, shared, jitted = [2.0], X + 0, DONATING(by_factor)
    m = nnx.Dict(x=nnx.Param(shared), y=nnx.Param(shared))
    with refuses(ValueError, "the same array buffer is donated"):
        jitted(m)
    factor[0], m.y.value = 3.0, X + 1
    jitted(m)
    assert m.x.value.tolist() == (3 * m.y.value).tolist()


# Modes --------------------------------------------------------------------------------------------


def test_a_function_keeps_the_defaults_of_when_it_was_made_and_arguments_override_them():
    def grow(m):
        m.x.value = m.x + 1
        m.extra = 1

    jitted = nnx.jit(grow)
    with nnx.set_graph_updates(False):
        plain, explicit = nnx.jit(grow), nnx.jit(grow, graph_updates=True)
        jitted(inside := Foo())
    with nnx.set_graph_mode(False):
        trees, graphs = nnx.jit(call), nnx.jit(call, graph=True)
        forward(Tied(), 1.0)
    for run, grows in ((jitted, True), (plain, False), (explicit, True)):
        run(m := Foo())
        assert hasattr(m, "extra") is grows and float(m.x.value) == 2.0
    assert inside.extra == 1
    graphs(Tied(), 1.0)
    with pytest.raises(ValueError, match="Duplicate"):
        trees(Tied(), 1.0)


# Donation -----------------------------------------------------------------------------------------


def test_donation_by_number_and_name():
    for options in ({"donate_argnums": 0}, {"donate_argnums": -2}, {"donate_argnames": "m"}):
        m = Counted()
        w, count, x = m.w.value, m.count.value, X + 1
        y = nnx.jit(call, **options)(m, x)
        assert y.tolist() == [8.0, 24.0] and float(m.count.value) == 4.0
        assert w.is_deleted() and count.is_deleted() and not x.is_deleted()
        assert m.w.value.tolist() == [1.0, 2.0]  # unwritten, it came back in another buffer
    m, x = Counted(), X + 1
    w = m.w.value
    nnx.jit(call, donate_argnums=1)(m, x)
    assert x.is_deleted() and m.w.value is w


def test_donating_what_is_written():
    @nnx.jit(donate="written")
    def step(m, x):
        m.count[...] += 1
        m.w.value = m.w - x
        return m.extra * 1.0

    m = Counted()
    m.extra = nnx.Param(X + 5)
    w, count, extra, x = m.w.value, m.count.value, m.extra.value, X + 0
    step(m, x)
    step(m, x)
    assert w.is_deleted() and count.is_deleted()
    assert m.extra.value is extra and not extra.is_deleted() and not x.is_deleted()
    assert values(m) == [5.0, [6.0, 7.0], [-1.0, -2.0]]


@pytest.mark.parametrize("returned", ["nothing", "an object"])
def test_a_donated_array_that_a_call_without_updates_replaces_stays(returned):
    model = nnx.Dict(w=nnx.Param(jnp.ones(3)), scale=nnx.data(jnp.arange(3.0)))

    @nnx.jit(donate_argnums=0, graph_updates=False)
    def double(m):
        m.scale = m.scale * 2
        return nnx.Dict(w=nnx.Param(m.w + 1)) if returned == "an object" else None

    for _ in range(2):
        double(model)
    assert model.scale.tolist() == [0, 1, 2] and model.w.tolist() == [1, 1, 1]


# Ahead of time ------------------------------------------------------------------------------------


def test_inline_and_keep_unused():
    def inner(m, x):
        return m.w * x

    def names(make, fun, *args):
        return {e.primitive.name for e in make(lambda *args: fun(*args))(*args).eqns}

    for inline in (True, False):
        bare = jax.jit(jnp.multiply, inline=inline)
        ours = names(nnx.make_jaxpr, nnx.jit(inner, inline=inline), Counted(), X)
        assert ours == names(jax.make_jaxpr, bare, X, X)
    for keep, inputs in ((True, 3), (False, 2)):
        lowered = nnx.jit(inner, keep_unused=keep).lower(Counted(), X)
        found = re.search(r"func public @main\((.*?)\) ->", lowered.as_text(), re.S)
        assert found is not None and len(re.findall(r"%arg\d+:", found[1])) == inputs


@pytest.mark.parametrize("options", [{}, {"donate": "written"}, {"donate_argnums": 0}])
def test_compiled_functions_take_objects(options):
    def f(m, x):
        traces.append(None)
        m.size = 3
        return m, m(x)

    traces, m = [], Counted()
    lowered = nnx.jit(f, **options).lower(m, X)
    assert float(m.count.value) == 3.0 and not hasattr(m, "size")
    compiled = lowered.compile()
    same, y = compiled(m, X)
    assert same is m and y.tolist() == [4.0, 16.0]
    assert (float(m.count.value), m.size) == (4.0, 3)
    other = Counted()
    assert compiled(other, 2 * X)[0] is other and float(other.count.value) == 4.0
    assert len(traces) == 1
    assert repr(compiled).startswith("Compiled(jit(") and repr(lowered).startswith("Lowered(jit(")
    assert "func" in lowered.as_text() and compiled.cost_analysis() is not None


def test_trace_gives_the_program_also_for_abstract_arguments():
    abstract = nnx.eval_shape(Counted), jax.ShapeDtypeStruct((2,), jnp.float32)
    for args in ((Counted(), X), abstract):
        traced, m = nnx.jit(call).trace(*args), Counted()
        assert len(traced.jaxpr.in_avals) == 3 and len(traced.jaxpr.out_avals) == 2
        assert traced.lower().compile()(m, X).tolist() == [4.0, 16.0]
        assert float(m.count.value) == 4.0 and traced.fun_name == "call"
        with pytest.raises(AttributeError, match="__nothing__"):
            traced.__nothing__


def test_a_compiled_function_refuses_other_arguments():
    m, other = Counted(), Counted()
    compiled = nnx.jit(call, static_argnums=()).lower(m, X).compile()
    other.size = 3
    before = snapshot(m, other)
    what = "jit(call) was compiled for arguments of another structure: "
    with refuses(TypeError, what + "m.size: nothing became 3. Lower"):
        compiled(other, X)
    with refuses(TypeError, what + "x: gone; x[0]: new. Lower"):
        compiled(m, [X])
    with nnx.use_eager_sharding(False), refuses(TypeError, what + "setting eager_sharding: de"):
        compiled(m, X)
    assert snapshot(m, other) == before
    del other.size
    other.w.value = jnp.ones(3)
    with refuses(TypeError, "jit(call): ", "Argument 'm.w' compiled with float32[2]"):
        compiled(other, X)
    with refuses(TypeError, "Argument 'x' compiled with float32[2]", "float32[3]"):
        compiled(m, jnp.ones(3))
    assert float(m.count.value) == float(other.count.value) == 3.0


@pytest.mark.parametrize("given", [((), {"n": 3}), ((3,), {}), ((), {})])
@pytest.mark.parametrize("bound", [False, True])
def test_a_compiled_function_is_called_without_its_static_arguments(given, bound):
    def f(m, x, n=2):
        return m(x) * n

    args, kwargs = given
    m, other = Counted(), Counted()
    fun = functools.partial(f, m) if bound else f
    taken = () if bound else (other,)
    jitted = nnx.jit(fun, static_argnums=1 if bound else 2, static_argnames="n")
    compiled = jitted.lower(*(() if bound else (m,)), X, *args, **kwargs).compile()
    n = 3 if args or kwargs else 2
    assert compiled(*taken, X).tolist() == (f(Counted(), X, n)).tolist()
    assert float((m if bound else other).count.value) == 4.0
    before = snapshot(m, other)
    for more, named in (((n,), {}), ((), {"n": n})):
        with refuses(TypeError, "a static argument, which is part of the program, was given again"):
            compiled(*taken, X, *more, **named)
    assert snapshot(m, other) == before


@pytest.mark.parametrize("transform", [nnx.jit, nnx.filter_jit], ids=lambda f: f.__name__)
def test_a_compiled_method_is_lowered_as_it_is_called(transform):
    class Scale(nnx.Module):
        def __init__(self):
            self.factor = nnx.Param(jnp.full(2, 3.0))

        @transform
        def scaled(self, x):
            return self.factor * x

    model, x = Scale(), jnp.ones(2)
    assert model.scaled.lower(x).compile()(model, x).tolist() == [3, 3]
    assert model.scaled(x).tolist() == [3, 3]
    assert model.scaled.cache_info().traces == Scale.scaled.cache_info().traces > 0
    assert list(inspect.signature(model.scaled).parameters) == ["x"]
    with pytest.raises(AttributeError, match="nothing"):
        model.scaled.nothing
    with pytest.raises(AttributeError, match="^_compiled$"):
        model.scaled._compiled  # which is of the function, not of the method
