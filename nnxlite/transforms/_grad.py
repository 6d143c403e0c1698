"""`grad` and `value_and_grad`: derivatives with respect to the Variables of objects."""

from __future__ import annotations

import operator
import typing as tp

import jax

from nnxlite._base.config import Modes
from nnxlite.boundary._call_def import Partition
from nnxlite.boundary._labels import labels
from nnxlite.boundary._prefixes import DiffState
from nnxlite.graph._defs import ObjectDef
from nnxlite.graph._kinds import STATE
from nnxlite.graph._rebuild import ContainerCode, Decoded, NodeCode
from nnxlite.transforms._call import Call, positional
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


PARAMS = DiffState(0, Param)
"""What is differentiated of an object by default."""


def _run(
    differentiated: Transform[..., tp.Any], args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]
) -> tp.Any:
    options, bound = differentiated.options, differentiated.bound
    if kwargs:
        wanted = max(getattr(a, "argnum", a) for a in options.argnums) + 1
        args, kwargs = positional(bound.fun, args, kwargs, wanted, bound)
    call = Call(options, bound, args, kwargs, captured=options.modes.updates)
    positions = _positions(options.argnums, call.num_bound, len(args))
    selected = _select(call, positions)
    shown = lambda grads: _gradients(call, positions, selected, grads)
    remedy = "choose them with DiffState(argnum, filter), or pass allow_int=True"
    return gradients(call, selected, options, shown, remedy)


def _positions(argnums: tuple[int | DiffState, ...], num_bound: int, visible: int) -> list[int]:
    """The positions of the differentiated arguments, behind those that the function carries.

    Raises TypeError where an argument number is too large; ValueError where one is too small or given
    twice.
    """
    out: list[int] = []
    for argnum in argnums:
        number = argnum.argnum if isinstance(argnum, DiffState) else argnum
        if not -visible <= number < visible:
            needed = number + 1 if number >= 0 else -number
            error = TypeError if number >= 0 else ValueError  # as in JAX
            raise error(
                f"differentiating with respect to argnums={number} requires at least {needed} "
                f"positional arguments, but the function was called with {visible}."
            )
        number %= visible
        if num_bound + number in out:
            raise ValueError(
                f"argnums names argument {number} twice. Give it once, with a DiffState whose filter "
                "matches all that is wanted."
            )
        out.append(num_bound + number)
    return out


def _select(given: Call, positions: list[int]) -> Partition:
    """Which leaves are differentiated, and which are not; cached on the call.

    A filter that looks at the values of the graph leaves decides again in each call.

    Raises ValueError where a shared Variable is differentiated by one path and not by another.
    """
    call, options = given.definition, given.options
    as_tree = not options.modes.updates
    key = (grad, options.argnums, as_tree, given.num_bound)
    known = call.cache.get(key)
    if known is not None:
        return known
    args, _ = call.template()
    decoded = call.graphdef.decoded
    roots = dict(zip(call.where, decoded.roots))
    settings: list[tp.Any] = [False] * call.treedef.num_leaves
    chosen_by: dict[int, DiffState | None] = {}
    for argnum, position in zip(options.argnums, positions):
        state = argnum if isinstance(argnum, DiffState) else None
        for leaf in jax.tree_util.tree_leaves(args[position]):
            by_filter = _is_object(decoded, roots.get(leaf)) and not (as_tree and state is None)
            settings[leaf] = (state or PARAMS) if by_filter else True
            chosen_by[leaf] = state

    def first_decides(root: int, again: int) -> bool:
        """Of a Variable in an object and in the same argument itself, the first path decides."""
        one, other = call.where[root], call.where[again]
        if not {one, other} <= chosen_by.keys() or chosen_by[one] is not chosen_by[other]:
            return False
        return chosen_by[one] is None or settings[one] is True or settings[other] is True

    read: list[int] = []  # the leaves whose values a filter asked for

    def value(leaf: int) -> tp.Any:
        read.append(leaf)
        return given.inputs.values[leaf]

    flags = labels(call, settings, "differentiation", value, first_decides)
    top = {code.number for code in decoded.roots if isinstance(code, NodeCode)}
    for leaf, node in enumerate(decoded.leaf_nodes):  # frozen, but not an argument itself
        definition = decoded.node_defs[node] if node >= 0 and node not in top else None
        if isinstance(definition, VariableDef) and FROZEN in definition.metadata:
            flags[call.num_arrays + leaf] = False
    selected = Partition(tuple(map(bool, flags)))
    return selected if read else call.remember(key, selected)


