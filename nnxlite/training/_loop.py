"""`loop`: the steps of a training run, with what surrounds each of them.

A step is what the caller writes in the body of a `for` loop; the loop counts, shows progress, collects
losses, evaluates, saves and stops. It knows nothing of models and optimizers, and each part can be left
out or used alone: `interruptible` is the part that answers Ctrl-C and SIGTERM, `resume` the one that
restores.

Of several processes, one that stops by itself would leave the others waiting for ever in their next
collective operation. JAX's service for preemption has them agree: a process that gets SIGTERM announces
it, and all stop when one step more is done than in any of them.

Logging does not wait for the device: what is logged stays an array until `LAG` further steps are
enqueued. Only then does the loop wait for it, so that no more steps than these are ever under way. A
save waits for the device in any case; everything is logged before it, so that a run that is killed has
logged all steps that it does not repeat. `CSV`, `TensorBoard` and `WandB` are functions of that kind.

A checkpoint with number n was saved when n steps were done, so that a run resumes with step n.  That
number is the position in the data, if batch n belongs to step n; else `data` has one.  An iterator says
where it is as bytes or as plain data, of a length that changes; a checkpoint restores arrays of known
shapes, so that it gets text. Each process may be at another place in its data: all get all places.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import dataclasses
import functools
import inspect
import operator
import os
import pathlib
import signal
import sys
import threading
import time
import typing as tp
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import short_type
from nnxlite._base.jax import Tracer, coordination
from nnxlite._state._flat import content
from nnxlite.objects._containers import Dict
from nnxlite.variables._variable import Variable

__all__ = ["CSV", "Checkpoints", "Log", "Loop", "Resumable", "Step", "Stop", "TensorBoard", "WandB"]
__all__ += ["interruptible", "loop", "resume"]

LAG = 2
"""Steps that may be under way before their losses are read."""

HISTORY = 10_000
"""Steps whose losses `Loop.history` has."""


class Log(tp.Protocol):
    """A receiver of losses and evaluations: a function, `nnx.training.CSV`, `TensorBoard` or `WandB`.

    If there is a method `flush`, it is called at the end of the run.
    """

    def __call__(self, step: int, values: dict[str, float], /) -> None:
        """Record the numbers of a step, by name."""


class Checkpoints(tp.Protocol):
    """An object that saves and restores: `nnx.checkpoint.Manager`, or one like it.

    If there is a method `wait`, it is called at the end.
    """

    @property
    def latest(self) -> int | None:
        """The number of the newest checkpoint; None without any."""

    def save(self, step: int, /, *, metrics: tp.Any, force: bool, **items: tp.Any) -> tp.Any:
        """Save objects under a number.

        Args:
            step: the number of steps done.
            metrics: the last evaluation, or None.
            force: whether this is the last save.
            items: the objects by name.

        Returns False if it did not save.
        """

    def restore(self, step: int | None = None, /, **items: tp.Any) -> tp.Any:
        """Restore into objects, from the newest checkpoint without a number."""


@tp.runtime_checkable
class Resumable(tp.Protocol):
    """An iterator over data that can say where it is, and go there: one of Grain, for example."""

    def get_state(self) -> tp.Any:
        """Where it is: bytes, numbers, text, None, and lists, tuples and dicts of such."""

    def set_state(self, state: tp.Any, /) -> None:
        """Go where it was when `get_state` returned this."""


@dataclasses.dataclass
class Stop:
    """Whether a stop was requested; true or false.

    Args:
        requested: the initial value.
    """

    requested: bool = False

    def __bool__(self) -> bool:
        return self.requested


@contextlib.contextmanager
def interruptible() -> Iterator[Stop]:
    """A context in which Ctrl-C and SIGTERM only ask to stop; a second Ctrl-C interrupts at once.

    The handlers from before are back afterwards. Outside of the main thread it does nothing. Of several
    processes, JAX handles SIGTERM (`jax.experimental.multihost_utils.reached_preemption_sync_point`),
    and Ctrl-C is passed on to it, so that a loop stops in all of them.

    Yields:
        A `Stop`, which becomes true.

    >>> import nnxlite as nnx
    >>> with nnx.training.interruptible() as stop:
    ...     for number in range(3):
    ...         if stop:
    ...             break
    >>> bool(stop)
    False
    """
    stop, pressed = Stop(), False

    def handle(number: int, frame: tp.Any) -> None:
        nonlocal pressed
        if number == signal.SIGINT and pressed:
            raise KeyboardInterrupt
        pressed = pressed or number == signal.SIGINT
        if several and not stop:
            signal.raise_signal(signal.SIGTERM)
        if not stop:
            stop.requested = True
            again = "; Ctrl-C again stops at once" if pressed else ", because of SIGTERM"
            print(f"\nStopping after this step{again}.", file=sys.stderr)

    several = coordination()[0] is not None
    numbers = [signal.SIGINT] if several else [signal.SIGINT, signal.SIGTERM]
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers if main}
    try:
        for number in before:
            signal.signal(number, handle)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def stops(done: int, interrupt: Stop) -> bool:
    """Whether a loop stops after a number of steps, in this process and so in all."""
    if coordination()[0] is None:
        return bool(interrupt)
    from jax.experimental import multihost_utils  # only where there are several processes

    reached = multihost_utils.reached_preemption_sync_point(done)
    interrupt.requested |= reached  # in another process
    return reached


def resume(checkpoints: Checkpoints, **items: tp.Any) -> int:
    """Restore objects from the newest checkpoint, if there is one.

    Args:
        checkpoints: what saved it.
        **items: the objects, as they were saved.

    Returns:
        How many steps were done then; 0 without a checkpoint.

    >>> import nnxlite as nnx, tempfile
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.training.resume(nnx.checkpoint.Manager(tempfile.mkdtemp()), model=model)
    0
    """
    if (latest := checkpoints.latest) is None:
        return 0
    step = getattr(checkpoints.restore(**items), "step", None)  # the newest may be damaged
    return latest if step is None else step


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a run.

    Args:
        number: which one; the first is 0.
        run: the loop it belongs to.
    """

    number: int
    run: Loop = dataclasses.field(repr=False)

    def log(self, /, **values: tp.Any) -> None:
        """Record scalars of this step, arrays too, without waiting for them.

        Args:
            **values: numbers, and arrays and Variables of one number: as they are now.

        Raises ValueError for anything else, and for a name that this step has logged already.
        """
        where = f"Step {self.number} logs"
        numbers = {name: _number(f"{where} {name}", value) for name, value in values.items()}
        logged = self.run._pending.get(self.number, {})
        for name in numbers.keys() & {"step", *logged}:
            raise ValueError(f"{where} {name} twice; the second one needs a name of its own.")
        self.run._pending[self.number] = {**logged, **numbers}
        self.run._names |= numbers.keys()
        if self.run._ended:
            self.run._read()

    def every(self, count: int) -> bool:
        """Whether the number of steps done, this one included, is a multiple of `count`."""
        return (self.number + 1) % count == 0

    def stop(self) -> None:
        """Let this step be the last one."""
        self.run.stop.requested = True


