"""What a program needs, twice: on the library's objects, and on those of the slow model.

`Real` calls the library.  `Slow` does the same to `tests.laws.objects` in plain Python, with NumPy
arrays: a transform runs its function in place, and what fails is undone from a copy.  What neither
world should do raises `Refused` in `Slow`, and an error of the library or of JAX in `Real`.

All arithmetic is exact in float32, so values are compared exactly.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx
from tests.laws import model, objects
from tests.laws.model import pick, references

Call = tp.Callable[..., tp.Any]


class Refused(Exception):
    """The slow model does not allow this."""


class Broken(Exception):
    """What a failing program raises; it passes through `levels` calls."""

    def __init__(self, levels: int) -> None:
        super().__init__("on purpose")
        self.levels = levels


def variables(here: tp.Any) -> list[tp.Any]:
    """The Variables with an array as value."""
    return [x for x in references(here) if model.is_variable(x) and has_array(x)]


def has_array(variable: tp.Any) -> bool:
    return hasattr(variable.get_raw_value(), "dtype")


def is_float(value: tp.Any) -> bool:
    return value.dtype == np.float32


def values_in(here: tp.Any) -> list[tp.Any]:
    """Every array of a graph, those inside the values of Variables included."""
    held = [x.get_raw_value() if model.is_variable(x) else x for _, x in model.leaves(here)]
    return [x for x in jax.tree.leaves(held, is_leaf=lambda x: x is None) if hasattr(x, "dtype")]


def arithmetic(x: tp.Any, number: int) -> tp.Any:
    """Another value: modulo 16, so that numbers stay small and exact."""
    if objects.is_key(x):
        return jax.random.fold_in(x, number)
    if not is_float(x):
        return (x + 1) % 16
    return pick([lambda x: 2 * x + 1, lambda x: 3 - x, lambda x: 3 * x], number)(x) % 16


def on_read(variable: tp.Any, value: tp.Any) -> tp.Any:
    """A hook of Variables, linear like all arithmetic here."""
    return 3 - value


def on_write(variable: tp.Any, value: tp.Any) -> tp.Any:
    """The same for what is written."""
    return (value + 5) % 16


class World(threading.local):
    """What programs use; `here` is always what a function got as its arguments, as a tuple.

    Attributes:
        outer: the arguments of the calls that are running in this thread, as seen from outside.
        depth: how many axes of every array are mapped by the calls that are running, and visible.
    """

    depth = 0

    def __init__(self) -> None:
        self.outer: list[tp.Any] = []


# The library --------------------------------------------------------------------------------------


def copied(a: tp.Any) -> tp.Any:
    """Another array; where it has a place, one that has none."""
    if isinstance(a, jax.core.Tracer):
        return jnp.array(a, copy=True)
    if objects.is_key(a):
        return jax.random.wrap_key_data(np.array(jax.random.key_data(a)))
    return jnp.array(np.array(a))


class Real(World):
    def new(self, name: str) -> tp.Any:
        if name == "Stream":
            return nnx.RngStream(7, tag="noise")
        return objects.REAL[getattr(objects, name)]()

    def variable(self, name: str, value: tp.Any, **metadata: tp.Any) -> nnx.Variable:
        return objects.REAL[getattr(objects, name)](value, **metadata)

    def full(self, shape: tuple[int, ...], number: int) -> tp.Any:
        return jnp.full(shape, number, jnp.int32 if number % 2 else jnp.float32)

    def computed(self, value: tp.Any, number: int) -> tp.Any:
        return arithmetic(value, number)

    def copy(self, value: tp.Any) -> tp.Any:
        return value

    def draw(self, stream: nnx.RngStream) -> tp.Any:
        return stream()

    def fork(self, stream: nnx.RngStream) -> nnx.RngStream:
        return stream.fork()

    def own(self, here: tp.Any) -> None:
        """Give every Variable an array of its own on no certain device, to be donated or placed."""
        for x in references(here):
            if model.is_variable(x):
                x.set_raw_value(jax.tree.map(copied, x.get_raw_value()))

    def clone(self, x: tp.Any) -> tp.Any:
        return nnx.clone(x)

    def merged(self, x: tp.Any, number: int) -> tp.Any:
        return nnx.merge(*nnx.split(x, nnx.Param, nnx.BatchStat, ...), copy=bool(number % 2))

    def update(self, x: tp.Any, number: int) -> None:
        state = nnx.state(x, pick([nnx.Param, nnx.BatchStat, nnx.Variable], number))
        nnx.update(x, jax.tree.map(lambda a: arithmetic(a, number), state))

    def pop(self, x: tp.Any, name: str) -> list[tp.Any]:
        return [v for _, v in nnx.to_flat_state(nnx.pop(x, objects.REAL[getattr(objects, name)]))]

    def sow(self, x: tp.Any, name: str, value: tp.Any) -> None:
        x.sow(nnx.Intermediate, name, value)

    def mode(self, x: tp.Any, flag: bool) -> None:
        x.set_attributes(flag=flag, raise_if_not_found=False)


# The slow model -----------------------------------------------------------------------------------


class Slow(World):
    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    def new(self, name: str) -> tp.Any:
        if name == "Stream":
            keys = jax.numpy.broadcast_to(jax.random.key(7), (2,) * self.depth)
            return objects.Stream(keys, tag="noise")
        return getattr(objects, name)()

    def variable(self, name: str, value: tp.Any, **metadata: tp.Any) -> objects.Cell:
        return getattr(objects, name)(value, **metadata)

    def full(self, shape: tuple[int, ...], number: int) -> tp.Any:
        shape = (2,) * self.depth + shape
        return objects.frozen(np.full(shape, number, np.int32 if number % 2 else np.float32))

    def computed(self, value: tp.Any, number: int) -> tp.Any:
        if objects.is_key(value):
            return self.folded(value, objects.frozen(np.full(value.shape, number, np.uint32)))
        return objects.frozen(arithmetic(value, number))

    def folded(self, keys: tp.Any, numbers: tp.Any) -> tp.Any:
        """Other keys, each made from one and its number."""
        if not keys.ndim == numbers.ndim == self.depth:
            raise Refused
        f = jax.random.fold_in
        for _ in range(self.depth):
            f = jax.vmap(f)
        return f(keys, numbers)

    def draw(self, stream: objects.Stream) -> tp.Any:
        count = stream.count.get_value()
        key = self.folded(stream.key.get_value(), count)
        stream.count.set_value(objects.frozen(count + np.uint32(1)))
        return key

    def fork(self, stream: objects.Stream) -> objects.Stream:
        return objects.Stream(self.draw(stream), tag=stream.tag)

    def copy(self, value: tp.Any) -> tp.Any:
        """The same value as another array: an array that stays the same one was not written."""
        return objects.frozen(value)

    def own(self, here: tp.Any) -> None:
        for x in references(here):
            if model.is_variable(x):
                x.value = jax.tree.map(self.copy, x.value)

    def clone(self, x: tp.Any) -> tp.Any:
        return model.copied(x)

    def merged(self, x: tp.Any, number: int) -> tp.Any:
        """Without a copy, new objects around the same Variables."""
        return model.copied(x, variable=None if number % 2 else lambda v: v)

    def update(self, x: tp.Any, number: int) -> None:
        kind = pick([objects.Param, objects.BatchStat, objects.Cell], number)
        found = [leaf for _, leaf in model.leaves(x) if isinstance(leaf, kind)]
        new = [jax.tree.map(lambda a: self.computed(a, number), leaf.value) for leaf in found]
        for leaf, value in zip(found, new, strict=True):
            leaf.value = value

    def pop(self, x: tp.Any, name: str) -> list[tp.Any]:
        kind = getattr(objects, name)
        found = [leaf for _, leaf in model.popped(x, kind)]
        if any(isinstance(v, kind) for t in model.owners(x) if isinstance(t, tuple) for v in t):
            raise Refused
        model.without(x, kind)
        return found

    def sow(self, x: tp.Any, name: str, value: tp.Any) -> None:
        recorded = vars(x).get(name)
        if name not in vars(x):
            setattr(x, name, objects.Intermediate((value,)))
        elif not isinstance(recorded, objects.Intermediate):
            raise ValueError("sow under the name of something else")
        else:
            recorded.value = (*recorded.value, value)

    def mode(self, x: tp.Any, flag: bool) -> None:
        for owner in model.owners(x):
            if model.is_object(owner) and "flag" in vars(owner):
                owner._nnx_assign("flag", flag)


def snapshot(here: tp.Any) -> Call:
    """A function that puts everything back as it is now."""
    undo: list[Call] = []

    def put_back(target: dict, before: dict) -> None:
        target.clear()
        target.update(before)

    for x in references(here):
        undo.append(functools.partial(put_back, vars(x), dict(vars(x))))
        if model.is_object(x):
            undo.append(functools.partial(put_back, x._nnx_status, dict(x._nnx_status)))
    for x in model.owners(here):
        if type(x) is dict:
            undo.append(functools.partial(put_back, x, dict(x)))
        elif type(x) is list:
            undo.append(functools.partial(x.__setitem__, slice(None), list(x)))
    return lambda: [step() for step in undo]


@contextlib.contextmanager
def undone_on_failure(here: tp.Any) -> tp.Iterator[None]:
    undo = snapshot(here)
    try:
        yield
    except BaseException:
        undo()
        raise


def form(here: tp.Any) -> tp.Any:
    """The structure of a graph with shapes and dtypes, without values."""

    def shape(value: tp.Any) -> tp.Any:
        parts, treedef = jax.tree.flatten(value)
        return treedef, tuple((x.dtype, x.shape) for x in parts)

    return model.canonical(here, shape)
