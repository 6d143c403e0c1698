"""Programs in flight on several CPU devices: a call waits before there are too many.

XLA runs the parts of a program, one for each device, on a pool of threads, and the parts meet in
collectives. JAX starts a program without waiting for the one before. On a few cores with many virtual
devices (`--xla_force_host_platform_device_count`) the parts of a few dozen programs then occupy the
pool, a part that the others wait for gets no thread, and XLA ends the process after 40 seconds. It
happens to loops that do not read their results, in plain JAX as well.

Whether a process can have such programs is decided when a function is traced: elsewhere nothing is
looked at in a call.
"""

from __future__ import annotations

import itertools
import typing as tp

import jax

from nnxlite._jax import Tracer

MOST_IN_FLIGHT = 4
"""How many programs are started on several CPU devices before one is waited for."""

_started = itertools.count(1)  # of the whole process, whose programs share the threads


def has_several_cpus() -> bool:
    """Whether this process has several CPU devices, real or virtual."""
    try:
        return jax.local_device_count("cpu") > 1
    except RuntimeError:  # no such backend
        return False


def wait_in_turn(outputs: tp.Any) -> None:
    """Wait for each fourth program whose outputs are on several CPU devices.

    Args:
        outputs: of the program that was just started.
    """
    for leaf in jax.tree_util.tree_leaves(outputs):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            devices = leaf.sharding.device_set
            if len(devices) > 1 and next(iter(devices)).platform == "cpu":
                if next(_started) % MOST_IN_FLIGHT == 0:
                    jax.block_until_ready(leaf)  # a program's outputs are ready together
            return
