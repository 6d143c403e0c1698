"""`while_loop` and `fori_loop`, in which the body gets its own last result; also the base of `scan`.

The body is traced once, as a function from the leaves of its arguments to its outputs.  The trace shows
which leaves change from one iteration to the next: these are the state of JAX's loop.  All others are
constants of it, neither copied nor returned.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp

from nnxlite._base.config import Modes
from nnxlite._base.jax import Tracer, abstract, as_integer, is_pytree_leaf, is_ref
from nnxlite.boundary._body import (
    Body,
    LoopKind,
    Slots,
    body_outputs,
    carried,
    is_random,
    next_values,
    numbered,
    paired_roots,
    same,
    trace_body,
    warn_of_streams,
    with_matching_types,
)
from nnxlite.boundary._call_def import CallDef, Inner, template_of
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._operands import parameter_names, replaced
from nnxlite.boundary._out import Outputs
from nnxlite.boundary._prefixes import Carry
from nnxlite.boundary._refusals import described
from nnxlite.transforms._arguments import unwrapped_value
from nnxlite.transforms._flow import loop_arguments, run_flow
from nnxlite.transforms._programs import run_bodies
from nnxlite.transforms._wrapper import name_of

C = tp.TypeVar("C")


class Carried(tp.NamedTuple):
    """What a loop does with the outputs of its body.

    Attributes:
        slots: the graph leaves whose values change.
        roles: of the outputs (result, written and new values): an axis, or `Carry`.
    """

    slots: Slots
    roles: tuple[tp.Any, ...]


class LoopBody(tp.NamedTuple):
    """A traced loop body, and the leaves that its loop starts with.

    Attributes:
        body: the body, a function of the leaves of the arguments; its `more` is a `Carried`.
        leaves: those of the first iteration.
        state: the positions of those that change, among the arrays that the body is given.
        following: the positions of their next values among the arrays that it returns.
        others: the positions of all other outputs, and the axis of each.
    """

    body: Body
    leaves: list[tp.Any]
    state: tuple[int, ...]
    following: tuple[int, ...]
    others: tuple[tuple[int, tp.Any], ...]

    def left(self, values: tp.Iterable[tp.Any]) -> Outputs:
        """What leaves the loop: the last values of the state, and the others, stacked."""
        at = dict(zip([*self.following, *[n for n, _ in self.others]], values))
        return self.body.outputs([at[n] for n in range(len(at))])


def trace_loop(
    name: str,
    call: CallDef,
    leaves: list[tp.Any],
    roles: tp.Sequence[tp.Any],
    trace: tp.Callable[[list[tp.Any]], Body],
) -> LoopBody:
    """Trace a body until the types of the carry are stable: Python scalars may take two traces.

    Args:
        name: of the loop.
        call, leaves: the arguments of the first iteration.
        roles: of the leaves: an axis, `Carry`, or None for a constant.
        trace: traces the body for some leaves.

    Raises TypeError where the types never are.
    """
    carried_arrays = [i for i in range(call.num_arrays) if roles[i] is Carry]
    while True:
        body = trace(leaves)
        more: Carried = body.more
        slots = [*carried_arrays, *[call.num_arrays + leaf for leaf, _ in more.slots]]
        start = [leaves[i] for i in slots]
        starts, bad = with_matching_types(start, ends := _next_state(more, body.shapes))
        if bad:
            where = call.leaves()[slots[bad[0]]].text()
            raise TypeError(
                f"{name} body function carry input and carry output must have equal types, "
                f"but they differ at '{where}': the input is {described(starts[bad[0]])}, the "
                f"output {described(ends[bad[0]])}."
            )
        if same(starts, start):
            break
        leaves = replaced(leaves, slots, starts)
    numbers, out = numbered(leaves), body.numbers()
    state = jax.tree_util.tree_leaves([numbers[i] for i in slots])
    following = jax.tree_util.tree_leaves(_next_state(more, out))
    next_ones = set(following)
    others = [
        (n, role)
        for x, role in zip(out.values, more.roles)
        for n in jax.tree_util.tree_leaves(x)
        if n not in next_ones
    ]
    return LoopBody(body, leaves, tuple(state), tuple(following), tuple(others))


def _next_state(more: Carried, out: Outputs) -> list[tp.Any]:
    """The state after an iteration: array leaves of the carry, and graph leaves that change."""
    result = zip(out.definition.split(out.values)[0], more.roles)
    return [*[x for x, role in result if role is Carry], *next_values(more.slots, out)]


def _carry_body(
    loop: LoopKind, inner: Inner, result: tp.Any, captured: bool
) -> tuple[Outputs, Carried]:
    """The outputs of the body of `while_loop` or `fori_loop`, whose last argument is the carry."""
    call = inner.call
    out = body_outputs(inner, result, structure=True, captured=captured)
    after = template_of(out.definition.treedef)
    pairs = paired_roots(loop, call, out, call.template()[0][-1], after)
    roles = [Carry] * call.graphdef.num_leaves
    out, slots = carried(loop, inner, out, pairs, roles, [Carry] * len(out.new))
    return out, Carried(slots, (Carry,) * len(out.values))


def _trace_test(test: tp.Callable[..., tp.Any], call: CallDef, leaves: list[tp.Any]) -> Body:
    """The condition of a loop, traced for some leaves.

    Raises TypeError where it does not return a boolean scalar, ValueError where it writes.
    """

    def run(inner: Inner, tree: tp.Any) -> tuple[Outputs, None]:
        return body_outputs(inner, unwrapped_value(test(tree[0][0])), structure=True), None

    names = parameter_names(test)[:1] or call.names
    body = trace_body(call.renamed(names), run, leaves, user=test)
    left = body.definition
    result = left.result(left.split(body.shapes.values)[0], left.where)
    name = f"cond_fun ({name_of(test)})"
    if left.restructures or not all(is_random(call, leaf) for leaf in left.written):
        raise ValueError(f"while_loop: {name} changed its argument. Only body_fun may write.")
    warn_of_streams(
        call,
        left.written,
        set(),
        f"does not move on in {name} of while_loop: body_fun draws the same keys again",
        "Draw in body_fun, and carry what was drawn.",
    )
    shown = "an object" if left.where else described(result)
    if not is_pytree_leaf(result) or shown != "bool[]":
        raise TypeError(
            f"while_loop: cond_fun must return a boolean scalar, but got {shown} from "
            f"{name_of(test)}."
        )
    return body


class _Fori(tp.NamedTuple):
    """The settings of `fori_loop`: see `LoopBody`; bounds, if they are known; how much to unroll."""

    state: tuple[int, ...]
    following: tuple[int, ...]
    bounds: tuple[int, int] | None
    unroll: int | bool | None


def _fori_loop(
    settings: _Fori, funs: list[tp.Callable[..., list[tp.Any]]], inputs: list[tp.Any]
) -> list[tp.Any]:
    (body,) = funs

    def step(index: tp.Any, state: list[tp.Any]) -> list[tp.Any]:
        out = body(*replaced(inputs, settings.state, state), index)
        return [out[i] for i in settings.following]

    start = [inputs[i] for i in settings.state]
    lower, upper = settings.bounds or inputs[:2]
    return jax.lax.fori_loop(lower, upper, step, start, unroll=settings.unroll)


class _While(tp.NamedTuple):
    """The settings of `while_loop`: see `LoopBody`; whether the carry contains references."""

    state: tuple[int, ...]
    following: tuple[int, ...]
    has_refs: bool


def _while_loop(
    settings: _While, funs: list[tp.Callable[..., list[tp.Any]]], inputs: list[tp.Any]
) -> list[tp.Any]:
    body, test = funs

    def proceed(state: list[tp.Any]) -> tp.Any:
        return test(*replaced(inputs, settings.state, state))[0]

    def step(state: list[tp.Any]) -> list[tp.Any]:
        out = body(*replaced(inputs, settings.state, state))
        return [out[i] for i in settings.following]

    start = [inputs[i] for i in settings.state]
    if not settings.has_refs:
        return jax.lax.while_loop(proceed, step, start)
    after = lambda pair: (proceed(new := step(pair[1])), new)
    return jax.lax.while_loop(lambda pair: pair[0], after, (proceed(start), start))[1]


def while_loop(
    cond_fun: tp.Callable[[C], tp.Any],
    body_fun: tp.Callable[[C], C],
    init_val: C,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> C:
    """Run `body_fun` on the carry as long as `cond_fun` is true.

    The carry may be any pytree of objects and arrays. Objects that the body returns in their positions
    are the caller's own, and keep what was written. Variables that are only read are constants.

    Args:
        cond_fun: a function of the carry, which returns a boolean scalar.
        body_fun: a function of the carry, which returns the next one.
        init_val: the first carry.
        graph, graph_updates: see `jit`.

    Returns:
        The last carry.

    Raises:
        TypeError: where structure or types of the carry change.
        ValueError: where `cond_fun` writes into its argument. (Random streams can be drawn from: they
            are left as they were, and a warning says so.)

    >>> import nnxlite as nnx
    >>> counter = nnx.Dict(n=nnx.Variable(0))
    >>> def body(c):
    ...     c.n.value += 1
    ...     return c
    >>> out = nnx.while_loop(lambda c: c.n.value < 3, body, counter)
    >>> out is counter, int(counter.n.value)
    (True, 3)
    """
    modes = Modes.of(graph, graph_updates)
    kind = LoopKind("while_loop", modes.updates)

    def step(inner: Inner, tree: tp.Any) -> tuple[Outputs, Carried]:
        return _carry_body(kind, inner, body_fun(tree[0][0]), captured=False)

    def run(call: CallDef, leaves: list[tp.Any]) -> Outputs:
        trace = lambda leaves: trace_body(call, step, leaves, user=body_fun)
        loop = trace_loop(kind.name, call, leaves, [Carry] * len(leaves), trace)
        bodies = [loop.body, _trace_test(cond_fun, call, loop.leaves)]
        # JAX's condition sees references as they were before the loop
        has_refs = any(map(is_ref, jax.tree_util.tree_leaves(leaves)))
        settings = _While(loop.state, loop.following, has_refs)
        inputs = jax.tree_util.tree_leaves(loop.leaves)
        return loop.left(run_bodies(_while_loop, settings, bodies, inputs))

    def inputs() -> Inputs:
        args = (loop_arguments(init_val, modes),)
        return Inputs.of_call(args, {}, _carry_name(body_fun)).in_mode(modes.graph, kind.name)

    return run_flow(kind.name, inputs, run)


def fori_loop(
    lower: tp.Any,
    upper: tp.Any,
    body_fun: tp.Callable[[tp.Any, C], C],
    init_val: C,
    *,
    unroll: int | bool | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> C:
    """Run `body_fun(i, carry)` for i from `lower` up to `upper`, exclusive.

    Carry and errors as for `while_loop`. Bounds whose values are known (integers of Python, NumPy or
    JAX, of any type, that are not traced) make the loop differentiable in reverse.

    Args:
        lower, upper: integers of any type; the index is a Python integer where both are known.
        body_fun: a function of the index and the carry, which returns the next carry.
        init_val: the first carry.
        unroll: how many iterations to unroll, as in `jax.lax.fori_loop`.
        graph, graph_updates: see `jit`.

    Returns:
        The last carry.

    Raises:
        TypeError: where structure or types of the carry change, or the bounds have different types.

    >>> import nnxlite as nnx
    >>> int(nnx.fori_loop(0, 4, lambda i, total: total + i, 0))
    6
    """
    bounds, unroll = _bounds(unwrapped_value(lower), unwrapped_value(upper)), as_integer(unroll)
    known = tp.cast(tp.Any, bounds if all(type(bound) is int for bound in bounds) else None)
    modes = Modes.of(graph, graph_updates)
    kind, names = LoopKind("fori_loop", modes.updates), _carry_name(body_fun)

    def step(inner: Inner, tree: tp.Any, i: tp.Any) -> tuple[Outputs, Carried]:
        return _carry_body(kind, inner, body_fun(i, tree[0][-1]), captured=modes.updates)

    def run(call: CallDef, leaves: list[tp.Any]) -> Outputs:
        index = abstract(0 if known else leaves[0])
        trace = lambda leaves: trace_body(call, step, leaves, index, user=body_fun)
        roles = [None] * (0 if known else 2)
        roles += [Carry] * (len(leaves) - len(roles))
        loop = trace_loop(kind.name, call, leaves, roles, trace)
        settings = _Fori(loop.state, loop.following, known, unroll)
        inputs = jax.tree_util.tree_leaves(loop.leaves)
        return loop.left(run_bodies(_fori_loop, settings, [loop.body], inputs))

    def inputs() -> Inputs:
        args = (*(() if known else bounds), loop_arguments(init_val, modes))
        parameters = names if known else ("lower", "upper", *names)
        return Inputs.of_call(args, {}, parameters).in_mode(modes.graph, kind.name)

    return run_flow(kind.name, inputs, run)


def _carry_name(body: tp.Any) -> tuple[str, ...]:
    return parameter_names(body)[-1:] or ("carry",)


def _bounds(*bounds: tp.Any) -> tuple[tp.Any, ...]:
    """The bounds of a loop: known integers of any type as Python's, traced ones of one type."""
    bounds = tuple(map(as_integer, bounds))
    bounds = tuple([int(b) if isinstance(b, int) and type(b) is not bool else b for b in bounds])
    known = [b for b in bounds if type(b) is int]
    traced = [b for b in bounds if isinstance(b, Tracer) and jnp.issubdtype(b.dtype, jnp.integer)]
    if not known or not traced or (traced[0].weak_type and _fits(known[0], traced[0].dtype)):
        return bounds
    dtype = traced[0].dtype
    if not _fits(known[0], dtype):
        dtype = jnp.promote_types(dtype, jnp.asarray(known[0]).dtype)
    return tuple([jnp.asarray(bound, dtype) for bound in bounds])


def _fits(number: int, dtype: tp.Any) -> bool:
    limits = jnp.iinfo(dtype)
    return int(limits.min) <= number <= int(limits.max)
