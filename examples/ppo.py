"""Balance a pole on a cart with proximal policy optimisation (PPO).

The environment is written in JAX and is a module: its state is a Variable that a step changes in
place. Many environments are one stacked module, stepped by `nnx.vmap`; a rollout is an `nnx.scan`
over them. One compiled function does the whole update: rollout, advantages, gradient descent.

    python examples/ppo.py            # half a minute on two CPU cores
    python examples/ppo.py --quick    # some seconds, and a weaker agent

Result: a mean return of at least 475 in 64 test episodes, where 500 is the highest possible; with
`--quick`, at least 200. `ppo.png` in the output folder shows the learning curve, and one episode
before and after training.

Sources: cart-pole by Barto, Sutton and Anderson (1983), without friction, with the constants, limits
and Euler steps of CartPole-v1; PPO by Schulman et al. (2017), arXiv:1707.06347; generalized advantage
estimation by Schulman et al. (2015), arXiv:1506.02438.
"""

from __future__ import annotations

import argparse
import typing as tp
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import nnxlite as nnx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GRAVITY, CART, POLE, HALF_LENGTH, FORCE = 9.8, 1.0, 0.1, 0.5, 10.0  # m/s², kg, kg, m, N
SECONDS = 0.02  # of one step
LIMITS = (
    2.4,
    float(np.radians(12)),
)  # position in m, angle in radians: beyond them the pole is lost
LONGEST = 500  # steps of an episode

ENVIRONMENTS, STEPS = 32, 128  # of one rollout
EPOCHS, MINIBATCHES = 4, 16  # passes over a rollout, and parts of it in each
DISCOUNT, TRACE = 0.99, 0.95  # gamma and lambda of the advantages
CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.2, 0.5, 0.01
LEARNING_RATE = 1e-3  # of the first update; it falls to zero
TESTS = 64


