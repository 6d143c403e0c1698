"""Eager loops and branches: equal content is compiled once, whatever differs is another program."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.transforms import _control
from tests.transforms import models
from tests.transforms.models import compilations

X = jnp.arange(1.0, 5.0)


EACH = {
    "cond": lambda f, x: nnx.cond(True, f, f, x),
    "switch": lambda f, x: nnx.switch(0, [f], x),
    "while_loop": lambda f, x: nnx.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1]).astype(x.dtype)), (0, x)
    )[1],
    "fori_loop": lambda f, x: nnx.fori_loop(0, 1, lambda i, x: f(x).astype(x.dtype), x),
    "scan": lambda f, x: nnx.scan(f, in_axes=0, out_axes=0)(x[None])[0],
    "remat": lambda f, x: nnx.remat(f)(x),
}
each = pytest.mark.parametrize("run", EACH.values(), ids=EACH)


@each
def test_a_new_function_of_equal_content_compiles_nothing(run):
    def make(captured):
        return lambda x: nnx.relu(jnp.sin(x) * captured + 2)

    run(make(X + 1), X)
    other = X + 2
    expected = nnx.relu(jnp.sin(X) * other + 2)
    with compilations(0):
        out = [run(make(other), X) for _ in range(3)]
    np.testing.assert_allclose(out, jnp.stack([expected] * 3), rtol=1e-6)


def times(constant):
    return lambda x: jax.jit(lambda x: (x * constant)[..., :4].reshape(-1, 4)[0])(x)


PAIRS = {
    "a number": (lambda x: x * 2, lambda x: x * 3),
    "the sign of zero": (lambda x: 1 / (x * 0.0), lambda x: 1 / (x * -0.0)),
    "the type of a number": (lambda x: jnp.full_like(x, 1, int), lambda x: jnp.full_like(x, 1)),
    "a boolean": (lambda x: x + jnp.argsort(x), lambda x: x + jnp.argsort(x, descending=True)),
    "an axis": (lambda x: jnp.cumsum(x.reshape(2, 2), 0).ravel(),
        lambda x: jnp.cumsum(x.reshape(2, 2), 1).ravel()),
    "an order": (lambda x: (x + 1) * 2, lambda x: (x * 2) + 1),
    "which operand": (lambda x: x - x * 2, lambda x: x * 2 - x),
    "an inner loop": (lambda x: jax.lax.fori_loop(0, 2, lambda i, x: x * 2, x),
        lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * 2, x)),
    "an inner branch": (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.lax.cond(x[0] > 0, jnp.cos, jnp.sin, x)),
    "an inner jitted function": (lambda x: jax.jit(lambda x: x * 2)(x),
        lambda x: jax.jit(lambda x: x * 3)(x)),
    "a constant of an inner jitted function": (times(np.float32([2])), times(np.float32([3]))),
    "a large constant of an inner jitted function": (times(np.full((400, 4), 2, np.float32)),
        times(np.full((400, 4), 3, np.float32))),
    "a callback": (lambda x: jax.pure_callback(lambda x: x * np.float32(2), x, x),
        lambda x: jax.pure_callback(lambda x: x * np.float32(3), x, x)),
}  # fmt: skip


@pytest.mark.parametrize(
    "how, name",
    [(e, p) for i, e in enumerate(EACH) for j, p in enumerate(PAIRS) if not (i + j) % 3],
)
def test_whatever_differs_is_another_program(how, name):
    run, pair = EACH[how], PAIRS[name]
    for f in (*pair, *pair):
        expected = f(X).astype(X.dtype)
        np.testing.assert_allclose(run(f, X).astype(X.dtype), expected, rtol=1e-6)


@each
def test_rules_of_derivatives_do_not_count_and_are_not_cached(run):
    def make(factor):
        captured = jnp.full(4, factor)
        f = jax.custom_vjp(lambda x: jnp.tanh(x))
        f.defvjp(lambda x: (f(x), None), lambda _, g: (g * captured,))
        return (lambda x: f(x)), weakref.ref(f), weakref.ref(captured)

    f, *refs = make(2.0)
    expected = run(f, X)
    other, *_ = make(3.0)
    with compilations(0):
        np.testing.assert_allclose(run(other, X), expected)
    del f
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    if run is not EACH["while_loop"]:
        functions = make(2.0)[0], make(3.0)[0]
        slopes = [nnx.grad(lambda x, f=f: run(f, x).sum())(X).tolist() for f in functions]
        assert slopes == [[2.0] * 4, [3.0] * 4]


@each
def test_nothing_that_a_body_captured_stays(run):
    class Held:
        scale = 2.0

    refs = []
    for i in range(3):
        array, held = jnp.full(4, float(i)), Held()
        refs += [weakref.ref(array), weakref.ref(held)]
        run(lambda x, array=array, held=held: x * array * held.scale, X)
        run(lambda x, array=array: jax.checkpoint(lambda x: x * array)(x), X)
        nnx.grad(lambda x, array=array: nnx.remat(lambda x: x * array)(x).sum())(X)
        del array, held
    gc.collect()
    assert [ref() for ref in refs] == [None] * 6


SETTINGS = {
    "jax_default_prng_impl": ("rbg", lambda: jax.random.key_data(jax.random.key(0)).shape[0]),
    "jax_default_matmul_precision": ("float32", lambda: 0),
    "jax_enable_x64": (True, lambda: jnp.arange(2).dtype.itemsize),
    "jax_threefry_partitionable": (False, lambda: jax.random.bits(jax.random.key(1))),
}


@pytest.mark.parametrize(("how", "name"), [*zip(itertools.cycle(EACH), [*SETTINGS] * 2)])
def test_settings_of_jax_are_part_of_the_program(how, name):
    run, (value, read) = EACH[how], SETTINGS[name]
    old = getattr(jax.config, name)
    values = []
    for setting in (old, value, old, value):
        jax.config.update(name, setting)
        try:
            expected = float(np.float32(read()))
            values.append(expected)
            assert run(lambda x: x * 0 + read(), X).tolist() == [expected] * 4
        finally:
            jax.config.update(name, old)
    assert values[:2] == values[2:]


def test_a_callback_runs_in_each_call_and_is_that_of_the_call():
    seen = []

    def run(name):
        def body(x):
            jax.debug.callback(lambda x: seen.append((name, float(x))), x)
            return x

        nnx.scan(body, in_axes=0, out_axes=0)(X[:2])
        jax.effects_barrier()

    run("one"), run("two")
    assert sorted(seen) == [("one", 1.0), ("one", 2.0), ("two", 1.0), ("two", 2.0)]


def test_programs_are_bounded(monkeypatch):
    monkeypatch.setattr(_control._programs, "most", 2)
    _control._programs.clear()
    for i in range(4):
        nnx.switch(0, [lambda x, i=i: x * (i + 2)], X)
    assert len(_control._programs) == 2
    with compilations(0):
        nnx.switch(0, [lambda x: x * 5], X)


def test_threads_that_run_and_drop_programs(monkeypatch):
    monkeypatch.setattr(_control._programs, "most", 2)
    failures = []

    def work(n):
        for i in range(12):
            k = (n + i) % 4
            if nnx.switch(0, [lambda x: x * k], X).tolist() != (X * k).tolist():  # noqa: B023
                failures.append((n, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(_control._programs) <= 2 + len(threads)


def test_without_jit_a_body_runs_op_by_op():
    with jax.disable_jit():
        assert nnx.scan(lambda c, x: (c + x, c))(0.0, X)[1].tolist() == [0.0, 1.0, 3.0, 6.0]
        assert nnx.cond(X[0] > 0, lambda x: x + 1, lambda x: x, X).tolist() == [2.0, 3.0, 4.0, 5.0]


# What a function depends on besides its arguments -------------------------------------------------

ONE = jnp.float32(1.0)


def library_function(patch):
    real = jnp.negative
    change = lambda: patch.setattr(jnp, "negative", lambda x: 1.5 * real(x))
    return (lambda x: -2 * jnp.negative(x)), change


def captured_variable(patch):
    v = nnx.Param(jnp.float32(2))
    return (lambda x: x * v.value), lambda: v.set_value(jnp.float32(3))


def list_of_a_captured_object(patch):
    m = nnx.Dict()
    m.factors = [2.0]
    return (lambda x: m.factors[0] * x), lambda: m.factors.__setitem__(0, 3.0)


def replaced_method(patch):
    class Scale:
        def __call__(self, x):
            return x * 2.0

    return (lambda x: Scale()(x)), lambda: setattr(Scale, "__call__", lambda self, x: x * 3.0)


def with_rule(f):
    g = nnx.custom_vjp(lambda x: f(x), graph_updates=False)
    g.defvjp(lambda x: (f(x), None), lambda _, g: (f(g),))
    return nnx.grad(g)


WRAPPED = {
    **{name: models.EACH[name] for name in ("vmap", "scan", "switch", "shard_map", "filter_vmap")},
    "cond_fun": lambda f: lambda x: nnx.while_loop(lambda c: c < f(ONE), lambda c: c + 1.0, x),
    "rule of custom_vjp": with_rule,
    "cond under grad": lambda f: nnx.grad(lambda x: nnx.cond(True, f, f, x)),
}
WAYS = [library_function, captured_variable, list_of_a_captured_object, replaced_method]


@pytest.mark.parametrize(
    ("way", "name"), [(WAYS[(i + j) % 4], name) for i, name in enumerate(WRAPPED) for j in (0, 1)]
)
def test_the_next_call_sees_what_has_changed(way, name, monkeypatch):
    """What JAX itself promises to trace once (`jit`, `pmap`, and their kin) need not."""
    f, change = way(monkeypatch)
    cached = WRAPPED[name](f)
    assert [float(cached(ONE)), float(WRAPPED[name](f)(ONE))] == [2.0, 2.0]
    change()
    assert [float(cached(ONE)), float(WRAPPED[name](f)(ONE))] == [3.0, 3.0]
