"""What holds for every transform, said once: failures, captured objects, refusals, forms, integers."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.models import EACH, MODAL, Counted, Foo, snapshot

each = pytest.mark.parametrize("name", EACH)
each_with_modes = pytest.mark.parametrize("name", MODAL)
MODES = [{}, {"graph_updates": False}, {"graph": False}]
NO_NUMBER = {"eval_shape", "filter_eval_shape", "make_jaxpr"}


def touch_everything(m):
    m.w.value = m.w * 2
    m.count.set_metadata(note=1)
    m.extra = nnx.Param(m.w * 1)
    m.layers.append(m.w)
    m.array = m.array + 1
    m.mode = "changed"
    del m.gone


def fails(m):
    touch_everything(m)
    raise KeyError("inside")


def interrupted(m):
    touch_everything(m)
    raise KeyboardInterrupt


CAPTURED = nnx.Param(1.0)
FAILURES = {
    "an interrupt": (interrupted, KeyboardInterrupt),
    "a result that is no array": (lambda m: (touch_everything(m), "text")[1], TypeError),
    "a captured object": (lambda m: (touch_everything(m), CAPTURED), ValueError),
    "an inner failure": (
        lambda m: (touch_everything(m), nnx.jit(lambda m: (m.count.set_value(0.0), 1 // 0))(m)),
        ZeroDivisionError,
    ),
}  # fmt: skip


def check_failure(transformed, error=KeyError):
    m = Counted()
    m.layers, m.array, m.mode, m.gone = nnx.List([]), jnp.ones(1), "new", nnx.Param(1.0)
    before, attributes = snapshot(m), dict(vars(m))
    for _ in range(2):
        with pytest.raises(error):
            transformed(m)
        assert snapshot(m) == before and vars(m) == attributes and len(m.layers) == 0
    assert not m.w.value.is_deleted() and "note" not in m.count.get_metadata()
    assert m(1.0).tolist() == [4.0, 8.0]


@each
def test_L8_a_failed_call_leaves_everything_as_it_was(name):
    check_failure(EACH[name](fails))


@pytest.mark.parametrize(("function", "error"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("options", [{}, {"donate": "written"}, {"graph_updates": False}])
def test_L8_however_it_fails(function, error, options):
    check_failure(nnx.jit(function, **options), error)


@each_with_modes
@pytest.mark.parametrize("mode", MODES[1:], ids=["plain", "tree"])
def test_L8_also_without_graph_updates_and_inside_jit(name, mode):
    check_failure(EACH[name](fails, **mode))
    if "graph" in mode:
        check_failure(nnx.jit(lambda m: EACH[name](fails, **mode)(m), **mode))


@each
def test_captured_objects_are_read_and_protected_from_writes(name):
    m, other = Foo(), Foo(5.0)
    y = EACH[name](lambda m: m.x * other.x)(m)
    assert name in NO_NUMBER or float(y) == 5.0
    if name == "custom_vjp":
        return  # outside other transforms its function runs at the level of the caller
    before = snapshot(m, other)
    level = "different trace level: it belongs to eager"
    with pytest.raises(nnx.TraceContextError, match=level):
        EACH[name](lambda m: (other.n.set_value(m.x * 1), m.x * 1)[1])(m)
    with pytest.raises(nnx.TraceContextError, match=level):
        EACH[name](lambda m: (setattr(other, "new", 1), m.x * 1)[1])(m)
    assert snapshot(m, other) == before


@each_with_modes
def test_sharing_is_refused_in_tree_mode(name):
    m = Foo()
    transform = name.partition(",")[0]
    with pytest.raises(ValueError, match=rf"Duplicate Foo.*0', .*1'.*nnxlite\.{transform}\b"):
        EACH[name](lambda pair: pair[0].x * pair[1].y, graph=False)([m, m])


@each_with_modes
def test_an_argument_that_is_no_array_is_named(name):
    if name in {"value_and_grad", "jvp", "vmap", "checkify"}:
        return  # they take anything that they do not differentiate or map
    m = Foo()
    before = snapshot(m)
    number = lambda tree: tree["m"].x * 1.0
    text = r"cannot interpret argument '[\w.]*{}' as an array, it is of type '{}'"
    with pytest.raises(TypeError, match=text.format(r"k\.1", "str")):
        EACH[name](number)({"m": m, "k": [1.0, "text"]})
    with pytest.raises(TypeError, match=text.format(r"k\.a", "object")):
        EACH[name](number)({"m": m, "k": nnx.Dict(a=nnx.Variable(object()))})
    with pytest.raises(TypeError, match="unsupported operand"):  # the function's own errors stay
        EACH[name](lambda m: m.x + None)(m)
    assert snapshot(m) == before


@each_with_modes
def test_a_result_that_is_no_array_is_named(name):
    if name in {"value_and_grad", "vjp", "jvp"}:
        return  # a value has to be differentiable
    m = Foo()
    before = snapshot(m)
    text = r"returned a value of type 'str' at '[\w.]*b\.1'"
    with pytest.raises(TypeError, match=text):
        EACH[name](lambda m: (m.n.set_value(5.0), {"a": m.x * 1, "b": (1, "text")})[1])(m)
    assert snapshot(m) == before


class Scale(nnx.Module):
    def __init__(self):
        self.w, self.n = nnx.Param(jnp.float32(2)), nnx.BatchStat(jnp.float32(0))

    def __call__(self, x):
        self.n[...] += 1
        return self.w * x * self.n


CARRIED = {
    "bound method": lambda m: m.__call__,
    "callable module": lambda m: m,
    "partial": lambda m: functools.partial(Scale.__call__, m),
    "constants": lambda m: functools.partial(lambda label, m, x: m(x), "label", m),
    "keywords": lambda m: functools.partial(lambda x, m, label: m(x), m=m, label="label"),
}
CLOSED_OVER = {"pmap", "scan", "while_loop", "fori_loop", "custom_vjp", *NO_NUMBER}


@pytest.mark.parametrize(
    ("name", "carried"),
    [
        (name, carried)
        for i, name in enumerate(EACH)
        for j, carried in enumerate(CARRIED)
        if name not in CLOSED_OVER and (i + j) % 2
    ],
)
def test_what_a_function_carries_is_an_argument_and_is_written(name, carried):
    m = Scale()
    call = EACH[name](CARRIED[carried](m))
    assert [float(call(jnp.array(3.0))) for _ in range(2)] == [6.0, 12.0]
    m.n.value = jnp.float32(9)
    assert float(call(jnp.array(3.0))) == 60.0 and float(m.n.value) == 10.0
    assert not name.endswith("jit") or call._cache_size() == 1


DECORATORS = {
    name: getattr(nnx, name)
    for name in [
        "jit", "grad", "value_and_grad", "vjp", "jvp", "custom_vjp", "vmap", "pmap", "remat", "scan",
        "checkify", "make_jaxpr", "filter_jit", "filter_grad", "filter_value_and_grad",
        "filter_vmap", "filter_pmap", "filter_checkpoint", "filter_custom_vjp", "filter_custom_jvp",
    ]
}  # fmt: skip


def call(m, x):
    return m(x)


@pytest.mark.parametrize("name", DECORATORS)
def test_the_wrapper_is_a_good_citizen(name):
    transform = DECORATORS[name]
    wrapped = transform(call)
    assert repr(wrapped) == f"{name}(call)" and wrapped.__name__ == "call"
    assert wrapped.__wrapped__ is call
    assert repr(pickle.loads(pickle.dumps(wrapped))) == repr(wrapped)
    if name not in {"checkify", "filter_custom_vjp", "filter_custom_jvp"}:
        assert repr(transform()(call)) == repr(wrapped)
    with pytest.raises(TypeError, match="Expected a callable to transform, got int"):
        transform(3)


# Integers of NumPy, and concrete ones of JAX, wherever a number is expected ------------------------

X, ROWS = jnp.arange(3.0), jnp.arange(6.0).reshape(3, 2)


def scaled(x, k):
    return x.sum() * k


def under_custom_vjp(number):
    fun = nnx.custom_vjp(scaled, nondiff_argnums=(number,))
    fun.defvjp(lambda x, k: (scaled(x, k), ()), lambda k, _, g: (g[1] * k * jnp.ones(3),))
    return nnx.grad(lambda x: fun(x, 3))(X)


def layers(axes):
    keys = jax.random.split(jax.random.key(0), 3)
    stack = nnx.vmap(lambda key: nnx.Linear(3, 2, rngs=nnx.Rngs(key)))(keys)
    return nnx.vmap(lambda m, x: m(x), in_axes=(axes, None))(stack, X)


NUMBERED = {
    "jit, static": lambda i: nnx.jit(scaled, static_argnums=i(1))(X, 3),
    "jit, donated": lambda i: nnx.jit(lambda x: 2 * x, donate_argnums=i(0))(jnp.array(X)),
    "jit, traces": lambda i: nnx.jit(scaled, max_traces=i(1))(X, 3.0),
    "grad": lambda i: nnx.grad(scaled, argnums=i(0))(X, 3.0),
    "DiffState": lambda i: nnx.grad(
        lambda m: m(X).sum(), argnums=nnx.DiffState(i(0), nnx.PathContains("bias"))
    )(nnx.Linear(3, 2, rngs=nnx.Rngs(0))),
    "vmap, in": lambda i: nnx.vmap(scaled, in_axes=(i(1), None))(ROWS, 2.0),
    "vmap, out": lambda i: nnx.vmap(lambda x: x, out_axes=i(1))(ROWS),
    "vmap, size": lambda i: nnx.vmap(lambda x: x, in_axes=None, axis_size=i(4))(X),
    "vmap, StateAxes": lambda i: layers(nnx.StateAxes({nnx.Param: i(0)})),
    "scan": lambda i: nnx.scan(
        lambda c, x: (c + x.sum(), x), in_axes=(nnx.Carry, i(1)), out_axes=(nnx.Carry, i(0))
    )(0.0, ROWS),
    "scan, length": lambda i: nnx.scan(lambda c, _: (c + 1, c), length=i(4))(0.0, None),
    "fori_loop": lambda i: nnx.fori_loop(i(0), i(3), lambda j, c: c + j, 0, unroll=i(1)),
    "switch": lambda i: nnx.switch(i(1), [lambda x: x, lambda x: 2 * x], 3.0),
    "remat": lambda i: nnx.remat(scaled, static_argnums=i(1))(X, 3),
    "custom_vjp": lambda i: under_custom_vjp(i(1)),
    "make_jaxpr": lambda i: nnx.make_jaxpr(scaled, static_argnums=i(1))(X, 3).out_avals,
    "pmap": lambda i: nnx.pmap(scaled, in_axes=(i(0), None), axis_size=i(1))(X[None], 3.0),
    "pmap, static": lambda i: nnx.pmap(
        scaled, in_axes=(0, None), static_broadcasted_argnums=i(1), donate_argnums=i(0)
    )(X[None], 3),
    "split_rngs": lambda i: nnx.split_rngs(splits=i(3))(
        nnx.vmap(lambda rngs: rngs.params.uniform(()))
    )(nnx.Rngs(0)),
    "padding": lambda i: nnx.Conv(2, 3, i(3), padding=i(1), strides=i(1), rngs=nnx.Rngs(0))(ROWS[None]),
}  # fmt: skip
INTEGERS = {
    "uint8": np.uint8,
    "array": lambda number: np.array(number, np.int32),
    "jax": lambda number: jnp.array(number, jnp.int32),
}


@pytest.mark.parametrize("call", NUMBERED)
def test_every_kind_of_integer(call):
    expected = NUMBERED[call](int)
    for make in INTEGERS.values():
        found = NUMBERED[call](make)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_an_array_of_numbers_is_several():
    assert nnx.jit(scaled, static_argnums=np.array([1]))(X, 3) == scaled(X, 3)
    assert nnx.remat(scaled, static_argnums=np.array([1]))(X, 3) == scaled(X, 3)
