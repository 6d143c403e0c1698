"""`vjp` and `jvp`: products with the Jacobian of a function of objects.

Both treat a function of objects as a function of leaves.  Values that it writes are not differentiated.
Tangents and cotangents have the form of their primals: an object for an object.
"""

from __future__ import annotations

import functools
import typing as tp

import jax

from nnxlite._config import Modes
from nnxlite._jax import is_ref
from nnxlite.boundary import CallDef, Inputs, Partition, enter, labels
from nnxlite.transforms._call import Call
from nnxlite.transforms._derivatives import Parts, of_chosen
from nnxlite.transforms._tangents import (
    FLOAT0,
    TangentForm,
    abstract,
    by_leaf,
    tangent_dtype,
    tangent_leaves,
    zero_tangent,
)
from nnxlite.transforms._wrapper import R, Transform, decorated, unbind
from nnxlite.variables import MISSING

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import ModeKeywords

Primals = tp.TypeVarTuple("Primals")
Aux = tp.TypeVar("Aux")


class JacobianOptions(tp.NamedTuple):
    """The options of `vjp` and `jvp`, in one object."""

    name: str
    modes: Modes


def _selected(call: Call) -> Partition:
    """Which leaves are differentiated: those of the arguments that the function does not carry."""
    template = call.definition.template()[0][call.num_bound :]
    visible = set(jax.tree_util.tree_leaves(template))
    settings: list[tp.Any] = [i in visible for i in range(call.definition.treedef.num_leaves)]
    flags = labels(call.definition, settings, "differentiation")
    # JAX has no tangents for references to integers.
    pairs = zip(flags, call.leaves)
    return Partition(
        tuple(flag and not (is_ref(x) and tangent_dtype(x) == FLOAT0) for flag, x in pairs)
    )


def _parts(call: Call) -> tp.Callable[[tp.Any], Parts]:
    """Divides a value into all its leaves and the rest; it also crosses as a whole, as an object."""

    def parts(value: tp.Any) -> Parts:
        shown = Inputs(value, call.definition.trees)
        return shown.leaves, shown.define(), value

    return parts


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
        return decorated(Later, f, LaterOptions(vjp, modes, given))
    call = Call.under(JacobianOptions("vjp", modes), unbind(f), primals, {})
    selected = _selected(call)
    run, chosen = of_chosen(call, selected, has_aux, _parts(call))
    extra = {"reduce_axes": tuple(reduce_axes)} if reduce_axes else {}
    with call.naming_arguments():
        leaves, pull_leaves, (form, crossing) = jax.vjp(run, chosen, has_aux=True, **extra)
    result = call.put_back(crossing)
    pull = _pull_back(call, selected, form.value, leaves, pull_leaves)
    return (result[0], pull, result[1]) if has_aux else (result, pull)


def _pull_back(
    given: Call,
    selected: Partition,
    form: CallDef,
    leaves: list[tp.Any],
    pull_leaves: tp.Callable[..., tp.Any],
) -> tp.Callable[[tp.Any], tuple[tp.Any, ...]]:
    """The function that `vjp` returns; it keeps only those primals alive that the derivative needs."""
    call, num_bound = given.definition, given.num_bound
    shapes = jax.tree_util.tree_map(abstract, leaves)
    shown = TangentForm(form, form.template(), shapes, what="cotangent", error=ValueError)
    references = [i for i in selected.positions[0] if is_ref(given.leaves[i])]
    name, named = given.name, given.definition
    others = (given.leaves[i] for i in selected.positions[1])
    nothing = [zero_tangent(abstract(x)) if is_ref(x) else None for x in others]

    def vjp_fun(cotangent: tp.Any) -> tuple[tp.Any, ...]:
        """Cotangents of the arguments, from one of the value."""
        if references:
            raise ValueError(
                f"{name}: '{named.leaves()[references[0]].text()}' is an array reference, of which "
                "JAX returns no cotangent. Pass an object without references (nnx.to_arrays), or let "
                "the function capture it."
            )
        given = by_leaf(shown, cotangent)
        (grads,) = pull_leaves(tangent_leaves(shown, given, range(len(shapes))))
        (args, _), _ = enter(call, selected.join(grads, nothing))
        return args[num_bound:]

    return vjp_fun


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
        return decorated(Later, f, LaterOptions(jvp, modes, {"has_aux": has_aux}))
    if not (isinstance(primals, (tuple, list)) and isinstance(tangents, (tuple, list))):
        raise TypeError(
            "primal and tangent arguments to jvp must be tuples or lists, one entry for each "
            f"argument; found {type(primals).__name__} and {type(tangents).__name__}."
        )
    call = Call.under(JacobianOptions("jvp", modes), unbind(f), tuple(primals), {})
    template, selected = call.definition.template()[0][call.num_bound :], _selected(call)
    form = TangentForm(call.definition, template, call.leaves, "tangent", TypeError)
    given = by_leaf(form, tuple(tangents))
    run, chosen = of_chosen(call, selected, has_aux, _parts(call))
    with call.naming_arguments():
        along = tangent_leaves(form, given, selected.positions[0])
        _, moved, (shown, crossing) = jax.jvp(run, (chosen,), (along,), has_aux=True)
    tangent, _ = enter(shown.value, moved)
    result = call.put_back(crossing)
    return (result[0], tangent, result[1]) if has_aux else (result, tangent)


class LaterOptions(tp.NamedTuple):
    """The options of a call of `vjp` or `jvp` without primals."""

    transform: tp.Callable[..., tp.Any]
    modes: Modes
    given: dict[str, tp.Any]


class Later(Transform[..., tp.Any]):
    """A function to differentiate, waiting for its primals."""

    options: LaterOptions

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of the transform."""
        return self.options.transform.__name__

    def __call__(self, *args: tp.Any, **given: tp.Any) -> tp.Any:
        transform, (graph, updates), first = self.options
        options = {"graph": graph, "graph_updates": updates, **first, **given}
        return transform(self.__wrapped__, *args, **options)

    def __get__(self, instance: tp.Any, owner: tp.Any = None) -> tp.Any:
        bound = super().__get__(instance, owner)
        if instance is None or self.options.transform is vjp:  # the instance is the first primal
            return bound
        return Later(functools.partial(self.__wrapped__, instance), self.options)
