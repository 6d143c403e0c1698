"""Lets the package's agent act for an episode, and learn from it by PPO."""

import jax
import numpy as np
from clock import report
from tensor_optix.algorithms.flax_ppo import FlaxPPOAgent
from tensor_optix.core.types import EpisodeData, HyperparamSet

settings = {"learning_rate": 3e-3, "n_epochs": 1, "minibatch_size": 16, "clip_ratio": 0.2}
settings = HyperparamSet(params=settings, episode_id=0)
agent = FlaxPPOAgent(obs_dim=4, n_actions=2, hyperparams=settings, hidden_size=16)
noise = np.random.default_rng(0)
np.random.seed(0)


def step():
    observations = noise.normal(size=(16, 4)).astype(np.float32)
    actions = [agent.act(x) for x in observations]
    rewards = [float(a == (x[0] > 0)) for a, x in zip(actions, observations, strict=True)]
    ends = {"terminated": [False] * 15 + [True], "truncated": [False] * 16, "infos": [{}] * 16}
    acted = {"observations": observations, "actions": np.array(actions), "rewards": rewards}
    return agent.learn(EpisodeData(**acted, **ends, episode_id=0))


history = [sorted(step().items()) for _ in range(10)]
numbers = [value for step in history for _, value in step if isinstance(value, float)]
report(step, numbers, jax.numpy.asarray(agent.action_probs(np.ones(4, np.float32))))
