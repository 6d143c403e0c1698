"""What a program made, as plain Python data: values, states, sharing, key paths, metadata."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

# Metadata that either library keeps for itself.
SETTINGS = {"hijax", "ref", "eager_sharding", "mesh"}
HIDDEN = re.compile(r"[fz]\d+\w*|rule_\w+|ctx|__\w+__")  # functions and contexts
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
HALF = {"rtol": 2e-2, "atol": 2e-5}  # of bfloat16 and float16
ANYTHING = "anything"
"""Stands for what is not compared."""


class Observer:
    """Describes values; objects and Variables are numbered in the order in which they are met."""

    def __init__(self, lib):
        self.lib = lib
        self.numbers: dict[int, int] = {}
        self.alive = []
        self.depth = 0

    def names(self, env, hidden):
        return {
            name: self(value)
            for name, value in env.items()
            if name not in hidden and not HIDDEN.fullmatch(name)
        }

    def __call__(self, x):
        if self.depth > 60:
            return ("deep",)
        self.depth += 1
        try:
            return self.describe(x)
        finally:
            self.depth -= 1

    def describe(self, x):
        lib = self.lib
        if isinstance(x, (lib.Variable, lib.Pytree)):
            if id(x) in self.numbers:
                return ("same", self.numbers[id(x)])
            self.numbers[id(x)] = len(self.numbers)
            self.alive.append(x)
            return self.variable(x) if isinstance(x, lib.Variable) else self.object(x)
        if isinstance(x, lib.State):
            return ("State", {_key(k): self(v) for k, v in x.raw_mapping.items()})
        if isinstance(x, lib.FlatState):
            return ("FlatState", [(repr(p), self(v)) for p, v in x])
        if isinstance(x, lib.GraphDef):
            return ("GraphDef",)
        if isinstance(x, (bool, int, float, complex, str, type(None), bytes)):
            return x
        if isinstance(x, Tracer):
            return ("tracer",)
        if isinstance(x, (jax.Array, np.ndarray, np.generic)):
            return self.array(x)
        if isinstance(x, jax.ShapeDtypeStruct):
            return ("abstract", x.shape, str(x.dtype), x.weak_type)
        if isinstance(x, dict):
            return (type(x).__name__, {_key(k): self(v) for k, v in x.items()})
        if isinstance(x, (list, tuple)):
            return (type(x).__name__, [self(v) for v in x])
        if isinstance(x, (set, frozenset)):
            return ("set", sorted(map(repr, x)))
        if isinstance(x, type):
            return ("class", x.__name__)
        if type(x).__name__ == "Statistics":
            return {f.name: self(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return ("some",)

    def variable(self, x):
        raw = x.get_raw_value()
        is_ref = "Ref" in type(raw).__name__ or "AbstractRef" in str(getattr(raw, "aval", ""))
        is_read = is_ref and hasattr(raw, "__getitem__")  # of a shape there is nothing to read
        try:
            value = self(raw[...] if is_read else raw)
        except RuntimeError:  # the array behind a reference was donated
            value = ("deleted",)
        metadata = {k: self(v) for k, v in sorted(x.get_metadata().items()) if k not in SETTINGS}
        return ("Variable", type(x).__name__, value, metadata, is_ref)

    def array(self, x):
        return array(x)

    def object(self, x):
        lib = self.lib
        if isinstance(x, lib.List):
            try:
                parts = {str(i): self(v) for i, v in enumerate(x)}
            except AttributeError:  # a List that the reference left without its items
                return ("Object", "List", "without its items")
        else:
            parts = {k: self(v) for k, v in sorted(vars(x).items()) if not k.startswith("_")}
        return ("Object", type(x).__name__, parts)


class Values(Observer):
    """Describes arrays without weak types and places."""

    def array(self, x):
        found = super().array(x)
        return (*found[:3], *found[5:]) if found[0] == "array" else found


def array(x):
    """Dtype, shape, weak type, placement and values of an array, of NumPy or of JAX."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return ("keys", str(x.dtype), x.shape, np.asarray(jax.random.key_data(x)))
    if isinstance(x, jax.Array) and x.is_deleted():
        return ("deleted", str(x.dtype), x.shape)
    weak = bool(getattr(x, "weak_type", False))
    return ("array", str(x.dtype), x.shape, weak, placement(x), np.array(x))


def placement(x):
    """Which device has which part of an array; a replicated array counts as one on one device."""
    if not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1:
        return None
    if x.sharding.is_fully_replicated:
        return None
    parts = x.sharding.devices_indices_map(x.shape)
    return sorted((d.id, str(index)) for d, index in parts.items())


def _key(key):
    return key if isinstance(key, (str, int)) else repr(key)


def difference(ours, theirs, where=(), close=None):
    """The first place in which two observations differ, with both sides; None where there is none."""
    close = close or is_close
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return None if close(ours, theirs) else (where, ours.tolist(), theirs.tolist())
    if ours is ANYTHING or theirs is ANYTHING:
        return None
    if type(ours) is not type(theirs):
        return where, ours, theirs
    if isinstance(ours, dict):
        if set(ours) != set(theirs):
            return where, sorted(map(str, ours)), sorted(map(str, theirs))
        parts = ((k, ours[k], theirs[k]) for k in ours)
    elif isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return where, ours, theirs
        parts = ((i, a, b) for i, (a, b) in enumerate(zip(ours, theirs)))
    elif isinstance(ours, float):
        return None if close(np.asarray(ours), np.asarray(theirs)) else (where, ours, theirs)
    else:
        return None if ours == theirs else (where, ours, theirs)
    return next((d for key, a, b in parts if (d := difference(a, b, (*where, key), close))), None)


def at(observation, where):
    for key in where:
        try:
            observation = observation[key]
        except (KeyError, IndexError, TypeError):
            return None
    return observation


def is_close(a, b):
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype == jax.dtypes.float0:  # has no values
        return True
    if a.dtype.kind in "biuSU":
        return bool(np.array_equal(a, b))
    if a.dtype.kind == "O":
        return repr(a) == repr(b)
    tolerance = HALF if a.itemsize == 2 else TOLERANCE
    a, b = (x.astype(np.complex64 if x.dtype.kind == "c" else np.float64) for x in (a, b))
    return bool(np.allclose(a, b, equal_nan=True, **tolerance))
