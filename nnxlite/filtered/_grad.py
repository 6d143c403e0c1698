"""Derivatives with respect to some leaves of the arguments.

Each function of objects becomes a function of the differentiated leaves alone; derivatives are returned
in trees of the arguments' own types, with None at all other leaves.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._errors import path_text, short_type
from nnxlite._jax import in_this_trace
from nnxlite._typing import P, R
from nnxlite.boundary import CallDef, Partition, further_leaves
from nnxlite.filtered._crossing import Call, Filtered, chosen_first
from nnxlite.filtered._leaves import leaves_of
from nnxlite.filtered._predicates import (
    is_array_like,
    is_inexact_array,
    is_inexact_array_like,
)
from nnxlite.filtered._specs import answers
from nnxlite.graph import Path
from nnxlite.transforms import decorated, gradients, of_chosen
from nnxlite.variables import MISSING

if tp.TYPE_CHECKING:
    from nnxlite.filtered._signatures import TreeGrad, TreeGradAux, TreeValueAndGrad

T = tp.TypeVar("T")
Aux = tp.TypeVar("Aux")
Primals = tp.TypeVarTuple("Primals")
First: tp.TypeAlias = tp.Callable[tp.Concatenate[tp.Any, P], R]
"""A function whose first argument is differentiated."""


class FilterGradOptions(tp.NamedTuple):
    """The options of `filter_grad`, `filter_value_and_grad` and the Jacobians."""

    name: str
    has_aux: bool
    arg: tp.Any = is_inexact_array
    jax_options: tuple[tuple[str, tp.Any], ...] = ()


class _Derivative(Filtered[..., tp.Any]):
    """Base of functions that differentiate another with respect to its first argument."""

    options: FilterGradOptions

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of the transform."""
        return self.options.name

    def divided(self, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]) -> tp.Any:
        """A call, and its leaves divided into those to differentiate and the rest."""
        if not args:
            raise TypeError(
                f"{self!r} differentiates its first argument, which must be given, and by position."
            )
        call = self.call(args, kwargs)
        before, after = [False] * call.num_bound, [False] * (len(args) - 1)
        names = dict.fromkeys({**self.bound.kwargs, **kwargs}, False)
        spec = ((*before, self.options.arg, *after), names)
        return call, chosen_first(answers(call, spec))


class FilterGrad(_Derivative):
    """A differentiated function, as `filter_grad` and `filter_value_and_grad` return it."""

    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        call, partition = self.divided(args, kwargs)
        shown = lambda grads: call.arguments(partition.join(grads))[0]
        return gradients(call, partition, self.options, shown, "choose them with arg=")


def _grad(fun: tp.Any, name: str, has_aux: bool, options: dict[str, tp.Any]) -> tp.Any:
    options = dict(options)
    arg = options.pop("arg", is_inexact_array)
    if "argnums" in options:
        raise ValueError(
            f"{name} takes no argnums=: it differentiates its first argument. To differentiate "
            "several things, pass them together in a tuple as the first argument."
        )
    chosen = FilterGradOptions(name, has_aux, arg, tuple(options.items()))
    return decorated(FilterGrad, fun, chosen)


@tp.overload
def filter_grad(
    fun: First[P, tp.Any], *, has_aux: tp.Literal[False] = False, **gradkwargs: tp.Any
) -> TreeGrad[P]: ...
@tp.overload
def filter_grad(
    fun: First[P, tuple[tp.Any, Aux]], *, has_aux: tp.Literal[True], **gradkwargs: tp.Any
) -> TreeGradAux[P, Aux]: ...
@tp.overload
def filter_grad(
    *, has_aux: bool = False, **gradkwargs: tp.Any
) -> tp.Callable[[First[P, tp.Any]], TreeGrad[P]]: ...
def filter_grad(fun: tp.Any = MISSING, *, has_aux: bool = False, **gradkwargs: tp.Any) -> tp.Any:
    """The gradient of a scalar function with respect to the leaves of its first argument.

    The gradient has the argument's own type and sharing, with None where nothing is differentiated:
    by default at every leaf but floating-point and complex arrays. What the function writes into
    objects stays there.

    Args:
        fun: the function; without it a decorator is returned.
        has_aux: the function returns `(value, aux)`; the result is then `(gradient, aux)`.
        gradkwargs: `arg=`, a spec of the leaves to differentiate; the rest as for `jax.grad`.

    Returns:
        A function of the same arguments, which returns the gradient, or `(gradient, aux)`.

    Raises:
        TypeError: without a first argument by position, or for a selected leaf without a derivative.
        ValueError: for a Variable shared between the first and another argument, or `argnums=`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_grad(lambda p: p["w"] ** 2)({"w": jnp.array(3.0), "name": "square"})
    {'name': None, 'w': Array(6., dtype=float32, weak_type=True)}
    """
    return _grad(fun, "filter_grad", has_aux, gradkwargs)


