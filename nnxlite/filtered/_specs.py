"""Specs: the answer for each leaf of a tree.

A spec is a literal, or a pytree of literals that is a prefix of the tree.  A literal is an answer
itself (a bool, or an axis), a function of the leaf, or a Variable filter of the library (`Param`,
`PathContains("head")`, `Not(...)`), which looks at the leaf's path and Variable.  Where the tree
has a graph object the spec may have one of the same form, whose leaves are literals.
"""

from __future__ import annotations

import collections
import types
import typing as tp

import jax

from nnxlite import filters
from nnxlite._errors import path_text, short_type
from nnxlite.boundary import ArgumentLeaf, is_root, template_of
from nnxlite.filtered._errors import not_a_prefix, two_answers
from nnxlite.filtered._leaves import Form, Leaves
from nnxlite.filtered._walk import children
from nnxlite.graph import OBJECT, Path, kind_of

_PATH_FILTERS = (filters.PathContains, filters.PathIn, filters._Joined, filters.Not)
_FILTERS = (
    type,
    str,
    types.EllipsisType,
    filters.Everything,
    filters.Frozen,
    filters.Nothing,
    filters.OfType,
    filters.WithTag,
    *_PATH_FILTERS,
)


def is_filter(literal: tp.Any) -> bool:
    """Whether a literal is a Variable filter, as opposed to a function of a leaf."""
    return isinstance(literal, _FILTERS)


class SpecKind(tp.NamedTuple):
    """The kind of the answers of a spec.

    Attributes:
        name: of the spec, in messages.
        is_answer: whether a literal is an answer by itself.
        needs: the valid literals, in messages.
        matched, unmatched: the answer of a filter that matches, or does not.
    """

    name: str
    is_answer: tp.Callable[[tp.Any], bool]
    needs: str
    matched: tp.Any = True
    unmatched: tp.Any = False

    def is_literal(self, spec: tp.Any) -> bool:
        """Whether a whole spec is one literal."""
        return self.is_answer(spec) or is_filter(spec) or isinstance(spec, types.FunctionType)

    def answer(self, literal: tp.Any, path: Path, variable: tp.Any, leaf: tp.Any) -> tp.Any:
        """The answer of a literal for one leaf.

        Raises ValueError for a literal of another type, or a function that gives no answer.
        """
        if self.is_answer(literal):
            return literal
        if is_filter(literal):
            matches = filters.to_predicate(literal)(path, variable)
            return self.matched if matches else self.unmatched
        if not callable(literal):
            raise ValueError(
                f"{self.name} must consist of {self.needs} only, got {short_type(literal)} "
                f"{literal!r} for the leaf at '{path_text(path)}'."
            )
        answer: tp.Any = literal(leaf)
        if hasattr(answer, "dtype"):
            answer = answer.item()  # a NumPy bool, or a concrete array
        if not self.is_answer(answer):
            raise ValueError(
                f"{self.name}: the function {literal!r} answered {answer!r} for the leaf at "
                f"'{path_text(path)}'; it must answer with {self.needs.partition(',')[0]}."
            )
        return answer


MASK = SpecKind(
    "filter_spec",
    lambda x: isinstance(x, bool),
    "booleans, callables and Variable filters",
)


def answers(tree: Leaves, spec: tp.Any, kind: SpecKind = MASK) -> list[tp.Any]:
    """The answer for each leaf of a tree.

    Raises ValueError where the spec is not a prefix of the tree, for an invalid literal, and where a
    shared Variable would get two answers.
    """
    form = tree.form
    parts = _by_position(form, spec, kind)
    literals = {p: _by_path(parts[p]) for p in form.where if is_root(parts[p])}

    def answer(leaf: int, place: ArgumentLeaf) -> tp.Any:
        part = parts[place.position]
        path = place.path if place.root is None else place.below
        if place.root is None and is_root(part):
            raise not_a_prefix(kind.name, tree, place, part, tree.leaves[leaf])
        if place.position in literals:
            inside = literals[place.position]
            ends = range(len(path), -1, -1)
            above = next((path[:end] for end in ends if path[:end] in inside), None)
            if above is None:
                raise not_a_prefix(kind.name, tree, place, part)
            part = inside[above]
        return kind.answer(part, path, tree.variable(leaf), tree.leaves[leaf])

    out = [answer(*pair) for pair in enumerate(form.places)]
    first = parts[form.where[0]] if form.where else None
    if not (is_root(first) or isinstance(first, _PATH_FILTERS)):
        if all(parts[position] is first for position in form.where):
            return out  # no answer depends on the path
    for leaf, place in form.further_places():
        other = answer(leaf, place)
        if other != out[leaf]:
            raise two_answers(kind.name, tree, leaf, place, out[leaf], other)
    return out


def root_parts(form: Form, spec: tp.Any, kind: SpecKind) -> list[tp.Any]:
    """The part of a spec that belongs to each graph object of a tree."""
    parts = _by_position(form, spec, kind)
    return [parts[position] for position in form.where]


def _by_position(form: Form, spec: tp.Any, kind: SpecKind) -> list[tp.Any]:
    """The part of a spec that belongs to each argument leaf or root."""
    stop = lambda x: is_root(x) or kind.is_literal(x)
    parts, spec_def = jax.tree_util.tree_flatten(spec, is_leaf=stop)
    try:
        below = spec_def.flatten_up_to(template_of(form.treedef))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{kind.name} is not a prefix of the tree: it has the structure {spec_def}, the tree "
            f"has {form.treedef}. ({error})"
        ) from None
    out: list[tp.Any] = []
    for part, tree_below in zip(parts, below):
        out += [part] * len(jax.tree_util.tree_leaves(tree_below))
    return out


def _by_path(spec: tp.Any) -> dict[Path, tp.Any]:
    """The literals inside a graph object, by path from it."""
    out: dict[Path, tp.Any] = {}
    pending: list[tuple[Path, tp.Any]] = [((), spec)]
    visits: collections.Counter[int] = collections.Counter()
    while pending:
        path, value = pending.pop()
        is_object = kind_of(value) == OBJECT
        visits[id(value)] += is_object
        if visits[id(value)] > 9:  # a cycle
            continue
        parts = children(value)
        pending += [((*path, *step), child) for step, child in parts]
        if not (parts or is_object or value is None):
            out[path] = value
    return out
