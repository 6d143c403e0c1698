"""Predicates and specs: the answer for each leaf of a tree, and of the arguments of a call.

Leaves are arrays, numbers, functions and so on at the ends of a pytree, and, in its graph objects, the
values of Variables and of data attributes; functions, text and other objects in their containers are
static.  A Variable (or object) with several paths is one: its value is one leaf, and the rebuilt tree
refers to it by all of these paths.  None is not a leaf.

On the way in, leaves that are not traced become part of the key (`filter_jit`) or are captured (the
other transforms).  On the way out, leaves that are not arrays cross as static data beside the `OutDef`.

A spec is a literal, or a pytree of literals that is a prefix of the tree.  A literal is an answer
itself (a bool, or an axis), a function of the leaf, or a Variable filter of the library (`Param`,
`PathContains("head")`, `Not(...)`), which looks at the leaf's path and Variable.  Where the tree
has a graph object the spec may have one of the same form, whose leaves are literals.

How a spec is divided among the leaves is that of every prefix (`boundary/_labels.py`): here is only
which parts of it are literals, and what one answers.
"""

from __future__ import annotations

import dataclasses
import types
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite import filters
from nnxlite._base.config import Modes
from nnxlite._base.errors import path_text, short_type
from nnxlite._base.jax import as_integer
from nnxlite.boundary._call_def import (
    ArgumentLeaf,
    CallDef,
    Inner,
    Partition,
)
from nnxlite.boundary._inputs import Inputs, is_root
from nnxlite.boundary._labels import agreed, broadcast, further_leaves, not_for_arrays
from nnxlite.boundary._leave import leave
from nnxlite.boundary._out import Fixed
from nnxlite.boundary._prefixes import NodePrefix, node_prefix
from nnxlite.graph._rebuild import Path
from nnxlite.transforms._call import Call
from nnxlite.transforms._wrapper import Options, unbind

_ARRAYS = (jax.Array, np.ndarray, np.generic)
_SCALARS = (bool, int, float, complex)


def is_array(element: tp.Any) -> tp.TypeGuard[jax.Array | np.ndarray]:
    """Whether a leaf is an array: of JAX (traced or not) or of NumPy, NumPy scalars included.

    Args:
        element: a leaf.

    Returns:
        A bool.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.is_array(jnp.zeros(2)), nnx.is_array(1.0)
    (True, False)
    """
    return isinstance(element, _ARRAYS)


def only_arrays(leaves: tp.Sequence[tp.Any]) -> bool:
    """Whether all leaves are of classes of arrays; cheap for many leaves, as they have few classes."""
    return all(issubclass(kind, _ARRAYS) for kind in set(map(type, leaves)))


def are_arrays(leaves: tp.Sequence[tp.Any]) -> list[bool]:
    """`is_array` of each leaf; each class is checked once."""
    by_class = {kind: issubclass(kind, _ARRAYS) for kind in set(map(type, leaves))}
    return [by_class[type(leaf)] or is_array(leaf) for leaf in leaves]


def has_shape(element: tp.Any) -> bool:
    """Whether a leaf is an array or a `jax.ShapeDtypeStruct`."""
    return isinstance(element, (*_ARRAYS, jax.ShapeDtypeStruct))


def is_inexact_array(element: tp.Any) -> tp.TypeGuard[jax.Array | np.ndarray]:
    """Whether a leaf is an array of floating-point or complex numbers.

    Args:
        element: a leaf.

    Returns:
        A bool.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.is_inexact_array(jnp.zeros(2)), nnx.is_inexact_array(jnp.arange(2))
    (True, False)
    """
    return isinstance(element, _ARRAYS) and jnp.issubdtype(element.dtype, jnp.inexact)


def is_array_like(element: tp.Any) -> bool:
    """Whether JAX can make an array of a leaf: an array, a number, or an object with `__jax_array__`.

    Args:
        element: a leaf.

    Returns:
        A bool.

    >>> import nnxlite as nnx
    >>> nnx.is_array_like(1.0), nnx.is_array_like("one")
    (True, False)
    """
    return isinstance(element, (*_ARRAYS, *_SCALARS)) or _converts(element)


def _converts(element: tp.Any) -> bool:  # a tracer has the attribute, and None in it
    return callable(getattr(element, "__jax_array__", None)) and not isinstance(element, type)


def is_inexact_array_like(element: tp.Any) -> bool:
    """Whether JAX can make a floating-point or complex array of a leaf.

    Args:
        element: a leaf.

    Returns:
        A bool.

    >>> import nnxlite as nnx
    >>> nnx.is_inexact_array_like(1.0), nnx.is_inexact_array_like(1)
    (True, False)
    """
    if not isinstance(element, _ARRAYS) and _converts(element):
        element = element.__jax_array__()
    return isinstance(element, (float, complex)) or is_inexact_array(element)


@dataclasses.dataclass(frozen=True)
class if_array:
    """An axis for arrays, None for every other leaf; the default axes of `filter_vmap`.

    Args:
        axis: the axis of arrays.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.if_array(1)(jnp.zeros(2)), nnx.if_array(1)("name")
    (1, None)
    """

    axis: int

    def __call__(self, element: tp.Any) -> int | None:
        """The axis of one leaf.

        Args:
            element: a leaf.
        """
        return self.axis if is_array(element) else None


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


IsLeaf: tp.TypeAlias = tp.Callable[[tp.Any], bool]


def leaves_of(tree: tp.Any) -> Inputs:
    """The leaves of any tree, and its `definition`."""
    return Inputs(tree, trees=True, inside=True)


def refuse_writes(inner: Inner, what: str) -> None:
    """Raise ValueError where a function changed its arguments and the change would be dropped."""
    definition = leave(inner, None).definition
    if definition.written or definition.restructures:
        leaves = inner.call.graph_leaves()
        names = ", ".join(f"'{path_text(leaves[i].below)}'" for i in definition.written[:5])
        raise ValueError(
            f"{what} changes its arguments ({names or 'their structure'}), and the change cannot "
            "leave it. Return the new value instead, and write it outside."
        )


def chosen_first(chosen: tp.Iterable[tp.Any]) -> Partition:
    """Leaves divided into the chosen ones and the rest."""
    return Partition(tuple(map(bool, chosen)))


def tree_out(
    tree: tp.Any, is_traced: tp.Callable[[tp.Any], bool] = is_array
) -> tuple[Fixed, list[tp.Any]]:
    """A tree that crosses on its own, as a `CallDef` and the traced leaves; its objects will be new."""
    parts = leaves_of(tree)
    parts.make_static([not is_traced(leaf) for leaf in parts.leaves])
    return Fixed(parts.definition), parts.leaves


def filtered(name: str, run: tp.Callable[..., tp.Any] = Call, **more: tp.Any) -> Options:
    """The options of a filtered transform."""
    return Options.of(name, Modes(True, True), run, **more)._replace(is_array=is_array)


def call_of(name: str, fun: tp.Any, args: tp.Iterable[tp.Any], kwargs: dict[str, tp.Any]) -> Call:
    """A call of a function under a transform that returns no wrapper."""
    return Call(filtered(name), unbind(fun, pytrees=True), tuple(args), kwargs)
