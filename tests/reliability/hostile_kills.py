"""Kills saves at every change of the file system, and at many sizes of a file, and looks what is left.

    python -m tests.reliability.hostile_kills --count 200

A process saves values of one step over those of the step before. It is killed at the n-th event of the
file system (a file opened for writing, renamed, removed, a folder made), or when a file would grow over
a limit (as the system does it), or is refused the bytes (as a full disk does it). The next process must
find all values of one step, the last complete one or the one that was being saved. Processes are forked
before JAX starts anything.

The last line that is printed counts saves, how they ended, and defects.
"""

from __future__ import annotations

import argparse
import collections
import os
import resource
import signal
import sys
import tempfile
import traceback
import typing as tp
import warnings
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import nnxlite as nnx

SIZES = (3, 500, 3000)
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.chmod"}


def values(step: int) -> nnx.Dict:
    return nnx.Dict({f"w{size}": nnx.Param(np.full(size, step, "f4")) for size in SIZES})


def save_exported(folder: Path, step: int) -> None:
    fun = lambda model, x: [model[f"w{size}"] * x for size in SIZES]
    nnx.export(fun, values(step), jnp.ones(())).save(folder / "e")


def load_exported(folder: Path, model: nnx.Dict) -> None:
    for size, array in zip(SIZES, nnx.load_exported(folder / "e")(jnp.ones(()))):
        model[f"w{size}"].set_value(np.asarray(array))


Save = Callable[[Path, int], tp.Any]
FORMATS: dict[str, tuple[Save, Callable[[Path, nnx.Dict], tp.Any]]] = {
    "safetensors": (
        lambda folder, step: nnx.save_safetensors(folder, values(step)),
        nnx.load_safetensors,
    ),
    "shards": (
        lambda folder, step: nnx.save_safetensors(folder, values(step), max_shard_bytes=4000),
        nnx.load_safetensors,
    ),
    "exported": (save_exported, load_exported),
    "checkpoint": (
        lambda folder, step: nnx.checkpoint.save(folder / "c", model=values(step), overwrite=True),
        lambda folder, model: nnx.checkpoint.restore(folder / "c", model=model),
    ),
}


def kill_at(number: int) -> None:
    """Kill this process at its n-th change of the file system."""
    seen = 0

    def hook(event: str, args: tuple[tp.Any, ...]) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(args[1], str) and any(c in args[1] for c in "wax+")
        if writes or event in EVENTS:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def found(load: Callable[[Path, nnx.Dict], tp.Any], folder: Path) -> int:
    """The step of what is there; AssertionError where it is of several."""
    model = values(-1)
    load(folder, model)
    steps = {float(x) for size in SIZES for x in np.asarray(model[f"w{size}"].get_value())}
    assert len(steps) == 1, f"values of several steps: {steps}"
    return int(steps.pop())


def child(name: str, folder: Path, last: int, how: str, at: int, report: int) -> None:
    """Check what the process before has left, then save the next step, and be killed meanwhile."""
    save, load = FORMATS[name]
    step = 0
    if last >= 0:
        step = found(load, folder)
        assert step in (last, last + 1), f"step {step}, and {last} was complete"
    else:
        save(folder, 0)
    os.write(report, f"{step}\n".encode())
    if how == "event":
        kill_at(at)
    else:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if how == "size" else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (at, resource.RLIM_INFINITY))
    try:
        save(folder, step + 1)
    except (OSError, nnx.checkpoint.CheckpointError):
        assert how == "full"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert found(load, folder) == step, "a save that failed has changed what is there"
        os.write(report, b"refused\n")
        os._exit(0)
    os.write(report, f"{step + 1}\nsaved\n".encode())
    os._exit(0)


def run(name: str, folder: Path, how: str, at: int, last: int) -> tuple[str, int]:
    """How one save ended, and the last step that is known to be complete."""
    pipe, report = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            child(name, folder, last, how, at, report)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(report)
    with os.fdopen(pipe) as file:
        lines = file.read().split()
    _, status = os.waitpid(process, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        return "DEFECT", last
    steps = [int(line) for line in lines if line.isdecimal()]
    ending = "killed" if os.WIFSIGNALED(status) else lines[-1]
    return ending, max([last, *steps])


def campaign(count: int, names: tp.Iterable[str] = FORMATS) -> collections.Counter[str]:
    """Kill at most that many saves of each format in each way; how they ended."""
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    for name in names:
        for how, places in (
            ("event", range(1, count + 1)),
            ("size", [1 + number * 13_000 // count for number in range(count)]),
            ("full", [1 + number * 13_000 // count for number in range(count)]),
        ):
            with tempfile.TemporaryDirectory() as folder:
                last = -1  # the first process saves step 0 before it is killed in step 1
                for at in places:
                    ending, last = run(name, Path(folder), how, at, last)
                    counts[f"{name} by {how}: {ending}"] += 1
                    if ending == "saved" and how == "event":
                        break  # there are no more events
    return counts


def print_and_exit(counts: collections.Counter[str], what: str) -> tp.NoReturn:
    """Print how often each outcome was seen, and end the process with 1 if there was a defect."""
    for name, number in sorted(counts.items()):
        print(f"{number:7,} {name}")
    defects = sum(number for name, number in counts.items() if name.endswith("DEFECT"))
    print(f"{sum(counts.values()):,} {what}, {defects} defects")
    sys.exit(defects > 0)


def main() -> None:
    options = argparse.ArgumentParser(description=tp.cast(str, __doc__).split("\n")[0])
    options.add_argument("--count", type=int, default=40, help="saves of each format in each way")
    options.add_argument("--only", choices=FORMATS, action="append")
    given = options.parse_args()
    print_and_exit(campaign(given.count, given.only or FORMATS), "saves")


if __name__ == "__main__":
    main()
