"""Specs: which answer each leaf of a tree gets.

A spec is a literal or a pytree of literals that is a prefix of the tree.  A literal is an answer
itself (a bool, or an axis), a function of the leaf, or a Variable filter of the library (`Param`,
`PathContains("head")`, `Not(...)`), which looks at the leaf's path and Variable.  Where the tree
holds a graph object the spec may hold one of the same form, whose leaves are literals.
"""

from __future__ import annotations

import types
import typing as tp

import jax

from nnxlite import filters
from nnxlite._errors import path_text, short_type
from nnxlite.boundary import aliases, is_root, leaves_below
from nnxlite.filtered._apart import Apart
from nnxlite.graph import CONTAINERS, OBJECT, Path, container_items, kind_of
from nnxlite.variables import Variable

_FILTERS = (
    type,
    str,
    types.EllipsisType,
    filters._Joined,
    filters.Everything,
    filters.Not,
    filters.Nothing,
    filters.OfType,
    filters.PathContains,
    filters.PathIn,
    filters.WithTag,
)


def is_filter(literal: tp.Any) -> bool:
    """Whether a literal is a Variable filter, as opposed to a function of a leaf."""
    return isinstance(literal, _FILTERS)


class Reading(tp.NamedTuple):
    """How a kind of spec is read.

    Attributes:
        name: of the spec, in messages.
        is_answer: whether a literal is an answer by itself.
        needs: what literals may be, in messages.
        matched, unmatched: what a filter that matches, or does not, answers.
    """

    name: str
    is_answer: tp.Callable[[tp.Any], bool]
    needs: str
    matched: tp.Any = True
    unmatched: tp.Any = False

    def answer(self, literal: tp.Any, path: Path, variable: tp.Any, leaf: tp.Any) -> tp.Any:
        """What a literal says of a leaf.

        Raises ValueError for a literal that is none, or a function that gives no answer.
        """
        if self.is_answer(literal):
            return literal
        if is_filter(literal):
            yes = filters.to_predicate(literal)(path, variable)
            return self.matched if yes else self.unmatched
        if not callable(literal):
            raise ValueError(
                f"{self.name} must consist of {self.needs} only, got {short_type(literal)} "
                f"{literal!r} for the leaf at '{path_text(path)}'."
            )
        found: tp.Any = literal(leaf)
        if hasattr(found, "dtype"):
            found = found.item()  # a NumPy bool, or a concrete array
        if not self.is_answer(found):
            raise ValueError(
                f"{self.name}: the function {literal!r} answered {found!r} for the leaf at "
                f"'{path_text(path)}'; it must answer with {self.needs.partition(',')[0]}."
            )
        return found


MASK = Reading(
    "filter_spec",
    lambda x: isinstance(x, bool),
    "booleans, callables and Variable filters",
)


def is_literal(spec: tp.Any, reading: Reading) -> bool:
    """Whether a whole spec is one literal."""
    return reading.is_answer(spec) or is_filter(spec) or isinstance(spec, types.FunctionType)


def settle(apart: Apart, spec: tp.Any, reading: Reading = MASK) -> list[tp.Any]:
    """The answer for each leaf of a tree.

    Raises ValueError where the spec is no prefix of the tree, a literal is none, or a shared
    Variable would get two answers.
    """
    if not apart.leaves:
        settle_positions(apart, spec, reading)
        return []
    if is_literal(spec, reading) and not is_filter(spec):
        if reading.is_answer(spec):
            return [spec] * len(apart.leaves)
        try:
            return [reading.answer(spec, (), None, x) for x in apart.leaves]
        except ValueError:  # once more, with the paths, which only the message needs
            pairs = zip(apart.paths, apart.leaves)
            return [reading.answer(spec, path, None, x) for path, x in pairs]
    return settle_at(apart, settle_positions(apart, spec, reading), reading)


def settle_positions(apart: Apart, spec: tp.Any, reading: Reading) -> list[tp.Any]:
    """The part of a spec that belongs to each argument leaf or root."""
    treedef = apart.call.treedef
    if is_literal(spec, reading):
        return [spec] * treedef.num_leaves
    stop = lambda x: is_root(x) or is_literal(x, reading)
    literals, spec_def = jax.tree_util.tree_flatten(spec, is_leaf=stop)
    tree = jax.tree_util.tree_unflatten(treedef, range(treedef.num_leaves))
    try:
        below = spec_def.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{reading.name} is no prefix of the tree: it has the structure {spec_def}, the tree "
            f"has {treedef}. ({error})"
        ) from None
    out: list[tp.Any] = []
    for literal, part in zip(literals, below):
        out += [literal] * len(jax.tree_util.tree_leaves(part))
    return out


