"""Trains a small Mamba-2 language model on one batch."""

import jax
import jax.numpy as jnp
import optax
from clock import report
from flax import nnx
from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

config = Mamba2Config.tiny()
model = Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
tokens = jax.random.randint(jax.random.key(1), (1, 8), 0, config.vocab_size)


@nnx.jit
def step(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(lambda model: model(tokens, labels=tokens)["loss"])(model)
    optimizer.update(model, grads)
    return loss


losses = [step(model, optimizer, tokens) for _ in range(20)]
assert losses[-1] < losses[0]
report(lambda: step(model, optimizer, tokens), losses, jnp.sum(model(tokens)["logits"]))
