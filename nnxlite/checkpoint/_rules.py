"""The entries of a `Mapping`: rules, and what only one side has.

A rule relates patterns of foreign names to patterns of ours.  It says nothing about a direction: the
same rule loads and saves.

`conversions` applies rules to a model.  Every name, shape and dtype on the foreign side follows from
the model and the rules, so that whether a file matches is known before a byte of it is read.
"""

from __future__ import annotations

import collections
import dataclasses
import typing as tp
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from nnxlite.checkpoint._contents import Contents, Leaf
from nnxlite.checkpoint._operations import (
    Cast,
    Concatenate,
    Operation,
    Rearrange,
    Shape,
    Split,
    Stack,
    Tie,
    Unstack,
    applied,
    blank,
    same_bits,
)
from nnxlite.checkpoint._report import CheckpointError, near_text
from nnxlite.training.patterns import Bindings, Pattern

Names: tp.TypeAlias = str | Sequence[str]


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

    Args:
        foreign: a pattern of foreign names, or several; see `Mapping`.
        ours: a pattern of our names, or several.
        operations: what makes ours of the foreign arrays, in this order; a text is a `Rearrange`.

    Raises:
        ValueError: for an operation that does not suit the number of names.

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
        self._check_wildcards()
        self._check_numbers()

    @property
    def counted(self) -> tuple[str | None, str | None]:
        """The wildcard that only foreign names have, and the one that only ours have."""
        foreign, ours = (Pattern(side[0]).wildcards for side in (self.foreign, self.ours))
        return next(iter(foreign - ours), None), next(iter(ours - foreign), None)

    def _has(self, kind: type[Operation]) -> bool:
        """Whether an operation is of this class."""
        return any(isinstance(operation, kind) for operation in self.operations)

    def _check_wildcards(self) -> None:
        for side in (self.foreign, self.ours):
            if not side:
                raise ValueError(f"{self} names nothing on one side.")
            if len({Pattern(pattern).wildcards for pattern in side}) > 1:
                raise ValueError(f"{self}: names listed together must have the same wildcards.")
        foreign, ours = (Pattern(side[0]).wildcards for side in (self.foreign, self.ours))
        for extra, kind in ((foreign - ours, Stack), (ours - foreign, Unstack)):
            if len(extra) > 1 or any(name.startswith("*") or not self._has(kind) for name in extra):
                raise ValueError(
                    f"{self}: {', '.join(sorted(extra))} is on one side only. A wildcard of one side "
                    f"has to be one of the other; {kind.__name__}() may count one name in braces."
                )

    def _check_numbers(self) -> None:
        """Follow the number of arrays through the operations; None stands for as many as are counted."""
        many, several = self.counted
        start = number = None if many else len(self.foreign)
        wanted = None if several else len(self.ours)
        for operation in self.operations:
            if isinstance(operation, (Split, Unstack)):
                if number != 1:
                    raise ValueError(
                        f"{self}: {operation} takes one array, and gets {number or 'many'}."
                    )
                number = wanted
            elif isinstance(operation, (Concatenate, Stack)):
                number = 1
            elif isinstance(operation, Tie):
                number = wanted if number == 1 else 1
        if number != wanted:
            raise ValueError(
                f"{self} relates {start or 'counted'} foreign arrays to {wanted or 'counted'} of ours. "
                "Add Split or Unstack, Concatenate or Stack, or Tie, which ties several arrays of one "
                "side to one of the other."
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
        return self.rule is not None and self.rule._has(Tie)

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
    """One conversion for each binding of the wildcards that both sides have."""
    counted_foreign, counted_ours = rule.counted
    first, *others = map(Pattern, rule.ours)
    foreign = [Pattern(text) for text in rule.foreign]
    groups: dict[tuple[tuple[str, str], ...], list[Bindings]] = collections.defaultdict(list)
    seen: set[str] = set()
    for name, leaf in names.items():
        bindings = first.match(name)
        if bindings is not None and leaf not in seen:  # under another name, it is the same array
            seen.add(leaf)
            shared = {key: text for key, text in bindings.items() if key != counted_ours}
            groups[tuple(shared.items())].append(bindings)
    for shared, members in groups.items():
        if counted_ours is not None:
            members = _in_order(counted_ours, members)
        written = [p.fill(b) for b in members for p in (first, *others)]
        if absent := [name for name in written if name not in names]:
            raise ValueError(f"{absent[0]!r} does not exist{near_text(absent[0], names)}.")
        ours = tuple(names[name] for name in written)
        specs = [leaves[name].spec for name in ours]
        if rule.operations and any(spec.key_impl for spec in specs):
            raise ValueError(f"{ours[0]} is a random key; no operation applies to it.")
        shapes = _shapes(rule, [spec.shape for spec in specs])
        bound = dict(shared)
        if counted_foreign is None:
            filled = [p.fill(bound) for p in foreign]
        else:
            number = len(shapes[0]) // len(foreign)
            filled = [
                p.fill(bound | {counted_foreign: str(i)}) for i in range(number) for p in foreign
            ]
        yield Conversion(tuple(filled), ours, shapes, rule)


def _in_order(wildcard: str, members: list[Bindings]) -> list[Bindings]:
    """Bindings by a number, which counts from 0 without gaps."""
    by_number = {bindings[wildcard]: bindings for bindings in members}
    numbers = [str(i) for i in range(len(members))]
    if set(by_number) != set(numbers):
        raise ValueError(
            f"{{{wildcard}}} must count from 0 without gaps, and is {', '.join(sorted(by_number))}."
        )
    return [by_number[number] for number in numbers]


def _shapes(rule: Rule, ours: Sequence[Shape]) -> Sequence[tuple[Shape, ...]]:
    """The shapes before, between and after the operations: they are undone with arrays of no bytes."""
    stages = [tuple(ours)]
    counted, count = rule.counted[0] is not None, len(rule.foreign)
    try:
        for operation in rule.operations[::-1]:
            before = list(map(blank, stages[0]))
            if isinstance(operation, Tie) and len(set(stages[0])) > 1:
                raise ValueError("Tie() needs one shape. Write a rule for each of the others.")
            stages.insert(0, tuple(x.shape for x in applied(operation, before, None, count)))
        if not counted and len(stages[0]) != count:
            raise ValueError(f"it is made from {len(stages[0])} arrays, not {count}.")
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
