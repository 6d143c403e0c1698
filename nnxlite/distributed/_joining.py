"""`initialize` and `shutdown`: `jax.distributed`, which also reads the environment and may be alone."""

from __future__ import annotations

import os
import typing as tp

import jax

from nnxlite._base.jax import in_cluster

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    **options: tp.Any,
) -> None:
    """Join the processes of this run, before anything uses a device.

    What is not passed is read from the environment: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`
    and `JAX_PROCESS_ID`. Without those, JAX looks for a cluster that it knows (Slurm, Open MPI,
    Kubernetes, Cloud TPU); without one, this process is alone, and nothing happens. On CPUs, collectives
    run over Gloo.

    Args:
        coordinator_address: host and port of process 0, the same in all processes.
        num_processes: how many processes there are.
        process_id: the number of this one, from 0.
        options: those of `jax.distributed.initialize`: `local_device_ids`, `initialization_timeout`,
            `heartbeat_timeout_seconds`, `shutdown_timeout_seconds` and so on.

    Raises:
        RuntimeError: if JAX has used a device before, or this process has joined already.
        ValueError: if only a part of address, number and id is known.

    >>> import nnxlite as nnx
    >>> nnx.distributed.initialize()  # alone
    >>> jax.process_count()
    1
    """
    if not getattr(jax.config, "jax_cpu_collectives_implementation", "gloo"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    given = {
        "coordinator_address": coordinator_address or os.environ.get(ADDRESS),
        "num_processes": _number(num_processes, COUNT),
        "process_id": _number(process_id, INDEX),
    }
    if all(value is None for value in given.values()):
        if in_cluster() or "cluster_detection_method" in options:
            jax.distributed.initialize(**options)
        return
    if None in given.values():
        raise ValueError(
            "nnx.distributed.initialize needs all of coordinator_address, num_processes and process_id, "
            f"or none, and has {given}. Pass them, or set {ADDRESS}, {COUNT} and {INDEX}."
        )
    options.setdefault("cluster_detection_method", "deactivate")
    jax.distributed.initialize(**given, **options)


def _number(given: int | None, variable: str) -> int | None:
    text = os.environ.get(variable)
    if given is not None or text is None:
        return given
    if not text.isdecimal():
        raise ValueError(
            f"nnx.distributed.initialize: {variable} has to be a number, and is {text!r}."
        )
    return int(text)


def shutdown() -> None:
    """Leave the processes of this run; waits for the others to do so, too.

    At the end of a program that succeeds this happens by itself. Alone, it does nothing.

    >>> import nnxlite as nnx
    >>> nnx.distributed.shutdown()
    """
    jax.distributed.shutdown()
