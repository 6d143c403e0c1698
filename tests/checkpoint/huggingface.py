"""GPT-2 and Llama written with `nnx`, and the mappings of their weights in Hugging Face transformers.

`config` is that of transformers.  `nnx.load_safetensors(folder, model, mapping=...)` loads what
`save_pretrained` wrote, `nnx.save_safetensors` writes what `from_pretrained` reads.
"""

import functools

import jax
import jax.numpy as jnp

import nnxlite as nnx
from nnxlite.checkpoint import Ignore, Mapping, Rule

PARTS = ("query", "key", "value")


class GPT2Block(nnx.Module):
    """Attention and a perceptron, each on normalised inputs and added to them."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        width = config.n_embd
        norm = functools.partial(nnx.LayerNorm, width, epsilon=config.layer_norm_epsilon, rngs=rngs)
        self.norm1, self.norm2 = norm(), norm()
        self.attention = nnx.MultiHeadAttention(config.n_head, width, decode=False, rngs=rngs)
        self.fc1 = nnx.Linear(width, 4 * width, rngs=rngs)
        self.fc2 = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.fc2(nnx.gelu(self.fc1(self.norm2(x))))


class GPT2(nnx.Module):
    """Radford et al. 2019: tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(config.vocab_size, config.n_embd, rngs=rngs)
        self.positions = nnx.Embed(config.n_positions, config.n_embd, rngs=rngs)
        self.blocks = nnx.List([GPT2Block(config, rngs=rngs) for _ in range(config.n_layer)])
        self.norm = nnx.LayerNorm(config.n_embd, epsilon=config.layer_norm_epsilon, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def gpt2_mapping() -> Mapping:
    """Names of `GPT2LMHeadModel`; its layers have kernels (in, out)."""
    theirs, ours = "transformer.h.{i}", "blocks.{i}"
    names = {"weight": "kernel", "bias": "bias"}
    fused = {name: [f"{ours}.attention.{part}.{name}" for part in PARTS] for name in names.values()}
    kernel, bias = "d (part heads depth) -> part d heads depth", "(part h d) -> part h d"
    out = f"{ours}.attention.out"
    return Mapping(
        [
            Rule("transformer.wte.weight", "tokens.embedding"),
            Rule("transformer.wpe.weight", "positions.embedding"),
            Rule("transformer.ln_f.weight", "norm.scale"),
            Rule("transformer.ln_f.bias", "norm.bias"),
            Rule(f"{theirs}.ln_{{k}}.weight", f"{ours}.norm{{k}}.scale"),
            Rule(f"{theirs}.ln_{{k}}.bias", f"{ours}.norm{{k}}.bias"),
            Rule(f"{theirs}.attn.c_attn.weight", fused["kernel"], kernel),
            Rule(f"{theirs}.attn.c_attn.bias", fused["bias"], bias),
            Rule(f"{theirs}.attn.c_proj.weight", f"{out}.kernel", "(h d) width -> h d width"),
            Rule(f"{theirs}.attn.c_proj.bias", f"{out}.bias"),
            *(Rule(f"{theirs}.mlp.c_fc.{a}", f"{ours}.fc1.{b}") for a, b in names.items()),
            *(Rule(f"{theirs}.mlp.c_proj.{a}", f"{ours}.fc2.{b}") for a, b in names.items()),
            Ignore("transformer.h.*.attn.bias"),  # causal masks, in older checkpoints
        ]
    )


class LlamaBlock(nnx.Module):
    """Rotated queries and keys, fewer heads for keys than for queries, a gated perceptron."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        width, heads = config.hidden_size, config.num_attention_heads
        norm = functools.partial(nnx.RMSNorm, width, epsilon=config.rms_norm_eps, rngs=rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        rope = nnx.RoPE(theta=config.rope_parameters["rope_theta"])
        self.norm1, self.norm2 = norm(), norm()
        self.attention = nnx.MultiHeadAttention(
            heads,
            width,
            heads * config.head_dim,
            num_kv_heads=config.num_key_value_heads,
            use_bias=False,
            attention_fn=functools.partial(nnx.dot_product_attention_with_rope, rope=rope),
            decode=False,
            rngs=rngs,
        )
        self.gate, self.up = (linear(width, config.intermediate_size) for _ in range(2))
        self.down = linear(config.intermediate_size, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), is_causal=True)
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """Touvron et al. 2023: tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        width, blocks = config.hidden_size, range(config.num_hidden_layers)
        self.tokens = nnx.Embed(config.vocab_size, width, rngs=rngs)
        self.blocks = nnx.List([LlamaBlock(config, rngs=rngs) for _ in blocks])
        self.norm = nnx.RMSNorm(width, epsilon=config.rms_norm_eps, rngs=rngs)
        self.head = nnx.Linear(width, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def llama_mapping() -> Mapping:
    """Names of `LlamaForCausalLM`; its layers have kernels (out, in)."""
    theirs, ours = "model.layers.{i}", "blocks.{i}"
    attn, attention = f"{theirs}.self_attn", f"{ours}.attention"
    split, joined = "(h d) width -> width h d", "width (h d) -> h d width"
    return Mapping(
        [
            Rule("model.embed_tokens.weight", "tokens.embedding"),
            Rule(f"{theirs}.input_layernorm.weight", f"{ours}.norm1.scale"),
            Rule(f"{theirs}.post_attention_layernorm.weight", f"{ours}.norm2.scale"),
            *(Rule(f"{attn}.{p[0]}_proj.weight", f"{attention}.{p}.kernel", split) for p in PARTS),
            Rule(f"{attn}.o_proj.weight", f"{attention}.out.kernel", joined),
            Rule(f"{theirs}.mlp.{{part}}_proj.weight", f"{ours}.{{part}}.kernel", "o i -> i o"),
            Rule("model.norm.weight", "norm.scale"),
            Rule("lm_head.weight", "head.kernel", "o i -> i o"),
        ]
    )
