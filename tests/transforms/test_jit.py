"""jit: what it writes, keeps, shares, refuses and compiles ahead of time."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import nnxlite as nnx
from nnxlite.transforms._compiles import RECORDS_PER_FUNCTION
from tests.sharding.meshes import mesh_of
from tests.transforms.models import Counted, Foo, Tied, refuses, snapshot, values

X = jnp.array([1.0, 2.0])
MODES = [{}, {"graph_updates": False}, {"graph": False}]


def call(m, x):
    return m(x)


@nnx.jit
def forward(m, x):
    return m(x)


# Values, identity, structure ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_written_values_are_in_the_same_variables_and_read_ones_keep_their_arrays(mode):
    m = Counted()
    w, count, array = m.w, m.count, m.w.value
    y = nnx.jit(call, **mode)(m, X)
    assert y.tolist() == [4.0, 16.0]
    assert m.w is w and m.count is count
    assert m.w.value is array and float(m.count.value) == 4.0


def test_a_variable_written_with_its_own_value_is_no_output():
    m = Foo()

    @nnx.jit
    def same(m):
        m.x.value = m.x.value
        m.y[...] = m.y[...]

    same(m)
    jaxpr = same.trace(m).jaxpr
    assert len(jaxpr.out_avals) == 0


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


def test_structure_changes_reach_the_callers_objects():
    @nnx.jit
    def change(m):
        m.new = nnx.Param(m.x * 3)
        m.size = 3
        m.array = m.x + 1
        m.me = m
        m.alias = m.x
        m.rows = [nnx.Dict(v=m.y), m.y]
        del m.n
        return m

    m = Foo()
    x, y = m.x, m.y
    assert change(m) is m
    assert m.x is x and m.alias is x and m.me is m
    assert m.rows[0].v is y and m.rows[1] is y
    assert (float(m.new.value), m.size, float(m.array)) == (3.0, 3, 2.0)
    assert not hasattr(m, "n")
    assert type(m.new) is nnx.Param


def test_edits_of_what_is_left_behind_reach_the_callers_objects():
    m = nnx.Dict(child=Foo(), weight=nnx.Param(X))
    m.child.parts, m.child.sizes = [nnx.Param(X)], [1]
    child, weight = m.child, m.weight

    @nnx.jit
    def take_apart(m):
        m.child.new = 5
        m.child.parts.append(X + 1)
        m.child.sizes.append(2)
        m.weight.set_metadata(tag="seen")
        del m.child, m.weight

    take_apart(m)
    assert not hasattr(m, "child") and not hasattr(m, "weight")
    assert child.new == 5 and child.sizes == [1, 2] and weight.tag == "seen"
    assert len(child.parts) == 2 and child.parts[1].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("mode", MODES[1:])
def test_without_updates_structure_stays(mode):
    @functools.partial(nnx.jit, **mode)
    def change(m):
        m.x.value = m.x * 2
        m.x.set_metadata(note="inside")
        m.new = nnx.Param(m.x * 3)
        m.size = 3
        del m.n
        return m.new

    m = Foo()
    attributes = dict(vars(m))
    out = change(m)
    assert vars(m) == attributes and "note" not in m.x.get_metadata()
    assert float(m.x.value) == 2.0
    assert type(out) is nnx.Param and float(out.value) == 6.0


def test_sharing_in_is_sharing_inside_and_out():
    m = Tied()
    other = nnx.Dict(part=m)

    @nnx.jit
    def f(m, pair, *, key):
        assert pair["other"].part is m and key is m.b and m.a is m.b
        assert m.child.owner is m
        m.b.value = m.b * 2
        return {"m": m, "leaf": key, "again": (m, pair["other"])}

    a = m.a
    out = f(m, {"other": other}, key=m.a)
    assert out["m"] is m and out["leaf"] is a
    assert out["again"][0] is m and out["again"][1] is other
    assert a.value.tolist() == [2.0, -4.0] and m.b is a


def test_results_of_every_kind():
    m = Foo()
    m.child = nnx.Dict(v=m.y)

    @nnx.jit
    def f(m):
        new = nnx.Dict(shared=m.x)
        return m.child, [m.x, new, new], None, 2, m.x * 2, nnx.state(m, nnx.BatchStat)

    child, (x, new, again), nothing, two, double, state = f(m)
    assert child is m.child and x is m.x and new is again and new.shared is m.x
    assert nothing is None and int(two) == 2 and float(double) == 2.0
    assert isinstance(state, nnx.State) and state["n"] is m.n


def test_states_variables_and_graph_definitions_as_arguments():
    graphdef, state = nnx.split(Foo())

    @nnx.jit(static_argnums=0)
    def f(graphdef, state, v):
        m = nnx.merge(graphdef, state)
        v.value = v + m.y
        m.x.value = m.x + 10
        return nnx.state(m)

    v = nnx.Param(1.0)
    out = f(graphdef, state, v)
    assert float(v.value) == 3.0 and float(out["x"].value) == 11.0
    assert isinstance(out, nnx.State)


# What can be wrapped --------------------------------------------------------------------------------


class Stateful(nnx.Module):
    """Methods compiled in the class body."""

    def __init__(self, start=0.0):
        self.n = nnx.Variable(jnp.array(start))

    def __call__(self, by):
        self.n[...] += by
        return self.n * 1.0

    @nnx.jit
    def add(self, by=1.0):
        """Adds."""
        return self(by)

    @nnx.jit(static_argnames="times", donate="written")
    def repeat(self, by, times):
        for _ in range(times):
            self(by)

    @classmethod
    @nnx.jit(static_argnums=0)
    def build(cls, start):
        return cls(start)

    @staticmethod
    @nnx.jit
    def both(a, b):
        return a(1.0) + b(1.0)


def test_methods_decorated_in_the_class_body():
    m = Stateful()
    assert float(m.add()) == 1.0 and float(m.add(by=2.0)) == 3.0
    m.repeat(1.0, times=2)
    m.repeat(1.0, 1)
    assert float(m.n.value) == 6.0
    assert float(Stateful.add(m, 1.0)) == 7.0
    assert float(Stateful.both(m, m)) == 17.0
    assert float(Stateful.build(4.0).n.value) == 4.0
    assert (Stateful.add.__name__, Stateful.add.__doc__) == ("add", "Adds.")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m.__call__,
        lambda m: m,
        lambda m: functools.partial(m, 2.0),
        lambda m: functools.partial(Stateful.__call__, m),
        lambda m: functools.partial(lambda label, m, by: m(by), "label", m),
        lambda m: functools.partial(lambda by, m, label: m(by), m=m, label="label"),
    ],
    ids=["bound method", "callable module", "all bound", "unbound", "constants", "keywords"],
)
def test_what_a_function_brings_along_is_an_argument(wrap):
    m = Stateful()
    fun = wrap(m)
    jitted = nnx.jit(fun)
    args = () if fun is not m and getattr(fun, "args", None) == (2.0,) else (2.0,)
    assert [float(jitted(*args)) for _ in range(3)] == [2.0, 4.0, 6.0]
    m.n.value = jnp.array(10.0)
    assert float(jitted(*args)) == 12.0 and float(m.n.value) == 12.0
    assert jitted._cache_size() == 1


def test_classes_are_functions_that_make_objects():
    m = nnx.jit(Tied)()
    assert type(m) is Tied and m.a is m.b and m.child.owner is m
    made = nnx.jit(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(key)))(jax.random.key(0))
    assert jnp.allclose(made.kernel.value, nnx.Linear(2, 2, rngs=nnx.Rngs(0)).kernel.value)


def test_numbers_count_from_the_first_argument_that_is_still_to_be_given():
    @functools.partial
    def scaled(m, by, times):
        return m(by * times)

    m = Stateful()
    bound = nnx.jit(functools.partial(scaled, m), static_argnums=1)
    assert float(bound(1.0, 2)) == 2.0 and float(m.n.value) == 2.0
    method = nnx.jit(m.__call__, static_argnums=0)
    assert float(method(1.0)) == 3.0 and float(method(by=1.0)) == 4.0


def test_the_wrapper_is_a_good_citizen():
    jitted = nnx.jit(call)
    assert repr(jitted) == "jit(call)" and jitted.__name__ == "call"
    assert jitted.__wrapped__ is call and jitted.fun is call
    again = pickle.loads(pickle.dumps(forward_by_name))
    assert float(again(Stateful(), 2.0)) == 2.0
    assert nnx.jit()(call)(Stateful(), 2.0) == nnx.jit(inline=True)(call)(Stateful(), 2.0) == 2.0


def named(m, x):
    return m(x)


forward_by_name = nnx.jit(named)


@nnx.jit
def decorated_by_name(m, x):
    return m(x)


class Decorated(Stateful):
    @nnx.jit
    def twice(self, x):
        return 2 * x


@pytest.mark.parametrize("fun", [decorated_by_name, Decorated.twice], ids=["function", "method"])
def test_a_decorated_function_is_pickled_by_its_name(fun):
    """As functions are: a pool of processes takes it, and a copy is the function itself."""
    assert pickle.loads(pickle.dumps(fun)) is fun
    assert copy.deepcopy(fun) is fun


def test_a_decorated_function_that_no_module_has_is_not_pickled_by_its_name():
    local = nnx.jit(lambda m, x: m(x))
    with pytest.raises((pickle.PicklingError, AttributeError), match="<lambda>"):
        pickle.dumps(local)
    local.__module__ = None
    with pytest.raises((pickle.PicklingError, AttributeError), match="<lambda>"):
        pickle.dumps(local)


# Options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, args, kwargs",
    [
        ({"static_argnums": 1}, (X, 3), {}),
        ({"static_argnums": -1}, (X, 3), {}),
        ({"static_argnums": (1,)}, (X,), {"n": 3}),
        ({"static_argnames": "n"}, (X, 3), {}),
        ({"static_argnames": ("n",)}, (), {"x": X, "n": 3}),
    ],
)
def test_static_arguments_by_number_and_name(options, args, kwargs):
    seen = []

    def f(x, n):
        seen.append(n)
        return sum([x] * n)

    jitted = nnx.jit(f, **options)
    for _ in range(2):
        assert jitted(*args, **kwargs).tolist() == [3.0, 6.0]
    assert seen == [3] and type(seen[0]) is int


def test_static_arguments_of_variadic_and_keyword_only_functions():
    first = nnx.jit(lambda *xs: [x for x in xs if type(x) is not int], static_argnums=(0, -1))
    assert [x.item() for x in first(1, 2.0, 3.0, 4)] == [2.0, 3.0]

    @nnx.jit(static_argnames="names")
    def pick(m, *, names, **more):
        return [getattr(m, name) * more["scale"] for name in names]

    assert values(pick(Foo(), names=("x", "y"), scale=2.0)) == [2.0, 4.0]


def test_donation_by_number_and_name():
    for options in ({"donate_argnums": 0}, {"donate_argnums": -2}, {"donate_argnames": "m"}):
        m = Counted()
        w, count, x = m.w.value, m.count.value, X + 1
        y = nnx.jit(call, **options)(m, x)
        assert y.tolist() == [8.0, 24.0] and float(m.count.value) == 4.0
        assert w.is_deleted() and count.is_deleted() and not x.is_deleted()
        assert m.w.value.tolist() == [1.0, 2.0]  # unwritten, it came back in another buffer


def test_donation_of_an_array_argument_beside_an_object():
    m, x = Counted(), X + 1
    w = m.w.value
    nnx.jit(lambda m, x: (m(1.0), x * 2)[1], donate_argnums=1)(m, x)
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
    saved = step.donation(m, x)
    assert saved.paths == ("m.count", "m.w") and saved.bytes == 4 + 8
    assert not w.is_deleted()
    step(m, x)
    step(m, x)
    assert w.is_deleted() and count.is_deleted()
    assert m.extra.value is extra and not extra.is_deleted() and not x.is_deleted()
    assert values(m) == [5.0, [6.0, 7.0], [-1.0, -2.0]]
    nothing = nnx.jit(lambda m: m.w * 1, donate="written").donation(m)
    assert nothing.paths == () and nothing.bytes == 0


ALIASES = {
    "within one object": (lambda m, x: m.other.copy_from(m.count), "'m.other'"),
    "in an argument": (lambda m, x: x.append(m.count.value), "'x.0'"),
}


@pytest.mark.parametrize("how", ALIASES)
@pytest.mark.parametrize(
    "options", [{"donate": "written"}, {"donate_argnums": 0}], ids=["written", "argument"]
)
@pytest.mark.parametrize("used_before", [False, True], ids=["first call", "later call"])
def test_a_buffer_is_not_donated_and_used(how, options, used_before):
    alias, where = ALIASES[how]

    def f(m, x):
        m.count[...] += 1
        return m.w * 1.0

    def make():
        m = Counted()
        m.other = nnx.BatchStat(jnp.array(7.0))
        return m

    jitted = nnx.jit(f, **options)
    if used_before:
        jitted(make(), [jnp.array(1.0)] if how == "in an argument" else [])
    m, x = make(), []
    alias(m, x)
    before = snapshot(m)
    with refuses(ValueError, "'m.count'", where, "donated buffer can be used once"):
        jitted(m, x)
    assert snapshot(m) == before and not m.count.value.is_deleted()
    assert not m.other.value.is_deleted()


def test_of_two_donated_places_the_first_is_named_first():
    x, add = jnp.ones(2), lambda x, y: x + y
    with refuses(ValueError, "donated at 'x' and used at 'y'"):
        nnx.jit(add, donate_argnums=(0, 1))(x, x)
    with refuses(ValueError, "donated at 'x' and used at 'y'"):
        nnx.filter_jit(add, donate="all")(x, x)


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


@pytest.mark.parametrize("content", [{"c": 1}, {"a": 0, "b": 1}, {}])
def test_a_plain_dict_stays_the_callers_own(content):
    model = nnx.Dict(parts=nnx.data({"a": nnx.Param(jnp.ones(2))}))
    held, variable = model.parts, model.parts["a"]

    @nnx.jit
    def edit(m):
        old = m.parts["a"]
        m.parts = {k: old if k == "a" else nnx.Param(jnp.zeros(2)) for k in content}

    edit(model)
    assert model.parts is held and set(held) == set(content)
    assert "a" not in held or held["a"] is variable


def test_one_shared_variable_is_donated_once():
    m = Tied()
    jitted = nnx.jit(lambda m, n: setattr(m.a, "value", m.a * 2), donate="written")
    jitted(m, m)
    assert m.b.value.tolist() == [2.0, -4.0]


def test_in_and_out_shardings():
    rows = NamedSharding(mesh_of(), PartitionSpec("data"))
    whole = NamedSharding(mesh_of(), PartitionSpec())

    @nnx.jit(in_shardings=(whole, rows), out_shardings=rows)
    def f(m, x):
        m.count[...] += 1
        return m.w.sum() * x

    m = Counted()
    y = f(m, jnp.ones(8))
    assert y.sharding == rows and y.tolist() == [3.0] * 8 and float(m.count.value) == 4.0
    with refuses(ValueError, "out_shardings is not a prefix of the result"):
        nnx.jit(lambda x: x, out_shardings=(rows, rows))(jnp.ones(8))


def test_results_have_the_very_sharding_that_was_asked_for():
    mesh, traces = mesh_of(), []
    rows, columns = (NamedSharding(mesh, PartitionSpec(*s)) for s in (("data", None), (None, None)))

    @nnx.jit(out_shardings=(nnx.StateSharding({nnx.PathContains("w"): rows, ...: None}), columns))
    def make(x):
        traces.append(x.shape)
        return nnx.Dict(w=nnx.Param(x), n=nnx.Variable(0)), x * 2

    for _ in range(2):
        m, y = make(jnp.ones((8, 2)))
        assert m.w.sharding == rows and y.sharding == columns
    assert traces == [(8, 2)]


def test_out_shardings_where_the_result_depends_on_shapes():
    rows, runs = NamedSharding(mesh_of(), PartitionSpec("data")), []

    @nnx.jit(out_shardings=rows)
    def f(x):
        runs.append(len(x))
        if len(x) == 4:
            raise ValueError("four")
        return x if len(x) == 8 else {"a": x, "b": x + 1}

    for x in (jnp.ones(8), jnp.ones(16), jnp.ones(8)):
        assert {y.sharding for y in jax.tree.leaves(f(x))} == {rows}
    runs.clear()
    with refuses(ValueError, "four"):
        f(jnp.ones(4))
    assert runs == [4]


def test_nothing_is_kept_of_calls_whose_programs_are_gone():
    whole = NamedSharding(mesh_of(), PartitionSpec())
    placed = nnx.jit(lambda m: m.w * 1, out_shardings=whole)
    donating = nnx.jit(lambda m: m.w.set_value(m.w * 1), donate="written")
    for n in range(RECORDS_PER_FUNCTION + 10):
        model = Counted()
        model.number = n
        placed(model)
        assert donating.donation(model).bytes == 8
    del model
    jax.clear_caches()
    gc.collect()
    for jitted in (placed, donating):
        # What is left are the calls in the log of `explain`, and that of the body traced last.
        assert len(jitted._compiled._labels) <= RECORDS_PER_FUNCTION + 1


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
    with refuses(
        ValueError, "rgument x ", "" if ahead else "of call", "" if ahead else "argument m."
    ):
        jitted(m, jax.device_put(X, there))
    assert snapshot(m) == before


# Ahead of time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"donate": "written"}, {"donate_argnums": 0}])
def test_compiled_functions_take_objects(options):
    traces = []

    def f(m, x):
        traces.append(None)
        m.size = 3
        return m, m(x)

    m = Counted()
    jitted = nnx.jit(f, **options)
    lowered = jitted.lower(m, X)
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


def test_trace_gives_the_program():
    traced = nnx.jit(call).trace(Counted(), X)
    assert len(traced.jaxpr.in_avals) == 3 and len(traced.jaxpr.out_avals) == 2
    m = Counted()
    assert traced.lower().compile()(m, X).tolist() == [4.0, 16.0] and float(m.count.value) == 4.0
    assert traced.fun_name == "call"
    with pytest.raises(AttributeError, match="__nothing__"):
        traced.__nothing__


def test_abstract_arguments_can_be_lowered():
    m = nnx.eval_shape(Counted)
    compiled = nnx.jit(call).lower(m, jax.ShapeDtypeStruct((2,), jnp.float32)).compile()
    real = Counted()
    assert compiled(real, X).tolist() == [4.0, 16.0] and float(real.count.value) == 4.0


@pytest.mark.parametrize("options", [{}, {"donate": "written"}])
def test_eval_shape_of_a_jitted_function(options):
    m = Counted()
    before = snapshot(m)

    def f(m, x):
        m.new = nnx.Param(m.w * 2)
        return m, m(x)

    inside, y = nnx.jit(f, **options).eval_shape(m, X)
    assert snapshot(m) == before
    assert (y.shape, y.dtype) == ((2,), jnp.float32)
    assert type(inside) is Counted and inside is not m
    assert isinstance(inside.new.value, jax.ShapeDtypeStruct)


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
    other.w.value = jnp.ones(3)
    del other.size
    before = snapshot(m, other)
    with refuses(TypeError, "jit(call): ", "Argument 'm.w' compiled with float32[2]"):
        compiled(other, X)
    with refuses(TypeError, "Argument 'x' compiled with float32[2]", "float32[3]"):
        compiled(m, jnp.ones(3))
    assert snapshot(m, other) == before


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


def test_a_compiled_function_refuses_a_buffer_used_twice():
    m = Foo()
    compiled = (
        nnx.jit(lambda m: setattr(m.x, "value", m.x + 1), donate="written").lower(m).compile()
    )
    compiled(m)
    m.y.value = m.x.value
    with refuses(ValueError, "donated at 'm.x' and used at 'm.y'"):
        compiled(m)
    assert not m.y.value.is_deleted()


def test_clear_cache():
    traces = []

    def f(m):
        traces.append(None)
        return m.x * 1

    mesh = NamedSharding(mesh_of(), PartitionSpec())
    functions = {
        "jit": nnx.jit(f),
        "placed": nnx.jit(f, in_shardings=(mesh,)),
        "donating": nnx.jit(f, donate="written"),
        "filter_jit": nnx.filter_jit(f),
    }
    for name, jitted in functions.items():
        start, m = len(traces), Foo()
        jitted(m)
        jitted(m)
        assert len(traces) == start + 1
        jitted.clear_cache()
        assert jitted._cache_size() == 0
        jitted(m)
        assert len(traces) == start + 2, name


# Captured objects, failures, leaks ------------------------------------------------------------------


def test_captured_objects_can_be_read_and_are_constants():
    m = Foo()
    jitted = nnx.jit(lambda x: m.x * x + m.y)
    assert float(jitted(2.0)) == 4.0
    m.x.value = jnp.array(100.0)
    assert float(jitted(2.0)) == 4.0  # as a captured array would be


CAPTURED_WRITES = {
    "value": lambda m, x: setattr(m.x, "value", x),
    "index": lambda m, x: m.x.__setitem__(..., x),
    "attribute": lambda m, x: setattr(m, "z", x),
    "deletion": lambda m, x: delattr(m, "x"),
    "metadata": lambda m, x: m.x.set_metadata(a=1),
    "list": lambda m, x: m.layers.append(x),
    "nested jit": lambda m, x: nnx.jit(lambda m: setattr(m.x, "value", x))(m),
    "nested jit that adds": lambda m, x: nnx.jit(lambda m: setattr(m, "z", 1))(m),
    "nested grad": lambda m, x: nnx.grad(lambda m: (setattr(m.n, "value", x), m.x * 1.0)[1])(m),
    "update": lambda m, x: nnx.update(m, {"x": x}),
}


@pytest.mark.parametrize("how", CAPTURED_WRITES)
def test_captured_objects_are_protected_from_writes(how):
    m = Foo()
    m.layers = nnx.List([nnx.Param(1.0)])
    before = snapshot(m)

    def f(x):
        CAPTURED_WRITES[how](m, x)
        return x

    for _ in range(2):
        with refuses(
            nnx.TraceContextError, "different trace level: it belongs to eager", "argument"
        ):
            nnx.jit(f)(jnp.array(5.0))
    assert snapshot(m) == before


@pytest.mark.parametrize(
    "result",
    [lambda m, k: m, lambda m, k: {"v": m.x}, lambda m, k: setattr(k, "other", m)],
    ids=["module", "Variable", "stored"],
)
def test_captured_objects_do_not_leave(result):
    m, k = Foo(), Foo()
    before = snapshot(m, k)
    with refuses(
        ValueError,
        "Cannot extract graph node from different trace level",
        "returned or stored",
        "argument",
    ):
        nnx.jit(lambda k: result(m, k))(k)
    assert snapshot(m, k) == before


def test_an_object_kept_from_inside_is_protected_afterwards():
    kept = []
    m = Foo()

    @nnx.jit
    def f(m):
        kept.append(m)
        return m.x * 1

    f(m)
    with refuses(nnx.TraceContextError, "belongs to", "different trace level"):
        kept[0].x.value = jnp.array(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jnp.sin(kept[0].x.value)


def touch_everything(m):
    m.w.value = m.w * 2
    m.count.set_metadata(note=1)
    m.extra = nnx.Param(m.w * 1)
    m.layers.append(m.w)
    m.array = m.array + 1
    m.mode = "changed"
    del m.gone


def raises(error):
    raise error


FAILURES = {
    "an exception": (lambda m: raises(KeyError("inside")), KeyError),
    "a keyboard interrupt": (lambda m: raises(KeyboardInterrupt()), KeyboardInterrupt),
    "a result that is no array": (lambda m: "text", TypeError),
    "a shape error": (lambda m: m.w @ jnp.ones(7), TypeError),
    "a concrete value": (lambda m: float(m.w.sum()), jax.errors.ConcretizationTypeError),
    "a captured object": (lambda m: CAPTURED, ValueError),
    "an inner failure": (
        lambda m: nnx.jit(lambda m: (m.count.set_value(0.0), raises(KeyError()))[1])(m),
        KeyError,
    ),
}
CAPTURED = nnx.Param(1.0)


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("options", [{}, {"donate": "written"}, {"graph_updates": False}])
def test_L8_a_failed_call_leaves_everything_as_it_was(name, options):
    end, error = FAILURES[name]
    m = Counted()
    m.layers, m.array, m.mode, m.gone = nnx.List([]), jnp.ones(1), "new", nnx.Param(1.0)
    before, attributes = snapshot(m), dict(vars(m))

    def f(m):
        touch_everything(m)
        return end(m)

    jitted = nnx.jit(f, **options)
    for _ in range(2):
        with pytest.raises(error):
            jitted(m)
        assert snapshot(m) == before and vars(m) == attributes and len(m.layers) == 0
    assert not m.w.value.is_deleted() and "note" not in m.count.get_metadata()
    assert forward(m, 1.0).tolist() == [4.0, 8.0]


def test_L9_no_tracers_stay_and_nothing_is_kept_alive():
    @nnx.jit
    def f(m):
        m.new = nnx.Dict(v=nnx.Param(m.x * 1), array=m.x + 1)
        return nnx.Param(m.y * 1)

    m = Foo()
    with jax.checking_leaks():
        out = f(m)
    assert not any(isinstance(x, jax.core.Tracer) for x in [*jax.tree.leaves(m), out.value])
    refs = [weakref.ref(x) for x in (m, m.x, m.new, out)]
    f.lower(m)
    f.eval_shape(m)
    del m, out
    gc.collect()
    assert [r() for r in refs] == [None] * 4


def test_L9_a_function_is_not_kept_alive_by_its_wrapper_being_cached():
    def make():
        big = nnx.Param(jnp.ones(3))

        def f(x):
            return x * big.sum()

        jitted = nnx.jit(f)
        jitted(1.0)
        return weakref.ref(f), weakref.ref(big)

    refs = make()
    gc.collect()
    assert [r() for r in refs] == [None, None]


# Modes ----------------------------------------------------------------------------------------------


def test_graph_false_refuses_sharing_and_names_both_paths():
    m = Tied()
    before = snapshot(m)
    with refuses(ValueError, "Duplicate", "graph=False", "nnxlite.jit"):
        nnx.jit(call, graph=False)(m, 1.0)
    with refuses(ValueError, "Duplicate Foo", "'a', 'b.k'"):
        foo = Foo()
        nnx.jit(lambda a, b: None, graph=False)(foo, {"k": foo})
    assert snapshot(m) == before


def test_defaults_in_force_and_arguments_that_override_them():
    def grow(m):
        m.x.value = m.x + 1
        m.extra = 1

    jitted, explicit = nnx.jit(grow), nnx.jit(grow, graph_updates=True)
    m = Foo()
    with nnx.set_graph_updates(False):
        plain = nnx.jit(grow)
        plain(m)
        assert not hasattr(m, "extra") and float(m.x.value) == 2.0
        explicit(m)
        assert m.extra == 1 and float(m.x.value) == 3.0
        other = Foo()
        jitted(other)  # made before: it keeps the default of then
        assert other.extra == 1
    third = Foo()
    plain(third)
    assert not hasattr(third, "extra")
    tied = Tied()
    with nnx.set_graph_mode(False):
        trees = nnx.jit(call)
        forward(tied, 1.0)
        nnx.jit(call, graph=True)(tied, 1.0)
    with pytest.raises(ValueError, match="Duplicate"):
        trees(tied, 1.0)


def test_array_references_are_written_in_place():
    ref = jax.new_ref(jnp.zeros(2))
    m = nnx.Dict(v=nnx.Param(ref))

    @nnx.jit
    def f(m, x):
        m.v[...] = m.v[...] + x
        return m.v[...] * 2

    assert f(m, X).tolist() == [2.0, 4.0]
    assert m.v.get_raw_value() is ref and ref[...].tolist() == [1.0, 2.0]


# Messages -------------------------------------------------------------------------------------------


def two(x, y):
    return x


def keyword(x, *, k):
    return x


@pytest.mark.parametrize(
    "make, kind, texts",
    [
        (lambda: nnx.jit(3), TypeError, ["Expected a callable to transform, got int"]),
        (lambda: nnx.jit(two, donate="all"), ValueError, ["'written' or None, got 'all'"]),
        (
            lambda: nnx.jit(two, donate="written", donate_argnums=0),
            ValueError,
            ["either donate='written' or donate_argnums/donate_argnames"],
        ),
        (
            lambda: nnx.jit(two, static_argnums=0, donate_argnames="x"),
            ValueError,
            ["jit(two)", "either static or donated", "['x']"],
        ),
        (
            lambda: nnx.jit(two, static_argnums=(0, 2)),
            ValueError,
            ["static_argnums=(0, 2) is out of range", "two takes 2 positional"],
        ),
        (
            lambda: nnx.jit(two, donate_argnums=-3),
            ValueError,
            ["donate_argnums=-3 is out of range"],
        ),
        (
            lambda: nnx.jit(two, static_argnames="z"),
            ValueError,
            ["static_argnames='z'", "two has no argument 'z'", "['x', 'y']"],
        ),
        (
            lambda: nnx.jit(keyword, donate_argnames=["k", "q"]),
            ValueError,
            ["donate_argnames=['k', 'q']", "no argument 'q'", "['k', 'x']"],
        ),
        (
            lambda: nnx.jit(two).donation(1, 2),
            ValueError,
            ["jit(two) does not donate what it writes", "donate='written'"],
        ),
    ],
)
def test_options_that_make_no_sense(make, kind, texts):
    with refuses(kind, *texts):
        make()


@pytest.mark.parametrize(
    "value, texts",
    [
        ([1], ["unhashable", "'list'", "tuple"]),
        ((1, {"a": [2]}), ["unhashable", "'tuple'"]),
        (X, ["unhashable", "'ArrayImpl'", "traced"]),
        (np.ones(1), ["unhashable", "'ndarray'"]),
        (nnx.Param(1.0), ["holds a Param", "constants of the program", "traced"]),
        ((1, {"m": nnx.Dict()}), ["holds a tuple", "traced"]),
    ],
    ids=["list", "tuple", "array", "ndarray", "Variable", "object inside"],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_static_arguments_that_cannot_be(value, texts, by_name):
    jitted = nnx.jit(two, static_argnums=1)
    with refuses(ValueError, "Static argument 'y' of two", *texts):
        jitted(1, y=value) if by_name else jitted(1, value)


@pytest.mark.parametrize(
    "x, path, kind",
    [
        ("abc", "x", "str"),
        ({"k": [X, object()]}, "x.k.1", "object"),
        (nnx.Dict(a=nnx.List([nnx.Variable("abc")])), "x.a.0", "str"),
        (nnx.Variable({"k": "abc"}), "x", "str"),
        (lambda: 1, "x", "function"),
    ],
    ids=["argument", "inside", "Variable", "inside a Variable", "function"],
)
@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}, {"donate": "written"}])
def test_arguments_that_are_no_arrays(x, path, kind, options):
    remedy = "Use nnx.filter_jit" if "." in path else "static_argnums"
    with refuses(TypeError, f"jit(two): cannot interpret argument '{path}'", f"'{kind}'", remedy):
        nnx.jit(two, **options)(x, 1)
    if "." in path:
        nnx.filter_jit(two)(x, 1)


@pytest.mark.parametrize(
    "result, path, kind",
    [
        (lambda m: "text", "<root>", "str"),
        (lambda m: {"a": [m.x * 1, object()]}, "a.1", "object"),
        (lambda m: {"a": m, "b": (1, "text")}, "b.1", "str"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"donate": "written"}])
def test_results_that_are_no_arrays(result, path, kind, options):
    def broken(m):
        return result(m)

    with refuses(TypeError, " returned a value", f"of type '{kind}' at '{path}'", "static values"):
        nnx.jit(broken, **options)(Foo())


def test_other_type_errors_pass_through():
    with pytest.raises(TypeError, match="two.. takes 2 positional arguments but 3 were given"):
        nnx.jit(two)(1, 2, 3)
    with pytest.raises(TypeError, match="only this"):
        nnx.jit(lambda x: raises(TypeError("only this")))(1)


def test_a_variable_that_was_placed_and_is_now_on_another_mesh_is_written():
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2,), ("other",), axis_types=(jax.sharding.AxisType.Auto,))
    model = nnx.Dict(w=nnx.Param(jnp.arange(4.0), nnx_placement=spec("data")))
    model.w.value = jax.device_put(model.w.value, jax.NamedSharding(mesh, spec("other")))

    @nnx.jit
    def double(model):
        model.w[...] *= 2

    double(model)
    assert model.w.value.tolist() == [0, 2, 4, 6]


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


def test_objects_whose_call_is_transformed_are_callables():
    class Scale(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.arange(3.0))

        @nnx.jit
        def __call__(self, x):
            return self.w * x

    assert nnx.jit(Scale())(2.0).tolist() == [0, 2, 4]
    assert nnx.vmap(Scale())(jnp.ones(5)).shape == (5, 3)


def test_without_updates_a_captured_object_without_variables_is_returned_as_a_new_one():
    m = nnx.Dict(size=3, table=jnp.arange(2.0))
    out = nnx.jit(lambda x: m, graph_updates=False)(1.0)
    assert out is not m and out.size == 3 and out.table.tolist() == [0, 1]
    m.w = nnx.Param(jnp.ones(2))
    with pytest.raises(ValueError, match="from different trace level: the Dict at '<root>'"):
        nnx.jit(lambda x: m, graph_updates=False)(1.0)


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
