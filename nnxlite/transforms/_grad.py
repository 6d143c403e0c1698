"""`grad` and `value_and_grad`: derivatives with respect to the Variables of objects."""

from __future__ import annotations

import operator
import typing as tp

import jax

from nnxlite._base.config import Modes
from nnxlite.boundary._call_def import CallDef, enter
from nnxlite.boundary._labels import labels
from nnxlite.boundary._operands import Partition
from nnxlite.boundary._prefixes import DiffState
from nnxlite.graph._defs import ObjectDef
from nnxlite.graph._kinds import STATE
from nnxlite.graph._rebuild import ContainerCode, NodeCode
from nnxlite.transforms._arguments import positional
from nnxlite.transforms._call import Call
from nnxlite.transforms._derivatives import gradients
from nnxlite.transforms._tangents import root_states
from nnxlite.transforms._wrapper import Options, P, R, Transform, decorated
from nnxlite.variables._definition import MISSING, VariableDef
from nnxlite.variables._kinds import Param
from nnxlite.variables._metadata import FROZEN

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import (
        AnyState,
        Grad,
        GradAux,
        GradKeywords,
        GraphGradKeywords,
        ValueAndGrad,
    )

Argnums = int | DiffState | tp.Sequence[int | DiffState]
F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])


def _numbers(options: tp.Any) -> list[int]:
    """The argument numbers, negative ones from the end."""
    return [a.argnum if isinstance(a, DiffState) else a for a in options.argnums]


def _frozen(call: CallDef) -> list[int]:
    """The leaves of frozen Variables, but not of those that are arguments themselves."""
    decoded = call.graphdef.decoded
    roots = {code.number for code in decoded.roots if isinstance(code, NodeCode)}
    return [
        leaf
        for leaf, node in enumerate(decoded.leaf_nodes)
        if node >= 0 and node not in roots
        if isinstance(definition := decoded.node_defs[node], VariableDef)
        and FROZEN in definition.metadata
    ]


def _is_object(call: CallDef, code: tp.Any) -> bool:
    """Whether a root is a graph object, as opposed to a Variable or a State."""
    if isinstance(code, ContainerCode):
        return code.definition.kind != STATE
    definition = call.graphdef.decoded.node_defs[code.number]
    return isinstance(definition, ObjectDef)


def _run(
    differentiated: Transform[..., tp.Any], args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]
) -> tp.Any:
    options, bound = differentiated.options, differentiated.bound
    if kwargs:
        args, kwargs = positional(bound.fun, args, kwargs, max(_numbers(options)) + 1, bound)
    call = Call.under(options, bound, args, kwargs, captured=options.modes.updates)
    selected = _select(call)
    shown = lambda grads: _gradients(call, selected, grads)
    remedy = "choose them with DiffState(argnum, filter), or pass allow_int=True"
    return gradients(call, selected, options, shown, remedy)


def _select(given: Call) -> Partition:
    """Which leaves are differentiated, and which are not; cached on the call.

    A filter that looks at the values of the graph leaves decides again in each call.

    Raises:
        TypeError: where an argument number is too large.
        ValueError: where one is too small or given twice, or a shared Variable is differentiated by
            one path and not by another.
    """
    call = given.definition
    options, num_bound, as_tree = given.options, given.num_bound, not given.options.modes.updates
    key = (grad, options.argnums, as_tree, num_bound)
    known = call.cache.get(key)
    if known is not None:
        return known
    args, _ = call.template()
    by_leaf: list[tp.Any] = [False] * call.treedef.num_leaves
    visible = len(args) - num_bound
    chosen: set[int] = set()
    for argnum, number in zip(options.argnums, _numbers(options)):
        if not -visible <= number < visible:
            needed = number + 1 if number >= 0 else -number
            error = TypeError if number >= 0 else ValueError  # as in JAX
            raise error(
                f"differentiating with respect to argnums={number} requires at least {needed} "
                f"positional arguments, but the function was called with {visible}."
            )
        position = num_bound + number % visible
        if position in chosen:
            raise ValueError(
                f"argnums names argument {position - num_bound} twice. Give it once, with a "
                "DiffState whose filter matches all that is wanted."
            )
        chosen.add(position)
        for leaf in jax.tree_util.tree_leaves(args[position]):
            by_leaf[leaf] = argnum if isinstance(argnum, DiffState) else True
    # Of a Variable in an object and in the same argument itself, the first path decides.
    first: dict[int, tuple[DiffState | None, bool]] = {}
    settings: list[tp.Any] = [setting is not False for setting in by_leaf]
    for root, (leaf, code) in enumerate(zip(call.where, call.graphdef.decoded.roots)):
        if by_leaf[leaf] is not False:
            state = by_leaf[leaf] if isinstance(by_leaf[leaf], DiffState) else None
            whole = not _is_object(call, code) or (as_tree and state is None)
            first[root] = state, whole or state is None
            settings[leaf] = whole or state or DiffState(0, Param)

    def first_decides(root: int, again: int) -> bool:
        (one, decides), (other, too) = (first.get(i, (i, False)) for i in (root, again))
        return one is other and (decides or too)

    read: list[int] = []  # the leaves whose values a filter asked for

    def value(leaf: int) -> tp.Any:
        read.append(leaf)
        return given.inputs.values[leaf]

    flags = labels(given.definition, settings, "differentiation", value, first_decides)
    for leaf in _frozen(call):
        flags[call.num_arrays + leaf] = False
    selected = Partition(tuple(map(bool, flags)))
    return selected if read else call.remember(key, selected)


