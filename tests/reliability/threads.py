"""Threads that meet at every line of the library, and threads that run freely.

    python -m tests.reliability.threads --lines 40 --seed 0
    python -m tests.reliability.threads --lines 0 --only jit      # every line
    python -m tests.reliability.threads --rounds 200 --threads 16

The first two take each pair of operations in `thread_cases`, and let the second run at some of the lines
of the first, in another thread and, where that makes sense, in the same one (as a signal handler or a
finalizer does).  The last one runs the rounds of `free_threads`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import typing as tp

from tests.reliability.free_threads import ROUNDS
from tests.reliability.interleave import interleaved
from tests.reliability.thread_cases import CASES


class Counts:
    """What a campaign did."""

    def __init__(self) -> None:
        self.programs = self.waited = self.refused = 0
        self.defects: list[str] = []

    def __str__(self) -> str:
        return (
            f"{self.programs} interleavings, {self.waited} of which waited for a lock, "
            f"{self.refused} in which an operation raised an error that it may raise; "
            f"{len(self.defects)} defects"
        )


def run_at(name: str, at: int, same_thread: bool, counts: Counts) -> int:
    """Run the inner operation of a case at one line of the outer one; returns how many lines it has.

    Raises AssertionError, or an error of an operation, where something is wrong.
    """
    pair = CASES[name]()
    run = interleaved(pair.outer, pair.inner, at, same_thread=same_thread)
    counts.programs += 1
    counts.waited += run.waited
    try:
        for outcome in (run.outer, run.inner):
            if outcome.error is not None:
                if not isinstance(outcome.error, pair.may_fail):
                    raise outcome.error
                counts.refused += 1
        pair.check(run)
    except Exception as error:
        how = "the same thread" if same_thread else "another thread"
        error.add_note(f"In {name}, the second operation ran in {how} at {run.place} (line {at}).")
        raise
    return run.lines


def places(lines: int, limit: int, random_: random.Random) -> list[int]:
    """The numbers of the lines to stop at."""
    if not limit or lines <= limit:
        return [*range(lines)]
    return sorted(random_.sample(range(lines), limit))


def run_case(name: str, limit: int, seed: int, counts: Counts) -> tp.Iterator[Exception]:
    """Run a case at some of its lines; gives what went wrong."""
    for same_thread in (False, True) if CASES[name]().reentrant else (False,):
        random_ = random.Random(f"{name} {seed} {same_thread}")
        try:
            lines = run_at(name, sys.maxsize, same_thread, counts)
        except Exception as error:
            counts.defects.append(name)
            yield error
            return
        for at in places(lines, limit, random_):
            try:
                run_at(name, at, same_thread, counts)
            except Exception as error:
                counts.defects.append(name)
                yield error


def free(rounds: int, threads: int, seed: int, only: str) -> None:
    """Run threads freely; print what they did, and stop at the first defect."""
    calls, start = 0, time.monotonic()
    chosen = [name for name in ROUNDS if only in name]
    for number in range(rounds):
        calls += ROUNDS[chosen[number % len(chosen)]](seed + number, threads)
    seconds = time.monotonic() - start
    print(f"{rounds} rounds of {threads} threads, {calls} calls, {seconds:.0f} s; 0 defects")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=40, help="lines of each pair; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the name of a case")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of threads that run freely")
    parser.add_argument("--threads", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.rounds:
        free(arguments.rounds, arguments.threads, arguments.seed, arguments.only)
        return
    counts = Counts()
    for name in CASES:
        if arguments.only in name:
            shown: set[str] = set()
            for error in run_case(name, arguments.lines, arguments.seed, counts):
                text = f"{type(error).__name__}: {str(error)[:300]}"
                notes = " ".join(getattr(error, "__notes__", ()))
                if text not in shown:
                    shown.add(text)
                    print(f"--- {text}\n    {notes}", flush=True)
                    if len(shown) == 1:
                        traceback.print_exception(error, limit=-6)
            print(f"{name}: {counts}", flush=True)
    print(counts)
    sys.exit(bool(counts.defects))


if __name__ == "__main__":
    main()
