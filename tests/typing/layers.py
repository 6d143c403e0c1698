"""What type checkers infer of layers."""

from __future__ import annotations

import typing as tp
from typing import assert_type

import jax
import jax.numpy as jnp

import nnxlite as nnx

Parameter: tp.TypeAlias = nnx.Param[jax.Array]

rngs = nnx.Rngs(0)
x = jnp.ones((2, 8, 4))
image = jnp.ones((2, 8, 8, 4))

linear = nnx.Linear(4, 3, rngs=rngs)
assert_type(linear, nnx.Linear)
assert_type(linear.kernel, Parameter)
assert_type(linear.bias, Parameter | None)
assert_type(linear.in_features, int)
assert_type(linear(x), jax.Array)
assert_type(x @ linear.kernel, jax.Array)
general = nnx.LinearGeneral(4, (2, 3), rngs=rngs)
assert_type(general.kernel, Parameter)
assert_type(general(x), jax.Array)
einsum = nnx.Einsum("bld,df->blf", (4, 3), (3,), rngs=rngs)
assert_type(einsum.bias, Parameter | None)
assert_type(einsum(x), jax.Array)
conv = nnx.Conv(4, 3, (3, 3), rngs=rngs)
assert_type(conv.kernel, Parameter)
assert_type(conv.bias, Parameter | None)
assert_type(conv(image), jax.Array)
assert_type(nnx.ConvTranspose(4, 3, (3, 3), rngs=rngs)(image), jax.Array)
square = nnx.Linear(4, 4, rngs=rngs)
stacked = nnx.stack_layers([nnx.clone(square) for _ in range(8)])
assert_type(stacked, nnx.Linear)
assert_type(nnx.unstack_layers(stacked), nnx.List[nnx.Linear])
remembering = nnx.remat_layers(nnx.Linear.__call__, {"**": None})
assert_type(remembering(linear, x), jax.Array)
embed = nnx.Embed(10, 4, rngs=rngs)
assert_type(embed.embedding, Parameter)
assert_type(embed(jnp.arange(3)), jax.Array)
assert_type(embed.attend(x), jax.Array)
attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
assert_type(attention(x), jax.Array)
assert_type(attention.query, nnx.LinearGeneral)
norm = nnx.BatchNorm(4, rngs=rngs)
assert_type(norm.scale, Parameter | None)
assert_type(norm.mean, nnx.BatchStat[jax.Array])
assert_type(norm(x), jax.Array)
assert_type(nnx.LayerNorm(4, rngs=rngs).bias, Parameter | None)
assert_type(nnx.LayerNorm(4, rngs=rngs)(x), jax.Array)
assert_type(nnx.RMSNorm(4, rngs=rngs).scale, Parameter | None)
assert_type(nnx.RMSNorm(4, rngs=rngs)(x), jax.Array)
assert_type(nnx.GroupNorm(4, 2, rngs=rngs)(x), jax.Array)
assert_type(nnx.InstanceNorm(4, rngs=rngs)(x), jax.Array)
assert_type(nnx.Dropout(0.5, rngs=rngs)(x), jax.Array)
assert_type(nnx.PReLU().negative_slope, Parameter)
assert_type(nnx.PReLU()(x), jax.Array)
assert_type(nnx.SpectralNorm(linear, rngs=rngs)(x), tp.Any)
assert_type(nnx.WeightNorm(linear, rngs=rngs)(x), tp.Any)
assert_type(nnx.LoRA(4, 2, 3, rngs=rngs)(x), jax.Array)
assert_type(nnx.LoRALinear(4, 3, lora_rank=2, rngs=rngs)(x), jax.Array)
assert_type(nnx.RoPE()(jnp.ones((1, 3, 2, 4))), jax.Array)
assert_type(nnx.Identity()(x), tp.Any)

# Layers made of others

sequential = nnx.Sequential(linear, nnx.relu, nnx.Linear(3, 2, rngs=rngs))
assert_type(sequential, nnx.Sequential[jax.Array])
assert_type(sequential(x), jax.Array)
assert_type(nnx.Sequential(*[linear])(x), jax.Array)
mlp = nnx.MLP(4, 2, 8, 1, rngs=rngs)
assert_type(mlp.layers, nnx.List[nnx.Linear])
assert_type(mlp(x), jax.Array)
lstm = nnx.LSTMCell(4, 3, rngs=rngs)
carry = lstm.initialize_carry((2, 4))
assert_type(lstm(carry, x[:, 0])[1], jax.Array)
assert_type(nnx.OptimizedLSTMCell(4, 3, rngs=rngs)(carry, x[:, 0])[1], jax.Array)
assert_type(nnx.GRUCell(4, 3, rngs=rngs)(carry[0], x[:, 0])[1], jax.Array)
assert_type(nnx.SimpleCell(4, 3, rngs=rngs)(carry[0], x[:, 0])[1], jax.Array)
cell: nnx.RNNCellBase = lstm
forward, backward = nnx.RNN(lstm), nnx.RNN(nnx.LSTMCell(4, 3, rngs=rngs))
assert_type(forward(x), tp.Any)
assert_type(forward(x, return_carry=False, time_major=False), jax.Array)
assert_type(forward(x, return_carry=True), tuple[tp.Any, jax.Array])
both = nnx.Bidirectional(forward, backward)
assert_type(both(x), tp.Any)
assert_type(both(x, return_carry=True), tuple[tp.Any, jax.Array])

# Functions

activations = [
    nnx.celu, nnx.elu, nnx.gelu, nnx.glu, nnx.hard_sigmoid, nnx.hard_silu, nnx.hard_swish,
    nnx.hard_tanh, nnx.identity, nnx.leaky_relu, nnx.log_sigmoid, nnx.log_softmax, nnx.relu,
    nnx.relu6, nnx.selu, nnx.sigmoid, nnx.silu, nnx.soft_sign, nnx.softmax, nnx.softplus,
    nnx.standardize, nnx.swish, nnx.tanh,
]  # fmt: skip
assert_type(nnx.relu(x), jax.Array)
assert_type(nnx.gelu(x), jax.Array)
assert_type(nnx.softmax(x, axis=-1), jax.Array)
assert_type(nnx.tanh(x), jax.Array)
assert_type(nnx.one_hot(jnp.arange(3), 4), jax.Array)
assert float(nnx.logsumexp(x, axis=None)) > 0
assert_type(nnx.avg_pool(image, (2, 2)), jax.Array)
assert_type(nnx.max_pool(image, (2, 2)), jax.Array)
assert_type(nnx.min_pool(image, (2, 2)), jax.Array)
assert_type(nnx.pool(image, 0.0, jax.lax.add, (2, 2), None, "VALID"), jax.Array)
mask = nnx.make_causal_mask(jnp.ones((2, 8)))
assert_type(mask, jax.Array)
assert_type(nnx.make_attention_mask(jnp.ones((2, 8)), jnp.ones((2, 8))), jax.Array)
assert_type(nnx.combine_masks(mask, None), jax.Array | None)
heads = jnp.ones((2, 8, 2, 4))
assert_type(nnx.dot_product_attention(heads, heads, heads), jax.Array)
assert_type(nnx.dot_product_attention_with_rope(heads, heads, heads, rope=nnx.RoPE()), jax.Array)
init: nnx.Initializer = nnx.initializers.he_normal()
assert nnx.dtypes.canonicalize_dtype(x, dtype=None) == x.dtype
