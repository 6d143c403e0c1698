"""Specs: the answer for each leaf of a tree.

A spec is a literal, or a pytree of literals that is a prefix of the tree.  A literal is an answer
itself (a bool, or an axis), a function of the leaf, or a Variable filter of the library (`Param`,
`PathContains("head")`, `Not(...)`), which looks at the leaf's path and Variable.  Where the tree
has a graph object the spec may have one of the same form, whose leaves are literals.

How a spec is divided among the leaves is that of every prefix (`boundary/_labels.py`): here is only
which parts of it are literals, and what one answers.
"""

from __future__ import annotations

import types
import typing as tp

from nnxlite import filters
from nnxlite._base.errors import path_text, short_type
from nnxlite._base.jax import as_integer
from nnxlite.boundary._call_def import ArgumentLeaf, CallDef
from nnxlite.boundary._inputs import Inputs, is_root
from nnxlite.boundary._labels import agreed, broadcast, further_leaves, not_for_arrays
from nnxlite.boundary._prefixes import NodePrefix, node_prefix
from nnxlite.graph._rebuild import Path

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
        literal = as_integer(literal)
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


def answers(tree: Inputs, spec: tp.Any, kind: SpecKind = MASK) -> list[tp.Any]:
    """The answer for each leaf of a tree.

    Raises ValueError where the spec is not a prefix of the tree, for an invalid literal, and where a
    shared Variable would get two answers.
    """
    call, leaves, variables = tree.definition, tree.leaves, tree.variables()
    parts = _by_position(call, spec, kind)

    def answer(leaf: int, place: ArgumentLeaf) -> tp.Any:
        part, variable = parts[place.position], variables[leaf]
        path = place.path if place.root is None else place.below
        if isinstance(part, NodePrefix):
            if place.root is None:
                raise not_for_arrays(part, kind.name, place.text())
            part = part.map_prefix(path, variable)
        return kind.answer(part, path, variable, leaves[leaf])

    first = parts[call.where[0]] if call.where else None
    asks_path = isinstance(first, (NodePrefix, *_PATH_FILTERS))
    differ = asks_path or any(parts[position] is not first for position in call.where)
    further = further_leaves(call) if differ else ()  # one literal gives all paths the same answer
    return agreed(kind.name, call.leaves(), further, answer, variables.__getitem__)


def root_parts(call: CallDef, spec: tp.Any, kind: SpecKind) -> list[tp.Any]:
    """The part of a spec that belongs to each graph object of a tree."""
    parts = _by_position(call, spec, kind)
    return [parts[position] for position in call.where]


def _by_position(call: CallDef, spec: tp.Any, kind: SpecKind) -> list[tp.Any]:
    """The part of a spec that belongs to each argument leaf or root."""
    stops = lambda part: is_root(part) or kind.is_literal(part)
    parts = broadcast(spec, call.template(), kind.name, stops, "a filter")
    return [node_prefix(x, kind.is_literal) if is_root(x) else x for x in parts]


# Axes ---------------------------------------------------------------------------------------------


def _is_axis(answer: tp.Any) -> bool:
    return answer is None or isinstance(answer, int)


IN_AXES = SpecKind(
    "in_axes", _is_axis, "axes (ints or None), callables and Variable filters", 0, None
)
OUT_AXES = IN_AXES._replace(name="out_axes")


def is_mapped(axis: tp.Any) -> bool:
    """Whether a leaf is mapped; None and True pass it whole to every slice, False makes it static."""
    return axis is not None and not isinstance(axis, bool)
