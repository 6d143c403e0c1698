"""`while_loop` and `fori_loop`, in which the body gets its own last result; also the base of `scan`.

The body is traced once, as a function from the leaves of its arguments to its outputs.  The trace shows
which leaves change from one iteration to the next: these are the state of JAX's loop.  All others are
constants of it, neither copied nor returned.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves

from nnxlite._base.config import Modes
from nnxlite._base.jax import (
    Tracer,
    abstract,
    as_integer,
    drop_hidden_frames,
    is_pytree_leaf,
    is_ref,
)
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
    trace_body,
    warn_of_streams,
    with_type,
)
from nnxlite.boundary._call_def import CallDef, Inner, parameter_names, replaced, template_of
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._out import Outputs, replay
from nnxlite.boundary._prefixes import Carry
from nnxlite.boundary._refusals import described
from nnxlite.graph._functional import build
from nnxlite.graph._plan import view
from nnxlite.transforms._call import naming_arguments, unwrapped_value
from nnxlite.transforms._finish import checks_noted, wait
from nnxlite.transforms._programs import run_bodies
from nnxlite.transforms._wrapper import name_of
from nnxlite.variables._definition import MISSING

C = tp.TypeVar("C")


def run_flow(
    name: str, inputs: tp.Callable[[], Inputs], run: tp.Callable[[CallDef, list[tp.Any]], Outputs]
) -> tp.Any:
    """Run control flow on the caller's objects, and write back what it changed.

    Args:
        name: of the transform.
        inputs: gives the arguments.
        run: from the static side of the arguments and their leaves to what leaves.
    """
    try:
        given = inputs()
        call, checks = given.define(), checks_noted()
        remedy = "Pass an array, or let the function capture the value."
        with naming_arguments(name, call, given, remedy):
            out = run(call, given.leaves)
            if checks_noted() != checks:
                wait(out)
        return replay(given, out)
    except Exception as error:
        drop_hidden_frames(error)
        raise


def loop_arguments(tree: tp.Any, modes: Modes) -> tp.Any:
    """The arguments of a loop: without updates, new objects with the same Variables."""
    if modes.updates:
        return tree
    seen = view(tree)
    return build(seen.graphdef, seen.leaves)


class _Loop(tp.NamedTuple):
    """The settings of JAX's loop, by positions among the arrays that the body is given and returns.

    Attributes:
        name: `scan`, `while_loop` or `fori_loop`.
        state: the arrays that change from one iteration to the next.
        following: their next values.
        scanned: the arrays with an axis, and the axis.
        stacked: the other outputs, and the axis of each in the result.
        options: of the transform: for `scan` the keywords of `jax.lax.scan`; for `fori_loop` its
            bounds, if they are known, and how much to unroll; for `while_loop` whether the carry
            contains references.
    """

    name: str
    state: tuple[int, ...]
    following: tuple[int, ...]
    scanned: tuple[tuple[int, int], ...]
    stacked: tuple[tuple[int, int], ...]
    options: tuple[tp.Any, ...]


def _loop(
    settings: _Loop, funs: list[tp.Callable[..., list[tp.Any]]], inputs: list[tp.Any]
) -> list[tp.Any]:
    body, *test = funs
    scanned = [i for i, _ in settings.scanned]

    def step(state: list[tp.Any], slices: tp.Sequence[tp.Any] = (), *index: tp.Any) -> tp.Any:
        out = body(*replaced(replaced(inputs, settings.state, state), scanned, slices), *index)
        return [out[i] for i in settings.following], [out[i] for i, _ in settings.stacked]

    start = [inputs[i] for i in settings.state]
    if settings.name == "scan":
        slices = [_axis_moved(inputs[i], axis, 0) for i, axis in settings.scanned]
        final, stacked = jax.lax.scan(step, start, slices, **dict(settings.options))
        pairs = zip(stacked, settings.stacked)
        return [*final, *[_axis_moved(x, 0, axis) for x, (_, axis) in pairs]]
    if settings.name == "fori_loop":
        bounds, unroll = settings.options
        lower, upper = bounds or inputs[:2]
        again = lambda index, state: step(state, (), index)[0]
        return jax.lax.fori_loop(lower, upper, again, start, unroll=unroll)
    proceed = lambda state: test[0](*replaced(inputs, settings.state, state))[0]
    if not settings.options[0]:
        return jax.lax.while_loop(proceed, lambda state: step(state)[0], start)
    # JAX's condition would see references as they were before the loop
    after = lambda pair: (proceed(new := step(pair[1])[0]), new)
    return jax.lax.while_loop(lambda pair: pair[0], after, (proceed(start), start))[1]


def _axis_moved(x: tp.Any, source: int, target: int) -> tp.Any:
    """An array with an axis moved."""
    return x if source == target else jnp.moveaxis(x, source, target)


def run_loop(
    name: str,
    call: CallDef,
    leaves: list[tp.Any],
    roles: tp.Sequence[tp.Any],
    step: tp.Callable[..., tuple[Outputs, tuple[Slots, tuple[tp.Any, ...]]]],
    fun: tp.Callable[..., tp.Any],
    options: tuple[tp.Any, ...],
    *index: tp.Any,
    trace_test: tp.Callable[[list[tp.Any]], Body] | None = None,
) -> Outputs:
    """Trace the body of a loop, and run the loop.

    The body is traced until the types of the carry are stable: Python scalars may take two traces.

    Args:
        name: of the loop.
        call, leaves: the arguments.
        roles: of the leaves: an axis, `Carry`, or None for a constant.
        step: one iteration, from the arguments as they were rebuilt (and the index) to the outputs, the
            slots of the carry (see `carried`), and the role of each output.
        fun: the user's function, for messages.
        options: see `_Loop`.
        index: of an iteration, abstract, where there is one.
        trace_test: traces the condition of the loop for the leaves of an iteration.

    Raises TypeError where the types never are stable.
    """
    scanned = [i for i, role in enumerate(roles) if isinstance(role, int)]
    slice_of = lambda x, axis: jax.tree_util.tree_map(lambda y: abstract(y, axis), x)
    first = replaced(leaves, scanned, [slice_of(leaves[i], roles[i]) for i in scanned])
    carried_arrays = [i for i in range(call.num_arrays) if roles[i] is Carry]
    while True:
        body = trace_body(call, step, first, *index, user=fun)
        slots, out_roles = body.more
        state = [*carried_arrays, *[call.num_arrays + leaf for leaf, _ in slots]]
        start, ends = [first[i] for i in state], _next_state(body, body.shapes)
        starts = [*map(with_type, start, ends)]
        for at, before, x, after in zip(state, start, starts, ends):
            if x is MISSING:
                raise TypeError(
                    f"{name} body function carry input and carry output must have equal types, but "
                    f"they differ at '{call.leaves()[at].text()}': the input is {described(before)}, "
                    f"the output {described(after)}."
                )
        if all(a is b for a, b in zip(tree_leaves(starts), tree_leaves(start))):
            break
        first = replaced(first, state, starts)
    numbers, out = numbered(first), body.numbers()
    following = tree_leaves(_next_state(body, out))
    outputs = [(n, role) for x, role in zip(out.values, out_roles) for n in tree_leaves(x)]
    stacked = [pair for pair in outputs if pair[0] not in {*following}]
    settings = _Loop(
        name,
        tuple(tree_leaves([numbers[i] for i in state])),
        tuple(following),
        tuple([(n, roles[i]) for i in scanned for n in tree_leaves(numbers[i])]),
        tuple(stacked),
        options,
    )
    bodies = [body] if trace_test is None else [body, trace_test(first)]
    whole = replaced(first, scanned, [leaves[i] for i in scanned])
    values = run_bodies(_loop, settings, bodies, tree_leaves(whole))
    last = dict(zip([*following, *[n for n, _ in stacked]], values))
    return body.outputs([last[n] for n in range(len(last))])


def _next_state(body: Body, out: Outputs) -> list[tp.Any]:
    """The state after an iteration: array leaves of the carry, and graph leaves that change."""
    slots, roles = body.more
    arrays, _, _ = out.definition.split(out.values)
    result = [x for x, role in zip(arrays, roles) if role is Carry]
    return [*result, *next_values(slots, out)]


def _run_on_carry(
    name: str,
    modes: Modes,
    fun: tp.Callable[..., tp.Any],
    init_val: tp.Any,
    bounds: tuple[tp.Any, ...] = (),
    options: tuple[tp.Any, ...] = (),
    test: tp.Callable[..., tp.Any] | None = None,
) -> tp.Any:
    """Run `while_loop` or `fori_loop`, all of whose arguments but the bounds are the carry.

    Args:
        name, modes, fun, init_val: the loop.
        bounds: of the index, where they are arguments.
        options: of `fori_loop`, see `_Loop`.
        test: the condition of `while_loop`.
    """
    kind = LoopKind(name, modes.updates)

    def step(inner: Inner, tree: tp.Any, *index: tp.Any) -> tp.Any:
        call, result = inner.call, fun(*index, tree[0][-1])
        captured = bool(index) and modes.updates
        out = body_outputs(inner, result, structure=True, captured=captured)
        pairs = paired_roots(
            kind, call, out, call.template()[0][-1], template_of(out.definition.treedef)
        )
        roles = [Carry] * call.graphdef.num_leaves
        out, slots = carried(kind, inner, out, pairs, roles, [Carry] * len(out.new))
        return out, (slots, (Carry,) * len(out.values))

    def run(call: CallDef, leaves: list[tp.Any]) -> Outputs:
        roles = [None] * len(bounds) + [Carry] * (len(leaves) - len(bounds))
        if test is None:
            index = abstract(leaves[0] if bounds else 0)
            return run_loop(name, call, leaves, roles, step, fun, options, index)
        has_refs = any(map(is_ref, tree_leaves(leaves)))
        trace_test = functools.partial(_trace_test, test, call)
        return run_loop(name, call, leaves, roles, step, fun, (has_refs,), trace_test=trace_test)

    def inputs() -> Inputs:
        names = parameter_names(fun)[-1:] or ("carry",)
        names = (*("lower", "upper")[: len(bounds)], *names)
        args = (*bounds, loop_arguments(init_val, modes))
        return Inputs.of_call(args, {}, names).in_mode(modes.graph, name)

    return run_flow(name, inputs, run)


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
    return _run_on_carry("while_loop", modes, body_fun, init_val, test=cond_fun)


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
    known = all(type(bound) is int for bound in bounds)
    modes, options = Modes.of(graph, graph_updates), (bounds if known else None, unroll)
    return _run_on_carry("fori_loop", modes, body_fun, init_val, () if known else bounds, options)


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
