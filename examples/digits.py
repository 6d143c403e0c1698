"""Train a small convolutional network on real handwritten digits, look at it, save it, load it.

The 1,797 scans of 8 x 8 pixels ship inside scikit-learn, so nothing is downloaded. One fifth of
them is the test set, never seen in training; a tenth of the rest gives the validation figures.

    python examples/digits.py            # well under two minutes on two CPU cores
    python examples/digits.py --quick    # a few seconds, and a weaker network

Result: a test accuracy of at least 99 %; with `--quick`, at least 95 %. Two files appear in the
output folder: `digits.png` shows how training went and which digits are misread, `digits.npz` holds
the trained network.
"""

from __future__ import annotations

import argparse
import math
import sys
import typing as tp
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlite as nnx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TRAINED = (nnx.Param, nnx.BatchStat)  # what a saved network consists of; random streams do not


class Split(tp.NamedTuple):
    """Some of the scans: `images` (count, 8, 8, 1) float32 in 0..1, `labels` (count,) int32."""

    images: np.ndarray
    labels: np.ndarray


class Network(nnx.Module):
    """Two rounds of convolution, normalisation and pooling, and one linear layer on top."""

    def __init__(self, *, dropout: float, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(2 * 2 * 64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.norm1(self.conv1(images))), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), strides=(2, 2))
        return self.head(self.dropout(x.reshape(x.shape[0], -1)))


def loss_and_logits(model: Network, images, labels) -> tuple[jax.Array, jax.Array]:
    logits = model(images)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, logits


@nnx.jit
def train_step(
    model: Network, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, images, labels
) -> None:
    """One step of gradient descent; model, optimizer and metrics are changed in place."""
    grad = nnx.value_and_grad(loss_and_logits, has_aux=True)
    (loss, logits), grads = grad(model, images, labels)
    optimizer.update(model, grads)
    metrics.update(loss=loss, logits=logits, labels=labels)


@nnx.jit
def evaluate(model: Network, metrics: nnx.MultiMetric, images, labels) -> None:
    loss, logits = loss_and_logits(model, images, labels)
    metrics.update(loss=loss, logits=logits, labels=labels)


@nnx.jit
def probabilities(model: Network, images) -> jax.Array:
    return nnx.softmax(model(images))


