"""`grad`, `value_and_grad`, `vjp` and `jvp`: derivatives of functions of objects."""

from __future__ import annotations

import functools
import typing as tp

from nnxlite._base.errors import Modes
from nnxlite._base.jax import is_ref, new_ref
from nnxlite.boundary._call_def import Partition
from nnxlite.boundary._labels import DiffState
from nnxlite.filters import All, Filter, Frozen, Not
from nnxlite.graph._kinds import Kind, kind_of
from nnxlite.transforms._call import Call, positional
from nnxlite.transforms._derivatives import (
    Argnums,
    Derivation,
    Tangents,
    argument_numbers,
    as_states,
    differentiated,
    has_derivative,
    numbered_arguments,
    of_arguments,
    struct_of,
    zero_tangent,
)
from nnxlite.transforms._wrapper import (
    AnyState,
    FirstGradKeywords,
    Grad,
    GradAux,
    GradKeywords,
    GraphGradKeywords,
    ModeKeywords,
    Options,
    P,
    R,
    Transform,
    ValueAndGrad,
    decorated,
    unbind,
)
from nnxlite.variables._definition import MISSING
from nnxlite.variables._kinds import Param

__all__ = ["grad", "jvp", "value_and_grad", "vjp"]

F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])
Primals = tp.TypeVarTuple("Primals")
Aux = tp.TypeVar("Aux")


def _run(t: Transform[..., tp.Any], args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]) -> tp.Any:
    options, bound = t.options, t.bound
    if kwargs:
        wanted = max(getattr(a, "argnum", a) for a in options.argnums) + 1
        args, kwargs = positional(bound.fun, args, kwargs, wanted, bound)
    call = Call(options, bound, args, kwargs, captured=options.modes.updates)
    states = numbered_arguments(call.name, "argnums", options.argnums, call.num_bound, len(args))
    selected = _select(call, states)

    def shown(grads: list[tp.Any]) -> tp.Any:
        definition, leaves = call.definition, selected.join(grads)
        if options.modes.updates:
            arrays, _ = definition.by_side(leaves)
            first = len(arrays)
            chosen = {i - first: leaves[i] for i in selected.positions[0] if i >= first}
            args, _ = definition.tree(arrays, as_states(definition.graphdef, chosen))
        else:
            args, _ = definition.build(leaves)
        out = tuple([args[number] for number in states])
        return out[0] if options.single else out

    remedy = "choose them with DiffState(argnum, filter), or pass allow_int=True"
    return Derivation(call, selected, options.has_aux, wanted=None).gradients(shown, remedy)


def _select(given: Call, states: dict[int, DiffState | None]) -> Partition:
    """The leaves of a call, those first that are differentiated; cached on the call.

    These are the `Param`s of an object, or what its `DiffState` says, and all of anything else; nothing
    that is frozen, except for a Variable that is an argument itself.  The filter of a DiffState may look
    at values, so it decides again in each call.
    """
    call, options = given.definition, given.options
    updates = options.modes.updates
    key = (grad, options.argnums, updates, given.num_bound)
    known = call.cache.get(key)
    if known is not None:
        return known
    kinds = {position: kind_of(x) for position, x in zip(call.where, given.inputs.roots)}
    of_object: Filter = Param if updates else ...

    def setting(number: int, position: int) -> tp.Any:
        kind, state = kinds.get(position, Kind.VARIABLE), states[number]
        if kind == Kind.VARIABLE:
            return True
        if kind not in (Kind.OBJECT, Kind.CUSTOM):
            return DiffState(number, Not(Frozen()))
        wanted = of_object if state is None else state.filter
        return DiffState(number, All(wanted, Not(Frozen())))

    selected = differentiated(call, states, setting, given.inputs.variables())
    if not any(states.values()):
        call.cache[key] = selected
    return selected


def _decorated(
    f: tp.Any, name: str, argnums: Argnums, has_aux: bool, modes: Modes, **jax_options: tp.Any
) -> tp.Any:
    """A function under `grad` or `value_and_grad`, or a decorator.

    Raises ValueError where `argnums` is empty.
    """
    numbers = argument_numbers("argnums", argnums, modes.updates)
    if not numbers:
        raise ValueError("argnums is empty: give at least one argument to differentiate.")
    single = not isinstance(argnums, (tuple, list))
    more = {"argnums": numbers, "single": single, "has_aux": has_aux}
    given = tuple([(key, value) for key, value in jax_options.items() if value])
    return decorated(Transform, f, Options.of(name, modes, _run, **more, jax_options=given))


