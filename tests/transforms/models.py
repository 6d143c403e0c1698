"""Small stateful models that the tests of transforms share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import nnxlite as nnx


class Counted(nnx.Module):
    """`w * x * count`, where every call counts."""

    def __init__(self):
        self.w = nnx.Param(jnp.array([1.0, 2.0]))
        self.count = nnx.BatchStat(jnp.array(3.0))

    def __call__(self, x):
        self.count[...] += 1
        return self.w * x * self.count


class Foo(nnx.Module):
    """Two parameters and a statistic."""

    def __init__(self, x=1.0, y=2.0):
        self.x = nnx.Param(jnp.array(x))
        self.y = nnx.Param(jnp.array(y))
        self.n = nnx.BatchStat(jnp.array(0.0))


class Tied(nnx.Module):
    """One parameter under two names, and a way back to the owner."""

    def __init__(self):
        self.a = nnx.Param(jnp.array([1.0, -2.0]))
        self.b = self.a
        self.child = nnx.Dict(owner=self, leaf=self.a)

    def __call__(self, x):
        return (jnp.sin(self.a) * self.b + self.child.leaf) * x


def values(tree):
    """Leaves of a pytree of Variables, objects and arrays as nested lists."""
    return [jnp.asarray(x).tolist() for x in jax.tree.leaves(tree)]


def snapshot(*objects):
    """What must not change in a failed call: definition and values."""
    return [
        (nnx.graphdef(x), [id(v.get_raw_value()) for _, v in nnx.to_flat_state(nnx.state(x))])
        for x in objects
    ]


def assert_close(a, b):
    """Two pytrees of the same structure with close leaves."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.allclose(x, y, rtol=1e-5, atol=1e-6), (x, y)
