"""Random numbers and initializers that compile nothing: most of a test's time goes to that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=0):
    """Normal numbers, the same for one seed."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def quick(key, shape, dtype=jnp.float32):
    """An initializer; like any other it depends on the key it is given."""
    return jnp.asarray(normal(*shape, seed=np.asarray(jax.random.key_data(key))), dtype)


QUICK = {"kernel_init": quick, "bias_init": quick}
