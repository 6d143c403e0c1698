"""What type checkers infer of optimizers, metrics and what else training needs."""

from __future__ import annotations

import typing as tp
from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import nnxlite as nnx

State: tp.TypeAlias = nnx.State[tp.Any, tp.Any]

x, y = jnp.ones((4, 2)), jnp.ones((4, 3))
model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
assert_type(optimizer, nnx.Optimizer[nnx.Linear])
assert_type(optimizer.step, nnx.OptState[jax.Array])
assert_type(optimizer.step.value, jax.Array)


@nnx.jit
def train_step(
    model: nnx.Linear, optimizer: nnx.Optimizer[nnx.Linear], x: jax.Array, y: jax.Array
) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    assert_type(grads, State)
    assert_type(optimizer.update(model, grads), State)
    return loss


assert_type(train_step(model, optimizer, x, y), jax.Array)
both = nnx.ModelAndOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)
assert_type(both.model, nnx.Linear)

metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
assert_type(metrics.compute(), dict[str, tp.Any])
assert_type(nnx.metrics.Average().compute(), jax.Array)
assert_type(nnx.metrics.Welford().compute(), nnx.metrics.Statistics)
assert_type(nnx.metrics.Welford().compute().mean, jax.Array)
assert issubclass(nnx.metrics.Average, nnx.Metric)

assert_type(nnx.freeze(model, nnx.PathContains("kernel")), None)
assert_type(nnx.unfreeze(model), None)
assert_type(nnx.Frozen()(("kernel",), model.kernel), bool)
if tp.TYPE_CHECKING:  # what needs files, and further packages
    linear = nnx.checkpoint.Rule("fc.weight", "kernel", "o i -> i o")
    mapping = nnx.checkpoint.Mapping([linear, nnx.checkpoint.Ignore("**.mask")])
    assert_type(
        mapping.load({"fc.weight": x}, model, strict=False, only=nnx.Param), nnx.checkpoint.Report
    )
    assert_type(mapping.export(model), dict[str, tp.Any])
    assert_type(nnx.save_safetensors("model.safetensors", model, mapping=mapping), None)
    report = nnx.load_safetensors("model.safetensors", model, mapping=mapping)
    assert_type(report, nnx.checkpoint.Report)
    assert_type(report.restored, tuple[str, ...])
assert_type(nnx.cast(model, "bfloat16", keep=nnx.PathContains("bias")), None)
policy = nnx.Policy(compute="bfloat16")
assert_type(policy.apply(model), None)
assert_type(policy.cast_output(x), jax.Array)
assert_type(nnx.lora.inject(model, nnx.Linear, rank=2, rngs=nnx.Rngs(0)), None)
assert_type(nnx.lora.merge(model), None)
averages = nnx.EMA(model, 0.9)
assert_type(averages.apply_to(model), nnx.Linear)
assert_type(averages.params, State)

graphdef, params = nnx.split(model)
tx = optax.sgd(0.1)
train_state: nnx.TrainState[nnx.Linear] = nnx.TrainState.create(graphdef, params=params, tx=tx)
assert_type(train_state, nnx.TrainState[nnx.Linear])
assert_type(train_state.params, State)
assert_type(train_state.apply_gradients(params), nnx.TrainState[nnx.Linear])

run = nnx.training.loop(3, evaluate=lambda: {"loss": 0.5}, progress=False)
assert_type(run, nnx.training.Loop)
for step in run:
    assert_type(step, nnx.training.Step)
    assert_type(step.number, int)
    assert_type(step.every(2), bool)
    step.log(loss=x.sum())
assert_type(run.history, list[dict[str, tp.Any]])
with nnx.training.interruptible() as stop:
    assert_type(stop, nnx.training.Stop)
if tp.TYPE_CHECKING:
    manager = nnx.checkpoint.Manager("folder")
    assert_type(nnx.training.resume(manager, model=model), int)
    nnx.training.loop(3, checkpoints=manager, items={"model": model})
