"""Programs written once and run with both libraries, and what of their results is compared.

A program is a function of the library, or one line of text: `Lines` has lines that are run alone, each
with names of its own, and compares what they return and leave behind, or the class of what they raise.
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
MODES = {"updates": {}, "plain": PLAIN, "tree": TREE}
SETTINGS = {"hijax", "ref", "eager_sharding", "mesh"}
"""Metadata that either library keeps for itself."""
X = np.arange(6.0, dtype=np.float32).reshape(3, 2)
newer = pytest.mark.skipif(OLDER, reason="needs flax 0.12.12")

Scope = tp.Callable[[tp.Any], dict[str, tp.Any]]


class Lines:
    """Programs of one line, by group: the names that a line may use, and the lines.

    A group that is run in several modes has `mode` among its names, the settings of `graph` and
    `graph_updates`. A line that ends in `# newer` needs what Flax has since 0.12.12.
    """

    def __init__(self) -> None:
        self.params: list[tp.Any] = []

    def __call__(self, group: str, scope: Scope, text: str, *modes: str) -> None:
        """Add a group."""
        for line in text.strip().splitlines():
            marks = [newer] if line.endswith("# newer") else []
            for mode in modes or ("updates",):
                label = f"{group}: {line.strip()}" + (f" [{mode}]" if modes else "")
                self.params.append(pytest.param(scope, line.strip(), mode, id=label, marks=marks))


class Programs:
    """Programs that are functions of a library, some of them in several modes."""

    def __init__(self) -> None:
        self.found: list[tp.Any] = []

    def __call__(self, *modes: str) -> tp.Any:
        """Collect a program, once or once for each of the named modes."""

        def add(fun: tp.Any) -> tp.Any:
            for mode in modes:
                run = functools.partial(fun, mode=MODES[mode])
                self.found.append(pytest.param(run, id=f"{fun.__name__}-{mode}"))
            if not modes:
                self.found.append(pytest.param(fun, id=fun.__name__))
            return fun

        return add


def outcome(lib: tp.Any, scope: Scope, line: str, mode: str = "updates") -> tp.Any:
    """What a line gives, with what it leaves of its names, or the builtin exception it raises."""
    names = scope(lib)
    everything = {"lib": lib, "jax": jax, "jnp": jnp, "np": np, "mode": MODES[mode], **names}
    try:
        code = compile(line, "<line>", "eval")
    except SyntaxError:
        code = compile(line, "<line>", "exec")
    found = attempt(lambda: eval(code, everything))
    if isinstance(found, tuple) and found[:1] == ("raised",):
        return found
    return plain(lib, found), plain(lib, {k: v for k, v in names.items() if is_data(lib, v)})


def is_data(lib: tp.Any, x: tp.Any) -> bool:
    return isinstance(x, (lib.Pytree, lib.Variable, lib.State, dict, list, jax.Array))


def agree(scope: Scope, line: str, mode: str) -> None:
    """A line gives the same with both libraries."""
    assert_same(outcome(nnx, scope, line, mode), outcome(ref, scope, line, mode))


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

    class Vector(Counted):
        def __init__(self, w=(1.0, 2.0, 3.0), c=0.0):
            super().__init__(w, c)

    class Pair(lib.Module):
        def __init__(self, w=(1.0, 2.0, 3.0)):
            self.a = lib.Param(jnp.asarray(w))
            self.b = lib.List([self.a, lib.BatchStat(jnp.zeros(3))])

    return types.SimpleNamespace(Counted=Counted, Vector=Vector, Pair=Pair)


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
    except NameError:  # a mistake of the program
        raise
    except Exception as error:
        return "raised", builtin_class(error)


def plain(lib: tp.Any, x: tp.Any) -> tp.Any:
    """A result in a form that both libraries share."""
    again = functools.partial(plain, lib)
    if isinstance(x, lib.Variable):
        metadata = {k: again(v) for k, v in x.get_metadata().items() if k not in SETTINGS}
        return type(x).__name__, again(x.get_raw_value()), metadata
    if isinstance(x, lib.FlatState):
        return ["flat", *[(path, again(leaf)) for path, leaf in x]]
    if isinstance(x, lib.State):
        return {"state": {k: again(v) for k, v in x.items()}}
    if isinstance(x, lib.Pytree):
        return {type(x).__name__: again(lib.state(x, graph=True))}
    if isinstance(x, lib.NodeStates):
        return ["node", *[again(s) for s in x.states], x.metadata]
    if isinstance(x, dict):
        return {k: again(v) for k, v in x.items()}
    if isinstance(x, (tuple, list)):
        return [again(v) for v in x]
    if isinstance(x, jax.ShapeDtypeStruct):
        return "shape", x.shape, str(x.dtype)
    if nnx.is_array_ref(x):
        return "ref", again(x[...])
    if isinstance(x, (jax.Array, np.ndarray)):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return "array", str(np.asarray(x).dtype), x.shape, np.asarray(x)
    if isinstance(x, type):
        return x.__name__
    return "a function" if callable(x) else x


def assert_same(a: tp.Any, b: tp.Any) -> None:
    """Two results in the form of `plain` are equal, arrays up to rounding."""
    if isinstance(a, np.ndarray):
        if a.dtype.kind != "V":
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b), (a, b)
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