@dataclasses.dataclass(eq=False, repr=False)
class Loop:
    """The steps of a training run, to be iterated over once; the body of the loop does the training.

    It is an iterable of `Step`s: `step.number` is the position in the data, `step.log` records losses
    without waiting for them.

    With `checkpoints`, the run resumes from the newest one, saves, and ends with a save. Ctrl-C and
    SIGTERM let the present step finish, evaluate and save, and end the iteration; a second Ctrl-C
    interrupts at once. Several processes, if one of them gets the signal, all end after the same step.
    What ends the iteration otherwise, an exception or `break`, does not save: the step may be half done.
    `step.stop()` ends it after the step.

    Args:
        steps: how many steps there are in all, those before a resume included.
        start: the number of the first step; by default that after the newest checkpoint, or 0.
        checkpoints: where to save, such as a `nnx.checkpoint.Manager`.
        items: what to save, by name: model, optimizer, metrics (under another name than "metrics",
            which are the numbers of `evaluate`), random streams.
        save_every: save when the number of done steps is a multiple of this, and at the end.
        evaluate: measures, and returns numbers by name; they are logged, and passed to `save`. The
            number of a name that steps log as well, "loss" for example, is logged as "evaluate/loss".
        evaluate_every: evaluate when the number of done steps is a multiple of this. The
            evaluations before each save and at the end do not depend on it.
        log: a function of the number of a step and a dict of numbers, or several: they get what
            `step.log` and `evaluate` gave for the step, once it was read from the device. `nnx.training`
            has `CSV`, `TensorBoard` and `WandB`. Of several processes only the first one calls them.
        data: an iterator with `get_state` and `set_state`, such as one of Grain, that the body of the
            loop takes its batches of. Its position is saved as the item "data", and restored.
        progress: whether to show a progress bar, on standard error.

    Attributes:
        start: the number of the first step, from the beginning of the iteration on.
        history: what was logged, in order: a dict for each step, with its number as "step". Of a long
            run it has the last 10,000; `log` gets all.
        interrupted: whether Ctrl-C or SIGTERM ended the iteration, in this process or another.
        steps_per_second: as measured without the first step, which compiles; 0 before.

    Raises:
        ValueError: for a number below its limit, `items` without `checkpoints` or the reverse, or an
            item with the name of a parameter of `checkpoints.save` or `checkpoints.restore`.
        TypeError: if `evaluate` needs arguments, or returns something else than numbers by name; if
            `data` has no `get_state` and `set_state`, or its state is neither bytes nor plain data.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> run = nnx.training.loop(3, progress=False)
    >>> for step in run:
    ...     step.log(loss=1 / jnp.array(step.number + 1.0))
    >>> [(entry["step"], round(entry["loss"], 2)) for entry in run.history]
    [(0, 1.0), (1, 0.5), (2, 0.33)]
    """

    steps: int
    _: dataclasses.KW_ONLY
    start: int | None = None
    checkpoints: Checkpoints | None = None
    items: Mapping[str, tp.Any] | None = None
    save_every: int | None = None
    evaluate: tp.Callable[[], Mapping[str, tp.Any]] | None = None
    evaluate_every: int | None = None
    log: Log | Sequence[Log] = ()
    data: Resumable | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        _check(self)
        self.history: list[dict[str, tp.Any]] = []
        self.stop = Stop()
        self.interrupted = self._ended = False
        self.steps_per_second = 0.0
        self._logs = (self.log,) if callable(self.log) else tuple(self.log)
        self._pending: dict[int, dict[str, tp.Any]] = {}  # logged by steps, and not read yet
        self._latest: dict[str, tp.Any] = {}  # of each name
        self._names = {"step"}  # that steps have logged
        self._evaluation: dict[str, float] | None = None
        self._evaluated = self._saved = 0  # the number of steps done then

    def __iter__(self) -> Iterator[Step]:
        if self.checkpoints is not None and self.start is None:
            items = self._items()
            self.start = self._saved = resume(self.checkpoints, **items)
            if self.data is not None and self.start:
                go_to(self.data, items["data"])
        self.start = done = self.start or 0
        seconds = 0.0
        with self._bar() as show, interruptible() as interrupt:
            try:
                while done < self.steps and not self.stop and not stops(done, interrupt):
                    began = time.perf_counter()
                    yield Step(done, self)
                    done += 1
                    self._read(before=done - LAG)
                    if done > self.start + 1:
                        seconds += time.perf_counter() - began
                        self.steps_per_second = (done - self.start - 1) / seconds
                    self._evaluate_and_save(done)
                    show(done)
                if done > self.start:
                    self._evaluate_and_save(done, last=True)
            finally:
                self.interrupted, self._ended = bool(interrupt), True
                self._read()
                show(done)
        getattr(self.checkpoints, "wait", lambda: None)()

    def _items(self) -> dict[str, tp.Any]:
        """What is saved now, the position in the data included."""
        return {**(self.items or {})} | ({} if self.data is None else {"data": position(self.data)})

    def _evaluate_and_save(self, done: int, last: bool = False) -> None:
        """Evaluate and save where that is due; every checkpoint is evaluated."""
        due = lambda every: last or (every is not None and done % every == 0)
        saves = self.checkpoints is not None and due(self.save_every) and self._saved != done
        if self.evaluate is not None and self._evaluated != done:
            if saves or due(self.evaluate_every):
                self._evaluation, self._evaluated = _numbers(self.evaluate()), done
                row, evaluation = self._pending.setdefault(done - 1, {}), self._evaluation.items()
                row |= {f"evaluate/{k}" if k in self._names else k: x for k, x in evaluation}
        if saves and self.checkpoints is not None:
            self._read(before=done)
            more = {"metrics": self._evaluation or None, "force": last}
            if self.checkpoints.save(done, **more, **self._items()) is not False:
                self._saved = done

    def _read(self, before: int | None = None) -> None:
        """Fetch what was logged, by the steps before one or all; this is where the loop waits."""
        for number in [n for n in self._pending if before is None or n < before]:
            logged = self._pending.pop(number)
            values = zip(logged, jax.device_get(list(logged.values())), strict=True)
            row = {name: np.asarray(x).item() for name, x in values}
            self._latest |= row
            self.history.append({"step": number, **row})
            del self.history[:-HISTORY]
            for log in self._logs if jax.process_index() == 0 else ():
                log(number, dict(row))
        for log in self._logs if before is None else ():
            getattr(log, "flush", lambda: None)()

    @contextlib.contextmanager
    def _bar(self) -> Iterator[tp.Callable[[int], None]]:
        if not self.progress:
            yield lambda done: None
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=self.steps, completed=self.start or 0)

            def show(done: int) -> None:
                texts = [f"{name} {x:.4g}" for name, x in self._latest.items()]
                texts = [f"{done}/{self.steps}", f"{self.steps_per_second:.3g} steps/s", *texts]
                bar.update(task, completed=done, description="  ".join(texts))

            yield show


