"""`scan`, `while_loop` and `fori_loop`: loops over mutable objects.

Every leaf of the arguments is scanned (it has an axis), carried, or constant; `while_loop` and
`fori_loop` carry all of them.  The body is traced once, as a function from the leaves of its arguments
to its outputs.  The trace shows which leaves of the carry change from one iteration to the next: these
are the state of JAX's loop.  All others are constants of it, neither copied nor returned.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves

from nnxlite._base.errors import Modes
from nnxlite._base.jax import Tracer, abstract, as_integer, is_pytree_leaf, is_ref
from nnxlite.boundary._body import (
    Body,
    carried,
    check_scan_axes,
    is_random,
    next_values,
    numbered,
    trace_body,
    warn_of_streams,
    with_type,
)
from nnxlite.boundary._call_def import CallDef, Inner, parameter_names, replaced
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._labels import Carry, by_path, output_settings
from nnxlite.boundary._leave import described, leave
from nnxlite.boundary._out import (
    Outputs,
    axis_moved,
    refuse_bad_axes,
    remove_axis_names,
    with_axis_names,
)
from nnxlite.graph._functional import clone
from nnxlite.transforms._call import (
    argument_settings,
    axis_complaint,
    axis_names_of,
    in_positions,
    inputs_in_mode,
    unwrapped_value,
)
from nnxlite.transforms._control import run_bodies, run_flow
from nnxlite.transforms._wrapper import (
    Options,
    Transform,
    both_forms,
    decorated,
    name_of,
)
from nnxlite.variables._definition import MISSING

__all__ = ["fori_loop", "scan", "while_loop"]

C = tp.TypeVar("C")


def loop_arguments(tree: tp.Any, modes: Modes) -> tp.Any:
    """The arguments of a loop: without updates, new objects with the same Variables."""
    return tree if modes.updates else clone(tree, variables=False, graph=True)


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
        slices = [axis_moved(inputs[i], axis, 0) for i, axis in settings.scanned]
        final, stacked = jax.lax.scan(step, start, slices, **dict(settings.options))
        pairs = zip(stacked, settings.stacked)
        return [*final, *[axis_moved(x, 0, axis) for x, (_, axis) in pairs]]
    if settings.name == "fori_loop":
        bounds, unroll = settings.options
        lower, upper = bounds or inputs[:2]
        again = lambda index, state: step(state, (), index)[0]
        return jax.lax.fori_loop(lower, upper, again, start, unroll=unroll)
    proceed = lambda state: test[0](*replaced(inputs, settings.state, state))[0]
    if not settings.options[0]:
        return jax.lax.while_loop(proceed, lambda state: step(state)[0], start)

    def step_and_test(pair: tuple[tp.Any, list[tp.Any]]) -> tuple[tp.Any, list[tp.Any]]:
        state, _ = step(pair[1])
        return proceed(state), state

    # JAX's condition would see references as they were before the loop.
    return jax.lax.while_loop(lambda pair: pair[0], step_and_test, (proceed(start), start))[1]


def _carry_part(axes: tp.Any, parts: tp.Any, whole: bool = False) -> tp.Any:
    """The part of the arguments, or of the result as a whole, that is the carry; None without one."""
    if axes is Carry:
        return parts if whole else next(iter(parts), None)
    pairs = zip(axes, parts) if isinstance(axes, tuple) and isinstance(parts, tuple) else ()
    return next((part for axis, part in pairs if axis is Carry), None)


class _Step(tp.NamedTuple):
    """One iteration, as the user wrote it.

    Attributes:
        name: of the loop and the user's function, for messages.
        user: the function.
        run: calls it with the arguments as they were rebuilt, and the index if there is one.
        options: of the transform.
        first: how many arguments the function carries.
        roles, roots: of the graph leaves and roots of the arguments: an axis, `Carry`, or None.
        warned: tags of the random streams that the user was warned of.
        captured: whether it may return objects that it captured.
    """

    name: str
    user: tp.Callable[..., tp.Any]
    run: tp.Callable[..., tp.Any]
    options: tp.Any
    first: int
    roles: list[tp.Any]
    roots: list[tp.Any]
    warned: set[str]
    captured: bool = False

    def __call__(self, inner: Inner, tree: tp.Any, *index: tp.Any) -> tuple[Outputs, tp.Any]:
        """What leaves the iteration; the slots of the carry, and the role of each output."""
        options, call, roles = self.options, inner.call, self.roles
        axis_names = dict(options.axis_names)
        remove_axis_names(inner, roles, axis_names)
        result = self.run(tree, *index)
        more = {"graph": options.modes.graph, "captured": self.captured}
        out = leave(inner, result, name=self.name, foreign=False, **more)
        out = self._without_constants(call, out)
        before = _carry_part(options.in_axes, call.template()[0][self.first :])
        after = _carry_part(options.out_axes, out.definition.template(), whole=True)
        axes = output_settings(call, out, roles, self.roots, options.out_axes, "out_axes")
        of_result, _, of_new = out.definition.split(axes)
        loop = options.name, options.modes.updates
        out, slots = carried(loop, inner, out, (before, after), roles, of_new)
        written = [roles[leaf] for leaf in out.definition.written]
        every = [*of_result, *written, *of_new[: len(out.new)]]
        refuse_bad_axes(self.name, call, out, every)
        return with_axis_names(inner, out, roles, of_new, axis_names), (slots, tuple(every))

    def _without_constants(self, call: CallDef, out: Outputs) -> Outputs:
        """The outputs without random streams that are constants: each iteration draws the same keys.

        Raises ValueError where another constant was written.
        """
        at = out.definition.written
        constants = [leaf for leaf in at if self.roles[leaf] is None]
        if self.options.modes.updates:
            warn_of_streams(
                call,
                constants,
                self.warned,
                f"is broadcast under {self.name}: every iteration draws the same keys",
                "Carry its count, with nnx.StateAxes({nnx.RngCount: nnx.Carry, ...: None}), or "
                "give each iteration a key of its own with nnx.split_rngs(splits=...) and an axis.",
            )
            for leaf in constants:
                if not is_random(call, leaf):
                    raise ValueError(
                        f"scan: the body writes '{call.graph_leaves()[leaf].text()}', which is "
                        "broadcast (axis None): the writes of the iterations would be lost. Carry "
                        "it, with Carry in in_axes or nnx.StateAxes({...: nnx.Carry}), or give it an "
                        "axis."
                    )
        return out.with_written({i: x for i, x in zip(at, out.written) if i not in constants})


def _run_loop(
    step: _Step,
    call: CallDef,
    leaves: list[tp.Any],
    roles: tp.Sequence[tp.Any],
    options: tuple[tp.Any, ...],
    *index: tp.Any,
    trace_test: tp.Callable[[list[tp.Any]], Body] | None = None,
) -> Outputs:
    """Trace the body of a loop, and run the loop.

    The body is traced until the types of the carry are stable: Python scalars may take two traces.

    Args:
        step: one iteration.
        call, leaves, roles: the arguments; the role of each leaf.
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
        body = trace_body(call, step, first, *index, user=step.user)
        slots, out_roles = body.more
        state = [*carried_arrays, *[call.num_arrays + leaf for leaf, _ in slots]]
        start, ends = [first[i] for i in state], _next_state(body, body.shapes)
        starts = [*map(with_type, start, ends)]
        for at, before, x, after in zip(state, start, starts, ends):
            if x is MISSING:
                where, name = call.leaves()[at].text(), step.options.name
                raise TypeError(
                    f"{name} body function carry input and carry output must have equal types, but "
                    f"they differ at '{where}': the input is {described(before)}, the output "
                    f"{described(after)}."
                )
        if all(a is b for a, b in zip(tree_leaves(starts), tree_leaves(start))):
            break
        first = replaced(first, state, starts)
    numbers, out = numbered(first), body.numbers()
    following = tree_leaves(_next_state(body, out))
    outputs = [(n, role) for x, role in zip(out.values, out_roles) for n in tree_leaves(x)]
    stacked = [pair for pair in outputs if pair[0] not in {*following}]
    settings = _Loop(
        step.options.name,
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


# while_loop and fori_loop --------------------------------------------------------------------------


def _run_on_carry(
    name: str,
    modes: Modes,
    fun: tp.Callable[..., tp.Any],
    init_val: tp.Any,
    bounds: tuple[tp.Any, ...] = (),
    options: tuple[tp.Any, ...] = (),
    test: tp.Callable[..., tp.Any] | None = None,
) -> tp.Any:
    """Run `while_loop` or `fori_loop`: a `scan` of nothing, all of whose arguments are the carry.

    Args:
        name, modes, fun, init_val: the loop.
        bounds: of the index, where they are arguments.
        options: of `fori_loop`, see `_Loop`.
        test: the condition of `while_loop`.
    """
    axes = {"in_axes": (*[None] * len(bounds), Carry), "out_axes": Carry, "axis_names": ()}
    of_loop = Options.of(name, modes, **axes)

    def run(call: CallDef, leaves: list[tp.Any]) -> Outputs:
        roles = [None] * len(bounds) + [Carry] * (len(leaves) - len(bounds))
        of_leaves, of_roots = call.by_side(roles)[1], [Carry] * len(call.where)
        body = lambda tree, *index: fun(*index, tree[0][-1])
        captured = test is None and modes.updates
        step = _Step(name, fun, body, of_loop, 0, of_leaves, of_roots, set(), captured)
        if test is None:
            index = abstract(leaves[0] if bounds else 0)
            return _run_loop(step, call, leaves, roles, options, index)
        has_refs = any(map(is_ref, tree_leaves(leaves)))
        trace_test = functools.partial(_trace_test, test, call)
        return _run_loop(step, call, leaves, roles, (has_refs,), trace_test=trace_test)

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
        result = unwrapped_value(test(tree[0][0]))
        return leave(inner, result, name="while_loop", foreign=False), None

    names = parameter_names(test)[:1] or call.names
    body = trace_body(call.renamed(names), run, leaves, user=test)
    left = body.definition
    result = left.tree(left.split(body.shapes.values)[0], left.where)
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


# scan ----------------------------------------------------------------------------------------------


def _run_scan(t: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    bound, axes = t.bound, t.options.in_axes
    wanted = len(axes) if isinstance(axes, tuple) else int(axes is Carry)
    args, kwargs = in_positions(t, args, kwargs, wanted, kwargs or len(args) < wanted)
    if axes is Carry and len(args) != 1:
        raise ValueError(
            f"scan({name_of(bound.fun)}): with in_axes=Carry the one argument is the carry, "
            f"got {len(args)} arguments. Carry them as one pytree, or give each its axis, "
            "such as in_axes=(nnx.Carry, None)."
        )
    args, kwargs = loop_arguments((args, kwargs), t.options.modes)
    inputs = inputs_in_mode(bound, args, kwargs, t.options)
    return run_flow("scan", lambda: inputs, functools.partial(_scan_leaves, t))


def _scan_leaves(t: Transform[..., tp.Any], call: CallDef, leaves: list[tp.Any]) -> Outputs:
    options, fun, name = t.options, t.bound.fun, f"scan({name_of(t.bound.fun)})"
    roles, roots = argument_settings(call, t.bound, options.in_axes, "in_axes")
    if not options.modes.updates:  # writes carry over
        for leaf, node in enumerate(call.graphdef.decoded.leaf_nodes, call.num_arrays):
            if roles[leaf] is None and node >= 0:
                roles[leaf] = Carry
    is_scanned = any(isinstance(role, int) for role in roles)
    names = [leaf.text() for leaf in call.leaves()]
    complaint = axis_complaint(names, leaves, roles, options.length, "length")
    if complaint is not None:
        raise ValueError(f"{name}: {complaint}")
    # The length of the arrays may be symbolic.
    given = (("length", None if is_scanned else options.length), *options.jax_options)
    of_leaves, warned = call.by_side(roles)[1], vars(t).setdefault("_warned", set())
    body = lambda tree: fun(*tree[0], **tree[1])
    step = _Step(name, fun, body, options, len(t.bound.args), of_leaves, roots, warned)
    return _run_loop(step, call, leaves, roles, given)


@both_forms
def scan(
    f: tp.Any = MISSING,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    in_axes: tp.Any = (Carry, 0),
    out_axes: tp.Any = (Carry, 0),
    transform_metadata: tp.Mapping[str, tp.Any] = {},
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Run a function over slices of its arguments, one after the other, with a carry.

    `f(carry, x)` returns the next carry and an output, as in `jax.lax.scan`; `in_axes` and
    `out_axes` say otherwise. What is written into an object that is scanned or carried stays there
    after the loop.

    Args:
        f: the function; without it `scan` returns a decorator.
        length: number of iterations, where no argument is scanned.
        reverse, unroll, _split_transpose: as in `jax.lax.scan`.
        in_axes: for each argument an axis, None (the same in every iteration), `Carry`, or
            `StateAxes` to choose by Variable.
        out_axes: the same for the result.
        transform_metadata: as for `vmap`.
        graph, graph_updates: see `jit`.

    Returns:
        A function of the same arguments, which returns the last carry and the stacked outputs, in
        the positions that `out_axes` gives them.

    Raises:
        ValueError: for prefixes or sizes that do not match, a result that would be broadcast, a
            broadcast Variable that is written, or a carry whose objects are replaced or whose
            structure changes.
        TypeError: where types of the carry change, or (with `graph_updates=False`) an array of it
            becomes a tree.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> blocks = nnx.vmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(key)))(
    ...     jax.random.split(jax.random.key(0), 3))
    >>> forward = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    >>> forward(jnp.ones((1, 2)), blocks).shape
    (1, 2)

    The carry may contain objects:

    >>> @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    ... def count(carry, x):
    ...     total, counter = carry
    ...     counter.n += 1
    ...     return (total + x, counter), total
    >>> counter = nnx.Dict(n=nnx.Variable(jnp.array(0)))
    >>> (total, _), before = count((0.0, counter), jnp.arange(3.0))
    >>> float(total), before.tolist(), int(counter.n)
    (3.0, [0.0, 0.0, 1.0], 3)
    """
    in_axes = by_path(tuple(in_axes) if isinstance(in_axes, list) else in_axes)
    out_axes = by_path(tuple(out_axes) if isinstance(out_axes, list) else out_axes)
    check_scan_axes(in_axes, out_axes)
    unroll = as_integer(unroll)
    given = {"reverse": reverse, "unroll": unroll, "_split_transpose": _split_transpose}
    options = Options.of(
        "scan",
        Modes.of(graph, graph_updates),
        _run_scan,
        length=as_integer(length),
        jax_options=tuple(given.items()),
        unroll_type=type(unroll),  # since True equals 1
        in_axes=in_axes,
        out_axes=out_axes,
        axis_names=axis_names_of(transform_metadata),
    )
    return decorated(Transform, f, options)
