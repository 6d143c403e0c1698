"""Train a character-level transformer on real text, and let it write.

The text is the Python language reference, which every CPython ships as `pydoc_data.topics`, so
nothing is downloaded. The last tenth is held out.

    python examples/char_transformer.py            # about three minutes on two CPU cores
    python examples/char_transformer.py --quick    # some seconds, and a model that can barely spell

A full run reaches about 2.0 bits per character on the held-out tenth. `char_transformer.png` in the
output folder shows the learning curves; how the model continues beginnings from the held-out text is
printed.
"""

from __future__ import annotations

import functools
import lzma
import math
import re
from pydoc_data.topics import topics

import jax
import numpy as np
import optax
from _common import BLUE, INK, RED, options, picture

import nnxlite as nnx

CONTEXT = 128  # characters in a training window; samples are no longer than this
BATCH, HEADS = 16, 4
PROMPT, SAMPLES = 40, 4  # characters of held-out text that a sample continues


class Block(nnx.Module):
    """Causal attention and an MLP, each after a norm, with dropout before the residual sum."""

    def __init__(self, features: int, rngs: nnx.Rngs):
        attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
        self.norm1 = nnx.RMSNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, features, use_bias=False, attention_fn=attend, decode=False, rngs=rngs
        )
        self.norm2 = nnx.RMSNorm(features, rngs=rngs)
        self.mlp = nnx.MLP(features, features, 4 * features, 1, activation=nnx.gelu, rngs=rngs)
        self.dropout = nnx.Dropout(0.05, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, length, features) to the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x), is_causal=True))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nnx.Module):
    """A decoder-only transformer whose layers are one `Block` with stacked parameters.

    `nnx.scan` runs the stack, so the block is traced and compiled once for any number of layers.
    Each layer has its own dropout stream, stacked like its parameters. The embedding table is also
    the output projection (weight tying).
    """

    def __init__(self, vocabulary: int, features: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocabulary, features, rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: Block(features, rngs))(rngs.fork(split=layers))
        self.norm = nnx.RMSNorm(features, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens (batch, length) to logits (batch, length, vocabulary)."""
        x = self.embed(tokens)
        if isinstance(self.blocks, nnx.List):  # see `write`
            for block in self.blocks:
                x = block(x)
        else:
            layer = lambda x, block: block(x)
            x = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.embed.attend(self.norm(x))


class Text:
    """The language reference as tokens, one for each character; the last tenth is `held_out`."""

    def __init__(self) -> None:
        paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
        text = "\n\n".join(dict.fromkeys(paragraphs))  # some are in several chapters
        self.characters = sorted(set(text))
        numbers = {character: i for i, character in enumerate(self.characters)}
        tokens = np.array([numbers[character] for character in text], np.int32)
        self.train, self.held_out = np.split(tokens, [len(tokens) * 9 // 10])

    def decode(self, tokens) -> str:
        return "".join(self.characters[token] for token in tokens)

    def frequency_bits(self) -> float:
        """Bits per held-out character of a guess that knows only how frequent each one is."""
        counts = np.bincount(self.train, minlength=len(self.characters)) + 1.0
        return float(-np.log2(counts / counts.sum())[self.held_out].mean())

    def xz_bits(self) -> float:
        """Bits per held-out character that xz adds to the compressed training text."""
        train = lzma.compress(self.decode(self.train).encode())
        both = lzma.compress(self.decode([*self.train, *self.held_out]).encode())
        return 8 * (len(both) - len(train)) / len(self.held_out)


def windows(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Tokens (len(starts), CONTEXT + 1): inputs, and the same shifted by one as targets."""
    return tokens[starts[:, None] + np.arange(CONTEXT + 1)]


def bits_per_character(model: Transformer, batch: jax.Array) -> jax.Array:
    """Mean cross-entropy in bits, for a batch (size, CONTEXT + 1)."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:])
    return losses.mean() / math.log(2)


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(bits_per_character)(model, batch)
    optimizer.update(model, grads)
    return loss


evaluate = nnx.jit(bits_per_character)


def train(model: Transformer, text: Text, steps: int, seed: int) -> list[dict[str, float]]:
    """Train in place. The history has `train` for each step, and `held_out` for some."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps)
    adamw = optax.adamw(schedule, b2=0.99, weight_decay=0.1)
    adamw = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)
    without_dropout = nnx.view(model, deterministic=True)  # the same Variables in another mode
    held_out = windows(text.held_out, np.arange(0, len(text.held_out) - CONTEXT, CONTEXT)[:400])
    run = nnx.training.loop(
        steps,
        evaluate=lambda: {"held_out": evaluate(without_dropout, held_out)},
        evaluate_every=steps // 5,
    )
    draw = np.random.default_rng(seed)
    for step in run:
        starts = draw.integers(0, len(text.train) - CONTEXT, BATCH)
        step.log(train=train_step(model, optimizer, windows(text.train, starts)))
    return run.history


def write(model: Transformer, text: Text, seed: int) -> None:
    """Print beginnings of sentences of the held-out text, and how the model continues each."""
    held_out = text.decode(text.held_out)
    sentences = [match.end() for match in re.finditer(r"[.:]\s+(?=\w)", held_out[:-PROMPT])]
    chosen = np.array(sentences)[np.linspace(0, len(sentences) - 1, SAMPLES).astype(int)]
    prompts = text.held_out[chosen[:, None] + np.arange(PROMPT)]
    model = nnx.clone(model)  # with a list of layers, each of which gets its own cache
    model.blocks = nnx.unstack_layers(model.blocks)
    sampler = nnx.Sampler(temperature=0.7)
    new = nnx.generate(model, prompts, CONTEXT - PROMPT, sampler=sampler, rngs=jax.random.key(seed))
    for prompt, tokens in zip(prompts, new.lists()):
        print(f"--- {text.decode(prompt)!r} goes on:\n{text.decode(tokens)}")


def draw(history: list[dict[str, float]], text: Text, path) -> None:
    with picture(path, 7, 3.6) as figure:
        axes = figure.subplots()
        for name, colour in (("train", BLUE), ("held_out", RED)):
            points = [(row["step"] + 1, row[name]) for row in history if name in row]
            axes.plot(*zip(*points), color=colour, label=name)
        for bits, name in ((text.frequency_bits(), "frequencies"), (text.xz_bits(), "xz")):
            axes.axhline(bits, color=INK, ls=":", lw=1)
            axes.text(0, bits, name, va="bottom")
        axes.set(xlabel="step", ylabel="bits per character", ylim=(0, 6))
        axes.legend()


def main() -> None:
    run = options(__doc__)
    text = Text()
    steps, layers, features = (80, 2, 48) if run.quick else (600, 4, 96)
    model = Transformer(len(text.characters), features, layers, nnx.Rngs(run.seed))
    history = train(model, text, steps, run.seed)
    write(model, text, run.seed)
    draw(history, text, run.out / "char_transformer.png")
    held_out = [row["held_out"] for row in history if "held_out" in row][-1]
    print(f"curves: {run.out / 'char_transformer.png'}")
    print(
        f"held-out text: {held_out:.2f} bits per character, {text.xz_bits():.2f} by xz, "
        f"{text.frequency_bits():.2f} by the frequency of characters alone"
    )


if __name__ == "__main__":
    main()
