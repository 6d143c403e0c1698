"""What turns foreign arrays into ours, and ours into theirs: operations with an inverse.

A rule of a `Mapping` relates some foreign arrays to some of ours by a sequence of operations,
written in the order in which loading applies them.  Saving applies the `inverse` of each, the last
one first.  `shapes_before` goes the same way with shapes alone, so that the shapes of all foreign
arrays follow from the model before anything is read.

Arrays are NumPy's.  What is transposed, split or unstacked is a view: an array that is mapped from
a file is read only where it is used.
"""

from __future__ import annotations

import dataclasses
import re
import typing as tp
import warnings
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import importing

Shape: tp.TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Rearrange:
    """Transposes and reshapes each array: `"(heads depth) d -> d heads depth"`, a pattern of einops.

    The left side names the axes of a foreign array, the right side those of ours. It needs the package
    `einops`, which comes with `pip install "nnxlite[checkpoint]"`.

    Args:
        pattern: the two sides.
        sizes: sizes of axes that do not follow from the shape of our array; needed only where the
            right side has parentheses.

    Raises:
        ValueError: for a pattern that is not one of `einops.rearrange`.

    In a rule, the pattern alone means the same:

    >>> import nnxlite as nnx
    >>> nnx.checkpoint.Rule("fc.weight", "fc.kernel", "o i -> i o").operations
    (Rearrange('o i -> i o'),)
    """

    pattern: str
    sizes: tuple[tuple[str, int], ...]

    def __init__(self, pattern: str, **sizes: int) -> None:
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "sizes", tuple(sorted(sizes.items())))
        if pattern.count("->") != 1:
            raise ValueError(f"{self}: write both sides, as in Rearrange('o i -> i o').")
        left = self.sides[0]
        axes = re.findall(r"\([^()]*\)|[^\s()]+", left)  # those in parentheses are one axis
        ones = dict.fromkeys((*_names(left), *sizes), 1)
        rearranged(self, np.ones((1,) * len(axes)), ones)

    @property
    def sides(self) -> tuple[str, str]:
        """The axes of a foreign array, and those of ours."""
        left, _, right = self.pattern.partition("->")
        return left.strip(), right.strip()

    def __repr__(self) -> str:
        sizes = "".join(f", {name}={size}" for name, size in self.sizes)
        return f"Rearrange({self.pattern!r}{sizes})"


@dataclasses.dataclass(frozen=True)
class Split:
    """Splits one foreign array into several of ours; each part has the size of ours.

    Args:
        axis: along which they follow each other.

    >>> import nnxlite as nnx
    >>> gate_and_up = "gate.kernel", "up.kernel"
    >>> nnx.checkpoint.Rule("gate_up.weight", gate_and_up, nnx.checkpoint.Split(-1))
    Rule('gate_up.weight', ('gate.kernel', 'up.kernel'), Split(axis=-1))
    """

    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Concatenate:
    """Concatenates several foreign arrays to one of ours.

    Args:
        axis: along which they follow each other.
        sizes: size of each foreign array along this axis; None: all the same.

    >>> import nnxlite as nnx
    >>> rule = nnx.checkpoint.Rule(("w1.weight", "w3.weight"), "gate_up", nnx.checkpoint.Concatenate(1))
    """

    axis: int = 0
    sizes: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Stack:
    """Stacks several foreign arrays to one of ours.

    The arrays are listed, or they are all those that differ in one name in braces, counted from 0.

    Args:
        axis: the axis of ours that they do not have.

    >>> import nnxlite as nnx
    >>> nnx.checkpoint.Rule("experts.{e}.w1.weight", "experts.w1", nnx.checkpoint.Stack())
    Rule('experts.{e}.w1.weight', 'experts.w1', Stack(axis=0))
    """

    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Unstack:
    """Unstacks one foreign array into several of ours.

    Our arrays are listed, or they are all those that differ in one name in braces, counted from 0.

    Args:
        axis: the axis of the foreign array that ours do not have.

    >>> import nnxlite as nnx
    >>> nnx.checkpoint.Rule("layers.kernel", "layers.{i}.kernel", nnx.checkpoint.Unstack())
    Rule('layers.kernel', 'layers.{i}.kernel', Unstack(axis=0))
    """

    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Tie:
    """Says that arrays are the same: several foreign ones, several of ours, or one with another rule's.

    - Several foreign arrays, one of ours: those that a file has must be equal, and one is enough.
      All are saved.
    - One foreign array, several of ours, or several rules for one foreign array, of which all but
      one have a `Tie`: each of ours is loaded from it.  Ours must be equal when they are saved.

    >>> import nnxlite as nnx
    >>> names = "wte.weight", "lm_head.weight"
    >>> tied = nnx.checkpoint.Rule(names, "wte.embedding", nnx.checkpoint.Tie())
    """


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Cast:
    """Foreign arrays have this dtype: saving casts to it, and loading may cast from any.

    Args:
        dtype: a dtype or its name.

    Without it, arrays are saved in their own dtype, and are cast on loading only as `cast=`
    permits.

    >>> import nnxlite as nnx
    >>> nnx.checkpoint.Rule("**", "**", nnx.checkpoint.Cast("bfloat16"))
    Rule('**', '**', Cast('bfloat16'))
    """

    dtype: np.dtype

    def __init__(self, dtype: tp.Any) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(dtype))

    def __repr__(self) -> str:
        return f"Cast({self.dtype.name!r})"


Operation: tp.TypeAlias = Rearrange | Split | Concatenate | Stack | Unstack | Tie | Cast


