"""Jitted functions ahead of time: lower, trace, compile, and what a compiled function takes."""

from __future__ import annotations

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.transforms.models import Counted, Foo, refuses, snapshot

X = jnp.array([1.0, 2.0])


def call(m, x):
    return m(x)


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
