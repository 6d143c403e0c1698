"""Train a character-level transformer on real text, and let it write.

The text is the Python language reference, which every CPython ships as `pydoc_data.topics`, so
nothing is downloaded; `--text FILE` takes a text of your own. The last tenth is held out.

    python examples/char_transformer.py            # about three minutes on two CPU cores
    python examples/char_transformer.py --quick    # some seconds, and a model that can barely spell

A full run reaches about 2.0 bits per character on the held-out tenth. `char_transformer.png` in the
output folder shows the learning curves, and how the model continues beginnings from the held-out text.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import lzma
import math
import re
import typing as tp
from pathlib import Path

import jax
import matplotlib
import numpy as np
import optax

import nnxlite as nnx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONTEXT = 128  # characters in a training window; samples are no longer than this
BATCH = 16
HEADS = 4
PROMPT = 40  # characters of held-out text that a sample continues
SAMPLES = 4


class Block(nnx.Module):
    """Causal attention and an MLP, each after a norm, with dropout before the residual sum."""

    def __init__(self, features: int, *, dropout: float, rngs: nnx.Rngs):
        attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
        self.norm1 = nnx.RMSNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, features, use_bias=False, attention_fn=attend, decode=False, rngs=rngs
        )
        self.norm2 = nnx.RMSNorm(features, rngs=rngs)
        self.mlp = nnx.MLP(features, features, 4 * features, 1, activation=nnx.gelu, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

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

    def __init__(
        self,
        vocabulary: int,
        features: int,
        layers: int,
        *,
        dropout: float,
        remat: bool,
        rngs: nnx.Rngs,
    ):
        self.remat = remat
        self.embed = nnx.Embed(vocabulary, features, rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: Block(features, dropout=dropout, rngs=rngs))(
            rngs.fork(split=layers)
        )
        self.norm = nnx.RMSNorm(features, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens (batch, length) to logits (batch, length, vocabulary)."""
        x = self.run_blocks(self.embed(tokens))
        return self.embed.attend(self.norm(x))

    def run_blocks(self, x: jax.Array) -> jax.Array:
        if isinstance(self.blocks, nnx.List):  # see `for_generation`
            for block in self.blocks:
                x = block(x)
            return x
        layer = lambda x, block: block(x)
        if self.remat:  # keep only the input of each layer for the gradient
            layer = nnx.remat(layer, prevent_cse=False)
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


def for_generation(model: Transformer) -> Transformer:
    """A copy with a list of layers: in `nnx.generate` each attention layer gets its own cache."""
    model = nnx.clone(model)
    model.blocks = nnx.unstack_layers(model.blocks)
    return model


class Text:
    """A text as tokens, one for each different character; the last tenth is `held_out`."""

    def __init__(self, text: str):
        self.characters = sorted(set(text))
        self.numbers = {character: i for i, character in enumerate(self.characters)}
        tokens = np.array(self.encode(text), np.int32)
        self.train, self.held_out = np.split(tokens, [len(tokens) * 9 // 10])

    def encode(self, text: str) -> list[int]:
        return [self.numbers[character] for character in text]

    def decode(self, tokens: tp.Iterable[int]) -> str:
        return "".join(self.characters[token] for token in tokens)

    def frequency_bits(self) -> float:
        """Bits per held-out character of a guess that knows only how frequent each one is."""
        counts = np.bincount(self.train, minlength=len(self.characters)) + 1.0
        return float(-np.log2(counts / counts.sum())[self.held_out].mean())

    def xz_bits(self) -> float:
        """Bits per held-out character that xz adds to the compressed training text."""
        train, whole = (
            len(lzma.compress(self.decode(tokens).encode()))
            for tokens in (self.train, np.concatenate([self.train, self.held_out]))
        )
        return 8 * (whole - train) / len(self.held_out)


def python_reference() -> str:
    """The chapters of the language reference. A paragraph that several chapters share comes once."""
    from pydoc_data.topics import topics

    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs))


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