loop = Loop
"""The steps of a training run: a `Loop`, to be iterated over."""


def _check(run: Loop) -> None:
    """Raise for arguments that cannot be."""
    items, checkpoints, data = run.items or {}, run.checkpoints, run.data
    for name, least in {"steps": 0, "start": 0, "save_every": 1, "evaluate_every": 1}.items():
        number = getattr(run, name)
        if number is not None and operator.index(number) < least:
            raise ValueError(f"loop: {name} must be at least {least}, not {number}.")
    if bool(items) != (checkpoints is not None):
        given = "items without checkpoints" if checkpoints is None else "checkpoints without items"
        raise ValueError(f"loop got {given}: pass both, what saves and what is to be saved.")
    if checkpoints is None and run.save_every is not None:
        raise ValueError(f"loop: save_every={run.save_every} needs checkpoints and items.")
    if run.evaluate is None and run.evaluate_every is not None:
        raise ValueError(f"loop: evaluate_every={run.evaluate_every} needs evaluate, a function.")
    if run.evaluate is not None:
        try:
            with contextlib.suppress(ValueError):  # a builtin without a signature
                inspect.signature(run.evaluate).bind()
        except TypeError as error:
            raise TypeError(f"loop: evaluate is called without arguments: {error}.") from None
    if data is not None and (checkpoints is None or "data" in items):
        raise ValueError("loop: data needs checkpoints, and is saved as the item 'data' there.")
    if data is not None and not isinstance(data, Resumable):
        raise TypeError(
            f"loop: data has to have get_state and set_state, and {short_type(data)} does not. "
            "Pass the iterator, data=iter(dataset)."
        )
    for method in ("save", "restore") if checkpoints is not None else ():
        taken = inspect.signature(getattr(checkpoints, method)).parameters.values()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        for name in items.keys() & {p.name for p in taken if p.kind in named}:
            raise ValueError(
                f"loop: the item {name!r} has the name of a parameter of "
                f"{type(checkpoints).__name__}.{method}; give it another name, such as "
                f"items={{'train_{name}': ...}}."
            )


