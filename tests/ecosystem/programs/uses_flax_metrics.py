"""Updates precision, recall and a mean in each step of an evaluation, as its users do."""

import jax
from clock import report
from flax import nnx
from flax_metrics import Accuracy, MeanSquaredError, Precision, Recall

metrics = nnx.List([Precision(), Recall(), MeanSquaredError(), Accuracy()])
labels = jax.random.bernoulli(jax.random.key(0), shape=(64,)).astype(int)
logits = jax.random.normal(jax.random.key(1), (64,))


@nnx.jit
def step(metrics, labels, logits):
    precision, recall, error, accuracy = metrics
    precision.update(labels=labels, logits=logits)
    recall.update(labels=labels, logits=logits)
    error.update(target=labels, prediction=logits)
    accuracy.update(labels=labels, logits=logits)
    return [metric.compute() for metric in metrics]


values = [step(metrics, labels, logits) for _ in range(5)]
for metric in metrics:
    metric.reset()
report(lambda: step(metrics, labels, logits), values, step(metrics, labels, logits))
