"""Train a character-level transformer on real text, and let it write.

The text is the Python language reference, which every CPython ships; the last tenth is held out.

    python examples/char_transformer.py            # about three minutes on two CPU cores
    python examples/char_transformer.py --quick    # some seconds, and a model that can barely spell

Result: about 2.0 bits per character on the held-out tenth, and four continuations of its sentences.
"""

import functools
import lzma
import math
from pydoc_data.topics import topics

import jax
import numpy as np
import optax
from _common import curves, options

import nnxlite as nnx

CONTEXT, BATCH = 128, 16  # characters in a training window, and windows in a batch


class Block(nnx.Module):
    """Causal attention and an MLP, each after a norm, with dropout before the residual sum."""

    def __init__(self, features: int, rngs: nnx.Rngs):
        attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
        self.norm1 = nnx.RMSNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, features, use_bias=False, attention_fn=attend, decode=False, rngs=rngs
        )
        self.norm2 = nnx.RMSNorm(features, rngs=rngs)
        self.mlp = nnx.MLP(features, features, 4 * features, 1, activation=nnx.gelu, rngs=rngs)
        self.dropout = nnx.Dropout(0.05, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm1(x), is_causal=True))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nnx.Module):
    """Tokens (batch, length) to logits; the blocks are stacked, so that one is compiled for all."""

    def __init__(self, vocabulary: int, features: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocabulary, features, rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: Block(features, rngs))(rngs.fork(split=layers))
        self.norm = nnx.RMSNorm(features, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        layer = lambda x, block: block(x)
        x = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.embed.attend(self.norm(x))  # the embedding is also the output projection


@nnx.jit
def bits_per_character(model: Transformer, windows) -> jax.Array:
    """Mean cross-entropy in bits, for windows (batch, CONTEXT + 1)."""
    logits, targets = model(windows[:, :-1]), windows[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean() / math.log(2)


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, windows) -> jax.Array:
    loss, grads = nnx.value_and_grad(bits_per_character)(model, windows)
    optimizer.update(model, grads)
    return loss


def main() -> None:
    run = options(__doc__)
    steps, layers, features = (80, 2, 48) if run.quick else (600, 4, 96)
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    text = "\n\n".join(dict.fromkeys(paragraphs))  # some are in several chapters
    characters = sorted(set(text))
    tokens = np.array([characters.index(character) for character in text], np.int32)
    data, rest = np.split(tokens, [len(tokens) * 9 // 10])
    windows = lambda tokens, starts: tokens[np.asarray(starts)[:, None] + np.arange(CONTEXT + 1)]
    held_out = windows(rest, np.arange(0, len(rest) - CONTEXT, CONTEXT)[:400])

    model = Transformer(len(characters), features, layers, nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps)
    adamw = optax.adamw(schedule, b2=0.99, weight_decay=0.1)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    optimizer = nnx.Optimizer(model, clipped, wrt=nnx.Param)
    tested = nnx.view(model, deterministic=True)  # the same Variables without dropout
    evaluate = lambda: {"held_out": bits_per_character(tested, held_out)}
    loop = nnx.training.loop(steps, evaluate=evaluate, evaluate_every=steps // 5)
    draw = np.random.default_rng(0)
    for step in loop:
        batch = windows(data, draw.integers(0, len(data) - CONTEXT, BATCH))
        step.log(train=train_step(model, optimizer, batch))

    prompts = held_out[:: len(held_out) // 4, :40][:4]
    sampler = nnx.Sampler(temperature=0.7)
    new = nnx.generate(model, prompts, CONTEXT - 40, sampler=sampler, rngs=jax.random.key(0))
    decode = lambda tokens: "".join(characters[token] for token in tokens)
    for prompt, tokens in zip(prompts, new.lists()):
        print(f"--- {decode(prompt)!r} goes on:\n{decode(tokens)}")

    counts = np.bincount(data, minlength=len(characters)) + 1.0
    by_frequency = -np.log2(counts / counts.sum())[rest].mean()
    size = lambda tokens: len(lzma.compress(decode(tokens).encode()))
    by_xz = 8 * (size(np.concatenate([data, rest])) - size(data)) / len(rest)
    level = lambda bits: [(0, bits), (steps, bits)]
    series = {"xz": level(by_xz), "frequencies": level(by_frequency)}
    series["train"] = [row["train"] for row in loop.history]
    series["held-out"] = [(x["step"], x["held_out"]) for x in loop.history if "held_out" in x]
    curves(run.out / "char_transformer.png", series, "step", "bits per character", ylim=(0, 6))
    print(
        f"held-out text: {series['held-out'][-1][1]:.2f} bits per character, {by_xz:.2f} by xz, "
        f"{by_frequency:.2f} by the frequency of characters alone"
    )


if __name__ == "__main__":
    main()
