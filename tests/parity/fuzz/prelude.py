"""The classes and names that every random program may use, made with one of the libraries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

IMPORTED = {"functools": functools, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "P": P}


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


def names_of(nnx):
    class Box(nnx.Module):
        def __init__(self, **parts):
            for name, part in parts.items():
                setattr(self, name, part)

    class Plain(nnx.Pytree):
        __init__ = Box.__init__

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

    more = {"NamedSharding": NamedSharding, "mesh_of": mesh_of, "keystrs": keystrs, "fails": fails}
    more["TICKS"] = []  # each function notes here that its body runs, so that traces can be counted
    return {**locals(), **IMPORTED, **more, "__name__": "program"}
