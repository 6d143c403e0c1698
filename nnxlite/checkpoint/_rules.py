"""The entries of a `Mapping`: rules, and what only one side has.

A rule relates patterns of foreign names to patterns of ours.  It says nothing about a direction: the
same rule loads and saves.

`conversions` applies rules to a model.  Every name, shape and dtype on the foreign side follows from
the model and the rules, so that whether a file matches is known before a byte of it is read.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import typing as tp
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from nnxlite.checkpoint._contents import Contents, Leaf
from nnxlite.checkpoint._errors import CheckpointError
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
    inverse,
    same_bits,
    shapes_before,
)
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
        object.__setattr__(self, "foreign", _tuple(foreign))
        object.__setattr__(self, "ours", _tuple(ours))
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
        foreign, ours = (
            frozenset().union(*(Pattern(p).wildcards for p in side))
            for side in (self.foreign, self.ours)
        )
        return next(iter(foreign - ours), None), next(iter(ours - foreign), None)

    def _check_wildcards(self) -> None:
        for side in (self.foreign, self.ours):
            if not side:
                raise ValueError(f"{self} names nothing on one side.")
            kinds = {Pattern(pattern).wildcards for pattern in side}
            if len(kinds) > 1:
                raise ValueError(f"{self}: names listed together must have the same wildcards.")
        foreign, ours = Pattern(self.foreign[0]).wildcards, Pattern(self.ours[0]).wildcards
        for extra, kind in ((foreign - ours, Stack), (ours - foreign, Unstack)):
            if len(extra) > 1 or any(name.startswith("*") for name in extra):
                raise ValueError(
                    f"{self}: {', '.join(sorted(extra))} is on one side only. A wildcard of one side "
                    "is one of the other, too; only one name in braces may be counted by "
                    f"{kind.__name__}."
                )
            if extra and not has(self, kind):
                raise ValueError(
                    f"{self}: {{{min(extra)}}} is on one side only: add {kind.__name__}() to count it."
                )

    def _check_numbers(self) -> None:
        """Follow the number of arrays through the operations; None stands for as many as are counted."""
        counted_foreign, counted_ours = self.counted
        start = number = None if counted_foreign else len(self.foreign)
        for operation in self.operations:
            match operation:
                case Split() | Unstack():
                    needed, result = 1, None if counted_ours else len(self.ours)
                case Concatenate() | Stack():
                    needed, result = number, 1
                case Tie():
                    needed, result = number, 1 if number != 1 else len(self.ours)
                case Rearrange() | Cast():
                    needed, result = number, number
            if needed != number:
                raise ValueError(
                    f"{self}: {operation} takes one array, and gets {number or 'many'}."
                )
            number = result
        wanted = None if counted_ours else len(self.ours)
        if number != wanted:
            remedy = "Add Split or Unstack, Concatenate or Stack, or Tie."
            if any(isinstance(operation, Tie) for operation in self.operations):
                remedy = _one_foreign(self.foreign, self.ours)
            raise ValueError(
                f"{self} relates {start or 'counted'} foreign arrays to {wanted or 'counted'} of ours. "
                f"{remedy}"
            )

    def __repr__(self) -> str:
        sides = (side[0] if len(side) == 1 else side for side in (self.foreign, self.ours))
        plain = (
            o.pattern if isinstance(o, Rearrange) and not o.sizes else o for o in self.operations
        )
        return f"Rule({', '.join(map(repr, (*sides, *plain)))})"


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A foreign array without a counterpart in the model: saved with this value, ignored on loading.

    Args:
        foreign: its name.
        value: the array.

    Batch norms of PyTorch count their updates, for example:

    >>> import nnxlite as nnx
    >>> import numpy as np
    >>> names = [f"bn{i}.num_batches_tracked" for i in range(2)]
    >>> counts = [nnx.checkpoint.Constant(name, np.int64(0)) for name in names]
    """

    foreign: str
    value: tp.Any


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


Entry: tp.TypeAlias = Rule | Constant | Ignore | Keep


def has(rule: Rule, kind: type[Operation]) -> bool:
    """Whether an operation of a rule is of this class."""
    return any(isinstance(operation, kind) for operation in rule.operations)


def any_matches(patterns: Iterable[Pattern], name: str) -> bool:
    """Whether one of the patterns matches a name."""
    return any(pattern.match(name) is not None for pattern in patterns)


