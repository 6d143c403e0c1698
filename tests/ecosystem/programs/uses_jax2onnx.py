"""Exports a network to ONNX, and runs it by the reference runtime of the package `onnx`."""

import jax
import jax.numpy as jnp
import numpy as np
from clock import report
from flax import nnx
from jax2onnx import to_onnx
from onnx.reference import ReferenceEvaluator


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, 8, 4, rngs=rngs, decode=False)
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        x = self.attention(x.reshape(x.shape[0], -1, 4))
        return self.out(nnx.gelu(x.mean(axis=1)))


model = Network(nnx.Rngs(0))
x = np.asarray(jax.random.normal(jax.random.key(1), (2, 6, 6, 1)))
exported = to_onnx(model, [(2, 6, 6, 1)])
(y,) = ReferenceEvaluator(exported).run(None, {exported.graph.input[0].name: x})
assert jnp.allclose(y, model(x), atol=1e-4)
kinds = sorted(node.op_type for node in exported.graph.node)
numbers = [len(kinds), *(sum(map(ord, kind)) for kind in kinds)]
report(lambda: to_onnx(model, [(2, 6, 6, 1)]) and None, numbers, y, model(x))
