"""Quantizes a network for training, trains it, and serves it with integers."""

import jax
import optax
import qwix
from clock import report, train
from flax import nnx


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(6)])
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.last(x)


x = jax.random.normal(jax.random.key(1), (8, 16))
y = jax.random.normal(jax.random.key(2), (8, 4))
rules = [qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8")]
model = qwix.quantize_model(Network(nnx.Rngs(0)), qwix.QtProvider(rules), x)
loss_of = lambda model, x, y: ((model(x) - y) ** 2).mean()
step, losses = train(model, optax.adam(1e-3), loss_of, x, y)

rules = [qwix.QuantizationRule(module_path=".*", weight_qtype="int8")]
served = qwix.quantize_model(Network(nnx.Rngs(0)), qwix.PtqProvider(rules), x)
report(step, losses, model(x), served(x))
