"""`bucketed`: batches of any size through programs of a few sizes.

A compiled program has one batch size.  A server that gets batches of all sizes would compile one program
for each; here a batch is padded to the next of a few sizes, and the result is cut.  Padding and cutting
happen in NumPy: on the device they would be programs themselves, one for each size.
"""

from __future__ import annotations

import typing as tp

import jax
import numpy as np

from nnxlite._base.errors import short_type
from nnxlite._base.interning import LOCK
from nnxlite._base.jax import as_integer, as_integers
from nnxlite.objects._pytree import Pytree
from nnxlite.serving._export import Exported
from nnxlite.transforms._jit import jit
from nnxlite.transforms._wrapper import name_of


class Bucketed:
    """What `bucketed` returns: call it as the function, with batches of any size.

    Args:
        fun: the function that is called with batches of these sizes.
        name: of the function, for messages.
        sizes: the batch sizes, growing.
        axis: the axis of rows, in arguments and results.
        batched: the numbers of the arguments that have rows; None for all that are not objects.
        larger: whether batches larger than the largest size are cut in pieces, or refused.

    Attributes:
        sizes: the batch sizes, growing.
        calls: how many times each size ran.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> predict = nnx.bucketed(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), sizes=(1, 4))
    >>> predict
    bucketed(Linear, sizes=(1, 4))
    """

    def __init__(
        self,
        fun: tp.Callable[..., tp.Any],
        name: str,
        sizes: tuple[int, ...],
        axis: int,
        batched: tuple[int, ...] | None,
        larger: tp.Literal["split", "refuse"],
    ) -> None:
        self._fun = fun
        self.name = name
        self.sizes = sizes
        self.axis = axis
        self.batched = batched
        self.larger = larger
        self.calls = dict.fromkeys(sizes, 0)

    def __call__(self, *args: tp.Any) -> tp.Any:
        """The result for a batch, with NumPy arrays for leaves.

        Args:
            *args: the arguments of the function; those that have rows, the same number of them.

        Raises ValueError where they have not, for an empty batch, or for one that is too large.
        """
        rows, run = self._prepared(args)
        largest = self.sizes[-1]
        if rows > largest and self.larger == "refuse":
            raise ValueError(
                f"bucketed {self.name} takes at most {largest} rows (its sizes are {self.sizes}); got "
                f"{rows}. Raise sizes, or pass larger='split'."
            )
        results = []
        for start in range(0, rows, largest):
            count = min(largest, rows - start)
            size = next(size for size in self.sizes if size >= count)
            results.append(self._cut(run(start, count, size), size, count))
            with LOCK:  # servers call it from many threads
                self.calls[size] += 1
        if len(results) == 1:
            return results[0]
        return jax.tree.map(lambda *parts: np.concatenate(parts, axis=self.axis), *results)

    def warm_up(self, *args: tp.Any) -> None:
        """Compile all programs, so that no request has to wait for that.

        Args:
            *args: arguments as in a call, with at least one row.
        """
        _, run = self._prepared(args)
        for size in self.sizes:
            jax.block_until_ready(run(0, 1, size))

    def _prepared(
        self, args: tuple[tp.Any, ...]
    ) -> tuple[int, tp.Callable[[int, int, int], tp.Any]]:
        """How many rows arguments have, and a call with some of them, padded to a size."""
        numbers = [n for n, x in enumerate(args) if self._has_rows(n, x)]
        rows, leaves, treedef = self._rows([args[n] for n in numbers], numbers)

        def run(start: int, count: int, size: int) -> tp.Any:
            padded = [_padded(x, self.axis, start, count, size) for x in leaves]
            full = dict(enumerate(args)) | dict(zip(numbers, treedef.unflatten(padded)))
            return self._fun(*full.values())

        return rows, run

    def _has_rows(self, number: int, arg: tp.Any) -> bool:
        return not isinstance(arg, Pytree) if self.batched is None else number in self.batched

    def _rows(
        self, batched: list[tp.Any], numbers: list[int]
    ) -> tuple[int, list[np.ndarray], tp.Any]:
        """How many rows the arguments have, their leaves and structure."""
        pairs, treedef = jax.tree_util.tree_flatten_with_path(batched)
        leaves, found = [], {}
        for (first, *rest), x in pairs:
            path = f"argument {numbers[first.idx]}{jax.tree_util.keystr(tuple(rest))}"
            if np.ndim(x) <= self.axis:
                raise ValueError(
                    f"bucketed {self.name}: {path} has no axis {self.axis} for rows: "
                    f"{short_type(x)} of shape {np.shape(x)}. Name the arguments that have rows "
                    "(batched=...)."
                )
            leaves.append(np.asarray(x))
            found.setdefault(np.shape(x)[self.axis], path)
        if len(found) != 1:
            text = ", ".join(f"{size} in {path}" for size, path in found.items()) or "no arguments"
            raise ValueError(f"bucketed {self.name} needs one number of rows; got {text}.")
        rows = next(iter(found))
        if not rows:
            raise ValueError(f"bucketed {self.name} got a batch without rows.")
        return rows, leaves, treedef

    def _cut(self, out: tp.Any, size: int, count: int) -> tp.Any:
        def cut(path: tp.Any, x: tp.Any) -> np.ndarray:
            array = np.asarray(x)
            if array.ndim <= self.axis or array.shape[self.axis] != size:
                raise ValueError(
                    f"bucketed {self.name}: the result{jax.tree_util.keystr(path)} has shape "
                    f"{array.shape}, without the {size} rows of the padded batch on axis {self.axis}. "
                    "What sums up a batch would sum up its padding too: return one value a row."
                )
            return array[(slice(None),) * self.axis + (slice(count),)]

        return jax.tree_util.tree_map_with_path(cut, out)

    def __repr__(self) -> str:
        return f"bucketed({self.name}, sizes={self.sizes})"


