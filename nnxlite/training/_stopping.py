"""Stopping a loop between two steps: signals, and several processes that stop before the same step.

The first Ctrl-C or SIGTERM (which Slurm, Kubernetes and preemption send) asks the loop to stop; the
present step finishes.  Of several processes, one that stops by itself would leave the others waiting for
ever in their next collective operation.  So it announces that it has to stop, and all agree on the step:

- A thread of each process looks for announcements, in the store of JAX's coordination service.
- When it sees one, it holds the loop before the next step, and exchanges the numbers of steps done.
- All stop when one more step is done than the largest number, as each can reach that.

The main thread takes no part in this, since it may be waiting for a result that the others have yet to
compute; and no device does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import signal
import sys
import threading
import time
import typing as tp
import weakref
from collections.abc import Iterator

from nnxlite._base.jax import coordination

POLL = 0.5
"""Seconds between two looks for an announcement."""
ANSWER = 60.0
"""Seconds that a process waits for the others to say where they are."""
LINGER = 120.0
"""Seconds after the end of its loop in which a process answers others that are not there yet."""

_numbers = itertools.count()
_watching: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@functools.cache
def _join_at_exit() -> None:
    """Have threads that answer others end before Python does.

    Python ends a daemon thread as it comes back from C++, which then aborts the process.  A process that
    ends with an error waits for nobody.
    """

    def join() -> None:
        for thread in () if hasattr(sys, "last_type") else tuple(_watching):
            thread.join(LINGER)

    atexit.register(join)


class Stop:
    """Whether a stop was requested; true or false.

    Args:
        requested: the initial value.
    """

    def __init__(self, requested: bool = False) -> None:
        self.requested = requested

    def __bool__(self) -> bool:
        return self.requested


@contextlib.contextmanager
def interruptible() -> Iterator[Stop]:
    """A context in which Ctrl-C and SIGTERM only ask to stop; a second Ctrl-C interrupts at once.

    The handlers from before are back afterwards. Outside of the main thread it does nothing.

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
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: tp.Any) -> None:
        nonlocal pressed
        if number == signal.SIGINT and pressed:
            raise KeyboardInterrupt
        pressed = pressed or number == signal.SIGINT
        if not stop:
            stop.requested = True
            again = "; Ctrl-C again stops at once" if pressed else ", because of SIGTERM"
            print(f"\nStopping after this step{again}.", file=sys.stderr)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, handle)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Agreement:
    """On the step that all processes stop before.

    Args:
        done: the number of steps done.
    """

    def __init__(self, done: int) -> None:
        self._client, self._count, self._index = coordination()
        self._name = f"loop {next(_numbers)}"
        self._folder = f"nnxlite/{self._name}/stop"
        self._at_end = f"nnxlite/{self._name}/end"
        self._done = done
        self._last: int | None = None
        self._announced = False
        self._ended: float | None = None
        self._lock = threading.Lock()  # held while the processes agree
        self._decided, self._awake = threading.Event(), threading.Event()
        if self._client is not None:
            thread = threading.Thread(target=self._watch, daemon=True, name=self._name)
            thread.start()
            _watching.add(thread)
            _join_at_exit()

    def stops(self, done: int, asked: bool) -> bool:
        """Whether to stop now.

        Args:
            done: the number of steps done.
            asked: whether this process was asked to stop.
        """
        if self._client is None:
            return asked
        if asked and not self._announced:
            self._announced = True
            self._client.key_value_set(f"{self._folder}/{self._index}", '""')
            self._awake.set()
            self._decided.wait()
        with self._lock:
            self._done = done
            return self._last is not None and done >= self._last

    def end(self, *, answering: bool) -> None:
        """End the loop.

        Args:
            answering: whether to tell processes that are asked to stop that this one is at the end.
        """
        self._ended = time.monotonic() if answering else -LINGER
        if not answering:
            self._awake.set()

    def _watch(self) -> None:
        while self._ended is None or time.monotonic() < self._ended + LINGER:
            try:
                asked = self._client.key_value_dir_get(self._folder)
                if not asked and self._ended is not None and self._all_are_at_the_end():
                    break
            except Exception:  # the service has ended
                break
            if asked:
                self._agree()
                break
            self._awake.wait(POLL)
        self._decided.set()

    def _all_are_at_the_end(self) -> bool:
        there = self._client.key_value_dir_get(self._at_end)
        mine = f"{self._at_end}/{self._index}"
        if mine not in dict(there):
            self._client.key_value_set(mine, '""')
        return len(there) == self._count

    def _agree(self) -> None:
        from nnxlite.distributed import exchange  # only where there are several processes

        with self._lock:
            try:
                done = exchange(self._name, str(self._done), ANSWER)
            except Exception as error:  # then they are not in this loop, or gone
                print(f"Stopping alone: {error}", file=sys.stderr)
                done = [str(self._done)]
            self._last = max(map(int, done)) + 1
