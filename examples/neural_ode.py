"""Learn the dynamics of two animal populations from noisy counts, and predict beyond them.

Prey multiply and are eaten, predators starve and feed, as Lotka and Volterra described it. The model
knows only that they follow some differential equation, whose right-hand side is a small network. diffrax
solves it, and gradients go through the solver (Chen et al. 2018, arXiv:1806.07366). Training
compares stretches of five counts; the test solves once, four times as long as training saw.

    pip install "nnxlite[examples,ode]"
    python examples/neural_ode.py            # a minute or two on two CPU cores
    python examples/neural_ode.py --quick    # half a minute, and a rougher model

Result: an error of the predicted populations of at most 5 % within the time of training and 12 % over
four times as long; with `--quick`, at most 15 % and 40 %. `neural_ode.png` shows both.
"""

import typing as tp

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import INK, RED, options, picture

import nnxlite as nnx

BIRTH, EATEN, FED, DEATH = 1.0, 0.5, 0.25, 0.5  # of the true system
OBSERVED, PREDICTED = 10.0, 40.0  # time of training, and of the prediction
EVERY, NOISE = 0.25, 0.02  # time between counts, and the standard deviation of their logarithms
TIMES = jnp.arange(0.0, PREDICTED + EVERY, EVERY)
STRETCH = 5  # counts that a stretch of training predicts
TRAJECTORIES, TESTS = 64, 16


def true_field(time, state: jax.Array, args: None) -> jax.Array:
    """The rates of change (2,) of the logarithms of both populations, given these logarithms (2,)."""
    prey, predators = jnp.exp(state)
    return jnp.stack([BIRTH - EATEN * predators, FED * prey - DEATH])


def integrate(field: tp.Callable, start: jax.Array, times: jax.Array, args: tp.Any) -> jax.Array:
    """The states (times, 2) of `field(t, state, args)` after `start` (2,)."""
    term, saved = diffrax.ODETerm(field), diffrax.SaveAt(ts=times)
    solve = diffrax.diffeqsolve
    return solve(term, diffrax.Tsit5(), 0.0, times[-1], EVERY, start, args, saveat=saved).ys


@nnx.vmap(in_axes=(None, 0, None))
def predict(model: nnx.MLP, start: jax.Array, times: jax.Array) -> jax.Array:
    """States (trajectories, times, 2) by the model; `start` is (trajectories, 2)."""
    graphdef, params = nnx.split(model)  # diffrax takes a pytree of arrays as `args`
    field = lambda time, state, params: nnx.merge(graphdef, params)(state)
    return integrate(field, start, times, params)


@jax.jit
def truth(key: jax.Array) -> jax.Array:
    """States (times, 2) of the true system, from 1 to 4 of prey and 1 to 3 of predators."""
    start = jnp.log(jax.random.uniform(key, (2,), minval=1.0, maxval=jnp.array([4.0, 3.0])))
    return integrate(true_field, start, TIMES, None)


@nnx.jit
def train_step(model: nnx.MLP, optimizer: nnx.Optimizer, pieces: jax.Array) -> jax.Array:
    """One step of gradient descent, in place; `pieces` is (pieces, STRETCH + 1, 2)."""

    def loss_fn(model: nnx.MLP) -> jax.Array:
        predicted = predict(model, pieces[:, 0], TIMES[: STRETCH + 1])
        return jnp.square(predicted - pieces)[:, 1:].mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def main() -> None:
    run = options(__doc__)
    rngs = nnx.Rngs(0)
    exact = jax.vmap(truth)(jax.random.split(rngs(), TRAJECTORIES + TESTS))
    seen = TIMES <= OBSERVED
    counts = exact[:TRAJECTORIES, seen]
    model = nnx.MLP(2, 2, 64, 2, activation=nnx.tanh, rngs=rngs)
    counts += NOISE * rngs.normal(counts.shape)
    first = jnp.arange(0, counts.shape[1] - STRETCH, STRETCH)  # stretches share an end
    pieces = counts[:, first[:, None] + jnp.arange(STRETCH + 1)].reshape(-1, STRETCH + 1, 2)

    steps = 240 if run.quick else 1500
    schedule = optax.cosine_decay_schedule(5e-3, steps)
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
    for step in nnx.training.loop(steps):
        step.log(squared_error=train_step(model, optimizer, pieces))

    states = exact[TRAJECTORIES:]
    predicted, exact = np.exp(nnx.jit(predict)(model, states[:, 0], TIMES)), np.exp(states)
    with picture(run.out / "neural_ode.png", 11, 4) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
        left.axvspan(0, OBSERVED, color=INK, alpha=0.08, lw=0, label="time of training")
        for column, (name, colour) in enumerate((("prey", INK), ("predators", RED))):
            left.plot(TIMES, exact[0, :, column], color=colour, lw=4, alpha=0.3, label=name)
            left.plot(TIMES, predicted[0, :, column], color=colour, lw=1.3)
        left.set(xlabel="time", ylabel="population", title="Thick: true. Thin: predicted.")
        left.legend(ncols=3)
        for number in range(4):
            right.plot(*exact[number].T, color=INK, lw=4, alpha=0.25)
            right.plot(*predicted[number].T, color=RED, lw=1)
        right.set(xlabel="prey", ylabel="predators", title="Four orbits")
    error = lambda part: (
        100 * np.sqrt(np.square(predicted - exact)[part].mean()) / exact[part].mean()
    )
    print(
        f"error of the populations: {error(np.s_[:, seen]):.1f} % within the time of training,"
        f" {error(...):.1f} % in {PREDICTED / OBSERVED:.0f} times as long; noise {100 * NOISE:.0f} %"
    )


if __name__ == "__main__":
    main()