@tp.overload
def filter_value_and_grad(
    fun: First[P, R], *, has_aux: bool = False, **gradkwargs: tp.Any
) -> TreeValueAndGrad[P, R]: ...
@tp.overload
def filter_value_and_grad(
    *, has_aux: bool = False, **gradkwargs: tp.Any
) -> tp.Callable[[First[P, R]], TreeValueAndGrad[P, R]]: ...
def filter_value_and_grad(
    fun: tp.Any = MISSING, *, has_aux: bool = False, **gradkwargs: tp.Any
) -> tp.Any:
    """Like `filter_grad`, with the value: `(value, gradient)`, or `((value, aux), gradient)`.

    Args:
        fun: the function; without it a decorator is returned.
        has_aux: the function returns `(value, aux)`.
        gradkwargs: as for `filter_grad`.

    Returns:
        A function of the same arguments, which returns `(value, gradient)`, or `((value, aux),
        gradient)`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> value, (grad, _) = nnx.filter_value_and_grad(lambda p: p[0] ** p[1])((jnp.array(3.0), 2))
    >>> float(value), float(grad)
    (9.0, 6.0)
    """
    return _grad(fun, "filter_value_and_grad", has_aux, gradkwargs)


# Forward and backward products --------------------------------------------------------------------


def aligned(
    form: CallDef,
    leaves: tp.Sequence[tp.Any],
    given: tp.Any,
    partition: Partition,
    what: str,
    *,
    required: bool = False,
    error: type[Exception] = TypeError,
) -> list[tp.Any]:
    """For each chosen leaf its tangent, from another tree of the same form; None where it has none.

    Raises:
        ValueError: where the other tree has a leaf that is not chosen, lacks a required one, or where
            two leaves differ in shape.
        error: for a tangent of another dtype.
    """
    other = leaves_of(given, form.names)
    by_path = dict(zip(_paths(other.definition), other.leaves))
    tangents: list[tp.Any] = []
    for path, leaf, chosen in zip(_paths(form), leaves, partition.labels):
        value = by_path.pop(path, None)
        at = f"{what}: at '{path_text(path)}' is"
        if not chosen:
            if value is not None and getattr(value, "dtype", None) != jax.dtypes.float0:
                raise ValueError(
                    f"{at} a {short_type(value)}, but the {short_type(leaf)} there is not "
                    "differentiated: it must be None."
                )
            continue
        if value is None and required:
            raise ValueError(
                f"{at} nothing, where the {short_type(leaf)} needs an array of its shape."
            )
        tangents.append(None if value is None else _as_tangent(value, leaf, at, error))
    if by_path:  # the other tree may have lost its sharing
        known = {place.path for _, place in further_leaves(form)}
        unknown = next((path for path in by_path if path not in known), None)
        if unknown is not None:
            raise ValueError(
                f"{what}: at '{path_text(unknown)}' is a {short_type(by_path[unknown])}, where "
                "there is no leaf."
            )
    return tangents


def _paths(call: CallDef) -> list[Path]:
    return [leaf.path for leaf in call.leaves()]


def _as_tangent(value: tp.Any, leaf: tp.Any, at: str, error: type[Exception]) -> tp.Any:
    """A tangent as an array; a Python float is one of any floating-point dtype."""
    if not is_array_like(value) or np.shape(value) != np.shape(leaf):
        raise ValueError(
            f"{at} {short_type(value)}, where {short_type(leaf)} needs one of its shape."
        )
    array, dtype = jnp.asarray(value), jnp.result_type(leaf)
    if array.dtype == dtype:
        return array
    if type(value) is float and jnp.issubdtype(dtype, jnp.floating):
        return array.astype(dtype)
    raise error(
        f"{at} {short_type(array)}, where {short_type(leaf)} needs one of its own dtype. Convert it "
        f"with .astype({dtype.name!r})."
    )


class Result(tp.NamedTuple):
    """The form of a result that is differentiated; static data.

    Attributes:
        form: of the result.
        partition: its leaves, divided into those that are differentiated and the rest.
        leaves: shapes of the former, None for the rest.
    """

    form: CallDef
    partition: Partition
    leaves: tuple[tp.Any, ...]

    def build(self, leaves: tp.Sequence[tp.Any]) -> tp.Any:
        """A tree of this form, with None where it is not differentiated."""
        return self.form.build(self.partition.join(leaves))