def _gradients(given: Call, selected: Partition, grads: list[tp.Any]) -> tp.Any:
    """Gradients in the form of the arguments, from those of the leaves."""
    call, options, num_bound = given.definition, given.options, given.num_bound
    args, _ = call.template()
    visible = len(args) - num_bound
    positions = [num_bound + number % visible for number in _numbers(options)]
    if options.modes.updates:
        by_leaf = dict(zip(selected.positions[0], grads))
        arrays = {p: by_leaf.get(i) for i, p in enumerate(call.array_positions())}
        in_graph = {i - call.num_arrays: x for i, x in by_leaf.items() if i >= call.num_arrays}
        state, where = root_states(call.graphdef, in_graph), call.where

        def of_position(position: int) -> tp.Any:
            if position in arrays:
                return arrays[position]
            return state(where.index(position))

        out = [jax.tree_util.tree_map(of_position, args[n]) for n in positions]
    else:
        (args, _), _ = enter(call, selected.join(grads))
        out = [args[n] for n in positions]
    return out[0] if options.single else tuple(out)


def _decorated(
    f: tp.Any,
    name: str,
    argnums: Argnums,
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool,
    reduce_axes: tp.Sequence[tp.Any],
    graph: bool | None,
    graph_updates: bool | None,
) -> tp.Any:
    """A function under `grad` or `value_and_grad`, or a decorator.

    Raises TypeError where `argnums` is not an int, DiffState, or sequence of these; ValueError where it
    is empty, or contains a DiffState although gradients have the arguments' own type.
    """
    single = isinstance(argnums, DiffState) or not isinstance(argnums, (tuple, list))
    given = (argnums,) if single else tuple(tp.cast(tp.Sequence[tp.Any], argnums))
    if not given:
        raise ValueError("argnums is empty: give at least one argument to differentiate.")
    checked: list[DiffState | int] = []
    for argnum in given:
        if isinstance(argnum, DiffState):
            checked.append(argnum)
            continue
        try:
            checked.append(operator.index(tp.cast(tp.Any, argnum)))
        except TypeError:
            raise TypeError(
                "argnums must be an int, a DiffState, or a sequence of these, got "
                f"{argnum!r} of type {type(argnum).__name__}."
            ) from None
    jax_options: dict[str, tp.Any] = {"holomorphic": holomorphic, "allow_int": allow_int}
    if reduce_axes:
        jax_options["reduce_axes"] = tuple(reduce_axes)
    modes = Modes.of(graph, graph_updates)
    state = next((a for a in checked if isinstance(a, DiffState)), None)
    if state is not None and not modes.updates:
        raise ValueError(
            "`argnums` cannot contain `DiffState` objects when `graph=False` or "
            f"`graph_updates=False`, got {state!r}: gradients have the arguments' own type and hold "
            "every leaf there. Use graph=True and graph_updates=True, or split the argument and "
            "differentiate one of the states."
        )
    more = {"argnums": tuple(checked), "single": single, "has_aux": has_aux}
    options = Options.of(name, modes, _run, **more, jax_options=tuple(jax_options.items()))
    return decorated(Transform, f, options)


