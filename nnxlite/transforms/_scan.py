"""`scan`: a loop over slices of mutable objects, with a carry.

Every leaf of the arguments is scanned (it has an axis), carried, or constant.  Variables of the carry
that the body only reads are constants of the loop, and are neither copied nor returned.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves

from nnxlite._config import Modes
from nnxlite._integers import as_integer
from nnxlite._jax import abstract_slice, drop_hidden_frames
from nnxlite.boundary import (
    OTHER,
    Body,
    CallDef,
    CameIn,
    Carry,
    Crossing,
    Fresh,
    Handover,
    Inner,
    OutDef,
    Outputs,
    broadcast,
    by_path,
    hand_over,
    is_random,
    numbered,
    output_settings,
    refuse_foreign_axes,
    replaced,
    settings_by_leaf,
    template_of,
    trace_body,
    warn_of_streams,
    with_arrays,
)
from nnxlite.transforms._arguments import (
    check_arguments,
    positional_with_defaults,
    refuse_shared_result,
)
from nnxlite.transforms._flow import loop_arguments
from nnxlite.transforms._loops import (
    CarryLoop,
    Roles,
    crossing,
    handover_of,
    result_leaves,
)
from nnxlite.transforms._mapped import remove_axis_names, with_axis_names
from nnxlite.transforms._programs import run_bodies
from nnxlite.transforms._scan_checks import check_body, check_length, check_prefixes
from nnxlite.transforms._wrapper import (
    Decorator,
    P,
    R,
    Transformed,
    decorated,
    inputs_in_mode,
    name_of,
)
from nnxlite.variables import MISSING, PARTITION_NAME

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import ScanKeywords


class ScanOptions(tp.NamedTuple):
    """The options of `scan`, in one object."""

    name: str
    length: int | None
    reverse: bool
    unroll: tuple[type, int | bool]  # with the type, since True equals 1
    split_transpose: bool
    in_axes: tp.Any
    out_axes: tp.Any
    axis_names: tuple[tuple[str, tp.Any], ...]
    modes: Modes
    num_bound: int = 0


class _ScanProgram(tp.NamedTuple):
    """The settings of JAX's loop, by positions among the arrays that the body is given and returns.

    Attributes:
        scanned: the arrays with an axis, and the axis.
        state, following: see `LoopBody`.
        stacked: the other outputs, and the axis of each in the result.
        length, reverse, unroll, split_transpose: as for `jax.lax.scan`.
    """

    scanned: tuple[tuple[int, int], ...]
    state: tuple[int, ...]
    following: tuple[int, ...]
    stacked: tuple[tuple[int, int], ...]
    length: int | None
    reverse: bool
    unroll: int | bool
    split_transpose: bool


def _scan(
    settings: _ScanProgram, funs: list[tp.Callable[..., list[tp.Any]]], inputs: list[tp.Any]
) -> list[tp.Any]:
    (body,) = funs
    scanned = [i for i, _ in settings.scanned]

    def step(state: list[tp.Any], slices: list[tp.Any]) -> tp.Any:
        out = body(*replaced(replaced(inputs, settings.state, state), scanned, slices))
        return [out[i] for i in settings.following], [out[i] for i, _ in settings.stacked]

    final, stacked = jax.lax.scan(
        step,
        [inputs[i] for i in settings.state],
        [_axis_moved(inputs[i], axis, 0) for i, axis in settings.scanned],
        length=settings.length,
        reverse=settings.reverse,
        unroll=settings.unroll,
        _split_transpose=settings.split_transpose,
    )
    return [*final, *[_axis_moved(x, 0, axis) for x, (_, axis) in zip(stacked, settings.stacked)]]


def _axis_moved(x: tp.Any, source: int, target: int) -> tp.Any:
    """An array with an axis moved."""
    return x if source == target else jnp.moveaxis(x, source, target)


class Scan(CarryLoop):
    """One call of a scanned function."""

    def run(self, call: CallDef, leaves: list[tp.Any]) -> Crossing:
        options: ScanOptions = self.options
        roles = self._roles(call)
        scanned = roles.scanned()
        check_length(call, leaves, roles.leaves, scanned, options.length)
        slices = [
            jax.tree_util.tree_map(
                functools.partial(abstract_slice, axis=roles.leaves[i]), leaves[i]
            )
            for i in scanned
        ]
        loop = self.prepare(call, replaced(leaves, scanned, slices), roles)
        body, numbers = loop.body, numbered(leaves)
        axes = Outputs(body.definition, *body.extra[0])
        settings = _ScanProgram(
            tuple((n, roles.leaves[i]) for i in scanned for n in tree_leaves(numbers[i])),
            loop.state,
            loop.following,
            tuple(
                (n, axis)
                for x, axis in zip(_stacked(body, body.numbers()), _stacked(body, axes))
                for n in tree_leaves(x)
            ),
            None if scanned else options.length,  # that of the arrays may be symbolic
            options.reverse,
            options.unroll[1],
            options.split_transpose,
        )
        whole = replaced(loop.leaves, scanned, [leaves[i] for i in scanned])
        outputs = run_bodies(_scan, settings, [body], tree_leaves(whole))
        at = [*loop.following, *[n for n, _ in settings.stacked]]
        return crossing(body, dict(zip(at, outputs)))

    def _roles(self, call: CallDef) -> Roles:
        options: ScanOptions = self.options
        args, kwargs = call.template()
        bound = jax.tree_util.tree_leaves(args[: options.num_bound])
        settings: list[tp.Any] = [None] * len(bound)
        settings += broadcast(options.in_axes, args[options.num_bound :], "in_axes")
        settings += [None] * len(jax.tree_util.tree_leaves(kwargs))
        by_leaf = settings_by_leaf(call, settings, "in_axes")
        if not options.modes.updates:  # writes carry over
            for leaf, node in enumerate(call.graphdef.decoded.leaf_nodes, call.num_arrays):
                if by_leaf[leaf] is None and node >= 0:
                    by_leaf[leaf] = Carry
        return Roles(by_leaf, [settings[i] for i in call.where])

    def next_state(self, body: Body, out: Outputs) -> list[tp.Any]:
        """The carry among the results, and the graph leaves that change."""
        pairs = zip(result_leaves(out), body.extra[0][0])
        return [*[x for x, s in pairs if s is Carry], *handover_of(body).values(out)]

    def trace(self, call: CallDef, leaves: list[tp.Any], roles: Roles) -> Body:
        """The body, traced for slices; its `extra` are the settings of its outputs, and the handover."""
        options: ScanOptions = self.options
        axis_names, structure = dict(options.axis_names), options.modes.updates
        values = call.by_side(roles.leaves)[1]

        def before(inner: Inner) -> None:
            if axis_names:
                remove_axis_names(inner, values, axis_names)

        def after(inner: Inner, out: Outputs) -> tuple[Outputs, tp.Any]:
            constants = [leaf for leaf in out.definition.written if values[leaf] is None]
            if structure:
                constants = [leaf for leaf in constants if is_random(call, leaf)]
                warn_of_streams(
                    call,
                    constants,
                    self.warned,
                    f"is broadcast under scan({name_of(self.fun)}): every iteration draws the "
                    "same keys",
                    "Carry its count, with nnx.StateAxes({nnx.RngCount: nnx.Carry, ...: None}), or "
                    "give each iteration a key of its own with nnx.split_rngs(splits=...) and an "
                    "axis.",
                )
            out = _without(out, constants)  # the next iteration has the input values
            out, handover = self._hand_over(inner, with_arrays(inner, out), roles, structure)
            settings = output_settings(
                call, out, values, roles.roots, options.out_axes, "out_axes", None
            )
            out = with_axis_names(inner, out, values, settings.fresh, axis_names)
            return out, (tuple(map(tuple, settings)), handover)

        def run(tree: tp.Any) -> tp.Any:
            result = self.fun(*tree[0], **tree[1])
            refuse_shared_result(result, "scan", options.modes.graph)
            return result

        return trace_body(
            call, run, leaves, user=self.fun, structure=True, before=before, after=after
        )

    def _hand_over(
        self, inner: Inner, out: Outputs, roles: Roles, structure: bool
    ) -> tuple[Outputs, Handover | str]:
        """The outputs of the body, and how its carry changes."""
        before = [i for i, s in enumerate(roles.roots) if s is Carry]
        after = [i for i, s in enumerate(self._result_roots(out.definition)) if s is Carry]
        if len(before) != len(after):
            return out, OTHER
        values = inner.call.by_side(roles.leaves)[1]
        return hand_over(
            inner,
            out,
            list(zip(before, after)),
            new_objects=not structure,
            only_carry=not structure,
            statics=structure,
            is_carried=lambda leaf: values[leaf] is Carry,
        )

    def _result_roots(self, definition: OutDef) -> list[tp.Any]:
        if definition.treedef is None:
            return []
        tree = template_of(definition.treedef)
        settings = broadcast(self.options.out_axes, tree, "out_axes")
        return [settings[p] for p in definition.where]

    def check(self, call: CallDef, body: Body, roles: Roles) -> None:
        """Raise an error where the body writes a constant, or changes the structure of its carry."""
        options: ScanOptions = self.options
        values = call.by_side(roles.leaves)[1]
        in_carry = _carry_part(options.in_axes, call.template()[0][options.num_bound :])
        check_body(
            f"scan({name_of(self.fun)})",
            options.modes.updates,
            call,
            body,
            values,
            in_carry,
            lambda result: _carry_part(options.out_axes, result, whole=True),
        )


def _carry_part(axes: tp.Any, parts: tp.Any, whole: bool = False) -> tp.Any:
    """The part of the arguments, or of the result as a whole, that is the carry; None without one."""
    if axes is Carry:
        return parts if whole else next(iter(parts), None)
    pairs = zip(axes, parts) if isinstance(axes, tuple) else ()
    return next((part for axis, part in pairs if axis is Carry), None)


def _without(out: Outputs, leaves: tp.Container[int]) -> Outputs:
    """Outputs without what was written to some leaves."""
    at = out.definition.written
    kept = [i for i, leaf in enumerate(at) if leaf not in leaves]
    definition = dataclasses.replace(out.definition, written=tuple(at[i] for i in kept))
    return out._replace(definition=definition, written=[out.written[i] for i in kept])


def _stacked(body: Body, out: Outputs) -> list[tp.Any]:
    """The outputs of an iteration besides its carry, or something else for each output."""
    settings, handover = body.extra
    carried = {source for _, source in handover.slots}
    result = [x for x, s in zip(result_leaves(out), settings[0]) if s is not Carry]
    pairs = zip(out.definition.written, out.written)
    written = [x for leaf, x in pairs if CameIn(leaf) not in carried]
    fresh = [x for n, x in enumerate(out.fresh) if Fresh(n) not in carried]
    return [*result, *written, *fresh]


class ScanWrapped(Transformed[..., tp.Any]):
    """A scanned function, as `scan` returns it."""

    options: ScanOptions

    def __init__(self, fun: tp.Any, options: ScanOptions) -> None:
        super().__init__(fun, options)
        self._warned: set[str] = set()

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        bound, axes = self.bound, self.options.in_axes
        wanted = len(axes) if isinstance(axes, tuple) else int(axes is Carry)
        if kwargs or len(args) < wanted:
            args, kwargs = positional_with_defaults(bound.fun, args, kwargs, bound, wanted)
        if wanted and len(args) != wanted:
            every, keywords = (*bound.args, *args), {**bound.kwargs, **kwargs}
            check_arguments("scan", bound.fun, every, keywords)
            if axes is Carry:
                raise ValueError(
                    f"scan({name_of(bound.fun)}): with in_axes=Carry the one argument is the carry, "
                    f"got {len(args)} arguments. Carry them as one pytree, or give each its axis, "
                    "such as in_axes=(nnx.Carry, None)."
                )
        inputs = inputs_in_mode(
            bound, *loop_arguments((args, kwargs), self.options.modes), self.options
        )
        options = self.options._replace(num_bound=len(bound.args))
        try:
            return Scan((bound.fun,), options, self._warned)(inputs)
        except Exception as error:
            drop_hidden_frames(error)
            raise


@tp.overload
def scan(f: tp.Callable[P, R], **options: tp.Unpack[ScanKeywords]) -> Transformed[P, R]: ...
@tp.overload
def scan(**options: tp.Unpack[ScanKeywords]) -> Decorator: ...
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
    refuse_foreign_axes("scan", "in_axes", in_axes)
    refuse_foreign_axes("scan", "out_axes", out_axes)
    check_prefixes(in_axes, out_axes)
    unroll = as_integer(unroll)
    options = ScanOptions(
        "scan",
        as_integer(length),
        reverse,
        (type(unroll), unroll),
        _split_transpose,
        in_axes,
        out_axes,
        tuple(transform_metadata.items()) if PARTITION_NAME in transform_metadata else (),
        Modes.of(graph, graph_updates),
    )
    return decorated(ScanWrapped, f, options)
