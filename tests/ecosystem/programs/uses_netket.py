"""Finds the ground state of a chain of spins by variational Monte Carlo."""

import netket as nk
from clock import report
from flax import nnx


class Ansatz(nnx.Module):
    def __init__(self, sites, rngs):
        self.hidden = nnx.Linear(sites, 2 * sites, rngs=rngs)
        self.out = nnx.Linear(2 * sites, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))[..., 0]


chain = nk.graph.Chain(8)
spins = nk.hilbert.Spin(0.5, 8)
sampler = nk.sampler.MetropolisLocal(spins, n_chains=8)
state = nk.vqs.MCState(sampler, Ansatz(8, nnx.Rngs(0)), n_samples=64, seed=1, sampler_seed=2)
driver = nk.driver.VMC(
    nk.operator.Ising(spins, chain, h=1.0), nk.optimizer.Sgd(0.05), variational_state=state
)
log = nk.logging.RuntimeLog()
driver.run(20, out=log, show_progress=False)
step = lambda: (driver.run(1, show_progress=False), state.parameters)[1]
report(step, log.data["Energy"].Mean, state.parameters)
