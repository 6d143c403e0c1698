"""Donation: which leaves of a jitted call give their buffers away, and how they are dealt out."""

from __future__ import annotations

import itertools
import operator
import typing as tp

from nnxlite._errors import path_text
from nnxlite.boundary import CallDef


class Donation(tp.NamedTuple):
    """What `donate="written"` reuses for one structure of arguments.

    Attributes:
        paths: where the donated Variables are, argument first.
        bytes: the memory that their buffers give back in each call.
    """

    paths: tuple[str, ...]
    bytes: int


class Groups:
    """Which leaves of a call are donated, and how to deal them out: what stays first, then what goes.

    Attributes:
        flags: for each plain leaf, and for each graph leaf, whether it is donated.
    """

    __slots__ = ("_given_values", "_kept_values", "_plain", "flags")

    def __init__(self, plain: list[bool], values: list[bool]) -> None:
        self.flags = plain, values
        self._plain = (_picker(plain, False), _picker(plain, True)) if True in plain else None
        self._kept_values, self._given_values = _picker(values, False), _picker(values, True)

    def __call__(
        self, plain: list[tp.Any], values: list[tp.Any]
    ) -> tuple[tp.Sequence[tp.Any], ...]:
        kept, given = self._kept_values(values), self._given_values(values)
        if self._plain is None:
            return plain, kept, [], given
        return self._plain[0](plain), kept, self._plain[1](plain), given


def _picker(flags: list[bool], wanted: bool) -> tp.Callable[[list[tp.Any]], tp.Sequence[tp.Any]]:
    """A function that takes the items whose flag is as wanted."""
    chosen = [i for i, flag in enumerate(flags) if flag is wanted]
    if len(chosen) == len(flags):
        return lambda items: items
    ends = [i for i in range(len(flags) + 1) if (i in (0, len(flags))) or flags[i] != flags[i - 1]]
    runs = [slice(a, b) for a, b in itertools.pairwise(ends) if flags[a] is wanted]
    if len(runs) == 1:
        return operator.itemgetter(runs[0])
    if len(runs) > FEW_RUNS:
        return operator.itemgetter(*chosen)

    def pick(items: list[tp.Any]) -> list[tp.Any]:
        found: list[tp.Any] = []
        for run in runs:
            found += items[run]
        return found

    return pick


FEW_RUNS = 8
"""Up to so many runs of neighbours are quicker to copy than their items are to collect."""


def leaf_texts(call: CallDef) -> tuple[list[str], list[str]]:
    """Where the plain leaves and the graph leaves are found, in words."""

    def text(position: int, path: tuple[tp.Any, ...] = ()) -> str:
        _, name, *inside = call.argument_of(position)
        where = f" at '{path_text((*inside, *path))}'" if (inside or path) else ""
        return f"argument {name!r}{where}"

    roots = set(call.where)
    plain = [text(i) for i in range(call.treedef.num_leaves) if i not in roots]
    places = zip(call.leaf_roots(), call.leaf_paths())
    return plain, [text(call.where[root], path) for root, path in places]
