"""Find nine mistakes that raise no error in a recurrent reader of digits, with a tool for each.

`Reader` goes over the rows of a scan in both directions with gated recurrent units. Somebody wrote it
and its training in a hurry: the program runs, and the model never learns. This example examines it. It
runs a tool, prints what the tool says, repairs the model in place, and goes on; at the end it trains
the model. The 1,797 scans of 8 x 8 pixels ship inside scikit-learn, so nothing is downloaded.

    python examples/find_the_mistakes.py            # less than a minute on two CPU cores
    python examples/find_the_mistakes.py --quick    # less training

Result: all 9 mistakes are found, and the accuracy on the 360 test scans rises from about 10 % to at
least 96 %; with `--quick`, to at least 85 %. The output folder then contains `find_the_mistakes.png`,
with accuracies, gradients and activations before and after, and `find_the_mistakes.svg`, a picture
of the repaired model.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing as tp
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.padding import Padding
from rich.progress import track
from rich.table import Table
from rich.text import Text
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlite as nnx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROWS = COLUMNS = 8
WIDTH, HIDDEN, DIGITS = 24, 64, 10
BATCH, RATE, SMOOTHING = 64, 3e-3, 0.1
PLANTED = 9
BLANK = 100  # which training scan is an empty sheet
console = Console(highlight=False)


# The program as somebody wrote it -----------------------------------------------------------


class Contrast(nnx.Module):
    """Divides each scan by its darkest pixel, or by `least` if that is larger."""

    def __init__(self, least: float = 0.0):
        self.least = least

    def __call__(self, scans: jax.Array) -> jax.Array:
        return scans / jnp.maximum(scans.max((1, 2), keepdims=True), self.least)


class Record(nnx.Module):
    """Records what passes through it, for a look at it later."""

    def __init__(self, only_in_capture: bool = False):
        self.only_in_capture = only_in_capture

    def __call__(self, states: jax.Array) -> jax.Array:
        self.sow(nnx.Intermediate, "states", states, capture_noop=self.only_in_capture)
        return states


class Readout(nnx.Module):
    """Logits from the states of all rows: of the last row, or of their mean."""

    def __init__(self, *, of_mean: bool = False, rngs: nnx.Rngs):
        self.of_mean = of_mean
        self.layers = nnx.Sequential(
            nnx.Linear(2 * WIDTH, HIDDEN, kernel_init=nnx.initializers.zeros, rngs=rngs),
            nnx.relu,
            nnx.Dropout(0.2, rngs=rngs),
            nnx.Linear(HIDDEN, DIGITS, rngs=rngs),
        )

    def __call__(self, states: jax.Array) -> jax.Array:
        """(batch, rows, features) to (batch, digits)."""
        if self.of_mean:
            return self.layers(states.mean(axis=1))
        return self.layers(states)[:, -1]


class Reader(nnx.Module):
    """Reads a scan row by row, downwards and upwards."""

    def __init__(self, rngs: nnx.Rngs):
        self.contrast = Contrast()
        self.embed = nnx.Linear(COLUMNS, WIDTH, rngs=rngs)
        self.position = rngs.normal((ROWS, WIDTH))
        cell = nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)
        down, up = (nnx.RNN(cell, rngs=False) for _ in range(2))  # both start from zeros
        self.rows = nnx.Bidirectional(down, up, rngs=False)
        self.record = Record()
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.readout = Readout(rngs=rngs)
        self.smoothing = SMOOTHING  # of the labels; it falls during training

    def __call__(self, scans: jax.Array) -> jax.Array:
        """Scans (batch, 8, 8) to logits (batch, 10)."""
        states = self.rows(self.embed(self.contrast(scans)) + self.position)
        return self.readout(self.drop(self.record(states)))


def loss_of(model: Reader, scans: jax.Array, labels: jax.Array) -> jax.Array:
    targets = optax.smooth_labels(jax.nn.one_hot(labels, DIGITS), model.smoothing)
    return optax.softmax_cross_entropy(model(scans), targets).mean()


@nnx.jit
def train_step(
    model: Reader, optimizer: nnx.Optimizer, scans: jax.Array, labels: jax.Array
) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, scans, labels)
    optimizer.update(model, grads)
    return loss


def optimizer_as_written(model: Reader) -> nnx.Optimizer:
    return nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.PathContains("kernel"))


def evaluation_as_written(model: Reader) -> Reader:
    return nnx.view(model, only=nnx.PathContains("readout"), deterministic=True)


def train_as_written(model: Reader, data: Data, steps: int) -> list[float]:
    """Train in place; the loss of each step."""
    optimizer, losses = optimizer_as_written(model), []
    for step in range(steps):
        model.smoothing = SMOOTHING * (1 - step / 1000)
        losses.append(float(train_step(model, optimizer, *data.batch(step))))
    return losses


# The data, and training as it should be -----------------------------------------------------


class Data(tp.NamedTuple):
    """Scans (count, 8, 8) of levels from 0 to 16, and labels (count,)."""

    scans: np.ndarray
    labels: np.ndarray

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(number * BATCH, (number + 1) * BATCH)
        return self.scans[rows], self.labels[rows]

    def shuffled(self, rng: np.random.Generator) -> Data:
        order = rng.permutation(len(self.labels))
        return Data(self.scans[order], self.labels[order])


def load_data() -> tuple[Data, Data]:
    """Training and test scans, always the same ones; one sheet for training is empty."""
    scans, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        scans.reshape(-1, ROWS, COLUMNS).astype(np.float32),
        labels,
        test_size=0.2,
        stratify=labels,
        random_state=0,
    )
    train[BLANK] = 0.0
    return Data(train, train_labels), Data(test, test_labels)


@nnx.jit
def accuracy(model: Reader, scans: jax.Array, labels: jax.Array) -> jax.Array:
    return (model(scans).argmax(-1) == labels).mean()


def evaluation(model: Reader) -> Reader:
    """The same Variables, and no dropout anywhere."""
    return nnx.view(model, deterministic=True)


def train(model: Reader, train_set: Data, test_set: Data, epochs: int, seed: int) -> list[float]:
    """Train in place; the test accuracy before the first epoch and after each."""
    rng, steps = np.random.default_rng(seed), len(train_set.labels) // BATCH
    rate = optax.cosine_decay_schedule(RATE, epochs * steps)
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)
    curve = [float(accuracy(evaluation(model), *test_set))]
    for epoch in track(range(epochs), "training", console=console, transient=True):
        model.smoothing[...] = SMOOTHING * (1 - epoch / epochs)
        shuffled = train_set.shuffled(rng)
        for number in range(steps):
            train_step(model, optimizer, *shuffled.batch(number))
        curve.append(float(accuracy(evaluation(model), *test_set)))
    return curve


# The examination ----------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """The model, a good batch and the bad one, and what the tools have found."""

    model: Reader
    optimizer: nnx.Optimizer
    good: tuple[np.ndarray, np.ndarray]
    bad: tuple[np.ndarray, np.ndarray]
    found: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)

    def note(self, found: object, mistake: str, tool: str, remedy: str) -> None:
        """Write a mistake down, if the tool has found it."""
        if found:
            self.found.append((mistake, tool, remedy))
            console.print(Text.assemble("  found: ", (mistake, "bold red")))
            console.print(Text.assemble("  remedy: ", (remedy, "green")))


def ask(question: str, tool: str) -> None:
    console.print(Text.assemble("\n", (question, "bold"), f"  {tool}"))


def say(answer: object) -> None:
    """Print what a tool says, indented."""
    console.print(Padding(Text(str(answer).strip(), style="cyan"), (0, 0, 0, 4), expand=False))


def why_it_compiles(case: Case, causes: tp.Sequence[str], ran: Reader) -> None:
    """`causes` are those of the last compiled step of a copy, which is `ran`."""
    ask("Why is each step compiled again?", "nnx.explain_compiles, train_step.explain()")
    for cause in causes:
        say(cause)
    before, after = (nnx.memory(model).by_kind for model in (case.model, ran))
    grown = after.get("Intermediate", 0) - before.get("Intermediate", 0)
    say(f"nnx.memory: {grown:,} bytes of Intermediate that were not there before")
    case.note(
        grown and any("record.states" in cause for cause in causes),
        "what is recorded in training is never taken out",
        "explain_compiles, memory",
        "sow(..., capture_noop=True)",
    )
    case.model.record.only_in_capture = True
    _, recorded = nnx.capture(evaluation(case.model), nnx.Intermediate)(case.good[0])
    say(f"nnx.capture still has it: float32{list(recorded['record']['states'].value[0].shape)}")
    case.note(
        any("smoothing" in cause for cause in causes),
        "a Python number changes in every step",
        "explain()",
        "an nnx.Variable",
    )
    case.model.smoothing = nnx.data(nnx.Variable(jnp.array(SMOOTHING)))


def where_the_nan_is_from(case: Case) -> None:
    ask("Where is the first NaN from?", "nnx.find_nan")
    found = nnx.find_nan(loss_of, evaluation(case.model), *case.bad)
    say(found)
    case.note(
        found and found.path == "model.contrast",
        "an empty sheet is divided by its darkest pixel, 0",
        "find_nan",
        "divide by 1 or more",
    )
    case.model.contrast.least = 1.0


def what_is_dead(case: Case) -> nnx.Statistics:
    """The statistics of the model as it was."""
    ask("Do values and gradients pass all layers?", "nnx.statistics")
    report = nnx.statistics(loss_of, evaluation(case.model), *case.good)
    table = Table("layer", "std", "zeros", box=None)
    for path in LAYERS:
        row = report[path]
        table.add_row(path, f"{row.std:.3f}", f"{row.zeros:.0%}")
    console.print(Padding(table, (0, 0, 0, 3)), style="cyan")
    silent = sum(row.gradient_norm == 0 for row in report.gradients.values())
    say(f"{silent} of {len(report.gradients)} parameters have a gradient of 0")
    layer = case.model.readout.layers.layers[0]
    dead = [
        row.path for row in report.outputs.values() if row.module == "Linear" and row.zeros == 1
    ]
    case.note(
        silent and dead and dead[0] == "model.readout.layers.layers.0",
        "a layer before a relu starts with a kernel of zeros",
        "statistics",
        "a random kernel",
    )
    key = jax.random.key(0)
    layer.kernel[...] = nnx.initializers.lecun_normal()(key, layer.kernel.shape)
    return report


class Probe(nnx.Module):
    """A layer whose output can be perturbed, so that it has a gradient."""

    def __init__(self, layer: nnx.Module):
        self.layer = layer

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.perturb("output", self.layer(x))


@nnx.jit
def gradients_by_row(probed: Reader, scans: jax.Array, labels: jax.Array) -> jax.Array:
    """The norm of the gradient of the loss with respect to the states of each row, (8,)."""
    _, zeros = nnx.capture(loss_of, nnx.Perturbation)(probed, scans, labels)

    def perturbed(probed: Reader, perturbation: nnx.State) -> jax.Array:
        loss, _ = nnx.capture(loss_of, nnx.Perturbation, init=perturbation)(probed, scans, labels)
        return loss

    grads = nnx.grad(perturbed, argnums=1)(probed, zeros)
    return jnp.linalg.norm(grads["rows"]["output"][...], axis=(0, 2))


def probe(model: Reader) -> Reader:
    """A view of the model with a probe behind the recurrent layer."""
    probed = evaluation(model)
    probed.rows = Probe(probed.rows)
    return probed


def which_rows_count(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Gradients by row before and after the repair.

    In the last row, the upward half of the state has read that row alone.
    """
    ask("What does a step cost, and what for?", "nnx.profile, nnx.Perturbation")
    costs = nnx.profile(train_step, case.model, case.optimizer, *case.good).to_depth(2)
    say(costs)
    before = np.asarray(gradients_by_row(probe(case.model), *case.good))
    say("gradient of the states, by row: " + " ".join(f"{norm:.2g}" for norm in before))
    case.model.readout.of_mean = True
    after = np.asarray(gradients_by_row(probe(case.model), *case.good))
    cheaper = nnx.profile(train_step, case.model, case.optimizer, *case.good).to_depth(2)
    old, new = (report.rows["Reader/readout"].flops for report in (costs, cheaper))
    case.note(
        np.flatnonzero(before).tolist() == [ROWS - 1] and old > 7 * new,
        "layers run on all rows, for the logits of the last one",
        "profile, Perturbation",
        "take the mean first",
    )
    say(f"readout: {old:,} operations forward became {new:,}")
    return before, after