def shapes_before(operation: Operation, after: Sequence[Shape], count: int | None) -> list[Shape]:
    """Shapes of the arrays that an operation makes arrays of the shapes `after` from.

    Args:
        count: how many foreign arrays the rule lists, or None if their names are counted.

    Raises:
        ValueError: if no arrays give such shapes.
    """
    match operation:
        case Rearrange():
            back = tp.cast(Rearrange, inverse(operation))
            return [rearranged(back, _blank(shape), dict(back.sizes)).shape for shape in after]
        case Split(axis):
            return [_concatenated(operation, axis, after)]
        case Unstack(axis):
            _check_same(operation, after)
            first = after[0]
            axis = _axis(operation, axis, len(first) + 1)
            return [(*first[:axis], len(after), *first[axis:])]
        case Concatenate(axis, sizes):
            (shape,) = after
            axis = _axis(operation, axis, len(shape))
            total = shape[axis]
            if sizes is None:
                if count is None or total % count:
                    raise ValueError(
                        f"{operation} cannot divide {total} into {count} equal parts; pass `sizes`."
                    )
                sizes = (total // count,) * count
            if sum(sizes) != total:
                raise ValueError(f"{operation} has sizes that add up to {sum(sizes)}, not {total}.")
            return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
        case Stack(axis):
            (shape,) = after
            axis = _axis(operation, axis, len(shape))
            return [(*shape[:axis], *shape[axis + 1 :])] * shape[axis]
        case Tie():
            _check_same(operation, after)
            return [after[0]] * (1 if len(after) > 1 else count or 1)
        case Cast():
            return list(after)


def inverse(operation: Operation) -> Operation:
    """The operation that undoes another."""
    match operation:
        case Rearrange(sides=(left, right)):
            return Rearrange(f"{right} -> {left}", **dict(operation.sizes))
        case Split(axis):
            return Concatenate(axis)
        case Concatenate(axis):
            return Split(axis)
        case Stack(axis):
            return Unstack(axis)
        case Unstack(axis):
            return Stack(axis)
        case Tie() | Cast():
            return operation


def applied(
    operation: Operation, arrays: Sequence[np.ndarray], shapes: Sequence[Shape]
) -> list[np.ndarray]:
    """Arrays of the given shapes, made by one operation."""
    match operation:
        case Rearrange():
            return [_to_shape(operation, x, shape) for x, shape in zip(arrays, shapes)]
        case Split(axis):
            (x,) = arrays
            cuts = np.cumsum([shape[axis] for shape in shapes])[:-1]
            return np.split(x, cuts, axis)
        case Concatenate(axis):
            return [np.concatenate(arrays, axis)]
        case Stack(axis):
            return [np.stack(arrays, axis)]
        case Unstack(axis):
            (x,) = arrays
            return list(np.moveaxis(x, axis, 0))
        case Tie():
            return [arrays[0]] * len(shapes)
        case Cast():
            return list(arrays)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are equal, NaNs included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return np.array_equal(a, b)


def rearranged(operation: Rearrange, x: np.ndarray, sizes: tp.Mapping[str, int]) -> np.ndarray:
    """An array by `einops.rearrange`; ValueError for a pattern or a shape that does not suit."""
    with importing('Rearrange needs einops: pip install "nnxlite[checkpoint]".', name="einops"):
        import einops
    try:
        with warnings.catch_warnings():  # `in` is a fine name of an axis
            warnings.filterwarnings(
                "ignore", "It is discouraged to use axes names that are keywords"
            )
            return einops.rearrange(x, operation.pattern, **sizes)
    except einops.EinopsError as error:
        raise ValueError(
            f"{operation}: {str(error).splitlines()[-1].strip()} (Sizes that do not follow from our "
            "array are passed by name, as in Rearrange('(heads d) o -> o heads d', d=64).)"
        ) from error


def _to_shape(operation: Rearrange, x: np.ndarray, shape: Shape) -> np.ndarray:
    """An array rearranged to a shape; the sizes of all axes follow from one of the two shapes."""
    left, right = operation.sides
    try:
        sizes = _sizes(operation, left, x.shape)
    except ValueError:
        sizes = _sizes(operation, right, shape)
    return rearranged(operation, x, sizes)


def _sizes(operation: Rearrange, side: str, shape: Shape) -> dict[str, int]:
    """The size of each axis, from the shape of one side."""
    names = _names(side)
    split = Rearrange(f"{side} -> {' '.join(names)}", **dict(operation.sizes))
    return dict(zip(names, rearranged(split, _blank(shape), dict(operation.sizes)).shape))


def _names(side: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", side)


def _blank(shape: Shape) -> np.ndarray:
    """An array that has a shape and no memory."""
    return np.broadcast_to(np.uint8(0), shape)


def _axis(operation: Operation, axis: int, ndim: int) -> int:
    """An axis counted from the front."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"{operation}: there is no such axis among {ndim}.")
    return axis % ndim


def _concatenated(operation: Operation, axis: int, shapes: Sequence[Shape]) -> Shape:
    first = shapes[0]
    axis = _axis(operation, axis, len(first))
    rest = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    if len(rest) > 1:
        raise ValueError(f"{operation}: our arrays have the shapes {', '.join(map(str, shapes))}.")
    return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])


def _check_same(operation: Operation, shapes: Sequence[Shape]) -> None:
    if len(set(shapes)) > 1:
        remedy = " Write a rule for each of the others." if isinstance(operation, Tie) else ""
        raise ValueError(
            f"{operation}: our arrays must have one shape, and they have "
            f"{', '.join(map(str, shapes))}.{remedy}"
        )
