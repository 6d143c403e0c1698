"""Bodies of loops and branches: traced once to find out what they write, then run as often as needed.

A loop must know its carry, and a branch must know what the other branches write, before JAX sees
either.  So the user function is traced to a jaxpr first.  The trace shows what the function writes, and
the loop runs the jaxpr: the user's Python code runs once.
"""

from __future__ import annotations

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp

from nnxlite._base.errors import warn_user
from nnxlite._base.jax import jaxpr_as_fun
from nnxlite.boundary._call_def import CallDef, Inner, enter
from nnxlite.boundary._operands import describe, leaf_names
from nnxlite.boundary._outdef import Fixed, Outputs
from nnxlite.boundary._outputs import leave
from nnxlite.boundary._refusals import refuse_foreign_outputs
from nnxlite.variables._kinds import RngCount, RngState


class Body:
    """A traced function of leaves.

    Attributes:
        definition: what leaves it.
        shapes: its outputs, abstract.
        jaxpr: what was traced.
        consts: the arrays that it captured.
        more: what else the traced function gave; see `trace_body`.
    """

    def __init__(self, closed: tp.Any, out: tp.Any) -> None:
        self.more, self.shapes = out[0].value, tp.cast(Outputs, out[1])
        self.definition = self.shapes.definition
        self.jaxpr = closed
        self.consts: list[tp.Any] = [*closed.consts]
        self._treedef = jax.tree_util.tree_structure(self.shapes)
        self._avals = closed.in_avals

    def __call__(self, leaves: tp.Sequence[tp.Any]) -> Outputs:
        """Run the body on leaves of the structure it was traced with."""
        return self.outputs(self.flat(*jax.tree_util.tree_leaves([*leaves])))

    def flat(self, *inputs: tp.Any) -> list[tp.Any]:
        """Run the body as a function of arrays: those of the leaves, and of what `more` gave."""
        return jaxpr_as_fun(self.jaxpr.jaxpr, self.consts)(*inputs)

    def outputs(self, values: tp.Iterable[tp.Any]) -> Outputs:
        """The outputs, from what `flat` returns or something else for each."""
        return jax.tree_util.tree_unflatten(self._treedef, values)

    def numbers(self) -> Outputs:
        """The outputs, with the position of each among those that `flat` returns."""
        return self.outputs(range(self._treedef.num_leaves))

    def accepts(self, leaves: tp.Sequence[tp.Any]) -> bool:
        """Whether the body was traced for leaves of these types."""
        flat = jax.tree_util.tree_leaves([*leaves])
        return len(flat) == len(self._avals) and all(
            jax.typeof(x).str_short() == aval.str_short() for x, aval in zip(flat, self._avals)
        )


def trace_body(
    call: CallDef,
    fun: tp.Callable[..., tuple[Outputs, tp.Any]],
    leaves: tp.Sequence[tp.Any],
    *more: tp.Any,
    user: tp.Callable[..., tp.Any],
) -> Body:
    """Trace a function of objects as a function of leaves.

    Args:
        call: how the arguments are rebuilt, and their names for messages.
        fun: from the rebuilt arguments, their tree (and what `more` gives) to the outputs, and
            static data that the body then has as `more`.
        leaves: those of the arguments, possibly abstract.
        more: further arguments of the function.
        user: the function that JAX's messages speak of.
    """

    def run(leaves: list[tp.Any], more: tuple[tp.Any, ...]) -> tp.Any:
        tree, inner = enter(call, leaves)
        out, static = fun(inner, tree, *more)
        return Fixed(static), out

    pairs = lambda leaves, more: [*zip(leaf_names(call), leaves), ("more", more)]
    body = describe(run, user, "run", pairs)
    closed, shapes = jax.make_jaxpr(body, return_shape=True)([*leaves], more)
    return Body(closed, shapes)


def body_outputs(inner: Inner, result: tp.Any, structure: bool, captured: bool = False) -> Outputs:
    """What leaves a body with this result; see `leave`. Arrays of the arguments in it are new arrays.

    Raises TypeError where it returned or stored something that JAX cannot return.
    """
    out = leave(inner, result, structure=structure, captured=captured)
    refuse_foreign_outputs(inner.call, out)
    return with_arrays(inner, out)