def settle_at(apart: Apart, by_position: list[tp.Any], reading: Reading) -> list[tp.Any]:
    """The answer for each leaf, from the part of the spec for each argument leaf or root."""
    call = apart.call
    inside = call.leaf_paths()
    maps = {p: _leaf_map(by_position[p]) for p in call.where if is_root(by_position[p])}

    def literal_at(position: int, path: Path) -> tp.Any:
        spec = maps.get(position)
        if spec is None:
            return by_position[position]
        for end in range(len(path), -1, -1):
            if path[:end] in spec:
                return spec[path[:end]]
        raise ValueError(
            f"{reading.name} is no prefix of the tree: the {type(by_position[position]).__name__} "
            f"given for '{path_text(apart.position_paths[position])}' says nothing about "
            f"'{path_text(path)}'."
        )

    out: list[tp.Any] = []
    by_number: dict[int, list[int]] = {}
    for leaf, (place, value) in enumerate(zip(apart.places, apart.leaves)):
        if place.number is None:
            path = apart.position_paths[place.position]
            if is_root(by_position[place.position]):
                raise ValueError(
                    f"{reading.name} is no prefix of the tree: it has a "
                    f"{type(by_position[place.position]).__name__} for '{path_text(path)}', where "
                    f"the tree has a leaf {short_type(value)}."
                )
        else:
            path = inside[place.number]
            by_number.setdefault(place.number, []).append(leaf)
        literal = literal_at(place.position, path)
        out.append(reading.answer(literal, path, place.variable, value))
    first = by_position[call.where[0]] if call.where else None
    if all(by_position[p] is first for p in call.where) and not (
        is_root(first)
        or isinstance(first, (filters.PathIn, filters.PathContains))
        or isinstance(first, (filters._Joined, filters.Not))
    ):
        return out  # the same answer by every path
    for node, root, path in aliases(call):
        for number, tail in leaves_below(call, node):
            position, other_path = call.where[root], (*path, *tail)
            for leaf in by_number.get(number, ()):
                literal = literal_at(position, other_path)
                place = apart.places[leaf]
                other = reading.answer(literal, other_path, place.variable, apart.leaves[leaf])
                if other != out[leaf]:
                    _refuse_two_answers(
                        apart, reading, leaf, position, other_path, out[leaf], other
                    )
    return out


def _refuse_two_answers(
    apart: Apart,
    reading: Reading,
    leaf: int,
    position: int,
    path: Path,
    one: tp.Any,
    other: tp.Any,
) -> tp.NoReturn:
    variable = apart.places[leaf].variable
    kind = type(variable).__name__ if isinstance(variable, Variable) else "leaf"
    where = path_text((*apart.position_paths[position], *path))
    raise ValueError(
        f"Inconsistent {reading.name} for a shared {kind}: at '{path_text(apart.paths[leaf])}' it "
        f"is {one!r}, at '{where}' it is {other!r}. A shared {kind} is one leaf: give both places "
        "the same answer, or do not share it."
    )


def _leaf_map(spec: tp.Any) -> dict[Path, tp.Any]:
    """The literals inside a graph object, by path from it."""
    out: dict[Path, tp.Any] = {}
    pending: list[tuple[Path, tp.Any]] = [((), spec)]
    seen: dict[int, int] = {}
    while pending:
        path, value = pending.pop()
        kind = kind_of(value)
        if kind == OBJECT:
            if seen.get(id(value), 0) > 8:  # a cycle
                continue
            seen[id(value)] = seen.get(id(value), 0) + 1
            status = value._nnx_status
            pending += [((*path, n), v) for n, v in value.__dict__.items() if status.get(n)]
        elif isinstance(value, Variable):
            pending.append((path, value.get_raw_value()))
        elif kind in CONTAINERS:
            pending += [((*path, k), v) for k, v in container_items(value, kind)]
        elif value is not None:
            out[path] = value
    return out
