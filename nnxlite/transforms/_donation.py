"""Donation: which leaves of a jitted call give their buffers away, and how they are dealt out."""

from __future__ import annotations

import itertools
import operator
import typing as tp

import jax

from nnxlite._errors import path_text
from nnxlite.boundary import Body, CallDef
from nnxlite.transforms._arguments import Selection


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


class Donor:
    """What decides which leaves a jitted function donates, once for each kind of call.

    Args:
        name: of the function.
        chosen: the arguments to donate.
        trace: gives the traced body for some leaves, where what it writes is to be donated.
    """

    def __init__(self, name: str, chosen: Selection, trace: tp.Callable[..., Body | None]) -> None:
        self._name = name
        self._chosen = chosen
        self._trace = trace
        self._traced: tuple[CallDef, Body] | None = None

    def groups(
        self, call: CallDef, plain: list[tp.Any], values: list[tp.Any]
    ) -> tuple[tp.Sequence[tp.Any], ...]:
        """The leaves, dealt out.

        Raises ValueError where a buffer would be donated and used elsewhere in the first call of its
        kind; XLA refuses it in the others.
        """
        deal = call.cache.get(self)
        if deal is not None:
            return deal(plain, values)
        body = self._trace(call, plain, values)
        if body is None:
            flags = self._given(call)
        else:
            written = set(body.definition.written)
            flags = [False] * len(plain), [i in written for i in range(len(values))]
            self._traced = (call, body)
        deal = call.cache[self] = Groups(*flags)
        groups = deal(plain, values)
        self.refuse_shared_buffers(call, groups)
        return groups

    def _given(self, call: CallDef) -> tuple[list[bool], list[bool]]:
        """For each plain leaf and each graph leaf whether its argument is to be donated."""
        args, kwargs = jax.tree_util.tree_unflatten(call.treedef, range(call.treedef.num_leaves))
        static = {n for n, _ in call.extra.statics if isinstance(n, int)}
        numbers = [n for n in range(len(args) + len(static)) if n not in static]
        flags: list[bool] = []
        for number, arg in zip(numbers, args):
            chosen = number - call.extra.num_bound in self._chosen.numbers
            flags += [chosen] * len(jax.tree_util.tree_leaves(arg))
        for name in sorted(kwargs):
            flags += [name in self._chosen.names] * len(jax.tree_util.tree_leaves(kwargs[name]))
        roots = set(call.where)
        plain = [f for i, f in enumerate(flags) if i not in roots]
        return plain, [flags[call.where[root]] for root in call.leaf_roots()]

    def donated(self, call: CallDef) -> set[int]:
        """The graph leaves that are donated in a kind of call."""
        return {leaf for leaf, flag in enumerate(call.cache[self].flags[1]) if flag}

    def take_traced(self, call: CallDef, plain: list[tp.Any], values: list[tp.Any]) -> Body | None:
        """The body that was traced already, if it is for these arguments; it is used once."""
        traced, self._traced = self._traced, None
        if traced is None or traced[0] is not call or not traced[1].fits(plain, values):
            return None
        return traced[1]

    def ungroup(
        self, call: CallDef, groups: tuple[tp.Sequence[tp.Any], ...]
    ) -> tuple[list[tp.Any], list[tp.Any]]:
        """The inverse of `groups`."""
        plain_flags, value_flags = call.cache[self].flags
        kept_plain, kept_values, given_plain, given_values = map(iter, groups)
        return (
            [next(given_plain if d else kept_plain) for d in plain_flags],
            [next(given_values if d else kept_values) for d in value_flags],
        )

    def refuse_shared_buffers(self, call: CallDef, groups: tuple[tp.Sequence[tp.Any], ...]) -> None:
        """Raise ValueError where one buffer would be donated twice, or donated and read."""
        kept_plain, kept_values, given_plain, given_values = groups
        given = [*given_plain, *given_values]
        seen = set(map(id, given))
        if (
            len(seen) == len(given)
            and seen.isdisjoint(map(id, kept_values))
            and seen.isdisjoint(map(id, kept_plain))
        ):
            return
        seen = {id(x) for x in given if isinstance(x, jax.Array)}
        leaves, flags = self.ungroup(call, groups), call.cache[self].flags
        names: dict[int, list[str]] = {}
        for part in zip(leaves, flags, leaf_texts(call)):
            for x, donated, text in zip(*part):
                found = names.setdefault(id(x), [])
                found.insert(0 if donated else len(found), text)
        twice = next((f for key, f in names.items() if key in seen and len(f) > 1), None)
        if twice is None:  # Python scalars may well be the same object
            return
        raise ValueError(
            f"jit({self._name}): the same array buffer is donated at {twice[0]} and used at "
            f"{twice[1]}. A donated buffer can be used once: copy the array in one of the two "
            "places, share one Variable between them, or do not donate."
        )


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
