"""Meshes of the eight virtual devices, and the annotated layers that the tests put on them."""

from __future__ import annotations

import typing as tp

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

import nnxlite as nnx


def mesh_of(kind: AxisType = AxisType.Auto) -> Mesh:
    """Two by four devices, with the axes `data` and `model`."""
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


def names_of(value: tp.Any) -> tuple[tp.Any, ...] | None:
    """The axis names by which an array (or a Variable's) is sharded; None off any mesh."""
    sharding = getattr(value, "raw_value", value).sharding
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else None


def steps(key, shape, dtype=None, out_sharding=None):
    """An initializer that compiles nothing: the same small numbers each time."""
    numbers = np.arange(np.prod(shape), dtype=np.float32) % 7 - 3
    return jax.numpy.asarray(numbers.reshape(shape) / 10)


def linear(*names: tp.Any, rngs: tp.Any = None, **metadata: tp.Any) -> nnx.Linear:
    """A Linear of 8 by 16 features, annotated by the names of its kernel's axes."""
    return nnx.Linear(
        8,
        16,
        kernel_init=steps,
        bias_init=steps,
        kernel_metadata={"out_sharding": names, **metadata},
        bias_metadata={"out_sharding": names[-1:], **metadata},
        rngs=nnx.Rngs(0) if rngs is None else rngs,
    )
