"""Train a deep equilibrium model: one layer, applied until its output no longer changes.

The output is a fixed point of the layer, and does not depend on how it is found. An `nnx.while_loop`
with Anderson acceleration finds it. The gradient depends on the fixed point alone, too, so it does not
go back through the loop: `nnx.custom_vjp` replaces it by a second loop, of vector-Jacobian products,
and memory does not grow with the number of steps. `nnx.SpectralNorm` keeps the layer a contraction,
so there is exactly one fixed point. `nnx.checkify` turns a state that has not converged into an error:
try `--limit 5`.

The data are the 1,797 scans of handwritten digits inside scikit-learn; one fifth is the test set.

    python examples/deep_equilibrium.py            # less than a minute on two CPU cores
    python examples/deep_equilibrium.py --quick    # less than half of that, mostly compilation

Result: a test accuracy of at least 96 %, with `--quick` at least 93 %, and gradients that differ from
those of the unrolled iteration by less than 1e-3 of their norm. `deep_equilibrium.png` in the output
folder shows how a search converges, how many steps it takes, what they depend on, and how many of
them the accuracy needs.

Sources: deep equilibrium models by Bai, Kolter and Koltun (NeurIPS 2019), arXiv:1909.01377; Anderson
acceleration as described by Walker and Ni (2011), https://doi.org/10.1137/10078356X; spectral
normalization by Miyato et al. (2018), arXiv:1802.05957.
"""

from __future__ import annotations

import argparse
import functools
import sys
import typing as tp
from pathlib import Path

import jax
import jax.flatten_util
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax.experimental import checkify
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nnxlite as nnx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PIXELS, WIDTH, DIGITS = 64, 128, 10
GAIN = 0.9  # Lipschitz constant of the layer, where the norm of its kernel is one
TOLERANCE = 1e-5  # of the residual: the change in one step, relative to the state
MEMORY = 5  # states that Anderson acceleration combines
PATIENCE = 50  # steps of it before plain iteration takes over
UNROLLED, TRACED = 150, 100  # steps of the check of gradients, and of the picture
BATCH, LEARNING_RATE = 64, 2e-3

Step = tp.Callable[[jax.Array], jax.Array]
"""From states (batch, width) to the next ones."""


class Layer(nnx.Module):
    """`tanh(GAIN * state @ kernel + drive)`; a contraction while the norm of the kernel is one."""

    def __init__(self, rngs: nnx.Rngs):
        self.mix = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, state_and_drive: tuple[jax.Array, jax.Array]) -> jax.Array:
        state, drive = state_and_drive
        return nnx.tanh(GAIN * self.mix(state) + drive)


class Search(tp.NamedTuple):
    """The latest `MEMORY` states and what the layer makes of each, the newest first."""

    states: jax.Array
    values: jax.Array
    """Both (memory, batch, width)."""
    count: jax.Array
    """How many times the layer was applied."""

    @classmethod
    def start(cls, first: jax.Array) -> Search:
        """At state zero, of which the layer makes `first` (batch, width); all entries are equal."""
        values = jnp.repeat(first[None], MEMORY, 0)
        return cls(jnp.zeros_like(values), values, jnp.array(1))

    def residual(self) -> jax.Array:
        """The relative change (batch,) in the last step."""
        return relative_change(self.states[0], self.values[0])

    def advance(self, step: Step, accelerate: jax.Array) -> Search:
        """One more application of the layer, to the state that one of two rules proposes."""
        state = nnx.cond(accelerate, anderson, plain, self.states, self.values)
        push = lambda new, old: jnp.concatenate([new[None], old[:-1]])
        return Search(push(state, self.states), push(step(state), self.values), self.count + 1)


