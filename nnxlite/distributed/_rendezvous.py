"""Waiting for all processes before JAX connects them.

JAX aborts a process when the others do not arrive in time, and does not say which are missing.
So they meet here first: process 0 listens at the address where JAX's service will be, the others
say who they are, and once all have arrived, each gets an empty answer. Any other answer is the reason
why the run fails, the same for all.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
import typing as tp

RETRY = 0.1
"""Seconds between attempts to reach process 0."""
GRACE = 5.0
"""Seconds that the others wait longer than process 0, for its answer."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port; ValueError for anything else.

    >>> from nnxlite.distributed._rendezvous import split_address
    >>> split_address("10.0.0.1:1234"), split_address("[::1]:80")
    (('10.0.0.1', 1234), ('::1', 80))
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"coordinator_address is {address!r}; pass host and port of process 0, such as "
            "'10.0.0.1:1234'."
        )
    return host.strip("[]"), int(port)


def meet(address: str, count: int, index: int, timeout: float) -> None:
    """Return once all processes are there.

    Args:
        address: `host:port` of process 0.
        count: how many processes there are.
        index: the number of this one.
        timeout: in seconds.

    Raises:
        TimeoutError: if not all came, naming those that are missing.
        RuntimeError: if processes disagree about their number, or two have the same one.
        OSError: if process 0 cannot listen at the address.
    """
    host, port = split_address(address)
    if index == 0:
        _listen(address, host, port, count, timeout)
    else:
        _call(address, host, port, count, index, timeout)


def _listen(address: str, host: str, port: int, count: int, timeout: float) -> None:
    there: dict[int, socket.socket] = {}
    end = time.monotonic() + timeout
    with _server(address, host, port) as server, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        refusal: Exception | None = None
        while refusal is None and len(there) < count - 1:
            if (left := end - time.monotonic()) <= 0:
                refusal = _missing(address, count, timeout, there)
            elif selector.select(left):
                connection, _ = server.accept()
                refusal = _admit(connection, there, count)
        for connection in there.values():
            with contextlib.suppress(OSError), connection:
                connection.sendall(f"{_as_line(refusal)}\n".encode())
    if refusal is not None:
        raise refusal


def _server(address: str, host: str, port: int) -> socket.socket:
    """A socket that listens; on all interfaces, as JAX's does, but for loopback addresses."""
    try:
        if host in ("localhost", "127.0.0.1"):
            return socket.create_server(("127.0.0.1", port), backlog=128)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
    except OSError as error:
        raise OSError(
            error.errno,
            f"nnx.distributed.initialize: process 0 cannot listen at {address}: {error.strerror}. Is "
            "the port taken, by another run for instance? Choose another one for all processes.",
        ) from None


def _admit(
    connection: socket.socket, there: dict[int, socket.socket], count: int
) -> Exception | None:
    """Take in who says who it is; the reason to give up if that cannot be."""
    connection.settimeout(GRACE)
    try:
        index, theirs = json.loads(_line_of(connection))
    except (OSError, ValueError, TypeError):
        connection.close()  # not one of our processes
        return None
    before = there.get(index)
    there[index] = connection
    if theirs != count:
        return RuntimeError(
            f"nnx.distributed.initialize: process 0 expects {count} processes, process {index} "
            f"expects {theirs}. Pass the same num_processes to all."
        )
    if before is not None:
        if not _is_closed(before):
            there[-1] = before
            return RuntimeError(
                f"nnx.distributed.initialize: two processes say that they are process {index} of "
                f"{count}. Give each a process_id of its own, from 0 to {count - 1}."
            )
        before.close()
    return None


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(GRACE)


def _missing(address: str, count: int, timeout: float, there: tp.Container[int]) -> TimeoutError:
    absent = [index for index in range(1, count) if index not in there]
    shown = ", ".join(map(str, absent[:10])) + (" ..." if len(absent) > 10 else "")
    return TimeoutError(
        f"nnx.distributed.initialize: {count - len(absent)} of {count} processes came to {address} "
        f"within {timeout:g} s; missing: {shown}. Were they started, do they have the same address and "
        "num_processes, and can they reach it (firewall, proxy)? initialization_timeout gives "
        "them longer."
    )


def _call(address: str, host: str, port: int, count: int, index: int, timeout: float) -> None:
    end = time.monotonic() + timeout + GRACE
    why: object = "no answer"
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(left, timeout)) as connection:
                connection.sendall(f"{json.dumps([index, count])}\n".encode())
                connection.settimeout(left)
                answer = json.loads(_line_of(connection))
            if answer is None:
                return
            if isinstance(answer, dict):
                raise (TimeoutError if answer["timeout"] else RuntimeError)(answer["text"])
            why = "something else answers there"
        except TimeoutError as error:  # says nothing new: the last attempt has hardly any time
            if "nnx.distributed" in str(error):
                raise
        except (ConnectionError, socket.gaierror, ValueError) as error:
            why = "something else answers there" if isinstance(error, ValueError) else error
        time.sleep(RETRY)
    raise TimeoutError(
        f"nnx.distributed.initialize: process {index} of {count} did not reach process 0 at {address} "
        f"within {timeout:g} s ({why}). Is process 0 running, is this its address, and can this machine "
        "reach it (firewall, proxy)? initialization_timeout waits longer."
    )


def _line_of(connection: socket.socket) -> bytes:
    """The first line received; ValueError unless one of our processes wrote it."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(4096)
        if not part:
            raise ConnectionResetError("the connection was closed")
        line += part
        if line[:1] not in b"[{n" or len(line) > 10_000:
            raise ValueError("something else answers there")
    return line


def _as_line(refusal: Exception | None) -> str:
    if refusal is None:
        return json.dumps(None)
    return json.dumps({"timeout": isinstance(refusal, TimeoutError), "text": str(refusal)})
