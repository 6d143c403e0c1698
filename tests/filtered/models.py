"""Models that the tests of filtered trees and transforms share."""

import jax.numpy as jnp

import nnxlite as nnx


class Tied(nnx.Module):
    """A layer in two places, arrays beside Variables, arrays that are not differentiated."""

    def __init__(self, seed: int = 0):
        self.first = nnx.Linear(3, 3, rngs=nnx.Rngs(seed))
        self.second = self.first
        self.scale = jnp.ones(3)
        self.steps = jnp.arange(2)
        self.parts = [nnx.BatchStat(jnp.zeros(3)), jnp.ones(2)]
        self.rate = 0.5

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x))) * self.scale
