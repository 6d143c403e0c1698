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
from nnxlite._jax import Tracer, abstract, is_pytree_leaf, is_ref
from nnxlite.boundary import (
    OTHER,
    Body,
    CallDef,
    Carry,
    Crossing,
    Handover,
    Inner,
    OutDef,
    Outputs,
    described,
    hand_over,
    is_random,
    numbered,
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
from nnxlite.transforms._programs import run_bodies
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
        state: their positions among the arrays that the body is given.
        following: the positions of their next values among the arrays that it returns.
    """

    body: Body
    leaves: list[tp.Any]
    slots: list[int]
    state: tuple[int, ...]
    following: tuple[int, ...]


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
            start = [leaves[i] for i in slots]
            ends = self.next_state(body, body.shapes)
            starts, bad = with_matching_types(start, ends)
            if bad:
                where = call.leaves()[slots[bad[0]]].text()
                raise TypeError(
                    f"{self.name} body function carry input and carry output must have equal types, "
                    f"but they differ at '{where}': the input is {described(starts[bad[0]])}, the "
                    f"output {described(ends[bad[0]])}."
                )
            if same(starts, start):
                numbers = numbered(leaves)
                state = jax.tree_util.tree_leaves([numbers[i] for i in slots])
                following = jax.tree_util.tree_leaves(self.next_state(body, body.numbers()))
                return LoopBody(body, leaves, slots, tuple(state), tuple(following))
            leaves = replaced(leaves, slots, starts)


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
        bodies = [loop.body]
        settings: tp.Any = _Fori(
            loop.state, loop.following, self.options.bounds, self.options.unroll[1]
        )
        run: tp.Any = _fori_loop
        if self.name == "while_loop":
            bodies.append(self._trace_test(call, loop.leaves))
            # JAX's condition sees references as they were before the loop
            has_refs = any(map(is_ref, jax.tree_util.tree_leaves(leaves)))
            settings, run = _While(loop.state, loop.following, has_refs), _while_loop
        final = run_bodies(run, settings, bodies, jax.tree_util.tree_leaves(loop.leaves))
        return crossing(loop.body, dict(zip(loop.following, final)))

    def _trace_test(self, call: CallDef, leaves: list[tp.Any]) -> Body:
        """The condition, traced for some leaves.

        Raises TypeError where it does not return a boolean scalar, ValueError where it writes.
        """
        test = self.funs[0]
        fun = lambda tree: unwrapped_value(test(tree[0][0]))
        names = parameter_names(test)[:1] or call.names
        body = trace_body(call.renamed(names), fun, leaves, user=test, structure=True)
        self._check_test(call, body.definition)
        verdict = jax.tree_util.tree_leaves(body.shapes.result)
        shown = described(body.shapes.result)
        if len(verdict) != 1 or not is_pytree_leaf(body.shapes.result) or shown != "bool[]":
            raise TypeError(
                f"while_loop: cond_fun must return a boolean scalar, but got {shown} from "
                f"{name_of(test)}."
            )
        return body

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
        fun: tp.Callable[..., tp.Any] = lambda tree: step(tree[0][0])
        index = ()
        if self.name == "fori_loop":
            index = (abstract(0 if bounds else leaves[0]),)
            fun = lambda tree, i: step(i, tree[0][-1])
        return trace_body(
            call,
            fun,
            leaves,
            *index,
            user=step,
            structure=True,
            captured=self.name == "fori_loop" and self.options.modes.updates,
            after=self._hand_over,
        )

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
        check_loop(self.name, self.options.modes.updates, self.num_bounds, call, body)


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


def result_leaves(out: Outputs) -> list[tp.Any]:
    """The array leaves of a result."""
    return jax.tree_util.tree_leaves(out.result) if out.definition.treedef is None else out.result


def crossing(body: Body, values: tp.Mapping[int, tp.Any]) -> Crossing:
    """The outputs of a loop, which has one for each output of its body: the last or all stacked."""
    return body.outputs([values[i] for i in range(len(values))]).crossing()


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
    options = FlowOptions("while_loop", modes)
    return run_flow(Loop, (cond_fun, body_fun), options, _carry_name(body_fun), carry)


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
    options = FlowOptions("fori_loop", modes, (type(unroll), unroll), known)
    carry = loop_arguments(init_val, modes)
    names = _carry_name(body_fun)
    if known:
        return run_flow(Loop, (body_fun,), options, names, carry)
    return run_flow(Loop, (body_fun,), options, ("lower", "upper", *names), *bounds, carry)


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
