"""Random numbers and initializers that compile next to nothing: most of a test's time goes to that."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=0):
    """Normal numbers, the same for one seed."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def quick(key, shape, dtype=jnp.float32):
    """An initializer; like any other it depends on the key it is given, which may be traced."""
    data = jax.random.key_data(key)
    traced = isinstance(data, jax.core.Tracer)
    lib, data = (jnp, data) if traced else (np, np.asarray(data))
    start = data.sum(dtype="uint32") % 1000
    values = lib.sin(start + 1.7 * lib.arange(math.prod(shape), dtype="float32"))
    return jnp.asarray(values.reshape(shape) / 2, dtype)


QUICK = {"kernel_init": quick, "bias_init": quick}
