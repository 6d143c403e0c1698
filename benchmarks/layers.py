"""Layers whose arithmetic counts: attention, a recurrent cell, a decoding step with a cache.

All are jitted. The limit is traced from nnxlite's own layer and called with a flat list of arrays, so
what it lacks is the objects; flax's layer may compute differently.
"""

from __future__ import annotations

import typing as tp
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.harness import Budget, Calls, Sampler, case
from benchmarks.models import library

BATCH, LENGTH, FEATURES, HEADS = 4, 64, 64, 4
BESIDE = Budget(1.0, "flax")
XS = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, FEATURES))

Layer = Callable[[tp.Any], tuple[tp.Any, Callable[..., tp.Any], tuple[jax.Array, ...]]]
"""Given a library: a layer, the function to be jitted, and what it is called with beside the layer."""


def jitted(name: str, build: Layer) -> Sampler:
    """The function under `nnx.jit`, called with the layer."""
    nnx = library(name)
    layer, function, args = build(nnx)
    step = nnx.jit(function)
    return Calls(lambda: jax.block_until_ready(step(layer, *args)))


def flat(build: Layer) -> Sampler:
    """The limit: the same program under `jax.jit`, called with the leaves."""
    nnx = library("nnxlite")
    layer, function, args = build(nnx)
    graphdef, state = nnx.split(layer)
    leaves, treedef = jax.tree.flatten(state)

    @jax.jit
    def step(leaves, *args):
        layer = nnx.merge(graphdef, treedef.unflatten(leaves))
        out = function(layer, *args)
        return out, jax.tree.leaves(nnx.state(layer, nnx.Cache))

    return Calls(lambda: jax.block_until_ready(step(leaves, *args)))


def register(name: str, build: Layer) -> None:
    """A case for one layer in both libraries."""

    @case("layers", name, BESIDE)
    def contenders():
        return {
            "limit": lambda: flat(build),
            "nnxlite": lambda: jitted("nnxlite", build),
            "flax": lambda: jitted("flax", build),
        }


def attention(nnx: tp.Any):
    """Self-attention, causal by a mask."""
    layer = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0))
    mask = nnx.make_causal_mask(jnp.ones((BATCH, LENGTH)))
    return layer, lambda layer, x: layer(x, mask=mask), (XS,)


def attention_gradient(nnx: tp.Any):
    """The gradient of it by all parameters."""
    layer, forward, args = attention(nnx)
    loss = lambda layer, x: jnp.sum(forward(layer, x) ** 2)
    return layer, lambda layer, x: nnx.grad(loss)(layer, x), args


def decoding(nnx: tp.Any):
    """One token with the keys and values of all before it; the cache is written and rewound."""
    layer = nnx.MultiHeadAttention(HEADS, FEATURES, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache(XS.shape)

    def step(layer, x):
        layer.cache_index[...] = jnp.zeros_like(layer.cache_index[...])  # never past the end
        return layer(x)

    return layer, step, (XS[:, :1],)


def recurrence(cell: str) -> Layer:
    """A cell run over a sequence."""

    def build(nnx: tp.Any):
        rngs = nnx.Rngs(0)
        layer = nnx.RNN(getattr(nnx, cell)(FEATURES, FEATURES, rngs=rngs), rngs=rngs)
        return layer, lambda layer, x: layer(x), (XS,)

    return build


register("attention", attention)
register("attention, gradient", attention_gradient)
register("decoding step with a cache", decoding)
register("RNN(LSTMCell)", recurrence("LSTMCell"))


@case("layers", "RNN(OptimizedLSTMCell)", BESIDE, Budget(1.0, "LSTMCell"))
def optimized():
    """All four gates in one product; `LSTMCell` makes four of them."""
    build = recurrence("OptimizedLSTMCell")
    return {
        "limit": lambda: flat(build),
        "nnxlite": lambda: jitted("nnxlite", build),
        "flax": lambda: jitted("flax", build),
        "LSTMCell": lambda: jitted("nnxlite", recurrence("LSTMCell")),
    }