def _number(what: str, value: tp.Any) -> tp.Any:
    """A number as it is now, in an array; ValueError, with `what` it is, for anything else."""
    # An array of JAX does not change, and may not be there yet.
    number = value if isinstance(value := content(value), jax.Array) else np.array(value)
    numeric = number.dtype == bool or jnp.issubdtype(number.dtype, jnp.number)
    if isinstance(number, Tracer) or number.size != 1 or not numeric:
        raise ValueError(f"{what} {short_type(value)}; it takes single numbers, outside of jit.")
    return number


def _numbers(evaluation: tp.Any) -> dict[str, float]:
    try:
        return {k: float(_number(k, x).item()) for k, x in dict(evaluation).items()}
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"loop: evaluate returns {short_type(evaluation)}, and has to return numbers by name, as in "
            "return {'loss': 0.5} or return metrics.compute()."
        ) from error


def position(data: Resumable) -> Dict:
    """What to save of an iterator, or to restore into: where it is in each process, as text."""
    state = data.get_state()
    text, same = ascii(state), False
    with contextlib.suppress(ValueError, SyntaxError):
        same = ast.literal_eval(text) == state
    if not same:
        raise TypeError(
            f"loop: get_state of {type(data).__name__} returns {short_type(state)}; it has to "
            "return bytes, text, numbers, None, or lists, tuples and dicts of these."
        )
    # Only where there is a position.
    from jax.experimental.multihost_utils import process_allgather as gather

    longest = int(gather(np.array(len(text))).max())
    own = np.frombuffer(text.ljust(longest).encode(), np.uint8)  # it may end in spaces
    return Dict({str(n): Variable(bytes(row).decode()) for n, row in enumerate(gather(own))})


