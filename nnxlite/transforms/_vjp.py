"""`vjp` and `jvp`: products with the Jacobian of a function of objects.

Both treat a function of objects as a function of leaves.  Values that it writes are not differentiated.
Tangents and cotangents have the form of their primals: an object for an object.
"""

from __future__ import annotations

import functools
import typing as tp

import jax

from nnxlite._base.config import Modes
from nnxlite._base.jax import is_ref, new_ref
from nnxlite.boundary._labels import labels
from nnxlite.boundary._operands import Partition
from nnxlite.transforms._call import Call
from nnxlite.transforms._derivatives import of_arguments, pulled_back, pushed_forward
from nnxlite.transforms._tangents import Tangents, abstract, has_derivative, zero_tangent
from nnxlite.transforms._wrapper import Options, R, Transform, decorated, unbind
from nnxlite.variables._definition import MISSING

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import ModeKeywords

Primals = tp.TypeVarTuple("Primals")
Aux = tp.TypeVar("Aux")


def _visible(call: Call) -> list[bool]:
    """Which leaves can be differentiated: those of the arguments that the function does not carry."""
    template = call.definition.template()[0][call.num_bound :]
    visible = set(jax.tree_util.tree_leaves(template))
    settings: list[tp.Any] = [i in visible for i in range(call.definition.treedef.num_leaves)]
    return labels(call.definition, settings, "differentiation")


@tp.overload
def vjp(
    f: tp.Callable[[*Primals], R],
    *primals: *Primals,
    has_aux: tp.Literal[False] = False,
    reduce_axes: tp.Sequence[tp.Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tuple[R, tp.Callable[[R], tuple[*Primals]]]: ...
@tp.overload
def vjp(
    f: tp.Callable[[*Primals], tuple[R, Aux]],
    *primals: *Primals,
    has_aux: tp.Literal[True],
    reduce_axes: tp.Sequence[tp.Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tuple[R, tp.Callable[[R], tuple[*Primals]], Aux]: ...
@tp.overload
def vjp(
    f: tp.Any = ...,
    *,
    has_aux: bool = False,
    reduce_axes: tp.Sequence[tp.Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
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
        graph_updates: False propagates values of Variables only, not structure.

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
    call = Call.under(Options.of("vjp", modes, vjp), unbind(f), primals, {}, inside=True)
    extra = {"reduce_axes": tuple(reduce_axes)} if reduce_axes else {}
    with call.naming_arguments():
        visible = _visible(call)
        selected = Partition(
            tuple([seen and has_derivative(x) for seen, x in zip(visible, call.leaves)])
        )
        zeros = [
            zero_tangent(abstract(x)) if seen or is_ref(x) else None
            for seen, x in zip(selected.split(visible)[1], selected.split(call.leaves)[1])
        ]
        form = Tangents("vjp: the cotangent", ValueError, needed="of objects")
        out = pulled_back(call, selected, has_aux, has_derivative, form, zeros, **extra)
    references = [i for i in selected.positions[0] if is_ref(call.leaves[i])]
    return _without_cotangents(call, references[0], out) if references else out


def _without_cotangents(call: Call, leaf: int, out: tuple[tp.Any, ...]) -> tuple[tp.Any, ...]:
    """What `vjp` returns for a call with a reference: its pullback raises an error that names it."""
    message = (
        f"{call.name}: '{call.leaf_text(leaf)}' is an array reference, of which JAX returns no "
        "cotangent. Pass an object without references (nnx.to_arrays), or let the function capture it."
    )

    def vjp_fun(cotangent: tp.Any) -> tp.NoReturn:
        raise ValueError(message)

    return (out[0], vjp_fun, *out[2:])


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
        graph_updates: False propagates values of Variables only, not structure.

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
    call = Call.under(Options.of("jvp", modes, jvp), unbind(f), tuple(primals), {}, inside=True)
    with call.naming_arguments():
        form = Tangents("jvp: the tangent", TypeError, needed="of objects", wanted=_visible(call))
        given = of_arguments(form, call, tangents)
        for leaf, value in enumerate(call.leaves):  # what is written into a reference has a tangent
            if given[leaf] is None and is_ref(value) and has_derivative(value):
                given[leaf] = new_ref(zero_tangent(abstract(value)))
        return pushed_forward(call, given, has_aux, has_derivative, zeros=True)


def _run_later(later: Transform[..., tp.Any], args: tp.Any, kwargs: dict[str, tp.Any]) -> tp.Any:
    """Differentiate a function that has waited for its primals, and for its tangents with `jvp`."""
    name, (graph, updates), _, more = later.options
    options = {"graph": graph, "graph_updates": updates, **dict(more), **kwargs}
    if name == "vjp":
        return vjp(later.__wrapped__, *args, **options)
    # The object of a method comes before primals and tangents.
    carried = len(args) - len({"primals", "tangents"} - kwargs.keys())
    if carried > 0:
        return jvp(
            functools.partial(later.__wrapped__, *args[:carried]), *args[carried:], **options
        )
    return jvp(later.__wrapped__, *args, **options)
