"""The entries of a `Mapping`: rules, and what only one side has.

A rule relates some foreign arrays to some of ours by patterns of their names, and says how the axes of
the foreign ones become those of ours.  It has no direction: saving goes the other way.

It does so with arrays that have no bytes, too: every name, shape and dtype on the foreign side follows
from the model and the rules, so that whether a file matches is known before a byte of it is read.

Arrays are NumPy's.  What is transposed or split is a view: an array that is mapped from a file is read
only where it is used.
"""

from __future__ import annotations

import dataclasses
import re
import typing as tp
import warnings
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from nnxlite._base.errors import importing
from nnxlite.checkpoint._contents import Contents, every_name
from nnxlite.checkpoint._report import CheckpointError, near_text
from nnxlite.checkpoint.patterns import Pattern

__all__ = ["Ignore", "Keep", "MappingError", "Rule"]

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
class Rule:
    """Relates foreign arrays to ours.

    A side with several names has its arrays stacked, as `einops.rearrange` does with a list: the first
    axis of that side counts them.

    Args:
        foreign: a pattern of foreign names, or several; see `Mapping`.
        ours: a pattern of our names, or several.
        axes: how the axes of the foreign side become those of ours, in the notation of the package
            `einops`: `"(heads depth) d -> d heads depth"`. It comes with
            `pip install "nnxlite[checkpoint]"`.
        split: an axis along which one foreign array is split into several of ours. Each part is as
            large as ours needs, and `axes` are those of one part.
        sizes: sizes of axes that do not follow from the shapes of ours; needed only where the right
            side has parentheses.

    Raises:
        ValueError: for a wildcard that not all names have.

    >>> import nnxlite as nnx
    >>> Rule = nnx.checkpoint.Rule
    >>> Rule("h.{i}.mlp.weight", "blocks.{i}.mlp.kernel", "out in -> in out")
    Rule('h.{i}.mlp.weight', 'blocks.{i}.mlp.kernel', 'out in -> in out')
    >>> experts = Rule([f"experts.{e}.w1.weight" for e in range(8)], "w1", "e out in -> e in out")
    >>> gates = Rule("gate_up.weight", ["gate.kernel", "up.kernel"], split=-1)
    """

    foreign: tuple[str, ...]
    ours: tuple[str, ...]
    axes: str | None
    split: int | None
    sizes: tuple[tuple[str, int], ...]

    def __init__(
        self,
        foreign: Names,
        ours: Names,
        axes: str | None = None,
        /,
        *,
        split: int | None = None,
        **sizes: int,
    ) -> None:
        sides = [(side,) if isinstance(side, str) else tuple(side) for side in (foreign, ours)]
        values = (*sides, axes, split, tuple(sorted(sizes.items())))
        for field, value in zip(dataclasses.fields(self), values):
            object.__setattr__(self, field.name, value)
        if not all(sides):
            raise ValueError(f"{self} names nothing on one side.")
        if len({Pattern(pattern).wildcards for side in sides for pattern in side}) > 1:
            raise ValueError(
                f"{self}: all names of a rule must have the same wildcards. List those that an axis "
                "counts: [f'experts.{e}' for e in range(8)]."
            )

    @property
    def renames(self) -> bool:
        """Whether it does nothing else."""
        return len(self.foreign) == len(self.ours) == 1 and self.axes is None

    def to_ours(self, arrays: Sequence[np.ndarray], ours: Sequence[Shape]) -> list[np.ndarray]:
        """Our arrays from the foreign ones; views of them where possible.

        Args:
            arrays: the foreign ones.
            ours: the shapes of ours.
        """
        if self.split is not None:
            sizes = [self._back(blank(shape)).shape[self.split] for shape in ours]
            parts = np.split(arrays[0], np.cumsum(sizes)[:-1], self.split)
            return [self._forth(part, shape) for part, shape in zip(parts, ours)]
        whole = self._forth(_joined(arrays), (len(ours), *ours[0]) if ours[1:] else ours[0])
        return list(whole) if ours[1:] else [whole]

    def to_foreign(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The foreign arrays from ours; ValueError (or IndexError) if no arrays give such ones.

        Args:
            arrays: ours.
        """
        if self.split is not None:
            made = [np.concatenate([self._back(array) for array in arrays], self.split)]
        else:
            whole = self._back(_joined(arrays))
            made = list(whole) if len(self.foreign) > 1 else [whole]
        if len(made) != len(self.foreign):
            raise ValueError(
                f"it is made from {len(made)} arrays, not {len(self.foreign)}. Write axes, of which the "
                "first counts the arrays of a side with several names; or split=."
            )
        return made

    def _forth(self, x: np.ndarray, shape: Shape) -> np.ndarray:
        """An array of the foreign side as one of ours, whose shape says how large each axis is."""
        if self.axes is None:
            return x
        right = self.axes.partition("->")[2]
        names = re.findall(r"[A-Za-z_]\w*", right)
        every = f"{right} -> {' '.join(names)}{' ...' * ('...' in right)}"
        sizes = _rearranged(blank(shape), every, dict(self.sizes)).shape
        return _rearranged(x, self.axes, dict(zip(names, sizes)))

    def _back(self, x: np.ndarray) -> np.ndarray:
        """An array of ours as one of the foreign side."""
        if self.axes is None:
            return x
        left, arrow, right = self.axes.partition("->")
        if not arrow:
            raise ValueError(f"{self.axes!r} has one side. Write both, as in 'o i -> i o'.")
        return _rearranged(x, f"{right} -> {left}", dict(self.sizes))

    def __repr__(self) -> str:
        sides = [side[0] if len(side) == 1 else side for side in (self.foreign, self.ours)]
        shown = [repr(value) for value in (*sides, self.axes) if value is not None]
        options = {"split": self.split, **dict(self.sizes)}
        shown += [f"{name}={value!r}" for name, value in options.items() if value is not None]
        return f"Rule({', '.join(shown)})"


def _rearranged(x: np.ndarray, axes: str, sizes: tp.Mapping[str, int]) -> np.ndarray:
    with importing('Axes of a Rule need einops: pip install "nnxlite[checkpoint]".', name="einops"):
        import einops
    try:
        with warnings.catch_warnings():  # `in` is a fine name of an axis
            warnings.filterwarnings("ignore", "It is discouraged to use axes names that are keyw")
            return einops.rearrange(x, axes, **sizes)
    except einops.EinopsError as error:
        raise ValueError(
            f"{str(error).splitlines()[-1].strip()} (Sizes that do not follow from our arrays are "
            "passed by name, as in Rule('q', 'query', '(heads d) o -> o heads d', d=64).)"
        ) from error


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack(arrays) if len(arrays) > 1 else arrays[0]


def blank(shape: Shape) -> np.ndarray:
    """An array that has a shape and no bytes, as has all that is made of such."""
    return np.empty(shape, "V0")


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


class Conversion(tp.NamedTuple):
    """A rule with the names and shapes of certain arrays: the foreign ones, and ours."""

    foreign: dict[str, Shape]
    ours: dict[str, Shape]
    rule: Rule = Rule("*", "*")


def conversions(
    entries: Iterable[Entry], contents: Contents, strict: bool = True
) -> tuple[list[Conversion], list[str]]:
    """What the entries of a mapping mean for a model, and the chosen arrays that none is for.

    Args:
        strict: whether a rule that matches nothing is a problem.

    Raises:
        MappingError: with every problem.
    """
    names = every_name(contents.leaves, contents.aliases)
    made: list[Conversion] = []
    problems: list[str] = []
    owners: dict[tuple[str, str], Rule] = {}
    for rule in (entry for entry in entries if isinstance(entry, Rule)):
        try:
            found = list(_applied_rule(rule, names, contents))
        except (ValueError, IndexError) as error:
            problems.append(f"{rule}: {error}")
            continue
        if not found and strict:
            problems.append(f"{rule} matches none of our names{near_text(rule.ours[0], names)}.")
        for conversion in found:
            for side, name in [(s, n) for s in ("foreign", "ours") for n in getattr(conversion, s)]:
                if (other := owners.setdefault((side, name), rule)) is not rule:
                    problems.append(
                        f"{name}: both {other} and {rule} are for it. Remove one of them."
                    )
        made += found
    if problems:
        of = ", ".join(type(item).__name__ for item in contents.root.values())
        raise MappingError(f"The mapping does not suit {of}:", problems)
    ruled = {name for conversion in made for name in conversion.ours}
    keep = [entry.ours for entry in entries if isinstance(entry, Keep)]
    rest = [name for name in contents.chosen if name not in ruled]
    return made, [name for name in rest if not any_matches(keep, name)]


def _applied_rule(rule: Rule, names: dict[str, str], contents: Contents) -> Iterator[Conversion]:
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
        ours = {names[name]: contents.leaves[names[name]].spec for name in written}
        if not rule.renames and any(spec.key_impl for spec in ours.values()):
            raise ValueError(f"{names[name]} is a random key, which can only be renamed.")
        shapes = {name: spec.shape for name, spec in ours.items()}
        try:  # with arrays of no bytes
            foreign = rule.to_foreign([blank(shape) for shape in shapes.values()])
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"our shapes are {', '.join(map(str, shapes.values()))}: {error}"
            ) from None
        filled = (Pattern(text).fill(bindings) for text in rule.foreign)
        yield Conversion({n: x.shape for n, x in zip(filled, foreign)}, shapes, rule)