def bucketed(
    fun: tp.Callable[..., tp.Any],
    sizes: tp.Sequence[int],
    *,
    axis: int = 0,
    batched: int | tp.Sequence[int] | None = None,
    larger: tp.Literal["split", "refuse"] = "split",
) -> Bucketed:
    """A function of batches of any size, which runs programs of a few sizes only.

    A batch is padded to the next size with copies of its last row, and the result is cut. So a row must
    not depend on the others of its batch, as it does in BatchNorm that is training, and every array of
    the result needs one entry for each row.

    Args:
        fun: a module, a function of objects and arrays, which is compiled, or what is compiled already:
            by `nnx.jit` or `jax.jit`, or an `Exported`.
        sizes: the batch sizes to compile, such as `(1, 8, 32)`.
        axis: the axis of rows, in arguments and results.
        batched: the numbers of the arguments that have rows; by default all that are not objects.
        larger: "split" cuts a batch that is larger than the largest size in pieces, "refuse" raises.

    Returns:
        A `Bucketed`.

    Raises:
        ValueError: for sizes that are not positive numbers, or another value of `larger`.

    >>> import numpy as np
    >>> import nnxlite as nnx
    >>> predict = nnx.bucketed(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), sizes=(1, 8))
    >>> [predict(np.ones((rows, 2))).shape for rows in (1, 2, 5, 8, 11)]
    [(1, 3), (2, 3), (5, 3), (8, 3), (11, 3)]
    >>> predict.calls
    {1: 1, 8: 5}
    """
    try:
        ordered = tuple(sorted({int(size) for size in sizes}))
    except (TypeError, ValueError):
        ordered = ()
    if not ordered or ordered[0] < 1:
        raise ValueError(f"bucketed: sizes must be whole numbers from 1 up; got {sizes!r}.")
    if larger not in ("split", "refuse"):
        raise ValueError(f"bucketed: larger must be 'split' or 'refuse', not {larger!r}.")
    if axis < 0:
        raise ValueError(f"bucketed: axis must be counted from the front; got {axis}.")
    is_module = issubclass(type(fun), Pytree)
    compiled = isinstance(fun, Exported) or (hasattr(fun, "lower") and not is_module)
    name = fun.name if isinstance(fun, Exported) else name_of(fun)
    return Bucketed(
        fun if compiled else jit(fun),
        type(fun).__name__ if is_module else name,
        ordered,
        as_integer(axis),
        None if batched is None else as_integers(batched),
        larger,
    )


def _padded(x: np.ndarray, axis: int, start: int, count: int, size: int) -> np.ndarray:
    """`count` rows from `start` on, and copies of the last one up to `size`."""
    rows = np.minimum(np.arange(start, start + size), start + count - 1)
    return x if size == count == x.shape[axis] else np.take(x, rows, axis=axis)
