"""Law L6: what is equal is traced once; what differs, once more.

The functions count their own runs: `TRACES.append` is no change of what a function sees.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from tests.transforms.models import EACH, Counted, compilations, jax_events

TRACES: list[str] = []
X = jnp.array([1.0, 2.0])


@contextlib.contextmanager
def traces(expected):
    """Within the block the functions of this page run as often as told."""
    start = len(TRACES)
    yield
    assert TRACES[start:] == ["trace"] * expected


def scaled_tanh(scale, x):
    return jnp.tanh(scale * x)


class Net(nnx.Module):
    """Static attributes of every kind that compares by content."""

    def __init__(self, size=2, scale=1.0, dtype=jnp.float32, act=None, name="net"):
        self.w = nnx.Param(jnp.ones((2, size), dtype))
        self.count = nnx.BatchStat(jnp.array(0))
        self.act = act or functools.partial(scaled_tanh, scale)
        self.name = name
        self.options = {"scale": scale, "axes": (0, 1)}

    def __call__(self, x):
        TRACES.append("trace")
        self.count[...] += 1
        return self.act(x @ self.w)


@nnx.jit
def forward(m, x):
    return m(x)


def test_second_call_clone_and_equal_model():
    m = Net()
    with traces(1):
        forward(m, X)
    with traces(0):
        forward(m, X)
        forward(nnx.clone(m), X)
        forward(Net(), 2 * X)
        forward(nnx.merge(*nnx.split(m), copy=True), X)
        forward(jax.tree.map(lambda x: 2 * x, m), X)
    assert int(m.count.value) == 2


def test_values_written_between_calls_do_not_count():
    m = Net()
    forward(m, X)
    m.w.value = 3 * m.w.value
    m.count[...] = 7
    with traces(0):
        y = forward(m, X)
    assert jnp.allclose(y, jnp.tanh(X @ m.w)) and int(m.count.value) == 8


def make_act():
    return lambda x: x * 2


def add_attribute(m):
    m.more = nnx.Param(jnp.ones(1))


def add_static(m):
    m.flag = True


def share(m):
    m.again = m.w


def rebind_kind(m):
    m.count = nnx.Cache(m.count.value)


def annotate(m):
    m.w.set_metadata(note="read")


CHANGES = {
    "static attribute": (lambda: Net(name="other"), None),
    "static attribute inside a dict": (lambda: Net(scale=1.0, name="net"), "options"),
    "bound value of a static function": (lambda: Net(scale=2.0), None),
    "code of a static function": (lambda: Net(act=make_act()), None),
    "dtype": (lambda: Net(dtype=jnp.bfloat16), None),
    "shape": (lambda: Net(size=3), None),
    "new Variable": (Net, add_attribute),
    "new static attribute": (Net, add_static),
    "sharing": (Net, share),
    "kind": (Net, rebind_kind),
    "metadata": (Net, annotate),
}


def changed(name):
    make, change = CHANGES[name]
    m = make()
    if change == "options":
        m.options = {**m.options, "axes": (1, 0)}
    elif change is not None:
        change(m)
    return m


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_is_traced_once_more(name):
    jitted = nnx.jit(lambda m, x: m(x))
    jitted(Net(), X)
    with traces(1):
        jitted(changed(name), X)
    with traces(0):
        jitted(changed(name), X)
        jitted(Net(), X)


def test_one_object_that_changes_and_changes_back():
    m = Net()
    forward(m, X)
    m.name = "other"
    forward(m, X)
    with traces(0):
        m.name = "net"
        forward(m, X)
        m.name = "other"
        forward(m, X)
    del m.name
    with traces(1):
        forward(m, X)


def test_arguments_that_differ():
    m = Net()
    forward(m, X)
    with traces(1):
        forward(m, jnp.ones((4, 2)))
    with traces(1):
        forward(m, x=X)
    with traces(1):
        forward(m, X.astype(jnp.bfloat16))
    with traces(0):
        forward(Net(), x=X)


def test_sharing_between_arguments_is_structure():
    a, b = Net(), Net()

    @nnx.jit
    def both(a, b):
        return a(X) + b(X)

    with traces(2):
        both(a, b)
    with traces(2):
        both(a, a)
    with traces(0):
        both(b, b)
        both(b, Net())
    assert (int(a.count.value), int(b.count.value)) == (3, 4)


# Optimizers --------------------------------------------------------------------------------------


@nnx.jit
def train(m, optimizer, x):
    grads = nnx.grad(lambda m: (m(x) ** 2).mean())(m)
    optimizer.update(m, grads)


def trained(transformation):
    """A model and its optimizer after two steps."""
    m = Net()
    optimizer = nnx.Optimizer(m, transformation, wrt=nnx.Param)
    train(m, optimizer, X)
    train(m, optimizer, X)
    return m, optimizer


def test_a_captured_list_of_the_users_own_counts_by_identity():
    def transformation():
        seen = []

        def update(updates, state, params=None):
            seen.append("update")
            return updates, state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update), seen

    (one, seen), (other, seen_by_other) = transformation(), transformation()
    with traces(1):
        trained(one)
    with traces(1):
        trained(other)
    assert seen == seen_by_other == ["update"]


def test_another_optimizer_is_traced_once_more():
    m = Net()
    train(m, nnx.Optimizer(m, optax.sgd(0.25), wrt=nnx.Param), X)
    with traces(1):
        train(m, nnx.Optimizer(m, optax.sgd(0.125), wrt=nnx.Param), X)


# Outside `jit` -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", [name for name in EAGER if name != "while_loop"])
def test_an_eager_transform_inside_an_eager_gradient(name):
    def loss(m):
        return EACH[name](lambda m: call(m))(m) + m.w.sum()

    m, other, in_jit = Counted(), Counted(), Counted()
    gradients = [nnx.grad(loss)(m), nnx.grad(loss)(other), nnx.jit(nnx.grad(loss))(in_jit)]
    first, second, third = [g["w"].value.tolist() for g in gradients]
    assert first == second == third == [5.0, 5.0]
    assert m.count.value == other.count.value == in_jit.count.value == 4


def test_a_pytree_in_a_variable_may_bring_methods():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Scale:
        by: jax.Array

        def __call__(self, x):
            return x * self.by

    def run(v):
        return float(nnx.cond(True, lambda v: v.value[0](3.0), lambda v: 0.0, v))

    v = nnx.Variable((Scale(jnp.array(2.0)),))
    assert [run(v), run(v)] == [6.0, 6.0]
    Scale.__call__ = lambda self, x: x - self.by
    assert run(v) == 1.0


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
    jitted = nnx.jit(lambda m, x: m(x))
    models = [Net() for _ in range(4)]
    with traces(1):
        for m in models:
            nnx.grad(lambda m: jitted(m, X).sum())(m)
            nnx.value_and_grad(lambda m: jitted(m, X).sum())(m)
            nnx.vjp(jitted, m, X)
    assert [int(m.count.value) for m in models] == [3] * 4


# Static arguments and settings ---------------------------------------------------------------------


@nnx.jit(static_argnums=1, static_argnames="size")
def with_static(m, fun, size=1):
    TRACES.append("trace")
    return fun(m.w) * size


def scaled_by(scale):
    return functools.partial(lambda scale, x: scale * x, scale)


def test_static_arguments_compare_by_content():
    m = Net()
    with traces(1):
        outs = [with_static(m, scaled_by(2.0)) for _ in range(3)]
    assert outs[2].tolist() == [[2.0, 2.0]] * 2
    with traces(1):
        assert with_static(m, scaled_by(3.0)).tolist() == [[3.0, 3.0]] * 2
    with traces(1):
        with_static(m, scaled_by(3.0), size=2)
    with traces(1):
        with_static(m, functools.partial(jnp.multiply, 3.0))
        with_static(m, functools.partial(jnp.multiply, 3.0))


def test_wrapping_the_same_function_again_costs_nothing():
    def plain(m, x):
        return m(x)

    m = Net()
    with traces(1):
        for _ in range(3):
            nnx.jit(plain)(m, X)
    with traces(1):
        nnx.jit(plain, graph_updates=False)(m, X)


def test_a_structure_change_inside_is_traced_for_before_and_after():
    @nnx.jit
    def grow(m):
        TRACES.append("trace")
        m.rows = [*getattr(m, "rows", []), nnx.Variable(X)]

    m = Net()
    with traces(3):
        for _ in range(3):
            grow(m)
    other = Net()
    with traces(0):
        for _ in range(3):
            grow(other)
    assert len(m.rows) == len(other.rows) == 3
