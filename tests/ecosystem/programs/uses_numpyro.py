"""Fits a model of numpyro with a network inside by variational inference."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from clock import report
from flax import nnx
from numpyro.contrib.module import nnx_module, random_nnx_module
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(1, 8, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


x = jnp.linspace(-1, 1, 20)[:, None]
y = jnp.sin(3 * x)


def model(x, y):
    mean = nnx_module("mean", Network(nnx.Rngs(0)))
    spread = random_nnx_module("spread", Network(nnx.Rngs(1)), prior=dist.Normal())
    scale = jax.nn.softplus(spread(x)) + 0.1
    numpyro.sample("y", dist.Normal(mean(x), scale).to_event(2), obs=y)


svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-2), Trace_ELBO())
state = svi.init(jax.random.key(0), x, y)
update = jax.jit(svi.update)


def step():
    global state
    state, loss = update(state, x, y)
    return loss


losses = [step() for _ in range(50)]
assert losses[-1] < losses[0]
report(step, losses)
