"""Random object graphs for the laws: everything that an engine may meet, in small."""

from __future__ import annotations

import dataclasses
import enum
import functools
import typing as tp
from collections import abc

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import nnxlite as nnx


class Node(nnx.Module):
    """A module with any attributes."""


class Twin(nnx.Module):
    """Another class of the same form."""


class Loose(nnx.Object):
    """An object whose attributes are not checked."""


class Count(nnx.Variable):
    """A kind of Variable that users define."""


class Pair(tp.NamedTuple):
    first: tp.Any
    second: tp.Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    """A pytree node of the user's own, with a static part."""

    content: tp.Any
    label: str = dataclasses.field(default="box", metadata={"static": True})


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Size:
    width: int
    height: int = 1


def double(x):
    return 2 * x


def adder(n):
    return lambda x: x + n


NAMES = ("a", "b", "c", "w", "kernel", "_hidden", "é")
KINDS = (nnx.Param, nnx.BatchStat, Count, nnx.Variable)
ARRAYS = (
    *(jnp.full(shape, i, jnp.float32) for i, shape in enumerate([(), (2,), (2, 3), (0,)])),
    jnp.arange(3),
    np.arange(4),
    jnp.array(True),
    jax.random.key(0),
)

plain_statics = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf"), 0j, -0j, 1 + 0j, 300]),
    st.sampled_from(["", "a", "SAME", b"bytes", ..., int, float, jnp.float32, np.dtype("int8")]),
    st.sampled_from([double, jax.nn.relu, jnp.tanh, len, Colour.RED, Colour.BLUE]),
    st.sampled_from([Size(1), Size(1, 2), np.float32(1), jax.lax.Precision.HIGHEST]),
    st.builds(adder, st.integers(0, 2)),
    st.builds(functools.partial, st.just(double), st.integers(0, 2)),
    st.frozensets(st.integers(0, 2), max_size=2),
)
statics = st.recursive(
    plain_statics,
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
        st.builds(Pair, inner, inner),
        st.sets(st.integers(0, 3), max_size=2),
    ),
    max_leaves=4,
)
"""Static values of every kind."""

metadata = st.dictionaries(
    st.sampled_from(["tag", "axes", "note"]),
    st.one_of(st.integers(0, 2), st.sampled_from(["x", ("data", None), None])),
    max_size=2,
)
arrays = st.sampled_from(ARRAYS)


@st.composite
def variables(draw) -> nnx.Variable:
    return draw(st.sampled_from(KINDS))(draw(arrays), **draw(metadata))


class Pool:
    """The references made so far: what may be shared, and closed into cycles."""

    def __init__(self) -> None:
        self.known: list[tp.Any] = []

    def add(self, value: tp.Any) -> tp.Any:
        self.known.append(value)
        return value


def fill(draw: tp.Any, node: tp.Any, pool: Pool, depth: int) -> None:
    """Give an object some attributes."""
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True)):
        setattr(node, name, draw(values(pool, depth)))


@st.composite
def references(draw, pool: Pool, depth: int) -> tp.Any:
    """An object or a Variable: a new one or, now and then, one that exists already."""
    if pool.known and draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(pool.known))
    if depth <= 0 or draw(st.integers(0, 2)) == 0:
        return pool.add(draw(variables()))
    kind = draw(st.sampled_from(["node", "twin", "loose", "list", "dict"]))
    if kind == "list":
        new = pool.add(nnx.List())
        for _ in range(draw(st.integers(0, 3))):
            new.append(draw(values(pool, depth - 1)))
    elif kind == "dict":
        new = pool.add(nnx.Dict())
        for name in draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True)):
            new[name] = draw(values(pool, depth - 1))
    else:
        new = pool.add({"node": Node, "twin": Twin, "loose": Loose}[kind]())
        fill(draw, new, pool, depth - 1)
    return new


@st.composite
def containers(draw, pool: Pool, depth: int) -> tp.Any:
    """A plain container that holds data at some depth."""
    inner = st.one_of(references(pool, depth - 1), arrays)
    if depth > 1:
        inner = st.one_of(inner, containers(pool, depth - 1))
    certain = draw(inner)
    rest = draw(st.lists(st.one_of(inner, statics), max_size=2))
    items = [*rest[:1], certain, *rest[1:]]
    kind = draw(st.sampled_from(["list", "tuple", "dict", "pair", "state", "box"]))
    if kind == "list":
        return items
    if kind == "tuple":
        return tuple(items)
    if kind == "pair":
        return Pair(items[0], items[-1]) if len(items) > 1 else Pair(certain, 1)
    if kind == "box":
        return Box(certain, draw(st.sampled_from(["box", "other"])))
    if kind == "state":
        # A State copies the mappings it is given, so none that may hold itself is put into one.
        held = draw(arrays) if isinstance(certain, abc.Mapping) else certain
        return nnx.State(dict(zip(NAMES, [held, draw(arrays)], strict=False)))
    keys = draw(st.permutations([*NAMES[:2], 3, 10]))
    return dict(zip(keys, items, strict=False))


def values(pool: Pool, depth: int) -> st.SearchStrategy[tp.Any]:
    """Anything an attribute may be given."""
    marked = st.one_of(st.builds(nnx.data, plain_statics), st.builds(nnx.static, statics))
    options = [references(pool, depth), arrays, statics, marked]
    if depth > 0:
        options.append(containers(pool, depth))
    return st.one_of(options)


@st.composite
def graphs(draw, depth: int = 3) -> tuple[tp.Any, Pool]:
    """A random root object, and everything in its graph that can be shared."""
    pool = Pool()
    root = pool.add(draw(st.sampled_from([Node, Twin, Loose]))())
    fill(draw, root, pool, depth)
    return root, pool


roots = graphs().map(lambda made: made[0])
"""Random root objects."""
