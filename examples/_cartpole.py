"""A pole on a cart, for `ppo.py`: an environment written in JAX, which is a module.

Cart-pole by Barto, Sutton and Anderson (1983), without friction, with the constants, limits and Euler
steps of CartPole-v1.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx

GRAVITY, CART, POLE, HALF_LENGTH, FORCE = 9.8, 1.0, 0.1, 0.5, 10.0  # m/s², kg, kg, m, N
SECONDS = 0.02  # of one step
LIMITS = (2.4, float(np.radians(12)))  # m, radians: beyond them the pole is lost
LONGEST = 500  # steps of an episode


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


@nnx.jit
def returns_of(actor: nnx.Module, environments: CartPole) -> jax.Array:
    """Returns (episodes,) of the likelier action in each step, by an actor of states to logits."""

    @nnx.scan(length=LONGEST - 1, in_axes=(nnx.Carry, None), out_axes=(nnx.Carry, 0))
    def falls(environments: CartPole, actor: nnx.Module):
        action = actor(environments.state[...]).argmax(-1)
        return environments, step_all(environments, action).fallen

    _, fallen = falls(environments, actor)
    return 1 + jnp.cumprod(~fallen, axis=0).sum(0)  # steps before the first fall, and that one
