"""Trains a small transformer of the package, and continues a text with its cache."""

import dantinox
import jax
import optax
from clock import report
from dantinox.paradigms.ar import ARParadigm
from flax import nnx

config = dantinox.ModelConfig(
    paradigm="ar", dim=16, n_heads=2, head_size=8, num_blocks=4, vocab_size=32, max_context=16
)
paradigm = ARParadigm(config)
model = paradigm.build_model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, 32)


@nnx.jit
def step(model, optimizer, x, y):
    def loss_of(model):
        logits = model(x).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


x, y = tokens[:, :-1], tokens[:, 1:]
losses = [step(model, optimizer, x, y) for _ in range(20)]
assert losses[-1] < losses[0]
report(lambda: step(model, optimizer, x, y), losses, model(x).logits[0, -1])
