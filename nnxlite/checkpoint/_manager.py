"""`Manager`: the checkpoints of one training run, a folder for each step.

The largest step is the newest.  A run that goes back to an earlier step, and saves from there, replaces
those that came after it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import math
import os
import threading
import types
import typing as tp
import weakref

import jax

from nnxlite._base.errors import warn_user
from nnxlite._base.jax import as_integer
from nnxlite.checkpoint import _orbax
from nnxlite.checkpoint._checkpoint import check_options, restore
from nnxlite.checkpoint._contents import Contents
from nnxlite.checkpoint._loading import Renaming
from nnxlite.checkpoint._report import DamagedError, NotFoundError, Report, together
from nnxlite.filters import Filter

_opened: weakref.WeakSet[tp.Any] = weakref.WeakSet()
"""Orbax's managers that are there, or whose threads still write."""


def _finish(process: int) -> None:
    """Complete what is being written when the program ends; raises what could not be written."""
    errors: list[Exception] = []
    for manager in tuple(_opened) if os.getpid() == process else ():  # a fork has no threads
        try:
            manager.wait_until_finished()
        except Exception as error:
            errors.append(_orbax.not_written(manager.directory, error))
    for error in errors:
        raise error


@functools.cache
def _finish_at_exit(process: int) -> None:
    """Have `_finish` called at the end of this process, once.

    `atexit` would be too late: before it, Python ends the executors that the threads of Orbax need.
    """
    at_exit = getattr(threading, "_register_atexit", atexit.register)
    at_exit(functools.partial(_finish, process))