def _parts(wanted: tp.Callable[[tp.Any], bool]) -> tp.Callable[[tp.Any], tp.Any]:
    """Divides a value into the leaves that are differentiated, and the rest."""

    def parts(value: tp.Any) -> tp.Any:
        tree = leaves_of(value)
        partition = chosen_first(map(wanted, tree.leaves))
        leaves = [jnp.asarray(x) for x in partition.split(tree.leaves)[0]]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        return leaves, Result(tree.definition, partition, tuple(partition.join(shapes))), value

    return parts


class Pullback:
    """From a cotangent of the result to cotangents of the arguments, in their own forms."""

    def __init__(self, call: Call, partition: Partition, result: Result) -> None:
        self._form, self._num_bound, self._partition = call.definition, call.num_bound, partition
        self._result = result

    def __call__(self, vjp: tp.Callable[..., tp.Any], cotangent: tp.Any) -> tuple[tp.Any, ...]:
        result, what = self._result, "filter_vjp: the cotangent"
        given = aligned(
            result.form,
            result.leaves,
            cotangent,
            result.partition,
            what,
            required=True,
            error=ValueError,
        )
        (cotangents,) = vjp(given)
        args, _ = self._form.build(self._partition.join(cotangents))
        return args[self._num_bound :]


def filter_jvp(
    fn: tp.Callable[..., T],
    primals: tp.Sequence[tp.Any],
    tangents: tp.Sequence[tp.Any],
    **kwargs: tp.Any,
) -> tuple[T, T]:
    """The value of a function and its derivative in one direction, for arguments of any type.

    Args:
        fn: a function of `primals` and `kwargs`; its result may be anything.
        primals: the arguments.
        tangents: the direction, in the form of `primals`; None for a constant leaf, and for every leaf
            without a derivative.
        kwargs: further arguments, which are constants.

    Returns:
        `(fn(*primals), tangents_out)`; the latter in the form of the result, with None at leaves that do
        not depend on a leaf with a tangent.

    Raises:
        ValueError: for tangents of another form, naming the path.
        TypeError: for a tangent of another dtype.

    >>> import nnxlite as nnx
    >>> value, tangent = nnx.filter_jvp(lambda x, n: (x**n, "power"), (3.0, 2), (1.0, None))
    >>> float(value[0]), float(tangent[0]), tangent[1]
    (9.0, 6.0, None)
    """
    if len(primals) != len(tangents):
        raise ValueError(
            f"filter_jvp: {len(primals)} primals and {len(tangents)} tangents; give one tangent, "
            "possibly None, for each primal."
        )
    call = Call.of(fn, primals, kwargs)
    possible = chosen_first(map(is_inexact_array_like, call.leaves))
    shown = ((*[None] * call.num_bound, *tangents), {})
    given = aligned(call.definition, call.leaves, shown, possible, "filter_jvp: tangents")
    partition = chosen_first(t is not None for t in possible.join(given))
    depends = lambda x: is_inexact_array(x) and in_this_trace(x)
    run, chosen = of_chosen(call, partition, False, _parts(depends))
    primals_in = [*map(jnp.asarray, chosen)]
    tangents_in = [t for t in given if t is not None]
    _, out, (form, crossed) = jax.jvp(run, (primals_in,), (tangents_in,), has_aux=True)
    return call.put_back(crossed), form.value.build(out)


@tp.overload
def filter_vjp(
    fun: tp.Callable[[*Primals], T], *primals: *Primals, has_aux: tp.Literal[False] = False
) -> tuple[T, tp.Callable[[tp.Any], tuple[*Primals]]]: ...
@tp.overload
def filter_vjp(
    fun: tp.Callable[[*Primals], tuple[T, Aux]], *primals: *Primals, has_aux: tp.Literal[True]
) -> tuple[T, tp.Callable[[tp.Any], tuple[*Primals]], Aux]: ...
def filter_vjp(fun: tp.Callable[..., tp.Any], *primals: tp.Any, has_aux: bool = False) -> tp.Any:
    """The value of a function, and the function from cotangents of it to those of the arguments.

    Args:
        fun: a function of `primals`; it may return anything.
        primals: the arguments, whose floating-point and complex arrays are differentiated.
        has_aux: `fun` returns `(value, aux)`, of which only the value is differentiated.

    Returns:
        `(value, vjp_fun)`, or `(value, vjp_fun, aux)`. `vjp_fun` takes a cotangent in the form of the
        value, with None at leaves that are not floating-point or complex arrays, and gives a tuple of
        one for each primal. `vjp_fun` is a pytree.

    Raises:
        ValueError: (by `vjp_fun`) for a cotangent of another form or dtype, naming the path.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> value, vjp_fun = nnx.filter_vjp(lambda x, n: (x**n, "power"), jnp.array(3.0), 2)
    >>> vjp_fun((jnp.array(1.0), None))
    (Array(6., dtype=float32, weak_type=True), None)
    """
    call = Call.of(fun, primals, {})
    owners = zip(call.leaves, call.owners())
    partition = chosen_first(isinstance(i, int) and is_inexact_array(x) for x, i in owners)
    run, chosen = of_chosen(call, partition, has_aux, _parts(is_inexact_array))
    _, vjp, (form, crossed) = jax.vjp(run, chosen, has_aux=True)
    result = call.put_back(crossed)
    vjp_fun = jax.tree_util.Partial(Pullback(call, partition, form.value), vjp)
    if has_aux:
        return result[0], vjp_fun, result[1]
    return result, vjp_fun


