"""Nothing grows with steps, events, structures or threads (law L9).

A small network is trained, and what users do beside it happens: see EVENTS. The tests count what one
more occurrence of each leaves behind: arrays, objects, entries of the library's tables, programs.
"""

import collections
import contextlib
import functools
import gc
import io
import sys
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from nnxlite._base.interning import Table
from tests.reliability.other_process import Net, adam

pytest.importorskip("orbax.checkpoint")

X = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2)


def loss_of(model):
    return jnp.mean((model(X) - jnp.sin(3 * X)) ** 2)


@nnx.jit
def train_step(model, optimizer, metrics):
    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    metrics.update(values=loss)


@nnx.jit
def eval_step(model, metrics):
    metrics.update(values=loss_of(model))
    model.first.sow(nnx.Intermediate, "seen", model.first(X))


@nnx.filter_jit
def filtered_step(model):
    return model(X).sum()


@nnx.jit
def lora_step(model, optimizer):
    grads = nnx.grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, grads)


@nnx.jit
def fails(model, x):
    model.first.kernel.value *= 2
    model.first.more = nnx.Param(model.first(x))
    raise ZeroDivisionError


class Run:
    def __init__(self, folder):
        self.model, self.folder, self.count = Net(nnx.Rngs(0)), folder, 0
        self.optimizer = adam(self.model)
        self.metrics = nnx.MultiMetric(loss=nnx.metrics.Average())
        self.manager = nnx.checkpoint.Manager(folder, keep=2)

    def step(self):
        train_step(self.model, self.optimizer, self.metrics)
        self.count += 1


def evaluate(run):
    run.model.eval()
    run.metrics.reset()
    eval_step(run.model, run.metrics)
    run.metrics.compute()
    run.metrics.reset()
    nnx.pop(run.model, nnx.Intermediate)
    run.model.train()


def checkpoint(run):
    items = {"model": run.model, "optimizer": run.optimizer}
    run.manager.save((run.manager.latest or 0) + 1, metrics={"loss": 1}, **items)
    run.manager.restore(**items)
    run.manager.close()
    run.manager = nnx.checkpoint.Manager(run.folder, keep=2)


def edits(run):
    """Attributes are added and removed, a layer gives way to another one and comes back."""
    first, before = run.model.first, run.model.second
    first.note, first.extra = "noted", nnx.Cache(jnp.zeros(3))
    run.step()
    del first.note, first.extra
    run.step()
    for layer in (nnx.Sequential(before), before):
        run.model.second = layer
        filtered_step(run.model)


def adapters(run):
    model = nnx.clone(run.model)
    nnx.lora.inject(model, nnx.Linear, rank=2, rngs=nnx.Rngs(0))
    lora_step(model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam))
    nnx.lora.remove(model)
    filtered_step(model)


def new_optimizers(run):
    """Each is equal to one before: the usual one, with hyperparameters in the state, accumulating."""
    run.optimizer = adam(run.model)
    run.step()
    model = nnx.clone(run.model)
    for tx in (
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2),
    ):
        train_step(model, nnx.Optimizer(model, tx, wrt=nnx.Param), run.metrics)


def new_model(run):
    model = Net(nnx.Rngs(run.count))
    train_step(model, adam(model), run.metrics)


def new_functions(run):
    """Functions are defined, compiled and dropped; each is another one, as for `jax.jit`."""
    nnx.jit(lambda model: model(X))(run.model)
    nnx.jit(lambda model, x: model(x), donate_argnums=1)(run.model, X + 0)
    nnx.filter_jit(lambda x: x * 3)(X)
    nnx.filter_grad(lambda tree: (tree["w"] ** 2).sum())({"w": X, "name": "w"})
    nnx.filter_vmap(lambda x: x * 2)(X)


