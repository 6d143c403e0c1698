"""Learn the dynamics of two animal populations from noisy counts, and predict beyond them.

The true system is that of Lotka and Volterra: prey multiply and are eaten, predators starve and feed.
The model knows only that the populations follow some differential equation, whose right-hand side is
a small network. diffrax solves it, and gradients go through the solver: `nnx.split` turns the module
into the pytree that diffrax takes as `args`, and the right-hand side calls what `nnx.merge` returns.

Training compares short stretches of solutions, each begun at a count, with the counts that follow.
The test solves once from the start, four times as long as training saw, for trajectories that were
not in training.

    pip install "nnxlite[examples,ode]"
    python examples/neural_ode.py            # a minute or two on two CPU cores
    python examples/neural_ode.py --quick    # half a minute, and a rougher model

Result: an error of the predicted populations of at most 5 % within the time of training and 12 % over
four times as long; with `--quick`, at most 15 % and 40 %. `neural_ode.png` in the output folder shows
one test trajectory over time, and some in the plane of both populations.

Sources: neural ordinary differential equations by Chen et al. (2018), arXiv:1806.07366; diffrax by
Kidger (2021), arXiv:2202.02435.
"""

from __future__ import annotations

import argparse
import sys
import typing as tp
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import nnxlite as nnx

try:
    import diffrax
except ImportError as error:
    sys.exit(
        f"neural_ode.py: error: {error.name} is not installed; install it by"
        ' pip install "nnxlite[examples,ode]"'
    )

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BIRTH, EATEN, FED, DEATH = 1.0, 0.5, 0.25, 0.5  # of the true system
OBSERVED, PREDICTED = 10.0, 40.0  # time of training, and of the prediction
EVERY, NOISE = 0.25, 0.02  # time between counts, and the standard deviation of their logarithms
TIMES = jnp.arange(0.0, PREDICTED + EVERY, EVERY)
STRETCH = 5  # counts that a stretch of training predicts
TRAJECTORIES, TESTS = 64, 16


class Field(nnx.Module):
    """The rates of change (2,) of the logarithms of both populations, given these logarithms (2,)."""

    def __init__(self, rngs: nnx.Rngs):
        self.net = nnx.MLP(2, 2, 64, 2, activation=nnx.tanh, rngs=rngs)

    def __call__(self, state: jax.Array) -> jax.Array:
        return self.net(state)


def true_field(state: jax.Array) -> jax.Array:
    """The same for the true system: the logarithm of prey grows by BIRTH - EATEN * predators."""
    prey, predators = jnp.exp(state)
    return jnp.stack([BIRTH - EATEN * predators, FED * prey - DEATH])


