"""Loss scaling for training in float16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return (x.astype(jnp.float16) * self.w.value.astype(jnp.float16)).sum()


def parts(tx=None, **kwargs):
    model = Model()
    tx = optax.sgd(1.0) if tx is None else tx
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.DynamicLossScale(**kwargs)


@nnx.jit
def train_step(model, optimizer, loss_scale, x):
    grads = nnx.grad(lambda model: loss_scale.scale(model(x)))(model)
    return loss_scale.step(optimizer, model, grads)


def test_scaling_keeps_small_gradients():
    x = jnp.full(2, 2.0**-20, jnp.float32)

    def loss(w, scale):
        y = (w.astype(jnp.float16) * x.astype(jnp.float16)).sum()
        return scale.scale(y * jnp.float16(2.0**-6))

    lost = jax.grad(loss)(jnp.ones(2), nnx.StaticLossScale(1.0))
    kept = nnx.StaticLossScale(2.0**10)
    found = kept.unscale(jax.grad(loss)(jnp.ones(2), kept))
    assert (lost == 0).all()
    np.testing.assert_allclose(found, 2.0**-26)


def test_scale_and_unscale_are_inverse_and_mind_dtypes():
    scale = nnx.StaticLossScale(8.0)
    tree = {"a": jnp.ones(2, jnp.float16), "n": jnp.array(3)}
    scaled = scale.scale(tree)
    assert scaled["a"].dtype == jnp.float16 and (scaled["a"] == 8).all() and scaled["n"] == 3
    back = scale.unscale(scaled)
    assert back["a"].dtype == jnp.float32 and (back["a"] == 1).all() and back["n"] == 3


def test_all_finite():
    assert nnx.all_finite({"a": jnp.ones(2), "n": jnp.array(1)}) and nnx.all_finite(())
    for bad in (jnp.nan, jnp.inf):
        assert not nnx.all_finite([jnp.ones(2), jnp.array([1.0, bad])])


def test_a_finite_step_is_the_plain_step():
    model, optimizer, loss_scale = parts()
    assert train_step(model, optimizer, loss_scale, jnp.array([0.5, 0.25]))
    np.testing.assert_array_equal(model.w.value, [0.5, 0.75])
    assert optimizer.step.value == 1 and loss_scale.good_steps.value == 1


def test_a_step_with_overflow_is_skipped_and_lowers_the_scale():
    model, optimizer, loss_scale = parts(optax.adam(0.1), scale=2.0**15)
    assert not train_step(model, optimizer, loss_scale, jnp.array([100.0, 1.0]))
    np.testing.assert_array_equal(model.w.value, 1)
    assert optimizer.step.value == 0 and optimizer.opt_state[0].count.value == 0
    assert (optimizer.opt_state[0].mu["w"].value == 0).all()
    assert loss_scale.scale_value.value == 2.0**14
    while not train_step(model, optimizer, loss_scale, jnp.array([100.0, 1.0])):
        pass
    assert loss_scale.scale_value.value == 2.0**9 and optimizer.step.value == 1


def test_the_scale_rises_after_a_period_and_keeps_its_floor():
    loss_scale = nnx.DynamicLossScale(4.0, period=2, factor=4.0, smallest=2.0)
    for finite, scale, good in [
        (True, 4, 1), (True, 16, 0), (True, 16, 1), (False, 4, 0), (False, 2, 0), (True, 2, 1)
    ]:  # fmt: skip
        loss_scale.adjust(jnp.array(finite))
        assert (loss_scale.scale_value.value, loss_scale.good_steps.value) == (scale, good)


def test_the_scale_never_overflows_itself():
    loss_scale = nnx.DynamicLossScale(3e38, period=1)
    loss_scale.adjust(jnp.array(True))
    assert loss_scale.scale_value.value == jnp.float32(3e38)


def test_a_static_scale_also_skips_what_is_not_finite():
    trained = nnx.ModelAndOptimizer(Model(), optax.sgd(1.0))
    scale = nnx.StaticLossScale(4.0)
    assert scale.step(trained, nnx.State({"w": jnp.full(2, 4.0)}))
    assert not scale.step(trained, nnx.State({"w": jnp.full(2, jnp.inf)}))
    np.testing.assert_array_equal(trained.model.w.value, 0)
    assert trained.step.value == 1 and scale.scale_value.value == 4


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: nnx.StaticLossScale(0), "scale must be positive, got 0"),
        (lambda: nnx.DynamicLossScale(-1.0), "scale must be positive, got -1.0"),
        (lambda: nnx.DynamicLossScale(period=0), "period must be positive, got 0"),
        (lambda: nnx.DynamicLossScale(smallest=0), "smallest must be positive"),
        (lambda: nnx.DynamicLossScale(factor=1.0), "factor must be more than 1, got 1.0"),
    ],
)
def test_bad_arguments(make, expected):
    with pytest.raises(ValueError, match=expected):
        make()


def test_a_scale_does_not_grow_beyond_what_has_an_inverse():
    """The inverse of 2**127 is not a normal number: gradients would become zero unnoticed."""
    scale = nnx.DynamicLossScale(2.0**125, period=1)
    for _ in range(3):
        scale.adjust(jnp.array(True))
    assert float(scale.unscale(jnp.float32(2.0**126))) == 1.0
