"""Programs written once and run with both libraries, and what of their results is compared.

A program takes the library and returns what a user would look at. `Programs` collects them, once
or once for each mode (the settings of `graph` and `graph_updates`).
"""

from __future__ import annotations

import builtins
import functools
import types
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.layers import OLDER, ref

import nnxlite as nnx  # isort: skip

TREE = {"graph": False}
PLAIN = {"graph_updates": False}
PLAIN_MODES = {"plain": PLAIN, "tree": TREE, "both": {**TREE, **PLAIN}}
ALL_MODES = {"updates": {}, **PLAIN_MODES}
X = np.arange(6.0, dtype=np.float32).reshape(3, 2)


class Programs:
    """The programs of one test file."""

    def __init__(self) -> None:
        self.found: list[tp.Any] = []

    def __call__(self, *modes: str, newer: bool = False) -> tp.Any:
        """Collect a program, once or once for each of the named modes.

        newer: the program needs what Flax has since 0.12.12.
        """
        marks = [pytest.mark.skipif(OLDER, reason="needs flax 0.12.12")] if newer else []

        def add(fun: tp.Any) -> tp.Any:
            for mode in modes:
                run = functools.partial(fun, mode=ALL_MODES[mode])
                self.found.append(pytest.param(run, id=f"{fun.__name__}-{mode}", marks=marks))
            if not modes:
                self.found.append(pytest.param(fun, id=fun.__name__, marks=marks))
            return fun

        return add


@functools.cache
def models(lib: tp.Any) -> tp.Any:
    """The modules of the programs, made with one of the libraries."""

    class Counted(lib.Module):
        def __init__(self, w=2.0, c=0.0):
            self.w = lib.Param(jnp.asarray(w))
            self.c = lib.BatchStat(jnp.asarray(c))

        def __call__(self, x):
            self.c[...] += 1
            return self.w * x + self.c

        @staticmethod
        def make(w):
            return Counted(w)

    class Foo(lib.Module):
        def __init__(self, x=1.0, y=2.0):
            self.x = lib.Param(jnp.array(x))
            self.y = lib.Param(jnp.array(y))
            self.n = lib.BatchStat(jnp.array(0.0))

    class Vector(Counted):
        def __init__(self, w=(1.0, 2.0, 3.0), c=0.0):
            super().__init__(w, c)

    class Pair(lib.Module):
        def __init__(self, w=(1.0, 2.0, 3.0)):
            self.a = lib.Param(jnp.asarray(w))
            self.b = lib.List([self.a, lib.BatchStat(jnp.zeros(3))])

    class Cell(lib.Module):
        def __init__(self, value):
            self.value = lib.Param(jnp.asarray(value))
            self.next = lib.data(None)

    class Block(lib.Module):
        def __init__(self, rngs):
            self.linear = lib.Linear(2, 2, rngs=rngs)
            self.norm = lib.BatchNorm(2, rngs=rngs)
            self.drop = lib.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(jnp.tanh(self.norm(self.linear(x))))

    class Net(lib.Module):
        def __init__(self, rngs):
            self.layers = lib.List([lib.Linear(2, 2, rngs=rngs) for _ in range(2)])
            self.norm = lib.BatchNorm(2, rngs=rngs)
            self.drop = lib.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return self.drop(self.norm(x))

    return types.SimpleNamespace(**{k: v for k, v in locals().items() if k != "lib"})


def mesh_of(*shape: int, names: tuple[str, ...] = ("data",)) -> jax.sharding.Mesh:
    """A mesh of the first devices."""
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def builtin_class(error: BaseException) -> str:
    """The name of the builtin exception that an exception is."""
    names = [c.__name__ for c in type(error).__mro__ if c.__module__ == builtins.__name__]
    return names[0]


def attempt(call: tp.Callable[[], tp.Any]) -> tp.Any:
    """What a call returns, or the builtin exception it raises."""
    try:
        return call()
    except Exception as error:
        return "raised", builtin_class(error)


def plain(lib: tp.Any, x: tp.Any) -> tp.Any:
    """A result in a form that both libraries share."""
    if isinstance(x, lib.Variable):
        return type(x).__name__, plain(lib, x.get_raw_value())
    if isinstance(x, lib.State):
        return {"state": {k: plain(lib, v) for k, v in x.items()}}
    if isinstance(x, lib.Pytree):
        return {type(x).__name__: plain(lib, lib.state(x, graph=True))}
    if isinstance(x, lib.NodeStates):
        return ["node", *[plain(lib, s) for s in x.states], x.metadata]
    if isinstance(x, dict):
        return {k: plain(lib, v) for k, v in x.items()}
    if isinstance(x, (tuple, list)):
        return [plain(lib, v) for v in x]
    if isinstance(x, jax.ShapeDtypeStruct):
        return "shape", x.shape, str(x.dtype)
    if isinstance(x, (jax.Array, np.ndarray)):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return "array", str(np.asarray(x).dtype), x.shape, np.asarray(x)
    return x


def assert_same(a: tp.Any, b: tp.Any) -> None:
    """Two results in the form of `plain` are equal, arrays up to rounding."""
    if isinstance(a, np.ndarray):
        if a.dtype.kind != "V":
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), (a, b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for k in a:
            assert_same(a[k], b[k])
    else:
        assert a == b


def compare(run: tp.Callable[[tp.Any], tp.Any]) -> None:
    """Run a program with both libraries; both must return the same."""
    ours, theirs = plain(nnx, run(nnx)), plain(ref, run(ref))
    assert_same(ours, theirs)