class CartPole(nnx.Module):
    """A cart on a track with a pole on it; an episode that ends is followed by the next one.

    `state` (4,) is position, velocity, angle and angular velocity; `age` counts steps of the episode.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.rngs = rngs
        self.state = nnx.Variable(self.start())
        self.age = nnx.Variable(jnp.array(0))

    def start(self) -> jax.Array:
        """The state (4,) in which an episode begins."""
        return self.rngs.uniform((4,), minval=-0.05, maxval=0.05)

    def step(self, action: jax.Array) -> Outcome:
        """Push to the left (0) or to the right (1); the reward is always 1."""
        after = dynamics(self.state[...], jnp.where(action == 1, FORCE, -FORCE))
        fallen = (jnp.abs(after[::2]) > jnp.array(LIMITS)).any()
        late = (self.age[...] + 1 >= LONGEST) & ~fallen
        outcome = Outcome(after, fallen, late, self.age[...] + 1)
        over = fallen | late
        self.state[...] = jnp.where(over, self.start(), after)
        self.age[...] = jnp.where(over, 0, self.age[...] + 1)
        return outcome


class Outcome(tp.NamedTuple):
    """What a step leads to: the next state (4,), before a new episode begins, and how it ended."""

    state: jax.Array
    fallen: jax.Array
    late: jax.Array
    """Whether the time was up; the pole stands, so its state still has a value."""
    age: jax.Array


def dynamics(state: jax.Array, force: jax.Array) -> jax.Array:
    """The state (4,) one Euler step later."""
    position, velocity, angle, spin = state
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    push = (force + POLE * HALF_LENGTH * spin**2 * sine) / (CART + POLE)
    inertia = HALF_LENGTH * (4 / 3 - POLE * cosine**2 / (CART + POLE))
    turn = (GRAVITY * sine - cosine * push) / inertia
    speedup = push - POLE * HALF_LENGTH * turn * cosine / (CART + POLE)
    return state + SECONDS * jnp.stack([velocity, speedup, spin, turn])


def step_all(environments: CartPole, actions: jax.Array) -> Outcome:
    """One step of each environment with its action; `actions` is (environments,)."""
    return nnx.vmap(lambda environment, action: environment.step(action))(environments, actions)


def make_environments(count: int, rngs: nnx.Rngs) -> CartPole:
    """One module whose arrays have a leading axis, each environment with its own random stream."""

    keys = jax.random.split(rngs(), count)
    return nnx.vmap(lambda key: CartPole(nnx.Rngs(key)))(keys)


class Agent(nnx.Module):
    """An actor, which gives logits of actions, and a critic, which gives the value of a state."""

    def __init__(self, rngs: nnx.Rngs):
        self.actor = network(2, 0.01, rngs)  # at first, both actions are about equally likely
        self.critic = network(1, 1.0, rngs)

    def logits(self, state: jax.Array) -> jax.Array:
        """(..., 4) to (..., 2)."""
        return self.actor(state)

    def value(self, state: jax.Array) -> jax.Array:
        """(..., 4) to (...)."""
        return self.critic(state)[..., 0]


def network(outputs: int, last: float, rngs: nnx.Rngs) -> nnx.Sequential:
    """Two hidden layers of 64, with orthogonal kernels, the last one scaled by `last`."""

    def linear(inputs: int, outputs: int, scale: float) -> nnx.Linear:
        return nnx.Linear(
            inputs, outputs, kernel_init=nnx.initializers.orthogonal(scale), rngs=rngs
        )

    hidden = 2**0.5
    return nnx.Sequential(
        linear(4, 64, hidden), nnx.tanh, linear(64, 64, hidden), nnx.tanh, linear(64, outputs, last)
    )


class Rollout(tp.NamedTuple):
    """What was seen in each step of each environment: (steps, environments, ...)."""

    state: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    next_value: jax.Array
    fallen: jax.Array
    late: jax.Array
    age: jax.Array


def collect(agent: Agent, environments: CartPole, rngs: nnx.Rngs) -> Rollout:
    """Act in all environments for some steps; they go on from where they are."""

    @nnx.scan(length=STEPS, in_axes=(nnx.Carry, None), out_axes=(nnx.Carry, 0))
    def advance(carry: tuple[CartPole, nnx.Rngs], agent: Agent):
        environments, rngs = carry
        state = environments.state[...]
        log_probs = nnx.log_softmax(agent.logits(state))
        action = rngs.categorical(log_probs)
        log_prob = jnp.take_along_axis(log_probs, action[:, None], -1)[:, 0]
        value = agent.value(state)
        after, fallen, late, age = step_all(environments, action)
        seen = Rollout(state, action, log_prob, value, agent.value(after), fallen, late, age)
        return carry, seen

    _, rollout = advance((environments, rngs), agent)
    return rollout


def advantages(rollout: Rollout) -> jax.Array:
    """How much better each action was than the critic expected: (steps, environments)."""
    next_value = jnp.where(rollout.fallen, 0.0, rollout.next_value)
    surprise = 1.0 + DISCOUNT * next_value - rollout.value
    goes_on = ~(rollout.fallen | rollout.late)

    def accumulate(later: jax.Array, step: tuple[jax.Array, jax.Array]):
        surprise, goes_on = step
        now = surprise + DISCOUNT * TRACE * goes_on * later
        return now, now

    start = jnp.zeros_like(surprise[0])
    return jax.lax.scan(accumulate, start, (surprise, goes_on), reverse=True)[1]


class Samples(tp.NamedTuple):
    """A part of a rollout, in any order: (samples, ...)."""

    state: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array


def loss_of(agent: Agent, samples: Samples) -> jax.Array:
    """The clipped objective of PPO, the squared error of the critic, and a bonus for entropy."""
    log_probs = nnx.log_softmax(agent.logits(samples.state))
    log_prob = jnp.take_along_axis(log_probs, samples.action[:, None], -1)[:, 0]
    ratio = jnp.exp(log_prob - samples.log_prob)
    gain = (samples.advantage - samples.advantage.mean()) / (samples.advantage.std() + 1e-8)
    policy = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain).mean()
    value = jnp.square(agent.value(samples.state) - samples.target).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return -policy + VALUE_WEIGHT * value - ENTROPY_WEIGHT * entropy


def learn(agent: Agent, optimizer: nnx.Optimizer, samples: Samples, rngs: nnx.Rngs) -> None:
    """Some epochs of gradient descent over the samples, in random minibatches."""
    count = len(samples.action)
    order = jnp.concatenate([rngs.permutation(count) for _ in range(EPOCHS)])

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def descend(carry: tuple[Agent, nnx.Optimizer], rows: jax.Array):
        agent, optimizer = carry
        grads = nnx.grad(loss_of)(agent, jax.tree.map(lambda x: x[rows], samples))
        optimizer.update(agent, grads)
        return carry

    descend((agent, optimizer), order.reshape(EPOCHS * MINIBATCHES, -1))


@nnx.jit
def update(
    agent: Agent, optimizer: nnx.Optimizer, environments: CartPole, rngs: nnx.Rngs
) -> tuple[jax.Array, jax.Array]:
    """One whole update, in place; the number of episodes that ended, and the sum of their returns."""
    rollout = collect(agent, environments, rngs)
    advantage = advantages(rollout)
    target = advantage + rollout.value
    parts = Samples(rollout.state, rollout.action, rollout.log_prob, advantage, target)
    samples = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)
    learn(agent, optimizer, samples, rngs)
    over = rollout.fallen | rollout.late
    return over.sum(), jnp.where(over, rollout.age, 0).sum()


def train(agent: Agent, updates: int, rngs: nnx.Rngs) -> list[float]:
    """Train in place; the mean return of the episodes that ended in each update."""
    environments = make_environments(ENVIRONMENTS, rngs)
    rate = optax.linear_schedule(LEARNING_RATE, 0.0, updates * EPOCHS * MINIBATCHES)
    optimizer = nnx.Optimizer(
        agent, optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate)), wrt=nnx.Param
    )
    curve: list[float] = []
    bar = Progress(
        TextColumn("{task.completed}/{task.total} updates"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with bar:
        task = bar.add_task("compiling", total=updates)
        for _ in range(updates):
            episodes, total = update(agent, optimizer, environments, rngs)
            curve.append(float(total / episodes) if episodes else curve[-1] if curve else 0.0)
            bar.update(task, advance=1, description=f"mean return {curve[-1]:.0f}")
    return curve


@nnx.jit
def test(agent: Agent, environments: CartPole) -> tuple[jax.Array, jax.Array]:
    """Returns (episodes,) of the likelier action in each step, and states (steps, episodes, 4)."""

    @nnx.scan(length=LONGEST, in_axes=(nnx.Carry, None), out_axes=(nnx.Carry, 0))
    def advance(carry: tuple[CartPole, jax.Array], agent: Agent):
        environments, standing = carry
        state = environments.state[...]
        outcome = step_all(environments, agent.logits(state).argmax(-1))
        state = jnp.where(standing[:, None], state, jnp.nan)
        return (environments, standing & ~outcome.fallen), (state, standing)

    everyone = jnp.ones(environments.age.shape, bool)
    _, (states, standing) = advance((environments, everyone), agent)
    return standing.sum(0), states


INK, BEFORE, AFTER, LIMIT = "#22303c", "#8aa1b4", "#d1603d", "#b3261e"


def draw(curve: list[float], before: np.ndarray, after: np.ndarray, path: Path) -> None:
    """The learning curve on the left, one episode before and after training on the right."""
    style = {"font.size": 9, "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK}
    with plt.rc_context(style | {"axes.spines.top": False, "axes.spines.right": False}):
        figure = plt.figure(figsize=(11, 4.6), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
        left, right = figure.subfigures(1, 2, wspace=0.04)
        draw_curve(left, curve)
        draw_episode(right, before, after)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_curve(figure, curve: list[float]) -> None:
    axes = figure.subplots()
    steps = np.arange(1, len(curve) + 1) * ENVIRONMENTS * STEPS / 1000
    axes.plot(steps, curve, color=AFTER, lw=1.8)
    axes.axhline(LONGEST, color=INK, lw=0.8, ls=":")
    axes.text(steps[0], LONGEST + 4, "longest episode", va="bottom")
    axes.set(xlabel="thousand steps of the environments", ylabel="mean return", ylim=(0, 530))
    axes.grid(axis="y", alpha=0.25, lw=0.6)
    figure.suptitle("Training, with random actions", fontweight="bold")


def draw_episode(figure, before: np.ndarray, after: np.ndarray) -> None:
    """Position and angle over time; `before` and `after` are states (steps, 4), nan after a fall."""
    seconds = SECONDS * np.arange(LONGEST)
    rows = figure.subplots(2, 1, sharex=True)
    names, scales = ("position (m)", "angle (degrees)"), (1.0, 180 / np.pi)
    for axes, name, column, scale, limit in zip(rows, names, (0, 2), scales, LIMITS, strict=True):
        axes.plot(seconds, scale * before[:, column], color=BEFORE, lw=1.8, label="before training")
        axes.plot(seconds, scale * after[:, column], color=AFTER, lw=1.2, label="after training")
        for side in (-limit, limit):
            axes.axhline(scale * side, color=LIMIT, lw=0.8, ls=":")
        axes.set(ylabel=name)
    rows[0].legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.95))
    rows[1].set(xlabel="seconds")
    figure.suptitle("One test episode; dotted: where it ends", fontweight="bold")


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
    parser = Parser(prog="ppo.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--updates", type=whole_number(1), help="default: 60, with --quick 16")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="default: 0")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder; default: out")
    parser.add_argument("--quick", action="store_true", help="a short run")
    options = parser.parse_args(arguments)
    options.updates = options.updates or (16 if options.quick else 60)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(1, f"{parser.prog}: error: cannot write to {options.out}: {error.strerror}\n")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    rngs = nnx.Rngs(options.seed)
    agent = Agent(rngs)
    environments = make_environments(TESTS, rngs)
    untrained, before = test(agent, nnx.clone(environments))  # a test changes what it is given
    curve = train(agent, options.updates, rngs)
    returns, after = test(agent, environments)
    draw(curve, np.asarray(before[:, 0]), np.asarray(after[:, 0]), options.out / "ppo.png")
    print(f"learning curve and one episode: {options.out / 'ppo.png'}")
    print(
        f"mean return of {TESTS} episodes {returns.mean():.1f}, lowest {returns.min()};"
        f" {untrained.mean():.1f} before training"
    )


if __name__ == "__main__":
    main()
