"""`initialize` and `shutdown`: a front of `jax.distributed` that ends with a message."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import typing as tp
from pathlib import Path

import jax

from nnxlite._base.jax import has_devices, in_cluster
from nnxlite.distributed._rendezvous import meet, split_address

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""What `python -m nnxlite.distributed`, or another launcher, sets in the environment."""
TIMEOUT, JOINED = "NNXLITE_INITIALIZATION_TIMEOUT", "NNXLITE_JOINED"
"""Of our launcher: for how long processes wait, and the folder where each says that it has joined."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | tp.Sequence[int] | None = None,
    initialization_timeout: float | None = None,
    heartbeat_timeout_seconds: int = 100,
    shutdown_timeout_seconds: int = 300,
    **options: tp.Any,
) -> None:
    """Join the processes of this run, before anything uses a device.

    What is not passed is read from the environment: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`
    and `JAX_PROCESS_ID`, which `python -m nnxlite.distributed` sets. Without those, JAX looks for a
    cluster that it knows (Slurm, Open MPI, Kubernetes, Cloud TPU); without one, this process is alone,
    and nothing happens. On CPUs, collectives run over Gloo.

    A process that fails ends at once, and does not wait for the others as JAX would, so that
    their collectives fail soon, too. One that is killed or loses its connection is noticed after
    `heartbeat_timeout_seconds`, at the latest: JAX ends all others then, and names it.

    Args:
        coordinator_address: host and port of process 0, the same in all processes.
        num_processes: how many processes there are.
        process_id: the number of this one, from 0.
        local_device_ids: the devices of this machine that this process uses; by default all.
        initialization_timeout: for how many seconds processes wait for each other; by default 300.
        heartbeat_timeout_seconds: after how many seconds of silence a process counts as dead.
        shutdown_timeout_seconds: for how long a process waits for the others at its end.
        options: further ones of `jax.distributed.initialize`.

    Raises:
        TimeoutError: if not all processes came in time, in all that did; it says which are missing.
        RuntimeError: if they disagree about their number, two have the same one, JAX has used
            a device before, or this process has joined already.
        ValueError: if only a part of address, number and id is known.
        OSError: if process 0 cannot listen at the address.

    >>> import nnxlite as nnx
    >>> nnx.distributed.initialize()  # alone
    >>> jax.process_count()
    1
    """
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "nnx.distributed.initialize: this process has joined already; call it once."
        )
    address = coordinator_address or os.environ.get(ADDRESS)
    count = _number("num_processes", num_processes, COUNT)
    index = _number("process_id", process_id, INDEX)
    if initialization_timeout is None:
        initialization_timeout = float(os.environ.get(TIMEOUT, "300"))
    options.update(
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        shutdown_timeout_seconds=shutdown_timeout_seconds,
        local_device_ids=local_device_ids,
    )
    if not getattr(jax.config, "jax_cpu_collectives_implementation", "gloo"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if address is None and count is None and index is None:
        if in_cluster() or "cluster_detection_method" in options:
            jax.distributed.initialize(
                initialization_timeout=round(initialization_timeout), **options
            )
            _end_soon_after_an_error()
        return
    if address is None or count is None or index is None:
        known = {"coordinator_address": address, "num_processes": count, "process_id": index}
        raise ValueError(
            "nnx.distributed.initialize needs all of coordinator_address, num_processes and process_id, "
            f"or none, and has {known}. Pass them, or set {ADDRESS}, {COUNT} and {INDEX}."
        )
    if count < 1 or not 0 <= index < count:
        raise ValueError(
            f"nnx.distributed.initialize: process_id is {index}, and num_processes {count}; process "
            "ids go from 0 to num_processes - 1."
        )
    host, port = split_address(address)
    _refuse_late_call()
    begin = time.monotonic()
    meet(address, count, index, initialization_timeout)
    left = initialization_timeout - (time.monotonic() - begin)
    if host in ("localhost", "127.0.0.1"):
        options.setdefault("coordinator_bind_address", f"127.0.0.1:{port}")
    jax.distributed.initialize(
        address,
        count,
        index,
        initialization_timeout=max(10, round(left)),
        cluster_detection_method=options.pop("cluster_detection_method", "deactivate"),
        **options,
    )
    if folder := os.environ.get(JOINED):
        Path(folder, str(index)).touch()
    _end_soon_after_an_error()


def _number(name: str, given: int | None, variable: str) -> int | None:
    text = os.environ.get(variable)
    if given is not None or text is None:
        return given
    if not text.isdecimal():
        raise ValueError(
            f"nnx.distributed.initialize: {variable}, which is {name}, has to be a number, and is "
            f"{text!r}."
        )
    return int(text)


def _refuse_late_call() -> None:
    """RuntimeError if JAX has its devices already: they cannot become a part of more."""
    if has_devices():
        raise RuntimeError(
            "nnx.distributed.initialize comes too late: JAX has used its devices already. Call it "
            "before anything makes an array or asks for devices, best as the first statement of the "
            "program."
        )


def _end_soon_after_an_error() -> None:
    """Have an exception that nothing catches end this process without waiting for the others."""
    shown, status = sys.excepthook, []

    def hook(kind: type[BaseException], error: BaseException, trace: tp.Any) -> None:
        shown(kind, error, trace)
        if jax.distributed.is_initialized():
            status.append(130 if issubclass(kind, KeyboardInterrupt) else 1)
            print(
                f"nnxlite.distributed: process {jax.process_index()} of {jax.process_count()} ends with "
                "this error and does not wait for the others. If it is an error of a connection or a "
                "collective (Gloo, NCCL), another process ended first, and its output says why.",
                file=sys.stderr,
            )

    def end() -> None:
        if status and jax.distributed.is_initialized():
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status[0])

    sys.excepthook = hook
    atexit.register(end)  # runs before JAX's, which would wait


def shutdown() -> None:
    """Leave the processes of this run; waits for the others to do so, too.

    At the end of a program that succeeds this happens by itself. Alone, it does nothing.

    >>> import nnxlite as nnx
    >>> nnx.distributed.shutdown()
    """
    jax.distributed.shutdown()
