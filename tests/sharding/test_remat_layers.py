"""Remat by path: gradients stay, and what is computed again is what the policies say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx
from tests.nn.quick import QUICK, normal

X = jnp.asarray(normal(2, 4))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, **QUICK, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x, wave=False):
        self.calls[...] += 1
        return jnp.sin(self.linear(x)) if wave else x


class Net(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List(Block(nnx.Rngs(i)) for i in range(3))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x, wave=True)
        return x


def loss_of(model, x):
    return jnp.sum(model(x) ** 2)


def test_what_is_computed_again_by_path():
    def recomputed(policies):
        """How many products a gradient computes, and how many calls of it compute again."""
        text = str(nnx.make_jaxpr(nnx.grad(nnx.remat_layers(loss_of, policies)))(Net(), X))
        return text.count("dot_general["), text.count("policy=")

    dots = jax.checkpoint_policies.dots_saveable
    products = str(nnx.make_jaxpr(nnx.grad(loss_of))(Net(), X)).count("dot_general[")
    assert recomputed({"blocks.*": None}) == (products + 3, 3)
    assert recomputed({"blocks.1": None}) == (products + 1, 1)
    assert recomputed({"blocks.*": dots}) == (products, 3)
    assert recomputed({"blocks.0": None, "blocks.*": dots}) == (products + 1, 3)


def test_gradients_and_what_is_written_stay():
    other = Net()
    expected = nnx.jit(nnx.grad(loss_of))(Net(), X)
    grads = nnx.jit(nnx.grad(nnx.remat_layers(loss_of, {"blocks.*": None})))(other, X)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert [int(b.calls[...]) for b in other.blocks] == [1, 1, 1]
    assert "observed" not in str(Block.__call__)
