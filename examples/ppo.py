"""Balance a pole on a cart with proximal policy optimisation (PPO).

The environment, in `_cartpole.py`, is a module whose state a step changes in place: `nnx.vmap` steps
many of them, `nnx.scan` makes a rollout, and one compiled function is the whole update: rollout,
advantages (Schulman 2015, arXiv:1506.02438) and gradient descent (Schulman 2017, arXiv:1707.06347).

    python examples/ppo.py            # half a minute on two CPU cores
    python examples/ppo.py --quick    # some seconds, and a weaker agent

Result: a mean return of at least 475 in 64 test episodes, where 500 is the highest possible; with
`--quick`, at least 200. `ppo.png` in the output folder shows the learning curve.
"""

import jax
import jax.numpy as jnp
import optax
from _cartpole import CartPole, make_environments, returns_of, step_all
from _common import curves, options

import nnxlite as nnx

ENVIRONMENTS, STEPS, TESTS = 32, 128, 64  # of one rollout; test episodes
EPOCHS, MINIBATCHES = 4, 16  # passes over a rollout, and parts of it in each
DISCOUNT, TRACE, CLIP = 0.99, 0.95, 0.2  # gamma and lambda of the advantages; epsilon of PPO


class Agent(nnx.Module):
    """An actor, (..., 4) to logits (..., 2), and a critic, (..., 4) to values (..., 1)."""

    def __init__(self, rngs: nnx.Rngs):
        self.actor = nnx.MLP(4, 2, 64, 2, activation=nnx.tanh, rngs=rngs)
        self.critic = nnx.MLP(4, 1, 64, 2, activation=nnx.tanh, rngs=rngs)

    def log_probs(self, state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the action, (...), and of all actions, (..., 2)."""
        every = nnx.log_softmax(self.actor(state))
        return jnp.take_along_axis(every, action[..., None], -1)[..., 0], every


def collect(agent: Agent, environments: CartPole, rngs: nnx.Rngs) -> tuple[jax.Array, ...]:
    """Act in all environments for some steps, from where they are: arrays (STEPS, ENVIRONMENTS, ...)."""

    @nnx.scan(length=STEPS, in_axes=(nnx.Carry, None), out_axes=(nnx.Carry, 0))
    def act(carry: tuple[CartPole, nnx.Rngs], agent: Agent):
        environments, rngs = carry
        state = environments.state[...]
        action = rngs.categorical(agent.actor(state))
        log_prob, _ = agent.log_probs(state, action)
        outcome = step_all(environments, action)
        value, after = agent.critic(state)[..., 0], agent.critic(outcome.state)[..., 0]
        surprise = 1.0 + DISCOUNT * jnp.where(outcome.fallen, 0.0, after) - value
        return carry, (state, action, log_prob, value, surprise, outcome)

    return act((environments, rngs), agent)[1]


def advantages(surprise: jax.Array, over: jax.Array) -> jax.Array:
    """How much better each action was than the critic expected: (STEPS, ENVIRONMENTS)."""

    def accumulate(later, step):
        now = step[0] + DISCOUNT * TRACE * ~step[1] * later
        return now, now

    return jax.lax.scan(accumulate, 0.0 * surprise[0], (surprise, over), reverse=True)[1]


def loss_fn(agent: Agent, state, action, old_log_prob, advantage, target) -> jax.Array:
    """The clipped objective of PPO, the squared error of the critic, and a bonus for entropy."""
    log_prob, every = agent.log_probs(state, action)
    ratio = jnp.exp(log_prob - old_log_prob)
    gain = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain).mean()
    value = jnp.square(agent.critic(state)[..., 0] - target).mean()
    entropy = -(jnp.exp(every) * every).sum(-1).mean()
    return -policy + 0.5 * value - 0.01 * entropy


@nnx.jit
def update(agent, optimizer, environments, rngs) -> jax.Array:
    """One whole update, in place; the mean return of the episodes that ended."""
    *seen, value, surprise, outcome = collect(agent, environments, rngs)
    over = outcome.fallen | outcome.late
    advantage = advantages(surprise, over)
    parts = (*seen, advantage, advantage + value)
    samples = [x.reshape(-1, *x.shape[2:]) for x in parts]
    order = jnp.concatenate([rngs.permutation(ENVIRONMENTS * STEPS) for _ in range(EPOCHS)])

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def descend(carry: tuple[Agent, nnx.Optimizer], rows: jax.Array):
        agent, optimizer = carry
        optimizer.update(agent, nnx.grad(loss_fn)(agent, *(x[rows] for x in samples)))
        return carry

    descend((agent, optimizer), order.reshape(EPOCHS * MINIBATCHES, -1))
    return jnp.where(over, outcome.age, 0).sum() / jnp.maximum(over.sum(), 1)


def main() -> None:
    run = options(__doc__)
    rngs = nnx.Rngs(0)
    agent, tested = Agent(rngs), make_environments(TESTS, rngs)
    before = returns_of(agent.actor, nnx.clone(tested))  # a test changes what it is given
    environments, updates = make_environments(ENVIRONMENTS, rngs), 16 if run.quick else 60
    rate = optax.linear_schedule(1e-3, 0.0, updates * EPOCHS * MINIBATCHES)
    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))
    optimizer = nnx.Optimizer(agent, adam, wrt=nnx.Param)
    loop = nnx.training.loop(updates)
    for step in loop:
        step.log(mean_return=update(agent, optimizer, environments, rngs))
    returns = returns_of(agent.actor, tested)
    curve = [row["mean_return"] for row in loop.history]
    curves(run.out / "ppo.png", {"training": curve}, "update", "mean return")
    print(
        f"mean return of {TESTS} episodes {returns.mean():.1f}, lowest {returns.min()};"
        f" {before.mean():.1f} before training"
    )


if __name__ == "__main__":
    main()
