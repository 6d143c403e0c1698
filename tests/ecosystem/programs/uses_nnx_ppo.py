"""Trains an actor and a critic by PPO, in an environment of two coordinates."""

import functools

import jax
import jax.numpy as jnp
from clock import report
from flax import nnx, struct
from nnx_ppo.algorithms import ppo
from nnx_ppo.networks.factories import make_mlp_actor_critic


@struct.dataclass
class State:
    data: jax.Array
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict
    metrics: dict


class ToCenter:
    """The agent is rewarded for being close to the center."""

    observation_size, action_size = 2, 2

    def reset(self, rng):
        return self.state(jax.random.uniform(rng, (2,), minval=-1, maxval=1))

    def step(self, state, action):
        return self.state(state.data + 0.1 * jnp.clip(action, -1, 1))

    def state(self, x):
        far = jnp.sum(x**2)
        return State(x, x, jnp.exp(-far), jnp.where(far > 4, 1.0, 0.0), {}, {})


env = ToCenter()
nets = make_mlp_actor_critic(2, 2, [16] * 4, [16] * 4, rngs=nnx.Rngs(0), normalize_obs=True)
state = ppo.new_training_state(env, nets, 16, seed=1, learning_rate=1e-3)
settings = {"n_envs": 16, "rollout_length": 4, "n_epochs": 1, "n_minibatches": 2}
settings |= {"gae_lambda": 0.95, "discounting_factor": 0.9, "clip_range": 0.2}
settings |= {"normalize_advantages": True, "combine_advantages": False}
ppo_step = nnx.jit(functools.partial(ppo.ppo_step, env, **settings))


def step():
    global state
    state, metrics = ppo_step(state)
    return metrics


history = [step() for _ in range(10)]
params = nnx.state(state.networks, nnx.Param)
report(step, history, [jnp.sum(x) for x in jax.tree.leaves(params)])
