"""filter_jit: what is traced, what is static, when it compiles, what it costs the caller's objects."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


def test_arrays_are_traced_and_the_rest_is_static():
    inner, traces = counted(lambda x, y: (x + y, "text", len))
    f = nnx.filter_jit(inner)
    assert f(jnp.array(1), jnp.array(2))[0] == 3
    assert f(jnp.array(1), jnp.array(5))[0] == 6 and len(traces) == 1
    assert f(jnp.array(1), 2)[0] == 3 and len(traces) == 2
    assert f(jnp.array(3), 2)[0] == 5 and len(traces) == 2
    assert f(jnp.array(3), 3)[0] == 6 and len(traces) == 3
    assert f(1, 2) == (3, "text", len) and len(traces) == 4
    assert f(np.ones(2), 1)[0].tolist() == [2, 2]


def test_functions_are_static_leaves_that_are_equal_to_themselves_only():
    inner, traces = counted(lambda f, x: f(x))
    apply = nnx.filter_jit(inner)
    make = lambda n: lambda x: x + n
    one = make(1)
    assert apply(one, jnp.array(1)) == 2
    assert apply(one, jnp.array(2)) == 3 and len(traces) == 1
    assert apply(make(1), jnp.array(2)) == 3 and len(traces) == 2
    assert apply(make(2), jnp.array(2)) == 4 and len(traces) == 3
    for _ in range(2):  # except those of libraries that never edit what they capture
        assert apply(optax.constant_schedule(0.5), jnp.array(2)) == 0.5 and len(traces) == 4


def test_objects_are_written_and_share_as_in_jit():
    inner, traces = counted(lambda m, x: (setattr(m, "steps", m.steps + 1), m(x))[1])
    step = nnx.filter_jit(inner)
    model, x = Tied(), jnp.ones((1, 3))
    expected = model(x)
    np.testing.assert_allclose(step(model, x), expected, rtol=1e-6)
    assert model.steps.tolist() == [1, 2] and model.first is model.second
    step(model, x)
    step(Tied(1), x)
    assert len(traces) == 1
    assert model.steps.tolist() == [2, 3]


def test_a_callable_pytree_is_an_argument():
    partial = jax.tree_util.Partial(lambda a, b: a + b, jnp.array(1))
    assert nnx.filter_jit(partial)(jnp.array(2)) == 3


def test_ahead_of_time():
    f = nnx.filter_jit(lambda x, n: x * n)
    compiled = f.lower(jnp.array(2.0), 3).compile()
    assert compiled(jnp.array(3.0), 3) == 9
    assert "multiply" in f.lower(jnp.array(2.0), 3).as_text()
    other = "filter_jit.* was compiled for arguments of another structure"
    with pytest.raises(TypeError, match=f"{other}: n: 3 -> 4. Lower"):
        compiled(jnp.array(3.0), 4)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    compiled = nnx.filter_jit(lambda model, x: model(x)).lower(model, jnp.ones((1, 2))).compile()
    model.extra = nnx.Param(jnp.ones(2))
    with pytest.raises(TypeError, match=f"{other}: model.extra: nothing became Param"):
        compiled(model, jnp.ones((1, 2)))


def test_ahead_of_time_a_buffer_that_is_not_reused_is_warned_of_if_wanted():
    x, total = jnp.ones((1, 3)), lambda x: x.sum()
    compiled = nnx.filter_jit(total, donate="all").lower(x).compile()  # warnings are errors here
    with pytest.warns(UserWarning, match="Some donated buffers were not usable"):
        nnx.filter_jit(total, donate="warn").lower(x)
    assert compiled(x) == 3
    with pytest.raises(TypeError, match=r"(?s)filter_jit\(.*>\): .*'.*' compiled with"):
        compiled(jnp.ones((1, 4)))


def test_frozen_modules_with_static_leaves_compile_once():
    class Layer(nnx.Module, frozen=True):
        weight: jax.Array
        activation: object = jax.nn.relu

        def __call__(self, x):
            return self.activation(self.weight * x)

    inner, traces = counted(lambda layer, x: (layer, layer(x)))
    f = nnx.filter_jit(inner)
    layer = Layer(jnp.array(2.0))
    same, y = f(layer, 3.0)
    assert y == 6 and same is layer
    f(Layer(jnp.array(5.0)), 3.0)
    assert len(traces) == 1
    f(Layer(jnp.array(5.0), jnp.tanh), 3.0)
    assert len(traces) == 2
    new = nnx.filter_jit(lambda w: Layer(w, jnp.tanh))(jnp.array(1.0))
    assert new.activation is jnp.tanh and new.weight == 1


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: nnx.filter_jit(lambda x: x)({"a": [bytearray()]}), ValueError,
         "leaf at 'x.a.0' of the"),
        (lambda: nnx.filter_jit(lambda x: x, static_argnums=0), ValueError, "no static_argnums="),
        (lambda: nnx.filter_jit(lambda x: x, out=True), ValueError, "no out=: arrays are traced"),
        (lambda: nnx.filter_jit(3), TypeError, "Expected a callable to transform, got int"),
    ],
)  # fmt: skip
def test_messages(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


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


@pytest.mark.parametrize("donate", ["some", 0, ["x"], True])
def test_what_cannot_be_donated(donate):
    with pytest.raises(ValueError, match="it must be one of .'all', 'all-except-first', 'warn'"):
        nnx.filter_jit(lambda x, y: x + y, donate=donate)


def test_a_numpy_array_in_two_places_is_donated_in_both():
    """JAX copies it, so no buffer is shared."""
    x = np.ones(2, np.float32)
    add = nnx.filter_jit(lambda x, y: x + y, donate="all")
    assert add(x, x).tolist() == [2, 2]
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
    axes = lambda: {"x": {"a": 0, "b": None}}
    same = [
        (nnx.filter_grad(f), nnx.filter_grad(f)),
        (nnx.filter_vmap(f, in_axes=axes()), nnx.filter_vmap(f, in_axes=axes())),
        (nnx.filter_jit(nnx.filter_grad(f)), nnx.filter_jit(nnx.filter_grad(f))),
    ]
    for one, other in same:
        assert one == other and hash(one) == hash(other)
    different = [
        nnx.filter_grad(f),
        nnx.filter_grad(g),
        nnx.filter_grad(f, has_aux=True),
        nnx.filter_value_and_grad(f),
        nnx.filter_vmap(f),
        nnx.filter_pmap(f),
        nnx.filter_vmap(f, in_axes=1),
        nnx.filter_jit(nnx.filter_vmap(f)),
        f,
    ]
    assert len(set(different)) == len(different)


def test_other_options_of_a_captured_wrapper_are_seen():
    twice = lambda x: 2 * x
    inner = nnx.filter_vmap(twice, out_axes=0)
    run = lambda: nnx.cond(True, lambda x: inner(x), lambda x: inner(x), jnp.ones((2, 3))).shape
    assert run() == (2, 3)
    inner = nnx.filter_vmap(twice, out_axes=1)
    assert run() == (3, 2)
    h = nnx.grad(lambda a, b: a * b, argnums=0)
    scanned = nnx.scan(lambda c, x: (c, h(x, 2.0)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    assert scanned(0.0, jnp.ones(1) * 3)[1].tolist() == [2]
    h = nnx.grad(lambda a, b: a * b, argnums=1)
    assert scanned(0.0, jnp.ones(1) * 3)[1].tolist() == [3]


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


def test_compiler_options():
    lowered = nnx.filter_jit(lambda x, n: x * n).lower(jnp.ones(2), 2)
    compiled = lowered.compile(compiler_options={"xla_cpu_enable_fast_math": True})
    assert compiled(jnp.ones(2), 2).tolist() == [2, 2]
    assert lowered.lowered.as_text() == lowered.as_text()
    assert compiled.compiled.cost_analysis() == compiled.cost_analysis()


def test_a_bound_method_has_no_private_attribute_of_its_function():
    class Layer(nnx.Module):
        @nnx.filter_jit
        def go(self, x):
            return x

    with pytest.raises(AttributeError, match="^_compiled$"):
        Layer().go._compiled
