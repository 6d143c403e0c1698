"""Every layer once, small, for the tests that go through all of them.

Most map an array of shape (2, 3, 4) to one of the same shape, so that they can be stacked.
"""

from __future__ import annotations

import math
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx
from tests.nn.quick import normal

X = jnp.asarray(normal(2, 3, 4))
STEP = jnp.asarray(normal(2, 1, 4))
NUMBERS = jnp.asarray(np.array([[0, 2, 1], [3, 3, 0]], np.int32))


def spread(key, shape, dtype=jnp.float32):
    """An initializer that depends on its key, and compiles to next to nothing."""
    start = jax.random.key_data(key).sum() % 1000
    return jnp.sin(start + 1.7 * jnp.arange(math.prod(shape))).reshape(shape).astype(dtype) / 2


INITS = {"kernel_init": spread, "bias_init": spread}
AFFINE = {"scale_init": spread, "bias_init": spread}
THIN = {"a_initializer": spread, "b_initializer": spread}


def call(layer, x):
    """A plain call."""
    return layer(x)


def first_step(cell, x):
    """A step of an RNN cell from its first carry."""
    return cell(cell.initialize_carry(x.shape), x)


class Layer(tp.NamedTuple):
    """How a layer is made, what it is called with, and how.

    A gradient that takes part of the computation for constant is not exact.
    """

    make: tp.Callable[[nnx.Rngs], tp.Any]
    x: jax.Array = X
    run: tp.Callable[[tp.Any, tp.Any], tp.Any] = call
    exact_gradient: bool = True


def mlp(rngs):
    return nnx.MLP(4, 4, 4, 1, norm=nnx.BatchNorm, dropout_rate=0.4, **INITS, rngs=rngs)


def sequential(rngs):
    linear = nnx.Linear(4, 4, **INITS, rngs=rngs)
    return nnx.Sequential(linear, nnx.gelu, nnx.Dropout(0.3, rngs=rngs), linear)  # one layer twice


def attention(rngs, **options):
    return nnx.MultiHeadAttention(2, 4, decode=False, **INITS, **options, rngs=rngs)


def decoding(rngs):
    layer = nnx.MultiHeadAttention(2, 4, decode=True, **INITS, rngs=rngs)
    layer.init_cache((2, 3, 4))
    return layer


def cell(kind, rngs, **options):
    return kind(4, 4, recurrent_kernel_init=spread, **INITS, **options, rngs=rngs)


def bidirectional(rngs):
    forward, backward = cell(nnx.LSTMCell, rngs), cell(nnx.SimpleCell, rngs)
    return nnx.Bidirectional(nnx.RNN(forward), nnx.RNN(backward))


LAYERS = {
    "Linear": Layer(lambda rngs: nnx.Linear(4, 4, **INITS, rngs=rngs)),
    "LinearGeneral": Layer(
        lambda rngs: nnx.LinearGeneral((3, 4), (3, 4), axis=(-2, -1), **INITS, rngs=rngs)
    ),
    "Einsum": Layer(lambda rngs: nnx.Einsum("btf,fg->btg", (4, 4), (4,), **INITS, rngs=rngs)),
    "Embed": Layer(lambda rngs: nnx.Embed(4, 4, embedding_init=spread, rngs=rngs), NUMBERS),
    "Conv": Layer(lambda rngs: nnx.Conv(4, 4, (3,), feature_group_count=2, **INITS, rngs=rngs)),
    "ConvTranspose": Layer(lambda rngs: nnx.ConvTranspose(4, 4, (2,), **INITS, rngs=rngs)),
    "LoRA": Layer(
        lambda rngs: nnx.LoRA(
            4, 2, 4, base_module=nnx.Linear(4, 4, **INITS, rngs=rngs), **THIN, rngs=rngs
        )
    ),
    "LoRALinear": Layer(lambda rngs: nnx.LoRALinear(4, 4, lora_rank=2, **THIN, **INITS, rngs=rngs)),
    "MLP": Layer(mlp),
    "Identity": Layer(lambda rngs: nnx.Identity()),
    "Sequential": Layer(sequential),
    "BatchNorm": Layer(lambda rngs: nnx.BatchNorm(4, **AFFINE, rngs=rngs)),
    "LayerNorm": Layer(lambda rngs: nnx.LayerNorm(4, **AFFINE, rngs=rngs)),
    "RMSNorm": Layer(lambda rngs: nnx.RMSNorm(4, scale_init=spread, rngs=rngs)),
    "GroupNorm": Layer(lambda rngs: nnx.GroupNorm(4, 2, **AFFINE, rngs=rngs)),
    "InstanceNorm": Layer(lambda rngs: nnx.InstanceNorm(4, **AFFINE, rngs=rngs)),
    "SpectralNorm": Layer(
        lambda rngs: nnx.SpectralNorm(nnx.Linear(4, 4, **INITS, rngs=rngs), rngs=rngs),
        exact_gradient=False,
    ),
    "WeightNorm": Layer(
        lambda rngs: nnx.WeightNorm(nnx.Linear(4, 4, **INITS, rngs=rngs), rngs=rngs)
    ),
    "MultiHeadAttention": Layer(
        lambda rngs: attention(
            rngs, dropout_rate=0.3, deterministic=False, normalize_qk=True, num_kv_heads=1
        )
    ),
    "MultiHeadAttention, decoding": Layer(decoding, STEP),
    "MultiHeadAttention, recording weights": Layer(
        attention, run=lambda layer, x: layer(x, sow_weights=True)
    ),
    "RoPE": Layer(lambda rngs: nnx.RoPE(embedding_size=4, max_seq_len=3)),
    "SimpleCell": Layer(lambda rngs: cell(nnx.SimpleCell, rngs), run=first_step),
    "LSTMCell": Layer(lambda rngs: cell(nnx.LSTMCell, rngs), run=first_step),
    "OptimizedLSTMCell": Layer(
        lambda rngs: cell(nnx.OptimizedLSTMCell, rngs, keep_rngs=True), run=first_step
    ),
    "GRUCell": Layer(lambda rngs: cell(nnx.GRUCell, rngs), run=first_step),
    "RNN": Layer(lambda rngs: nnx.RNN(cell(nnx.GRUCell, rngs))),
    "Bidirectional": Layer(bidirectional),
    "Dropout": Layer(lambda rngs: nnx.Dropout(0.5, rngs=rngs)),
    "PReLU": Layer(lambda rngs: nnx.PReLU(0.2)),
}
