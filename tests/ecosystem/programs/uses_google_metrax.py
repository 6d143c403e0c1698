"""Updates metrics of the package in each step of an evaluation, by its NNX wrappers."""

import jax
import metrax.nnx
from clock import report

labels = jax.random.bernoulli(jax.random.key(0), shape=(64,)).astype(float)
predictions = jax.random.uniform(jax.random.key(1), (64,))
metrics = [metrax.nnx.MSE(), metrax.nnx.RMSE(), metrax.nnx.Precision(), metrax.nnx.Recall()]


def step():
    for metric in metrics:
        metric.update(predictions=predictions, labels=labels)
    return [metric.compute() for metric in metrics]


values = [step() for _ in range(5)]
for metric in metrics:
    metric.reset()
report(step, values, step())
