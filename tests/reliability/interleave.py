"""One thread stops at a line of the library, and another thread runs a whole operation there.

Threads that run freely meet at a given line once in a million runs.  `Interleaving` makes them meet: it
runs an operation under `sys.settrace`, stops it before its n-th line in the library, runs a second
operation to its end, in another thread or (as a signal handler or a finalizer does) in the same one, and
lets the first one go on.  An operation of n lines has n such programs, and none depends on the clock:
where the second operation waits for a lock of the first, the first goes on after a moment.
"""

from __future__ import annotations

import os
import sys
import threading
import types
import typing as tp
from pathlib import Path

import nnxlite as nnx

LIBRARY = os.fspath(Path(nnx.__file__).parent) + os.sep
MOMENT = 0.03
"""Seconds that an operation is given before it counts as waiting for the other one."""
DEADLOCK = 60.0
"""Seconds after which operations that wait for each other count as deadlocked."""

Operation = tp.Callable[[], tp.Any]


class Outcome:
    """What an operation gave: a result or an error."""

    def __init__(self, operation: Operation) -> None:
        self.error: BaseException | None = None
        self.result: tp.Any = None
        try:
            self.result = operation()
        except Exception as error:
            self.error = error


class Interleaving(tp.NamedTuple):
    """Two operations of which the second ran within the first.

    Attributes:
        outer, inner: what they gave.
        lines: how many lines of the library the outer one ran.
        place: the line before which the inner one ran, or None if it ran after the outer one.
        waited: whether the inner one had to wait for the outer one.
    """

    outer: Outcome
    inner: Outcome
    lines: int
    place: str | None
    waited: bool


def interleaved(
    outer: Operation, inner: Operation, at: int, *, same_thread: bool = False
) -> Interleaving:
    """Run `inner` before line number `at` of `outer`; after it, where it has fewer lines.

    Raises RuntimeError where they wait for each other.
    """
    found: list[Outcome] = []
    run = lambda: found.append(Outcome(inner))
    thread = threading.Thread(target=run, daemon=True)
    lines, place, waited = 0, None, False

    def on_call(frame: types.FrameType, event: str, arg: tp.Any) -> tp.Any:
        return on_line if frame.f_code.co_filename.startswith(LIBRARY) else None

    def on_line(frame: types.FrameType, event: str, arg: tp.Any) -> tp.Any:
        nonlocal lines, place, waited
        if event == "line":
            if lines == at:
                name = frame.f_code.co_filename.removeprefix(LIBRARY)
                place = f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
                if same_thread:
                    run()
                else:
                    thread.start()
                    thread.join(MOMENT)
                    waited = thread.is_alive()
            lines += 1
        return on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        first = Outcome(outer)
    finally:
        sys.settrace(before)
    if place is None:
        run()
    elif not same_thread:
        thread.join(DEADLOCK)
        if thread.is_alive():
            raise RuntimeError(f"Deadlock: the second operation still waits; it began at {place}.")
    return Interleaving(first, found[0], lines, place, waited)