def eager(run):
    """Functions are defined again each time; a body that captures another array is a new program."""
    model, array = run.model, jnp.full((), float(run.count % 3))
    nnx.grad(lambda model: jnp.mean(model(X) ** 2))(model)
    wrt = nnx.DiffState(0, lambda path, leaf: "bias" in path)
    nnx.grad(lambda model: jnp.mean(model(X) ** 2), argnums=wrt)(model)
    nnx.fori_loop(0, 3, lambda i, c: c + array, jnp.zeros(()))
    nnx.vmap(lambda model, x: model.first(x), in_axes=(None, 0))(model, X)
    nnx.scan(lambda c, x: (c + x, c), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(X[0], X)
    nnx.cond(run.count % 2 == 0, lambda m, x: x + m.plain[0].sum(), lambda m, x: x, model, X)
    nnx.while_loop(lambda c: c < 3, lambda c: c + 1, 0)
    nnx.remat(lambda model, x: model.first(x))(model, X)
    nnx.eval_shape(lambda: Net(nnx.Rngs(0)))


def functional(run):
    graphdef, params, rest = nnx.split(run.model, nnx.Param, ...)
    nnx.merge(graphdef, params, rest)
    nnx.update(run.model, nnx.state(run.model))
    nnx.clone(run.model)
    nnx.find_duplicates(run.model)
    nnx.map(lambda path, leaf: leaf, run.model)
    jax.tree.map(lambda x: x, params)
    collections.deque(nnx.iter_graph(run.model), 0)


def printed(run):
    repr(run.model), str(run.model), repr(nnx.split(run.model)), repr(run.optimizer)
    with contextlib.redirect_stdout(io.StringIO()):
        print(nnx.tabulate(run.model, X, console_kwargs={"width": 100}))
        nnx.display(run.model)
    nnx.diff(run.model, run.model)


def failing(run):
    """Calls that fail: while they are traced, when they are checked, and from inside."""
    model = run.model
    for call in (
        lambda: fails(model, X[:, :1]),
        lambda: fails(model, X),
        lambda: nnx.update(model, {"no": {"such": jnp.zeros(2)}}),
        lambda: nnx.grad(lambda model: model(X))(model),  # not a scalar
        lambda: nnx.vmap(lambda x, y: x + y)(X, X[:2]),
        lambda: nnx.scan(lambda c, x: (jnp.zeros(3), x))(jnp.zeros(2), X),
        lambda: jax.jit(lambda x: setattr(model.plain[0], "value", x))(model.plain[0].value),
        lambda: nnx.merge(nnx.graphdef(model), {}),
    ):
        with contextlib.suppress(ValueError, TypeError, KeyError, ZeroDivisionError, nnx.NnxError):
            call()
            raise AssertionError("this call should fail")


def other_thread(run):
    thread = threading.Thread(target=lambda: (functional(run), new_model(run)))
    thread.start()
    thread.join()


EVENTS = (evaluate, checkpoint, edits, adapters, new_optimizers, new_model, new_functions)
EVENTS += (eager, functional, printed, failing, other_thread)
COMPILES = {new_functions: 3, eager: 1}
"""How many programs one more occurrence may compile."""

PROGRAMS = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: PROGRAMS.extend([name] * name.endswith("backend_compile_duration"))
)


def tables():
    """The number of entries of all tables and caches that modules of the library have."""
    found = {}
    cached = type(functools.lru_cache(lambda: None))
    kinds = dict, set, list, collections.deque, Table, weakref.WeakKeyDictionary
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "nnxlite"]:
        for name, value in list(vars(module).items()):
            if not name.startswith("__") and isinstance(value, kinds):
                found[id(value)] = len(value)
            elif type(value) is cached:
                found[id(value)] = value.cache_info().currsize
    return sum(found.values())


def measure():
    gc.collect()
    gc.collect()  # what a weak reference or a finalizer set free
    by_type = collections.Counter(
        f"{type(x).__module__}.{type(x).__name__}" for x in gc.get_objects()
    )
    return types.SimpleNamespace(
        arrays=len(jax.live_arrays()),
        objects=by_type.total(),
        programs=len(PROGRAMS),
        threads=threading.active_count(),
        by_type=by_type,
        tables=tables(),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = Run(tmp_path_factory.mktemp("run"))
    evaluate(made)
    measure()  # what the first one makes stays
    yield made
    made.manager.close()


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_L9_one_more_occurrence_of_an_event_leaves_nothing(run, event):
    for _ in range(2):
        event(run)
    run.manager.wait()
    before = measure()
    for _ in range(2):
        event(run)
    run.manager.wait()
    after = measure()
    assert after.programs - before.programs <= 2 * COMPILES.get(event, 0)
    assert after.arrays <= before.arrays + 8
    # `test_memory.py` says what JAX 0.11 changed for donating functions.
    most = 1_800 if event is new_functions and jax.__version_info__ >= (0, 11) else 250
    left = after.by_type - before.by_type
    assert after.objects - before.objects <= most, left.most_common(8)
    assert after.threads <= before.threads or event is checkpoint  # which has some of its own


class Sized(nnx.Module):
    def __init__(self, size):
        self.weight = nnx.Param(np.zeros(size, np.float32))
        self.size = size
        self.plain = [nnx.Param(np.zeros(1, np.float32)), {f"key {size}": np.zeros(1, np.float32)}]
        setattr(self, f"name_{size}", nnx.Cache(np.zeros(1, np.float32)))


def many_structures(numbers):
    """Models that are split, merged, changed and dropped; how many of their GraphDefs are alive."""
    made = []
    for number in numbers:
        model = Sized(number + 1)
        nnx.merge(*nnx.split(model))
        nnx.state(model, nnx.Param)
        nnx.update(nnx.clone(model), nnx.state(model))
        model.eval()
        made.append(weakref.ref(nnx.graphdef(model)))
    del model
    gc.collect()
    return sum(graphdef() is not None for graphdef in made)


def test_L9_structures_that_are_gone_leave_no_definitions():
    many_structures(range(300))
    before = measure()
    alive = many_structures(range(300, 600))
    after = measure()
    assert alive <= 1
    assert after.objects <= before.objects + 300
    assert after.tables <= before.tables + 100


def test_what_stays_is_counted(monkeypatch):
    before = measure()
    kept = [nnx.Param(0.0) for _ in range(200)]
    monkeypatch.setattr(nnx, "_table", {1: 2, 3: 4}, raising=False)
    after = measure()
    assert after.objects > before.objects + len(kept) and after.tables == before.tables + 2