def load_splits() -> tuple[Split, Split, Split]:
    """Training, validation and test scans: always the same ones, every digit equally frequent."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    rest, test, rest_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    train, valid, train_labels, valid_labels = train_test_split(
        rest, rest_labels, test_size=0.1, stratify=rest_labels, random_state=0
    )
    return Split(train, train_labels), Split(valid, valid_labels), Split(test, test_labels)


def batches(split: Split, size: int, order: np.random.Generator) -> Iterator[Split]:
    """Full batches in a new random order."""
    rows = order.permutation(len(split.labels))
    for start in range(0, len(rows) - size + 1, size):
        chosen = rows[start : start + size]
        yield Split(split.images[chosen], split.labels[chosen])


def new_metrics() -> nnx.MultiMetric:
    return nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())


def train(
    model: Network, train_set: Split, valid_set: Split, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Train `model` in place; one row of figures for each epoch."""
    steps = len(train_set.labels) // options.batch_size
    schedule = optax.cosine_onecycle_schedule(options.epochs * steps, options.lr)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=1e-3), wrt=nnx.Param)
    order = np.random.default_rng(options.seed)
    history: list[dict[str, float]] = []
    valid_metrics = new_metrics()
    bar = Progress(
        TextColumn("{task.completed}/{task.total} steps"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with bar:
        task = bar.add_task("compiling", total=options.epochs * steps)
        for epoch in range(1, options.epochs + 1):
            metrics = new_metrics()
            model.train()
            for batch in batches(train_set, options.batch_size, order):
                train_step(model, optimizer, metrics, *batch)
                row = measured("train", metrics) | measured("valid", valid_metrics)
                bar.update(task, advance=1, description=figures_text(row))
            valid_metrics.reset()
            model.eval()
            evaluate(model, valid_metrics, *valid_set)
            history.append(measured("train", metrics) | measured("valid", valid_metrics))
            bar.update(task, description=figures_text(history[-1]))
            bar.console.print(f"epoch {epoch:2}: {figures_text(history[-1])}", highlight=False)
    return history


def measured(part: str, metrics: nnx.MultiMetric) -> dict[str, float]:
    return {f"{part}_{name}": float(value) for name, value in metrics.compute().items()}


def figures_text(row: dict[str, float]) -> str:
    """For example `train 0.052  98.5 %  validation 0.079  97.2 %`: loss and accuracy of each."""
    parts = [f"train {row['train_loss']:.3f} {100 * row['train_accuracy']:5.1f} %"]
    if not math.isnan(row["valid_loss"]):  # before the first epoch ends nothing is validated
        parts.append(f"validation {row['valid_loss']:.3f} {100 * row['valid_accuracy']:5.1f} %")
    return "  ".join(parts)


def save(model: Network, path: Path) -> None:
    """Write every trained array under its path in the model, such as `conv1/kernel`."""
    flat = nnx.to_flat_state(nnx.state(model, TRAINED))
    np.savez(path, **{"/".join(map(str, key)): np.asarray(leaf[...]) for key, leaf in flat})


def load(model: Network, path: Path) -> None:
    """Read into `model` what `save` wrote."""
    flat = nnx.to_flat_state(nnx.state(model, TRAINED))
    with np.load(path) as file:
        loaded = [
            (key, leaf.replace(jnp.asarray(file["/".join(map(str, key))]))) for key, leaf in flat
        ]
    nnx.update(model, nnx.from_flat_state(loaded))


INK, TRAIN, VALID, WRONG = "#22303c", "#8aa1b4", "#d1603d", "#b3261e"


def draw(history: list[dict[str, float]], probs: np.ndarray, test: Split, path: Path) -> None:
    """Curves of loss and accuracy on the left, the misread digits on the right."""
    style = {"font.size": 9, "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK}
    with plt.rc_context(style | {"axes.spines.top": False, "axes.spines.right": False}):
        figure = plt.figure(figsize=(11, 5.2), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
        left, right = figure.subfigures(1, 2, width_ratios=[1.05, 1], wspace=0.04)
        draw_curves(left, history)
        draw_misread(right, probs, test)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_curves(figure, history: list[dict[str, float]]) -> None:
    loss, accuracy = figure.subplots(2, 1, sharex=True)
    epochs = range(1, len(history) + 1)
    for axes, name, scale in ((loss, "loss", 1), (accuracy, "accuracy", 100)):
        for part, colour, label in (("train", TRAIN, "training"), ("valid", VALID, "validation")):
            values = [scale * row[f"{part}_{name}"] for row in history]
            axes.plot(epochs, values, color=colour, label=label, lw=1.8, marker="o", ms=3)
        axes.grid(axis="y", alpha=0.25, lw=0.6)
    loss.set(yscale="log", ylabel="cross-entropy")
    loss.legend(frameon=False)
    accuracy.set(ylabel="accuracy (%)", xlabel="epoch")
    accuracy.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle("Training", fontweight="bold")


def draw_misread(figure, probs: np.ndarray, test: Split, rows: int = 3, columns: int = 4) -> None:
    """The misread digits first; the places left over show the closest calls among the rest."""
    guesses = probs.argmax(-1)
    certainty = probs[np.arange(len(probs)), test.labels]
    wrong = int((guesses != test.labels).sum())
    order = np.lexsort((certainty, guesses == test.labels))
    for axes, i in zip(figure.subplots(rows, columns).flat, order, strict=False):
        misread = guesses[i] != test.labels[i]
        axes.imshow(test.images[i, :, :, 0], cmap="gray_r", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(visible=True, color=WRONG if misread else TRAIN, lw=2 if misread else 1)
        if misread:
            text = f"{test.labels[i]} read as {guesses[i]}"
        else:
            text = f"{test.labels[i]}, {100 * certainty[i]:.0f} % sure"
        axes.set_title(text, fontsize=9, color=WRONG if misread else INK)
    places = rows * columns
    rest = ", then the closest calls" if wrong < places else f", the first {places} of them"
    figure.suptitle(f"{wrong} of {len(guesses)} test digits misread{rest}", fontweight="bold")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> tp.NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def whole_number(minimum: int):
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"a whole number from {minimum} up, not {text!r}")
        return int(text)

    return parse


def number(minimum: float, limit: float):
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not minimum <= value < limit:
            raise argparse.ArgumentTypeError(
                f"a number from {minimum:g} to below {limit:g}, not {text!r}"
            )
        return value

    return parse


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="digits.py", description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=whole_number(1), help="default: 15, with --quick 3")
    parser.add_argument("--batch-size", type=whole_number(1), default=32, help="default: 32")
    parser.add_argument("--lr", type=number(1e-6, 10), default=0.01, help="peak; default: 0.01")
    parser.add_argument("--dropout", type=number(0, 1), default=0.3, help="rate; default: 0.3")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="default: 0")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder; default: out")
    parser.add_argument("--quick", action="store_true", help="a short run")
    options = parser.parse_args(arguments)
    options.epochs = options.epochs or (3 if options.quick else 15)
    try:
        check_writable(options.out, ("digits.png", "digits.npz"))
    except OSError as error:
        parser.exit(1, f"{parser.prog}: error: cannot write to {options.out}: {error.strerror}\n")
    return options


def check_writable(folder: Path, names: tuple[str, ...]) -> None:
    """Find out before training, not after it, that a result could not be written."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / name for name in names):
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    train_set, valid_set, test_set = load_splits()
    if options.batch_size > len(train_set.labels):
        sys.exit(
            f"digits.py: error: --batch-size {options.batch_size} is more than the"
            f" {len(train_set.labels)} training scans"
        )

    model = Network(dropout=options.dropout, rngs=nnx.Rngs(options.seed))
    history = train(model, train_set, valid_set, options)
    probs = np.asarray(probabilities(model, test_set.images))

    save(model, options.out / "digits.npz")
    reloaded = Network(dropout=options.dropout, rngs=nnx.Rngs(options.seed + 1))
    reloaded.eval()
    load(reloaded, options.out / "digits.npz")
    if not np.array_equal(probs, probabilities(reloaded, test_set.images)):
        sys.exit("digits.py: error: the reloaded network does not predict what the trained one did")
    draw(history, probs, test_set, options.out / "digits.png")

    right = int((probs.argmax(-1) == test_set.labels).sum())
    print(f"curves and misread digits: {options.out / 'digits.png'}")
    print(f"network, reloaded with identical predictions: {options.out / 'digits.npz'}")
    print(f"test accuracy {100 * right / len(probs):.2f} % ({right} of {len(probs)})")


if __name__ == "__main__":
    main()
