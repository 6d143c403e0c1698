"""Derivatives leaf by leaf: gradients, products, Jacobians, and rules by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.filtered.models import Tied

X = jnp.ones((1, 3))


def loss(model, x):
    return model(x).sum()


def test_value_aux_and_writes():
    model = Tied()

    def f(m, x):
        m.parts[0][...] += 1
        m.seen = "yes"
        return m(x).sum(), ("aux", x)

    (value, aux), grads = nnx.filter_value_and_grad(f, has_aux=True)(model, X)
    assert aux[0] == "aux" and aux[1] is not None and model.seen == "yes"
    assert model.parts[0].value.tolist() == [1, 1, 1]
    np.testing.assert_allclose(value, loss(Tied(), X), rtol=1e-6)
    grads, aux = nnx.filter_grad(f, has_aux=True)(model, X)
    assert aux[0] == "aux" and grads.first.kernel.value.shape == (3, 3)


def test_methods_and_keywords():
    model = Tied()
    grad = nnx.filter_grad(lambda x, *, scale: (x * scale).sum())(X, scale=2.0)
    assert grad.tolist() == [[2, 2, 2]]
    bound = nnx.filter_grad(lambda x, m: loss(m, x))(X, model)
    method = nnx.filter_grad(lambda x: loss(model, x))(X)
    np.testing.assert_allclose(bound, method)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: nnx.filter_grad(loss)(), TypeError, "first argument, which must be given, and by"),
        (lambda: nnx.filter_grad(loss)(model=Tied()), TypeError, "by position"),
        (lambda: nnx.filter_grad(loss, argnums=1), ValueError, "takes no argnums="),
        (lambda: nnx.filter_grad(lambda p: 1.0, arg=True)([1.0, "a"]), TypeError,
         "'p.1' is a value of type str. Differentiate only float leaves: choose them with arg=."),
        (lambda: nnx.filter_grad(lambda x: x, has_aux=True)(jnp.ones(())), TypeError, "a pair"),
        (lambda: (lambda m: nnx.filter_grad(lambda a, b: 1.0)(m, m))(Tied()), ValueError,
         "different filter_spec for a shared array: at 'a.scale'"),
        (lambda: nnx.filter_jvp(abs, (1.0,), ()), ValueError, "1 primals and 0 tangents"),
        (lambda: nnx.filter_jvp(abs, (1,), (1.0,)), ValueError, "it must be None"),
        (lambda: nnx.filter_jvp(abs, (jnp.ones(2),), (jnp.ones(3),)), ValueError, "of its shape"),
        (lambda: nnx.filter_vjp(lambda x: (x, "a"), X)[1]((None, None)), ValueError,
         "the cotangent at '0' is nothing"),
        (lambda: nnx.filter_vjp(lambda x: x, X)[1]([X]), ValueError,
         "the cotangent at '0' is a float32[1, 3], which matches no leaf"),
        (lambda: nnx.filter_vjp(lambda x: [x], X)[1]([X, X]), ValueError,
         "at '1' is a float32[1, 3], which matches no leaf"),
        (lambda: nnx.filter_jacfwd(lambda x: x)(), TypeError, "must be given, and by position"),
        (lambda: nnx.filter_custom_jvp(abs)(1.0), AttributeError, "define it with .defjvp"),
        (lambda: nnx.filter_custom_vjp(abs)(1.0), AttributeError, "define them with .defvjp"),
    ],
)  # fmt: skip
def test_messages(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


def test_nothing_of_the_trace_is_kept_by_a_pullback():
    with jax.checking_leaks():
        _, pull = nnx.filter_vjp(lambda m, x: nnx.Param(m(x)), Tied(), X)
        cotangent = nnx.Param(jnp.ones((1, 3)))
        assert pull(cotangent)[1].shape == (1, 3)


def custom_sin():
    @nnx.filter_custom_vjp
    def f(args, scale, name):
        return {"y": jnp.sin(args[0]) * args[1] * scale, "name": name, "n": jnp.array(3)}

    def fwd(args, scale, name):
        return f(args, scale, name), (jnp.cos(args[0]), "static residual")

    def bwd(residuals, grad, args, scale, name):
        cos, text = residuals
        assert text == "static residual" and grad["n"] is None and grad["name"] is None
        return (cos * args[1] * scale * grad["y"], jnp.sin(args[0]) * scale * grad["y"], None)

    f.defvjp(fwd, bwd)
    return f


def test_custom_vjp_refuses_to_drop_a_derivative_and_values_are_whole():
    f = custom_sin()
    first = (jnp.array(1.0), jnp.array(1.0), 1)
    out = nnx.filter_jit(f)(first, jnp.array(2.0), "n")
    assert out["name"] == "n" and out["n"] == 3
    for call in (
        lambda s: f(first, s, "n")["y"],
        lambda s: f((s, s, 1), s, "n")["y"],
        lambda s: nnx.filter_jit(lambda s: f(first, s, "n")["y"])(s),
        lambda s: jax.lax.scan(lambda c, _: (f(first, s, "n")["y"], None), s, None, 2)[0],
    ):
        with pytest.raises(
            RuntimeError, match="with respect to the argument 'scale', and its rule only"
        ):
            jax.grad(call)(jnp.array(2.0))
    with pytest.raises(RuntimeError, match="respect to the argument 'scale', .* first argument"):
        jax.grad(lambda s: f(first, scale=s, name="n")["y"])(2.0)
    fixed = jax.grad(lambda s: f((s, s, 1), jax.lax.stop_gradient(s), "n")["y"])(jnp.array(2.0))
    np.testing.assert_allclose(fixed, 2 * (np.sin(2.0) + 2 * np.cos(2.0)), rtol=1e-6)


def test_rules_refuse_a_derivative_of_what_the_function_holds():
    def of(kind):
        def run(scale):
            held = nnx.Dict(scale=nnx.Param(scale))
            f = kind(functools.partial(lambda held, x: held.scale * x, held))
            f.def_jvp(lambda p, t: (p[0], t[0])) if kind is nnx.filter_custom_jvp else f.defvjp(
                lambda x: (x, None), lambda residuals, grad, x: grad
            )
            return f(jnp.array(1.0))

        return run

    with pytest.raises(ValueError, match="respect to something it carries, .* positional argu"):
        jax.grad(of(nnx.filter_custom_jvp))(2.0)
    with pytest.raises(RuntimeError, match="respect to something it carries, .* the first argu"):
        jax.grad(of(nnx.filter_custom_vjp))(2.0)


def test_rules_are_told_what_is_differentiated():
    seen = []

    @nnx.filter_custom_vjp
    def f(args, factor):
        return args["x"] * factor, args["y"] * factor, "text"

    @f.def_fwd
    def fwd(perturbed, args, factor):
        seen.append(perturbed)
        return f(args, factor), None

    @f.def_bwd
    def bwd(residuals, grads, perturbed, args, factor):
        seen.append((perturbed, *[g is None for g in grads]))
        return {"x": 5.0, "y": None, "n": None}  # a Python float is a cotangent

    args = {"x": jnp.array(2.0), "y": jnp.array(3.0), "n": 1}
    grad = jax.grad(lambda x: f({**args, "x": x}, factor=2.0)[0])(args["x"])
    perturbed = {"x": True, "y": False, "n": False}
    assert grad == 5 and seen == [perturbed, (perturbed, False, True, True)]

    tangents = []

    @nnx.filter_custom_jvp
    def g(x, y, *, factor):
        return x * y * factor

    @g.def_jvp
    def rule(primals, given, *, factor):
        tangents.append([t is None for t in given])
        x, y = primals
        return g(x, y, factor=factor), 7.0

    assert jax.jvp(lambda y: g(jnp.array(2.0), y, factor=3), (1.0,), (1.0,)) == (6, 7)
    assert tangents == [[True, False]]
    with pytest.raises(
        ValueError, match="with respect to the argument 'factor', .* positional arg"
    ):
        jax.grad(lambda y: g(y, y, factor=y))(1.0)


WRONG_TANGENTS = {
    "jvp": lambda t: nnx.filter_jvp(lambda x: 2 * x, (X,), (t,)),
    "jvp of a rule": lambda t: jax.jvp(with_rules(t)[0], (X,), (X,)),
    "vjp": lambda t: nnx.filter_vjp(lambda x: 2 * x, X)[1](t),
    "vjp of a rule": lambda t: jax.grad(lambda x: with_rules(t)[1](x).sum())(X),
}


def with_rules(tangent):
    f, g = nnx.filter_custom_jvp(lambda x: 2 * x), nnx.filter_custom_vjp(lambda x: 2 * x)
    f.def_jvp(lambda primals, tangents: (f(*primals), tangent))
    g.defvjp(lambda x: (g(x), None), lambda residuals, grad, x: tangent)
    return f, g


@pytest.mark.parametrize("how", WRONG_TANGENTS)
@pytest.mark.parametrize("dtype", ["complex64", "bfloat16", "int32"])
def test_tangents_of_another_dtype_are_refused(how, dtype):
    kind = ValueError if how == "vjp" else TypeError
    with pytest.raises(
        kind, match=rf"is {dtype}\[1, 3\], where float32\[1, 3\] needs one of its own"
    ):
        WRONG_TANGENTS[how](X.astype(dtype))


def test_jvp_with_respect_to_some_leaves():
    seen = []

    def f(x, y, model):
        seen.append((type(y), isinstance(model.scale, jax.core.Tracer)))
        return 2 * x, 3 * y, x * y, "text", 2.0, model.scale

    y = 2.0
    out, tangents = nnx.filter_jvp(f, (X, y, Tied()), (X, None, None))
    assert seen == [(float, False)] and type(out[1]) is float and tangents[1] is None
    assert [t is None for t in tangents] == [False, True, False, True, True, True]
    inside = lambda x: nnx.filter_jvp(lambda x, y: (3 * x, x * y), (x, x), (None, x))[1]
    assert jax.jit(inside)(X)[0] is None and jax.jit(inside)(X)[1].tolist() == (X * X).tolist()


def test_vjp_takes_none_for_numbers():
    value, pull = nnx.filter_vjp(lambda x: (2 * x, 3.0, np.ones(2, np.float32)), X)
    assert value[1] == 3.0 and type(value[1]) is float
    assert pull((X, None, np.ones(2, np.float32)))[0].tolist() == (2 * X).tolist()
    with pytest.raises(ValueError, match="at '1' is a float, but .* it must be None"):
        pull((X, 1.0, np.ones(2, np.float32)))
    assert pull((X.astype(jnp.float32), None, np.ones(2)))[0].shape == X.shape


def test_custom_vjp_on_objects_in_the_present_form():
    @nnx.filter_custom_vjp
    def f(model, x):
        return model(x)

    @f.def_fwd
    def fwd(perturbed, model, x):
        assert perturbed.scale is True and perturbed.steps is False
        return model(x), None

    @f.def_bwd
    def bwd(residuals, grad, perturbed, model, x):
        zeros = nnx.filter(model, nnx.is_inexact_array)
        return nnx.tree_at(lambda m: m.scale, jax.tree.map(jnp.zeros_like, zeros), 7 + grad[0])

    grads = nnx.filter_grad(lambda m: f(m, X).sum())(Tied())
    assert grads.scale.tolist() == [8, 8, 8] and not grads.first.kernel.value.any()


def test_functions_with_rules_must_not_write():
    f = nnx.filter_custom_vjp(lambda m: m.parts[0].set_value(m.scale))
    f.defvjp(lambda m: (None, None), lambda r, g, m: None)
    with pytest.raises(ValueError, match=r"changes its arguments \('parts.0'\)"):
        f(Tied())


def test_one_value_in_two_places_is_not_a_change():
    class Pair(nnx.Module, frozen=True):
        one: object
        two: object

    f = nnx.filter_custom_vjp(lambda pair, x: x * 2)
    f.defvjp(lambda pair, x: (x * 2, None), lambda residuals, grad, pair, x: None)
    for part in (jnp.tanh, "a", 1):
        assert f(Pair(Pair(part, part), part), X).tolist() == (2 * X).tolist()
    assert nnx.filter_vmap(f, in_axes=(None, 0))(Pair(X, X), X).shape == (1, 3)


def test_closure_convert_with_abstract_examples_and_weak_types():
    example = {"x": jax.ShapeDtypeStruct((3,), jnp.float32), "n": 2}
    converted = nnx.filter_closure_convert(lambda t, name: (t["x"] * t["n"], name), example, "a")
    assert converted.in_struct == ((example, "a"), {})
    assert converted.out_struct == (jax.ShapeDtypeStruct((3,), jnp.float32), "a")
    for x in (jnp.arange(3.0), np.arange(3.0)):  # NumPy's float64 is one of float32
        assert converted({"x": x, "n": 2}, "a")[0].tolist() == [0, 2, 4]
    double = nnx.filter_closure_convert(lambda x: 2 * x, jnp.array(1.0))
    assert double(jnp.ones(())) == 2 and jax.vmap(double)(jnp.arange(2.0)).tolist() == [0, 2]
    with pytest.raises(ValueError, match="closure-converted for other arguments"):
        double(jnp.array(1))
    keep = nnx.filter_closure_convert(lambda m: m(X), Tied())
    assert keep.out_struct.shape == (1, 3) and keep(Tied()).shape == (1, 3)
    whole = nnx.filter_closure_convert(lambda m: m, Tied()).out_struct
    assert whole.first is whole.second and whole.parts[1].shape == (2,)
    assert isinstance(nnx.filter_closure_convert(lambda: np.ones(2))(), jax.Array)
