"""Walking several trees in step, level by level, with the sharing of the first kept.

Recursion is written as generators and run by a loop, so that no depth meets the recursion limit.
"""

from __future__ import annotations

import typing as tp

import jax

from nnxlite._errors import path_text, short_type
from nnxlite._jax import is_pytree_leaf, key_name
from nnxlite.graph import OBJECT, VARIABLE, Path, is_data, kind_of, sorted_items
from nnxlite.variables import make

Steps = tp.Generator["Steps", tp.Any, tp.Any]


def run_deep(steps: Steps) -> tp.Any:
    """Run a generator that yields generators for the calls it wants made; returns its result."""
    stack = [steps]
    value: tp.Any = None
    while stack:
        try:
            stack.append(stack[-1].send(value))
            value = None
        except StopIteration as stop:
            stack.pop()
            value = stop.value
    return value


def level(value: tp.Any) -> tuple[list[tuple[tp.Any, tp.Any]], tp.Any] | None:
    """The (name, child) pairs of an ordinary container and its treedef; None for a leaf."""
    if value is None or is_pytree_leaf(value):
        return None
    asked: list[tp.Any] = []

    def below_the_top(part: tp.Any) -> bool:  # by number, for a container may hold itself
        asked.append(None)
        return len(asked) > 1

    pairs, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=below_the_top)
    return [(key_name(path[0]), child) for path, child in pairs], treedef


class _Keys(tp.NamedTuple):
    """The form of a dict, whose keys need not be of one type as JAX would have it."""

    keys: tuple[tp.Any, ...]

    def unflatten(self, children: tp.Iterable[tp.Any]) -> dict[tp.Any, tp.Any]:
        """The dict of its values."""
        return dict(zip(self.keys, children))


def _level(value: tp.Any) -> tuple[list[tuple[tp.Any, tp.Any]], tp.Any] | None:
    if type(value) is not dict:
        return level(value)
    items = sorted_items(value)
    return items, _Keys(tuple(key for key, _ in items))


def combined(
    fun: tp.Callable[..., tp.Any],
    trees: tp.Sequence[tp.Any],
    what: str,
    is_leaf: tp.Callable[[tp.Any], bool] | None = None,
) -> tp.Any:
    """Trees joined leaf by leaf: `fun(*leaves)`, None where a tree has nothing.

    The first tree that is not None gives the form of each place, and what is static in objects: their
    static attributes, and in their containers all that is no data. Where all the trees are None, or
    all but one below a container, `fun` still decides about every leaf.

    Raises ValueError naming the place where two trees differ in structure.
    """
    memo: dict[int, tp.Any] = {}
    keep: list[tp.Any] = []  # what the memo knows by id

    def join(path: Path, values: tuple[tp.Any, ...], held: bool = False) -> Steps:
        lead = next((v for v in values if v is not None), None)
        if lead is None:
            return fun(*values)
        if is_leaf is not None and is_leaf(lead):
            return fun(*values)
        kind = kind_of(lead)
        if kind == OBJECT:
            return (yield join_objects(path, lead, values))
        if kind == VARIABLE:
            if id(lead) not in memo:
                _same_type(path, lead, values, what)
                raw = tuple(None if v is None else v.get_raw_value() for v in values)
                memo[id(lead)] = make(lead._box.definition, (yield join(path, raw)))
                keep.append(lead)
            return memo[id(lead)]
        found = _level(lead)
        if found is None:
            if held and not is_data(lead):
                return lead
            for value in values:
                if value is not None and _level(value) is not None:
                    _differ(path, lead, value, what)
            return fun(*values)
        pairs, treedef = found
        columns: list[list[tp.Any]] = [[] for _ in pairs]
        for value in values:
            other = None if value is None else _level(value)
            if value is not None and (other is None or other[1] != treedef):
                _differ(path, lead, value, what)
            for number, column in enumerate(columns):
                column.append(None if other is None else other[0][number][1])
        children = []
        for (name, _), column in zip(pairs, columns):
            children.append((yield join((*path, name), tuple(column), held)))
        return treedef.unflatten(children)

    def join_objects(path: Path, lead: tp.Any, values: tuple[tp.Any, ...]) -> Steps:
        if id(lead) in memo:
            return memo[id(lead)]
        _same_type(path, lead, values, what)
        new = memo[id(lead)] = lead.__copy__()
        keep.append(lead)
        status = lead._nnx_status
        attributes = new.__dict__
        for name in list(attributes):
            parts = tuple(None if v is None else v.__dict__.get(name) for v in values)
            if status.get(name):
                inside = _level(attributes[name]) is not None
                attributes[name] = yield join((*path, name), parts, inside)
        return new

    return run_deep(join((), tuple(trees)))


def _same_type(path: Path, lead: tp.Any, values: tuple[tp.Any, ...], what: str) -> None:
    for value in values:
        if value is not None and type(value) is not type(lead):
            _differ(path, lead, value, what)


def _differ(path: Path, one: tp.Any, other: tp.Any, what: str) -> tp.NoReturn:
    def shown(value: tp.Any) -> str:
        found = None if kind_of(value) in (OBJECT, VARIABLE) else _level(value)
        count = (
            "" if found is None else f" with {len(found[0])} children {[n for n, _ in found[0]]}"
        )
        return f"{short_type(value)}{count}"

    raise ValueError(
        f"{what}: the trees differ in structure at '{path_text(path)}': one has {shown(one)}, "
        f"another {shown(other)}."
    )
