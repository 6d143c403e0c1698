"""What can be wrong with a checkpoint."""

from __future__ import annotations

import typing as tp

from nnxlite._errors import NnxError

if tp.TYPE_CHECKING:
    from nnxlite.checkpoint._report import Report


class CheckpointError(NnxError, ValueError):
    """Base of the exceptions below; raised itself for what cannot be saved.

    >>> import nnxlite as nnx
    >>> issubclass(nnx.checkpoint.MismatchError, nnx.checkpoint.CheckpointError)
    True
    """


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
