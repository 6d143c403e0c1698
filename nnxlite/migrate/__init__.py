"""`python -m nnxlite.migrate PATH...`: rewrites programs from Flax NNX, and lists what needs a decision.

A program is parsed by libcst, which says for each name what import it came from. Rules look at names,
calls and imports, and collect edits (a span of the text and its replacement) and notes (a position, the
code in question, what to do).

A rule edits where the result is certain to mean the same, and writes a note everywhere else.  What
nnxlite offers is never listed here: a name or a keyword argument of Flax is looked up in nnxlite.
A program that was rewritten has no edits left; its notes stay until someone acts on them.

>>> from nnxlite.migrate import migrate_text
>>> print(migrate_text("from flax import nnx, struct\\n").text, end="")
from flax import struct
import nnxlite as nnx

Parsing needs libcst, from the extra `migrate`; nothing is imported before the first program.
"""

from __future__ import annotations

import dataclasses

from nnxlite._base.errors import importing

_SOURCES = {"nnx": ("flax", "nnxlite"), "equinox": ("equinox",)}
"""What a program may be written for; one that contains none of these words needs no parsing."""

_NO_LIBCST = (
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


def _need_libcst() -> None:
    """Raise ImportError with the remedy where libcst is not installed."""
    with importing(_NO_LIBCST):
        import libcst


def migrate_text(text: str, source: str = "nnx") -> Migration:
    """A program rewritten for nnxlite, and what needs a decision in it.

    Args:
        text: a module of Python.
        source: what it was written for: `"nnx"`; or `"equinox"`, for which there are only notes.

    Returns:
        The new text and the notes in the order of their lines.

    Raises:
        UnreadableError: it is not Python.
        ImportError: libcst is not installed.

    >>> from nnxlite.migrate import migrate_text
    >>> done = migrate_text("from flax import nnx\\nnnx.Optimizer(model, tx)\\n")
    >>> print(done.text, end="")
    import nnxlite as nnx
    nnx.ModelAndOptimizer(model, tx)
    """
    if source not in _SOURCES:
        raise ValueError(f"unknown source {source!r}; expected one of {', '.join(_SOURCES)}")
    if not any(word in text for word in _SOURCES[source]):
        return Migration(text)
    _need_libcst()
    from nnxlite.migrate._rules import FromEquinox, FromNnx

    rules = FromNnx(text) if source == "nnx" else FromEquinox(text)
    return Migration(rules.edited(), tuple(sorted(rules.notes)))