def go_to(data: Resumable, saved: Dict) -> None:
    """Set an iterator to a position that was restored."""
    data.set_state(ast.literal_eval(saved[str(jax.process_index())].get_raw_value()))


class CSV:
    """A file with a line `step,name,value` for each number.

    An existing file is continued, as by a run that resumes.

    Args:
        path: of the file.

    >>> import nnxlite as nnx, tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp(), "run.csv")
    >>> for step in nnx.training.loop(2, log=nnx.training.CSV(file), progress=False):
    ...     step.log(loss=1.0 - step.number)
    >>> file.read_text().split()
    ['step,name,value', '0,loss,1.0', '1,loss,0.0']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)

    def __call__(self, step: int, values: dict[str, float], /) -> None:
        """Append the numbers of a step.

        Args:
            step: its number.
            values: the numbers by name.
        """
        with self.path.open("a", newline="") as file:
            rows = [(step, name, value) for name, value in values.items()]
            header = [] if file.tell() else [("step", "name", "value")]
            csv.writer(file, lineterminator="\n").writerows(header + rows)


class TensorBoard:
    """Scalars in a folder that TensorBoard shows; each run writes a file there.

    Args:
        folder: of the run.
        **options: further arguments of `tensorboardX.SummaryWriter`.

    Attributes:
        writer: the `SummaryWriter` while there is something to write, for pictures and histograms; else
            None.

    Raises ImportError without tensorboardX (`pip install nnxlite[logging]`).
    """

    def __init__(self, folder: str | os.PathLike[str], **options: tp.Any) -> None:
        from tensorboardX import SummaryWriter

        self._make = functools.partial(SummaryWriter, str(folder), **options)
        self.writer: tp.Any = None

    def __call__(self, step: int, values: dict[str, float], /) -> None:
        """Write the numbers of a step.

        Args:
            step: its number.
            values: the numbers by name.
        """
        if self.writer is None:  # files of one second would have the same name
            self.writer = self._make(filename_suffix=f".{time.time_ns()}")
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Have everything in the file, and close it."""
        if self.writer is not None:
            self.writer.close()  # its `flush` does not wait for the thread that writes
            self.writer = None


class WandB:
    """A run of Weights & Biases.

    Args:
        **options: arguments of `wandb.init`: `project`, `name`, `config`, `mode`, and `id` with
            `resume="allow"` for a run that goes on.

    Attributes:
        run: what `wandb.init` returns; `run.finish()` ends it.

    Raises ImportError without wandb (`pip install nnxlite[logging]`).
    """

    def __init__(self, **options: tp.Any) -> None:
        import wandb

        self.run: tp.Any = wandb.init(**options)

    def __call__(self, step: int, values: dict[str, float], /) -> None:
        """Log the numbers of a step.

        Args:
            step: its number.
            values: the numbers by name.
        """
        self.run.log(values, step=step, commit=True)
