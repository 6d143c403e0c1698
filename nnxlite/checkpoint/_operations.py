"""What turns foreign arrays into ours, and ours into theirs: operations that go both ways.

A rule of a `Mapping` relates some foreign arrays to some of ours by a sequence of operations,
written in the order in which loading applies them.  Saving applies each backwards, the last one first.
It does so with arrays that have no bytes, too: the shapes of all foreign arrays follow from those of
the model, before anything is read.

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
        self._to(pattern, np.ones((1,) * len(axes)), ones)

    @property
    def sides(self) -> tuple[str, str]:
        """The axes of a foreign array, and those of ours."""
        left, _, right = self.pattern.partition("->")
        return left.strip(), right.strip()

    def _load(self, x: np.ndarray, shape: Shape) -> np.ndarray:
        """A foreign array as ours, whose shape says how large each axis is."""
        names = _names(right := self.sides[1])
        axes = self._to(f"{right} -> {' '.join(names)}", blank(shape), dict(self.sizes)).shape
        return self._to(self.pattern, x, dict(zip(names, axes)))

    def _save(self, x: np.ndarray) -> np.ndarray:
        """An array of ours as the foreign one."""
        return self._to("{1} -> {0}".format(*self.sides), x, dict(self.sizes))

    def _to(self, pattern: str, x: np.ndarray, sizes: tp.Mapping[str, int]) -> np.ndarray:
        with importing('Rearrange needs einops: pip install "nnxlite[checkpoint]".', name="einops"):
            import einops
        try:
            with warnings.catch_warnings():  # `in` is a fine name of an axis
                warnings.filterwarnings(
                    "ignore", "It is discouraged to use axes names that are keywords"
                )
                return einops.rearrange(x, pattern, **sizes)
        except einops.EinopsError as error:
            raise ValueError(
                f"{self}: {str(error).splitlines()[-1].strip()} (Sizes that do not follow from our "
                "array are passed by name, as in Rearrange('(heads d) o -> o heads d', d=64).)"
            ) from error

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


def applied(
    operation: Operation, arrays: list[np.ndarray], ours: Sequence[Shape] | None, count: int = 1
) -> list[np.ndarray]:
    """What an operation makes of foreign arrays, or, backwards, of ours.

    Args:
        operation: of a rule.
        arrays: what it is applied to.
        ours: the shapes of what results on loading; None to go backwards.
        count: how many arrays result backwards, where that does not follow from ours.

    Raises:
        ValueError: (or IndexError) if no arrays give such ones.
    """
    back = ours is None
    match operation:
        case Rearrange():
            if ours is None:
                return [operation._save(x) for x in arrays]
            return [operation._load(x, shape) for x, shape in zip(arrays, ours)]
        case Stack(axis) | Unstack(axis):
            if isinstance(operation, Stack) == back:
                return list(np.moveaxis(arrays[0], axis, 0))
            return [np.stack(arrays, axis)]
        case Split(axis) | Concatenate(axis):
            if isinstance(operation, Split) == back:
                return [np.concatenate(arrays, axis)]
            sizes = [shape[axis] for shape in ours or ()]
            if isinstance(operation, Concatenate):
                sizes = operation.sizes
            if sizes is not None and sum(sizes) != (size := arrays[0].shape[axis]):
                raise ValueError(f"{operation} has sizes that add up to {sum(sizes)}, not {size}.")
            return np.split(arrays[0], count if sizes is None else np.cumsum(sizes)[:-1], axis)
        case Tie():
            return arrays[:1] * (len(ours) if ours else 1 if len(arrays) > 1 else count)
        case Cast():
            return arrays


def blank(shape: Shape) -> np.ndarray:
    """An array that has a shape and no bytes, as has all that is made of such."""
    return np.empty(shape, "V0")


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are equal, NaNs included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.nbytes:
        return True
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return np.array_equal(a, b)


def _names(side: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", side)
