"""A mixture of experts on several devices: a layer to copy.

As in GShard (Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668), an expert has places for a number
of tokens of each group, so that shapes are known, and the program has two all-to-alls.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import nnxlite as nnx


class MoE(nnx.Module):
    """Each token, of (groups, tokens, features), passes through one of many two-layer networks.

    A token without a place at its expert becomes zero: add the result to the input. `load` is the part
    of the tokens that chose each expert, `dropped` the part that found no place, and `balance_loss` is
    one where the load is even (Switch Transformers, Fedus et al. 2021, arXiv:2101.03961).

    Args:
        features: size of the last axis, and width of an expert.
        experts: number of experts; they lie along the mesh axis "expert", and so do groups.
        capacity: an expert has places for `capacity * tokens / experts` tokens of a group.
        rngs: the source of random keys.
    """

    def __init__(self, features: int, experts: int, capacity: float, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Param(0.02 * rngs.params.normal((features, experts)))
        self.up = nnx.Param(init(rngs.params(), (experts, features, features)))
        self.down = nnx.Param(init(rngs.params(), (experts, features, features)))
        self.capacity = capacity
        self.load = nnx.Variable(jnp.zeros(experts))
        self.dropped = nnx.Variable(jnp.zeros(()))
        self.balance_loss = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        experts = self.router.shape[1]
        probabilities = jax.nn.softmax(x @ self.router)
        choice = jax.nn.one_hot(probabilities.argmax(-1), experts)  # (groups, tokens, experts)
        gate = (choice * probabilities).sum(-1)
        before = jnp.cumsum(choice, 1) - choice  # how many tokens of the group are in front
        place = (before * choice).sum(-1).astype(jnp.int32)
        capacity = math.ceil(self.capacity * x.shape[1] / experts)
        places = jax.nn.one_hot(place, capacity)  # zeros beyond the capacity
        self.load[...] = choice.mean((0, 1))
        self.dropped[...] = 1 - places.sum(-1).mean()
        self.balance_loss[...] = experts * (self.load * probabilities.mean((0, 1))).sum()

        sent = jnp.einsum("gse,gsc->gsec", choice, places)
        tokens = moved(jnp.einsum("gsec,gsf->egcf", sent, x), 1, 0)
        hidden = nnx.gelu(jnp.einsum("egcf,efh->egch", tokens, self.up[...]))
        tokens = moved(jnp.einsum("egch,ehf->egcf", hidden, self.down[...]), 0, 1)
        return jnp.einsum("gsec,egcf->gsf", sent * gate[..., None, None], tokens)


def moved(x: jax.Array, before: int, after: int) -> jax.Array:
    """An array that is divided along another axis than before: an all-to-all."""
    for axis in (before, after):
        x = jax.lax.with_sharding_constraint(x, P(*(None,) * axis, "expert"))
    return x
