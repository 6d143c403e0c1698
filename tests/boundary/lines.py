"""Does something at a line of the library, as Ctrl-C or a signal handler may at any."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import types
import typing as tp
from collections.abc import Callable
from pathlib import Path

import nnxlite as nnx

LIBRARY = os.fspath(Path(nnx.__file__).parent) + os.sep


def interrupt() -> None:
    """What Ctrl-C does."""
    raise KeyboardInterrupt


class Lines:
    """Calls a function, and counts its lines in the library; does something before one of them.

    Attributes:
        count: how many lines have run.
        place: file and line where something was done.
    """

    def __init__(
        self,
        call: Callable[[], object],
        at: int = 0,
        act: Callable[[], object] = interrupt,
        files: tuple[str, ...] = ("",),
    ) -> None:
        self.count, self.place = 0, ""
        self._at, self._act, self._files = at, act, files
        before = sys.gettrace()
        sys.settrace(self._entered)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                call()
        finally:
            sys.settrace(before)

    def _entered(self, frame: types.FrameType, event: str, arg: object) -> tp.Any:
        name = frame.f_code.co_filename
        if not name.startswith(LIBRARY) or not any(file in name for file in self._files):
            return None
        blocks: set[int] = set()

        def line(frame: types.FrameType, event: str, arg: object) -> tp.Any:
            if event == "line" and not _leaves_a_block(frame, blocks):
                self.count += 1
                if self.count == self._at:
                    self.place = f"{name.removeprefix(LIBRARY)}:{frame.f_lineno}"
                    self._act()
            return line

        return line


def _leaves_a_block(frame: types.FrameType, entered: set[int]) -> bool:
    """Whether a `with` block is being left: Python raises nothing there, which would skip `__exit__`."""
    number = frame.f_lineno
    if not linecache.getline(frame.f_code.co_filename, number).lstrip().startswith("with "):
        return False
    entered ^= {number}
    return number not in entered
