"""What the programs share: a usual training step, its time, and the line printed at the end."""

import json
import os
import statistics
import time

import jax
import optax
from flax import nnx

SECONDS = float(os.environ.get("ECOSYSTEM_SECONDS", "1.5"))


def report(step, *numbers):
    """Times a step (the median of its calls, after ten to warm up) and prints one line of JSON.

    `numbers` are arrays, or trees of them: what the two implementations are compared by.
    """
    values = [float(x) for leaf in jax.tree.leaves(numbers) for x in jax.numpy.ravel(leaf)]
    for _ in range(10):
        jax.block_until_ready(step())
    times, end = [], time.perf_counter() + SECONDS
    while len(times) < 10 or time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready(step())
        times.append(time.perf_counter() - start)
    print(json.dumps({"numbers": values, "ms": 1e3 * statistics.median(times)}))


def cross_entropy(model, x, labels):
    """The loss of a classifier."""
    return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()


def train(model, tx, loss_of, *data, steps=20):
    """Trains a model for some steps: a step to be timed, and the losses, which fall."""
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, *data):
        loss, grads = nnx.value_and_grad(loss_of)(model, *data)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, *data) for _ in range(steps)]
    assert losses[-1] < losses[0]
    return lambda: step(model, optimizer, *data), losses
