"""The small transformer that the tests put on meshes, and its training step."""

from __future__ import annotations

import typing as tp

import numpy as np
import optax

import nnxlite as nnx

WIDTH, VOCABULARY = 32, 64
TOKENS = np.random.RandomState(0).randint(0, VOCABULARY, (8, 9))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Decoder(nnx.Module):
    """Embedding, blocks, head; with dropout, so that it has random streams."""

    def __init__(self, rngs: nnx.Rngs, blocks: int = 1) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@nnx.jit
def build() -> tuple[Decoder, nnx.Optimizer[tp.Any]]:
    model = Decoder(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def next_token_loss(model, tokens):
    # With labels in place of one-hot vectors, JAX 0.12 has no gradient on explicit axes.
    labels = nnx.one_hot(tokens[:, 1:], VOCABULARY)
    return optax.softmax_cross_entropy(model(tokens[:, :-1]), labels).mean()


def make_step(loss_fn=next_token_loss) -> tuple[tp.Callable[..., tp.Any], list[int]]:
    """A jitted training step, and a list that grows by one with each trace of it."""
    traced: list[int] = []

    @nnx.jit
    def step(model, optimizer, batch):
        traced.append(1)
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return step, traced
