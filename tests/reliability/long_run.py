"""Long runs: hundreds of thousands of training steps in one process, in which nothing may grow.

    python -m tests.reliability.long_run --steps 200000 --plot docs/assets/long-run.svg
    python -m tests.reliability.long_run --each 40
    python -m tests.reliability.long_run --structures 5000

The first command trains a small network with shared weights, batch statistics and dropout. At intervals
it does what users do beside training: see EVENTS. Meanwhile it counts, and after the warm-up fits
a line to each count: memory, arrays, objects, entries of the library's tables, compiled programs. What
grows by more than its tolerance is a defect. The second command repeats each event by itself, and
prints what one more occurrence leaves behind. The third makes models of many different structures, each
of a class of its own, and counts what stays after they are gone, which is little and the same for each,
because JAX never forgets a class of pytree nodes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import io
import os
import sys
import tempfile
import threading
import time
import typing as tp
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnxlite as nnx
from nnxlite._interning import Table
from nnxlite.transforms._wrapper import PerFunction

SIZE, BATCH = 8, 4
X = jnp.linspace(-1.0, 1.0, BATCH * SIZE).reshape(BATCH, SIZE)
Y = jnp.sin(3 * X)
LR = 1e-3


# What is trained ----------------------------------------------------------------------------


class Block(nnx.Module):
    """A layer with batch statistics and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(SIZE, SIZE, rngs=rngs)
        self.norm = nnx.BatchNorm(SIZE, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(jax.nn.relu(self.norm(self.linear(x))))


class Net(nnx.Module):
    """Two blocks, of which one is used twice, and an output layer tied to the first kernel."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = Block(rngs)
        self.blocks = nnx.List([Block(rngs), self.first])
        self.tied = self.first.linear.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = x + block(x)
        return x @ self.tied


def adam() -> tp.Any:
    """Equal ones compile once."""
    return optax.adam(LR)


@nnx.jit
def train_step(model: Net, optimizer: nnx.Optimizer[Net], metrics: nnx.MultiMetric) -> jax.Array:
    """One step of training, with metrics updated inside."""

    def loss_of(model: Net) -> jax.Array:
        return jnp.mean((model(X) - Y) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    metrics.update(values=loss)
    return loss


@nnx.jit
def eval_step(model: Net, metrics: nnx.MultiMetric) -> None:
    """One step of evaluation."""
    metrics.update(values=jnp.mean((model(X) - Y) ** 2))


@nnx.filter_jit
def filtered_step(model: Net, x: jax.Array) -> jax.Array:
    """The same network as a pytree of arrays and all else."""
    return model(x).sum()


class Run:
    """One process of training.

    Attributes:
        count: of the steps that were made.
        occurrences: of each event.
    """

    def __init__(self, folder: Path) -> None:
        self.model = Net(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, adam(), wrt=nnx.Param)
        self.metrics = nnx.MultiMetric(loss=nnx.metrics.Average())
        self.count = 0
        self.occurrences: collections.Counter[str] = collections.Counter()
        self.folder = folder
        self.manager = nnx.checkpoint.Manager(folder, keep=2)

    def steps(self, number: int) -> None:
        """Train."""
        for _ in range(number):
            train_step(self.model, self.optimizer, self.metrics)
        self.count += number

    def happen(self, name: str) -> None:
        """One event."""
        self.occurrences[name] += 1
        EVENTS[name].act(self)


# What happens beside training ---------------------------------------------------------------


class Event(tp.NamedTuple):
    """What is done at intervals.

    Attributes:
        act: does it, and leaves the run as it was but for values.
        every: after how many steps.
        compiles: how many programs one more occurrence may compile.
    """

    act: tp.Callable[[Run], None]
    every: int
    compiles: int = 0


EVENTS: dict[str, Event] = {}


def event(every: int, compiles: int = 0) -> tp.Callable[[tp.Callable[[Run], None]], tp.Any]:
    """Register an event under the name of its function."""

    def register(act: tp.Callable[[Run], None]) -> tp.Callable[[Run], None]:
        EVENTS[act.__name__] = Event(act, every, compiles)
        return act

    return register


@event(50)
def evaluate(run: Run) -> None:
    """Another mode, metrics computed and reset."""
    run.model.eval()
    run.metrics.reset()
    eval_step(run.model, run.metrics)
    run.metrics.compute()
    run.metrics.reset()
    run.model.train()


@event(2_000)
def checkpoint(run: Run) -> None:
    """A checkpoint written in the background, an older one deleted."""
    run.manager.save(
        (run.manager.latest or 0) + 1, model=run.model, optimizer=run.optimizer, metrics={"loss": 1}
    )


@event(5_000)
def restore(run: Run) -> None:
    """The last checkpoint read into the same objects."""
    if run.manager.latest is None:
        checkpoint(run)
    run.manager.restore(model=run.model, optimizer=run.optimizer)


@event(20_000)
def manager_again(run: Run) -> None:
    """Another manager of the same folder."""
    run.manager.close()
    run.manager = nnx.checkpoint.Manager(run.folder, keep=2)


@event(500)
def attribute(run: Run) -> None:
    """An attribute and a static one are added, and removed after a step."""
    run.model.first.note = "noted"
    run.model.first.extra = nnx.Cache(jnp.zeros(3))
    run.steps(1)
    del run.model.first.note, run.model.first.extra
    run.steps(1)


@event(500)
def replaced_layer(run: Run) -> None:
    """A layer gives way to another one, and comes back."""
    before = run.model.first.norm
    run.model.first.norm = nnx.Sequential(before)
    filtered_step(run.model, X)
    run.model.first.norm = before
    filtered_step(run.model, X)


@event(500)
def adapters(run: Run) -> None:
    """LoRA is put on a model, trained, and taken off."""
    model = nnx.clone(run.model)
    nnx.lora.inject(model, nnx.Linear, rank=2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, adam(), wrt=nnx.LoRAParam)
    lora_step(model, optimizer)
    nnx.lora.merge(model)
    nnx.lora.unmerge(model)
    nnx.lora.remove(model)
    filtered_step(model, X)


@nnx.jit
def lora_step(model: Net, optimizer: nnx.Optimizer[Net]) -> None:
    """One step of the adapters alone."""
    wrt = nnx.DiffState(0, nnx.LoRAParam)
    grads = nnx.grad(lambda model: model(X).sum(), argnums=wrt)(model)
    optimizer.update(model, grads)


@event(500)
def sown(run: Run) -> None:
    """Values sown in a step, and popped."""
    sow(run.model)
    nnx.pop(run.model, nnx.Intermediate)


@nnx.jit
def sow(model: Net) -> None:
    """Sow one value."""
    model.first.sow(nnx.Intermediate, "seen", model.first.linear(X))


@event(500)
def new_optimizer(run: Run) -> None:
    """An optimizer that is equal to the one before."""
    run.optimizer = nnx.Optimizer(run.model, adam(), wrt=nnx.Param)
    run.steps(1)


@event(10_000)
def injected_hyperparameters(run: Run) -> None:
    """An optimizer with hyperparameters in its state, equal to the one before."""
    _with(run, optax.inject_hyperparams(optax.adam)(learning_rate=LR))


@event(10_000)
def many_steps(run: Run) -> None:
    """The same with gradients that are accumulated."""
    _with(run, optax.MultiSteps(adam(), every_k_schedule=2))


def _with(run: Run, tx: tp.Any) -> None:
    model = nnx.clone(run.model)
    train_step(model, nnx.Optimizer(model, tx, wrt=nnx.Param), run.metrics)


@event(500)
def new_model(run: Run) -> None:
    """A model of the same structure is made, trained and dropped."""
    model = Net(nnx.Rngs(run.occurrences["new_model"]))
    train_step(model, nnx.Optimizer(model, adam(), wrt=nnx.Param), run.metrics)


@event(5_000, compiles=3)
def new_functions(run: Run) -> None:
    """Functions are defined, compiled and dropped; each is another one, as for `jax.jit`."""

    @nnx.jit
    def inner(model: Net, x: jax.Array) -> jax.Array:
        return model(x)

    inner(run.model, X)
    nnx.jit(lambda model: model(X))(run.model)
    nnx.jit(lambda model, x: model(x), donate_argnums=1)(run.model, X + 0)


@event(5_000, compiles=2)
def new_filtered_functions(run: Run) -> None:
    """The same under `filter_jit`: each of the two is another one."""

    @nnx.filter_jit
    def inner(x: jax.Array) -> jax.Array:
        return x * 2

    inner(X)
    nnx.filter_jit(lambda x: x * 3)(X)
    nnx.filter_grad(lambda tree: (tree["w"] ** 2).sum())({"w": X, "name": "w"})
    nnx.filter_vmap(lambda x: x * 2)(X)


@event(500, compiles=1)
def eager(run: Run) -> None:
    """Transforms outside of every `jit`, of functions that are defined again each time.

    A loop whose body captures another array is another program.
    """
    model, array = run.model, jnp.full((), float(run.occurrences["eager"] % 3))
    nnx.grad(lambda model: jnp.mean(model(X) ** 2))(model)
    wrt = nnx.DiffState(0, lambda path, leaf: "bias" in path)
    nnx.grad(lambda model: jnp.mean(model(X) ** 2), argnums=wrt)(model)
    nnx.fori_loop(0, 3, lambda i, c: c + array, jnp.zeros(()))
    nnx.vmap(lambda model, x: model.first.linear(x), in_axes=(None, 0))(model, X)
    nnx.scan(lambda c, x: (c + x, c), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(X[0], X)
    nnx.cond(run.count % 2 == 0, lambda m, x: x + m.tied.sum(), lambda m, x: x, model, X)
    nnx.while_loop(lambda c: c < 3, lambda c: c + 1, 0)
    nnx.fori_loop(0, 3, lambda i, c: c + 1, 0)
    nnx.remat(lambda model, x: model.first.linear(x))(model, X)
    nnx.eval_shape(lambda: Net(nnx.Rngs(0)))


@event(100)
def functional(run: Run) -> None:
    """Every function on graphs."""
    graphdef, params, rest = nnx.split(run.model, nnx.Param, ...)
    nnx.merge(graphdef, params, rest)
    nnx.update(run.model, nnx.state(run.model))
    nnx.clone(run.model)
    nnx.find_duplicates(run.model)
    nnx.map(lambda path, leaf: leaf, run.model)
    jax.tree.map(lambda x: x, params)
    collections.deque(nnx.iter_graph(run.model), 0)


@event(2_000)
def printed(run: Run) -> None:
    """Text and tables."""
    repr(run.model), str(run.model), repr(nnx.split(run.model)), repr(run.optimizer)
    with contextlib.redirect_stdout(io.StringIO()):
        print(nnx.tabulate(run.model, X, console_kwargs={"width": 100}))
        nnx.display(run.model)
    nnx.diff(run.model, run.model)


@event(500)
def failing(run: Run) -> None:
    """Calls that fail: while they are traced, when they are checked, and from inside."""
    model = run.model
    for call in (
        lambda: fails(model, X[:, :3]),
        lambda: fails(model, X),
        lambda: nnx.update(model, {"no": {"such": jnp.zeros(2)}}),
        lambda: nnx.grad(lambda model: model(X))(model),  # not a scalar
        lambda: nnx.vmap(lambda x, y: x + y)(X, X[:2]),
        lambda: nnx.scan(lambda c, x: (jnp.zeros(3), x))(jnp.zeros(2), X),
        lambda: jax.jit(lambda x: setattr(model.tied, "value", x))(model.tied.value),
        lambda: nnx.merge(nnx.graphdef(model), {}),
    ):
        with contextlib.suppress(ValueError, TypeError, KeyError, ZeroDivisionError, nnx.NnxError):
            call()
            raise AssertionError("this call should fail")


@nnx.jit
def fails(model: Net, x: jax.Array) -> None:
    """Fails after it has written."""
    model.tied.value = model.tied.value * 2
    model.first.more = nnx.Param(model.first.linear(x))
    raise ZeroDivisionError


@event(1_000)
def other_thread(run: Run) -> None:
    """A thread that splits, trains a model of its own, and ends."""
    thread = threading.Thread(target=lambda: (functional(run), new_model(run)))
    thread.start()
    thread.join()


# What is counted ----------------------------------------------------------------------------


class Programs:
    """How many programs XLA has compiled since this was made, in this process."""

    count = 0
    _listening = False

    @classmethod
    def listen(cls) -> None:
        """Have JAX report each."""
        if not cls._listening:
            cls._listening = True
            jax.monitoring.register_event_duration_secs_listener(cls._note)

    @classmethod
    def _note(cls, event: str, duration: float, **about: tp.Any) -> None:
        cls.count += event == "/jax/core/compile/backend_compile_duration"


def resident() -> int:
    """The memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tables() -> dict[str, int]:
    """The number of entries of each table and cache that a module of the library has."""
    found: dict[int, tuple[str, int]] = {}
    for module in sorted(name for name in sys.modules if name.partition(".")[0] == "nnxlite"):
        for name, value in list(vars(sys.modules[module]).items()):
            if name.startswith("__"):
                continue
            number = _entries(value)
            if number is not None:
                found.setdefault(id(value), (f"{module}.{name}", number))
    return dict(found.values())


def _entries(value: tp.Any) -> int | None:
    if isinstance(value, (dict, set, list, collections.deque, Table, weakref.WeakKeyDictionary)):
        return len(value)
    if isinstance(value, PerFunction):
        return sum(map(len, list(value._known.values())))
    info = getattr(value, "cache_info", None)
    return getattr(info(), "currsize", None) if callable(info) and type(value) in _CACHES else None


_CACHES = {type(functools.lru_cache(lambda: None))}


@dataclasses.dataclass
class Measurement:
    """What there is in the process at one time."""

    step: int
    memory: int
    arrays: int
    array_bytes: int
    objects: int
    programs: int
    threads: int
    by_type: collections.Counter[str]
    tables: dict[str, int]
    step_time: float = 0.0

    def numbers(self) -> dict[str, float]:
        """All that is to be flat, by name."""
        named = {
            "objects": self.objects,
            "arrays": self.arrays,
            "bytes of arrays": self.array_bytes,
            "programs": self.programs,
            "threads": self.threads,
            "entries of tables": sum(self.tables.values()),
        }
        return {**named, **self.tables}


def measure(step: int = 0) -> Measurement:
    """Count, after a collection."""
    gc.collect()
    gc.collect()  # what a weak reference or a finalizer set free
    arrays = jax.live_arrays()
    objects = gc.get_objects()
    by_type = collections.Counter(map(_type_name, map(type, objects)))
    return Measurement(
        step=step,
        memory=resident(),
        arrays=len(arrays),
        array_bytes=sum(array.nbytes for array in arrays),
        objects=len(objects),
        programs=Programs.count,
        threads=threading.active_count(),
        by_type=by_type,
        tables=tables(),
    )


@functools.cache
def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# A long run ---------------------------------------------------------------------------------


def train(
    run: Run,
    steps: int,
    *,
    measurements: int = 100,
    clear_at: int | None = None,
    scale: float = 1.0,
    but: tp.Collection[str] = (),
    show: tp.Callable[[str], object] | None = None,
) -> list[Measurement]:
    """Train with events at their intervals; what was measured, at equal intervals.

    Args:
        run: the training.
        steps: how many.
        measurements: how many times it is measured.
        clear_at: after how many steps JAX's caches are cleared, once.
        scale: by what the intervals between events are multiplied.
        but: events that are left out.
        show: gets a line for each tenth measurement.
    """
    Programs.listen()
    events = {name: happening for name, happening in EVENTS.items() if name not in but}
    intervals = {name: max(1, round(e.every * scale)) for name, e in events.items()}
    for name in events:  # each once before the first measurement, but the line is fitted later
        run.happen(name)
    out = []
    stops = {round(steps * (i + 1) / measurements) for i in range(measurements)}
    done, spent, timed = 0, 0.0, 0
    stride = min(10, *intervals.values())
    while done < steps:
        number = min(stride, steps - done)
        before = time.process_time()
        run.steps(number)
        spent, timed = spent + time.process_time() - before, timed + number
        passed = range(done + 1, done + number + 1)
        done += number
        for name, every in intervals.items():
            if passed[-1] // every > (passed[0] - 1) // every:
                run.happen(name)
        if clear_at is not None and clear_at in passed:
            jax.clear_caches()
        if any(stop in passed for stop in stops):
            run.manager.wait()
            measured = measure(done)
            measured.step_time = spent / timed
            spent, timed = 0.0, 0
            out.append(measured)
            if show and len(out) % max(1, measurements // 10) == 0:
                show(_line(measured))
    run.manager.close()
    return out


def _line(m: Measurement) -> str:
    return (
        f"{m.step:9,} steps  {m.memory / 2**20:7.1f} MiB  {m.arrays:5} arrays  {m.objects:8,} objects  "
        f"{sum(m.tables.values()):6,} entries  {m.programs:6,} programs  {m.step_time * 1e6:6.0f} us"
    )


class Growth(tp.NamedTuple):
    """How much one number grows in the second part of a run.

    Attributes:
        name: of what is counted.
        mean: of the measurements.
        total: what the fitted line gains from the first to the last of them.
        tolerance: what it may gain.
    """

    name: str
    mean: float
    total: float
    tolerance: float

    @property
    def is_leak(self) -> bool:
        """Whether it grows by more than it may."""
        return self.total > self.tolerance

    def __str__(self) -> str:
        verdict = "GROWS" if self.is_leak else "flat"
        return (
            f"{self.name:60} mean {self.mean:14,.1f}  gained {self.total:12,.1f}"
            f"  tolerance {self.tolerance:10,.1f}  {verdict}"
        )


def fitted(name: str, x: tp.Sequence[float], y: tp.Sequence[float], tolerance: float) -> Growth:
    """The growth of a number, by least squares.

    >>> growth = fitted("n", [0, 1, 2, 3], [5, 7, 9, 11], 1.0)
    >>> round(growth.total, 3), growth.is_leak
    (6.0, True)
    """
    slope = float(np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)[0])
    return Growth(name, float(np.mean(y)), slope * (x[-1] - x[0]), tolerance)


def growth(measured: tp.Sequence[Measurement], expected_programs: int) -> list[Growth]:
    """The growth of everything that was measured.

    Args:
        measured: after the warm-up.
        expected_programs: how many programs the events had to compile between the first and the last.
    """
    x = [m.step for m in measured]
    out = [fitted("memory, MiB", x, [m.memory / 2**20 for m in measured], MEMORY_TOLERANCE)]
    numbers = [m.numbers() for m in measured]
    for name in sorted({name for each in numbers for name in each}):
        y = [each.get(name, 0) for each in numbers]
        tolerance = TOLERANCES.get(name, ENTRIES_TOLERANCE)
        if name == "programs":
            tolerance += expected_programs
        elif name == "objects":
            saves = (x[-1] - x[0]) // EVENTS["checkpoint"].every
            tolerance += LEFT_BY_JAX * expected_programs + LEFT_BY_ORBAX * saves
        out.append(fitted(name, x, y, tolerance))
    return out


MEMORY_TOLERANCE = 16.0
ENTRIES_TOLERANCE = 4
LEFT_BY_JAX = 20
"""Objects for each program that JAX keeps in caches of 4,096 entries when the program is gone."""
LEFT_BY_ORBAX = 24
"""Lists that Orbax keeps of what it has measured in each save, also when it is used alone."""
TOLERANCES = {"objects": 500, "arrays": 4, "bytes of arrays": 4096, "threads": 2}
TOLERANCES |= {"programs": 0, "entries of tables": 16}
"""What may be gained in the second part of a run, whatever its length: noise, not growth."""


def programs_of_events(first: int, last: int, scale: float = 1.0) -> int:
    """How many programs the events between two steps have to compile."""
    number = 0
    for happening in EVENTS.values():
        every = max(1, round(happening.every * scale))
        number += happening.compiles * (last // every - first // every)
    return number


# One event by itself ------------------------------------------------------------------------


def leaves_behind(run: Run, name: str, times: int) -> dict[str, float]:
    """What one more occurrence of an event leaves behind, on the average; nothing for most numbers."""
    for _ in range(max(3, times // 2)):
        run.happen(name)
    run.manager.wait()
    measure()  # what the first one makes stays
    before = measure()
    for _ in range(times):
        run.happen(name)
    run.manager.wait()
    after = measure()
    then, now = before.numbers(), after.numbers()
    out = {key: (now[key] - then.get(key, 0)) / times for key in now}
    for kind, count in (after.by_type - before.by_type).most_common(5):
        out[f"objects of {kind}"] = count / times
    out["memory, KiB"] = (after.memory - before.memory) / 2**10 / times
    return {key: value for key, value in out.items() if value}


# Many structures ----------------------------------------------------------------------------


class Sized(nnx.Module):
    """A model of any size."""

    def __init__(self, size: int) -> None:
        self.weight = nnx.Param(np.zeros(size, np.float32))
        self.size = size
        self.plain = [nnx.Param(np.zeros(1, np.float32)), {f"key {size}": np.zeros(1, np.float32)}]
        setattr(self, f"name_{size}", nnx.Cache(np.zeros(1, np.float32)))

    def __call__(self) -> jax.Array:
        return self.weight.sum()


def of_one_class(number: int) -> nnx.Module:
    """A model of a class that all of them have, and of a structure of its own."""
    return Sized(number + 1)


def of_own_class(number: int) -> nnx.Module:
    """A model of a class of its own."""
    return type(f"Sized{number}", (Sized,), {})(number + 1)


def many_structures(make: tp.Callable[[int], nnx.Module], numbers: range) -> int:
    """Models that are split, merged, changed and dropped; how many of their GraphDefs are alive."""
    made = []
    for number in numbers:
        model = make(number)
        nnx.merge(*nnx.split(model))
        nnx.state(model, nnx.Param)
        nnx.update(nnx.clone(model), nnx.state(model))
        model.eval()
        made.append(weakref.ref(nnx.graphdef(model)))
    del model
    gc.collect()
    return sum(graphdef() is not None for graphdef in made)


def report_structures(count: int) -> None:
    """Print what many structures leave behind, for models of one class and of one class each."""
    for make in (of_one_class, of_own_class):
        warm = count // 5
        many_structures(make, range(warm))
        before = measure()
        start = time.process_time()
        alive = many_structures(make, range(warm, warm + count))
        seconds = time.process_time() - start
        after = measure()
        print(
            f"{count:,} structures {make.__name__}: {alive} GraphDefs alive, "
            f"{(after.objects - before.objects) / count:.2f} objects and "
            f"{(after.memory - before.memory) / count / 1024:.2f} KiB each, "
            f"{after.programs - before.programs} programs, {seconds:.1f} s"
        )
        for name, number in after.tables.items():
            if number > before.tables.get(name, 0) + ENTRIES_TOLERANCE:
                print(f"    {name}: {before.tables.get(name, 0):,} -> {number:,}")


# The command --------------------------------------------------------------------------------


def draw(measured: tp.Sequence[Measurement], path: Path) -> None:
    """A picture of what was measured."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    panels: dict[str, tp.Callable[[Measurement], float]] = {
        "resident memory, MiB": lambda m: m.memory / 2**20,
        "objects of Python": lambda m: m.objects,
        "live arrays": lambda m: m.arrays,
        "entries of the library's tables": lambda m: sum(m.tables.values()),
        "compiled programs": lambda m: m.programs,
        "CPU time of a step, us": lambda m: m.step_time * 1e6,
    }
    figure, axes = plt.subplots(2, 3, figsize=(10, 5), sharex=True)
    for axis, (title, number) in zip(axes.flat, panels.items()):
        y = [number(m) for m in measured]
        axis.plot([m.step / 1000 for m in measured], y, color="#4051b5", linewidth=1.5)
        axis.set_ylim(0, max(1, max(y)) * 1.15)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[1]:
        axis.set_xlabel("thousands of steps")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def report(run: Run, measured: tp.Sequence[Measurement], warm_up: float) -> int:
    """Print the growth of what was measured; the number of leaks."""
    fitted_part = [m for m in measured if m.step >= warm_up * measured[-1].step]
    first, last = fitted_part[0].step, fitted_part[-1].step
    numbers = growth(fitted_part, programs_of_events(first, last))
    main_ones = {"memory, MiB", *TOLERANCES}
    for number in numbers:
        if number.name in main_ones or number.is_leak:
            print(number)
    steps = [m.step_time * 1e6 for m in fitted_part]
    half = len(steps) // 2
    print(
        f"CPU time of a step: median {np.median(steps[:half]):.0f} us in the first half of the fitted "
        f"part, {np.median(steps[half:]):.0f} us in the second"
    )
    leaks = sum(number.is_leak for number in numbers)
    print(
        f"{run.count:,} steps, {sum(run.occurrences.values()):,} events of {len(EVENTS)} kinds, "
        f"{len(numbers)} counts fitted from step {first:,} on, {leaks} that grow"
    )
    return leaks


def main(arguments: tp.Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the number of defects."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--measurements", type=int, default=100)
    parser.add_argument("--warm-up", type=float, default=0.25, help="part of the steps not fitted")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--each", type=int, help="how many times to repeat each event by itself")
    parser.add_argument("--only", action="append", help="with --each: these events")
    parser.add_argument("--structures", type=int, help="how many structures to make and drop")
    options = parser.parse_args(arguments)
    Programs.listen()
    if options.structures:
        report_structures(options.structures)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        if options.each:
            for name in options.only or EVENTS:
                left = leaves_behind(run, name, options.each)
                print(name, {key: round(value, 2) for key, value in left.items()}, flush=True)
            return 0
        measured = train(
            run,
            options.steps,
            measurements=options.measurements,
            clear_at=round(options.steps * options.warm_up / 2),
            show=lambda text: print(text, flush=True),
        )
    if options.plot:
        draw(measured, options.plot)
    return report(run, measured, options.warm_up)


if __name__ == "__main__":
    sys.exit(main())
