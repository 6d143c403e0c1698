"""Tangents and cotangents: from trees in the form of some values to the leaves that JAX needs.

A tangent has the form of its primal: an array for an array, an object of the same kind for an
object (or `None`, or a State where only some of the Variables matter).  Leaves are matched by path,
so static attributes do not matter; what is shared in the primal must be shared in the tangent.
"""

from __future__ import annotations

import functools
import itertools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._jax import is_ref, new_ref
from nnxlite._state import State
from nnxlite.boundary import CallDef, Inputs, further_places, is_root, leaves_of_code
from nnxlite.graph import STATE, ArrayCode, Code, ContainerCode, GraphDef, NodeCode, Path, StaticDef
from nnxlite.variables import Variable, VariableDef, make

Place = tuple[int, Path]
"""The root of a leaf, by number, and the path from there."""

MISSING_LEAF: tp.Any = object()


class TangentForm(tp.NamedTuple):
    """What tangents are compared with.

    Attributes:
        call: the values, without their leaves.
        template: the part of the values' tree that has tangents, with positions for leaves.
        leaves: the leaves of the values.
        what: "tangent" or "cotangent".
        error: makes the errors about structure.
        partial: whether a State may lack leaves, which are then zero.
        wanted: for each leaf whether it can have a tangent; None for all.
        lenient: whether any tangent of a leaf without a derivative is ignored.
    """

    call: CallDef
    template: tp.Any
    leaves: tp.Sequence[tp.Any]
    what: str
    error: tp.Callable[[str], Exception]
    partial: bool = True
    wanted: tp.Sequence[bool] | None = None
    lenient: bool = False

    def text_of(self, place: Place) -> str:
        """The path of a graph leaf, for messages."""
        return self.call.text_of(*place)


def by_leaf(form: TangentForm, given: tp.Any) -> dict[int, tp.Any]:
    """The leaves of a tangent, by number of the leaf of the values that they belong to.

    Raises `form.error` where the tangent has another structure.
    """
    positions, treedef = jax.tree_util.tree_flatten(form.template)
    try:
        parts = treedef.flatten_up_to(given)
    except (ValueError, TypeError) as error:
        raise form.error(
            f"The {form.what} must have the tree structure of what it belongs to, {treedef}. "
            f"({error})"
        ) from None
    number = {position: leaf for leaf, position in enumerate(form.call.array_positions())}
    root_of = {position: root for root, position in enumerate(form.call.where)}
    arrays: dict[int, tp.Any] = {}
    roots: dict[int, tp.Any] = {}
    for position, part in zip(positions, parts):
        if position in root_of:
            roots[root_of[position]] = part
        else:
            value = part._box.value if isinstance(part, Variable) else part
            arrays[number[position]] = value
    graph = _graph_leaves(form, roots)
    return {**arrays, **{form.call.num_arrays + leaf: x for leaf, x in graph.items()}}


def _graph_leaves(form: TangentForm, roots: dict[int, tp.Any]) -> dict[int, tp.Any]:
    """The tangents of graph leaves, by leaf number, from those of the roots."""
    decoded = form.call.graphdef.decoded
    objects: dict[int, tp.Any] = {}
    out: dict[int, tp.Any] = {}
    for root, part in roots.items():
        code = decoded.roots[root]
        leaf = decoded.node_leaves[code.number] if isinstance(code, NodeCode) else -1
        if is_root(part):
            objects[root] = part
        elif part is None:
            continue
        elif leaf >= 0 and jax.tree_util.tree_structure(part) == jax.tree_util.tree_structure(
            form.leaves[form.call.num_arrays + leaf]
        ):
            out[leaf] = part
        else:
            raise form.error(
                f"The {form.what} of '{form.text_of((root, ()))}' must be an object of the same "
                f"form, a State, or None, got {type(part).__name__}."
            )
    if not objects:
        return out
    given = Inputs(list(objects.values()), form.call.trees)
    whole = len(objects) == len(decoded.roots) and (form.wanted is None or all(form.wanted))
    if whole and given.graphdef is form.call.graphdef:
        return {**out, **dict(enumerate(given.values))}
    return {**out, **_matched(form, objects, given)}


def _matched(form: TangentForm, objects: dict[int, tp.Any], given: Inputs) -> dict[int, tp.Any]:
    """Tangents of graph leaves, matched by their paths."""
    back = dict(enumerate(objects))
    wanted = places(form.call)
    if form.wanted is not None:
        flags = form.call.by_side(form.wanted)[1]
        wanted = {place: leaf for place, leaf in wanted.items() if flags[leaf]}
    offered = {(back[root], path): leaf for (root, path), leaf in places(given.define()).items()}
    unknown = [place for place in offered if place not in wanted]
    if unknown:
        raise form.error(
            f"The {form.what} has a leaf at '{form.text_of(unknown[0])}', where there is none to "
            "differentiate."
        )
    source: dict[int, tuple[int, Place]] = {}
    for place, leaf in wanted.items():
        other = offered.get(place)
        if other is None:
            continue
        known, first = source.setdefault(leaf, (other, place))
        if known != other:
            raise form.error(
                f"The leaf shared by '{form.text_of(first)}' and '{form.text_of(place)}' has two "
                f"different {form.what}s. Share the {form.what} in the same way."
            )
    for (root, path), leaf in wanted.items():
        if root in objects and leaf not in source:
            if not (form.partial and isinstance(objects[root], State)):
                raise form.error(f"The {form.what} has no leaf at '{form.text_of((root, path))}'.")
    return {leaf: given.values[other] for leaf, (other, _) in source.items()}


