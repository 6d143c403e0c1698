"""filter_jit, filter_vmap and filter_pmap: what is traced, static, mapped and compiled."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.filtered.models import Tied


def counted(fun):
    """The function, and a list that grows with each trace."""
    traces = []

    @functools.wraps(fun)
    def inner(*args, **kwargs):
        traces.append(None)
        return fun(*args, **kwargs)

    return inner, traces


def test_ahead_of_time_a_buffer_that_is_not_reused_is_warned_of_if_wanted():
    x, total = jnp.ones((1, 3)), lambda x: x.sum()
    compiled = nnx.filter_jit(total, donate="all").lower(x).compile()  # warnings are errors here
    with pytest.warns(UserWarning, match="Some donated buffers were not usable"):
        nnx.filter_jit(total, donate="warn").lower(x)
    assert compiled(x) == 3


def test_frozen_modules_with_static_leaves_compile_once():
    class Layer(nnx.Module, frozen=True):
        weight: jax.Array
        activation: object = jax.nn.relu

    inner, traces = counted(lambda layer, x: (layer, layer.activation(layer.weight * x)))
    f, layer = nnx.filter_jit(inner), Layer(jnp.array(2.0))
    same, y = f(layer, 3.0)
    assert y == 6 and same is layer
    f(Layer(jnp.array(5.0)), 3.0)
    assert len(traces) == 1
    f(Layer(jnp.array(5.0), jnp.tanh), 3.0)
    assert len(traces) == 2


class Net(nnx.Module):
    """Shared Variables, a cycle, and a count."""

    def __init__(self):
        self.a = nnx.Param(jnp.ones(3))
        self.b = self.a
        self.n = nnx.BatchStat(jnp.zeros(()))
        self.up = nnx.List([self])

    def __call__(self, x):
        assert self.up[0] is self and self.a is self.b
        self.n[...] += 1
        return (self.a * self.b * x).sum()


@pytest.mark.parametrize("donate", ["all", "all-except-first", "warn", "warn-except-first"])
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_donation_on_objects_with_shared_variables(donate):
    model, x = Net(), jnp.ones(3)
    before = model.n.get_raw_value()
    inner, traces = counted(lambda m, x: m(x))
    step = nnx.filter_jit(inner, donate=donate)
    assert step(model, x) == 3
    assert before.is_deleted() is not donate.endswith("except-first")
    assert step(model, jnp.ones(3)) == 3 and len(traces) == 1
    assert model.a is model.b and model.a[...].tolist() == [1, 1, 1] and model.n[...] == 2


def test_a_numpy_array_in_two_places_is_donated_in_both():
    """JAX copies it, so no buffer is shared."""
    x = np.ones(2, np.float32)
    assert nnx.filter_jit(lambda x, y: x + y, donate="all")(x, x).tolist() == [2, 2]
    assert x.tolist() == [1, 1]


WRAPPERS = {
    "filter_grad": nnx.filter_grad,
    "filter_value_and_grad": lambda f: nnx.filter_value_and_grad(f, has_aux=False),
    "a spec without a hash": lambda f: nnx.filter_grad(f, arg={"a": True, "b": False}),
    "filter_hessian": nnx.filter_hessian,
    "filter_jacrev": nnx.filter_jacrev,
    "filter_checkpoint": nnx.filter_checkpoint,
    "filter_vmap": lambda f: nnx.filter_vmap(f, in_axes={"x": 0}),
    "both": lambda f: nnx.filter_vmap(nnx.filter_checkpoint(f)),
}


@pytest.mark.parametrize("jit", [nnx.filter_jit, nnx.jit])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_transform_wrapped_anew_compiles_once(jit, name):
    f, traces = counted(lambda x: sum(v.sum() for v in x.values()))
    for _ in range(3):
        before = len(traces)
        jit(WRAPPERS[name](f))({"a": jnp.ones(2), "b": jnp.ones(2)})
        gc.collect()
    assert before and len(traces) == before
    alive = weakref.ref(f)
    del f
    gc.collect()
    assert alive() is None


def test_wrappers_are_equal_by_function_and_options():
    f, g = (lambda x: x), (lambda x: x)
    wrapped = lambda: [
        f,
        nnx.filter_grad(f),
        nnx.filter_grad(g),
        nnx.filter_grad(f, has_aux=True),
        nnx.filter_value_and_grad(f),
        nnx.filter_vmap(f),
        nnx.filter_pmap(f),
        nnx.filter_vmap(f, in_axes={"x": {"a": 0, "b": None}}),
        nnx.filter_jit(nnx.filter_vmap(f)),
    ]
    assert wrapped() == wrapped() and [*map(hash, wrapped())] == [*map(hash, wrapped())]
    assert len(set(wrapped())) == len(wrapped()) and nnx.filter_vmap(f) != 3


@pytest.mark.parametrize(
    "wrap", [nnx.filter_vmap, nnx.filter_checkpoint, lambda f: nnx.filter_vmap(nnx.filter_jit(f))]
)
@pytest.mark.parametrize("jit", [nnx.filter_jit, nnx.jit])
def test_a_module_inside_of_wrappers_is_an_argument(jit, wrap):
    model = Tied()
    call = jit(wrap(model))
    x = jnp.ones((2, 3))
    before = call(x)
    model.scale = 2 * model.scale
    np.testing.assert_allclose(call(x), 2 * before, rtol=1e-6)
    method = jit(wrap(functools.partial(Tied.__call__, model)))
    np.testing.assert_allclose(method(x), 2 * before, rtol=1e-6)


def test_the_stages_have_those_of_jax():
    lowered = nnx.filter_jit(lambda x, n: x * n).lower(jnp.ones(2), 2)
    compiled = lowered.compile(compiler_options={"xla_cpu_enable_fast_math": True})
    assert lowered.lowered.as_text() == lowered.as_text()
    assert compiled.compiled.cost_analysis() == compiled.cost_analysis()


# filter_vmap and filter_pmap ----------------------------------------------------------------------


def write(model, x):
    model.n[...] = x


def test_pmap_with_a_size_alone_and_ahead_of_time():
    ones = nnx.filter_pmap(lambda name: (jnp.ones(2), name), axis_size=4)("n")
    assert ones[0].shape == (4, 2) and ones[1] == "n"
    model = nnx.Dict(n=nnx.Param(jnp.zeros(2)))
    lowered = nnx.filter_pmap(lambda m, x, k: write(m, k * x)).lower(model, jnp.arange(2.0), 2)
    assert "module" in lowered.as_text() and model.n.value.tolist() == [0, 0]
    lowered.compile()(model, jnp.arange(2.0), 2)
    assert model.n.value.tolist() == [0, 2]


def test_pmap_keeps_programs_by_function_and_nothing_else_alive():
    traces = []

    def f(m, x):
        traces.append(None)
        return m.n * x

    models = [nnx.Dict(n=nnx.Param(jnp.ones(2))) for _ in range(3)]
    for model in models:
        assert nnx.filter_pmap(f)(model, jnp.arange(2.0)).tolist() == [0, 1]
        assert nnx.filter_pmap(f, in_axes={"x": 0})(model, jnp.arange(2.0)).tolist() == [0, 1]
    assert len(traces) == 2
    alive = [weakref.ref(m) for m in models]
    del models, model
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    alive = weakref.ref(f)
    del f
    gc.collect()
    assert alive() is None


def test_an_argument_may_be_returned_and_gets_what_is_new_along_its_axes():
    def add(m, x):
        m.new = nnx.Param(x)
        return m

    for model in (nnx.Dict(), nnx.Dict(a=jnp.ones(2), w=nnx.Param(jnp.ones(2)))):
        assert nnx.filter_vmap(add)(model, jnp.arange(2.0)) is model
        assert model.new.value.tolist() == [0, 1]

    model = nnx.Dict(w=nnx.Param(jnp.ones(2)), mean=nnx.BatchStat(jnp.zeros(3)))
    only_params = nnx.filter_vmap(add, in_axes=(nnx.Param, 0), out_axes=nnx.Param)
    assert only_params(model, jnp.arange(2.0)) is model
    assert (model.new.shape, model.mean.shape) == ((2,), (3,))


def test_filters_choose_the_axes_of_a_result():
    def make(x):
        return nnx.Dict(w=nnx.Param(x), mean=nnx.BatchStat(jnp.zeros(3)))

    made = nnx.filter_vmap(make, out_axes=nnx.Param)(jnp.arange(2.0))
    assert made.w.value.tolist() == [0, 1] and made.mean.shape == (3,)
