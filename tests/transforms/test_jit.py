"""jit: what it writes, keeps, shares, refuses and compiles ahead of time."""

from __future__ import annotations

import copy
import functools
import pickle

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


def test_numbers_count_from_the_first_argument_that_is_still_to_be_given():
    @functools.partial
    def scaled(m, by, times):
        return m(by * times)

    m = Stateful()
    bound = nnx.jit(functools.partial(scaled, m), static_argnums=1)
    assert float(bound(1.0, 2)) == 2.0 and float(m.n.value) == 2.0
    method = nnx.jit(m.__call__, static_argnums=0)
    assert float(method(1.0)) == 3.0 and float(method(by=1.0)) == 4.0


def named(m, x):
    return m(x)


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
    "nested jit": lambda m, x: nnx.jit(lambda m: setattr(m.x, "value", x))(m),
    "nested jit that adds": lambda m, x: nnx.jit(lambda m: setattr(m, "z", 1))(m),
    "nested grad": lambda m, x: nnx.grad(lambda m: (setattr(m.n, "value", x), m.x * 1.0)[1])(m),
}


@pytest.mark.parametrize("how", CAPTURED_WRITES)
def test_captured_objects_are_protected_from_nested_writes(how):
    m = Foo()
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


def raises(error):
    raise error


# Modes ----------------------------------------------------------------------------------------------


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
        (lambda: nnx.jit(two, donate="written", donate_argnums=0), ValueError,
         ["either donate='written' or donate_argnums/donate_argnames"]),
        (lambda: nnx.jit(two, static_argnums=0, donate_argnames="x"), ValueError,
         ["jit(two)", "either static or donated", "['x']"]),
        (lambda: nnx.jit(two, static_argnums=(0, 2)), ValueError,
         ["static_argnums=(0, 2) is out of range", "two takes 2 positional"]),
        (lambda: nnx.jit(two, donate_argnums=-3), ValueError,
         ["donate_argnums=-3 is out of range"]),
        (lambda: nnx.jit(two, static_argnames="z"), ValueError,
         ["static_argnames='z'", "two has no argument 'z'", "['x', 'y']"]),
        (lambda: nnx.jit(keyword, donate_argnames=["k", "q"]), ValueError,
         ["donate_argnames=['k', 'q']", "no argument 'q'", "['k', 'x']"]),
    ],
)  # fmt: skip
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
