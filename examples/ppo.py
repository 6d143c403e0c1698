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

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import BLUE, RED, options, picture

import nnxlite as nnx

GRAVITY, CART, POLE, HALF_LENGTH, FORCE = 9.8, 1.0, 0.1, 0.5, 10.0  # m/s², kg, kg, m, N
SECONDS = 0.02  # of one step
LIMITS = (2.4, float(np.radians(12)))  # m, radians: beyond them the pole is lost
LONGEST = 500  # steps of an episode
ENVIRONMENTS, STEPS = 32, 128  # of one rollout
EPOCHS, MINIBATCHES = 4, 16  # passes over a rollout, and parts of it in each
DISCOUNT, TRACE = 0.99, 0.95  # gamma and lambda of the advantages
CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.2, 0.5, 0.01
LEARNING_RATE = 1e-3  # of the first update; it falls to zero
TESTS = 64


class Outcome(tp.NamedTuple):
    """What a step leads to: the next state (4,), before a new episode begins, and how it ended."""

    state: jax.Array
    fallen: jax.Array
    late: jax.Array  # the time was up; the pole stands, so its state still has a value
    age: jax.Array


class CartPole(nnx.Module):
    """A cart on a track with a pole on it; an episode that ends is followed by the next one."""

    def __init__(self, rngs: nnx.Rngs):
        self.rngs = rngs
        self.state = nnx.Variable(self.start())  # position, velocity, angle, angular velocity
        self.age = nnx.Variable(jnp.array(0))  # steps of this episode

    def start(self) -> jax.Array:
        return self.rngs.uniform((4,), minval=-0.05, maxval=0.05)

    def step(self, action: jax.Array) -> Outcome:
        """Push to the left (0) or to the right (1); the reward is always 1."""
        after = dynamics(self.state[...], jnp.where(action == 1, FORCE, -FORCE))
        fallen = (jnp.abs(after[::2]) > jnp.array(LIMITS)).any()
        late = (self.age[...] + 1 >= LONGEST) & ~fallen
        outcome = Outcome(after, fallen, late, self.age[...] + 1)
        self.state[...] = jnp.where(fallen | late, self.start(), after)
        self.age[...] = jnp.where(fallen | late, 0, self.age[...] + 1)
        return outcome


def dynamics(state: jax.Array, force: jax.Array) -> jax.Array:
    """The state (4,) one Euler step later."""
    _, velocity, angle, spin = state
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    push = (force + POLE * HALF_LENGTH * spin**2 * sine) / (CART + POLE)
    inertia = HALF_LENGTH * (4 / 3 - POLE * cosine**2 / (CART + POLE))
    turn = (GRAVITY * sine - cosine * push) / inertia
    speedup = push - POLE * HALF_LENGTH * turn * cosine / (CART + POLE)
    return state + SECONDS * jnp.stack([velocity, speedup, spin, turn])


@nnx.vmap
def step_all(environment: CartPole, action: jax.Array) -> Outcome:
    return environment.step(action)


def make_environments(count: int, rngs: nnx.Rngs) -> CartPole:
    """One module whose arrays have a leading axis, each environment with its own random stream."""
    return nnx.vmap(lambda key: CartPole(nnx.Rngs(key)))(jax.random.split(rngs(), count))


class Agent(nnx.Module):
    """An actor, (..., 4) to logits (..., 2), and a critic, (..., 4) to values (..., 1)."""

    def __init__(self, rngs: nnx.Rngs):
        self.actor = network(2, 0.01, rngs)  # at first, both actions are about equally likely
        self.critic = network(1, 1.0, rngs)


def network(outputs: int, last: float, rngs: nnx.Rngs) -> nnx.Sequential:
    """Two hidden layers of 64, with orthogonal kernels, the last one scaled by `last`."""

    def linear(inputs: int, outputs: int, scale: float = 2**0.5) -> nnx.Linear:
        init = nnx.initializers.orthogonal(scale)
        return nnx.Linear(inputs, outputs, kernel_init=init, rngs=rngs)

    return nnx.Sequential(
        linear(4, 64), nnx.tanh, linear(64, 64), nnx.tanh, linear(64, outputs, last)
    )


class Rollout(tp.NamedTuple):
    """What was seen in each step of each environment: (steps, environments, ...)."""

    state: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    next_value: jax.Array
    outcome: Outcome


def collect(agent: Agent, environments: CartPole, rngs: nnx.Rngs) -> Rollout:
    """Act in all environments for some steps; they go on from where they are."""

    @nnx.scan(length=STEPS, in_axes=(nnx.Carry, None), out_axes=(nnx.Carry, 0))
    def advance(carry: tuple[CartPole, nnx.Rngs], agent: Agent):
        environments, rngs = carry
        state = environments.state[...]
        log_probs = nnx.log_softmax(agent.actor(state))
        action = rngs.categorical(log_probs)
        log_prob = jnp.take_along_axis(log_probs, action[:, None], -1)[:, 0]
        outcome = step_all(environments, action)
        value, after = agent.critic(state)[..., 0], agent.critic(outcome.state)[..., 0]
        return carry, Rollout(state, action, log_prob, value, after, outcome)

    return advance((environments, rngs), agent)[1]


