"""Threads that run freely, and signal handlers in the middle of an edit (`docs/threads.md`).

Threads that start at once make new functions and structures, so that the first calls race as well as the
later ones; the results are those of the same work done in turn.
"""

from __future__ import annotations

import contextlib
import copy
import functools
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
import pytest

import nnxlite as nnx
from nnxlite._base.interning import LOCK
from nnxlite._base.jax import EAGER, trace_state
from tests.boundary.lines import Lines
from tests.laws import model as slow
from tests.laws.model import content


def consistent(*models):
    """Check that what the engine has cached of some objects is what they are; that no trace is left."""
    assert trace_state.value is EAGER
    for model in models:
        slow.check(model)
        assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(nnx.state(model)))


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


@pytest.mark.parametrize("seed", range(2))
def test_different_models_in_one_function(seed, threads=3):
    random_ = random.Random(seed)
    step, how = random_.choice(STEPS), random_.choice(HOW)
    fun, alone = transformed(step, how), transformed(step, how)
    jobs, expected = [], []
    for thread in range(threads):
        size, tag = random_.choice((2, 3)), (seed, random_.choice((0, 1)))
        scales = tuple(random_.choice((0.5, 2.0)) for _ in range(3))
        jobs.append(job(fun, size, tag, thread, scales))
        expected.append(job(alone, size, tag, thread, scales))
    results = at_once([j.run for j in jobs])
    for mine, serial, got in zip(jobs, expected, results):
        assert got == serial.run(), (seed, step.__name__, how)
        same = slow.canonical(serial.model, content)
        assert slow.canonical(mine.model, content) == same, (seed, step.__name__, how)
        consistent(mine.model, mine.optimizer)


READERS: tuple[tp.Callable[[Net], tp.Any], ...] = (
    lambda model: nnx.merge(*nnx.split(model)),
    nnx.clone,
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
)


def test_one_model_read_while_it_is_trained(seed=0, threads=4):
    """Half of the threads train one model, the others read it in every way.

    Nobody adds or removes anything, so nothing may raise, and each reader sees the structure and
    values that some step wrote.
    """
    random_ = random.Random(seed)

    def step(model: Net, x: jax.Array) -> jax.Array:
        for part in (model.first.kernel, model.second.kernel, model.plain[0], model.count):
            part[...] = jnp.full_like(part, model.count[...] + x)
        return model.count[...]

    fun = nnx.jit(step, graph_updates=random_.choice((True, False)))
    model = Net(2, seed, nnx.Rngs(0))
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


def test_sixteen_threads_draw_different_keys(threads=16):
    rngs = nnx.Rngs(0)
    draws = 20
    keys = at_once(
        [
            lambda: [tuple(jax.random.key_data(rngs()).tolist()) for _ in range(draws)]
            for _ in range(threads)
        ]
    )
    assert len({key for part in keys for key in part}) == draws * threads
    assert int(rngs.default.count.value) == draws * threads


def test_no_stale_definition_stays_after_edits_by_several_threads(threads=3):
    """Each edits another attribute, some read; afterwards the engine sees the last state."""
    for attempt in range(10):
        model = Net(2, attempt, nnx.Rngs(0))
        model.flag, model.sizes, layers = False, [0], (model.first, model.second)

        def write(number, m=model, layers=layers):
            layer = layers[number % 2]
            for i in range(20):
                layer.kernel.set_metadata(tag=i)
                setattr(layer, f"extra_{number}", nnx.Param(jnp.ones(2)))
                m.flag = i % 3 > 0
                m.sizes.append(i)
                if i % 2:
                    delattr(layer, f"extra_{number}")

        def read(number, m=model, layers=layers):
            for _ in range(10):
                try:
                    nnx.merge(*nnx.split(m))
                    nnx.graphdef(layers[number % 2])
                except RuntimeError as error:  # as of a dict that another thread edits
                    assert "changed size during iteration" in str(error)
                except (KeyError, ValueError):  # names and values read at different moments
                    pass

        at_once([functools.partial(f, n) for f in (write, read) for n in range(threads)])
        consistent(model)


