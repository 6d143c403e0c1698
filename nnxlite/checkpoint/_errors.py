"""What can be wrong with a checkpoint."""

from __future__ import annotations

import contextlib
import typing as tp
from collections.abc import Iterator

from nnxlite._base.errors import NnxError
from nnxlite.checkpoint._report import Report, printable
from nnxlite.distributed import ProcessError, agreed


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
    """What is stored is not what the objects need; nothing has been changed.

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
    """There is no checkpoint at a path; the message says what is there.

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
