"""Train a small language model on real text, letter by letter, and let it write.

The text is the descriptions of data sets that ship inside scikit-learn, so nothing is downloaded. Its
last tenth is never seen in training.

    python examples/generate.py            # a few minutes on two CPU cores
    python examples/generate.py --quick    # some seconds, and a model that can barely spell

Result: fewer bits per letter, on text that was not in training, than the frequency of letters takes.

The text that the model writes appears while it is written. `generate.png` in the output folder shows
how training went, `generate.txt` what each way of sampling writes after the same words.
"""

from __future__ import annotations

import argparse
import functools
import time
import typing as tp
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import nnxlite as nnx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONTEXT = 128  # letters that a text has in training; longer ones would be new to the model
PROMPT = "The data set contains"
SAMPLERS = {  # temperature, top-p, min-p: numbers that one program takes, in each row others
    "greedy": (0.0, 1.0, 0.0),
    "temperature 1": (1.0, 1.0, 0.0),
    "temperature 0.7": (0.7, 1.0, 0.0),
    "top-p 0.9": (1.0, 0.9, 0.0),
    "min-p 0.1": (1.0, 1.0, 0.1),
}
STREAMED = 2  # the way of sampling whose text appears while it is written


class Block(nnx.Module):
    """Attention and an MLP, each after a norm and added to what came in."""

    def __init__(self, features: int, *, rngs: nnx.Rngs):
        attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
        self.norm1 = nnx.RMSNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, features, use_bias=False, attention_fn=attend, decode=False, rngs=rngs
        )
        self.norm2 = nnx.RMSNorm(features, rngs=rngs)
        self.mlp = nnx.MLP(features, features, 4 * features, 1, activation=nnx.gelu, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.mlp(self.norm2(x))


class Writer(nnx.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary): all that `nnx.generate` asks for."""

    def __init__(self, vocabulary: int, features: int, layers: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocabulary, features, rngs=rngs)
        self.blocks = nnx.List(Block(features, rngs=rngs) for _ in range(layers))
        self.norm = nnx.RMSNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text:
    """The descriptions as numbers, one for each letter that is in them at least five times."""

    def __init__(self) -> None:
        folder = resources.files("sklearn.datasets") / "descr"
        files = sorted(
            (f for f in folder.iterdir() if f.name.endswith(".rst")), key=lambda f: f.name
        )
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
        letters, counts = np.unique(list(text), return_counts=True)
        self.letters = [str(letter) for letter in letters[counts >= 5]]
        self.numbers = {letter: i for i, letter in enumerate(self.letters)}
        tokens = np.array(self.encode(text), np.int32)
        self.train, self.valid = np.split(tokens, [len(tokens) * 9 // 10])

    def encode(self, text: str) -> list[int]:
        return [self.numbers[letter] for letter in text if letter in self.numbers]

    def decode(self, tokens: tp.Iterable[int]) -> str:
        return "".join(self.letters[token] for token in tokens)

    def entropy(self) -> float:
        """Bits per letter of a guess that knows only how frequent each letter is."""
        frequency = np.bincount(self.train, minlength=len(self.letters)) + 1.0
        return float(-np.log2(frequency / frequency.sum())[self.valid].mean())


def windows(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(CONTEXT + 1)]


def bits(model: Writer, batch: jax.Array) -> jax.Array:
    """Bits that the model needs for a letter, on average."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:])
    return losses.mean() / jnp.log(2)


@nnx.jit
def train_step(model: Writer, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(bits)(model, batch)
    optimizer.update(model, grads)
    return loss


def validate(model: Writer, text: Text) -> float:
    starts = np.arange(0, len(text.valid) - CONTEXT - 1, CONTEXT)
    return float(nnx.jit(bits)(model, windows(text.valid, starts)))


def train(model: Writer, text: Text, steps: int) -> tuple[list[float], dict[int, float]]:
    """Bits per letter of each training step, and of validation at some of them."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    draw = np.random.default_rng(0)
    losses, validation = [], {0: validate(model, text)}
    for step in track(range(1, steps + 1), "training", console=Console(stderr=True)):
        starts = draw.integers(0, len(text.train) - CONTEXT - 1, 16)
        losses.append(train_step(model, optimizer, windows(text.train, starts)))
        if step % (steps // 5) == 0:
            validation[step] = validate(model, text)
    return [float(loss) for loss in losses], validation


def draw_curves(losses: list[float], validation: dict[int, float], text: Text, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="#8aa1b4", lw=1, label="training")
    axes.plot(*zip(*validation.items()), color="#d1603d", marker="o", ms=4, label="validation")
    axes.axhline(text.entropy(), color="#22303c", ls=":", label="frequency of letters alone")
    axes.set(xlabel="step", ylabel="bits per letter", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def samples(model: Writer, text: Text, length: int, use_cache: bool = True) -> dict[str, str]:
    """What each way of sampling writes after the prompt; each is one row of a batch."""
    temperature, top_p, min_p = jnp.array(list(SAMPLERS.values())).T
    out = nnx.generate(
        model,
        [text.encode(PROMPT)] * len(SAMPLERS),
        length,
        sampler=nnx.Sampler(temperature=temperature, top_p=top_p, min_p=min_p),
        rngs=row_keys(),
        use_cache=use_cache,
    )
    return {name: PROMPT + text.decode(row) for name, row in zip(SAMPLERS, out.lists())}


def most_probable(model: Writer, text: Text, length: int) -> str:
    """The best of the sequences that a search with four beams finds."""
    found = nnx.beam_search(model, text.encode(PROMPT), length, beams=4)
    return PROMPT + text.decode(found.lists()[0])


def row_keys() -> jax.Array:
    return jax.random.split(jax.random.key(0), len(SAMPLERS))


def stream(model: Writer, text: Text, length: int) -> tp.Iterator[str]:
    """The text of one row, piece by piece."""
    sampler = nnx.Sampler(*list(SAMPLERS.values())[STREAMED][:1])
    key = row_keys()[STREAMED : STREAMED + 1]
    prompt = text.encode(PROMPT)
    for new in nnx.generate_stream(model, prompt, length, sampler=sampler, rngs=key):
        yield text.decode(new)


def speed(model: Writer, text: Text, length: int, use_cache: bool) -> float:
    """Letters per second, of the second call."""
    for _ in range(2):
        start = time.perf_counter()
        samples(model, text, length, use_cache)
    return len(SAMPLERS) * length / (time.perf_counter() - start)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="generate.py", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder; default: out")
    parser.add_argument("--quick", action="store_true", help="a short run")
    options = parser.parse_args(arguments)
    steps, features, layers = (60, 48, 1) if options.quick else (600, 96, 2)
    length = CONTEXT - len(PROMPT)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(1, f"{parser.prog}: error: cannot write to {options.out}: {error.strerror}\n")

    text = Text()
    model = Writer(len(text.letters), features, layers, rngs=nnx.Rngs(0))
    losses, validation = train(model, text, steps)
    draw_curves(losses, validation, text, options.out / "generate.png")

    print(PROMPT, end="", flush=True)
    for new in stream(model, text, length):
        print(new, end="", flush=True)
    print("\n")

    written = samples(model, text, length) | {"four beams": most_probable(model, text, length)}
    parts = [f"== {name}\n{sample}\n" for name, sample in written.items()]
    (options.out / "generate.txt").write_text("\n".join(parts), encoding="utf-8")
    table = Table("rows", "with a cache", "without", title="letters per second")
    figures = [speed(model, text, length, use_cache) for use_cache in (True, False)]
    table.add_row(str(len(SAMPLERS)), *(f"{figure:,.0f}" for figure in figures))
    Console().print(table)
    print(f"curves: {options.out / 'generate.png'}, samples: {options.out / 'generate.txt'}")
    print(
        f"validation {validation[steps]:.2f} bits per letter; {validation[0]:.2f} before training, "
        f"{text.entropy():.2f} by the frequency of letters alone"
    )


if __name__ == "__main__":
    main()