def with_arrays(inner: Inner, out: Outputs) -> Outputs:
    """The outputs, with arrays of the arguments that are in the result as new arrays.

    Arrays have no identity: a result with an array that came in is the same as one with a copy.
    """
    left, decoded = out.definition, out.definition.graphdef.decoded
    if not left.restructures:
        return out
    sources, more, count = list(left.sources), list[tp.Any](), len(out.new)
    for leaf, source in enumerate(sources):
        root = decoded.path(decoded.leaf_frames[leaf])[0]
        if source >= 0 and decoded.leaf_nodes[leaf] < 0 and root >= left.first_result:
            sources[leaf] = ~(count + len(more))
            more.append(inner.values[source])
    return Outputs(dataclasses.replace(left, sources=tuple(sources)), [*out.values, *more])


def promoted(start: tp.Any, end: tp.Any) -> tp.Any | None:
    """The initial value of a carry, converted where a Python scalar would change type in the loop.

    Returns None where no conversion keeps the type.
    """
    aval = jax.typeof(start) if not isinstance(start, jax.ShapeDtypeStruct) else start
    if tuple(aval.shape) != tuple(end.shape):
        return None
    if aval.dtype == end.dtype:
        return start
    if getattr(aval, "weak_type", False) and jnp.result_type(start, end.dtype) == end.dtype:
        return jnp.asarray(start, dtype=end.dtype)
    return None


def with_matching_types(starts: list[tp.Any], ends: list[tp.Any]) -> tuple[list[tp.Any], list[int]]:
    """Initial carry leaves with the types the body gives them, and the numbers of those without one.

    Variables may contain pytrees; those are compared leaf by leaf.
    """
    out: list[tp.Any] = []
    bad: list[int] = []
    for number, (start, end) in enumerate(zip(starts, ends)):
        leaves, treedef = jax.tree_util.tree_flatten(start)
        end_leaves, end_treedef = jax.tree_util.tree_flatten(end)
        fitted = (
            [promoted(s, e) for s, e in zip(leaves, end_leaves)]
            if treedef == end_treedef
            else [None]
        )
        if any(f is None for f in fitted):
            bad.append(number)
            out.append(start)
        elif same(leaves, fitted):
            out.append(start)
        else:
            out.append(jax.tree_util.tree_unflatten(treedef, fitted))
    return out, bad


def numbered(tree: tp.Any) -> tp.Any:
    """A tree with the position of each leaf among its leaves."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    return jax.tree_util.tree_unflatten(treedef, range(len(leaves)))


def same(starts: list[tp.Any], other: list[tp.Any]) -> bool:
    """Whether two lists contain the same objects."""
    return all(a is b for a, b in zip(starts, other))


# Random streams that a transform broadcasts: each slice or iteration draws the same keys ------------


def is_random(call: CallDef, leaf: int) -> bool:
    """Whether a graph leaf is the key or the count of a random stream."""
    node = call.graphdef.decoded.leaf_nodes[leaf]
    kind = getattr(call.graphdef.decoded.node_defs[node], "type", None) if node >= 0 else None
    return isinstance(kind, type) and issubclass(kind, RngState)


def warn_of_streams(
    call: CallDef, leaves: tp.Iterable[int], warned: set[str], what: str, remedy: str
) -> None:
    """Warn once of each random stream that draws the same keys again.

    Not of the stream "carry": recurrent layers start every sequence with the same keys.

    Args:
        call: the arguments.
        leaves: the broadcast leaves that were written.
        warned: tags of the streams that the user was warned of.
        what: what happens to the stream.
        remedy: what to do instead.
    """
    decoded = call.graphdef.decoded
    for leaf in leaves:
        node = decoded.leaf_nodes[leaf]
        definition = decoded.node_defs[node]
        if not is_random(call, leaf) or not issubclass(definition.type, RngCount):
            continue
        tag = str(definition.metadata.get("tag", "default"))
        if tag != "carry" and tag not in warned:
            warned.add(tag)
            warn_user(f"The random stream {tag!r} {what} (the same dropout mask, say). {remedy}")