@tp.overload
def grad(
    f: F, *, has_aux: tp.Literal[False] = False, **options: tp.Unpack[FirstGradKeywords]
) -> Grad[F]: ...
@tp.overload
def grad(
    f: F, *, has_aux: tp.Literal[True], **options: tp.Unpack[FirstGradKeywords]
) -> GradAux[F]: ...
@tp.overload
def grad(
    f: tp.Callable[P, tp.Any], *, argnums: DiffState, **options: tp.Unpack[GraphGradKeywords]
) -> Transform[P, AnyState]: ...
@tp.overload
def grad(f: tp.Callable[P, tp.Any], **options: tp.Unpack[GradKeywords]) -> Transform[P, tp.Any]: ...
@tp.overload
def grad(
    **options: tp.Unpack[GradKeywords],
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
    more = {"holomorphic": holomorphic, "allow_int": allow_int, "reduce_axes": tuple(reduce_axes)}
    return _decorated(f, "grad", argnums, has_aux, Modes.of(graph, graph_updates), **more)


@tp.overload
def value_and_grad(
    f: F, *, has_aux: bool = False, **options: tp.Unpack[FirstGradKeywords]
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
    f: tp.Callable[P, R], **options: tp.Unpack[GradKeywords]
) -> Transform[P, tuple[R, tp.Any]]: ...
@tp.overload
def value_and_grad(
    **options: tp.Unpack[GradKeywords],
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
    more = {"holomorphic": holomorphic, "allow_int": allow_int, "reduce_axes": tuple(reduce_axes)}
    return _decorated(f, "value_and_grad", argnums, has_aux, Modes.of(graph, graph_updates), **more)


# vjp and jvp -------------------------------------------------------------------------------------


def _of_primals(name: str, modes: Modes, f: tp.Any, primals: tp.Any) -> tuple[Call, Partition]:
    """A call, and its leaves, those of the arguments first that the function does not carry.

    JAX gives what is not differentiable zeros itself, but for references to it, which are left out.
    """
    call = Call(Options.of(name, modes), unbind(f), tuple(primals), {}, inside=True)
    numbers = range(call.num_bound, call.num_bound + len(primals))
    pairs = zip(differentiated(call.definition, numbers).labels, call.leaves)
    return call, Partition.chosen(f and (not is_ref(x) or has_derivative(x)) for f, x in pairs)


@tp.overload
def vjp(
    f: tp.Callable[[*Primals], R],
    *primals: *Primals,
    has_aux: tp.Literal[False] = False,
    reduce_axes: tp.Sequence[tp.Any] = (),
    **modes: tp.Unpack[ModeKeywords],
) -> tuple[R, tp.Callable[[R], tuple[*Primals]]]: ...
@tp.overload
def vjp(
    f: tp.Callable[[*Primals], tuple[R, Aux]],
    *primals: *Primals,
    has_aux: tp.Literal[True],
    reduce_axes: tp.Sequence[tp.Any] = (),
    **modes: tp.Unpack[ModeKeywords],
) -> tuple[R, tp.Callable[[R], tuple[*Primals]], Aux]: ...
@tp.overload
def vjp(
    f: tp.Any = ...,
    *,
    has_aux: bool = False,
    reduce_axes: tp.Sequence[tp.Any] = (),
    **modes: tp.Unpack[ModeKeywords],
) -> tp.Callable[..., tp.Any]: ...
def vjp(
    f: tp.Any = MISSING,
    *primals: tp.Any,
    has_aux: bool = False,
    reduce_axes: tp.Sequence[tp.Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """The value of a function, and a function from cotangents of it to cotangents of the arguments.

    The cotangent of an object is an object of the same form that contains the cotangents of all its
    leaves; those of integers and keys have the dtype `float0`.
    What the function writes into its arguments is kept, and is not differentiated. Arguments that a
    bound method or a `functools.partial` carries are constants.

    Args:
        f: the function; without primals, the result is a function of the primals.
        primals: its arguments.
        has_aux: the function returns `(value, aux)`; the result is then `(value, vjp_fun, aux)`.
        reduce_axes: as in `jax.vjp`.
        graph: False refuses shared references.
        graph_updates: False propagates values and metadata of Variables, not structure.

    Returns:
        `(value, vjp_fun)`. The cotangent given to `vjp_fun` has the form of the value.

    Raises:
        ValueError: by `vjp_fun`, for a cotangent that does not match the value, and where an argument
            has an array reference: JAX returns no cotangents of those.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> y, pull = nnx.vjp(lambda m, x: m(x), model, jnp.ones((1, 2)))
    >>> d_model, d_x = pull(jnp.ones_like(y))
    >>> d_model.bias.value.tolist(), d_x.shape
    ([1.0, 1.0, 1.0], (1, 2))
    """
    modes = Modes.of(graph, graph_updates)
    if f is MISSING or not primals:
        given = {"has_aux": has_aux, "reduce_axes": tuple(reduce_axes)}
        return decorated(Transform, f, Options.of("vjp", modes, _run_later, **given))
    extra = {"reduce_axes": tuple(reduce_axes)} if reduce_axes else {}
    call, selected = _of_primals("vjp", modes, f, primals)
    with call.naming_arguments():
        form = Tangents("vjp: the cotangent", ValueError, needed="of objects")
        derivation = Derivation(call, selected, has_aux)
        zeros = [zero_tangent(struct_of(x)) if is_ref(x) else None for x in derivation.rest]
        value, pullback, *aux = derivation.pulled_back(form, zeros, **extra)
    references = [leaf for leaf in selected.positions[0] if is_ref(call.leaves[leaf])]
    if references:
        what = f"{call.name}: '{call.leaf_text(references[0])}'"
        pullback = functools.partial(_refuse_reference, what)
    return value, pullback, *aux


def _refuse_reference(what: str, cotangent: tp.Any) -> tp.NoReturn:
    raise ValueError(
        f"{what} is an array reference, of which JAX returns no cotangent. Pass an object without "
        "references (nnx.to_arrays), or let the function capture it."
    )


@tp.overload
def jvp(
    f: tp.Callable[[*Primals], R],
    primals: tuple[*Primals] | list[tp.Any],
    tangents: tuple[tp.Any, ...] | list[tp.Any],
    *,
    has_aux: tp.Literal[False] = False,
    **modes: tp.Unpack[ModeKeywords],
) -> tuple[R, R]: ...
@tp.overload
def jvp(
    f: tp.Callable[[*Primals], tuple[R, Aux]],
    primals: tuple[*Primals] | list[tp.Any],
    tangents: tuple[tp.Any, ...] | list[tp.Any],
    *,
    has_aux: tp.Literal[True],
    **modes: tp.Unpack[ModeKeywords],
) -> tuple[R, R, Aux]: ...
@tp.overload
def jvp(
    f: tp.Any = ..., *, has_aux: bool = False, **modes: tp.Unpack[ModeKeywords]
) -> tp.Callable[..., tp.Any]: ...
def jvp(
    f: tp.Any = MISSING,
    primals: tp.Any = MISSING,
    tangents: tp.Any = MISSING,
    *,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """The value of a function, and its derivative along tangents of the arguments.

    The tangent of an object is an object of the same form, or a State; a State may contain some of the
    Variables only, and the function is then not differentiated along the others. What the
    function writes into its arguments is kept.

    Args:
        f: the function; without primals and tangents the result is a function of these two.
        primals: a tuple or list of arguments.
        tangents: a tuple or list of their tangents.
        has_aux: the function returns `(value, aux)`; the result is then `(value, tangent, aux)`.
        graph: False refuses shared references.
        graph_updates: False propagates values and metadata of Variables, not structure.

    Returns:
        `(value, tangent)`, the tangent in the form of the value.

    Raises:
        TypeError: for tangents of another structure or dtype than the primals.
        ValueError: for a tangent of another shape.

    >>> import nnxlite as nnx
    >>> model = nnx.Dict(w=nnx.Param(3.0))
    >>> along = nnx.State({"w": nnx.Param(1.0)})
    >>> value, tangent = nnx.jvp(lambda m: m.w ** 2, (model,), (along,))
    >>> float(value), float(tangent)
    (9.0, 6.0)
    """
    modes = Modes.of(graph, graph_updates)
    if f is MISSING or primals is MISSING or tangents is MISSING:
        return decorated(Transform, f, Options.of("jvp", modes, _run_later, has_aux=has_aux))
    if not (isinstance(primals, (tuple, list)) and isinstance(tangents, (tuple, list))):
        raise TypeError(
            "primal and tangent arguments to jvp must be tuples or lists, one entry for each "
            f"argument; found {type(primals).__name__} and {type(tangents).__name__}."
        )
    call, visible = _of_primals("jvp", modes, f, primals)
    with call.naming_arguments():
        form = Tangents("jvp: the tangent", TypeError, needed="of objects", wanted=visible.labels)
        given = of_arguments(form, call, tangents)
        for leaf, value in enumerate(call.leaves):  # what is written into a reference has a tangent
            if given[leaf] is None and is_ref(value) and has_derivative(value):
                given[leaf] = new_ref(zero_tangent(struct_of(value)))
        selected = Partition.chosen(t is not None for t in given)
        return Derivation(call, selected, has_aux).pushed_forward(given)


def _run_later(later: Transform[..., tp.Any], args: tp.Any, kwargs: dict[str, tp.Any]) -> tp.Any:
    """Differentiate a function that has waited for its primals, and for its tangents with `jvp`."""
    fun, (name, (graph, updates), _, more, _) = later.__wrapped__, later.options
    options = {"graph": graph, "graph_updates": updates, **dict(more), **kwargs}
    if name == "vjp":
        return vjp(fun, *args, **options)
    # The object of a method comes before primals and tangents.
    carried = max(0, len(args) - len({"primals", "tangents"} - kwargs.keys()))
    fun = functools.partial(fun, *args[:carried]) if carried else fun
    return jvp(fun, *args[carried:], **options)
