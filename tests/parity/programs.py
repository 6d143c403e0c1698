"""Programs written once and run with both libraries, and what of their results is compared.

A program is a function of the library, or one line of text: `Lines` has lines that are run alone, each
with names of its own, and compares what they return and leave behind, or the class of what they raise.
"""

import builtins
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.fuzz.observe import Values, difference
from tests.parity.layers import OLDER, ref

import nnxlite as nnx  # isort: skip

TREE = {"graph": False}
PLAIN = {"graph_updates": False}
MODES = {"updates": {}, "plain": PLAIN, "tree": TREE}
newer = pytest.mark.skipif(OLDER, reason="needs flax 0.12.12")


class Lines:
    """Programs of one line, by group: the names that a line may use, and the lines.

    A group that is run in several modes has `mode` among its names, the settings of `graph` and
    `graph_updates`. A line that ends in `# newer` needs what Flax has since 0.12.12.
    """

    def __init__(self):
        self.params = []

    def __call__(self, group, scope, text, *modes):
        for line in text.strip().splitlines():
            marks = [newer] if line.endswith("# newer") else []
            for mode in modes or ("updates",):
                label = f"{group}: {line.strip()}" + (f" [{mode}]" if modes else "")
                self.params.append(pytest.param(scope, line.strip(), mode, id=label, marks=marks))

    def test(self, **how):
        """The test of the lines that are there; options are those of `compare`."""

        @pytest.mark.parametrize("scope, line, mode", self.params)
        def test_line(scope, line, mode):
            agree(scope, line, mode, **how)

        return test_line


class Programs:
    """Functions of a library, each run once, or once for each of the named modes."""

    def __init__(self):
        self.params = []

    def __call__(self, *modes):
        def add(fun):
            for mode in modes:
                run = functools.partial(fun, mode=MODES[mode])
                self.params.append(pytest.param(run, id=f"{fun.__name__}-{mode}"))
            if not modes:
                self.params.append(pytest.param(fun, id=fun.__name__))

        return add

    def test(self):
        @pytest.mark.parametrize("run", self.params)
        def test_program(run):
            compare(run)

        return test_program


def result(lib, scope, line, mode="updates"):
    """What a line gives, with what it leaves of its names; it may be a statement."""
    names = scope(lib)
    everything = {"lib": lib, "jax": jax, "jnp": jnp, "np": np, "mode": MODES[mode], **names}
    try:
        code = compile(line, "<line>", "eval")
    except SyntaxError:
        code = compile(line, "<line>", "exec")
    data = (lib.Pytree, lib.Variable, lib.State, dict, list, jax.Array)
    found = eval(code, everything)
    return found, {k: v for k, v in names.items() if isinstance(v, data)}


def agree(scope, line, mode, **how):
    """A line gives the same with both libraries, or raises the same builtin exception."""
    compare(lambda lib: attempt(lambda: result(lib, scope, line, mode)), **how)


@functools.cache
def models(lib):
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


def attempt(call):
    try:
        return call()
    except NameError:  # a mistake of the program
        raise
    except Exception as error:
        builtin = [c for c in type(error).__mro__ if c.__module__ == builtins.__name__]
        return "raised", builtin[0].__name__


class Plain(Values):
    """Describes an object by its state."""

    def object(self, x):
        return type(x).__name__, self(self.lib.state(x, graph=True))

    def describe(self, x):
        if isinstance(x, self.lib.NodeStates):
            return "node", [self(s) for s in x.states], repr(x.metadata)
        if nnx.is_array_ref(x):
            return "ref", self(x[...])
        if callable(x) and not isinstance(x, (type, self.lib.Pytree, self.lib.Variable)):
            return "a function"
        if isinstance(x, (dict, self.lib.State)):  # in order
            return type(x).__name__, [(repr(k), self(v)) for k, v in x.items()]
        return super().describe(x)


def compare(run, observer=Plain, close=None):
    ours, theirs = (observer(lib)(run(lib)) for lib in (nnx, ref))
    different = difference(ours, theirs, close=close)
    assert different is None, different
