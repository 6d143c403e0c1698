"""The models that are measured, written once for nnxlite and flax, whose modules read alike."""

from __future__ import annotations

import importlib
import typing as tp
from types import ModuleType

import jax
import jax.numpy as jnp
import optax

WIDTH = 8  # small arrays, so that what is measured is the library and not the arithmetic

LIBRARIES = {"nnxlite": "nnxlite", "flax": "flax.nnx"}


def library(name: str) -> tp.Any:
    """The module that programs call `nnx`."""
    module: ModuleType = importlib.import_module(LIBRARIES[name])
    return module


def block_stack(nnx: tp.Any, blocks: int) -> tp.Any:
    """`blocks` times Linear, BatchNorm and relu: six arrays each."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

        def __call__(self, x):
            return nnx.relu(self.norm(self.linear(x)))

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    return Stack(nnx.Rngs(0))


def with_adam(nnx: tp.Any, blocks: int) -> tuple[tp.Any, tp.Any]:
    """A stack and its optimizer: 14 arrays in each block and two counts."""
    model = block_stack(nnx, blocks)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def train_body(nnx: tp.Any):
    """One training step, which writes every array of `with_adam`."""

    def body(model, optimizer, x, y):
        def loss_of(model):
            return jnp.mean((model(x) - y) ** 2)

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    return body


def read_mostly(nnx: tp.Any, count: int) -> tp.Any:
    """`count` Variables, of which a call reads all and writes the one named `calls`."""

    class ReadMostly(nnx.Module):
        def __init__(self):
            self.weights = nnx.List([nnx.Param(jnp.ones(4)) for _ in range(count - 1)])
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    return ReadMostly()


def read_mostly_body(model: tp.Any, x: jax.Array) -> jax.Array:
    """The sum of all weights times `x`; counts the call."""
    model.calls[...] = model.calls[...] + 1
    total = x
    for weight in model.weights:
        total = total + x * weight[...]
    return total


def linears(nnx: tp.Any, count: int) -> tp.Any:
    """A module of `count` Linears, built without drawing random numbers."""
    kernel, bias = jnp.zeros((WIDTH, WIDTH)), jnp.zeros(WIDTH)

    class Tower(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List(
                [
                    nnx.Linear(
                        WIDTH,
                        WIDTH,
                        kernel_init=lambda *_: kernel,
                        bias_init=lambda *_: bias,
                        rngs=rngs,
                    )
                    for _ in range(count)
                ]
            )

    return Tower(nnx.Rngs(0))


def dense_chain(nnx: tp.Any, depth: int = 3) -> tp.Any:
    """`depth` dense layers written with bare operators, so that a transform is all that is left."""

    class Dense(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / WIDTH)
            self.bias = nnx.Param(jnp.zeros(WIDTH))

        def __call__(self, x):
            return jnp.tanh(x @ self.kernel[...] + self.bias[...])

    class Chain(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Dense(rngs) for _ in range(depth)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    return Chain(nnx.Rngs(0))


def dense_leaves(depth: int = 3) -> list[jax.Array]:
    """The arrays of `dense_chain`: kernel and bias in turn."""
    keys = jax.random.split(jax.random.key(0), depth)
    kernels = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH for key in keys]
    return [leaf for kernel in kernels for leaf in (kernel, jnp.zeros(WIDTH))]


def dense_forward(leaves: list[jax.Array], x: jax.Array) -> jax.Array:
    """What `dense_chain` computes."""
    for kernel, bias in zip(leaves[::2], leaves[1::2], strict=True):
        x = jnp.tanh(x @ kernel + bias)
    return x


def wide(nnx: tp.Any, variables: int) -> tp.Any:
    """`variables` small Variables, two in each of many modules, and a count."""
    value = jnp.ones(2)

    class Pair(nnx.Module):
        def __init__(self):
            self.left = nnx.Param(value)
            self.right = nnx.Param(value)

    class Wide(nnx.Module):
        def __init__(self):
            self.pairs = nnx.List([Pair() for _ in range(variables // 2)])
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
            self.mark = 0

    return Wide()


def chain(nnx: tp.Any, modules: int) -> tp.Any:
    """`modules` modules with one small Variable each, one inside the other, and a count on top."""
    value = jnp.ones(2)

    class Link(nnx.Module):
        def __init__(self, inner):
            self.inner = inner
            self.scale = nnx.Param(value)

    class Top(nnx.Module):
        def __init__(self):
            inner = None
            for _ in range(modules):
                inner = Link(inner)
            self.inner = inner
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
            self.mark = 0

    return Top()


def repeated(nnx: tp.Any, item: tp.Any, times: int) -> tp.Any:
    """A module whose list holds one and the same object `times` times, and a count."""

    class Repeated(nnx.Module):
        def __init__(self):
            self.items = nnx.List([item] * times)
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
            self.mark = 0

    return Repeated()


def transformer(nnx: tp.Any, layers: int) -> tp.Any:
    """A decoder over 32 tokens: attention and two dense layers in each of its layers."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.before = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
            self.between = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x, mask):
            x = x + self.attention(self.before(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.between(x))))

    class Transformer(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(layers)])
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

        def __call__(self, tokens):
            x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
            for layer in self.layers:
                x = layer(x, mask)
            return self.embed.attend(self.norm(x))  # the embedding is tied

    return Transformer(nnx.Rngs(0))


def next_token_step(nnx: tp.Any) -> tp.Any:
    """One training step of `transformer`, a new function each time."""

    def step(model, optimizer, tokens):
        def loss_of(model):
            logits = model(tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    return step
