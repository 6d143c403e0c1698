"""What type checkers infer of what generates tokens."""

from __future__ import annotations

import typing as tp
from typing import assert_type

import jax
import jax.numpy as jnp

import nnxlite as nnx


class Next(nnx.Module):
    """After each token the next one."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits."""
        return nnx.one_hot(tokens + 1, 10)


out = nnx.generate(Next(), [3, 4], 3)
assert_type(out, nnx.Generated)
assert_type(out.tokens, jax.Array)
assert_type(out.lists(), list[tp.Any])
beams = nnx.generate(Next(), [3, 4], 3, beams=2, length_penalty=1.0)
assert_type(beams.scores, jax.Array | None)
sampler = nnx.Sampler(temperature=0.5, top_k=3)
assert_type(sampler(jnp.ones(4), jax.random.key(0)), jax.Array)
assert_type(nnx.sampling.top_p(jnp.ones(4), 0.5), jax.Array)
nnx.generate(Next(), [[3], [4, 5]], 3, sampler=sampler, rngs=nnx.Rngs(0), stop=[1, 2])
