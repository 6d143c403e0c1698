"""`scan`: a loop over slices of mutable objects, with a carry.

Every leaf of the arguments is scanned (it has an axis), carried, or constant.  Variables of the carry
that the body only reads are constants of the loop, and are neither copied nor returned.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
from jax.tree_util import tree_leaves

from nnxlite._base.config import Modes
from nnxlite._base.jax import as_integer
from nnxlite.boundary._body import (
    LoopKind,
    Slots,
    body_outputs,
    carried,
    is_random,
    paired_roots,
    warn_of_streams,
)
from nnxlite.boundary._call_def import CallDef, Inner, template_of
from nnxlite.boundary._labels import output_settings, refuse_no_room
from nnxlite.boundary._out import Outputs
from nnxlite.boundary._prefixes import (
    Carry,
    PrefixMapping,
    by_path,
    is_setting,
    refuse_foreign_axes,
)
from nnxlite.transforms._call import refuse_shared_result
from nnxlite.transforms._finish import R
from nnxlite.transforms._loops import loop_arguments, run_flow, run_loop
from nnxlite.transforms._mapping import (
    argument_settings,
    axis_complaint,
    in_positions,
    remove_axis_names,
    with_axis_names,
)
from nnxlite.transforms._wrapper import (
    Decorator,
    Options,
    P,
    Transform,
    decorated,
    inputs_in_mode,
    name_of,
)
from nnxlite.variables._definition import MISSING
from nnxlite.variables._metadata import PARTITION_NAME

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import ScanKeywords


def _carry_part(axes: tp.Any, parts: tp.Any, whole: bool = False) -> tp.Any:
    """The part of the arguments, or of the result as a whole, that is the carry; None without one."""
    if axes is Carry:
        return parts if whole else next(iter(parts), None)
    pairs = zip(axes, parts) if isinstance(axes, tuple) else ()
    return next((part for axis, part in pairs if axis is Carry), None)


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
    return run_flow("scan", lambda: inputs, functools.partial(_run, t))


def _run(t: Transform[..., tp.Any], call: CallDef, leaves: list[tp.Any]) -> Outputs:
    """Trace the body, and run the loop."""
    options = t.options
    roles, roots = argument_settings(call, t.bound, options.in_axes, "in_axes")
    if not options.modes.updates:  # writes carry over
        for leaf, node in enumerate(call.graphdef.decoded.leaf_nodes, call.num_arrays):
            if roles[leaf] is None and node >= 0:
                roles[leaf] = Carry
    is_scanned = any(isinstance(role, int) for role in roles)
    names = [leaf.text() for leaf in call.leaves()]
    complaint = axis_complaint(names, leaves, roles, options.length, "length")
    if complaint is not None:
        raise ValueError(f"scan({name_of(t.bound.fun)}): {complaint}")
    # The length of the arrays may be symbolic.
    given = (("length", None if is_scanned else options.length), *options.jax_options)
    step = functools.partial(_step, t, roles=call.by_side(roles)[1], roots=roots)
    return run_loop("scan", call, leaves, roles, step, t.bound.fun, given)


def _step(
    t: Transform[..., tp.Any], inner: Inner, tree: tp.Any, roles: list[tp.Any], roots: list[tp.Any]
) -> tuple[Outputs, tuple[Slots, tuple[tp.Any, ...]]]:
    """One iteration, with what leaves it.

    Args:
        t: the scan.
        inner, tree: its arguments.
        roles, roots: of the graph leaves and roots.
    """
    options, fun, call = t.options, t.bound.fun, inner.call
    name, axis_names = f"scan({name_of(fun)})", dict(options.axis_names)
    remove_axis_names(inner, roles, axis_names)
    result = fun(*tree[0], **tree[1])
    refuse_shared_result(result, "scan", options.modes.graph)
    out = body_outputs(inner, result, structure=True)
    out = _without_constants(t, call, out, roles, name)
    loop = LoopKind("scan", options.modes.updates)
    before = _carry_part(options.in_axes, call.template()[0][len(t.bound.args) :])
    after = _carry_part(options.out_axes, template_of(out.definition.treedef), whole=True)
    axes = output_settings(call, out, roles, roots, options.out_axes, "out_axes", None)
    pairs = paired_roots(loop, call, out, before, after)
    of_result, _, of_new = out.definition.split(axes)
    out, slots = carried(loop, inner, out, pairs, roles, of_new)
    written = [roles[leaf] for leaf in out.definition.written]
    every = [*of_result, *written, *of_new[: len(out.new)]]
    refuse_no_room(name, call, out, every)
    out = with_axis_names(inner, out, roles, of_new, axis_names)
    return out, (slots, tuple(every))


def _without_constants(
    t: Transform[..., tp.Any], call: CallDef, out: Outputs, roles: list[tp.Any], name: str
) -> Outputs:
    """The outputs without random streams that are constants: each iteration draws the same keys.

    Raises ValueError where another constant was written.
    """
    at = out.definition.written
    constants = [leaf for leaf in at if roles[leaf] is None]
    if t.options.modes.updates:
        warn_of_streams(
            call,
            constants,
            vars(t).setdefault("_warned", set()),  # of these streams
            f"is broadcast under {name}: every iteration draws the same keys",
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


def check_prefixes(in_axes: tp.Any, out_axes: tp.Any) -> None:
    """Raise ValueError for an invalid use of Carry."""
    counts: list[int] = []
    for axes in (in_axes, out_axes):
        parts = axes if isinstance(axes, tuple) else (axes,)
        counts.append(parts.count(Carry))
        for part in parts:
            inside = tree_leaves(part, is_leaf=is_setting)
            if part is not Carry and Carry in inside:
                raise ValueError(
                    f"Carry must be at the top level, it cannot be nested. Found axes={axes!r}. "
                    "Make the carry one argument (any pytree)."
                )
    _check_results(out_axes)
    if bool(counts[0]) != bool(counts[1]):
        raise ValueError(
            "If one of in_axes or out_axes has Carry, the other must also have Carry. Got "
            f"in_axes={in_axes!r} and out_axes={out_axes!r}."
        )
    if max(counts) > 1:
        raise ValueError(
            f"Found multiple Carry definitions in in_axes={in_axes!r} or out_axes={out_axes!r}. "
            "Make the carries one pytree."
        )


def _check_results(out_axes: tp.Any) -> None:
    """Raise ValueError where a result would be broadcast, or a part of an object carried."""
    settings, _ = jax.tree_util.tree_flatten_with_path(
        out_axes, is_leaf=lambda x: x is None or isinstance(x, PrefixMapping)
    )
    for path, setting in settings:
        inside = setting._settings if isinstance(setting, PrefixMapping) else [setting]
        for word, refused in (("carry", Carry), ("broadcast", None)):
            if setting is not Carry and any(axis is refused for axis in inside):
                where = "".join(map(str, path))
                shown = f"out_axes={setting!r}" if setting is None else repr(setting)
                raise ValueError(
                    f"Cannot {word} output state. Got {shown} at: out_axes{where}. Every result of "
                    "an iteration needs an axis, or is the carry as a whole."
                )


@tp.overload
def scan(f: tp.Callable[P, R], **options: tp.Unpack[ScanKeywords]) -> Transform[P, R]: ...
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
    options = Options.of(
        "scan",
        Modes.of(graph, graph_updates),
        _run_scan,
        length=as_integer(length),
        jax_options=(
            ("reverse", reverse),
            ("unroll", unroll),
            ("_split_transpose", _split_transpose),
        ),
        unroll_type=type(unroll),  # since True equals 1
        in_axes=in_axes,
        out_axes=out_axes,
        axis_names=tuple(transform_metadata.items())
        if PARTITION_NAME in transform_metadata
        else (),
    )
    return decorated(Transform, f, options)
