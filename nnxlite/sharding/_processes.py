"""Several processes: exchanging texts, and failing together.

Texts go through the key-value store of JAX's coordination service. No device takes part, so this works
in the middle of a save, in threads, and where one process fails and the others do not. All else that
several processes need is JAX's: `jax.distributed`, global arrays, `multihost_utils`.
"""

from __future__ import annotations

import collections
import contextlib
import json
import threading
import typing as tp
from collections.abc import Iterator

from nnxlite._base.errors import NnxError
from nnxlite._base.jax import coordination

__all__ = ["ProcessError", "agreed", "exchange"]

TIMEOUT = 600.0
"""Seconds that processes wait for each other by default."""

_USES: collections.Counter[str] = collections.Counter()
_LOCK = threading.Lock()


class ProcessError(NnxError, RuntimeError):
    """Something failed in another process, and therefore in all of them.

    Attributes:
        kind: the name of the class of the other process's error.

    >>> import nnxlite as nnx
    >>> issubclass(nnx.distributed.ProcessError, RuntimeError)
    True
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def exchange(name: str, text: str, timeout: float = TIMEOUT) -> list[str]:
    """The strings of all processes, in the order of their numbers; waits for all of them.

    Args:
        name: the same in all of them; it may be used again.
        text: of this process.
        timeout: in seconds.

    Raises:
        TimeoutError: if some did not come, saying which.

    >>> import nnxlite as nnx
    >>> nnx.distributed.exchange("names", "alone")
    ['alone']
    """
    client, count, index = coordination()
    if client is None:
        return [text]
    with _LOCK:
        use = _USES[name]
        _USES[name] += 1
    folder = f"nnxlite/{name}/{use}"
    client.key_value_set(f"{folder}/{index}", json.dumps(text))
    try:
        client.wait_at_barrier(folder, round(timeout * 1000))
    except Exception as error:
        try:
            there = _texts(client, folder)
        except Exception:  # the service has ended with process 0
            there = {index: text}
        absent = [number for number in range(count) if number not in there]
        shown = ", ".join(map(str, absent[:10])) + (" ..." if len(absent) > 10 else "")
        raise TimeoutError(
            f"{name}: {len(there)} of {count} processes came within {timeout:g} s"
            + (f"; not there: {shown}" if absent else "")
            + ". Each of them has to make the same calls in the same order. Look at the output of those "
            f"that are not there. ({str(error).splitlines()[0][:200]})"
        ) from None
    texts = _texts(client, folder)
    if index == 0 and use:  # all have read those of the time before
        client.key_value_delete(f"nnxlite/{name}/{use - 1}")
    return [texts[number] for number in range(count)]


def _texts(client: tp.Any, folder: str) -> dict[int, str]:
    pairs = client.key_value_dir_get(folder)
    return {int(key.rpartition("/")[2]): json.loads(text) for key, text in pairs}


@contextlib.contextmanager
def agreed(name: str, timeout: float = TIMEOUT) -> Iterator[None]:
    """A block that succeeds in all processes, or fails in all.

    At its end they wait for each other. A process whose block raised raises that error; the others raise
    a `ProcessError` that quotes it. Nothing inside may wait for another process.

    Args:
        name: the same in all processes.
        timeout: in seconds.

    Raises:
        ProcessError: if the block failed elsewhere.
        TimeoutError: if some process did not come.

    >>> import nnxlite as nnx
    >>> with nnx.distributed.agreed("read the table"):
    ...     table = [1, 2]
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(TimeoutError):  # this error is the reason
            exchange(name, f"{type(error).__name__}: {str(error)[:2000]}", timeout)
        raise
    texts = exchange(name, "", timeout)
    failed = [index for index, text in enumerate(texts) if text]
    if failed:
        more = f" (also: {', '.join(map(str, failed[1:10]))})" if failed[1:] else ""
        text = texts[failed[0]]
        raise ProcessError(
            f"{name}: process {failed[0]} failed{more}: {text}", text.partition(":")[0]
        )
