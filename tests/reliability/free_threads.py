"""Threads that run freely: a round starts many at once, and compares them with the same work in turn.

A round makes new functions and new structures, so that the first calls race as well as the later ones.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import random
import sys
import threading
import typing as tp
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnxlite as nnx
from tests.laws import model as slow
from tests.laws.programs import content
from tests.reliability.thread_cases import consistent

_rounds = itertools.count(1)


class Net(nnx.Module):
    """A model with shared parameters, statistics, a random stream, and modes."""

    def __init__(self, size: int, tag: tp.Any, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(2, size, rngs=rngs)
        self.second = nnx.Linear(size, 2, rngs=rngs)
        self.tied = self.first
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.count = nnx.BatchStat(jnp.array(0.0))
        self.plain = [nnx.Param(jnp.array([1.0, 1.0])), tag]

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] += 1.0
        return self.second(self.dropout(nnx.tanh(self.first(x)))) + self.plain[0]


def loss(model: Net, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def train(model: Net, optimizer: nnx.Optimizer, x: jax.Array, scale: float) -> jax.Array:
    """A training step with a transform inside a transform."""
    value, grads = nnx.value_and_grad(loss)(model, scale * x)
    optimizer.update(model, grads)
    return value


def evaluate_rows(model: Net, optimizer: nnx.Optimizer, x: jax.Array, scale: float) -> jax.Array:
    """`vmap` and `scan` inside."""
    rows = nnx.vmap(lambda w, x: scale * x * w, in_axes=(None, 0))(model.plain[0], x)
    model.count[...] += 1.0
    carry = jnp.zeros(2)
    carry, _ = nnx.scan(lambda c, row: (c + row, row), in_axes=(nnx.Carry, 0))(carry, rows)
    return nnx.cond(carry.sum() > 0, lambda c: c.sum(), lambda c: c.mean(), carry)


def grow(model: Net, optimizer: nnx.Optimizer, x: jax.Array, scale: float) -> jax.Array:
    """A change of structure that leaves the transform."""
    model.seen = nnx.Variable(x * scale)
    model.last = scale
    return model.seen.value.sum()


STEPS = (train, evaluate_rows, grow)
HOW = ("jit", "donated", "written", "eager", "by value", "filtered")


def transformed(step: tp.Callable[..., tp.Any], how: str) -> tp.Any:
    """A new function that does what `step` does, under a transform."""

    def fun(model: Net, optimizer: nnx.Optimizer, x: jax.Array, scale: float) -> jax.Array:
        return step(model, optimizer, x, scale)

    if how == "eager":
        return fun
    if how == "filtered":
        return lambda model, optimizer, x, scale: compiled(model, optimizer, x)
    options: dict[str, tp.Any] = {
        "jit": {},
        "donated": {"donate_argnums": (0, 1)},
        "written": {"donate": "written"},
        "by value": {"graph_updates": False},
    }[how]
    return nnx.jit(fun, static_argnums=3, **options)


@nnx.filter_jit
def compiled(model: Net, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    model.count[...] += x.sum()
    return model.plain[0].value.sum()


class Job(tp.NamedTuple):
    """What one thread does: a few calls on a model of its own."""

    fun: tp.Any
    model: Net
    optimizer: nnx.Optimizer
    scales: tuple[float, ...]

    def run(self) -> list[float]:
        x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        return [float(self.fun(self.model, self.optimizer, x, scale)) for scale in self.scales]


def job(fun: tp.Any, size: int, tag: tp.Any, seed: int, scales: tuple[float, ...]) -> Job:
    model = Net(size, tag, nnx.Rngs(seed))
    return Job(fun, model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), scales)


@contextlib.contextmanager
def switching(interval: float = 1e-6) -> tp.Iterator[None]:
    """Threads take turns every few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def at_once(works: tp.Sequence[tp.Callable[[], tp.Any]]) -> list[tp.Any]:
    """The results of functions that start at once, each in a thread; raises the first error."""
    start = threading.Barrier(len(works))

    def run(work: tp.Callable[[], tp.Any]) -> tp.Any:
        start.wait()
        return work()

    with switching(), ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(run, work) for work in works]]


def different_models(seed: int, threads: int) -> int:
    """Threads call one function on models of their own; returns how many calls they made."""
    random_ = random.Random(seed)
    number = next(_rounds)
    step, how = random_.choice(STEPS), random_.choice(HOW)
    fun, alone = transformed(step, how), transformed(step, how)
    jobs, expected = [], []
    for thread in range(threads):
        size, tag = random_.choice((2, 3)), (number, random_.choice((0, 1)))
        scales = tuple(random_.choice((0.5, 1.0, 2.0)) for _ in range(3))
        jobs.append(job(fun, size, tag, thread, scales))
        expected.append(job(alone, size, tag, thread, scales))
    results = at_once([j.run for j in jobs])
    for mine, serial, got in zip(jobs, expected, results):
        assert got == serial.run(), (seed, step.__name__, how)
        same = slow.canonical(serial.model, content)
        assert slow.canonical(mine.model, content) == same, (seed, step.__name__, how)
        consistent(mine.model, mine.optimizer)
    return 3 * threads


READERS: tuple[tp.Callable[[Net], tp.Any], ...] = (
    lambda model: nnx.merge(*nnx.split(model)),
    nnx.clone,
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
)


def one_model(seed: int, threads: int) -> int:
    """Half of the threads train one model, the others read it in every way; returns the calls made.

    Nobody adds or removes anything, so nothing may raise, and each reader sees the structure and
    values that some step wrote.
    """
    random_ = random.Random(seed)
    number = next(_rounds)

    def step(model: Net, x: jax.Array) -> jax.Array:
        for part in (model.first.kernel, model.second.kernel, model.plain[0], model.count):
            part[...] = jnp.full_like(part, model.count[...] + x)
        return model.count[...]

    fun = nnx.jit(step, graph_updates=random_.choice((True, False)))
    model = Net(2, number, nnx.Rngs(0))
    for part in (model.first.kernel, model.second.kernel, model.plain[0], model.count):
        part[...] = jnp.zeros_like(part)
    calls = 6
    seen: list[Net] = []

    def write() -> None:
        for _ in range(calls):
            fun(model, jnp.array(1.0))

    def read() -> None:
        for _ in range(calls):
            seen.append(random_.choice(READERS)(model))
            repr(model)
            nnx.state(model, nnx.Param)

    at_once([write if i % 2 else read for i in range(threads)])
    writers = threads // 2
    assert calls <= float(model.count[...]) <= calls * writers
    form = slow.canonical(model, lambda leaf: getattr(leaf, "shape", leaf))
    for copied in (*seen, model):
        assert slow.canonical(copied, lambda leaf: getattr(leaf, "shape", leaf)) == form
        for part in (copied.first.kernel, copied.second.kernel, copied.plain[0], copied.count):
            (value,) = set(np.asarray(part[...]).ravel().tolist())  # no array is torn
            assert value == int(value) and 0 <= value <= calls * writers
    consistent(model)
    return calls * threads


def one_stream(seed: int, threads: int) -> int:
    """Threads draw from one stream: no key comes twice; returns how many were drawn."""
    rngs = nnx.Rngs(seed)
    draws = 20
    keys = at_once(
        [
            lambda: [tuple(jax.random.key_data(rngs()).tolist()) for _ in range(draws)]
            for _ in range(threads)
        ]
    )
    assert len({key for part in keys for key in part}) == draws * threads
    assert int(rngs.default.count.value) == draws * threads
    return draws * threads


ROUNDS = {f.__name__: f for f in (different_models, one_model, one_stream)}