def places(call: CallDef) -> dict[Place, int]:
    """Each graph leaf by every path that it has."""
    every = itertools.chain(enumerate(call.graph_leaves()), further_places(call))
    return {(tp.cast(int, place.root), place.below): leaf for leaf, place in every}


def tangent_leaves(
    form: TangentForm, tangents: tp.Mapping[int, tp.Any], wanted: tp.Iterable[int]
) -> list[tp.Any]:
    """The tangents of some leaves; zero where none was given.

    Raises:
        ValueError: for a tangent of another shape.
        TypeError: for a tangent of another dtype.
    """
    return [_checked(form, i, form.leaves[i], tangents.get(i, MISSING_LEAF)) for i in wanted]


def _checked(form: TangentForm, leaf: int, value: tp.Any, tangent: tp.Any) -> tp.Any:
    """The tangent of a leaf that has this value."""

    def name() -> str:
        return form.call.leaves()[leaf].text()

    if is_ref(value):  # its tangent is a reference, too
        content = tangent[...] if is_ref(tangent) else tangent
        return new_ref(_checked(form, leaf, abstract(value), content))
    leaves, treedef = jax.tree_util.tree_flatten(value)
    dtypes = [tangent_dtype(leaf) for leaf in leaves]
    if form.lenient and all(dtype == FLOAT0 for dtype in dtypes):
        tangent = MISSING_LEAF
    if tangent is MISSING_LEAF or (tangent is None and value is not None):
        return jax.tree_util.tree_map(zero_tangent, value)
    given, other = jax.tree_util.tree_flatten(tangent)
    if other != treedef:
        raise form.error(
            f"The {form.what} of '{name()}' has the tree structure {other}, the value has "
            f"{treedef}."
        )
    for x, t, dtype in zip(leaves, given, dtypes):
        if _shape(x) != _shape(t):
            raise ValueError(
                f"The {form.what} of '{name()}' has the shape {_shape(t)}, the value has "
                f"{_shape(x)}."
            )
        if _dtype(t) != dtype:
            why = " (an integer has no derivative)" if dtype == FLOAT0 else ""
            raise TypeError(
                f"The {form.what} of '{name()}' has the dtype {_dtype(t)}, expected {dtype}{why}."
            )
    return tangent


class States:
    """The leaves of a graph in the form that gradients have with graph updates on.

    Each object is a State. A shared object has its leaves at its first path, and is an empty State at
    the others.
    """

    def __init__(self, graphdef: GraphDef[tp.Any], leaves: tp.Mapping[int, tp.Any]) -> None:
        self._graphdef = graphdef
        self._leaves = leaves

    def of_root(self, root: int) -> tp.Any:
        """The gradient of a root; that of a State is without the entries that have no leaf here."""
        decoded = self._graphdef.decoded
        code = decoded.roots[root]
        if isinstance(code, ContainerCode) and code.definition.kind == STATE:
            if any(leaf not in self._leaves for leaf, _ in leaves_of_code(decoded, code)):
                return self._of_object((root,))
        return self._of_code(code, (root,))

    def _of_code(self, code: Code, path: Path) -> tp.Any:
        decoded = self._graphdef.decoded
        if isinstance(code, ContainerCode):
            below = zip(code.definition.keys, code.codes)
            return code.definition.build([self._of_code(c, (*path, key)) for key, c in below])
        if isinstance(code, StaticDef):
            return code.value
        if isinstance(code, ArrayCode):
            return self._leaves[code.leaf]
        if decoded.path(decoded.node_frames[code.number]) != path:
            return State({})
        leaf = decoded.node_leaves[code.number]
        return self._of_object(path) if leaf < 0 else self._of_leaf(leaf)

    def _of_leaf(self, leaf: int) -> tp.Any:
        decoded = self._graphdef.decoded
        node = decoded.leaf_nodes[leaf]
        definition = decoded.node_defs[node] if node >= 0 else None
        value = self._leaves[leaf]
        return make(definition, value) if isinstance(definition, VariableDef) else value

    def _of_object(self, path: Path) -> tp.Any:
        part = self._nested
        for name in path[1:] if self._graphdef.num_roots == 1 else path:
            part = part._mapping.get(name) or State({})
        return part

    @functools.cached_property
    def _nested(self) -> State[tp.Any, tp.Any]:
        """All leaves as one State, below the numbers of their roots if there are several."""
        program = self._graphdef.program(tuple(self._leaves))
        return program.build([self._of_leaf(leaf) for leaf in self._leaves])


FLOAT0 = np.dtype(jax.dtypes.float0)
"""The dtype of tangents of values without a derivative."""


def _shape(x: tp.Any) -> tuple[int, ...]:
    return tuple(x.shape) if hasattr(x, "shape") else np.shape(x)


def _dtype(x: tp.Any) -> tp.Any:
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return x.dtype
    dtype = getattr(x, "dtype", None)
    return dtype if dtype == FLOAT0 else jax.typeof(x).dtype


def tangent_dtype(x: tp.Any) -> tp.Any:
    """The dtype of tangents of a value."""
    return _tangents_of(_dtype(x))


@functools.cache
def _tangents_of(dtype: tp.Any) -> tp.Any:
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else FLOAT0


def zero_tangent(x: tp.Any) -> tp.Any:
    """The zero tangent of a value."""
    if tangent_dtype(x) == FLOAT0:
        return np.zeros(_shape(x), FLOAT0)
    return jnp.zeros_like(x)


def abstract(x: tp.Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a value."""
    return _abstract(_shape(x), _dtype(x))


_abstract = functools.lru_cache(maxsize=1024)(jax.ShapeDtypeStruct)
