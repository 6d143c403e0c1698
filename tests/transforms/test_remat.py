"""remat: the function itself, remembered less."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.transforms.models import Counted, Foo


def loss(m, x):
    return jnp.sin(jnp.sin(m(x))).sum()


def test_the_jaxpr_holds_a_checkpoint_and_fewer_residuals():
    m = Foo()

    def deep(m):
        return jnp.sin(jnp.sin(jnp.sin(m.x)))

    jaxpr = nnx.make_jaxpr(nnx.grad(nnx.remat(deep)))(m)
    assert any("remat" in str(eqn.primitive) for eqn in jaxpr.eqns)
    policy = jax.checkpoint_policies.everything_saveable
    saved = nnx.make_jaxpr(nnx.grad(nnx.remat(deep, policy=policy)))(m)
    recomputed = lambda j: str(j).count(" sin ")
    assert recomputed(saved) < recomputed(jaxpr)
    options = nnx.make_jaxpr(nnx.grad(nnx.remat(deep, prevent_cse=False)))(m)
    assert "prevent_cse=False" in str(options) and "prevent_cse=True" in str(jaxpr)


@pytest.mark.parametrize("outer", [nnx.remat, nnx.filter_checkpoint, nnx.checkify])
def test_constants_that_a_function_leaves_are_arrays(outer):
    def f(m):
        m.a[...], m.flag = jnp.float16(0.25), nnx.Variable(jnp.bool_(True))
        return m.a + 1

    m = nnx.Dict(a=nnx.Param(jnp.ones((), jnp.float16)))
    for _ in range(2):  # a literal of a program could not be written into
        outer(f)(m)
        values = [m.a.value, m.flag.value]
        assert all(isinstance(x, jax.Array) for x in values)
        assert [x.dtype for x in values] == [jnp.float16, jnp.bool_]
        assert m.a.value == 0.25 and m.flag.value


def test_static_arguments():
    def f(m, x, twice):
        return m.x * x * (2 if twice else 1)

    m = Foo(3.0)
    for number in (2, -1, (2,)):
        g = nnx.remat(f, static_argnums=number)
        assert float(g(m, 1.0, True)) == 6.0 and float(g(m, 1.0, False)) == 3.0
        assert float(nnx.grad(g)(m, 1.0, True)["x"].value) == 2.0
    assert float(nnx.remat(lambda m, k: m.x * len(k), static_argnums=1)(m, [1, 2])) == 6.0
    shared = object()  # unhashable or not, a static argument may be anything
    assert nnx.remat(lambda x, k: k is shared, static_argnums=1)(1.0, shared)


def test_static_arguments_by_keyword_and_by_default():
    @functools.partial(nnx.remat, static_argnums=(2, 3))
    def f(m, x, twice=False, text=""):
        return m.x * x * (2 if twice else 1) + len(text)

    m = Foo(3.0)
    calls = (f(m, 1.0), f(m, 1.0, twice=True), f(m, x=1.0, text="abc"), f(m, 1.0, True, text="a"))
    assert list(map(float, calls)) == [3.0, 6.0, 6.0, 7.0]
    assert float(nnx.grad(lambda m: f(m, 2.0, twice=True))(m)["x"].value) == 4.0


def test_a_static_argument_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"static_argnums has 5, but the call has 2 positional"):
        nnx.remat(loss, static_argnums=5)(Counted(), 1.0)
