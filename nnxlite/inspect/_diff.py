"""`diff`: how two models, states or graph definitions differ, path by path."""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.jax import Tracer, key_name
from nnxlite._base.outline import array_text
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
    sides: list[tuple[GraphDef[tp.Any], list[tp.Any] | None]] = []
    problems: list[str | None] = []
    for side in (before, after):
        try:
            sides.append(_definition_and_leaves(side))
            problems.append(None)
        except Exception as error:  # half-built objects, containers with hidden data
            problems.append(f"{type(error).__name__}: {error}")
    if len(sides) < 2:
        old, new = (p or type(side).__name__ for p, side in zip(problems, (before, after)))
        return Diff((Difference((), "unreadable", old, new),))
    (old_def, old), (new_def, new) = sides

    def at_leaf(path: Path, i: int, j: int) -> tp.Iterable[Difference]:
        return [] if old is None or new is None else _leaf_differences(path, old[i], new[j])

    return Diff(tuple(compare(old_def, new_def, at_leaf=at_leaf)))


def _definition_and_leaves(side: tp.Any) -> tuple[GraphDef[tp.Any], list[tp.Any] | None]:
    if isinstance(side, GraphDef):
        return side, None
    seen = view(side)
    return seen.graphdef, list(seen.leaves)


def _leaf_differences(path: Path, before: tp.Any, after: tp.Any) -> tp.Iterator[Difference]:
    old, new = content(before), content(after)
    if old is new:
        return
    if is_array(old) and is_array(new):
        yield from array_difference(path, old, new)
        return
    (old_leaves, old_tree), (new_leaves, new_tree) = map(jax.tree_util.tree_flatten, (old, new))
    if old_tree != new_tree or is_array(old) or is_array(new):
        yield Difference(path, "value", _side(old), _side(new))
        return
    names = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(old)]
    for keys, x, y in zip(names, old_leaves, new_leaves):
        below = (*path, *map(key_name, keys))
        if is_array(x) and is_array(y):
            yield from array_difference(below, x, y)
        elif is_array(x) or is_array(y) or type(x) is not type(y) or not _equal(x, y):
            yield _scalar_difference(below, x, y)


def _side(value: tp.Any) -> tp.Any:
    return Atom(array_text(value)) if is_array(value) else value


def _equal(x: tp.Any, y: tp.Any) -> bool:
    try:
        return bool(x == y) or (x != x and y != y)
    except Exception:  # an `__eq__` of the user's own
        return False


def _scalar_difference(path: Path, x: tp.Any, y: tp.Any) -> Difference:
    if isinstance(x, (int, float, complex)) and isinstance(y, (int, float, complex)):
        return Difference(path, "value", x, y, float(abs(x - y)))
    return Difference(path, "value", _side(x), _side(y))


def array_difference(path: Path, x: tp.Any, y: tp.Any) -> tp.Iterator[Difference]:
    """The difference of two arrays, if there is one: in shape, dtype or values."""
    if tuple(x.shape) != tuple(y.shape):
        yield Difference(path, "shape", array_text(x), array_text(y))
    elif x.dtype != y.dtype:
        yield Difference(path, "dtype", array_text(x), array_text(y))
    elif (numbers := numbers_of(x)) is not None and (others := numbers_of(y)) is not None:
        same = (numbers == others) | ((numbers != numbers) & (others != others))
        if same.all():
            return
        wide = np.complex128 if np.iscomplexobj(numbers) else np.float64
        with np.errstate(all="ignore"):
            delta = np.where(same, -1, np.abs(numbers.astype(wide) - others.astype(wide)))
        index = np.unravel_index(np.argmax(delta), delta.shape)  # the first NaN, if there is one
        old, new = numbers[index].item(), others[index].item()
        yield Difference(path, "value", old, new, float(abs(old - new)), tuple(map(int, index)))


def numbers_of(array: tp.Any) -> np.ndarray | None:
    """The elements of an array (of random keys: their data), or None if they cannot be read."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        if isinstance(array, Tracer) or array.is_deleted():
            return None
        return np.asarray(jax.random.key_data(array))
    return np.asarray(array) if can_be_read(array) else None
