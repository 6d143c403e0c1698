"""Law L6: what is equal is traced and compiled once; what differs, once more.

The functions count their own runs: `TRACES.append` is no change of what a function sees.
"""

import contextlib
import functools
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
from tests.transforms.models import EACH, Counted, compilations, jax_events

TRACES: list[str] = []
X = jnp.arange(1.0, 5.0)


@contextlib.contextmanager
def traces(expected):
    """Within the block the functions of this page run as often as told."""
    start = len(TRACES)
    yield
    assert TRACES[start:] == ["trace"] * expected


def call(m):
    TRACES.append("trace")
    return m(1.0).sum()


EAGER = ["cond", "switch", "while_loop", "fori_loop", "scan", "remat"]


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("again", [False, True], ids=["one function", "made in each step"])
def test_an_eager_transform_in_a_python_loop_compiles_once(name, again):
    def run(m):
        return EACH[name]((lambda m: call(m)) if again else call)(m)

    m = Counted()
    m.sow(nnx.Intermediate, "seen", (X, {"a": np.ones(1), "b": [2.0]}))
    run(m)
    others = [Counted(), nnx.clone(m)]
    others[0].sow(nnx.Intermediate, "seen", (X, {"a": np.ones(1), "b": [2.0]}))
    with compilations(0):
        for other in (m, m, *others):
            run(other)
    m.more = 1
    run(m)
    with compilations(0):
        run(m)
    assert m.seen.value[0][1]["b"] == [2.0]


# `grad`, `vmap` and their kin run op by op, as in JAX: Python runs at each call, and nothing is
# traced or compiled by JAX after the first.


OP_BY_OP = {
    **{name: EACH[name](call) for name in ("value_and_grad", "vjp", "jvp", "jit", "filter_jit")},
    **{f"filter_{name}": EACH[f"filter_{name}"](call) for name in ("value_and_grad", "vjp", "jvp")},
    "vmap": lambda m: nnx.vmap(times, in_axes=(None, 0))(m, X),
    "pmap": lambda m: nnx.pmap(times, in_axes=(None, 0))(m, X),
    "grad of a jitted function": lambda m: nnx.grad(lambda m: JITTED(m, X).sum())(m),
    "vmap of a jitted function": lambda m: nnx.vmap(JITTED, in_axes=(AXES, 0))(m, X),
}
AXES = nnx.StateAxes({nnx.Param: None, ...: None})


def times(m, x):
    return m.w * x


@nnx.jit
def JITTED(m, x):
    TRACES.append("trace")
    return m.w.sum() * x


@pytest.mark.parametrize("name", OP_BY_OP)
def test_nothing_is_traced_or_compiled_by_jax_a_second_time(name):
    m = Counted()
    OP_BY_OP[name](m)
    if name == "pmap":
        OP_BY_OP[name](m)  # what the first call has put on all devices is of another kind to JAX
    second = [m, Counted(), nnx.clone(m)]
    with jax_events() as seen:
        for m in second:
            OP_BY_OP[name](m)
    assert not seen


def test_a_jitted_function_inside_other_transforms_is_traced_once():
    jitted = nnx.jit(lambda m, x: call(m) * x)
    models = [Counted() for _ in range(4)]
    with traces(1):
        for m in models:
            nnx.grad(lambda m: jitted(m, X).sum())(m)
            nnx.value_and_grad(lambda m: jitted(m, X).sum())(m)
            nnx.vjp(jitted, m, X)
    assert [int(m.count.value) for m in models] == [6] * 4


def test_static_arguments_compare_by_content():
    @nnx.jit(static_argnums=1, static_argnames="size")
    def scaled(m, fun, size=1):
        return call(m) * fun(size)

    by = lambda scale: functools.partial(lambda scale, x: scale * x, scale)
    m = Counted()
    for scale, size in ((2.0, 1), (3.0, 1), (3.0, 2)):
        with traces(1):
            for _ in range(2):
                scaled(m, by(scale), size=size)


def test_wrapping_the_same_function_again_costs_nothing():
    def plain(m, x):
        return call(m) * x

    m = Counted()
    with traces(1):
        for _ in range(3):
            nnx.jit(plain)(m, X)
    with traces(1):
        nnx.jit(plain, graph_updates=False)(m, X)


# Programs of eager loops and branches, by content --------------------------------------------------

