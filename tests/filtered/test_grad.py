"""Derivatives leaf by leaf: gradients, products, Jacobians, and rules by hand."""

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
    g = nnx.filter_custom_jvp(lambda x, *, factor: x * factor)
    g.def_jvp(lambda primals, given, *, factor: (g(*primals, factor=factor), 7.0))
    with pytest.raises(ValueError, match="respect to the argument 'factor', .* positional arg"):
        jax.grad(lambda y: g(y, factor=y))(1.0)


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


def test_one_value_in_two_places_is_not_a_change():
    class Pair(nnx.Module, frozen=True):
        one: object
        two: object

    f = nnx.filter_custom_vjp(lambda pair, x: x * 2)
    f.defvjp(lambda pair, x: (x * 2, None), lambda residuals, grad, pair, x: None)
    for part in (jnp.tanh, "a", 1):
        assert f(Pair(Pair(part, part), part), X).tolist() == (2 * X).tolist()
    assert nnx.filter_vmap(f, in_axes=(None, 0))(Pair(X, X), X).shape == (1, 3)


def test_closures_over_objects_are_converted():
    keep = nnx.filter_closure_convert(lambda m: m(X), Tied())
    assert keep.out_struct.shape == (1, 3) and keep(Tied()).shape == (1, 3)
    whole = nnx.filter_closure_convert(lambda m: m, Tied()).out_struct
    assert whole.first is whole.second and whole.parts[1].shape == (2,)
    assert isinstance(nnx.filter_closure_convert(lambda: np.ones(2))(), jax.Array)
    double = nnx.filter_closure_convert(lambda x: 2 * x, jnp.array(1.0))
    with pytest.raises(ValueError, match="closure-converted for other arguments"):
        double(jnp.array(1))
