"""Derivatives with respect to some leaves of the arguments.

Each function of objects becomes a function of the differentiated leaves alone; derivatives are returned
in trees of the arguments' own types, with None at all other leaves.
"""

from __future__ import annotations

import typing as tp

import jax
from jax import Array

from nnxlite._base.jax import in_this_trace
from nnxlite._base.typing import Numbers, P, R
from nnxlite.boundary._call_def import Partition
from nnxlite.filtered._specs import (
    answers,
    call_of,
    chosen_first,
    filtered,
    is_inexact_array,
    is_inexact_array_like,
)
from nnxlite.transforms._call import Call
from nnxlite.transforms._derivatives import (
    Tangents,
    gradients,
    of_arguments,
    of_chosen,
    pulled_back,
    pushed_forward,
)
from nnxlite.transforms._wrapper import Transform, decorated
from nnxlite.variables._definition import MISSING

A = tp.TypeVar("A")
T = tp.TypeVar("T")


class TreeGrad(Transform[..., tp.Any], tp.Generic[P]):
    """What `filter_grad(f)` returns."""

    @tp.overload
    def __call__(self, arg: Numbers, /, *args: P.args, **kwargs: P.kwargs) -> Array: ...
    @tp.overload
    def __call__(self, arg: T, /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Differentiate."""


class TreeGradAux(Transform[..., tp.Any], tp.Generic[P, A]):
    """What `filter_grad(f, has_aux=True)` returns."""

    @tp.overload
    def __call__(self, arg: Numbers, /, *args: P.args, **kwargs: P.kwargs) -> tuple[Array, A]: ...
    @tp.overload
    def __call__(self, arg: T, /, *args: P.args, **kwargs: P.kwargs) -> tuple[T, A]: ...
    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Differentiate."""


class TreeValueAndGrad(Transform[..., tp.Any], tp.Generic[P, R]):
    """What `filter_value_and_grad(f)` returns; the value is that of `f`, also where it has an aux."""

    @tp.overload
    def __call__(self, arg: Numbers, /, *args: P.args, **kwargs: P.kwargs) -> tuple[R, Array]: ...
    @tp.overload
    def __call__(self, arg: T, /, *args: P.args, **kwargs: P.kwargs) -> tuple[R, T]: ...
    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Differentiate."""


Aux = tp.TypeVar("Aux")
Primals = tp.TypeVarTuple("Primals")
First: tp.TypeAlias = tp.Callable[tp.Concatenate[tp.Any, P], R]
"""A function whose first argument is differentiated."""


def _divided(
    differentiated: Transform[..., tp.Any], args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]
) -> tuple[Call, Partition]:
    """A call, and its leaves divided into those of the first argument to differentiate and the rest."""
    if not args:
        raise TypeError(
            f"{differentiated!r} differentiates its first argument, which must be given, and by "
            "position."
        )
    call = Call(differentiated.options, differentiated.bound, args, kwargs)
    before, after = [False] * call.num_bound, [False] * (len(args) - 1)
    names = dict.fromkeys({**differentiated.bound.kwargs, **kwargs}, False)
    spec = ((*before, differentiated.options.arg, *after), names)
    return call, chosen_first(answers(call.inputs, spec))


def _run_grad(
    differentiated: Transform[..., tp.Any], args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]
) -> tp.Any:
    call, partition = _divided(differentiated, args, kwargs)
    shown = lambda grads: call.arguments(partition.join(grads))[0]
    return gradients(call, partition, differentiated.options, shown, "choose them with arg=")


def _grad(fun: tp.Any, name: str, has_aux: bool, options: dict[str, tp.Any]) -> tp.Any:
    if "argnums" in options:
        raise ValueError(
            f"{name} takes no argnums=: it differentiates its first argument. To differentiate "
            "several things, pass them together in a tuple as the first argument."
        )
    jax_options = tuple((key, value) for key, value in options.items() if key != "arg")
    arg = options.get("arg", is_inexact_array)
    given = {"has_aux": has_aux, "arg": arg, "jax_options": jax_options}
    return decorated(Transform, fun, filtered(name, _run_grad, **given))


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
    call = call_of("filter_jvp", fn, primals, kwargs)
    possible = [is_inexact_array_like(x) for x in call.leaves]
    form = Tangents("filter_jvp: the tangent", ValueError, wanted=possible)
    given = of_arguments(form, call, tangents)
    depends = lambda x: is_inexact_array(x) and in_this_trace(x)
    return pushed_forward(call, given, False, depends, zeros=False)


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
    call = call_of("filter_vjp", fun, primals, {})
    owners = zip(call.leaves, call.owners())
    selected = chosen_first(isinstance(i, int) and is_inexact_array(x) for x, i in owners)
    form = Tangents("filter_vjp: the cotangent", ValueError, ValueError, needed="all")
    return pulled_back(call, selected, has_aux, is_inexact_array, form)


# Jacobians ----------------------------------------------------------------------------------------


def _run_jacobian(
    differentiated: Transform[..., tp.Any], args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]
) -> tp.Any:
    call, partition = _divided(differentiated, args, kwargs)
    has_aux = differentiated.options.has_aux
    run, chosen = of_chosen(call, partition, has_aux, is_inexact_array_like)
    transform = getattr(jax, differentiated.name.removeprefix("filter_"))
    jacobian, (fixed, crossing) = transform(run, has_aux=True)(chosen)
    rows = [call.arguments(partition.join(row))[0] for row in jacobian]
    result = call.put_back(crossing)
    tree = fixed.value.build(rows)
    return (tree, result[1]) if has_aux else tree


def _jacobian(fun: tp.Any, name: str, has_aux: bool) -> tp.Any:
    given = {"has_aux": has_aux, "arg": is_inexact_array}
    return Transform(fun, filtered(name, _run_jacobian, **given))


def filter_jacfwd(fun: tp.Callable[P, tp.Any], has_aux: bool = False) -> Transform[P, tp.Any]:
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
    return _jacobian(fun, "filter_jacfwd", has_aux)


def filter_jacrev(fun: tp.Callable[P, tp.Any], has_aux: bool = False) -> Transform[P, tp.Any]:
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
    return _jacobian(fun, "filter_jacrev", has_aux)


def filter_hessian(fun: tp.Callable[P, tp.Any], has_aux: bool = False) -> Transform[P, tp.Any]:
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
