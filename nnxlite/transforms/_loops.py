"""`while_loop` and `fori_loop`, in which the body gets its own last result; also the base of `scan`.

The body is traced once, as a function from the leaves of its arguments to its outputs.  The trace shows
which leaves change from one iteration to the next: these are the state of JAX's loop.  All others are
constants of it, neither copied nor returned.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp

from nnxlite._config import Modes
from nnxlite._integers import as_integer
from nnxlite._jax import Tracer, is_ref
from nnxlite.boundary import (
    OTHER,
    Body,
    CallDef,
    CameIn,
    Carry,
    Crossing,
    Fixed,
    Fresh,
    Handover,
    Inner,
    Naming,
    OutDef,
    Outputs,
    described,
    enter,
    hand_over,
    is_random,
    leave,
    parameter_names,
    replaced,
    same,
    trace_body,
    warn_of_streams,
    with_arrays,
    with_matching_types,
)
from nnxlite.transforms._arguments import unwrapped_value
from nnxlite.transforms._core import Core
from nnxlite.transforms._flow import FlowOptions, loop_arguments, run_flow
from nnxlite.transforms._loop_checks import check_loop
from nnxlite.transforms._wrapper import name_of

C = tp.TypeVar("C")


class Roles(tp.NamedTuple):
    """What a loop does with the arguments: an axis, `Carry`, or None for a constant.

    Attributes:
        leaves: that of each leaf.
        roots: that of each root.
    """

    leaves: list[tp.Any]
    roots: list[tp.Any]

    def scanned(self) -> list[int]:
        """The leaves that have an axis."""
        return [i for i, role in enumerate(self.leaves) if role is not None and role is not Carry]


class LoopBody(tp.NamedTuple):
    """A traced loop body, and the leaves that its loop starts with.

    Attributes:
        body: the body, a function of the leaves of the arguments.
        leaves: those of the first iteration.
        slots: which of them change from one iteration to the next.
    """

    body: Body
    leaves: list[tp.Any]
    slots: list[int]

    @property
    def start(self) -> list[tp.Any]:
        """The state before the first iteration."""
        return [self.leaves[i] for i in self.slots]

    def with_state(self, state: list[tp.Any]) -> list[tp.Any]:
        """The leaves of an iteration, from the state before it."""
        return replaced(self.leaves, self.slots, state)


class CarryLoop(Core):
    """Base of loops with a carry."""

    def trace(self, call: CallDef, leaves: list[tp.Any], roles: Roles) -> Body:
        """The body, traced for some leaves; its `extra` ends with the result of `hand_over`."""
        raise NotImplementedError  # pragma: no cover - abstract

    def check(self, call: CallDef, body: Body, roles: Roles) -> None:
        """Raise an error where the body does something that a loop cannot repeat."""
        raise NotImplementedError  # pragma: no cover - abstract

    def next_state(self, body: Body, out: Outputs) -> list[tp.Any]:
        """The state after an iteration: array leaves of the carry, and graph leaves that change."""
        raise NotImplementedError  # pragma: no cover - abstract

    def prepare(self, call: CallDef, leaves: list[tp.Any], roles: Roles) -> LoopBody:
        """Trace the body until the types of the carry are stable: Python scalars may take two traces.

        Raises TypeError where they never are.
        """
        carried_arrays = [i for i in range(call.num_arrays) if roles.leaves[i] is Carry]
        while True:
            body = self.trace(call, leaves, roles)
            self.check(call, body, roles)
            slots = [*carried_arrays]
            slots += [call.num_arrays + leaf for leaf in handover_of(body).leaves]
            loop = LoopBody(body, leaves, slots)
            ends = self.next_state(body, body.shapes)
            starts, bad = with_matching_types(loop.start, ends)
            if bad:
                where = self.in_words(call).leaves()[slots[bad[0]]].text()
                raise TypeError(
                    f"{self.name} body function carry input and carry output must have equal types, "
                    f"but they differ at '{where}': the input is {described(starts[bad[0]])}, the "
                    f"output {described(ends[bad[0]])}."
                )
            if same(starts, loop.start):
                return loop
            leaves = loop.with_state(starts)


def handover_of(body: Body) -> Handover:
    """How the graph leaves of the carry change in a checked body."""
    return body.extra[-1]


class Loop(CarryLoop):
    """`while_loop` and `fori_loop`: the arguments are the carry (after the bounds, if traced)."""

    @property
    def num_bounds(self) -> int:
        """How many bounds come before the carry: two if they are traced."""
        return 2 if self.name == "fori_loop" and self.options.bounds is None else 0

    def run(self, call: CallDef, leaves: list[tp.Any]) -> Crossing:
        bounds: list[tp.Any] = [None] * self.num_bounds
        carried = [Carry] * (len(leaves) - len(bounds))
        loop = self.prepare(call, leaves, Roles(bounds + carried, [Carry] * len(call.where)))
        body = loop.body

        def advance(state: list[tp.Any], *index: tp.Any) -> list[tp.Any]:
            return self.next_state(body, body(loop.with_state(state), *index))

        if self.name == "fori_loop":
            lower, upper = self.options.bounds or leaves[:2]
            step = lambda index, state: advance(state, index)
            unroll = self.options.unroll[1]
            final = jax.lax.fori_loop(lower, upper, step, loop.start, unroll=unroll)
        else:
            test = self.funs[0]

            def proceed(state: list[tp.Any]) -> tp.Any:
                tree, inner = enter(call, loop.with_state(state))
                verdict = unwrapped_value(test(tree))
                self._check_test(call, leave(inner, None).definition)
                return verdict

            if any(map(is_ref, leaves)):  # JAX's condition sees them as they were before the loop
                start = proceed(loop.start), loop.start
                step = lambda state: (proceed(new := advance(state[1])), new)
                _, final = jax.lax.while_loop(lambda state: state[0], step, start)
            else:
                final = jax.lax.while_loop(proceed, advance, loop.start)
        return crossing(body, [Carry] * len(result_leaves(body.shapes)), final)

    def _check_test(self, call: CallDef, left: OutDef) -> None:
        """Raise ValueError where the condition of a loop changes more than random streams."""
        name = f"cond_fun ({name_of(self.funs[0])})"
        if left.graph is not None or not all(is_random(call, leaf) for leaf in left.written):
            raise ValueError(f"while_loop: {name} changed its argument. Only body_fun may write.")
        warn_of_streams(
            call,
            left.written,
            self.warned,
            f"does not move on in {name} of while_loop: body_fun draws the same keys again",
            "Draw in body_fun, and carry what was drawn.",
        )

    def next_state(self, body: Body, out: Outputs) -> list[tp.Any]:
        """All of the result."""
        return [*result_leaves(out), *handover_of(body).values(out)]

    def trace(self, call: CallDef, leaves: list[tp.Any], roles: Roles) -> Body:
        """The body, traced for some leaves."""
        step, bounds = self.funs[-1], self.options.bounds
        fun, index = step, ()
        if self.name == "fori_loop":
            number = jax.typeof(0 if bounds else leaves[0])
            index = (jax.ShapeDtypeStruct((), number.dtype, weak_type=number.weak_type),)
            fun = lambda tree, i: step(i, tree if bounds else tree[2])
        return trace_body(
            call,
            fun,
            leaves,
            *index,
            user=(step, self.naming),
            structure=True,
            captured=self.name == "fori_loop" and self.options.modes.updates,
            after=self._hand_over,
        )

    def naming(self) -> Naming:
        """The names of the carry, by the parameter of the body, and of the bounds."""
        carry = (parameter_names(self.funs[-1])[-1:] or ["carry"])[0]
        if not self.num_bounds:
            return lambda path: (carry, path)
        return lambda path: (("lower", "upper", carry)[path[0].idx], path[1:])

    def _hand_over(self, inner: Inner, out: Outputs) -> tuple[Outputs, tuple[Handover | str]]:
        """The outputs of a body, and how its carry changes."""
        count = len(inner.call.where)
        if count != len(out.definition.where):
            return out, (OTHER,)
        structure = self.options.modes.updates
        out, handover = hand_over(
            inner,
            with_arrays(inner, out),
            [(i, i) for i in range(count)],
            moves=self.name == "fori_loop" or not structure,
            only_carry=not structure,
        )
        return out, (handover,)

    def check(self, call: CallDef, body: Body, roles: Roles) -> None:
        """Raise an error where the result of the body does not have the structure of the carry."""
        check_loop(
            self.name, self.options.modes.updates, self.num_bounds, self.in_words(call), body
        )


def result_leaves(out: Outputs) -> list[tp.Any]:
    """The array leaves of a result."""
    return jax.tree_util.tree_leaves(out.result) if out.definition.treedef is None else out.result


def crossing(
    body: Body,
    result_settings: tp.Sequence[tp.Any],
    final: list[tp.Any],
    stacked: tp.Sequence[tp.Iterable[tp.Any]] = ((), (), ()),
) -> Crossing:
    """The outputs of a loop: those of the body, with the last state and stacked values.

    Args:
        body: the body.
        result_settings: `Carry` for each array leaf of the result that is part of the state.
        final: the last state.
        stacked: all other outputs of the iterations: of the result, written, and fresh.
    """
    definition = body.definition
    count = sum(setting is Carry for setting in result_settings)
    last = handover_of(body).by_source(final[count:])
    carry, (of_result, of_written, of_fresh) = iter(final[:count]), map(iter, stacked)
    result: tp.Any = [next(carry if s is Carry else of_result) for s in result_settings]
    sources = [CameIn(leaf) for leaf in definition.written]
    written = [last[s] if s in last else next(of_written) for s in sources]
    sources = [Fresh(number) for number in range(len(body.shapes.fresh))]
    fresh = [last[s] if s in last else next(of_fresh) for s in sources]
    if definition.treedef is None:
        treedef = jax.tree_util.tree_structure(body.shapes.result)
        result = jax.tree_util.tree_unflatten(treedef, result)
    return Fixed(definition), result, written, fresh


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
    carry = loop_arguments(init_val, modes)
    return run_flow(Loop, (cond_fun, body_fun), carry, FlowOptions("while_loop", modes))


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

    Carry and errors as for `while_loop`; bounds that are Python ints make the loop differentiable
    in reverse.

    Args:
        lower, upper: integers, Python's or scalars of JAX.
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
    lower, upper, unroll = unwrapped_value(lower), unwrapped_value(upper), as_integer(unroll)
    if unroll is not None:  # JAX needs concrete bounds
        lower, upper = (int(b) if _is_known(b) else b for b in (lower, upper))
    known = (lower, upper) if type(lower) is int and type(upper) is int else None
    modes = Modes.of(graph, graph_updates)
    options = FlowOptions("fori_loop", modes, (type(unroll), unroll), known)
    carry = loop_arguments(init_val, modes)
    return run_flow(Loop, (body_fun,), carry if known else (lower, upper, carry), options)


def _is_known(bound: tp.Any) -> bool:
    """Whether a bound is an integer whose value is known now."""
    return not isinstance(bound, Tracer) and jnp.issubdtype(jnp.result_type(bound), jnp.integer)
