"""`diff`: how two models, states or graph definitions differ, path by path."""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten_with_path

from nnxlite._base.jax import Tracer, key_name
from nnxlite._base.outline import array_text, type_text
from nnxlite._base.text import Atom, can_be_read, is_array
from nnxlite._state._flat import content
from nnxlite.graph._compare import Difference, compare
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._plan import view
from nnxlite.graph._rebuild import Path

__all__ = ["Diff", "diff"]

MAX_LINES = 200
"""How many differences the text lists."""


class Diff(tuple[Difference, ...]):
    """The differences of two graphs: true if there are any, iterable, and readable as text.

    Attributes:
        entries: one `Difference` (path, kind, both sides) for each, in the order of the graph.

    >>> import nnxlite as nnx
    >>> one, two = nnx.Dict(rate=0.1), nnx.Dict(rate=0.2)
    >>> difference = nnx.diff(one, two)
    >>> bool(difference), [entry.kind for entry in difference]
    (True, ['setting'])
    """

    @property
    def entries(self) -> tuple[Difference, ...]:
        """The differences."""
        return tuple(self)

    def __repr__(self) -> str:
        lines = [str(entry) for entry in self[:MAX_LINES]]
        if len(self) > MAX_LINES:
            lines.append(f"... {len(self) - MAX_LINES:,} more differences")
        return "\n".join(lines) or "no differences"


def diff(before: tp.Any, after: tp.Any, /) -> Diff:
    """How two models, states, graph definitions or other pytrees differ, path by path.

    What was added, removed, retyped, reshaped or shared in another way; settings (static attributes) and
    metadata; dtypes; and for arrays of equal shape and dtype the largest difference of two elements.
    Values are compared exactly, and NaN equals NaN; traced, abstract and deleted arrays by
    shape and dtype alone, as are graph definitions, which have no values.

    Args:
        before, after: what to compare.

    Returns:
        A `Diff`: false if they are equal, otherwise with an entry for each.  Nothing is
        raised: an object that cannot be traversed is a difference of kind "unreadable".

    >>> import nnxlite as nnx
    >>> before = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> after = nnx.clone(before)
    >>> bool(nnx.diff(before, after))
    False
    >>> after.bias[1] = 0.5
    >>> after.dtype = "bfloat16"
    >>> nnx.diff(before, after)
    bias: values differ by up to 0.5 (at [1]: 0 became 0.5)
    dtype: None became 'bfloat16'
    >>> [(entry.path, entry.kind, entry.largest) for entry in nnx.diff(before, after)]
    [(('bias',), 'value', 0.5), (('dtype',), 'setting', None)]
    """
    (old_def, old), (new_def, new) = _definition_and_leaves(before), _definition_and_leaves(after)
    if old_def is None or new_def is None:
        one = old if old_def is None else type(before).__name__
        other = new if new_def is None else type(after).__name__
        return Diff((Difference((), "unreadable", one, other),))

    def at_leaf(path: Path, i: int, j: int) -> tp.Iterable[Difference]:
        return [] if old is None or new is None else _leaf_differences(path, old[i], new[j])

    return Diff(tuple(compare(old_def, new_def, at_leaf=at_leaf)))


def _definition_and_leaves(side: tp.Any) -> tuple[GraphDef[tp.Any] | None, tp.Any]:
    """A definition alone has None for leaves, and what cannot be traversed a text alone."""
    if isinstance(side, GraphDef):
        return side, None
    try:
        seen = view(side)
    except Exception as error:  # half-built objects, containers with hidden data
        return None, f"{type(error).__name__}: {error}"
    return seen.graphdef, seen.leaves


def _leaf_differences(path: Path, before: tp.Any, after: tp.Any) -> tp.Iterator[Difference]:
    old, new = content(before), content(after)
    if old is new:
        return
    (leaves, old_tree), (others, new_tree) = map(tree_flatten_with_path, (old, new))
    if old_tree != new_tree:
        yield Difference(path, "value", _side(old), _side(new))
        return
    for (keys, x), (_, y) in zip(leaves, others):
        below = (*path, *map(key_name, keys))
        if is_array(x) and is_array(y):
            yield from array_difference(below, x, y)
        elif is_array(x) or is_array(y) or type(x) is not type(y) or not _equal(x, y):
            one, other = _side(x), _side(y)
            yield Difference(below, "value", one, other, _distance(one, other) or None)  # 1, 1.0


def _side(value: tp.Any) -> tp.Any:
    return Atom(array_text(value)) if is_array(value) else value


def _equal(x: tp.Any, y: tp.Any) -> bool:
    try:
        return bool(x == y) or (x != x and y != y)
    except Exception:  # an `__eq__` of the user's own
        return False


def _distance(x: tp.Any, y: tp.Any) -> float | None:
    try:
        return float(abs(x - y))
    except Exception:  # text, dates, numbers that no float can hold
        return None


def array_difference(path: Path, x: tp.Any, y: tp.Any) -> tp.Iterator[Difference]:
    """The differences of two arrays: in shape, in dtype or its weak type, or in values."""
    if tuple(x.shape) != tuple(y.shape):
        yield Difference(path, "shape", array_text(x), array_text(y))
        return
    types = type_text(x), type_text(y)
    if types[0] != types[1]:
        yield Difference(path, "dtype", *types)
    numbers, others = numbers_of(x), numbers_of(y)
    if x.dtype != y.dtype or numbers is None or others is None:
        return
    if jnp.issubdtype(numbers.dtype, np.number) or numbers.dtype == bool:
        same = (numbers == others) | ((numbers != numbers) & (others != others))
        wide = np.complex128 if np.iscomplexobj(numbers) else np.float64
        with np.errstate(all="ignore"):
            delta = np.where(same, -1, np.abs(numbers.astype(wide) - others.astype(wide)))
    else:  # text, dates, objects
        same = np.vectorize(_equal, otypes=[bool])(numbers, others)
        delta = ~same
    if not same.all():
        index = np.unravel_index(np.argmax(delta), delta.shape)  # the first NaN, if there is one
        old, new = numbers.item(index), others.item(index)
        yield Difference(path, "value", old, new, _distance(old, new), tuple(map(int, index)))


def numbers_of(array: tp.Any) -> np.ndarray | None:
    """The elements of an array (of random keys: their data), or None if they cannot be read."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        if isinstance(array, Tracer) or array.is_deleted():
            return None
        with jax.ensure_compile_time_eval():  # in a trace it would be a tracer
            return np.asarray(jax.random.key_data(array))
    return np.asarray(array) if isinstance(array, np.ndarray) or can_be_read(array) else None
