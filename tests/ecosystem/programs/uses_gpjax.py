"""Fits the hyperparameters of a Gaussian process, as the package's tutorials do."""

import gpjax
import jax.numpy as jnp
import optax
from clock import report

x = jnp.linspace(-1, 1, 20, dtype=jnp.float32)[:, None]
data = gpjax.Dataset(X=x, y=jnp.sin(4 * x))
prior = gpjax.gps.Prior(
    mean_function=gpjax.mean_functions.Zero(), kernel=gpjax.kernels.RBF(lengthscale=0.5)
)
posterior = prior * gpjax.likelihoods.Gaussian(num_datapoints=20)


def step(num_iters=20):
    fitted, history = gpjax.fit(
        model=posterior,
        objective=lambda p, d: -gpjax.objectives.conjugate_mll(p, d),
        train_data=data,
        optim=optax.adam(0.05),
        num_iters=num_iters,
        verbose=False,
    )
    return fitted, history


fitted, history = step(100)
assert history[-1] < history[0]
mean = fitted.predict(x[:5], train_data=data).mean
report(lambda: step()[1], history, mean)
