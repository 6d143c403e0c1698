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
import math
import typing as tp
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

Shape: tp.TypeAlias = tuple[int, ...]
Axes: tp.TypeAlias = tuple[tuple[str, ...], ...]
"""One side of a pattern: the names that each axis is merged from."""


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Rearrange:
    """Transposes and reshapes each array: `"(heads depth) d -> d heads depth"`, as in einops.

    The left side names the axes of a foreign array, the right side those of ours.  Axes in
    parentheses are merged into one, the last of them varying fastest; `1` is an axis of size one.
    Both sides have the same names.

    Args:
        pattern: the two sides.
        sizes: sizes of axes that do not follow from the shape of our array; needed only where the
            right side has parentheses.

    Raises:
        ValueError: for a pattern that is not of this form.

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
        left, right = (sum(side, ()) for side in self.sides)
        if sorted(left) != sorted(right) or len(set(left)) != len(left):
            raise ValueError(
                f"{self}: every axis appears once on each side; on the left are {_listed(left)}, on "
                f"the right {_listed(right)}."
            )
        for name in sizes.keys() - set(left):
            raise ValueError(f"{self}: there is a size for {name!r}, but no such axis.")

    @property
    def sides(self) -> tuple[Axes, Axes]:
        """The axes of a foreign array, and those of ours."""
        sides = self.pattern.split("->")
        if len(sides) != 2:
            raise ValueError(f"{self}: write both sides, as in Rearrange('o i -> i o').")
        return _axes(self, sides[0]), _axes(self, sides[1])

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
        case Rearrange(sides=(left, right)):
            return [_merged(left, _sizes(operation, (right, shape))) for shape in after]
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
        case Rearrange(pattern, sizes):
            left, right = pattern.split("->")
            return Rearrange(f"{right.strip()} -> {left.strip()}", **dict(sizes))
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
            return [_rearranged(operation, x, shape) for x, shape in zip(arrays, shapes)]
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


def _axes(rearrange: Rearrange, side: str) -> Axes:
    """The groups of one side of a pattern."""
    groups: list[tuple[str, ...]] = []
    merged: list[str] | None = None
    for word in side.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(" and merged is None:
            merged = []
        elif word == ")" and merged is not None:
            groups.append(tuple(merged))
            merged = None
        elif word == "1" and merged is None:
            groups.append(())
        elif not word.isidentifier():
            raise ValueError(f"{rearrange}: {word!r} is not expected in {side.strip()!r}.")
        elif merged is None:
            groups.append((word,))
        else:
            merged.append(word)
    if merged is not None:
        raise ValueError(f"{rearrange}: a parenthesis is not closed in {side.strip()!r}.")
    return tuple(groups)


def _sizes(rearrange: Rearrange, *sides: tuple[Axes, Shape]) -> dict[str, int]:
    """The size of every axis, from the shapes of one side or both."""
    for side, shape in sides:
        if len(side) != len(shape):
            raise ValueError(
                f"{rearrange} is for arrays with {len(side)} axes, not of shape {shape}."
            )
    sizes = dict(rearrange.sizes)
    pending = [pair for side, shape in sides for pair in zip(side, shape)]
    while pending:
        # An axis that is merged from several is solved once all but one of them are known.
        solvable = [x for x in pending if sum(name not in sizes for name in x[0]) <= 1]
        if not solvable:
            group = pending[0][0]
            raise ValueError(
                f"{rearrange}: pass the sizes of all but one of the axes {_listed(group)}, as in "
                f"Rearrange({rearrange.pattern!r}, {group[-1]}=2)."
            )
        for group, size in solvable:
            rest = math.prod(sizes.get(name, 1) for name in group)
            for name in group:
                sizes.setdefault(name, size // rest if rest else 0)
            if math.prod(sizes[name] for name in group) != size:
                known = ", ".join(f"{name} = {sizes[name]}" for name in group)
                raise ValueError(
                    f"{rearrange}: an axis of size {size} is not {_listed(group)}, {known}."
                )
        pending = [pair for pair in pending if pair not in solvable]
    return sizes


def _rearranged(operation: Rearrange, x: np.ndarray, shape: Shape) -> np.ndarray:
    left, right = operation.sides
    sizes = _sizes(operation, (left, x.shape), (right, shape))
    names, wanted = sum(left, ()), sum(right, ())
    x = x.reshape([sizes[name] for name in names])
    return x.transpose([names.index(name) for name in wanted]).reshape(shape)


def _axis(operation: Operation, axis: int, ndim: int) -> int:
    """An axis counted from the front."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"{operation}: there is no such axis among {ndim}.")
    return axis % ndim


def _merged(side: Axes, sizes: dict[str, int]) -> Shape:
    return tuple(math.prod(sizes[name] for name in group) for group in side)


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


def _listed(names: Sequence[str]) -> str:
    return "(" + " ".join(names) + ")"
