"""`vjp` and `jvp`: products with the Jacobian of a function of objects.

Both treat a function of objects as a function of leaves.  Values that it writes are not differentiated.
Tangents and cotangents have the form of their primals: an object for an object.
"""

from __future__ import annotations

import contextlib
import functools
import typing as tp

import jax

from nnxlite._config import Modes
from nnxlite._jax import is_ref
from nnxlite.boundary import (
    CallDef,
    Fixed,
    Inputs,
    Outputs,
    Partition,
    enter,
    leave,
    named_call,
    replay,
    settings_by_leaf,
)
from nnxlite.transforms._arguments import naming_arguments, refuse_shared_result
from nnxlite.transforms._grad import value_and_aux
from nnxlite.transforms._tangents import (
    FLOAT0,
    TangentForm,
    abstract,
    by_leaf,
    tangent_dtype,
    tangent_leaves,
    zero_tangent,
)
from nnxlite.transforms._wrapper import R, Wrapper, decorated, inputs_in_mode, name_of, unbind
from nnxlite.variables import MISSING

if tp.TYPE_CHECKING:
    from nnxlite.transforms._signatures import ModeKeywords

Primals = tp.TypeVarTuple("Primals")
Aux = tp.TypeVar("Aux")


class JacobianOptions(tp.NamedTuple):
    """The options of `vjp` and `jvp`, in one object."""

    name: str
    has_aux: bool
    modes: Modes


class Linearized:
    """One call as a function of the leaves that are differentiated.

    Attributes:
        call: how the arguments are rebuilt.
        leaves: those of the arguments.
        selected: which of them are differentiated.
        chosen: the differentiated ones.
        num_bound: how many arguments the function carries; they are not differentiated.
    """

    def __init__(
        self,
        fun: tp.Callable[..., tp.Any],
        primals: tp.Sequence[tp.Any],
        options: JacobianOptions,
    ) -> None:
        bound = unbind(fun)
        self.fun = bound.fun
        self.options = options
        self.num_bound = len(bound.args)
        self.inputs = inputs_in_mode(bound, tuple(primals), {}, options)
        self.call = self.inputs.define()
        self.leaves = self.inputs.leaves
        self.selected = self._select()
        self.chosen, self._rest = self.selected.split(self.leaves)

    @property
    def in_words(self) -> CallDef:
        """The call for messages, with the user's names for its arguments."""
        return named_call(self.call, self.fun)

    def _select(self) -> Partition:
        self.template = self.call.template()[0][self.num_bound :]
        visible = set(jax.tree_util.tree_leaves(self.template))
        settings: list[tp.Any] = [i in visible for i in range(self.call.treedef.num_leaves)]
        flags = settings_by_leaf(self.in_words, settings, "differentiation")
        # JAX has no tangents for references to integers.
        pairs = zip(flags, self.leaves)
        return Partition(
            tuple(flag and not (is_ref(x) and tangent_dtype(x) == FLOAT0) for flag, x in pairs)
        )

    def run(self, chosen: tp.Any) -> tuple[tp.Any, tp.Any]:
        """The leaves of the result, and the outputs that are not differentiated."""
        leaves = self.selected.join(chosen, self._rest)
        (args, kwargs), inner = enter(self.call, leaves)
        result, aux = self.fun(*args, **kwargs), None
        if self.options.has_aux:
            result, aux = value_and_aux(result, self.fun)
        refuse_shared_result((result, aux), self.options.name, self.options.modes.graph)
        shown = Inputs(result, self.call.trees)
        out = leave(inner, (result, aux), structure=self.options.modes.updates)
        fixed = Fixed((out.definition, shown.define()))
        return shown.leaves, (fixed, out.result, out.written, out.fresh)

    def naming_arguments(self) -> contextlib.AbstractContextManager[None]:
        """A context in which JAX's errors for arguments name them."""
        return naming_arguments(
            f"{self.options.name}({name_of(self.fun)})", self.in_words, self.inputs
        )

    def replay(self, crossing: tp.Any) -> tuple[tp.Any, tp.Any]:
        """Write back what the function changed; its result and auxiliary output."""
        fixed, result, written, fresh = crossing
        return replay(self.inputs, Outputs(fixed.value[0], result, written, fresh))


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
    flat = Linearized(f, primals, JacobianOptions("vjp", has_aux, modes))
    extra = {"reduce_axes": tuple(reduce_axes)} if reduce_axes else {}
    with flat.naming_arguments():
        leaves, pull_leaves, crossing = jax.vjp(flat.run, flat.chosen, has_aux=True, **extra)
    value, aux = flat.replay(crossing)
    pull = _pull_back(flat, crossing[0].value[1], leaves, pull_leaves)
    return (value, pull, aux) if has_aux else (value, pull)


def _pull_back(
    flat: Linearized,
    form: CallDef,
    leaves: list[tp.Any],
    pull_leaves: tp.Callable[..., tp.Any],
) -> tp.Callable[[tp.Any], tuple[tp.Any, ...]]:
    """The function that `vjp` returns; it keeps only those primals alive that the derivative needs."""
    call, selected, num_bound = flat.call, flat.selected, flat.num_bound
    shapes = jax.tree_util.tree_map(abstract, leaves)
    shown = TangentForm(form, form.template(), shapes, skip=0, what="cotangent", error=ValueError)
    references = [i for i in selected.positions[0] if is_ref(flat.leaves[i])]
    name, named = f"vjp({name_of(flat.fun)})", flat.in_words
    others = (flat.leaves[i] for i in selected.positions[1])
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
    flat = Linearized(f, tuple(primals), JacobianOptions("jvp", has_aux, modes))
    form = TangentForm(flat.in_words, flat.template, flat.leaves, 1, "tangent", TypeError)
    given = by_leaf(form, tuple(tangents))
    with flat.naming_arguments():
        along = tangent_leaves(form, given, flat.selected.positions[0])
        _, moved, crossing = jax.jvp(flat.run, (flat.chosen,), (along,), has_aux=True)
    result: CallDef = crossing[0].value[1]
    tangent, _ = enter(result, moved)
    value, aux = flat.replay(crossing)
    return (value, tangent, aux) if has_aux else (value, tangent)


class LaterOptions(tp.NamedTuple):
    """The options of a call of `vjp` or `jvp` without primals."""

    transform: tp.Callable[..., tp.Any]
    modes: Modes
    given: dict[str, tp.Any]


class Later(Wrapper[..., tp.Any]):
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
