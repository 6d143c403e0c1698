"""The entries of a `Mapping`: rules with their operations, and what only one side has.

A rule relates some foreign arrays to some of ours by patterns of their names and a sequence of
operations, written in the order in which loading applies them.  It says nothing about a direction:
saving applies each operation backwards, the last one first.

It does so with arrays that have no bytes, too: every name, shape and dtype on the foreign side follows
from the model and the rules, so that whether a file matches is known before a byte of it is read.

Arrays are NumPy's.  What is transposed, split or unstacked is a view: an array that is mapped from
a file is read only where it is used.
"""

from __future__ import annotations

import dataclasses
import re
import typing as tp
import warnings
from collections.abc import Iterable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import importing
from nnxlite.checkpoint._contents import Contents, Leaf
from nnxlite.checkpoint._report import CheckpointError, near_text
from nnxlite.training.patterns import Pattern

__all__ = ["Cast", "Concatenate", "Ignore", "Keep", "MappingError", "Rearrange", "Rule", "Split"]
__all__ += ["Stack", "Tie", "Unstack"]

Names: tp.TypeAlias = str | Sequence[str]
Shape: tp.TypeAlias = tuple[int, ...]


class MappingError(CheckpointError):
    """A mapping does not suit a model; nothing has been read, written or changed.

    Attributes:
        problems: a line for each.

    >>> import nnxlite as nnx
    >>> issubclass(nnx.checkpoint.MappingError, ValueError)
    True
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join([message, *problems]))
        self.problems = tuple(problems)


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

    Args:
        axis: the axis of ours that they do not have.

    >>> import nnxlite as nnx
    >>> names = [f"experts.{e}.w1.weight" for e in range(2)]
    >>> nnx.checkpoint.Rule(names, "experts.w1", nnx.checkpoint.Stack())
    Rule(('experts.0.w1.weight', 'experts.1.w1.weight'), 'experts.w1', Stack(axis=0))
    """

    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Unstack:
    """Unstacks one foreign array into several of ours.

    Args:
        axis: the axis of the foreign array that ours do not have.

    >>> import nnxlite as nnx
    >>> names = [f"layers.{i}.kernel" for i in range(2)]
    >>> nnx.checkpoint.Rule("layers.kernel", names, nnx.checkpoint.Unstack())
    Rule('layers.kernel', ('layers.0.kernel', 'layers.1.kernel'), Unstack(axis=0))
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
    divides = (Stack, Concatenate) if back else (Unstack, Split)  # one array becomes several
    if isinstance(operation, divides) and len(arrays) != 1:
        raise ValueError(f"{operation} has one array on a side, and gets {len(arrays)}.")
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


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Rule:
    """Relates foreign arrays to ours.

    Args:
        foreign: a pattern of foreign names, or several; see `Mapping`.
        ours: a pattern of our names, or several.
        operations: what makes ours of the foreign arrays, in this order; a text is a `Rearrange`.

    Raises:
        ValueError: for a wildcard that not all names have.

    >>> import nnxlite as nnx
    >>> nnx.checkpoint.Rule("h.{i}.mlp.weight", "blocks.{i}.mlp.kernel", "o i -> i o")
    Rule('h.{i}.mlp.weight', 'blocks.{i}.mlp.kernel', 'o i -> i o')
    """

    foreign: tuple[str, ...]
    ours: tuple[str, ...]
    operations: tuple[Operation, ...]

    def __init__(self, foreign: Names, ours: Names, *operations: Operation | str) -> None:
        for name, side in (("foreign", foreign), ("ours", ours)):
            object.__setattr__(self, name, (side,) if isinstance(side, str) else tuple(side))
        made = tuple(Rearrange(o) if isinstance(o, str) else o for o in operations)
        object.__setattr__(self, "operations", made)
        for operation in made:
            if not isinstance(operation, Operation):
                raise TypeError(f"{self}: {operation!r} is not an operation.")
        if not (self.foreign and self.ours):
            raise ValueError(f"{self} names nothing on one side.")
        if len({Pattern(pattern).wildcards for pattern in (*self.foreign, *self.ours)}) > 1:
            raise ValueError(
                f"{self}: all names of a rule must have the same wildcards. List those that Stack or "
                "Unstack counts: [f'experts.{e}' for e in range(8)]."
            )

    def __repr__(self) -> str:
        sides = (side[0] if len(side) == 1 else side for side in (self.foreign, self.ours))
        plain = (
            o.pattern if isinstance(o, Rearrange) and not o.sizes else o for o in self.operations
        )
        return f"Rule({', '.join(map(repr, (*sides, *plain)))})"


@dataclasses.dataclass(frozen=True)
class Ignore:
    """Foreign arrays that are not loaded, such as buffers with masks; they are not saved either.

    Args:
        foreign: a pattern of their names.

    >>> import nnxlite as nnx
    >>> buffers = nnx.checkpoint.Ignore("h.*.attn.bias")
    """

    foreign: str


@dataclasses.dataclass(frozen=True)
class Keep:
    """Arrays of ours that foreign weights do not have, such as random keys; they keep their values.

    Args:
        ours: a pattern of their names.

    >>> import nnxlite as nnx
    >>> streams = nnx.checkpoint.Keep("**.rngs.**")
    """

    ours: str


Entry: tp.TypeAlias = Rule | Ignore | Keep


def any_matches(patterns: Iterable[str], name: str) -> bool:
    """Whether one of the patterns matches a name."""
    return any(Pattern(text).match(name) is not None for text in patterns)


@dataclasses.dataclass(frozen=True, eq=False)
class Conversion:
    """What relates certain foreign arrays to certain ones of ours.

    Attributes:
        foreign: the names of the foreign arrays.
        ours: the names of ours.
        shapes: of the foreign arrays; and of the arrays after each operation, the last being ours.
        rule: where it comes from; None for one array that is only renamed.
    """

    foreign: tuple[str, ...]
    ours: tuple[str, ...]
    shapes: Sequence[tuple[Shape, ...]]
    rule: Rule | None = None

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What makes ours of the foreign arrays."""
        return self.rule.operations if self.rule else ()

    @property
    def ties(self) -> bool:
        """Whether it relates arrays that are equal."""
        return any(isinstance(operation, Tie) for operation in self.operations)

    @property
    def is_tied(self) -> bool:
        """Whether its foreign array may belong to another rule as well."""
        return self.ties and len(self.foreign) == 1

    @property
    def cast(self) -> np.dtype | None:
        """The dtype that the foreign arrays are said to have."""
        return next((o.dtype for o in self.operations if isinstance(o, Cast)), None)

    def load(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Our arrays from the foreign ones; views of them where possible."""
        for operation, shapes in zip(self.operations, self.shapes[1:]):
            arrays = applied(operation, arrays, shapes)
        return arrays

    def save(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """The foreign arrays from ours.

        Raises:
            MappingError: for arrays that are tied, and not equal.
        """
        for operation, shapes in zip(self.operations[::-1], self.shapes[-2::-1]):
            if isinstance(operation, Tie) and not all(same_bits(arrays[0], x) for x in arrays):
                raise MappingError(
                    f"{', '.join(self.ours)} are tied by {self.rule}, and differ. Nothing was written. "
                    "Share one Variable among them, or give each a foreign name and a rule of its own."
                )
            arrays = applied(operation, arrays, None, len(shapes))
        return [x if self.cast is None else x.astype(self.cast) for x in arrays]


def conversions(
    entries: Iterable[Entry], contents: Contents, strict: bool = True
) -> tuple[list[Conversion], list[str]]:
    """What the entries of a mapping mean for a model, and the chosen arrays that none is for.

    Args:
        strict: whether a rule that matches nothing is a problem.

    Raises:
        MappingError: with every problem.
    """
    names = {name: name for name in contents.leaves}
    for name in contents.leaves:
        for other in contents.also_named(name):
            names.setdefault(other, name)
    made: list[Conversion] = []
    problems: list[str] = []
    for rule in (entry for entry in entries if isinstance(entry, Rule)):
        try:
            found = list(_applied_rule(rule, names, contents.leaves))
        except ValueError as error:
            problems.append(f"{rule}: {error}")
            continue
        if not found and strict:
            problems.append(f"{rule} matches none of our names{near_text(rule.ours[0], names)}.")
        made += found
    problems += _conflicts(made)
    if problems:
        name = type(contents.root).__name__
        raise MappingError(f"The mapping does not suit {name}:", problems)
    ruled = {name for conversion in made for name in conversion.ours}
    keep = [entry.ours for entry in entries if isinstance(entry, Keep)]
    rest = [name for name in contents.chosen if name not in ruled]
    return made, [name for name in rest if not any_matches(keep, name)]


def _applied_rule(
    rule: Rule, names: dict[str, str], leaves: tp.Mapping[str, Leaf]
) -> Iterator[Conversion]:
    """One conversion for each binding of the wildcards."""
    first, *others = map(Pattern, rule.ours)
    seen: set[str] = set()
    for name, leaf in names.items():
        bindings = first.match(name)
        if bindings is None or leaf in seen:  # under another name, it is the same array
            continue
        seen.add(leaf)
        written = [name, *(pattern.fill(bindings) for pattern in others)]
        if absent := [name for name in written if name not in names]:
            raise ValueError(f"{absent[0]!r} does not exist{near_text(absent[0], names)}.")
        ours = tuple(names[name] for name in written)
        specs = [leaves[name].spec for name in ours]
        if rule.operations and any(spec.key_impl for spec in specs):
            raise ValueError(f"{ours[0]} is a random key; no operation applies to it.")
        shapes = _shapes(rule, [spec.shape for spec in specs])
        foreign = tuple(Pattern(text).fill(bindings) for text in rule.foreign)
        yield Conversion(foreign, ours, shapes, rule)


def _shapes(rule: Rule, ours: Sequence[Shape]) -> Sequence[tuple[Shape, ...]]:
    """The shapes before, between and after the operations: they are undone with arrays of no bytes."""
    stages, count = [tuple(ours)], len(rule.foreign)
    try:
        for operation in rule.operations[::-1]:
            before = list(map(blank, stages[0]))
            if isinstance(operation, Tie) and len(set(stages[0])) > 1:
                raise ValueError("Tie() needs one shape. Write a rule for each of the others.")
            stages.insert(0, tuple(x.shape for x in applied(operation, before, None, count)))
        if len(stages[0]) != count:
            raise ValueError(
                f"it is made from {len(stages[0])} arrays, not {count}. Add Split or Unstack, "
                "Concatenate or Stack, or Tie, which ties several arrays of one side to one of the "
                "other."
            )
    except (ValueError, IndexError) as error:
        raise ValueError(f"our shapes are {', '.join(map(str, ours))}: {error}") from None
    return stages


def _conflicts(made: Sequence[Conversion]) -> Iterator[str]:
    """A line for each array that two rules claim."""
    for side in ("ours", "foreign"):
        owners: dict[str, Conversion] = {}
        for conversion in made:
            for name in getattr(conversion, side):
                if side == "foreign" and conversion.is_tied:
                    continue
                other = owners.setdefault(name, conversion)
                if other is not conversion:
                    remedy = "Remove one of them."
                    if side == "foreign":
                        tied = Rule(name, (*other.ours, *conversion.ours), Tie())
                        remedy += f" Where ours have the same values, write {tied}."
                    yield f"{name}: both {other.rule} and {conversion.rule} are for it. {remedy}"