def test_of_updates_of_one_object_by_several_threads_one_is_left(threads=4):
    model = nnx.List([nnx.Param(jnp.array(0)) for _ in range(20)])
    states = [nnx.State({i: jnp.array(n) for i in range(20)}) for n in range(threads)]
    at_once([lambda s=s: [nnx.update(model, s) for _ in range(40)] for s in states])
    assert {int(v[...]) for v in model} <= set(range(threads))


class Pair(nnx.Module):
    def __init__(self):
        self.a, self.b = nnx.Param(jnp.zeros(2)), nnx.Param(jnp.zeros(2))


@nnx.jit
def read(model):
    return model.a.value + 10 * model.b.value


@nnx.jit
def raise_a(model):
    model.a[...] += 1.0


raise_a_of_x = nnx.jit(lambda holder: raise_a(holder["x"]))
BESIDE = {
    "calls that read": lambda model, above, other: [(read(model), raise_a(other)) for _ in "abc"],
    "a call that writes": lambda model, above, other: raise_a(model),
    "a call through another plan": lambda model, above, other: raise_a_of_x(above),
}


@pytest.mark.parametrize("call", BESIDE.values(), ids=BESIDE)
def test_a_write_beside_a_call_is_never_lost(call):
    """By a second thread, at the same moment; both are seen by the next call."""
    model, other, turn, rounds = Pair(), Pair(), threading.Barrier(2), 60
    above = nnx.Dict(x=model)
    raised = call is not BESIDE["calls that read"]

    def writer():
        for number in range(rounds):
            turn.wait()
            model.b.value = jnp.full(2, float(number))
            turn.wait()

    def caller():
        for number in range(rounds):
            turn.wait()
            call(model, above, other)
            turn.wait()
            assert read(model)[0] == (number + 1) * raised + 10 * number

    at_once([writer, caller])
    assert other.a.value.tolist() == [0.0 if raised else 3.0 * rounds] * 2


EDITS = {
    "a flag": lambda model: setattr(model, "flag", True),
    "an attribute": lambda model: setattr(model, "extra", nnx.Param(jnp.ones(2))),
    "removed": lambda model: delattr(model, "tied"),
    "metadata": lambda model: model.first.kernel.set_metadata(tag=1),
    "another setting": lambda model: setattr(model.dropout, "rate", 0.25),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_signal_handler_reads_an_object_while_it_is_edited(edit):
    """A handler or a finalizer runs in the thread that is in the middle of the edit."""
    at, place = 0, "the first line"
    while place:
        model, at = Net(2, edit, nnx.Rngs(0)), at + 2
        nnx.split(model)
        place = Lines(functools.partial(EDITS[edit], model), at, model.eval).place
        assert model.dropout.deterministic is bool(place)
        consistent(model)


def test_settings_of_jax_are_those_of_the_thread():
    """A mesh or a precision that one thread has set gives another one neither results nor programs."""
    traced: list[str] = []

    @nnx.jit
    def product(model: nnx.Linear, x: jax.Array) -> jax.Array:
        traced.append(str(jax.config.jax_default_matmul_precision))
        return model(x)

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    inside, outside = threading.Event(), threading.Event()

    def with_setting() -> None:
        with jax.default_matmul_precision("float32"), nnx.set_graph_updates(False):
            product(model, jnp.ones((1, 2)))
            inside.set()
            assert outside.wait(60)

    def without() -> None:
        assert inside.wait(60)
        product(model, jnp.ones((1, 2)))
        assert nnx.set_graph_updates.current_value()
        outside.set()

    at_once([with_setting, without])
    assert traced == ["float32", "None"]


def test_the_lock_of_the_process_is_free_again():
    assert LOCK.acquire(blocking=False)
    LOCK.release()