# Jacobians ----------------------------------------------------------------------------------------


class FilterJacobian(_Derivative):
    """A function that computes a Jacobian, as `filter_jacfwd` and `filter_jacrev` return it."""

    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        call, partition = self.divided(args, kwargs)
        options = self.options
        run, chosen = of_chosen(call, partition, options.has_aux, _parts(is_inexact_array_like))
        transform = getattr(jax, options.name.removeprefix("filter_"))
        jacobian, (form, crossed) = transform(run, has_aux=True)(chosen)
        rows = [call.arguments(partition.join(row))[0] for row in jacobian]
        result = call.put_back(crossed)
        tree = form.value.build(rows)
        return (tree, result[1]) if options.has_aux else tree


@tp.overload
def filter_jacfwd(
    fun: tp.Callable[P, tp.Any], has_aux: tp.Literal[False] = False
) -> Filtered[P, tp.Any]: ...
@tp.overload
def filter_jacfwd(
    fun: tp.Callable[P, tuple[tp.Any, Aux]], has_aux: tp.Literal[True]
) -> Filtered[P, tuple[tp.Any, Aux]]: ...
def filter_jacfwd(fun: tp.Any, has_aux: bool = False) -> tp.Any:
    """The Jacobian with respect to the first argument, by forward differentiation.

    Args:
        fun: a function of any pytrees that returns any pytree.
        has_aux: it returns `(value, aux)`; the result is then `(jacobian, aux)`.

    Returns:
        A function that gives, in the form of the value, at each floating-point leaf a tree in the form
        of the first argument, and None elsewhere.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_jacfwd(lambda p: p[0] * p[1])((jnp.ones(2), 3))[0].tolist()
    [[3.0, 0.0], [0.0, 3.0]]
    """
    return FilterJacobian(fun, FilterGradOptions("filter_jacfwd", has_aux))


@tp.overload
def filter_jacrev(
    fun: tp.Callable[P, tp.Any], has_aux: tp.Literal[False] = False
) -> Filtered[P, tp.Any]: ...
@tp.overload
def filter_jacrev(
    fun: tp.Callable[P, tuple[tp.Any, Aux]], has_aux: tp.Literal[True]
) -> Filtered[P, tuple[tp.Any, Aux]]: ...
def filter_jacrev(fun: tp.Any, has_aux: bool = False) -> tp.Any:
    """The Jacobian with respect to the first argument, by backward differentiation.

    As `filter_jacfwd` otherwise.

    Args:
        fun: a function of any pytrees that returns any pytree.
        has_aux: the function returns `(value, aux)`; the result is then `(jacobian, aux)`.

    Returns:
        A function that gives, in the form of the value, at each floating-point leaf a tree in the form
        of the first argument, and None elsewhere.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_jacrev(lambda p: p[0] * p[1])((jnp.ones(2), 3))[0].tolist()
    [[3.0, 0.0], [0.0, 3.0]]
    """
    return FilterJacobian(fun, FilterGradOptions("filter_jacrev", has_aux))


@tp.overload
def filter_hessian(
    fun: tp.Callable[P, tp.Any], has_aux: tp.Literal[False] = False
) -> Filtered[P, tp.Any]: ...
@tp.overload
def filter_hessian(
    fun: tp.Callable[P, tuple[tp.Any, Aux]], has_aux: tp.Literal[True]
) -> Filtered[P, tuple[tp.Any, Aux]]: ...
def filter_hessian(fun: tp.Any, has_aux: bool = False) -> tp.Any:
    """The Hessian with respect to the first argument.

    Args:
        fun: a function of any pytrees that returns any pytree, such as a scalar.
        has_aux: the function returns `(value, aux)`; the result is then `(hessian, aux)`.

    Returns:
        A function that gives, at each floating-point leaf of the value, a tree in the form of the first
        argument with another such tree at each of its leaves.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_hessian(lambda x: (x**2).sum())(jnp.ones(2)).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    return filter_jacfwd(filter_jacrev(fun, has_aux), has_aux)