def advantages(rollout: Rollout) -> jax.Array:
    """How much better each action was than the critic expected: (steps, environments)."""
    fallen, late = rollout.outcome.fallen, rollout.outcome.late
    next_value = jnp.where(fallen, 0.0, rollout.next_value)
    surprise = 1.0 + DISCOUNT * next_value - rollout.value

    def accumulate(later, step):
        surprise, over = step
        now = surprise + DISCOUNT * TRACE * ~over * later
        return now, now

    start = jnp.zeros_like(surprise[0])
    return jax.lax.scan(accumulate, start, (surprise, fallen | late), reverse=True)[1]


def loss_fn(agent: Agent, state, action, old_log_prob, advantage, target) -> jax.Array:
    """The clipped objective of PPO, the squared error of the critic, and a bonus for entropy."""
    log_probs = nnx.log_softmax(agent.actor(state))
    log_prob = jnp.take_along_axis(log_probs, action[:, None], -1)[:, 0]
    ratio = jnp.exp(log_prob - old_log_prob)
    gain = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain).mean()
    value = jnp.square(agent.critic(state)[..., 0] - target).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return -policy + VALUE_WEIGHT * value - ENTROPY_WEIGHT * entropy


@nnx.jit
def update(agent, optimizer, environments, rngs) -> tuple[jax.Array, jax.Array]:
    """One whole update, in place; the number of episodes that ended, and the sum of their returns."""
    rollout = collect(agent, environments, rngs)
    advantage = advantages(rollout)
    parts = rollout[:3] + (advantage, advantage + rollout.value)
    samples = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)
    order = jnp.concatenate([rngs.permutation(ENVIRONMENTS * STEPS) for _ in range(EPOCHS)])

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def descend(carry: tuple[Agent, nnx.Optimizer], rows: jax.Array):
        agent, optimizer = carry
        optimizer.update(agent, nnx.grad(loss_fn)(agent, *(x[rows] for x in samples)))
        return carry

    descend((agent, optimizer), order.reshape(EPOCHS * MINIBATCHES, -1))
    over = rollout.outcome.fallen | rollout.outcome.late
    return over.sum(), jnp.where(over, rollout.outcome.age, 0).sum()


def train(agent: Agent, updates: int, rngs: nnx.Rngs) -> list[float]:
    """Train in place; the mean return of the episodes that ended in each update."""
    environments = make_environments(ENVIRONMENTS, rngs)
    rate = optax.linear_schedule(LEARNING_RATE, 0.0, updates * EPOCHS * MINIBATCHES)
    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))
    optimizer = nnx.Optimizer(agent, adam, wrt=nnx.Param)
    curve: list[float] = []
    for step in nnx.training.loop(updates):
        episodes, total = update(agent, optimizer, environments, rngs)
        curve.append(float(total / jnp.maximum(episodes, 1)))
        step.log(mean_return=curve[-1])
    return curve


@nnx.jit
def test(agent: Agent, environments: CartPole) -> tuple[jax.Array, jax.Array]:
    """Returns (episodes,) of the likelier action in each step, and states (steps, episodes, 4)."""

    @nnx.scan(length=LONGEST, in_axes=(nnx.Carry, None), out_axes=(nnx.Carry, 0))
    def advance(carry: tuple[CartPole, jax.Array], agent: Agent):
        environments, standing = carry
        state = environments.state[...]
        outcome = step_all(environments, agent.actor(state).argmax(-1))
        state = jnp.where(standing[:, None], state, jnp.nan)
        return (environments, standing & ~outcome.fallen), (state, standing)

    everyone = jnp.ones(environments.age.shape, bool)
    _, (states, standing) = advance((environments, everyone), agent)
    return standing.sum(0), states


def draw(curve: list[float], before: jax.Array, after: jax.Array, path) -> None:
    """The learning curve, and the angle (steps,) in one episode before and after training."""
    with picture(path, 11, 3.4) as figure:
        left, right = figure.subplots(1, 2)
        left.plot(np.arange(1, len(curve) + 1) * ENVIRONMENTS * STEPS / 1000, curve, color=RED)
        left.set(xlabel="thousand steps", ylabel="mean return", title="Training")
        for angle, colour, name in ((before, BLUE, "before"), (after, RED, "after")):
            right.plot(SECONDS * np.arange(LONGEST), np.degrees(angle), color=colour, label=name)
        right.set(xlabel="seconds", ylabel="angle (degrees)", title="One test episode")
        right.legend()


def main() -> None:
    run = options(__doc__)
    rngs = nnx.Rngs(run.seed)
    agent = Agent(rngs)
    environments = make_environments(TESTS, rngs)
    untrained, before = test(agent, nnx.clone(environments))  # a test changes what it is given
    curve = train(agent, 16 if run.quick else 60, rngs)
    returns, after = test(agent, environments)
    draw(curve, before[:, 0, 2], after[:, 0, 2], run.out / "ppo.png")
    print(f"learning curve and one episode: {run.out / 'ppo.png'}")
    print(
        f"mean return of {TESTS} episodes {returns.mean():.1f}, lowest {returns.min()};"
        f" {untrained.mean():.1f} before training"
    )


if __name__ == "__main__":
    main()
