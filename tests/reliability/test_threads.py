"""Threads and tasks that run freely (`docs/threads.md`): the results are those of work done in turn.

Threads that start at once make new functions and structures, so that the first calls race as well as the
later ones.
"""

import asyncio
import contextlib
import copy
import functools
import itertools
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._base.interning import LOCK
from nnxlite._base.jax import EAGER, trace_state
from tests.laws import model as slow
from tests.reliability.other_process import Net, adam, form


@pytest.fixture(autouse=True)
def threads_take_turns_every_few_bytecodes():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
    assert LOCK.acquire(blocking=False)
    LOCK.release()


def at_once(works):
    """The results of functions that start at once, each in a thread; raises the first error."""
    start = threading.Barrier(len(works))
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(lambda work=work: (start.wait(), work())[1]) for work in works]
        return [future.result() for future in futures]


def consistent(*models):
    """Check that what the engine has cached of some objects is what they are; that no trace is left."""
    assert trace_state.value is EAGER
    for model in models:
        slow.check(model)
        assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(nnx.state(model)))


def train(model, optimizer, x, scale):
    """A step with transforms inside, and a change of structure that leaves it."""
    value, grads = nnx.value_and_grad(lambda model: (model(scale * x) ** 2).mean())(model)
    optimizer.update(model, grads)
    rows = nnx.vmap(lambda w, x: scale * x * w, in_axes=(None, 0))(model.plain[0], x)
    model.seen, model.last = nnx.Variable(rows), scale
    return nnx.cond(value > 0, lambda rows: rows.sum(), lambda rows: rows.mean(), rows)


