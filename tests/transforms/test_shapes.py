"""eval_shape, make_jaxpr, checkify: looking without touching, and errors as values."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify
from jax.sharding import NamedSharding, PartitionSpec

import nnxlite as nnx
from tests.transforms.models import Counted, Foo, Tied, snapshot


def shape(x):
    return (type(x).__name__, x.shape, str(x.dtype))


@pytest.mark.parametrize("abstract", [nnx.eval_shape, lambda f, m: nnx.jit(f).eval_shape(m)])
def test_arguments_stay_as_they_are(abstract):
    """An array in a list is no data for the library, and yet it is the leaf that was there."""

    def grow(m):
        m.plain[1] = m.plain[1] * 2
        m.count[...] += 1
        m.new = nnx.Variable(m.plain[1])
        return m, {"again": m}

    model = Tied()
    model.plain, model.count = [nnx.Param(jnp.ones(2)), jnp.ones(3)], nnx.Variable(jnp.array(0))
    before = snapshot(model)
    out, rest = abstract(grow, model)
    assert snapshot(model) == before and out is not model and out.a is not model.a
    assert rest["again"] is out and out.a is out.b and out.child.owner is out
    assert shape(out.count.value) == ("ShapeDtypeStruct", (), "int32")
    assert [x.shape for x in (out.plain[0], out.plain[1], out.new)] == [(2,), (3,), (3,)]


def test_what_a_function_does_to_its_arguments_does_not_matter_without_them_in_the_result():
    """The arguments stay as they are, so that a text in the place of an array is no error."""

    def f(m):
        m.w = "text"
        return jnp.ones(3)

    m = Counted()
    before = snapshot(m)
    assert shape(nnx.eval_shape(f, m)) == ("ShapeDtypeStruct", (3,), "float32")
    assert snapshot(m) == before


def test_abstract_arguments_and_keywords():
    m = nnx.eval_shape(Foo)
    out = nnx.eval_shape(lambda m, *, k: m.x * jnp.ones(3) * k, m, k=2)
    assert shape(out) == ("ShapeDtypeStruct", (3,), "float32")
    assert nnx.eval_shape(lambda: (None, 1, m.x.value.shape))[0] is None
    assert shape(nnx.eval_shape(Counted().__call__, 1.0)) == ("ShapeDtypeStruct", (2,), "float32")
    scale = functools.partial(lambda name, x: x * len(name), "abc")
    assert shape(nnx.eval_shape(scale, 1.0)) == ("ShapeDtypeStruct", (), "float32")


def test_weak_types_and_shardings_are_kept():
    sharding = NamedSharding(jax.make_mesh((2, 4), ("a", "b")), PartitionSpec("a", "b"))
    w = nnx.Param(jax.device_put(jnp.ones((4, 8)), sharding))
    out = nnx.eval_shape(lambda m: m, nnx.Dict(w=w, k=nnx.Param(jnp.array(1.0))))
    assert out.w.value.sharding == sharding
    assert out.k.value.weak_type and out.k.value.sharding is None


def test_annotated_variables_have_their_sharding_on_a_mesh():
    def init():
        w = nnx.Param(jnp.ones((8, 4)), sharding=("data", None))
        return nnx.Dict(w=w, b=nnx.Param(jnp.ones(8)))

    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        out = nnx.eval_shape(init)
        assert nnx.eval_shape(lambda: jnp.ones(3)).shape == (3,)
    assert out.w.value.sharding.spec == PartitionSpec("data", None)
    assert not any(out.b.value.sharding.spec)
    assert nnx.eval_shape(init).w.value.sharding is None


def shapes(variables):
    return [v.aval.shape for v in variables]


def test_inputs_are_the_leaves_in_order_and_outputs_those_of_the_result():
    m = nnx.Dict(b=nnx.Param(jnp.ones((2, 3))), a=nnx.Param(jnp.ones(4)))
    f = lambda x, m, y: (m.b * 1.0, {"m": nnx.clone(m), "x": x})
    jaxpr = nnx.make_jaxpr(f, graph_updates=False)(jnp.ones(5), m, jnp.ones(6)).jaxpr
    assert shapes(jaxpr.invars) == [(5,), (4,), (2, 3), (6,)]
    assert shapes(jaxpr.outvars) == [(2, 3), (4,), (2, 3), (5,)]


def test_what_is_written_is_among_the_outputs_with_updates():
    def grow(m):
        m.new = nnx.Param(jnp.ones(7))
        return nnx.Param(jnp.ones(9))

    m = Counted()
    before = snapshot(m)
    for options, expected in (({"graph_updates": False}, [(2,)]), ({}, [(2,), ()])):
        assert shapes(nnx.make_jaxpr(lambda m: m(2.0), **options)(m).jaxpr.outvars) == expected
    assert shapes(nnx.make_jaxpr(grow)(m).jaxpr.outvars) == [(9,), (7,)]
    assert snapshot(m) == before


def test_make_jaxpr_forms_and_static_arguments():
    f = lambda m, k: m.x * (2.0 if k else 3.0) + k
    assert "3.0" in str(nnx.make_jaxpr(f, static_argnums=1)(Foo(), 0))
    assert "2.0" in str(nnx.make_jaxpr(static_argnums=(-1,))(f)(Foo(), 1))
    eqns = nnx.make_jaxpr(f.__call__, static_argnums=1)(Foo(), 0).eqns
    assert [str(eqn.primitive) for eqn in eqns] == ["mul", "add"]
    assert len(nnx.make_jaxpr(lambda m, k: m.x * k)(Foo(), k=2.0).jaxpr.invars) == 4


def checked(m, x):
    checkify.check(x > 0, "x must be positive, got {x}", x=x)
    return m(x)


def test_checks_are_values_and_state_is_kept():
    m = Counted()
    f = nnx.checkify(checked)
    error, y = f(m, jnp.array(2.0))
    assert error.get() is None and y.tolist() == [8.0, 16.0]
    error, y = f(m, jnp.array(-1.0))
    assert "x must be positive, got -1.0" in error.get()
    assert float(m.count.value) == 5.0
    with pytest.raises(checkify.JaxRuntimeError, match="x must be positive"):
        error.throw()
