"""Donation under jit: which buffers are given away, and which must not be used twice."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.transforms.models import Counted, Tied, refuses, snapshot, values

X = jnp.array([1.0, 2.0])


def call(m, x):
    return m(x)


def test_donation_by_number_and_name():
    for options in ({"donate_argnums": 0}, {"donate_argnums": -2}, {"donate_argnames": "m"}):
        m = Counted()
        w, count, x = m.w.value, m.count.value, X + 1
        y = nnx.jit(call, **options)(m, x)
        assert y.tolist() == [8.0, 24.0] and float(m.count.value) == 4.0
        assert w.is_deleted() and count.is_deleted() and not x.is_deleted()
        assert m.w.value.tolist() == [1.0, 2.0]  # unwritten, it came back in another buffer


def test_donation_of_an_array_argument_beside_an_object():
    m, x = Counted(), X + 1
    w = m.w.value
    nnx.jit(lambda m, x: (m(1.0), x * 2)[1], donate_argnums=1)(m, x)
    assert x.is_deleted() and m.w.value is w


def test_donating_what_is_written():
    @nnx.jit(donate="written")
    def step(m, x):
        m.count[...] += 1
        m.w.value = m.w - x
        return m.extra * 1.0

    m = Counted()
    m.extra = nnx.Param(X + 5)
    w, count, extra, x = m.w.value, m.count.value, m.extra.value, X + 0
    step(m, x)
    step(m, x)
    assert w.is_deleted() and count.is_deleted()
    assert m.extra.value is extra and not extra.is_deleted() and not x.is_deleted()
    assert values(m) == [5.0, [6.0, 7.0], [-1.0, -2.0]]


ALIASES = {
    "within one object": (lambda m, x: m.other.copy_from(m.count), "'m.other'"),
    "in an argument": (lambda m, x: x.append(m.count.value), "'x.0'"),
}


@pytest.mark.parametrize("how", ALIASES)
@pytest.mark.parametrize(
    "options", [{"donate": "written"}, {"donate_argnums": 0}], ids=["written", "argument"]
)
@pytest.mark.parametrize("used_before", [False, True], ids=["first call", "later call"])
def test_a_buffer_is_not_donated_and_used(how, options, used_before):
    alias, where = ALIASES[how]

    def f(m, x):
        m.count[...] += 1
        return m.w * 1.0

    def make():
        m = Counted()
        m.other = nnx.BatchStat(jnp.array(7.0))
        return m

    jitted = nnx.jit(f, **options)
    if used_before:
        jitted(make(), [jnp.array(1.0)] if how == "in an argument" else [])
    m, x = make(), []
    alias(m, x)
    before = snapshot(m)
    with refuses(ValueError, "'m.count'", where, "donated buffer can be used once"):
        jitted(m, x)
    assert snapshot(m) == before and not m.count.value.is_deleted()
    assert not m.other.value.is_deleted()


def test_of_two_donated_places_the_first_is_named_first():
    x, add = jnp.ones(2), lambda x, y: x + y
    with refuses(ValueError, "donated at 'x' and used at 'y'"):
        nnx.jit(add, donate_argnums=(0, 1))(x, x)
    with refuses(ValueError, "donated at 'x' and used at 'y'"):
        nnx.filter_jit(add, donate="all")(x, x)


@pytest.mark.parametrize("returned", ["nothing", "an object"])
def test_a_donated_array_that_a_call_without_updates_replaces_stays(returned):
    model = nnx.Dict(w=nnx.Param(jnp.ones(3)), scale=nnx.data(jnp.arange(3.0)))

    @nnx.jit(donate_argnums=0, graph_updates=False)
    def double(m):
        m.scale = m.scale * 2
        return nnx.Dict(w=nnx.Param(m.w + 1)) if returned == "an object" else None

    for _ in range(2):
        double(model)
    assert model.scale.tolist() == [0, 1, 2] and model.w.tolist() == [1, 1, 1]


def test_one_shared_variable_is_donated_once():
    m = Tied()
    jitted = nnx.jit(lambda m, n: setattr(m.a, "value", m.a * 2), donate="written")
    jitted(m, m)
    assert m.b.value.tolist() == [2.0, -4.0]