TRANSFORMS = {
    "jit": functools.partial(nnx.jit, static_argnums=3),
    "donated": functools.partial(nnx.jit, static_argnums=3, donate_argnums=(0, 1)),
    "eager": lambda step: step,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_different_models_in_one_function(transform):
    x, scales = jnp.array([[1.0, 2.0], [3.0, 4.0]]), (0.5, 2.0)

    def work(step, number):
        model = Net(nnx.Rngs(number), 2 + number % 2, number % 2)  # two of them have one structure
        optimizer = adam(model)
        return model, optimizer, [float(step(model, optimizer, x, scale)) for scale in scales]

    together, alone = (TRANSFORMS[transform](lambda *args: train(*args)) for _ in range(2))
    threads = at_once([functools.partial(work, together, number) for number in range(3)])
    for number, (model, optimizer, results) in enumerate(threads):
        expected, _, values = work(alone, number)
        assert results == values and form(model) == form(expected)
        consistent(model, optimizer)


PICKLED = lambda model: pickle.loads(pickle.dumps(model))
READERS = lambda model: nnx.merge(*nnx.split(model)), nnx.clone, copy.deepcopy, PICKLED


def test_one_model_read_while_it_is_trained():
    """Nobody adds or removes anything: nothing raises, and readers see what some step wrote."""
    model, seen, calls, writers = Net(nnx.Rngs(0), 2), [], 6, 2
    parts = lambda model: (model.first.kernel, model.second.kernel, model.plain[0], model.count)
    for part in parts(model):
        part[...] = jnp.zeros_like(part)

    @nnx.jit
    def step(model, x):
        for part in parts(model):
            part[...] = jnp.full_like(part, model.count[...] + x)

    def write():
        for _ in range(calls):
            step(model, jnp.array(1.0))

    def read():
        for _, reader in zip(range(calls), itertools.cycle(READERS)):
            seen.append(reader(model))
            repr(model)
            nnx.state(model, nnx.Param)

    at_once([write, read] * writers)
    # Each thread adds to what it read, which may be older than what the other has written since.
    assert writers <= float(model.count[...]) <= calls * writers
    shapes = functools.partial(slow.canonical, leaf=lambda leaf: getattr(leaf, "shape", leaf))
    for copied in (*seen, model):
        assert shapes(copied) == shapes(model)
        for part in parts(copied):
            (value,) = set(np.asarray(part[...]).ravel().tolist())  # no array is torn
            assert value == int(value) and 0 <= value <= calls * writers
    consistent(model)


def test_sixteen_threads_draw_different_keys(threads=16, draws=20):
    rngs = nnx.Rngs(0)
    draw = lambda: [tuple(jax.random.key_data(rngs()).tolist()) for _ in range(draws)]
    keys = at_once([draw] * threads)
    assert len({key for part in keys for key in part}) == draws * threads
    assert int(rngs.default.count.value) == draws * threads


def test_no_stale_definition_stays_after_edits_by_several_threads(threads=3):
    """Each edits another attribute, some read; afterwards the engine sees the last state."""
    for attempt in range(10):
        model = Net(nnx.Rngs(0), 2, attempt)
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


@nnx.jit
def read(model):
    return model.a.value + 10 * model.b.value


@nnx.jit
def raise_a(model):
    model.a[...] += 1.0


raise_a_of_x = nnx.jit(lambda holder: raise_a(holder["x"]))
BESIDE = {  # a call, and how often it raises `a`
    "calls that read": (lambda model, above: [read(model) for _ in "abc"], 0),
    "a call that writes": (lambda model, above: raise_a(model), 1),
    "a call through another plan": (lambda model, above: raise_a_of_x(above), 1),
}


@pytest.mark.parametrize(("call", "raised"), BESIDE.values(), ids=BESIDE)
def test_a_write_beside_a_call_is_never_lost(call, raised):
    """By a second thread, at the same moment; both are seen by the next call."""
    model = nnx.Dict(a=nnx.Param(jnp.zeros(2)), b=nnx.Param(jnp.zeros(2)))
    above, turn, rounds = nnx.Dict(x=model), threading.Barrier(2), 60

    def writer():
        for number in range(rounds):
            turn.wait()
            model.b.value = jnp.full(2, float(number))
            turn.wait()

    def caller():
        for number in range(rounds):
            turn.wait()
            call(model, above)
            turn.wait()
            assert read(model)[0] == (number + 1) * raised + 10 * number

    at_once([writer, caller])


# Tasks of one event loop interleave between awaits: each has the settings that it has made ---------

mode, updates = nnx.set_graph_mode.current_value, nnx.set_graph_updates.current_value
SWITCHES = {
    "graph mode": (lambda: nnx.set_graph_mode(False), mode),
    "graph updates": (lambda: nnx.set_graph_updates(False), updates),
    "eager sharding": (lambda: nnx.use_eager_sharding(False), nnx.using_eager_sharding),
    "var defaults": (lambda: nnx.var_defaults(ref=True), lambda: not nnx.var_defaults().ref),
}


def together(*tasks):

    async def main():
        return await asyncio.gather(*tasks)

    return asyncio.run(main())


@pytest.mark.parametrize("name", SWITCHES)
def test_a_setting_holds_in_its_task_alone(name):
    """Task by task, blocks that overlap without being nested."""
    scope, is_default = SWITCHES[name]

    async def seen(steps, scope):
        found = []
        with scope():
            for _ in range(steps):
                await asyncio.sleep(0)
                found.append(is_default())
        return [*found, is_default()]

    inside = [[False] * steps + [True] for steps in (3, 5, 1)]
    tasks = seen(3, scope), seen(6, contextlib.nullcontext), seen(5, scope), seen(1, scope)
    assert together(*tasks) == [inside[0], [True] * 7, inside[1], inside[2]]
    assert is_default()


def test_to_thread_takes_the_settings_along_and_brings_none_back():
    def work():
        nnx.set_graph_mode(False)
        return mode()

    async def main():
        with nnx.set_graph_mode(False):
            there = await asyncio.to_thread(mode)
        return there, await asyncio.to_thread(mode), await asyncio.to_thread(work), mode()

    assert asyncio.run(main()) == (False, True, False, True)


def test_one_update_context_manager_in_several_tasks():
    """The manager is entered by one task while another one is inside."""
    manager = nnx.update_context("shared")

    async def cross(number):
        with manager as context:
            context.outer_ref_outer_index = nnx.graphlib.RefMap()  # as its first step does
            for _ in range(number):
                await asyncio.sleep(0)
            assert nnx.current_update_context("shared") is context
            assert context.outer_ref_outer_index is not None

    together(cross(1), cross(2), cross(3))
