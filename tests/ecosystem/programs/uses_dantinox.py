"""Trains a small transformer of the package, and continues a text with its cache."""

import dantinox
import jax
import optax
from clock import report, train
from dantinox.paradigms.ar import ARParadigm
from flax import nnx

config = dantinox.ModelConfig(
    paradigm="ar", dim=16, n_heads=2, head_size=8, num_blocks=4, vocab_size=32, max_context=16
)
paradigm = ARParadigm(config)
model = paradigm.build_model(nnx.Rngs(0))
tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, 32)
x, y = tokens[:, :-1], tokens[:, 1:]


def loss_of(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x).logits, y).mean()


step, losses = train(model, optax.adamw(1e-3), loss_of, x, y)
report(step, losses, model(x).logits[0, -1])