def what_is_shared(case: Case) -> None:
    ask("Which cells run, with which parameters?", "nnx.tabulate, nnx.find_duplicates")
    table = nnx.tabulate(
        case.model.rows,
        jax.ShapeDtypeStruct((1, ROWS, WIDTH), "float32"),
        row_filter=lambda row: row.type is nnx.GRUCell and row.path[-1] == "cell",
        console_kwargs={"width": 76},
    )
    say(table)
    shared = nnx.find_duplicates(case.model)
    say(f"the same objects: {', '.join('.'.join(path) for paths in shared for path in paths)}")
    case.note(
        shared,
        "both directions share one cell",
        "tabulate, find_duplicates",
        "a cell for each",
    )
    case.model.rows.forward_rnn.cell = nnx.GRUCell(WIDTH, WIDTH, rngs=nnx.Rngs(1))


def what_does_not_train(case: Case) -> None:
    ask("What will go wrong silently?", "nnx.check")
    findings = nnx.check(case.model, case.optimizer, case.good[0])
    modes = nnx.check(evaluation_as_written(case.model))
    for kind in ("bare array", "outside wrt"):
        say_first(kind, findings)
    say_first("mixed modes", modes)
    case.note(
        ("position",) in paths_of("bare array", findings),
        "the position embedding is an array, not a Param",
        "check",
        "an nnx.Param",
    )
    case.model.position = nnx.Param(case.model.position)
    case.note(
        ("embed", "bias") in paths_of("outside wrt", findings),
        "the optimizer selects kernels, and no bias",
        "check",
        "wrt=nnx.Param",
    )
    case.optimizer = nnx.Optimizer(case.model, optax.adam(RATE), wrt=nnx.Param)
    case.note(
        ("drop",) in paths_of("mixed modes", modes),
        "evaluation with a part still in training mode",
        "check",
        "nnx.view of the whole model",
    )
    say(f"once more: {nnx.check(case.model, case.optimizer, case.good[0])}")