FLOWS = {
    "cond": lambda f, x: nnx.cond(True, f, f, x),
    "switch": lambda f, x: nnx.switch(0, [f], x),
    "while_loop": lambda f, x: nnx.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1]).astype(x.dtype)), (0, x)
    )[1],
    "fori_loop": lambda f, x: nnx.fori_loop(0, 1, lambda i, x: f(x).astype(x.dtype), x),
    "scan": lambda f, x: nnx.scan(f, in_axes=0, out_axes=0)(x[None])[0],
    "remat": lambda f, x: nnx.remat(f)(x),
}
each = pytest.mark.parametrize("run", FLOWS.values(), ids=FLOWS)


@each
def test_a_new_function_of_equal_content_compiles_nothing(run):
    def make(captured):
        # A float among the parameters of an equation, which is not equal to itself.
        beyond = lambda x: jnp.take(x, 9, mode="fill", fill_value=float("nan"))
        return lambda x: nnx.relu(jnp.sin(x) * captured + 2) + jnp.isnan(beyond(x))

    run(make(X + 1), X)
    other = X + 2
    expected = nnx.relu(jnp.sin(X) * other + 2) + 1
    with compilations(0):
        out = [run(make(other), X) for _ in range(3)]
    np.testing.assert_allclose(out, jnp.stack([expected] * 3), rtol=1e-6)


def inner(constant):
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
    "a constant of an inner jitted function": (inner(np.float32([2])), inner(np.float32([3]))),
    "a large constant of an inner jitted function": (inner(np.full((400, 4), 2, np.float32)),
        inner(np.full((400, 4), 3, np.float32))),
    "a callback": (lambda x: jax.pure_callback(lambda x: x * np.float32(2), x, x),
        lambda x: jax.pure_callback(lambda x: x * np.float32(3), x, x)),
}  # fmt: skip


@pytest.mark.parametrize(
    "how, name",
    [(e, p) for i, e in enumerate(FLOWS) for j, p in enumerate(PAIRS) if not (i + j) % 3],
)
def test_whatever_differs_is_another_program(how, name):
    run, pair = FLOWS[how], PAIRS[name]
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
    if run is not FLOWS["while_loop"]:
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


@pytest.mark.parametrize(("how", "name"), [*zip(itertools.cycle(FLOWS), [*SETTINGS] * 2)])
def test_settings_of_jax_are_part_of_the_program(how, name):
    run, (value, read) = FLOWS[how], SETTINGS[name]
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
    seen, homeless = [], lambda x: x
    homeless.__module__ = None

    def run(name):
        def body(x):
            jax.debug.callback(lambda x: seen.append((name, float(x))), x)
            return jax.pure_callback(homeless, x, x)

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


def patched_method(patch):
    class Double(nnx.Module):
        def __call__(self, x):
            return 2 * x

    return Double(), lambda: patch.setattr(Double, "__call__", lambda self, x: 3 * x)


def with_rule(f):
    g = nnx.custom_vjp(lambda x: f(x), graph_updates=False)
    g.defvjp(lambda x: (f(x), None), lambda _, g: (f(g),))
    return nnx.grad(g)


WRAPPED = {
    **{name: EACH[name] for name in ("vmap", "scan", "switch", "shard_map", "filter_vmap")},
    "cond_fun": lambda f: lambda x: nnx.while_loop(lambda c: c < f(ONE), lambda c: c + 1.0, x),
    "rule of custom_vjp": with_rule,
    "cond under grad": lambda f: nnx.grad(lambda x: nnx.cond(True, f, f, x)),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("way", [library_function, captured_variable, patched_method])
def test_the_next_call_sees_what_has_changed(way, name, monkeypatch):
    """What JAX itself promises to trace once (`jit`, `pmap`, and their kin) need not."""
    f, change = way(monkeypatch)
    cached = WRAPPED[name](f)
    assert [float(cached(ONE)), float(WRAPPED[name](f)(ONE))] == [2.0, 2.0]
    change()
    assert [float(cached(ONE)), float(WRAPPED[name](f)(ONE))] == [3.0, 3.0]


def test_another_jit_of_a_module_calls_the_method_that_the_class_has_then(monkeypatch):
    double, change = patched_method(monkeypatch)
    assert [nnx.jit(double)(ONE), change(), nnx.jit(double)(ONE)] == [2.0, None, 3.0]