def _is_object(decoded: Decoded, code: tp.Any) -> bool:
    """Whether a root is a graph object, as opposed to a Variable or a State."""
    if isinstance(code, NodeCode):
        return isinstance(decoded.node_defs[code.number], ObjectDef)
    return isinstance(code, ContainerCode) and code.definition.kind != STATE


def _gradients(
    given: Call, positions: list[int], selected: Partition, grads: list[tp.Any]
) -> tp.Any:
    """Gradients in the form of the arguments, from those of the leaves."""
    call, options = given.definition, given.options
    if options.modes.updates:
        by_leaf = dict(zip(selected.positions[0], grads))
        in_graph = {i - call.num_arrays: x for i, x in by_leaf.items() if i >= call.num_arrays}
        of_root = root_states(call.graphdef, in_graph)
        parts: dict[int, tp.Any] = {p: by_leaf.get(i) for i, p in enumerate(call.array_positions())}
        of_leaf = lambda p: parts[p] if p in parts else of_root(call.where.index(p))
        args, _ = call.template()
        out = [jax.tree_util.tree_map(of_leaf, args[position]) for position in positions]
    else:
        args, _ = call.build(selected.join(grads))
        out = [args[position] for position in positions]
    return out[0] if options.single else tuple(out)


def _decorated(
    f: tp.Any, name: str, argnums: Argnums, has_aux: bool, modes: Modes, **jax_options: tp.Any
) -> tp.Any:
    """A function under `grad` or `value_and_grad`, or a decorator.

    Raises TypeError where `argnums` is not an int, DiffState, or sequence of these; ValueError where it
    is empty, or contains a DiffState although gradients have the arguments' own type.
    """
    single = isinstance(argnums, DiffState) or not isinstance(argnums, (tuple, list))
    given: tuple[tp.Any, ...] = (argnums,) if single else tuple(tp.cast(tp.Any, argnums))
    if not given:
        raise ValueError("argnums is empty: give at least one argument to differentiate.")
    checked: list[DiffState | int] = []
    for argnum in given:
        try:
            number = argnum if isinstance(argnum, DiffState) else operator.index(argnum)
        except TypeError:
            raise TypeError(
                "argnums must be an int, a DiffState, or a sequence of these, got "
                f"{argnum!r} of type {type(argnum).__name__}."
            ) from None
        if isinstance(number, DiffState) and not modes.updates:
            raise ValueError(
                "`argnums` cannot contain `DiffState` objects when `graph=False` or "
                f"`graph_updates=False`, got {number!r}: gradients have the arguments' own type and "
                "hold every leaf there. Use graph=True and graph_updates=True, or split the argument "
                "and differentiate one of the states."
            )
        checked.append(number)
    reduce_axes = tuple(jax_options.pop("reduce_axes"))
    if reduce_axes:
        jax_options["reduce_axes"] = reduce_axes
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
    more = {"holomorphic": holomorphic, "allow_int": allow_int, "reduce_axes": reduce_axes}
    return _decorated(f, "grad", argnums, has_aux, Modes.of(graph, graph_updates), **more)


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
    more = {"holomorphic": holomorphic, "allow_int": allow_int, "reduce_axes": reduce_axes}
    return _decorated(f, "value_and_grad", argnums, has_aux, Modes.of(graph, graph_updates), **more)