def paths_of(kind: str, findings: nnx.Findings) -> list[tuple]:
    return [finding.path for finding in findings if finding.kind == kind]


def say_first(kind: str, findings: nnx.Findings) -> None:
    chosen = [finding for finding in findings if finding.kind == kind]
    for finding in chosen[:1]:
        more = f" (and {len(chosen) - 1} more)" if len(chosen) > 1 else ""
        say(f"{kind}: {'.'.join(map(str, finding.path))}: {finding.text}{more}")


# Results ------------------------------------------------------------------------------------

INK, BEFORE, AFTER = "#22303c", "#8aa1b4", "#d1603d"
LAYERS = {
    "model.embed": "embedding",
    "model.rows.forward_rnn": "rows, downwards",
    "model.rows.backward_rnn": "rows, upwards",
    "model.readout.layers.layers.0": "hidden layer",
    "model.readout": "logits",
}


def draw(
    curves: tuple[list[float], list[float]],
    gradients: tuple[np.ndarray, np.ndarray],
    statistics: tuple[nnx.Statistics, nnx.Statistics],
    path: Path,
) -> None:
    """Accuracy, gradients by row and activations by layer; of each pair, before and after.

    The accuracy of what was written stays as it is, since all of its parameters are NaN.
    """
    style = {"font.size": 9, "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK}
    with plt.rc_context(style | {"axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(1, 3, figsize=(12.4, 4.2), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, wspace=0.04)
        draw_curves(axes[0], *curves)
        draw_gradients(axes[1], *gradients)
        draw_statistics(axes[2], *statistics)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_curves(axes: plt.Axes, before: list[float], after: list[float]) -> None:
    epochs = len(after) - 1
    axes.plot(100 * np.array(after), color=AFTER, lw=1.8)
    axes.plot([0, epochs], [100 * before[-1]] * 2, color=BEFORE, lw=1.8)
    axes.text(epochs, 100 * after[-1] - 3, "repaired", color=AFTER, ha="right", va="top")
    axes.text(epochs, 100 * before[-1] + 2, "as written: NaN from step 2", color=INK, ha="right")
    axes.set(xlabel="epoch", ylabel="test accuracy (%)", ylim=(0, 101))
    axes.grid(axis="y", alpha=0.25, lw=0.6)
    axes.set_title("Training", fontweight="bold")


def draw_gradients(axes: plt.Axes, before: np.ndarray, after: np.ndarray) -> None:
    rows = np.arange(1, ROWS + 1)
    axes.barh(rows - 0.2, before / before.sum(), 0.38, color=BEFORE, label="logits of the last row")
    axes.barh(rows + 0.2, after / after.sum(), 0.38, color=AFTER, label="logits of the mean")
    axes.set(xlabel="share of the gradient", ylabel="row of the scan", yticks=rows)
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="center right")
    axes.set_title("States that the loss depends on", fontweight="bold")


def draw_statistics(axes: plt.Axes, before: nnx.Statistics, after: nnx.Statistics) -> None:
    places = np.arange(len(LAYERS))
    for report, colour, offset in ((before, BEFORE, -0.2), (after, AFTER, 0.2)):
        heights = [report[path].std for path in LAYERS]
        axes.barh(places + offset, heights, 0.38, color=colour)
    for place, path in enumerate(LAYERS):
        if before[path].zeros == 1:
            axes.text(0, place - 0.2, " all zeros", va="center")
    axes.set(xlabel="standard deviation", yticks=places, yticklabels=LAYERS.values())
    axes.invert_yaxis()
    axes.set_title("Activations by layer", fontweight="bold")


def table_of(found: list[tuple[str, str, str]]) -> Table:
    table = Table("", "mistake", "tool", "remedy", title="Findings")
    for number, row in enumerate(found, 1):
        table.add_row(str(number), *row)
    return table


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> tp.NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def whole_number(minimum: int) -> tp.Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"a whole number from {minimum} up, not {text!r}")
        return int(text)

    return parse


def folder(text: str) -> Path:
    """An output folder, made before training rather than after it."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write to {text}: {error.strerror}") from None
    return path


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="find_the_mistakes.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=whole_number(1), help="default: 40, with --quick 15")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="default: 0")
    parser.add_argument("--out", type=folder, default="out", help="folder; default: out")
    parser.add_argument("--quick", action="store_true", help="a short run")
    options = parser.parse_args(arguments)
    options.epochs = options.epochs or (15 if options.quick else 40)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    train_set, test_set = load_data()
    model = Reader(nnx.Rngs(options.seed))
    original, ran = nnx.clone(model), nnx.clone(model)

    console.print(Text("The symptoms", style="bold"))
    with nnx.explain_compiles(show=lambda text: say(text.splitlines()[0])):
        losses = train_as_written(ran, train_set, steps=3)
    causes = train_step.explain().causes
    before = float(accuracy(evaluation_as_written(ran), *test_set))
    say("loss by step: " + " ".join(f"{loss:.3f}" for loss in losses))
    say(f"accuracy on the test scans: {before:.1%}")

    case = Case(model, optimizer_as_written(model), train_set.batch(0), train_set.batch(1))
    why_it_compiles(case, causes, ran)
    where_the_nan_is_from(case)
    statistics_before = what_is_dead(case)
    gradients = which_rows_count(case)
    what_is_shared(case)
    what_does_not_train(case)

    ask("What do the repairs change?", "nnx.diff")
    say(nnx.diff(original, model))
    curve = train(model, train_set, test_set, options.epochs, options.seed)

    report = nnx.statistics(loss_of, evaluation(model), *case.good)
    picture, drawing = (options.out / f"find_the_mistakes.{suffix}" for suffix in ("png", "svg"))
    draw(([before], curve), gradients, (statistics_before, report), picture)
    nnx.draw(model, case.good[0]).save(drawing)
    console.print()
    console.print(table_of(case.found))
    print(f"curves, gradients and activations: {picture}; the repaired model: {drawing}")
    print(
        f"{len(case.found)} of {PLANTED} mistakes found;"
        f" test accuracy {before:.1%} before, {curve[-1]:.1%} after"
    )


if __name__ == "__main__":
    main()
