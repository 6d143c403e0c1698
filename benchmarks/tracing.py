"""What JAX has to wait for before it can compile: running the step once with tracers."""

from __future__ import annotations

import jax.numpy as jnp
import optax

from benchmarks.harness import Budget, Prepared, Sampler, case
from benchmarks.models import library, next_token_step, transformer

LAYERS = 12
TOKENS = jnp.arange(18).reshape(2, 9)


def traced(name: str, layers: int = LAYERS) -> Sampler:
    """A step that was never seen before, traced for the same model and optimizer."""
    nnx = library(name)
    model = transformer(nnx, layers)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    return Prepared(
        lambda: nnx.jit(next_token_step(nnx)), lambda step: step.trace(model, optimizer, TOKENS)
    )


@case("tracing", f"train step of a {LAYERS}-layer transformer", Budget(0.7, "flax"))
def train_step():
    """Embedding tied, Adam: gradients, updates and all."""
    return {"nnxlite": lambda: traced("nnxlite"), "flax": lambda: traced("flax")}