def train(model: Transformer, text: Text, options: argparse.Namespace) -> list[dict[str, float]]:
    """Train in place. The history has `loss` for each step, and `held_out` for some."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, options.steps // 10, options.steps)
    adamw = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.1)
    )
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)
    without_dropout = nnx.view(model, deterministic=True)  # the same Variables in another mode
    starts = np.arange(0, len(text.held_out) - CONTEXT, CONTEXT)[:400]
    held_out = windows(text.held_out, starts)
    run = nnx.training.loop(
        options.steps,
        evaluate=lambda: {"held_out": evaluate(without_dropout, held_out)},
        evaluate_every=max(options.steps // 5, 1),
    )
    draw = np.random.default_rng(options.seed)
    for step in run:
        starts = draw.integers(0, len(text.train) - CONTEXT, BATCH)
        step.log(loss=train_step(model, optimizer, windows(text.train, starts)))
    return run.history


def beginnings(text: Text) -> np.ndarray:
    """The first tokens (SAMPLES, PROMPT) of sentences of the held-out text, evenly spaced."""
    held_out = text.decode(text.held_out)
    sentences = [match.end() for match in re.finditer(r"[.:]\s+(?=\w)", held_out[:-PROMPT])] or [0]
    chosen = np.linspace(0, len(sentences) - 1, SAMPLES).astype(int)
    return text.held_out[np.array(sentences)[chosen, None] + np.arange(PROMPT)]


def write(model: Transformer, text: Text, seed: int) -> list[tuple[str, str]]:
    """Beginnings from the held-out text, and how the model continues each up to CONTEXT."""
    prompts = beginnings(text)
    new = nnx.generate(
        for_generation(model),
        prompts,
        CONTEXT - PROMPT,
        sampler=nnx.Sampler(temperature=0.7),
        rngs=jax.random.key(seed),
    )
    return [(text.decode(a), text.decode(b)) for a, b in zip(prompts, new.lists(), strict=True)]


INK, TRAIN, HELD_OUT = "#22303c", "#8aa1b4", "#d1603d"


def draw(
    history: list[dict[str, float]], written: list[tuple[str, str]], text: Text, path: Path
) -> None:
    """Learning curves on the left, samples on the right."""
    style = {"font.size": 9, "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK}
    with plt.rc_context(style | {"axes.titleweight": "bold"}):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 4.4), layout="constrained", width_ratios=[1, 1.05]
        )
        draw_curves(left, history, text)
        draw_samples(right, written)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_curves(axes: plt.Axes, history: list[dict[str, float]], text: Text) -> None:
    for name, colour, label, mark in (
        ("loss", TRAIN, "training", ""),
        ("held_out", HELD_OUT, "held-out text", "o"),
    ):
        points = [(row["step"] + 1, row[name]) for row in history if name in row]
        axes.plot(*zip(*points, strict=True), color=colour, label=label, lw=1.4, marker=mark, ms=4)
    for bits, label, offset in (
        (text.frequency_bits(), "frequency of characters alone", 3),
        (text.xz_bits(), "xz, after the training text", -10),
    ):
        axes.axhline(bits, color=INK, ls=":", lw=1)
        axes.annotate(
            f"{label}: {bits:.2f}",
            (1, bits),
            (0, offset),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    axes.set(xlabel="step", ylabel="bits per character", ylim=(0, 6), title="Training")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def draw_samples(axes: plt.Axes, written: list[tuple[str, str]], rows: int = 26) -> None:
    """Each sample line by line, its given beginning in another colour."""
    lines = []
    for prompt, new in written:
        whole, given = wrapped(prompt + new), wrapped(prompt)
        lines += [*itertools.zip_longest(whole, given, fillvalue=""), ("", "")]
    for i, line in enumerate(lines[:rows]):
        for part, colour in zip(line, (INK, HELD_OUT), strict=True):
            height = 1 - (i + 0.5) / rows
            label = axes.text(0, height, part, family="monospace", size=8, color=colour)
            label.set_in_layout(False)
    axes.set_axis_off()
    axes.set_title("Beginnings from held-out text, continued")


def wrapped(text: str, width: int = 72) -> list[str]:
    """The lines of a text, cut at a width."""
    return [
        line[start : start + width]
        for line in text.split("\n")
        for start in range(0, max(len(line), 1), width)
    ]


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> tp.NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def whole_number(minimum: int, multiple_of: int = 1) -> tp.Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"a whole number from {minimum} up, not {text!r}")
        if int(text) % multiple_of:
            raise argparse.ArgumentTypeError(f"a multiple of {multiple_of}, not {text}")
        return int(text)

    return parse


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"a number from 0 to below 1, not {text!r}")
    return value


def text_file(name: str) -> str:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{name} is not UTF-8 text") from None
    if len(text) < 20 * CONTEXT:
        raise argparse.ArgumentTypeError(
            f"{name} has {len(text):,} characters; at least {20 * CONTEXT:,} are needed"
        )
    return text


def folder(text: str) -> Path:
    """An output folder, made before training rather than after it."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write to {text}: {error.strerror}") from None
    return path


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="char_transformer.py", description=__doc__.split("\n")[0])
    size = whole_number(1)
    width = whole_number(2 * HEADS, multiple_of=2 * HEADS)
    parser.add_argument("--text", type=text_file, help="a UTF-8 file; default: Python's reference")
    parser.add_argument("--steps", type=size, help="default: 600, with --quick 80")
    parser.add_argument("--layers", type=size, help="default: 4, with --quick 2")
    parser.add_argument("--features", type=width, help="default: 96, with --quick 48")
    parser.add_argument("--dropout", type=rate, default=0.05, help="rate; default: 0.05")
    parser.add_argument("--remat", action="store_true", help="less memory, more computation")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="default: 0")
    parser.add_argument("--out", type=folder, default="out", help="folder; default: out")
    parser.add_argument("--quick", action="store_true", help="a short run of a small model")
    options = parser.parse_args(arguments)
    options.steps = options.steps or (80 if options.quick else 600)
    options.layers = options.layers or (2 if options.quick else 4)
    options.features = options.features or (48 if options.quick else 96)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    text = Text(options.text or python_reference())
    model = Transformer(
        len(text.characters),
        options.features,
        options.layers,
        dropout=options.dropout,
        remat=options.remat,
        rngs=nnx.Rngs(options.seed),
    )
    history = train(model, text, options)
    written = write(model, text, options.seed)
    draw(history, written, text, options.out / "char_transformer.png")

    for prompt, new in written:
        print(f"--- {prompt!r} goes on:\n{new}")
    held_out = [row["held_out"] for row in history if "held_out" in row]
    print(f"curves and samples: {options.out / 'char_transformer.png'}")
    print(
        f"held-out text: {held_out[-1]:.2f} bits per character, {text.xz_bits():.2f} by xz, "
        f"{text.frequency_bits():.2f} by the frequency of characters alone"
    )


if __name__ == "__main__":
    main()
