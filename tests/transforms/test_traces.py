"""Law L6: what is equal is traced once; what differs, once more.

The functions count their own runs: `TRACES.append` is no change of what a function sees.
"""

from __future__ import annotations

import contextlib
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

    def __init__(self):
        self.w = nnx.Param(jnp.ones((2, 2)))
        self.count = nnx.BatchStat(jnp.array(0))
        self.act = functools.partial(scaled_tanh, 1.0)
        self.name = "net"
        self.options = {"scale": 1.0, "axes": (0, 1)}

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


@nnx.jit
def train(m, optimizer, x):
    grads = nnx.grad(lambda m: (m(x) ** 2).mean())(m)
    optimizer.update(m, grads)


def test_a_captured_list_of_the_users_own_counts_by_identity():
    def transformation():
        seen = []

        def update(updates, state, params=None):
            seen.append("update")
            return updates, state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update), seen

    (one, seen), (other, seen_by_other) = transformation(), transformation()
    for chosen in (one, other):
        m = Net()
        optimizer = nnx.Optimizer(m, chosen, wrt=nnx.Param)
        with traces(1):
            train(m, optimizer, X)
            train(m, optimizer, X)
    assert seen == seen_by_other == ["update"]


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
    jitted = nnx.jit(lambda m, x: m(x))
    models = [Net() for _ in range(4)]
    with traces(1):
        for m in models:
            nnx.grad(lambda m: jitted(m, X).sum())(m)
            nnx.value_and_grad(lambda m: jitted(m, X).sum())(m)
            nnx.vjp(jitted, m, X)
    assert [int(m.count.value) for m in models] == [3] * 4


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
