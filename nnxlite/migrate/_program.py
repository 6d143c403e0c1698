"""What becomes of a program, without libcst."""

from __future__ import annotations

import dataclasses

from nnxlite._base.errors import importing

SOURCES = {"nnx": ("flax", "nnxlite"), "equinox": ("equinox",)}
"""What a program may be written for; one that contains none of these words needs no parsing."""

NO_LIBCST = (
    "nnxlite.migrate parses programs with libcst, which is not installed. "
    "Install it: pip install 'nnxlite[migrate]'"
)


class UnreadableError(ValueError):
    """A program cannot be parsed; `line` and `column` (both from 1) say where, if that is known."""

    def __init__(self, message: str, line: int = 1, column: int = 1):
        super().__init__(message)
        self.line, self.column = line, column


@dataclasses.dataclass(frozen=True, order=True)
class Note:
    """Something that needs a decision.

    Attributes:
        line: counted from 1, in the program before it is rewritten.
        column: counted from 1.
        what: the code in question.
        hint: what to do about it.
        page: the page with more about it, relative to the folder `docs`.
    """

    line: int
    column: int
    what: str
    hint: str
    page: str


@dataclasses.dataclass(frozen=True)
class Migration:
    """A rewritten program, and what needs a decision in it."""

    text: str
    notes: tuple[Note, ...] = ()


def need_libcst() -> None:
    """Raise ImportError with the remedy where libcst is not installed."""
    with importing(NO_LIBCST):
        import libcst  # noqa: F401
