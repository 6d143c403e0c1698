"""Tangents and cotangents: from trees in the form of some values to the leaves that JAX needs.

A tangent has the form of its primal: an array for an array, an object of the same kind for an
object (or `None`, or a State where only some of the Variables matter).  Leaves are matched by path,
so static attributes do not matter; what is shared in the primal must be shared in the tangent.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import path_text, short_type
from nnxlite._base.jax import is_ref, new_ref
from nnxlite._state._definition import State
from nnxlite.boundary._call_def import CallDef, replaced
from nnxlite.boundary._inputs import Inputs, is_root
from nnxlite.boundary._labels import further_leaves, leaves_of_code
from nnxlite.graph._defs import StaticDef
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._kinds import STATE
from nnxlite.graph._rebuild import Code, ContainerCode, NodeCode, Path
from nnxlite.variables._definition import VariableDef
from nnxlite.variables._variable import make


class Tangents(tp.NamedTuple):
    """What tangents have to be like.

    Attributes:
        what: the tangents, for messages.
        error: the class of errors about structure.
        dtype_error: that of errors about dtypes.
        needed: which leaves must have one: all, none, or those of each object that has some tangents,
            and of each State that has some.
        wanted: which leaves can have one; None for all.
        lenient: whether any tangent of a leaf without a derivative is ignored.
    """

    what: str
    error: type[Exception]
    dtype_error: type[Exception] = TypeError
    needed: tp.Literal["none", "of objects", "of objects and States", "all"] = "none"
    wanted: tp.Sequence[bool] | None = None
    lenient: bool = False

    def of_leaves(self, call: CallDef, leaves: tp.Sequence[tp.Any], given: tp.Any) -> list[tp.Any]:
        """The tangent of each leaf; None for a leaf that has none.

        Args:
            call, leaves: the values, or their shapes.
            given: the tangents, in the form of the values.

        Raises:
            ValueError: for a tangent of another shape.
            error: for one of another structure, or of a leaf without a derivative.
            dtype_error: for one of another dtype.
        """
        other = Inputs(given, call.trees, call.names, inside=True)
        offered, values = other.definition, other.leaves
        if offered.shared is call.shared:
            found = dict(enumerate(values))
        else:
            found = self._by_path(call, leaves, other)
        return [self._checked(call, i, x, found.get(i)) for i, x in enumerate(leaves)]

    def _by_path(
        self, call: CallDef, leaves: tp.Sequence[tp.Any], given: Inputs
    ) -> dict[int, tp.Any]:
        """The tangents by the number of the leaf that they belong to."""
        offered, values = given.definition, given.leaves
        number_of = {leaf.path: i for i, leaf in (*enumerate(call.leaves()), *further_leaves(call))}
        source: dict[int, tuple[int, Path]] = {}
        for other, place in (*enumerate(offered.leaves()), *further_leaves(offered)):
            leaf, path = number_of.get(place.path), place.path
            if leaf is None:
                raise self.error(
                    f"{self.what} at '{path_text(path)}' is a {short_type(values[other])}, where "
                    "there is no leaf. Give it the form of what it belongs to; a State may stand for "
                    "an object, and None for all that has none."
                )
            known, first = source.setdefault(leaf, (other, path))
            # A tree may have lost its sharing in `jax.tree.map`.
            if known != other and not call.trees:
                raise self.error(
                    f"{self.what}: the leaf shared by '{path_text(first)}' and '{path_text(path)}' has "
                    "two different ones. Share them in the same way."
                )
        if self.needed != "none":
            self._refuse_missing(call, leaves, given, source)
        return {leaf: values[other] for leaf, (other, _) in source.items()}

    def _refuse_missing(
        self,
        call: CallDef,
        leaves: tp.Sequence[tp.Any],
        given: Inputs,
        source: dict[int, tuple[int, Path]],
    ) -> None:
        """Raise an error for a leaf that must have a tangent, and has none."""
        places, of_given = call.leaves(), given.definition.leaves()
        free = [self.needed == "of objects" and isinstance(x, State) for x in given.roots]
        roots = {leaf: of_given[other].root for leaf, (other, _) in source.items()}
        whole = {places[i].root for i, root in roots.items() if root is None or not free[root]}
        root_at = {path: root for root, path in enumerate(call.root_paths())}
        objects = zip(given.definition.root_paths(), free)  # they may have no leaf at all
        whole |= {root_at.get(path) for path, is_free in objects if not is_free}
        for leaf, place in enumerate(places):
            needed = self.needed == "all" or (place.root is not None and place.root in whole)
            if needed and leaf not in source and self._is_wanted(leaf, leaves[leaf]):
                raise self.error(
                    f"{self.what} at '{place.text()}' is nothing, where the "
                    f"{short_type(leaves[leaf])} needs an array of its shape."
                )

    def _is_wanted(self, leaf: int, value: tp.Any) -> bool:
        if self.wanted is not None and not self.wanted[leaf]:
            return False
        return has_derivative(value)

    def _checked(self, call: CallDef, leaf: int, value: tp.Any, tangent: tp.Any) -> tp.Any:
        """The tangent of a leaf, as an array; a Python float is one of any floating-point dtype."""
        if tangent is None or getattr(tangent, "dtype", None) == FLOAT0:
            return None
        at = f"{self.what} at '{call.leaves()[leaf].text()}' is"
        if not self._is_wanted(leaf, value):
            if self.lenient and (self.wanted is None or self.wanted[leaf]):
                return None
            raise self.error(
                f"{at} a {short_type(tangent)}, but the {short_type(value)} there is not "
                "differentiated: it must be None."
            )
        if is_ref(value):  # its tangent is a reference, too
            content = tangent[...] if is_ref(tangent) else tangent
            return new_ref(self._checked(call, leaf, abstract(value), content))
        is_number = isinstance(tangent, (bool, int, float, complex))
        if not (is_number or hasattr(tangent, "dtype")) or np.shape(tangent) != np.shape(value):
            raise ValueError(
                f"{at} {short_type(tangent)}, where {short_type(value)} needs one of its shape."
            )
        dtype = _dtype(value)
        array = tangent if isinstance(tangent, jax.Array) else jnp.asarray(tangent)
        if array.dtype == dtype:
            return array
        if type(tangent) is float and jnp.issubdtype(dtype, jnp.floating):
            return array.astype(dtype)
        raise self.dtype_error(
            f"{at} {short_type(array)}, where {short_type(value)} needs one of its own dtype. "
            f"Convert it with .astype({str(dtype)!r})."
        )


def root_states(
    graphdef: GraphDef[tp.Any], leaves: tp.Mapping[int, tp.Any]
) -> tp.Callable[[int], tp.Any]:
    """From the number of a root to its leaves, in the form that gradients have with graph updates on.

    Each object is a State. A shared object has its leaves at its first path, and is an empty State at
    the others; a root that is a State is without the entries that have no leaf.

    Args:
        graphdef: the graph.
        leaves: values for some of its leaves, by number.
    """
    decoded = graphdef.decoded

    def variable(leaf: int) -> tp.Any:
        node = decoded.leaf_nodes[leaf]
        definition = decoded.node_defs[node] if node >= 0 else None
        value = leaves[leaf]
        return make(definition, value) if isinstance(definition, VariableDef) else value

    @functools.cache
    def nested() -> State[tp.Any, tp.Any]:  # below the numbers of the roots if there are several
        return graphdef.program(tuple(leaves)).build([*map(variable, leaves)])

    def state(path: Path) -> tp.Any:
        part = nested()
        for name in path[1:] if graphdef.num_roots == 1 else path:
            part = part._mapping.get(name) or State({})
        return part

    def of_code(code: Code, path: Path) -> tp.Any:
        if isinstance(code, StaticDef):
            return code.value
        if isinstance(code, ContainerCode):
            below = decoded.below(code)
            return code.definition.build([of_code(c, (*path, name)) for name, c in below])
        leaf = decoded.leaf_of(code)
        if isinstance(code, NodeCode) and decoded.path(decoded.node_frames[code.number]) != path:
            return State({})
        return state(path) if leaf < 0 else variable(leaf)

    def of_root(root: int) -> tp.Any:
        code = decoded.roots[root]
        if isinstance(code, ContainerCode) and code.definition.kind == STATE:
            if any(leaf not in leaves for leaf, _ in leaves_of_code(decoded, code)):
                return state((root,))
        return of_code(code, (root,))

    return of_root


def as_states(tree: tp.Any) -> tp.Any:
    """A tree with a State in place of each graph object; see `root_states`."""
    inputs = Inputs(tree)
    of_root = root_states(inputs.graphdef, dict(enumerate(inputs.values)))
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=is_root)
    states = map(of_root, range(len(inputs.where)))
    return jax.tree_util.tree_unflatten(inputs.treedef, replaced(leaves, inputs.where, [*states]))


FLOAT0 = np.dtype(jax.dtypes.float0)
"""The dtype of tangents of values without a derivative."""


def _dtype(x: tp.Any) -> tp.Any:
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return x.dtype
    dtype = getattr(x, "dtype", None)
    return dtype if dtype == FLOAT0 else jax.typeof(x).dtype


_is_inexact = functools.cache(lambda dtype: jnp.issubdtype(dtype, jnp.inexact))


def has_derivative(x: tp.Any) -> bool:
    """Whether a value has floating-point or complex numbers; TypeError unless it is an array."""
    return _is_inexact(_dtype(x))


def zero_tangent(x: tp.Any) -> tp.Any:
    """The zero tangent of a value."""
    return jnp.zeros_like(x) if has_derivative(x) else np.zeros(np.shape(x), FLOAT0)


def abstract(x: tp.Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a value."""
    return _abstract(np.shape(x), _dtype(x))


_abstract = functools.lru_cache(maxsize=1024)(jax.ShapeDtypeStruct)
