"""What restoring did, or why it was refused: every name, which side lacks it, and the errors."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import typing as tp
from collections.abc import Iterator

from nnxlite._base.errors import NnxError, listed
from nnxlite.distributed import ProcessError, agreed

__all__ = ["CheckpointError", "DamagedError", "Mismatch", "MismatchError", "NotFoundError"]
__all__ += ["Report"]


class Mismatch(tp.NamedTuple):
    """A leaf that is stored in another form than it is wanted in.

    Attributes:
        name: of the leaf that is wanted.
        stored: what is stored, such as `float32[2,3]`.
        wanted: what the object has.

    >>> from nnxlite.checkpoint import Mismatch
    >>> print(Mismatch("fc.kernel", "float32[2,3]", "float32[2,4]"))
    fc.kernel: stored float32[2,3], wanted float32[2,4]
    """

    name: str
    stored: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.name}: stored {self.stored}, wanted {self.wanted}"


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The leaves that were restored, and those that were not.

    Attributes:
        source: what was read, in words.
        restored: the names that have their stored values now.
        missing: names of leaves that are not stored; they keep their values.
        unexpected: stored names that no leaf has.
        misshapen: leaves stored in another shape, or as something else; they keep their values.
        cast: leaves that were stored in another dtype and have been cast; those that are restored only
            with `cast=True` are in `misshapen` without it.
        renamed: pairs of a stored name and the name it was restored by.
        hints: for the first missing names, the stored name that is most like it; with a `Mapping`, also
            the foreign name that was looked for.
        step: that of the checkpoint, where a `Manager` restored it.
        values: items by name. Those that were passed: the objects, changed in place, and a new value
            for what cannot be changed, such as a number, text or a frozen module. Also the numbers,
            text and plain data that were not passed.

    >>> from nnxlite.checkpoint import Report
    >>> report = Report("weights", ("a.kernel",), missing=("a.bias",), unexpected=("a.biases",),
    ...                 hints={"a.bias": "near: a.biases"})
    >>> report.complete
    False
    >>> report
    weights: 1 restored
    missing, 1: a.bias (near: a.biases)
    unexpected, 1: a.biases
    """

    source: str
    restored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[Mismatch, ...] = ()
    cast: tuple[Mismatch, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    hints: tp.Mapping[str, str] = dataclasses.field(default_factory=dict)
    step: int | None = None
    values: tp.Mapping[str, tp.Any] = dataclasses.field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every leaf was restored and everything stored was used."""
        return not (self.missing or self.unexpected or self.misshapen)

    def problems(self) -> list[str]:
        """A line for each kind of problem, with the first names."""
        hints = {name: f" ({hint})" for name, hint in self.hints.items()}
        missing = [name + hints.get(name, "") for name in self.missing]
        return _lines(missing=missing, unexpected=self.unexpected, misshapen=self.misshapen)

    def __repr__(self) -> str:
        renamed = [f"{old} to {new}" for old, new in self.renamed]
        lines = [f"{printable(self.source)}: {len(self.restored):,} restored", *self.problems()]
        return "\n".join([*lines, *_lines(cast=self.cast, renamed=renamed)])


def _lines(**kinds: tp.Sequence[tp.Any]) -> list[str]:
    """A line for each kind of which there are any."""
    text = lambda name: printable(str(name))
    return [f"{kind}, {len(x):,}: {listed(x, text=text)}" for kind, x in kinds.items() if x]


def near_text(name: str, names: tp.Iterable[str], cutoff: float = 0.5) -> str:
    """In brackets, the one of some names that is most like another; empty without any."""
    near = difflib.get_close_matches(name, list(names)[:1000], 1, cutoff)
    return f" (near: {near[0]})" if near else ""


def printable(text: str) -> str:
    r"""A text for a terminal, where control characters could move the cursor or hide what follows.

    >>> from nnxlite.checkpoint._report import printable
    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


class CheckpointError(NnxError, ValueError):
    """Base of the exceptions below; raised itself for what cannot be saved.

    Control characters in names that come from files are escaped in its message.

    >>> import nnxlite as nnx
    >>> issubclass(nnx.checkpoint.MismatchError, nnx.checkpoint.CheckpointError)
    True
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class MismatchError(CheckpointError):
    """The stored leaves do not match the objects; nothing has been changed.

    Attributes:
        report: the `Report`, with every name.

    >>> import nnxlite as nnx
    >>> issubclass(nnx.checkpoint.MismatchError, ValueError)
    True
    """

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


class DamagedError(CheckpointError):
    """Files are missing, cut short or changed; nothing has been changed in the objects.

    >>> import nnxlite as nnx
    >>> issubclass(nnx.checkpoint.DamagedError, ValueError)
    True
    """


class NotFoundError(CheckpointError, FileNotFoundError):
    """A path has no checkpoint; the message describes what it has instead.

    >>> import nnxlite as nnx
    >>> issubclass(nnx.checkpoint.NotFoundError, FileNotFoundError)
    True
    """

    def __new__(cls, *args: tp.Any) -> tp.Self:
        # Found by name, as a pickle does, `__new__` would be that of ValueError, which does not suit.
        return FileNotFoundError.__new__(cls, *args)


_KINDS: dict[str, type[Exception]] = {
    cls.__name__: cls for cls in (DamagedError, NotFoundError, FileExistsError)
}


@contextlib.contextmanager
def together(name: str) -> Iterator[None]:
    """A block that succeeds in all processes, or fails in all with errors of one class.

    Args:
        name: what it does, for the message.

    Raises:
        CheckpointError: or one of those above, if the block failed in another process.
    """
    try:
        with agreed(name):
            yield
    except ProcessError as error:
        raise _KINDS.get(error.kind, CheckpointError)(str(error)) from error