@dataclasses.dataclass(frozen=True, eq=False)
class Conversion:
    """A rule, applied to certain arrays.

    Attributes:
        rule: the rule.
        foreign: the names of the foreign arrays.
        ours: the names of ours.
        shapes: of the foreign arrays; and of the arrays after each operation, the last being ours.
    """

    rule: Rule
    foreign: tuple[str, ...]
    ours: tuple[str, ...]
    shapes: tuple[tuple[Shape, ...], ...]

    @property
    def foreign_shape(self) -> dict[str, Shape]:
        """The shape of each foreign array."""
        return dict(zip(self.foreign, self.shapes[0]))

    @property
    def is_tied(self) -> bool:
        """Whether its foreign array may belong to another rule as well."""
        return len(self.foreign) == 1 and has(self.rule, Tie)

    @property
    def cast(self) -> np.dtype | None:
        """The dtype that the foreign arrays are said to have."""
        found = [o.dtype for o in self.rule.operations if isinstance(o, Cast)]
        return found[0] if found else None

    def load(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Our arrays from the foreign ones; views of them where possible."""
        for operation, shapes in zip(self.rule.operations, self.shapes[1:]):
            arrays = applied(operation, arrays, shapes)
        return list(arrays)

    def save(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The foreign arrays from ours.

        Raises:
            MappingError: for arrays that are tied, and not equal.
        """
        for operation, shapes in zip(self.rule.operations[::-1], self.shapes[-2::-1]):
            if isinstance(operation, Tie) and not all(same_bits(arrays[0], x) for x in arrays):
                raise MappingError(
                    f"{', '.join(self.ours)} are tied by {self.rule}, and differ. Nothing was written. "
                    "Share one Variable among them, or give each a foreign name and a rule of its own."
                )
            arrays = applied(inverse(operation), arrays, shapes)
        return [x if self.cast is None else x.astype(self.cast) for x in arrays]


def conversions(
    entries: Iterable[Entry], contents: Contents, strict: bool = True
) -> list[Conversion]:
    """What the rules among the entries of a mapping mean for a model.

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
    for rule in entries:
        if isinstance(rule, Rule):
            try:
                found = list(_applied_rule(rule, names, contents.leaves))
            except ValueError as error:
                problems.append(f"{rule}: {error}")
                continue
            if not found and strict:
                near = _near_text(rule.ours[0], names)
                problems.append(f"{rule} matches none of our names{near}")
            made += found
    problems += _conflicts(made)
    if problems:
        name = type(contents.root).__name__
        raise MappingError(f"The mapping does not suit {name}:", problems)
    return made


def without_rule(
    entries: Iterable[Entry],
    made: Iterable[Conversion],
    leaves: tp.Mapping[str, Leaf],
    only: tp.Callable[[Leaf], bool],
) -> list[str]:
    """The chosen arrays of ours that neither a conversion nor a `Keep` is for."""
    ruled = {name for conversion in made for name in conversion.ours}
    keep = [Pattern(entry.ours) for entry in entries if isinstance(entry, Keep)]
    chosen = (name for name, leaf in leaves.items() if name not in ruled and only(leaf))
    return [name for name in chosen if not any_matches(keep, name)]


def _applied_rule(
    rule: Rule, names: dict[str, str], leaves: tp.Mapping[str, tp.Any]
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
            raise ValueError(f"there is no {absent[0]!r}" + _near_text(absent[0], names))
        ours = tuple(names[name] for name in written)
        specs = [leaves[name].spec for name in ours]
        if rule.operations and any(spec.key_impl for spec in specs):
            raise ValueError(f"{ours[0]} is a random key; no operation applies to it.")
        shapes = _shapes(rule, [spec.shape for spec in specs], ours)
        bound = dict(shared)
        if counted_foreign is None:
            filled = [p.fill(bound) for p in foreign]
        else:
            number = len(shapes[0]) // len(foreign)
            filled = [
                p.fill(bound | {counted_foreign: str(i)}) for i in range(number) for p in foreign
            ]
        yield Conversion(rule, tuple(filled), ours, shapes)


def _in_order(wildcard: str, members: list[Bindings]) -> list[Bindings]:
    """Bindings by a number, which counts from 0 without gaps."""
    by_number = {bindings[wildcard]: bindings for bindings in members}
    numbers = [str(i) for i in range(len(members))]
    if set(by_number) != set(numbers):
        raise ValueError(
            f"{{{wildcard}}} must count from 0 without gaps, and is {', '.join(sorted(by_number))}."
        )
    return [by_number[number] for number in numbers]


def _shapes(
    rule: Rule, ours: Sequence[Shape], names: Sequence[str]
) -> tuple[tuple[Shape, ...], ...]:
    """The shapes before, between and after the operations."""
    stages = [tuple(ours)]
    count = None if rule.counted[0] else len(rule.foreign)
    try:
        for operation in rule.operations[::-1]:
            stages.insert(0, tuple(shapes_before(operation, stages[0], count)))
        if count is not None and len(stages[0]) != count:
            raise ValueError(f"it is made from {len(stages[0])} arrays, not {count}.")
    except ValueError as error:
        raise ValueError(f"{names[0]} has the shape {ours[0]}; {error}") from None
    return tuple(stages)


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
                    rule, remedy = conversion.rule, "Remove one of them."
                    if side == "foreign" and has(rule, Tie):
                        remedy = _one_foreign(rule.foreign, (*other.ours, *conversion.ours))
                    elif side == "foreign" and len(conversion.foreign) == 1:
                        tied = Rule(rule.foreign, rule.ours, *rule.operations, Tie())
                        remedy = f"Where ours have the same values, write {tied} for the second."
                    yield f"{name}: both {other.rule} and {conversion.rule} are for it. {remedy}"


def _one_foreign(foreign: Sequence[str], ours: Sequence[str]) -> str:
    """How several of ours are loaded from several foreign arrays that are the same."""
    first, *others = foreign
    ignored = ", ".join(f"Ignore({name!r})" for name in others)
    return (
        f"Tie() ties several arrays of one side to one of the other: write "
        f"{Rule(first, tuple(ours), Tie())}, and {ignored}."
    )


def _near_text(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names)[:1000], 1, cutoff=0.5)
    return f" (near: {near[0]})" if near else ""


def _tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
