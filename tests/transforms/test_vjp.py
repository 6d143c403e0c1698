"""vjp and jvp: values, cotangents in the form of the primals, state, sharing, refusals."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.models import Counted, Foo, Tied

MODES = [{}, {"graph_updates": False}, {"graph": False}]


def call(m, x):
    return m(x)


# vjp ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_cotangents_have_the_form_of_the_primals(mode):
    m, x = Counted(), jnp.ones(2)
    y, pull = nnx.vjp(call, m, x, **mode)
    d_m, d_x = pull(jnp.ones(2))
    assert y.tolist() == [4.0, 8.0]
    assert type(d_m) is Counted and d_m is not m
    assert d_m.w.value.tolist() == [4.0, 4.0]
    assert float(d_m.count.value) == 3.0
    assert d_x.tolist() == [4.0, 8.0]
    assert float(m.count.value) == 4.0


def test_sharing_and_cycles_hold_in_cotangents():
    m = Tied()
    _, pull = nnx.vjp(lambda m, pair: m(1.0) + pair[0](1.0), m, (m, 2.0))
    d_m, (again, _) = pull(jnp.ones(2))
    assert again is d_m
    assert d_m.a is d_m.b and d_m.child.leaf is d_m.a and d_m.child.owner is d_m


def test_the_result_may_hold_objects_of_the_caller_and_new_ones():
    m = Foo()
    (same, new), pull = nnx.vjp(lambda m: (m, nnx.Dict(z=nnx.Param(m.x * 3))), m)
    assert same is m and float(new.z.value) == 3.0
    (d_m,) = pull((Foo(1.0, 5.0), nnx.Dict(z=nnx.Param(10.0))))
    assert (float(d_m.x.value), float(d_m.y.value)) == (31.0, 5.0)
    (d_m,) = pull((None, nnx.State({"z": nnx.Param(1.0)})))
    assert (float(d_m.x.value), float(d_m.y.value)) == (3.0, 0.0)


def test_a_variable_as_result_takes_a_bare_cotangent_too():
    m = Foo()
    y, pull = nnx.vjp(lambda m: m.x, m)
    assert y is m.x
    assert float(pull(4.0)[0].x.value) == float(pull(nnx.Param(4.0))[0].x.value) == 4.0


def test_integers_and_keys_have_float0_cotangents():
    rngs = nnx.Rngs(0)
    y, pull = nnx.vjp(lambda r, x: r.uniform(()) * x, rngs, 2.0)
    d_rngs, d_x = pull(1.0)
    assert d_rngs.default.count.value.dtype == jax.dtypes.float0
    assert d_rngs.default.key.value.dtype == jax.dtypes.float0
    assert float(d_x) == float(y) / 2
    assert int(rngs.default.count.value) == 1


def test_a_state_a_variable_and_arrays_in_objects_as_primals():
    m = Foo()
    m.array = jnp.array(5.0)
    y, pull = nnx.vjp(lambda s, v, m: s["x"] * v * m.array, nnx.state(m, nnx.Param), m.y, m)
    d_s, d_v, d_m = pull(1.0)
    assert float(d_s["x"].value) == 10.0 and float(d_v.value) == 5.0
    assert type(d_v) is nnx.Param
    assert float(d_m.array) == 2.0


def test_later_forms():
    m = Counted()
    for later in (nnx.vjp(call), nnx.vjp()(call), nnx.vjp(has_aux=False)(call)):
        y, pull = later(Counted(), 1.0)
        assert pull(jnp.ones(2))[0].w.value.tolist() == [4.0, 4.0]
    y, pull, aux = nnx.vjp(lambda m: (m.w * 1.0, 7))(m, has_aux=True)
    assert aux == 7
    assert repr(nnx.vjp(call)) == "vjp(call)"


def test_the_pullback_keeps_the_primals_alive_only_as_far_as_needed():
    m = Foo()
    _, pull = nnx.vjp(lambda m: m.x + m.y, m)
    seen = weakref.ref(m)
    del m
    gc.collect()
    assert seen() is None
    assert float(pull(1.0)[0].x.value) == 1.0


def test_cotangents_are_matched_by_path():
    _, pull = nnx.vjp(lambda m: {"m": m}, Foo())
    for cotangent, error, message in (
        (
            nnx.State({"z": nnx.Param(1.0)}),
            ValueError,
            "cotangent at 'm.z' is a float, which matches",
        ),
        (
            nnx.Dict(x=nnx.Param(1.0)),
            ValueError,
            "cotangent at 'm.n' is nothing, where the float32",
        ),
        (3.0, ValueError, "cotangent at 'm' is a float, which matches no leaf.*a State may stand"),
        (nnx.State({"x": jnp.array(1)}), TypeError, r"'m.x' is int32\[\], .* needs one of its own"),
    ):
        with pytest.raises(error, match=message):
            pull({"m": cotangent})


# jvp ---------------------------------------------------------------------------------------------


def test_a_state_names_the_variables_to_move_along():
    m = Counted()
    m.rngs = nnx.Rngs(0)  # no tangent for its key and count is asked for
    y, dy = nnx.jvp(call, [m, 1.0], [nnx.state(m, nnx.Param), 0.0])
    assert dy.tolist() == [4.0, 8.0]
    y, dy = nnx.jvp(call, (m, 1.0), (None, 1.0))
    assert dy.tolist() == [5.0, 10.0]


def test_jvp_later_forms_and_methods():
    class Net(Counted):
        pushed = nnx.jvp(call)

    m = Net()
    assert nnx.jvp(call)((m, 1.0), (None, 1.0))[1].tolist() == [4.0, 8.0]
    assert nnx.jvp()(call)((m, 1.0), (None, 1.0))[1].tolist() == [5.0, 10.0]
    assert m.pushed((1.0,), (1.0,))[1].tolist() == [6.0, 12.0]


def test_the_tangent_of_an_object_is_a_new_object():
    m = Foo()
    out, tangent = nnx.jvp(lambda m: {"m": m, "n": nnx.Dict(z=m.x * 2)}, (m,), (Foo(10.0, 20.0),))
    assert out["m"] is m and tangent["m"] is not m
    assert (float(tangent["m"].x.value), float(tangent["n"].z)) == (10.0, 20.0)
    assert type(tangent["m"].n) is nnx.BatchStat


def test_integer_primals_take_float0_tangents():
    y, dy = nnx.jvp(lambda n, x: n * x, (2, 3.0), (np.zeros((), jax.dtypes.float0), 1.0))
    assert (float(y), float(dy)) == (6.0, 2.0)


FLOAT, X2 = r"tangent at 'args\[0\].x' is float32\[2\], where float32\[\] needs", jnp.ones(2)


@pytest.mark.parametrize(
    "primals, tangents, error, message",
    [
        (1.0, 1.0, TypeError, "must be tuples or lists"),
        ((1.0,), (1.0, 2.0), TypeError, "1 primals and 2 tangents; give one"),
        ((1.0,), (X2,), ValueError,
         r"at 'args\[0\]' is float32\[2\], where float needs one of its"),
        ((1,), (1,), TypeError,
         r"at 'args\[0\]' is a int, but .* not differentiated: it must be None"),
        ((Foo(),), (nnx.Dict(q=X2),), TypeError,
         r"at 'args\[0\].q' is a float32.* matches no leaf"),
        ((Foo(),), (nnx.Dict(x=1.0),), TypeError, r"at 'args\[0\].n' is nothing, where"),
        ((Foo(),), (2.0,), TypeError,
         r"at 'args\[0\]' is a float, which matches no leaf.*a State may"),
        ((Foo(),), (nnx.State({"x": X2}),), ValueError, FLOAT),
    ],
)  # fmt: skip
def test_tangents_that_do_not_fit_are_refused_by_path(primals, tangents, error, message):
    with pytest.raises(error, match=message):
        nnx.jvp(lambda *args: 1.0, primals, tangents)


def test_a_shared_variable_has_one_tangent():
    m = Foo()
    tangents = nnx.state(m, nnx.Param), nnx.State({"x": nnx.Param(1.0)})
    with pytest.raises(TypeError, match="shared by 'a.x' and 'b.x' has two different ones"):
        nnx.jvp(lambda a, b: a.x * b.x, (m, m), tangents)
    shared = nnx.state(m, nnx.Param)
    assert float(nnx.jvp(lambda a, b: a.x * b.x, (m, m), (shared, shared))[1]) == 2.0


def test_a_value_that_is_a_pytree_has_a_tangent_of_its_structure():
    v = nnx.Param({"a": jnp.array(1.0), "b": jnp.array(2.0)})
    t = nnx.Param({"a": jnp.array(10.0), "b": jnp.array(20.0)})
    y, dy = nnx.jvp(lambda v: v.value["a"] * v.value["b"], (v,), (t,))
    assert (float(y), float(dy)) == (2.0, 40.0)
    with pytest.raises(TypeError, match="tangent at 'v.b' is nothing"):
        nnx.jvp(lambda v: v.value["a"], (v,), (nnx.Param({"a": 1.0}),))


def test_a_function_with_aux_must_return_a_pair():
    with pytest.raises(TypeError, match=r"must return a pair \(value, aux\), got "):
        nnx.vjp(lambda x: x, 1.0, has_aux=True)
    with pytest.raises(TypeError, match=r"must return a pair \(value, aux\), got "):
        nnx.jvp(lambda x: x, (1.0,), (1.0,), has_aux=True)


def scaled_by_reference(m):
    m.r[...] = m.r + m.x.sum()
    return m.x.sum() * m.r[...]


def test_jvp_differentiates_along_array_references():
    r = nnx.Variable(jnp.array(1.0), ref=True)
    m = nnx.Dict(x=nnx.Param(jnp.ones(2)), r=r, n=nnx.Variable(jnp.array(0), ref=True))
    y, dy = nnx.jvp(scaled_by_reference, (m,), (nnx.state(m, nnx.Param),))
    assert (float(y), float(dy), float(m.r.value)) == (6.0, 10.0, 3.0)
    moved = nnx.State({"x": jnp.zeros(2), "r": nnx.Variable(jnp.array(2.0), ref=True)})
    for tangent in (moved, nnx.State({"r": jnp.array(2.0)})):
        m.r[...] = 1.0
        y, dy = nnx.jvp(scaled_by_reference, (m,), (tangent,))
        assert (float(y), float(dy), float(m.r.value)) == (6.0, 4.0, 3.0)
    with pytest.raises(ValueError, match=r"tangent at 'm.r' is float32\[2\], where .* its shape"):
        nnx.jvp(scaled_by_reference, (m,), (nnx.State({"r": jnp.ones(2)}),))


def test_law_7_vjp_has_no_cotangents_of_array_references():
    m = nnx.Dict(x=nnx.Param(jnp.ones(2)), r=nnx.Variable(jnp.array(1.0), ref=True))
    y, pull = nnx.vjp(scaled_by_reference, m)
    assert (float(y), float(m.r.value)) == (6.0, 3.0)
    with pytest.raises(
        ValueError, match=r"vjp\(scaled_by_reference\): 'm.r' is an array refer.*to_arr"
    ):
        pull(1.0)
    m.n = nnx.Variable(jnp.array(2), ref=True)
    del m.r
    (d_m,) = nnx.vjp(lambda m: (m.x * m.n).sum(), m)[1](1.0)
    assert d_m.x.value.tolist() == [2.0, 2.0] and d_m.n.get_raw_value().dtype == jax.dtypes.float0
