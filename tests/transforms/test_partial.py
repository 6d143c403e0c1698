"""jit_partial and cached_partial: first arguments given once."""

import functools
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.transforms.models import Counted


def call(m, x):
    return m(x)


X = jnp.ones(2)


@pytest.mark.parametrize("mode", [{}, {"graph_updates": False}])
def test_jit_partial_writes_back_and_traces_once(mode):
    def step(m, x):
        traces.append(1)
        return m(x)

    traces, m = [], Counted()
    f = nnx.jit_partial(step, m, **mode)
    assert f(1.0).tolist() == [4.0, 8.0] and f(x=2.0).tolist() == [10.0, 20.0]
    assert float(m.count.value) == 5.0
    m.count[...] = 0.0
    traces.clear()
    assert f(1.0).tolist() == [1.0, 2.0] and not traces
    f.clear_cache()
    f(1.0)
    assert len(traces) == 1 and f.partial_args == (m,) and f.fun is step


def test_the_arguments_that_jit_partial_is_given_count_as_one():
    fun = lambda m, y, k, x: m(x) * k + y if k > 1 else x
    assert nnx.jit_partial(fun, Counted(), 1, static_argnums=1)(3, 1.0).tolist() == [13.0, 25.0]


def test_the_clones_hold_the_same_variables_and_share_with_further_arguments():
    @nnx.jit(static_argnums=3)
    def f(a, b, c, name, x):
        assert a is b["m"] and a.w is c.w
        a.w[...] += 1
        return a, c.w * x

    m = Counted()
    g = nnx.cached_partial(f, m, {"m": m})
    assert g.__wrapped__.fun is f.fun and repr(g).startswith("cached_partial(")
    out, y = g(m, "name", 1.0)
    assert out is not m and out.w is m.w
    assert y.tolist() == m.w.value.tolist() == [2.0, 3.0]
    m.w[...] = jnp.zeros(2)
    assert g(m, "name", 1.0)[0].w.value.tolist() == [1.0, 1.0]


def test_nothing_else_keeps_the_objects_alive():
    m = Counted()
    f = nnx.cached_partial(nnx.jit(call), m)
    f(1.0)
    seen = weakref.ref(m), weakref.ref(m.w)
    del m
    gc.collect()
    assert seen[0]() is None and seen[1]() is not None
    del f
    gc.collect()
    assert seen[1]() is None


def test_a_compiled_partial_with_graph_updates_writes_back():
    m = Counted()
    compiled = nnx.jit_partial(call, m).lower(1.0).compile()
    assert compiled(1.0).tolist() == [4.0, 8.0] and compiled(1.0).tolist() == [5.0, 10.0]
    assert float(m.count.value) == 5.0
    with pytest.raises(
        TypeError, match=r"jit_partial\(call\) was compiled for arguments of another"
    ):
        compiled(m, 1.0)
    again = pickle.loads(pickle.dumps(nnx.jit_partial(call, m)))
    assert again(1.0).tolist() == [6.0, 12.0] and float(m.count.value) == 5.0


def test_jitted_fn_is_the_jax_function_and_travels_with_what_wraps_it():
    m = Counted()
    jitted = nnx.jit(lambda m, x: m(x))
    assert isinstance(jitted.jitted_fn, type(jax.jit(call)))
    jitted(m, 1.0), jitted(m, X)
    decorated = functools.wraps(jitted)(lambda *args: jitted(*args))
    partial = nnx.cached_partial(jitted, m)
    for carrying in (jitted, decorated, partial, functools.wraps(partial)(lambda x: partial(x))):
        assert carrying.jitted_fn._cache_size() == 2
    again = nnx.jit(nnx.vmap(jitted, in_axes=(None, 0)))
    assert again.jitted_fn is not jitted.jitted_fn and again.jitted_fn._cache_size() == 0
    jitted.jitted_fn.clear_cache()
    assert jitted.jitted_fn._cache_size() == jitted._cache_size() == 0


def test_only_what_a_partial_fixes_has_to_stay_as_it_is():
    fixed, other = nnx.Dict(w=nnx.Param(jnp.ones(1))), nnx.Dict(v=nnx.Param(jnp.ones(1)))

    @nnx.jit
    def tag(fixed, other):
        other.v.set_metadata(tag=1)
        other.new = nnx.Param(fixed.w[...] * 2)

    nnx.cached_partial(tag, fixed)(other)
    assert other.v.get_metadata("tag") == 1 and other.new[...].tolist() == [2.0]