def relative_change(state: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.linalg.norm(value - state, axis=-1) / (jnp.linalg.norm(value, axis=-1) + 1e-12)


def plain(states: jax.Array, values: jax.Array) -> jax.Array:
    """Go on with the last value."""
    return values[0]


def anderson(states: jax.Array, values: jax.Array) -> jax.Array:
    """The combination of values, with weights of sum one, whose residuals nearly cancel.

    The weights minimize the norm of the combined residual. Residuals are scaled to length one first,
    since they differ by orders of magnitude, and the system is regularized: entries may be equal.
    """
    residuals = (values - states).swapaxes(0, 1)  # (batch, memory, width)
    lengths = jnp.linalg.norm(residuals, axis=-1) + 1e-12
    units = residuals / lengths[..., None]
    gram = units @ units.swapaxes(1, 2) + 1e-5 * jnp.eye(MEMORY)
    weights = jnp.linalg.solve(gram, 1 / lengths[..., None])[..., 0] / lengths
    weights /= weights.sum(-1, keepdims=True)
    return jnp.einsum("bm,mbw->bw", weights, values)


class Solution(tp.NamedTuple):
    """What a search ended with: states (batch, width), their residuals and steps (batch,)."""

    state: jax.Array
    residual: jax.Array
    steps: jax.Array
    """How many times the layer was applied until the residual was below the tolerance."""


def search(step: Step, first: jax.Array, limit: jax.Array | int) -> Solution:
    """Apply `step` until no state changes by more than the tolerance, or `limit` times.

    The search begins at zero, and `first` is what `step` makes of it. Anderson acceleration is fast,
    but can stall; plain iteration always converges, because the layer is a contraction. So plain
    iteration takes over where acceleration needs too long.
    """

    def unfinished(carry: tuple[Search, jax.Array]) -> jax.Array:
        now, _ = carry
        return (now.count < limit) & (now.residual() > TOLERANCE).any()

    def body(carry: tuple[Search, jax.Array]) -> tuple[Search, jax.Array]:
        now, steps = carry
        steps += now.residual() > TOLERANCE
        return now.advance(step, now.count < PATIENCE), steps

    start = (Search.start(first), jnp.ones(len(first), int))
    last, steps = nnx.while_loop(unfinished, body, start)
    return Solution(last.values[0], last.residual(), steps)


Solver = tp.Callable[["Layer", jax.Array, jax.Array, int], Solution]
"""From a layer, its drive, what it makes of state zero, and a limit of steps, to fixed points."""


@nnx.custom_vjp(graph_updates=False)
def equilibrium(layer: Layer, drive: jax.Array, first: jax.Array, limit: int) -> Solution:
    """The fixed points of the layer under `drive`; both arrays are (batch, width)."""
    return search(lambda state: layer((state, drive)), first, limit)


def equilibrium_forward(layer: Layer, drive: jax.Array, first: jax.Array, limit: int):
    solution = equilibrium(layer, drive, first, limit)
    return solution, (layer, drive, solution.state, limit)


def equilibrium_backward(saved, cotangent: Solution):
    """The implicit function theorem: the gradient depends on the fixed point alone.

    z = f(z, ...) implies dz = J dz + df, where J is the Jacobian of f in z. So the cotangent g of z
    becomes the cotangent w = (I - J^T)^-1 g of df, which is the fixed point of w = g + J^T w.
    """
    layer, drive, state, limit = saved
    _, pull_state = nnx.vjp(lambda state: layer((state, drive)), state)
    adjoint = search(lambda w: cotangent.state + pull_state(w)[0], cotangent.state, limit)
    check_converged(adjoint, "adjoint states")
    _, pull = nnx.vjp(lambda layer, drive: layer((state, drive)), layer, drive)
    d_layer, d_drive = pull(adjoint.state)
    return d_layer, d_drive, None, None  # the fixed point depends on neither `first` nor `limit`


equilibrium.defvjp(equilibrium_forward, equilibrium_backward)


def unrolled(layer: Layer, drive: jax.Array, first: jax.Array, limit: int) -> Solution:
    """The same by many steps of plain iteration, which gradients go back through."""
    step = lambda state: layer((state, drive))
    state = nnx.fori_loop(1, UNROLLED - 1, lambda _, state: step(state), first)
    value = step(state)
    return Solution(value, relative_change(state, value), jnp.full(len(first), UNROLLED))


def check_converged(solution: Solution, what: str = "states") -> None:
    """A check of values, which `nnx.checkify` turns into an error that the caller gets."""
    late = solution.residual > TOLERANCE
    checkify.check(
        ~late.any(),
        f"{{late}} of {{all}} {what} did not converge in {{steps}} steps: the largest residual is"
        f" {{residual:.0e}}, the tolerance {TOLERANCE:.0e}",
        late=late.sum(),
        all=jnp.array(len(late)),
        steps=solution.steps.max(),
        residual=solution.residual.max(),
    )


class Model(nnx.Module):
    """A scan drives the layer; the state in which it settles gives the logits."""

    def __init__(self, limit: int, *, rngs: nnx.Rngs):
        self.read = nnx.Linear(PIXELS, WIDTH, rngs=rngs)
        self.layer = nnx.SpectralNorm(Layer(rngs), n_steps=4, rngs=rngs)
        self.head = nnx.Linear(WIDTH, DIGITS, rngs=rngs)
        self.limit = limit

    def begin(self, images: jax.Array) -> tuple[Layer, jax.Array, jax.Array]:
        """The layer, its drive, and what it makes of state zero, for images (batch, 64).

        `SpectralNorm` divides the kernel by its norm, in place, when it is called. So it makes the
        first step; all others call the layer that it wraps, whose kernel has the norm one.
        """
        drive = self.read(images)
        first = self.layer((jnp.zeros_like(drive), drive))
        return self.layer.layer_instance, drive, first

    def __call__(
        self, images: jax.Array, solver: Solver = equilibrium
    ) -> tuple[jax.Array, Solution]:
        """Logits (batch, 10), and how their states were found."""
        solution = solver(*self.begin(images), self.limit)
        return self.head(solution.state), solution


def loss_of(
    model: Model, images, labels, solver: Solver = equilibrium
) -> tuple[jax.Array, Solution]:
    logits, solution = model(images, solver)
    check_converged(solution)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), solution


