"""The arguments of the backward rule of a `custom_vjp`: cotangents of all outputs of the function.

Also JAX's wrappers of leaves, which say which of them are differentiated and which cotangents are zero.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._state._definition import State
from nnxlite.boundary._call_def import CallDef, enter
from nnxlite.boundary._outdef import CameIn, OutDef
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._rebuild import build_nodes, resolve
from nnxlite.transforms._tangents import FLOAT0, States, zero_tangent
from nnxlite.variables._variable import Variable, is_variable

_Primal: tp.Any = jax.custom_derivatives.CustomVJPPrimal
_Zero: tp.Any = jax.custom_derivatives.SymbolicZero


class Cotangents:
    """Cotangents of all outputs of a function, in the forms that a backward rule sees."""

    def __init__(
        self, call: CallDef, definition: OutDef, cotangents: tp.Any, values: list[tp.Any]
    ) -> None:
        _, self._plain, self._written, self._fresh = cotangents
        self._call = call
        self._definition = definition
        self._values = values
        graph = definition.graph
        if graph is None:
            self._graphdef: GraphDef[tp.Any] = call.graphdef
            self._result_codes: list[tp.Any] = list(definition.nodes)
        else:
            self._graphdef = graph.graphdef
            self._result_codes = graph.graphdef.decoded.roots[graph.first_result :]

    @functools.cached_property
    def _leaves(self) -> list[tp.Any]:
        """The cotangents of all leaves of the output graph; zeros where nothing was written."""
        of_input = dict(zip(self._definition.written, self._written))

        def came_in(leaf: int) -> tp.Any:
            if leaf in of_input:
                return of_input[leaf]
            return jax.tree_util.tree_map(zero_tangent, self._values[leaf])

        graph = self._definition.graph
        if graph is None:
            return [came_in(leaf) for leaf in range(self._call.graphdef.num_leaves)]
        return [
            came_in(source.leaf) if isinstance(source, CameIn) else self._fresh[source.number]
            for source in graph.sources
        ]

    def inputs(self, numbers: list[int]) -> tuple[tp.Any, ...]:
        """Cotangents of the arguments after the call: States for objects, None for arrays."""
        call = self._call
        tree = call.template()[0]
        roots = {position: root for root, position in enumerate(call.where)}

        def shown(position: int) -> tp.Any:
            return self._states.of_root(roots[position]) if position in roots else None

        return tuple(jax.tree_util.tree_map(shown, tree[n]) for n in numbers)

    def updates(self, first: int, numbers: list[int]) -> tuple[tp.Any, ...]:
        """Cotangents of the arguments from number `first` on, None where nothing was written."""
        call, new = self._call, dict(zip(self._definition.written, self._written))
        parts = {leaf: iter(jax.tree_util.tree_leaves(value)) for leaf, value in new.items()}
        values = [next(parts[leaf]) if leaf in new else None for leaf, _ in call.inside()]
        (args, _), inner = enter(call, [*[None] * call.num_arrays, *values])
        nodes = [inner.nodes[call.graphdef.decoded.leaf_nodes[leaf]] for leaf in new]
        written = set(map(id, nodes))

        def shown(x: tp.Any) -> tp.Any:
            return None if isinstance(x, Variable) and id(x) not in written else x

        def of_argument(number: int) -> tp.Any:
            if number not in numbers:
                return None
            return jax.tree_util.tree_map(shown, args[number], is_leaf=is_variable)

        return tuple(map(of_argument, range(first, len(args))))

    def result_states(self) -> tp.Any:
        """Cotangents of the result, with States for objects."""
        graph, where = self._definition.graph, self._definition.where
        if graph is None:  # arguments that are returned: their cotangents are among the inputs
            return self._result([State({}) for _ in where])
        first = graph.first_result
        return self._result([self._states.of_root(first + i) for i in range(len(where))])

    @functools.cached_property
    def _states(self) -> States:
        return States(self._graphdef, dict(enumerate(self._leaves)))

    def result_objects(self) -> tp.Any:
        """Cotangents of the result, with objects for objects."""
        if self._definition.treedef is None:
            return self._plain
        nodes = build_nodes(self._graphdef.decoded, self._leaves)
        return self._result([resolve(c, nodes, self._leaves) for c in self._result_codes])

    def _result(self, roots: list[tp.Any]) -> tp.Any:
        definition = self._definition
        if definition.treedef is None:
            return self._plain
        leaves = list(self._plain)
        for position, root in zip(definition.where, roots):
            leaves.insert(position, root)
        return jax.tree_util.tree_unflatten(definition.treedef, leaves)


@jax.custom_jvp
def constant_if(before: list[tp.Any], after: list[tp.Any]) -> list[tp.Any]:
    """New values of Variables; constants where the old ones are not differentiated.

    So the running statistics of a model carry no gradient from one call to the next.
    """
    return after


@functools.partial(constant_if.defjvp, symbolic_zeros=True)
def _constant_if_jvp(primals: tp.Any, tangents: tp.Any) -> tp.Any:
    moves = [not all_zero(tree) for tree in tangents[0]]
    still = lambda x: x if is_symbolic_zero(x) else _Zero.from_primal_value(x)
    out = [t if m else jax.tree_util.tree_map(still, t) for m, t in zip(moves, tangents[1])]
    return primals[1], out


def is_symbolic_zero(x: tp.Any) -> bool:
    return isinstance(x, _Zero)


def all_zero(tree: tp.Any) -> bool:
    """Whether all leaves of a tree are symbolic zeros."""
    return all(map(is_symbolic_zero, jax.tree_util.tree_leaves(tree, is_leaf=is_symbolic_zero)))


def instantiated(x: tp.Any) -> tp.Any:
    if not isinstance(x, _Zero):
        return x
    return np.zeros(x.shape, FLOAT0) if x.dtype == FLOAT0 else jnp.zeros(x.shape, x.dtype)


def _is_primal(x: tp.Any) -> bool:
    return isinstance(x, _Primal)


def values_of(leaves: tp.Any) -> tp.Any:
    """The values of leaves that JAX has wrapped."""

    def value(x: tp.Any) -> tp.Any:
        return x.value if isinstance(x, _Primal) else x

    return jax.tree_util.tree_map(value, leaves, is_leaf=_is_primal)
