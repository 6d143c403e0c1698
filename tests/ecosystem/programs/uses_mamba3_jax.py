"""Trains a small Mamba-3 language model on one batch."""

import jax
import jax.numpy as jnp
import optax
from clock import report, train
from flax import nnx
from mamba3_jax import Mamba3Config, Mamba3ForCausalLM

config = Mamba3Config.tiny()
model = Mamba3ForCausalLM(config, rngs=nnx.Rngs(0))
tokens = jax.random.randint(jax.random.key(1), (1, 8), 0, config.vocab_size)
loss_of = lambda model, tokens: model(tokens, labels=tokens)["loss"]
step, losses = train(model, optax.adamw(1e-3), loss_of, tokens)
report(step, losses, jnp.sum(model(tokens)["logits"]))
