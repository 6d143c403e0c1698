"""Derivatives of a call: `vjp` and `jvp`, and what `grad` and the filtered forms share with them.

All treat a function of objects as a function of leaves, and JAX differentiates it with respect to the
chosen ones alone.  What else leaves the call crosses beside its value, and is not differentiated.
Tangents and cotangents have the form of their primals: an object for an object.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp

from nnxlite._base.config import Modes
from nnxlite._base.jax import is_ref, new_ref
from nnxlite.boundary._call_def import CallDef, Partition
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._labels import labels
from nnxlite.boundary._out import Fixed
from nnxlite.transforms._call import Call, unwrapped_value
from nnxlite.transforms._tangents import Tangents, abstract, has_derivative, zero_tangent
from nnxlite.transforms._wrapper import Options, R, Transform, decorated, name_of, unbind
from nnxlite.variables._definition import MISSING

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import ModeKeywords

Primals = tp.TypeVarTuple("Primals")
Aux = tp.TypeVar("Aux")

Wanted: tp.TypeAlias = tp.Callable[[tp.Any], tp.Any]
"""Whether a leaf of a value is differentiated."""


class Result(tp.NamedTuple):
    """The form of a value that is differentiated; static data.

    Attributes:
        definition: its static side.
        partition: its leaves, divided into those that are differentiated and the rest.
        shapes: of the leaves that have a shape, None for the rest.
    """

    definition: CallDef
    partition: Partition
    shapes: list[tp.Any]

    def build(self, leaves: tp.Sequence[tp.Any], zeros: bool = False) -> tp.Any:
        """Tangents in this form, from those of some leaves; the rest has zeros, or None."""
        rest = map(zero_tangent, self.partition.split(self.shapes)[1]) if zeros else ()
        return self.definition.build(self.partition.join(leaves, tuple(rest)))


def of_chosen(
    call: Call, selected: Partition, has_aux: bool, wanted: Wanted | None = None
) -> tuple[tp.Callable[[list[tp.Any]], tp.Any], list[tp.Any]]:
    """A call as a function of the leaves that are differentiated, and these leaves.

    It returns the leaves of the value that are differentiated; and beside them its `Result`, and what
    else leaves the function.

    Args:
        call: the call, of either kind.
        selected: its leaves, the differentiated ones first.
        has_aux: whether the function returns `(value, aux)`.
        wanted: which leaves of the value are differentiated; None where it must be one number.
    """
    given, rest = selected.split(call.leaves)

    def run(chosen: list[tp.Any]) -> tp.Any:
        inner, result = call.run(selected.join(chosen, rest))
        value, aux = value_and_aux(result, call.fun) if has_aux else (result, None)
        if wanted is None:
            leaves, form, value = unwrapped_value(value), None, None
        else:
            shown = Inputs(value, call.definition.trees, inside=True)
            partition = Partition(tuple([bool(wanted(leaf)) for leaf in shown.leaves]))
            array = lambda x, flag: jnp.asarray(x) if flag and not isinstance(x, jax.Array) else x
            every = [*map(array, shown.leaves, partition.labels)]
            shapes = [abstract(x) if hasattr(x, "dtype") else None for x in every]
            leaves, form = partition.split(every)[0], Result(shown.definition, partition, shapes)
        return leaves, (Fixed(form), call.leave(inner, (value, aux) if has_aux else value))

    return run, given


def differentiated(call: CallDef, by_argument: tp.Mapping[int, tp.Any]) -> list[bool]:
    """Which leaves of a call are differentiated, from the settings of arguments by number."""
    settings: list[tp.Any] = [False] * call.treedef.num_leaves
    args, _ = call.template()
    for number, setting in by_argument.items():
        for position in jax.tree_util.tree_leaves(args[number]):
            settings[position] = setting
    return [*map(bool, labels(call, settings, "differentiation"))]


def _visible(call: Call) -> list[bool]:
    """Which leaves can be differentiated: those of the arguments that the function does not carry."""
    numbers = range(call.num_bound, len(call.definition.template()[0]))
    return differentiated(call.definition, dict.fromkeys(numbers, True))


def pulled_back(
    call: Call,
    selected: Partition,
    has_aux: bool,
    wanted: Wanted,
    form: Tangents,
    rest: tp.Sequence[tp.Any] = (),
    **options: tp.Any,
) -> tp.Any:
    """The result of `vjp`, of either kind: the value, its pullback, and the aux if there is one.

    Args:
        call, selected, has_aux, wanted: as for `of_chosen`.
        form: what a cotangent has to be like.
        rest: the cotangents of the leaves that are not differentiated.
        options: of JAX.
    """
    run, chosen = of_chosen(call, selected, has_aux, wanted)
    _, vjp, (fixed, crossing) = jax.vjp(run, chosen, has_aux=True, **options)
    result = call.put_back(crossing)
    # The pullback lives longer than the call, so it refers to parts of it only.
    definition, num_bound = call.definition, call.num_bound
    of_value, partition, shapes = fixed.value
    form = form._replace(wanted=partition.labels)

    def pull(vjp: tp.Callable[..., tp.Any], cotangent: tp.Any) -> tuple[tp.Any, ...]:
        given = form.of_leaves(of_value, shapes, cotangent)
        pairs = zip(partition.split(shapes)[0], partition.split(given)[0])
        (grads,) = vjp([zero_tangent(x) if t is None else t for x, t in pairs])
        return definition.build(selected.join(grads, rest))[0][num_bound:]

    pullback = jax.tree_util.Partial(pull, vjp)
    return (result[0], pullback, result[1]) if has_aux else (result, pullback)


def of_arguments(form: Tangents, call: Call, tangents: tp.Sequence[tp.Any]) -> list[tp.Any]:
    """The tangent of each leaf of a call, from those of the arguments that are given by position."""
    primals = len(call.definition.template()[0]) - call.num_bound
    if primals != len(tangents):
        raise form.error(
            f"{form.what}: {primals} primals and {len(tangents)} tangents; give one tangent, possibly "
            "None, for each primal."
        )
    tree = (*[None] * call.num_bound, *tangents), {}
    return form.of_leaves(call.definition, call.leaves, tree)


def pushed_forward(
    call: Call, tangents: list[tp.Any], has_aux: bool, wanted: Wanted, zeros: bool
) -> tp.Any:
    """The result of `jvp`, of either kind: the value, its tangent, and the aux if there is one.

    Args:
        call, has_aux, wanted: as for `of_chosen`.
        tangents: that of each leaf, None for a constant one.
        zeros: whether leaves of the value without a derivative have zeros as tangents, or None.
    """
    selected = Partition(tuple([t is not None for t in tangents]))
    run, chosen = of_chosen(call, selected, has_aux, wanted)
    chosen = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in chosen]
    along, _ = selected.split(tangents)
    _, moved, (fixed, crossing) = jax.jvp(run, (chosen,), (along,), has_aux=True)
    result = call.put_back(crossing)
    tangent = fixed.value.build(moved, zeros)
    return (result[0], tangent, result[1]) if has_aux else (result, tangent)


def value_and_aux(result: tp.Any, fun: tp.Any) -> tuple[tp.Any, tp.Any]:
    """The result of a function with `has_aux=True`; TypeError or ValueError unless it is a pair."""
    several = isinstance(result, (tuple, list))
    if not several or len(result) != 2:
        raise (ValueError if several else TypeError)(  # as unpacking does
            f"With has_aux=True {name_of(fun)} must return a pair (value, aux), got "
            f"{type(result).__name__}{f' of {len(result)}' if several else ''}."
        )
    return result[0], result[1]


def gradients(
    call: Call,
    selected: Partition,
    options: tp.Any,
    shown: tp.Callable[[list[tp.Any]], tp.Any],
    remedy: str,
) -> tp.Any:
    """The result of `grad` or `value_and_grad`, of either kind.

    Args:
        call, selected: the call, and its leaves, the differentiated ones first.
        options: of the transform, with `has_aux`, `jax_options` and a name that says what is returned.
        shown: from the gradients of leaves to what the user gets.
        remedy: what to do about a leaf without a derivative.

    Raises TypeError for such a leaf.
    """
    jax_options = dict(options.jax_options)
    if not (jax_options.get("allow_int") or jax_options.get("holomorphic")):
        _refuse_others(call, selected, options.name, remedy)
    run, chosen = of_chosen(call, selected, options.has_aux)
    differentiated = jax.value_and_grad(run, has_aux=True, **jax_options)
    (value, (_, crossing)), grads = differentiated(chosen)
    left = call.put_back(crossing)
    grads = shown(grads)
    if options.name.endswith("value_and_grad"):
        return ((value, left[1]), grads) if options.has_aux else (value, grads)
    return (grads, left[1]) if options.has_aux else grads


def _refuse_others(call: Call, selected: Partition, name: str, remedy: str) -> None:
    """Raise TypeError naming the first chosen leaf that has no derivative."""
    for leaf in selected.positions[0]:
        for part in jax.tree_util.tree_leaves(call.leaves[leaf]):
            if not _inexact(part):
                dtype = getattr(part, "dtype", None)
                kind = str(dtype) if dtype is not None else f"a value of type {type(part).__name__}"
                raise TypeError(
                    f"{name} requires real- or complex-valued inputs (input dtype that is a "
                    f"sub-dtype of np.inexact), but argument '{call.leaf_text(leaf)}' is {kind}. "
                    f"Differentiate only float leaves: {remedy}."
                )


def _inexact(value: tp.Any) -> bool:
    try:
        return has_derivative(value)
    except TypeError:
        return False


# vjp and jvp -------------------------------------------------------------------------------------


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
    call = Call(Options.of("vjp", modes, vjp), unbind(f), primals, {}, inside=True)
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
    if not references:
        return out
    message = (
        f"{call.name}: '{call.leaf_text(references[0])}' is an array reference, of which JAX returns no "
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
    call = Call(Options.of("jvp", modes, jvp), unbind(f), tuple(primals), {}, inside=True)
    with call.naming_arguments():
        form = Tangents("jvp: the tangent", TypeError, needed="of objects", wanted=_visible(call))
        given = of_arguments(form, call, tangents)
        for leaf, value in enumerate(call.leaves):  # what is written into a reference has a tangent
            if given[leaf] is None and is_ref(value) and has_derivative(value):
                given[leaf] = new_ref(zero_tangent(abstract(value)))
        return pushed_forward(call, given, has_aux, has_derivative, zeros=True)


def _run_later(later: Transform[..., tp.Any], args: tp.Any, kwargs: dict[str, tp.Any]) -> tp.Any:
    """Differentiate a function that has waited for its primals, and for its tangents with `jvp`."""
    name, (graph, updates), _, more, _ = later.options
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
