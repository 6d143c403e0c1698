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


def parts():
    model = Model()
    return model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param), nnx.DynamicLossScale()


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
    assert (scale.scale(2.0), scale.unscale(2.0), scale.scale(3)) == (16.0, 0.25, 3)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), complex(0, float("inf")), np.inf])
def test_all_finite_reads_arrays_and_numbers_of_python_and_numpy(bad):
    numbers = np.float32(np.real(bad) * np.nan), np.array([1, bad]), jnp.array([1.0, bad])
    for value in (bad, *numbers):
        assert not nnx.all_finite({"a": 1.0, "b": value})
    assert nnx.all_finite(()) and nnx.all_finite([jnp.ones(2), jnp.array(1)])
    assert nnx.all_finite([1.0, 1e300, 2, True, np.array([1.0, 1e300]), np.array([10**12])])


def test_a_finite_step_is_the_plain_step_and_one_with_overflow_lowers_the_scale():
    model, optimizer, loss_scale = parts()
    assert train_step(model, optimizer, loss_scale, jnp.array([0.5, 0.25]))
    np.testing.assert_array_equal(model.w.value, [0.5, 0.75])
    assert optimizer.step.value == 1 and loss_scale.good_steps.value == 1
    assert not train_step(model, optimizer, loss_scale, jnp.array([100.0, 1.0]))
    assert optimizer.step.value == 1 and loss_scale.scale_value.value == 2.0**14
    while not train_step(model, optimizer, loss_scale, jnp.array([100.0, 1.0])):
        pass
    assert loss_scale.scale_value.value == 2.0**9 and optimizer.step.value == 2


def test_the_scale_rises_after_a_period_and_keeps_its_floor():
    loss_scale = nnx.DynamicLossScale(4.0, period=2, factor=4.0, smallest=2.0)
    for finite, scale, good in [
        (True, 4, 1), (True, 16, 0), (True, 16, 1), (False, 4, 0), (False, 2, 0), (True, 2, 1)
    ]:  # fmt: skip
        loss_scale.adjust(jnp.array(finite))
        assert (loss_scale.scale_value.value, loss_scale.good_steps.value) == (scale, good)


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
    scale = nnx.DynamicLossScale(3e38, period=1)
    scale.adjust(jnp.array(True))
    assert scale.scale_value.value == jnp.float32(3e38)


class Forgetful(nnx.Module):
    """Writes all kinds of state in a call."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))
        self.pair = nnx.Variable({"a": jnp.zeros(2), "b": (jnp.zeros(()),)})
        self.linear = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x):
        self.calls[...] += 1
        self.pair.set_value({"a": x.sum(0), "b": (x.sum(),)})
        self.sow(nnx.Intermediate, "seen", x.sum())
        return self.linear(self.dropout(self.norm(x)))


@pytest.mark.parametrize(
    ("jitted", "kind", "bad"),
    [
        (True, nnx.StaticLossScale, jnp.nan),
        (True, nnx.DynamicLossScale, jnp.inf),
        (False, nnx.DynamicLossScale, 1e30),
    ],
)
def test_law_8_a_skipped_step_restores_everything(jitted, kind, bad):
    model, metric = Forgetful(nnx.Rngs(0)), nnx.metrics.Average()
    optimizer, scale = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), kind(4.0)

    def loss_fn(model, metric, x):
        loss = (model(x) ** 2).sum() * jnp.where(x.max() > 1e20, jnp.inf, 1.0)
        metric.update(values=loss)
        return loss, x.sum()

    def step(model, metric, optimizer, scale, x):
        (loss, aux), grads = scale.value_and_grad(loss_fn, has_aux=True)(model, metric, x)
        nnx.pop(model, nnx.Intermediate)
        return scale.step(optimizer, model, grads)

    step = nnx.jit(step) if jitted else step
    x = jax.random.normal(jax.random.key(0), (4, 2))
    items = {"model": model, "metric": metric, "optimizer": optimizer}
    assert step(model, metric, optimizer, scale, x)
    before = jax.tree.map(jnp.copy, nnx.state(items, nnx.Not(nnx.RngState)))
    counts = [int(c[...]) for _, c in nnx.iter_graph(model) if isinstance(c, nnx.RngCount)]
    assert not step(model, metric, optimizer, scale, x.at[0].set(bad))
    after = nnx.state(items, nnx.Not(nnx.RngState))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert counts == [int(c[...]) for _, c in nnx.iter_graph(model) if isinstance(c, nnx.RngCount)]
    assert step(model, metric, optimizer, scale, x) and model.calls[...] == 2
    assert optimizer.step[...] == 2 and metric.count[...] == 2


@pytest.mark.parametrize(
    ("dtype", "tx"), [("float16", optax.adam(0.1)), ("bfloat16", optax.sgd(0.1, momentum=0.9))]
)
def test_steps_keep_the_dtypes_of_the_optimizer(dtype, tx):
    """Gradients in float32 made float32 of moments in float16: `scan` refuses that."""
    model = nnx.Linear(2, 1, param_dtype=dtype, rngs=nnx.Rngs(0))
    optimizer, scale = nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.DynamicLossScale(2.0**4)
    forms = nnx.as_abstract(nnx.state(optimizer))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def steps(carry, x):
        model, optimizer, scale = carry
        loss, grads = scale.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        return carry, scale.step(optimizer, model, grads)

    _, taken = steps((model, optimizer, scale), jnp.ones((3, 4, 2), dtype))
    assert taken.all() and optimizer.step[...] == 3
    assert not nnx.diff(forms, nnx.state(optimizer))


@pytest.mark.parametrize("has_aux", [False, True])
def test_the_loss_is_the_loss_itself_and_gradients_are_scaled(has_aux):
    model, scale = nnx.Dict(w=nnx.Param(jnp.ones(2))), nnx.DynamicLossScale(8.0)

    def loss_fn(model):
        loss = (3.0 * model.w[...]).sum()
        return (loss, "aux") if has_aux else loss

    loss, grads = scale.value_and_grad(loss_fn, has_aux=has_aux)(model)
    assert loss == ((6.0, "aux") if has_aux else 6.0) and (grads.w[...] == 24.0).all()
    with pytest.raises(TypeError, match="With has_aux=True test_the_loss_is.*must return a pair"):
        scale.value_and_grad(lambda m: m.w.sum(), has_aux=True)(model)
