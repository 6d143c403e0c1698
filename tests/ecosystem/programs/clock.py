"""What the programs share: the time of a step, and the line that is printed at the end."""

import json
import os
import statistics
import time

import jax

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