@nnx.jit
@nnx.checkify
def train_step(
    model: Model, optimizer: nnx.Optimizer, images, labels
) -> tuple[jax.Array, Solution]:
    """One step of gradient descent, in place."""
    (loss, solution), grads = nnx.value_and_grad(loss_of, has_aux=True)(model, images, labels)
    optimizer.update(model, grads)
    return loss, solution


@nnx.jit
@nnx.checkify
def evaluate(model: Model, images, labels) -> tuple[jax.Array, Solution]:
    """Accuracy, and how the states were found."""
    logits, solution = model(images)
    check_converged(solution)
    return (logits.argmax(-1) == labels).mean(), solution


class Split(tp.NamedTuple):
    """Some of the scans: `images` (count, 64) float32 in 0..1, `labels` (count,) int32."""

    images: np.ndarray
    labels: np.ndarray


def load_splits() -> tuple[Split, Split]:
    """Training and test scans: always the same ones, every digit equally frequent."""
    levels, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        (levels / 16).astype(np.float32),
        labels.astype(np.int32),
        test_size=0.2,
        stratify=labels,
        random_state=0,
    )
    return Split(train, train_labels), Split(test, test_labels)


def train(model: Model, data: Split, epochs: int, seed: int) -> None:
    """Train in place; raises `checkify.JaxRuntimeError` where a state does not converge."""
    batches = len(data.labels) // BATCH
    rate = optax.cosine_decay_schedule(LEARNING_RATE, epochs * batches)
    optimizer = nnx.Optimizer(model, optax.adamw(rate, weight_decay=0.01), wrt=nnx.Param)
    order = np.random.default_rng(seed)
    bar = Progress(
        TextColumn("{task.completed}/{task.total} epochs"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with bar:
        task = bar.add_task("compiling", total=epochs)
        for _ in range(epochs):
            rows = order.permutation(len(data.labels))[: batches * BATCH].reshape(batches, BATCH)
            for some in rows:
                error, (loss, solution) = train_step(
                    model, optimizer, data.images[some], data.labels[some]
                )
                error.throw()
            about = f"loss {loss:.3f}, {solution.steps.mean():.1f} steps to the fixed point"
            bar.update(task, advance=1, description=about)


class Trace(tp.NamedTuple):
    """A search, step by step: (steps, scans)."""

    residual: np.ndarray
    correct: np.ndarray
    """Whether the scan would be read correctly if the search ended there."""

    @property
    def needed(self) -> np.ndarray:
        """Steps (scans,) until the residual is below the tolerance."""
        return 1 + (self.residual > TOLERANCE).sum(0)


@nnx.jit
def trace(model: Model, images, labels, accelerate: jax.Array) -> Trace:
    """One program for both rules: which of them is used is a value."""
    layer, drive, first = model.begin(images)
    step = lambda state: layer((state, drive))

    def advance(now: Search, _):
        correct = model.head(now.values[0]).argmax(-1) == labels
        return now.advance(step, accelerate), Trace(now.residual(), correct)

    return jax.lax.scan(advance, Search.start(first), length=TRACED)[1]


def on_host(trace: Trace) -> Trace:
    return Trace(*map(np.asarray, trace))


@nnx.jit
def contraction(model: Model, images, key: jax.Array) -> jax.Array:
    """The factor (batch,) by which one step shrinks a small error at each fixed point.

    An estimate of the spectral radius of the Jacobian, by power iteration with `nnx.jvp`.
    """
    layer, drive, first = model.begin(images)
    step = lambda state: layer((state, drive))
    state = search(step, first, model.limit).state

    def push(direction: jax.Array, _):
        _, pushed = nnx.jvp(step, (state,), (direction,))
        growth = jnp.linalg.norm(pushed, axis=-1)
        return pushed / growth[:, None], jnp.log(growth)

    growth = jax.lax.scan(push, jax.random.normal(key, state.shape), length=100)[1]
    return jnp.exp(growth[20:].mean(0))  # a mean, since complex eigenvalues make it oscillate


def compare_gradients(model: Model, data: Split) -> tuple[float, list[int]]:
    """The relative difference of implicit and unrolled gradients, and the bytes each needs."""
    grads, temporary = [], []
    for solver in (equilibrium, unrolled):
        gradient = nnx.jit(
            nnx.checkify(nnx.grad(functools.partial(loss_of, solver=solver), has_aux=True))
        )
        batch = data.images[:BATCH], data.labels[:BATCH]
        temporary.append(nnx.memory(model, None, gradient, *batch).step.temporary)
        error, (grad, _) = gradient(nnx.clone(model), *batch)  # a call normalizes the kernel
        error.throw()
        grads.append(jax.flatten_util.ravel_pytree(grad)[0])
    implicit, exact = grads
    return float(jnp.linalg.norm(implicit - exact) / jnp.linalg.norm(exact)), temporary


@nnx.jit
def lipschitz(model: Model) -> jax.Array:
    """A bound of these factors for all states: from the exact norm, not that of `SpectralNorm`."""
    return GAIN * jnp.linalg.norm(model.layer.layer_instance.mix.kernel[...], 2)


INK, PLAIN, ANDERSON, GUIDE = "#22303c", "#1b6e53", "#d1603d", "#8aa1b4"
RULES = {False: ("plain iteration", PLAIN), True: ("Anderson acceleration", ANDERSON)}
Traces = dict[bool, Trace]
"""By whether the search was accelerated."""


def draw(before: Traces, after: Traces, factors: np.ndarray, path: Path) -> None:
    """How searches converge, how many steps they take, and what these steps depend on."""
    style = {"font.size": 9, "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold"}
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 2, figsize=(11, 7.2), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
        draw_residuals(axes[0, 0], after)
        draw_steps(axes[0, 1], before, after)
        draw_factors(axes[1, 0], after[False], factors)
        draw_accuracy(axes[1, 1], after[True])
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_residuals(axes: plt.Axes, after: Traces) -> None:
    shown = int(after[False].needed.max()) + 2
    for rule, (name, colour) in RULES.items():
        low, middle, high = np.percentile(after[rule].residual, [10, 50, 90], axis=1)
        steps = np.arange(1, len(middle) + 1)
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, lw=0)
        axes.semilogy(steps, middle, color=colour, lw=1.8, label=name)
    axes.axhline(TOLERANCE, color=INK, lw=0.8, ls=":")
    axes.text(shown, TOLERANCE * 1.3, "tolerance", ha="right", va="bottom")
    axes.set(xlim=(1, shown), xlabel="step", ylabel="residual", ylim=(TOLERANCE / 50, 2))
    axes.legend(frameon=False, loc="upper right")
    axes.set_title("Residual of test scans: median and 80 % range")


def draw_steps(axes: plt.Axes, before: Traces, after: Traces) -> None:
    top = int(after[False].needed.max()) + 2
    bins = np.arange(0.5, top)
    for rule, (name, colour) in RULES.items():
        axes.hist(before[rule].needed, bins, histtype="step", color=colour, ls="--", lw=1)
        axes.hist(after[rule].needed, bins, color=colour, alpha=0.55, label=name)
    axes.plot([], [], color=INK, ls="--", lw=1, label="before training")
    axes.set(xlabel="steps to the fixed point", ylabel="test scans", xlim=(5, top))
    axes.legend(frameon=False, loc="upper right")
    axes.set_title("Steps of a search, after training and before")


def draw_factors(axes: plt.Axes, after: Trace, factors: np.ndarray) -> None:
    low, high = factors.min() - 0.02, factors.max() + 0.02
    curve = np.linspace(low, high)
    steps = 1 + np.log(TOLERANCE) / np.log(curve)
    axes.plot(curve, steps, color=GUIDE, lw=2, label="if every step shrank the error by it")
    axes.plot(factors, after.needed, ".", color=PLAIN, ms=4, label="test scans, plain iteration")
    axes.set(
        xlabel="factor by which a step shrinks a small error", ylabel="steps to the fixed point"
    )
    axes.set(xlim=(low, high), ylim=(0, None))
    axes.legend(frameon=False, loc="upper left")
    axes.set_title("What the steps depend on")


def draw_accuracy(axes: plt.Axes, after: Trace) -> None:
    accuracy = 100 * after.correct.mean(1)[:20]
    axes.plot(np.arange(1, len(accuracy) + 1), accuracy, ".-", color=RULES[True][1], lw=1.8, ms=7)
    axes.axvline(after.needed.mean(), color=INK, lw=0.8, ls=":")
    axes.text(after.needed.mean() + 0.2, accuracy.min(), "fixed point, on average")
    axes.set(xlim=(0.5, 20), xlabel="step", ylabel="test accuracy (%)", xticks=range(2, 21, 2))
    axes.grid(axis="y", alpha=0.25, lw=0.6)
    axes.set_title("Accuracy if the search ended early")


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
    parser = Parser(prog="deep_equilibrium.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=whole_number(1), help="default: 60, with --quick 12")
    parser.add_argument(
        "--limit", type=whole_number(1), default=100, help="steps of a search; default: 100"
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, help="default: 0")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder; default: out")
    parser.add_argument("--quick", action="store_true", help="a short run")
    options = parser.parse_args(arguments)
    options.epochs = options.epochs or (12 if options.quick else 60)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(1, f"{parser.prog}: error: cannot write to {options.out}: {error.strerror}\n")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    try:
        run(options)
    except checkify.JaxRuntimeError as error:  # a check of `check_converged`
        message = str(error).removesuffix(" (`check` failed)")
        sys.exit(f"deep_equilibrium.py: error: {message}; --limit allows more steps")


def run(options: argparse.Namespace) -> None:
    rngs = nnx.Rngs(options.seed)
    train_set, test_set = load_splits()
    model = Model(options.limit, rngs=rngs)
    print(nnx.tabulate(model, jax.ShapeDtypeStruct((BATCH, PIXELS), "float32")))
    traces = lambda: {rule: on_host(trace(model, *test_set, rule)) for rule in RULES}
    before = traces()
    train(model, train_set, options.epochs, options.seed)
    after = traces()
    factors = np.asarray(contraction(model, test_set.images, rngs()))
    difference, (implicit, exact) = compare_gradients(model, train_set)
    error, (accuracy, solution) = evaluate(model, *test_set)
    error.throw()
    draw(before, after, factors, options.out / "deep_equilibrium.png")
    print(f"convergence, steps and accuracy: {options.out / 'deep_equilibrium.png'}")
    print(
        f"a step shrinks an error by the factor {np.median(factors):.2f} at the median scan,"
        f" {factors.max():.2f} at most; the norm of the kernel allows {lipschitz(model):.2f}"
    )
    print(
        f"a gradient takes {implicit / 1e6:.1f} MB of temporary memory,"
        f" {exact / 1e6:.1f} MB if it goes back through {UNROLLED} steps"
    )
    print(
        f"test accuracy {100 * accuracy:.1f} %; {solution.steps.mean():.1f} steps to the fixed point,"
        f" {after[False].needed.mean():.1f} without acceleration; implicit and unrolled gradients"
        f" differ by {difference:.0e}"
    )


if __name__ == "__main__":
    main()