@tp.overload
def grad(
    f: F,
    *,
    argnums: tp.Literal[0] = 0,
    has_aux: tp.Literal[False] = False,
    **options: tp.Unpack[GraphGradKeywords],
) -> Grad[F]: ...
@tp.overload
def grad(
    f: F,
    *,
    argnums: tp.Literal[0] = 0,
    has_aux: tp.Literal[True],
    **options: tp.Unpack[GraphGradKeywords],
) -> GradAux[F]: ...
@tp.overload
def grad(
    f: tp.Callable[P, tp.Any],
    *,
    argnums: DiffState,
    has_aux: tp.Literal[False] = False,
    **options: tp.Unpack[GraphGradKeywords],
) -> Transform[P, AnyState]: ...
@tp.overload
def grad(
    f: tp.Callable[P, tp.Any],
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    **options: tp.Unpack[GradKeywords],
) -> Transform[P, tp.Any]: ...
@tp.overload
def grad(
    *, argnums: Argnums = 0, has_aux: bool = False, **options: tp.Unpack[GradKeywords]
) -> tp.Callable[[tp.Callable[P, tp.Any]], Transform[P, tp.Any]]: ...
def grad(
    f: tp.Any = MISSING,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: tp.Sequence[tp.Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """The gradient of a scalar function, with respect to the Params of an argument.

    For an object the gradient is a State of its `Param`s (or of the Variables that a `DiffState`
    chooses) without those that `nnx.freeze` has frozen; for any other pytree it has the argument's
    own structure. What the function writes into its arguments (running statistics, counters) is kept.

    Args:
        f: the function; without it `grad` returns a decorator.
        argnums: which arguments: numbers, or `DiffState(number, filter)`.
        has_aux: the function returns `(value, aux)`; the result is then `(gradient, aux)`.
        holomorphic, allow_int, reduce_axes: as in `jax.grad`.
        graph: False refuses shared references and gives gradients of the argument's own type, with
            None for what is frozen.
        graph_updates: False gives gradients of the argument's own type.

    Returns:
        A function of the same arguments, which returns the gradient, or `(gradient, aux)`; with
        several `argnums`, a tuple of gradients.

    Raises:
        TypeError: for a leaf that has no derivative, or an argument number that is too large.
        ValueError: for a Variable that is shared between a differentiated and another argument, or
            an argument number that is too small or given twice.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> grads = nnx.grad(lambda m: (m.kernel ** 2).sum())(model)
    >>> bool(jnp.allclose(grads["kernel"].value, 2 * model.kernel))
    True

    The auxiliary output carries what else is wanted; a filter chooses what is differentiated:

    >>> def loss(model, x):
    ...     y = model(x)
    ...     return (y ** 2).mean(), y
    >>> wrt = nnx.DiffState(0, nnx.PathContains("bias"))
    >>> grads, y = nnx.grad(loss, argnums=wrt, has_aux=True)(model, jnp.ones((4, 2)))
    >>> list(grads), y.shape
    (['bias'], (4, 3))
    """
    given = (argnums, has_aux, holomorphic, allow_int, reduce_axes, graph, graph_updates)
    return _decorated(f, "grad", *given)


@tp.overload
def value_and_grad(
    f: F,
    *,
    argnums: tp.Literal[0] = 0,
    has_aux: bool = False,
    **options: tp.Unpack[GraphGradKeywords],
) -> ValueAndGrad[F]: ...
@tp.overload
def value_and_grad(
    f: tp.Callable[P, R],
    *,
    argnums: DiffState,
    has_aux: bool = False,
    **options: tp.Unpack[GraphGradKeywords],
) -> Transform[P, tuple[R, AnyState]]: ...
@tp.overload
def value_and_grad(
    f: tp.Callable[P, R],
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    **options: tp.Unpack[GradKeywords],
) -> Transform[P, tuple[R, tp.Any]]: ...
@tp.overload
def value_and_grad(
    *, argnums: Argnums = 0, has_aux: bool = False, **options: tp.Unpack[GradKeywords]
) -> tp.Callable[[tp.Callable[P, R]], Transform[P, tuple[R, tp.Any]]]: ...
def value_and_grad(
    f: tp.Any = MISSING,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: tp.Sequence[tp.Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Like `grad`, with the value: `(value, gradient)`, or `((value, aux), gradient)`.

    Args:
        f: the function; without it a decorator is returned.
        argnums, holomorphic, allow_int, reduce_axes, graph, graph_updates: as for `grad`.
        has_aux: the function returns `(value, aux)`.

    Returns:
        A function of the same arguments, which returns `(value, gradient)`, or `((value, aux),
        gradient)`.

    Raises:
        TypeError, ValueError: as for `grad`.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> value, grads = nnx.value_and_grad(lambda m: m.bias.sum())(model)
    >>> float(value), grads["bias"].value.tolist()
    (0.0, [1.0, 1.0, 1.0])
    """
    given = (argnums, has_aux, holomorphic, allow_int, reduce_axes, graph, graph_updates)
    return _decorated(f, "value_and_grad", *given)
