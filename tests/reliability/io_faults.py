"""Exceptions at lines of the library while it saves, restores, or runs a training loop.

    python -m tests.reliability.io_faults --count 40

An interrupt, an error or a full memory is raised at one line.  After it

* what is on the disk is all of the step before, or all of the new one,
* an object that was being restored has all old values, or all new ones,
* a training loop has whole steps behind it, and a new run goes on from its last checkpoint,
* the next save or restore works, and no temporary file is left after it.

The last line that is printed counts faults and defects.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import signal
import tempfile
import typing as tp
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

import nnxlite as nnx
from nnxlite._config import context_key
from nnxlite._jax import EAGER, trace_state
from tests.reliability.faults import KINDS, Lines, _is_ours, in_library, raising
from tests.reliability.hostile_kills import FORMATS, SIZES, found, print_and_exit, values

STEPS = 4
Check = Callable[[bool], None]
"""Looks at what is left; it is told whether the caller saw an exception."""


def save_managed(folder: Path, step: int) -> None:
    with nnx.checkpoint.Manager(folder, keep=1) as manager:
        manager.save(step, model=values(step))


def load_managed(folder: Path, model: nnx.Dict) -> None:
    nnx.checkpoint.Manager(folder).restore(model=model)


ALL_FORMATS = FORMATS | {"manager": (save_managed, load_managed)}


@contextlib.contextmanager
def saving(name: str, folder: Path) -> Iterator[tuple[Callable[[], tp.Any], Check]]:
    """Step 1 is saved over step 0."""
    save, load = ALL_FORMATS[name]
    save(folder, 0)

    def check(raised: bool) -> None:
        assert found(load, folder) in ((0, 1) if raised else (1,))
        save(folder, 2)
        assert found(load, folder) == 2
        hidden = [x.name for x in folder.rglob("*") if "tmp" in x.name or x.name.startswith(".")]
        assert not hidden, f"left behind: {hidden}"

    yield lambda: save(folder, 1), check


@contextlib.contextmanager
def loading(name: str, folder: Path) -> Iterator[tuple[Callable[[], tp.Any], Check]]:
    """Step 0 is loaded into a model with other values."""
    save, load = ALL_FORMATS[name]
    save(folder, 0)
    model = values(-1)

    def check(raised: bool) -> None:
        steps = {float(x) for size in SIZES for x in np.asarray(model[f"w{size}"].get_value())}
        assert steps in (({-1}, {0}) if raised else ({0},)), f"values of several steps: {steps}"
        load(folder, model)
        assert found(load, folder) == 0

    yield lambda: load(folder, model), check


@nnx.jit
def train_step(model: nnx.Dict, x: jax.Array) -> jax.Array:
    model.w[...] += x
    model.count[...] += 1
    return model.w.sum()


@contextlib.contextmanager
def looping(folder: Path) -> Iterator[tuple[Callable[[], tp.Any], Check]]:
    """A run of a few steps, which is saved after every second one."""

    def made() -> nnx.Dict:
        return nnx.Dict(w=nnx.Param(np.zeros(3, "f4")), count=nnx.Variable(np.array(0)))

    def run(model: nnx.Dict) -> tp.Any:
        with nnx.checkpoint.Manager(folder) as manager:
            steps = nnx.training.loop(
                STEPS, checkpoints=manager, items={"model": model}, save_every=2, progress=False
            )
            for step in steps:
                step.log(loss=train_step(model, np.full(3, step.number, "f4")))
        return steps

    model, handler = made(), signal.getsignal(signal.SIGINT)

    def check(raised: bool) -> None:
        done = int(model.count.get_value())
        assert raised or done == STEPS
        assert np.all(model.w.get_value() == sum(range(done))), "a step is half done"
        assert signal.getsignal(signal.SIGINT) is handler, "the handler of Ctrl-C is another one"
        again = made()
        steps = run(again)
        assert int(again.count.get_value()) == STEPS
        assert np.all(again.w.get_value() == sum(range(STEPS)))
        assert [entry["step"] for entry in steps.history] == [*range(steps.start, STEPS)]

    yield lambda: run(model), check


CASES = {
    **{f"save {name}": (saving, name) for name in ALL_FORMATS},
    **{f"load {name}": (loading, name) for name in ALL_FORMATS if name != "exported"},
    "loop": (looping,),
}


def inject(name: str, at: int, kind: type[BaseException]) -> tuple[str, bool]:
    """Raise at one line in one call of a case: the line, and whether the caller saw it.

    Raises AssertionError where something is not as it should be afterwards.
    """
    prepare, *arguments = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        with prepare(*arguments, Path(folder)) as (call, check):
            lines, raised = Lines(in_library, at, raising(kind)), False
            try:
                lines.run(call)
            except BaseException as error:
                if not _is_ours(error):
                    raise
                raised = True
                del error
            try:
                assert trace_state.value is EAGER and not context_key()
                check(raised)
            except Exception as error:
                error.add_note(f"after {kind.__name__} at {lines.place}")
                raise
    return lines.place, raised


def lines_of(name: str) -> int:
    """How many lines of the library run in a warm call of a case."""
    for _ in range(2):
        prepare, *arguments = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            with prepare(*arguments, Path(folder)) as (call, _):
                lines = Lines(in_library)
                lines.run(call)
    return lines.count


def campaign(
    count: int, names: tp.Iterable[str] = CASES, seed: int = 0
) -> collections.Counter[str]:
    """Raise at so many random lines of each case; how the calls ended."""
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    rng = random.Random(seed)
    for name in names:
        number = lines_of(name)
        for at in rng.sample(range(1, number + 1), min(count, number)):
            kind = rng.choice(KINDS)
            try:
                place, raised = inject(name, at, kind)
            except Exception as error:
                print(f"{name}, line {at}: {type(error).__name__}: {error} {error.__notes__}")
                counts[f"{name}: DEFECT"] += 1
                continue
            ending = "raised" if raised else "went on" if place else "not reached"
            counts[f"{name}: {ending}"] += 1
    return counts


def main() -> None:
    options = argparse.ArgumentParser(description=tp.cast(str, __doc__).split("\n")[0])
    options.add_argument("--count", type=int, default=40, help="faults in each case")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=CASES, action="append")
    given = options.parse_args()
    counts = campaign(given.count, given.only or CASES, given.seed)
    print_and_exit(counts, "faults")


if __name__ == "__main__":
    main()
