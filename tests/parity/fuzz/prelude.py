"""The classes and names that every random program may use, as the text that a program begins with.

The text is run once for each library, with `nnx` bound to it.
"""

from __future__ import annotations

import types
import typing as tp

TEXT = """\
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

TICKS = []  # each function notes here that its body runs, so that traces can be counted


class Box(nnx.Module):
    def __init__(self, **parts):
        for name, part in parts.items():
            setattr(self, name, part)


class Plain(nnx.Pytree):
    def __init__(self, **parts):
        for name, part in parts.items():
            setattr(self, name, part)


class Count(nnx.Variable):
    pass


class Scale(nnx.Param):
    pass


class Affine(nnx.Module):
    def __init__(self, w, b):
        self.w = nnx.Param(w)
        self.b = Scale(b, tag="t")
        self.calls = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] = self.calls + 1
        return self.w * x + self.b


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.rngs = rngs
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return x * self.w + self.rngs.noise.uniform((2,))


class Recorder(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(w)

    def __call__(self, x):
        y = self.perturb("inner", self.w * x)
        self.sow(nnx.Intermediate, "seen", y)
        return y * 2.0


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(jnp.tanh(self.linear(x))))


class Settings:
    def __init__(self, gain, read=None):
        self.gain, self.read = gain, read

    def scale(self, x):
        return x * (self.gain if self.read is None else self.read())


def scaled(x, gain=1.0):
    return x * gain


def mesh_of(*shape, names=("d", "e")):
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names[: len(shape)], axis_types=auto)


def keystrs(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def fails(call):
    try:
        return "passed", call()
    except Exception as error:
        return "raised", type(error).__name__
"""


def names_of(lib: types.ModuleType) -> dict[str, tp.Any]:
    """The names of the prelude, made with a library."""
    names: dict[str, tp.Any] = {"nnx": lib, "__name__": "program"}
    exec(compile(TEXT, "<prelude>", "exec", dont_inherit=True), names)
    return names
