"""What the tests of processes ask another process to do; a module, so that it can be imported there."""

import os
import pickle
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import optax

import nnxlite as nnx
from nnxlite._base.interning import LOCK
from tests.laws import model as slow
from tests.laws.model import content

X = jnp.ones((4, 2))
traces = []


class Net(nnx.Module):
    """Sharing, a cycle, noise, statistics, and a set, whose order depends on the hash seed."""

    def __init__(self, rngs, size=3, tag=None):
        self.first = nnx.Linear(2, size, rngs=rngs)
        self.second = nnx.Linear(size, 2, rngs=rngs)
        self.tied = self.first
        self.me = self
        self.words = frozenset("abcd")
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.count = nnx.BatchStat(jnp.array(0.0))
        self.plain = [nnx.Param(jnp.array([1.0, 1.0])), {"array": jnp.ones(2)}, tag]

    def __call__(self, x):
        self.count[...] += 1.0
        return self.second(self.dropout(nnx.tanh(self.first(x)))) + self.plain[0]


@nnx.jit
def train_step(model, optimizer, x):
    traces.append(1)
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def make():
    model = Net(nnx.Rngs(0, noise=1))
    return model, adam(model)


def adam(model):
    return nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def form(model):
    return slow.canonical(model, content)


def packed(model, optimizer, *more):
    """As bytes; pickle refuses optax's own functions, so the state of an optimizer is what travels."""
    return pickle.dumps((model, nnx.state(optimizer), *nnx.split(model), *more))


def unpacked(payload):
    model, moments, *more = pickle.loads(payload)
    optimizer = adam(model)
    nnx.update(optimizer, moments)
    return model, optimizer, *more


def go_on(payload):
    """Continue with what another process has packed: train, draw, compare.

    Returns what has to be the same in every process, what has not, and the objects, packed again.
    """
    model, optimizer, graphdef, state, rngs, step = unpacked(payload)
    before = len(traces)
    same = {
        "own graphdef": graphdef == nnx.graphdef(model),
        "same object": graphdef.structure is nnx.graphdef(model).structure,
        "hash": hash(graphdef) == hash(nnx.graphdef(model)),
        "of a new model": graphdef == nnx.graphdef(make()[0]),
        "merged": form(nnx.merge(graphdef, state)) == form(model),
        "paths": [*map(str, nnx.to_flat_state(state).paths)],
        "keys": [jax.random.key_data(rngs.noise()).tolist() for _ in range(3)],
        "losses": [float(step(model, optimizer, X)) for _ in range(3)],
    }
    own = {"hash seed": hash("text"), "traces": len(traces) - before}
    return same, own, packed(model, optimizer, rngs, step)


def in_a_child_of_a_fork():
    """Fork while another thread has the lock; ends with status 0."""
    warnings.simplefilter("ignore")  # JAX and Python warn of forks beside threads, and rightly
    held, forked = threading.Event(), threading.Event()

    def hold():
        with LOCK:
            held.set()
            forked.wait(0.3)  # a fork waits for the lock, so this is never set in time

    model = Net(nnx.Rngs(0))
    nnx.split(model)
    threading.Thread(target=hold).start()
    held.wait()
    child = os.fork()
    if not child:  # no computation here: the threads of JAX are not in the child
        model.added = 1
        model.eval()
        good = nnx.merge(*nnx.split(model)).added == 1 and nnx.graphdef(model) is not None
        os._exit(0 if good else 3)
    forked.set()
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    in_a_child_of_a_fork()