def integrate(field: tp.Callable, start: jax.Array, times: jax.Array, args: tp.Any) -> jax.Array:
    """The states (times, 2) of `field(t, state, args)` after `start` (2,)."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=0.0,
        t1=times[-1],
        dt0=EVERY,
        y0=start,
        args=args,
        saveat=diffrax.SaveAt(ts=times),
    )
    return solution.ys


@nnx.vmap(in_axes=(None, 0, None))
def predict(model: Field, start: jax.Array, times: jax.Array) -> jax.Array:
    """States (trajectories, times, 2) by the model; `start` is (trajectories, 2)."""
    graphdef, params = nnx.split(model)

    def field(time: jax.Array, state: jax.Array, params: nnx.State) -> jax.Array:
        return nnx.merge(graphdef, params)(state)

    return integrate(field, start, times, params)


@jax.jit
def truth(key: jax.Array) -> jax.Array:
    """States (times, 2) of the true system, from 1 to 4 of prey and 1 to 3 of predators."""
    start = jnp.log(jax.random.uniform(key, (2,), minval=1.0, maxval=jnp.array([4.0, 3.0])))
    return integrate(lambda t, state, _: true_field(state), start, TIMES, None)


def stretches(states: jax.Array) -> jax.Array:
    """Trajectories (trajectories, times, 2) in pieces (pieces, STRETCH + 1, 2) that share an end."""
    first = jnp.arange(0, states.shape[1] - STRETCH, STRETCH)
    return states[:, first[:, None] + jnp.arange(STRETCH + 1)].reshape(-1, STRETCH + 1, 2)


@nnx.jit
def train_step(model: Field, optimizer: nnx.Optimizer, pieces: jax.Array) -> jax.Array:
    """One step of gradient descent, in place; `pieces` is (pieces, STRETCH + 1, 2)."""

    def loss_of(model: Field) -> jax.Array:
        predicted = predict(model, pieces[:, 0], TIMES[: STRETCH + 1])
        return jnp.square(predicted - pieces)[:, 1:].mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def train(model: Field, steps: int, pieces: jax.Array) -> None:
    """Train in place."""
    schedule = optax.cosine_decay_schedule(5e-3, steps)
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
    bar = Progress(
        TextColumn("{task.completed}/{task.total} steps"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with bar:
        task = bar.add_task("compiling", total=steps)
        for _ in range(steps):
            loss = train_step(model, optimizer, pieces)
            bar.update(task, advance=1, description=f"squared error {loss:.5f}")


def error(predicted: np.ndarray, exact: np.ndarray) -> float:
    """The root of the mean squared error of populations, relative to the mean population."""
    return float(np.sqrt(np.square(predicted - exact).mean()) / exact.mean())


INK, PREY, PREDATORS, TRUE = "#22303c", "#1b6e53", "#d1603d", "#8aa1b4"


def draw(predicted: np.ndarray, exact: np.ndarray, model: Field, path: Path) -> None:
    """Populations (trajectories, times, 2): the first over time, some in the plane of both."""
    style = {"font.size": 9, "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK}
    with plt.rc_context(style | {"axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 4.4), width_ratios=[1.5, 1], layout="constrained"
        )
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
        draw_over_time(left, predicted[0], exact[0])
        draw_plane(right, predicted[:4], exact[:4], model)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_over_time(axes, predicted: np.ndarray, exact: np.ndarray) -> None:
    axes.axvspan(0, OBSERVED, color=TRUE, alpha=0.15, lw=0)
    axes.text(OBSERVED / 2, 0.02, "time of training", ha="center", va="bottom", color=INK)
    for column, name, colour in ((0, "prey", PREY), (1, "predators", PREDATORS)):
        axes.plot(TIMES, exact[:, column], color=colour, lw=4, alpha=0.3, label=f"{name}, true")
        axes.plot(TIMES, predicted[:, column], color=colour, lw=1.3, label=f"{name}, predicted")
    axes.set(xlabel="time", ylabel="population", xlim=(0, PREDICTED), ylim=(0, 1.25 * exact.max()))
    axes.legend(frameon=False, ncols=2, loc="upper right")
    axes.set_title("A trajectory that was not in training", fontweight="bold")


def draw_plane(axes, predicted: np.ndarray, exact: np.ndarray, model: Field) -> None:
    top = 1.1 * exact.max((0, 1))
    prey, predators = np.meshgrid(np.linspace(0.15, top[0], 30), np.linspace(0.15, top[1], 30))
    state = np.stack([prey, predators], -1)
    rates = state * np.asarray(model(jnp.log(state)))
    axes.streamplot(
        prey, predators, *rates.transpose(2, 0, 1), color=TRUE, linewidth=0.6, arrowsize=0.7
    )
    for number in range(len(exact)):
        names = ("true orbit", "predicted") if number == 0 else (None, None)
        axes.plot(*exact[number].T, color=INK, lw=4, alpha=0.25, label=names[0])
        axes.plot(*predicted[number].T, color=PREDATORS, lw=1, label=names[1])
    axes.set(xlabel="prey", ylabel="predators", xlim=(0, top[0]), ylim=(0, top[1]))
    axes.legend(frameon=True, framealpha=0.9, edgecolor="white", loc="upper right")
    axes.set_title("Learned rates of change", fontweight="bold")


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


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="neural_ode.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=whole_number(1), help="default: 1500, with --quick 400")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="default: 0")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder; default: out")
    parser.add_argument("--quick", action="store_true", help="a short run")
    options = parser.parse_args(arguments)
    options.steps = options.steps or (400 if options.quick else 1500)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(1, f"{parser.prog}: error: cannot write to {options.out}: {error.strerror}\n")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    rngs = nnx.Rngs(options.seed)
    exact = jax.vmap(truth)(jax.random.split(rngs(), TRAJECTORIES + TESTS))
    seen = TIMES <= OBSERVED
    counts = exact[:TRAJECTORIES, seen]
    model = Field(rngs)
    train(model, options.steps, stretches(counts + NOISE * rngs.normal(counts.shape)))

    states = exact[TRAJECTORIES:]
    predicted, exact = np.exp(nnx.jit(predict)(model, states[:, 0], TIMES)), np.exp(states)
    draw(predicted, exact, model, options.out / "neural_ode.png")
    print(f"trajectories, and the learned rates: {options.out / 'neural_ode.png'}")
    print(
        f"error of the populations: {100 * error(predicted[:, seen], exact[:, seen]):.1f} % within"
        f" the time of training, {100 * error(predicted, exact):.1f} % in {PREDICTED / OBSERVED:.0f}"
        f" times as long; noise {100 * NOISE:.0f} %"
    )


if __name__ == "__main__":
    main()