class Manager:
    """The checkpoints of a training run: saves them, deletes old ones, and restores one.

    A checkpoint is written in the background while training continues, and appears when it is complete;
    only then is an older one deleted. Use the manager as a context, or call `close`, so that errors in
    the background are raised; a program that ends without it completes the last checkpoint first. In the
    next run of the program the manager finds what is in its folder.

    A run may go back, to the best checkpoint for example, and train on from there: the first one that is
    saved then replaces all checkpoints of its step and later ones.

    Args:
        directory: the folder of the run, which is made by the first `save`.
        keep: how many of the newest checkpoints are kept; None for all.
        best: the name of the metric by which checkpoints are compared, if any; the best one is kept.
        mode: "min" where smaller is better, "max" where larger is.
        keep_every: checkpoints whose step is a multiple of this are never deleted.
        every: `save` ignores steps that are not multiples of this.

    Raises:
        ValueError: for a number below one, or another mode.

    >>> import nnxlite as nnx, tempfile
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> folder = tempfile.mkdtemp()
    >>> with nnx.checkpoint.Manager(folder, keep=1, best="loss") as manager:
    ...     for step, loss in [(1, 0.9), (2, 0.1), (3, 0.2)]:
    ...         saved = manager.save(step, model=model, metrics={"loss": loss})
    >>> manager = nnx.checkpoint.Manager(folder, best="loss")
    >>> manager.steps, manager.latest, manager.best
    ([2, 3], 3, 2)
    >>> manager.restore(model=model).restored
    ('model.bias', 'model.kernel')
    """

    def __init__(
        self,
        directory: tp.Any,
        *,
        keep: int | None = 3,
        best: str | None = None,
        mode: tp.Literal["min", "max"] = "min",
        keep_every: int | None = None,
        every: int = 1,
    ) -> None:
        for name, number in {"keep": keep, "keep_every": keep_every, "every": every}.items():
            if number is not None and number < 1:
                raise ValueError(f"Manager: {name} has to be at least 1, got {number}.")
        if mode not in ("min", "max"):
            raise ValueError(f"Manager: mode is 'min' or 'max', got {mode!r}.")
        self.directory = _orbax.folder(directory)
        self.best_metric = best
        self.mode = mode
        self._keep = keep
        self._keep_every = keep_every
        self._every = every
        self._orbax: tp.Any = None
        self._unfinished: dict[int, dict[str, float]] = {}  # metrics of a step, until `wait`
        self._at: int | None = None  # the step that was saved completely, or restored, last

    def _open(self) -> tp.Any:
        """Orbax's manager, for saving; it removes what a process that was ended has left."""
        if self._orbax is None:
            ocp = _orbax.orbax()
            _finish_at_exit(os.getpid())
            for other in tuple(_opened):  # another one of this process may still write
                if other.directory == self.directory:
                    with contextlib.suppress(Exception):  # for those who use that one
                        other.wait_until_finished()
            options = ocp.CheckpointManagerOptions(
                save_interval_steps=self._every,
                preservation_policy=types.SimpleNamespace(should_preserve=self._kept),
                cleanup_tmp_directories=True,
                best_fn=self._rank,  # without one Orbax keeps no metrics
            )
            handlers = _orbax.registry() if jax.process_count() > 1 else None
            self._orbax = ocp.CheckpointManager(
                self.directory, options=options, handler_registry=handlers
            )
            _opened.add(self._orbax)
        return self._orbax

    def _kept(self, checkpoints: tp.Sequence[tp.Any], *, context: tp.Any) -> list[bool]:
        """Which checkpoints are kept once the last of them is complete: none of later steps.

        Of equally good ones that is the first, from which `should_stop` counts. Orbax's own policy
        keeps the last.
        """
        metrics = {c.step: c.metrics for c in checkpoints if c.step <= checkpoints[-1].step}
        kept = {step for step in metrics if self._keep_every and step % self._keep_every == 0}
        kept |= set(metrics if self._keep is None else [*metrics][-self._keep :])
        if self.best_metric is not None:
            kept.add(self._best_of(metrics))
        return [checkpoint.step in kept for checkpoint in checkpoints]

    def _best_of(self, metrics: tp.Mapping[int, tp.Any]) -> int | None:
        """The step with the best of some metrics, the first of equally good ones."""
        return max(metrics, key=lambda step: (self._rank(metrics[step]), -step), default=None)

    def _rank(self, metrics: tp.Any) -> float:
        """A number that is larger for a better checkpoint; the lowest for one that has none."""
        value = (metrics or {}).get(self.best_metric)
        if value is None or math.isnan(value):
            return -math.inf
        return value if self.mode == "max" else -value

    def save(
        self,
        step: int,
        /,
        *,
        metrics: tp.Mapping[str, tp.Any] | None = None,
        only: Filter = ...,
        force: bool = False,
        **items: tp.Any,
    ) -> bool:
        """Save a checkpoint, and delete those that it need not keep any more.

        What has been passed may be changed, and its arrays donated, as soon as this returns.

        Args:
            step: its number, from 0 on. After an earlier checkpoint was restored, the run has gone back:
                the new checkpoint replaces those of this step and later ones, with a warning.
            metrics: numbers to be stored with it; the one named `best` is compared.
            only: as in `nnx.checkpoint.save`.
            force: save also where the step is not a multiple of `every`.
            items: as in `nnx.checkpoint.save`. An item cannot be called `metrics`, `only` or `force`.

        Returns:
            Whether it was saved.

        Raises:
            ValueError: if `metrics` lacks the one named `best`, the step is not an integer from 0 on,
                or there is a checkpoint of this step or a later one, and none before it was restored.
            nnxlite.checkpoint.CheckpointError: for a leaf that cannot be saved.
                Also if this one, or the one before it in the background, could not be written, as on a
                full disk; those before are as they were.
        """
        check_options("Manager.save", only=only, force=force, metrics=metrics)
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        if self.best_metric is not None and self.best_metric not in numbers:
            raise ValueError(
                f"Manager.save: checkpoints are compared by {self.best_metric!r}, and the metrics are "
                f"{sorted(numbers)}. Pass metrics={{{self.best_metric!r}: ...}}."
            )
        step = as_integer(step)
        if type(step) is not int or step < 0:
            raise ValueError(f"Manager.save: a step is an integer from 0 on, got {step!r}.")
        manager = self._open()
        there = manager.all_steps()
        due = step % self._every == 0 or not there or manager.reached_preemption(step)
        if not force and not due:
            return False
        self.wait()  # a save that failed may be the reason to try its step again
        later = [other for other in there if other >= step]
        if later and (self._at is None or self._at >= step):
            raise ValueError(
                f"Manager.save: step {step} is not after those in {self.directory}, which are up to "
                f"{max(later)}. Each save needs a later step. To go back, restore the checkpoint to go "
                "on from first (Manager.restore, nnx.training.resume); or save into another folder."
            )
        with together(f"nnx.checkpoint.Manager.save: step {step}"):
            contents = Contents(items, only)
        args = _orbax.content_of(contents)
        if later:
            warn_user(
                f"Manager.save: the run went back to step {self._at}, so step {step} replaces the later "
                f"checkpoints {sorted(later)}. To keep both, save into another folder."
            )

        def write() -> None:
            # Orbax does not overwrite a step. Later ones stay until this one is complete.
            if step in later:
                manager.delete(step)
            manager.save(step, args=args, metrics=numbers, force=True)

        self._unless_failed(write)
        self._unfinished[step] = numbers
        return True

    def restore(
        self,
        step: int | None = None,
        /,
        *,
        only: Filter = ...,
        rename: Renaming | None = None,
        strict: bool = True,
        cast: bool | None = False,
        **items: tp.Any,
    ) -> Report:
        """Restore a checkpoint in place; without a step, the newest one that is not damaged.

        Args:
            step: which one; `manager.best` for the best.
            only, rename, strict, cast, items: as in `nnx.checkpoint.restore`.

        Returns:
            A `Report`, with the step.

        Raises:
            nnxlite.checkpoint.NotFoundError: if the folder does not have that checkpoint.
            nnxlite.checkpoint.CheckpointError: as `nnx.checkpoint.restore`.

        Warns:
            UserWarning: if a damaged checkpoint is passed over for the one before it.
        """
        self.wait()
        steps = self.steps
        if not steps or (step is not None and step not in steps):
            there = f"steps {', '.join(map(str, steps))}" if steps else "no checkpoint"
            what = "Nothing to restore" if step is None else f"No step {step}"
            raise NotFoundError(f"{what} in {self.directory}: there is {there}.")
        for number in reversed(steps) if step is None else [steps[steps.index(step)]]:
            path = self.directory / str(number)
            try:
                report = restore(path, only=only, rename=rename, strict=strict, cast=cast, **items)
                self._at = number
                return dataclasses.replace(report, step=number)
            except (DamagedError, NotFoundError) as error:
                if step is not None or number == steps[0]:
                    raise
                warn_user(f"Step {number} is passed over for the one before it. {error}")
        raise AssertionError  # the last step returns or raises

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, in ascending order, also of one that this manager still writes.

        `latest`, `best`, `metrics` and `should_stop` count it as well. If it cannot be written, the call
        that raises the error removes it. Other managers list it when it is complete.
        """
        names = _orbax.orbax().path.step.standard_name_format()
        there = names.find_all(self.directory) if self.directory.exists() else ()
        new = min(self._unfinished, default=math.inf)  # which replaces those of later steps
        return sorted({*(x.step for x in there if x.step <= new), *self._unfinished})

    @property
    def latest(self) -> int | None:
        """The largest step; None without any."""
        return max(self.steps, default=None)

    @property
    def best(self) -> int | None:
        """The step of the best checkpoint, the first of equally good ones; None without any.

        Raises ValueError for a manager without a metric.
        """
        if self.best_metric is None:
            raise ValueError("Manager.best: name the metric first, Manager(..., best='loss').")
        return self._best_of({step: self.metrics(step) for step in self.steps})

    def metrics(self, step: int, /) -> dict[str, float]:
        """The numbers that were saved with a step; empty if there were none.

        Args:
            step: its number.
        """
        file = self.directory / str(step) / "metrics" / "metrics"  # as Orbax writes them
        stored = json.loads(file.read_text()) if file.exists() else {}
        return self._unfinished.get(step) or stored

    def should_stop(self, patience: int) -> bool:
        """Whether training has gone on for too long since the best checkpoint.

        Args:
            patience: for how many steps it may.
        """
        best = self.best
        return best is not None and max(self.steps) - best >= patience

    def wait(self) -> None:
        """Wait until what is being written is complete; CheckpointError if it cannot be written."""
        if self._orbax is not None:
            self._unless_failed(self._orbax.wait_until_finished)
        self._at = max(self._unfinished, default=self._at)
        self._unfinished.clear()

    def _unless_failed(self, call: tp.Callable[[], tp.Any]) -> None:
        """Call Orbax; after an error its list of steps is wrong, and is read from the folder again."""
        try:
            call()
        except Exception as error:
            with contextlib.suppress(Exception):  # its threads may still write
                self._orbax.close()
            self._orbax = None
            self._unfinished.clear()
            raise _orbax.not_written(self.directory, error) from error

    def close(self) -> None:
        """Wait, and end the threads that write; CheckpointError if a checkpoint cannot be written."""
        self.wait()
        if self._orbax is not None:
            self._orbax.close()
            self._orbax = None

    def __enter__(self) -> tp.Self:
        return self

    def __exit__(self, *exception: tp.Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Manager({str(self.directory)!r}, steps={self.steps})"
