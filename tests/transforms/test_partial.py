"""jit_partial and cached_partial: first arguments given once."""

from __future__ import annotations

import functools
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.transforms.models import Counted, snapshot


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


def test_jit_partial_options_count_the_given_arguments_as_one():
    f = nnx.jit_partial(
        lambda m, y, k, x: m(x) * k + y if k > 1 else x, Counted(), 1, static_argnums=1
    )
    assert f(3, 1.0).tolist() == [13.0, 25.0]
    assert f.lower(3, 1.0).compile()(1.0).tolist() == [16.0, 31.0]
    f = nnx.jit_partial(lambda m, x, k: m(x) * k if k > 1 else x, Counted(), static_argnames="k")
    assert f(1.0, k=2).tolist() == [8.0, 16.0]
    m = Counted()
    w = m.w.value
    f = nnx.jit_partial(lambda m, x: m.w.set_value(m.w + x), m, donate_argnums=0)
    f(1.0)
    assert w.is_deleted() and m.w.value.tolist() == [2.0, 3.0]


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


def test_temporary_changes_are_possible():
    m = Counted()

    @nnx.jit
    def f(m, x):
        m.sow(nnx.Intermediate, "seen", x)
        m.flag = True
        del m.flag
        return nnx.pop(m, nnx.Intermediate)["seen"].value[0] + m(x)

    g = nnx.cached_partial(f, m)
    assert g(1.0).tolist() == [5.0, 9.0] and g(1.0).tolist() == [6.0, 11.0]


def test_a_structure_that_stays_changed_is_refused_before_anything_is_written():
    def f(m, x):
        m.count[...] = 99.0
        if x is not None:
            m.size = 3
        return m.count * 1.0

    m = Counted()
    g = nnx.cached_partial(nnx.jit(f), m)
    before = snapshot(m)
    for _ in range(2):
        with pytest.raises(ValueError, match="structure of a Counted was changed .*'size'"):
            g(1.0)
        assert snapshot(m) == before
    assert float(g(None)) == 99.0
    nnx.jit(f)(m, 1.0)  # outside cached_partial the same change is fine


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["plain", "jit"])
def test_containers_and_arrays_that_stay_as_they_are_are_no_change(wrap):
    def add(m, k):
        m.w[0][...] += k
        return m.raw * k

    model = nnx.Dict(w=[nnx.Param(jnp.array(1.0))], raw=jnp.ones(2))
    step = nnx.cached_partial(wrap(add), model)
    assert [step(k).tolist() for k in (1.0, 2.0)] == [[1, 1], [2, 2]]
    assert float(model.w[0].value) == 4


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


def test_attributes_of_the_function_give_way_to_those_of_the_wrapper():
    def f(x):
        return x + 1

    f.jitted_fn = f.fun = f._compiled = f.note = "text"
    for wrapped in (nnx.jit(f), nnx.jit(nnx.jit(f)), nnx.jit_partial(f, X)):
        assert wrapped.note == "text" and wrapped.fun != "text" != wrapped.jitted_fn
    assert nnx.jit(f)(1) == 2 and nnx.vmap(nnx.remat(nnx.jit(f)))(X).tolist() == (X + 1).tolist()


def test_only_what_a_partial_fixes_has_to_stay_as_it_is():
    fixed, other = nnx.Dict(w=nnx.Param(jnp.ones(1))), nnx.Dict(v=nnx.Param(jnp.ones(1)))

    @nnx.jit
    def tag(fixed, other):
        other.v.set_metadata(tag=1)
        other.new = nnx.Param(fixed.w[...] * 2)

    nnx.cached_partial(tag, fixed)(other)
    assert other.v.get_metadata("tag") == 1 and other.new[...].tolist() == [2.0]
