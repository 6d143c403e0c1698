"""Meshes with automatic axes."""

from __future__ import annotations

import math
import typing as tp

import jax
from jax.sharding import AxisType, Mesh


def make_mesh(*, devices: tp.Sequence[tp.Any] | None = None, **axes: int) -> Mesh:
    """A mesh of devices whose axes are automatic: the compiler divides what a program computes.

    `jax.make_mesh` makes explicit axes by default, for programs that say how each result is divided.

    Args:
        devices: the devices; by default all there are, of all processes.
        axes: the size of each axis by its name, in order; one of them may be -1, for all devices that
            the others leave.

    Returns:
        A `jax.sharding.Mesh`.

    Raises:
        ValueError: for sizes that are not those of the devices.

    >>> import nnxlite as nnx, jax
    >>> mesh = nnx.make_mesh(data=-1, model=1)
    >>> mesh.axis_names, mesh.size == jax.device_count()
    (('data', 'model'), True)
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = dict(axes)
    given = math.prod(size for size in sizes.values() if size != -1)
    open_axes = [name for name, size in sizes.items() if size == -1]
    text = ", ".join(f"{name}={size}" for name, size in axes.items())
    if len(open_axes) == 1 and given > 0 and len(devices) % given == 0:
        sizes[open_axes[0]] = len(devices) // given
    if (
        not sizes
        or any(size < 1 for size in sizes.values())
        or math.prod(sizes.values()) != len(devices)
    ):
        raise ValueError(
            f"make_mesh: the axes {text or '()'} do not make a grid of {len(devices)} devices "
            f"({devices[0].platform}). The product of the sizes has to be that number; one size may be "
            "-1. For other devices give devices=, for virtual ones on a CPU set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8."
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)
