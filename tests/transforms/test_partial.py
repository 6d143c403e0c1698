"""jit_partial and cached_partial: first arguments given once."""

from __future__ import annotations

import functools
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlite as nnx
from tests.transforms.models import Counted, snapshot


def call(m, x):
    return m(x)


def train_step(model, optimizer, x, y):
    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def training():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


X, Y = jnp.ones((10, 2)), jnp.ones((10, 3))


# jit_partial -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [{}, {"graph_updates": False}])
def test_jit_partial_writes_back(mode):
    m = Counted()
    f = nnx.jit_partial(call, m, **mode)
    assert f(1.0).tolist() == [4.0, 8.0] and f(x=2.0).tolist() == [10.0, 20.0]
    assert float(m.count.value) == 5.0
    m.count[...] = 0.0
    assert f(1.0).tolist() == [1.0, 2.0]
    assert f.partial_args == (m,) and f.fun is call and repr(f) == "jit_partial(call)"


def test_jit_partial_trains_like_jit_and_traces_once():
    traces = []

    def step(*args):
        traces.append(1)
        return train_step(*args)

    f = nnx.jit_partial(step, *training())
    g = nnx.jit(train_step)
    other = training()
    for _ in range(3):
        assert float(f(X, Y)) == float(g(*other, X, Y))
    assert len(traces) == 1
    f.clear_cache()
    f(X, Y)
    assert len(traces) == 2


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


# cached_partial ----------------------------------------------------------------------------------


def test_cached_partial_trains_the_original():
    model, optimizer = training()
    step = nnx.cached_partial(nnx.jit(train_step), model, optimizer)
    other = training()
    losses = [float(step(X, Y)) for _ in range(3)]
    assert losses == [float(nnx.jit(train_step)(*other, X, Y)) for _ in range(3)]
    assert int(optimizer.step.value) == 3
    assert jnp.array_equal(model.kernel.value, other[0].kernel.value)
    assert step.__wrapped__.fun is train_step and repr(step) == "cached_partial(train_step)"


def test_the_clones_hold_the_same_variables():
    m = Counted()
    f = nnx.cached_partial(nnx.jit(lambda m, x: m), m)
    out = f(1.0)
    assert out is not m and out.w is m.w
    m.w[...] = jnp.zeros(2)
    assert f(1.0).w.value.tolist() == [0.0, 0.0]


def test_sharing_among_cached_arguments_and_with_further_ones():
    m = Counted()

    @nnx.jit
    def f(a, b, c):
        assert a is b["m"] and a.w is c.w
        a.w[...] += 1
        return c.w * 1.0

    g = nnx.cached_partial(f, m, {"m": m})
    assert g(m).tolist() == [2.0, 3.0] and m.w.value.tolist() == [2.0, 3.0]


def test_other_arguments_may_be_anything():
    f = nnx.jit(lambda m, k, name, x: m(x) * k + len(name), static_argnums=(2,))
    g = nnx.cached_partial(f, Counted(), jnp.array(2.0), "ab")
    assert g(1.0).tolist() == [10.0, 18.0]
    assert nnx.cached_partial(nnx.grad(lambda m, x: m(x).sum()), Counted())(1.0)["w"].value.tolist()


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


def add_variable(m):
    m.new = nnx.Param(1.0)


def add_static(m):
    m.size = 3


def remove(m):
    del m.w


def relabel(m):
    m.w.set_metadata(tag="other")


@pytest.mark.parametrize(
    "change, name",
    [(add_variable, "'new'"), (add_static, "'size'"), (remove, "'w'"), (relabel, "'meta")],
)
def test_a_structure_that_stays_changed_is_refused_before_anything_is_written(change, name):
    m = Counted()

    def f(m, x):
        m.count[...] = 99.0
        if x is not None:
            change(m)
        return m.count * 1.0

    g = nnx.cached_partial(nnx.jit(f), m)
    before = snapshot(m)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"The graph structure of a \w+ was changed .*{name}"):
            g(1.0)
        assert snapshot(m) == before
    assert float(g(None)) == 99.0
    nnx.jit(f)(m, 1.0)  # outside cached_partial the same change is fine


def test_a_plain_function_is_checked_after_the_call():
    m = Counted()
    f = nnx.cached_partial(lambda m, grow: add_static(m) if grow else m(1.0), m)
    with pytest.raises(ValueError, match="The graph structure of a Counted was changed"):
        f(True)
    assert f(False).tolist() == [4.0, 8.0] and not hasattr(m, "size")


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["plain", "jit"])
def test_containers_and_arrays_that_stay_as_they_are_are_no_change(wrap):
    def add(m, k):
        m.w[0][...] += k
        return m.raw * k

    model = nnx.Dict(w=[nnx.Param(jnp.array(1.0))], raw=jnp.ones(2))
    step = nnx.cached_partial(wrap(add), model)
    assert [step(k).tolist() for k in (1.0, 2.0)] == [[1, 1], [2, 2]]
    assert float(model.w[0].value) == 4


def test_cached_partial_needs_updates():
    for mode in ({"graph": False}, {"graph_updates": False}):
        with pytest.raises(ValueError, match="cached_partial is a graph-mode-only API"):
            nnx.cached_partial(nnx.jit(call), Counted(), **mode)


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


# What compiled functions carry -------------------------------------------------------------------


def test_a_compiled_partial_with_graph_updates_writes_back():
    m = Counted()
    compiled = nnx.jit_partial(call, m).lower(X[0]).compile()
    assert compiled(X[0]).tolist() == [4.0, 8.0] and compiled(X[0]).tolist() == [5.0, 10.0]
    assert float(m.count.value) == 5.0
    with pytest.raises(
        TypeError, match=r"jit_partial\(call\) was compiled for arguments of another"
    ):
        compiled(m, X[0])
    again = pickle.loads(pickle.dumps(nnx.jit_partial(call, m)))
    assert again(X[0]).tolist() == [6.0, 12.0] and float(m.count.value) == 5.0


def test_jitted_fn_is_the_jax_function_and_travels_with_what_wraps_it():
    m = Counted()
    jitted = nnx.jit(lambda m, x: m(x))
    assert isinstance(jitted.jitted_fn, type(jax.jit(call)))
    jitted(m, 1.0), jitted(m, X[0])
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


def test_shared_arguments_are_refused_when_the_partial_is_made():
    model = nnx.Dict(w=nnx.Param(1.0))
    expected = r"Duplicate Param found at paths: '0\.w', '1'.*graph=False"
    with pytest.raises(ValueError, match=expected):
        nnx.jit_partial(lambda pair: pair[0].w, [model, model.w], graph=False)
    assert nnx.jit_partial(lambda pair: pair[0].w * 2, [model, model.w])() == 2.0


def test_only_what_a_partial_fixes_has_to_stay_as_it_is():
    fixed, other = nnx.Dict(w=nnx.Param(jnp.ones(1))), nnx.Dict(v=nnx.Param(jnp.ones(1)))

    @nnx.jit
    def tag(fixed, other):
        other.v.set_metadata(tag=1)
        other.new = nnx.Param(fixed.w[...] * 2)

    nnx.cached_partial(tag, fixed)(other)
    assert other.v.get_metadata("tag") == 1 and other.new[...].tolist() == [2.0]
