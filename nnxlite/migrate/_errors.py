"""What makes a program impossible to rewrite."""

from __future__ import annotations


class UnreadableError(ValueError):
    """A program cannot be parsed; `line` and `column` (both from 1) say where, if that is known."""

    def __init__(self, message: str, line: int = 1, column: int = 1):
        super().__init__(message)
        self.line, self.column = line, column
