"""Derivatives with respect to some leaves of the arguments.

Each function of objects becomes a function of the differentiated leaves alone; derivatives come back
in trees of the arguments' own types, with None at every other leaf.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp

from nnxlite._errors import path_text, short_type
from nnxlite._jax import in_this_trace
from nnxlite.boundary import leave
from nnxlite.filtered._apart import Apart
from nnxlite.filtered._crossing import Call, Choice, Crossed, take_out
from nnxlite.filtered._predicates import (
    is_array,
    is_array_like,
    is_inexact_array,
    is_inexact_array_like,
)
from nnxlite.filtered._specs import MASK, settle
from nnxlite.graph import Path
from nnxlite.transforms import Wrapper, decorated, name_of
from nnxlite.variables import MISSING, Variable

T = tp.TypeVar("T")


def choose(call: Call, spec: tp.Any, position: int) -> Choice:
    """The leaves of one argument that a spec selects, of those that have a derivative."""
    args, kwargs = _argument_counts(call)
    specs = tuple(spec if i == position else False for i in range(args))
    mask = settle(call.apart, (specs, dict.fromkeys(kwargs, False)), MASK)
    return Choice([bool(m) for m in mask])


def _argument_counts(call: Call) -> tuple[int, list[str]]:
    treedef = call.apart.call.treedef
    args, kwargs = jax.tree_util.tree_unflatten(treedef, [0] * treedef.num_leaves)
    return len(args), list(kwargs)


class GradOptions(tp.NamedTuple):
    """The options of `filter_grad` and its kin, as they travel together."""

    name: str
    has_aux: bool
    arg: tp.Any = is_inexact_array
    jax_options: tuple[tuple[str, tp.Any], ...] = ()


class _Derivative(Wrapper):
    """Base of functions that differentiate another with respect to its first argument."""

    options: GradOptions

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of the transform."""
        return self.options.name

    def _enter(self, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]) -> Call:
        if not args:
            raise TypeError(
                f"{self!r} differentiates its first argument, which must be given, and by position."
            )
        return Call(self.__wrapped__, args, kwargs)


class FilterGrad(_Derivative):
    """A differentiated function, as `filter_grad` and `filter_value_and_grad` return it."""

    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        call, options = self._enter(args, kwargs), self.options
        leaves = call.apart.leaves
        jax_options = dict(options.jax_options)
        choice = choose(call, options.arg, call.num_bound)
        for path, leaf, chosen in zip(_paths(call, choice), leaves, choice.mask):
            if chosen and not (is_inexact_array_like(leaf) or jax_options.get("allow_int")):
                raise TypeError(
                    f"{self!r}: the leaf at '{path_text(path)}' is to be differentiated, and "
                    f"{short_type(leaf)} {leaf if not is_array(leaf) else ''} has no derivative. "
                    "Select floating-point leaves only."
                )

        def run(chosen: list[tp.Any]) -> tuple[tp.Any, Crossed]:
            inner, result = call.run(choice.into(leaves, chosen))
            aux = None
            if options.has_aux:
                if not (isinstance(result, tuple) and len(result) == 2):
                    raise TypeError(
                        f"With has_aux=True {name_of(self.__wrapped__)} must return a pair (value, "
                        f"aux), got {type(result).__name__}."
                    )
                result, aux = result
            if isinstance(result, Variable):
                result = result.get_value()
            return result, take_out(leave(inner, aux))

        transform = jax.value_and_grad(run, has_aux=True, **jax_options)
        (value, crossed), grads = transform(choice.chosen(leaves))
        aux = call.put_back(crossed)
        found = call.arguments(choice.alone(grads))[0]
        if options.name == "filter_grad":
            return (found, aux) if options.has_aux else found
        return ((value, aux), found) if options.has_aux else (value, found)


def _paths(call: Call, choice: Choice) -> tp.Iterable[tp.Any]:
    """Paths for messages, only worked out where a message may be needed."""
    needed = any(m and not is_inexact_array(x) for x, m in zip(call.apart.leaves, choice.mask))
    if not needed:
        return [()] * len(call.apart.leaves)
    return [path[1:] for path in call.apart.paths]


def _grad(fun: tp.Any, name: str, has_aux: bool, options: dict[str, tp.Any]) -> tp.Any:
    options = dict(options)
    arg = options.pop("arg", is_inexact_array)
    if "argnums" in options:
        raise ValueError(
            f"{name} takes no argnums=: it differentiates its first argument. To differentiate "
            "several things, pass them together in a tuple as the first argument."
        )
    chosen = GradOptions(name, has_aux, arg, tuple(options.items()))
    return decorated(FilterGrad, fun, chosen)


def filter_grad(fun: tp.Any = MISSING, *, has_aux: bool = False, **gradkwargs: tp.Any) -> tp.Any:
    """The gradient of a scalar function with respect to the leaves of its first argument.

    The gradient has the argument's own type and sharing, with None where nothing is differentiated:
    by default at every leaf but floating-point and complex arrays. What the function writes into
    objects is kept.

    Args:
        fun: the function; without it a decorator is returned.
        has_aux: the function returns `(value, aux)`; the result is then `(gradient, aux)`.
        gradkwargs: `arg=`, a spec of the leaves to differentiate; the rest as for `jax.grad`.

    Raises:
        TypeError: without a first argument by position, or for a selected leaf without a derivative.
        ValueError: for a Variable shared between the first and another argument, or `argnums=`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_grad(lambda p: p["w"] ** 2)({"w": jnp.array(3.0), "name": "square"})
    {'name': None, 'w': Array(6., dtype=float32, weak_type=True)}
    """
    return _grad(fun, "filter_grad", has_aux, gradkwargs)


def filter_value_and_grad(
    fun: tp.Any = MISSING, *, has_aux: bool = False, **gradkwargs: tp.Any
) -> tp.Any:
    """Like `filter_grad`, with the value: `(value, gradient)`, or `((value, aux), gradient)`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> value, (grad, _) = nnx.filter_value_and_grad(lambda p: p[0] ** p[1])((jnp.array(3.0), 2))
    >>> float(value), float(grad)
    (9.0, 6.0)
    """
    return _grad(fun, "filter_value_and_grad", has_aux, gradkwargs)


# Forward and backward products --------------------------------------------------------------------


def aligned(
    apart: Apart,
    given: tp.Any,
    choice: Choice,
    what: str,
    *,
    required: bool = False,
    error: type[Exception] = TypeError,
) -> list[tp.Any]:
    """For each chosen leaf the tangent of another tree of the same form, None where it has none.

    Raises:
        ValueError: where the other tree has a leaf that is not chosen, lacks one that is required, or
            where two leaves differ in shape.
        error: for a tangent of another dtype.
    """
    other = Apart(given)
    by_path = dict(zip(other.paths, other.leaves))
    found: list[tp.Any] = []
    for path, leaf, chosen in zip(apart.paths, apart.leaves, choice.mask):
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
        found.append(None if value is None else _as_tangent(value, leaf, at, error))
    known = apart.other_paths() if by_path else ()  # another tree may have lost its sharing
    for path, value in by_path.items():
        if path in known:
            continue
        raise ValueError(
            f"{what}: at '{path_text(path)}' is a {short_type(value)}, where there is no leaf."
        )
    return found


def _as_tangent(value: tp.Any, leaf: tp.Any, at: str, error: type[Exception]) -> tp.Any:
    """A tangent as an array; a Python float is one of any floating-point dtype."""
    if not is_array_like(value) or jnp.shape(value) != jnp.shape(leaf):
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


class Derived:
    """The result of a function as leaves, while it is being differentiated.

    Args:
        call, choice: the call, and the leaves of its arguments that are differentiated.
        wanted: which leaves of the result are.
        has_aux: whether it is the first part of the result that is meant.
    """

    def __init__(
        self,
        call: Call,
        choice: Choice,
        wanted: tp.Callable[[tp.Any], bool],
        has_aux: bool = False,
    ) -> None:
        self.call, self.choice, self.wanted, self.has_aux = call, choice, wanted, has_aux
        self.result: Apart | None = None
        self.out = Choice(())

    def run(self, chosen: list[tp.Any]) -> tuple[list[tp.Any], Crossed]:
        """From differentiated leaves of the arguments to those of the result."""
        inner, result = self.call.run(self.choice.into(self.call.apart.leaves, chosen))
        differentiated = result[0] if self.has_aux else result
        apart = Apart(differentiated)
        self.out = Choice([self.wanted(x) for x in apart.leaves])
        leaves = [jnp.asarray(x) for x in self.out.chosen(apart.leaves)]
        abstract = [
            jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) if m else None
            for x, m in zip(apart.leaves, self.out.mask)
        ]
        self.result = apart.without_values(abstract)  # nothing of the trace may stay
        return leaves, take_out(leave(inner, result))

    def output(self, leaves: tp.Iterable[tp.Any]) -> tp.Any:
        """A tree of the result's form, with None where it is not differentiated."""
        assert self.result is not None
        return self.result.build(self.out.alone(leaves))

    def kept(self) -> Pullback:
        """What is needed of it outside."""
        assert self.result is not None
        return Pullback(self.call, self.choice, self.result, self.out)


class Pullback:
    """From a cotangent of the result to cotangents of the arguments, in their own forms."""

    def __init__(self, call: Call, choice: Choice, result: Apart, out: Choice) -> None:
        self.call, self.choice, self.result, self.out = call, choice, result, out

    def __call__(self, vjp: tp.Callable[..., tp.Any], cotangent: tp.Any) -> tuple[tp.Any, ...]:
        what = "filter_vjp: the cotangent"
        given = aligned(self.result, cotangent, self.out, what, required=True, error=ValueError)
        (found,) = vjp(given)
        return self.call.arguments(self.choice.alone(found))


def inexact_leaves(call: Call, wanted: tp.Callable[[Path], bool]) -> Choice:
    """The floating-point and complex arrays of some arguments, chosen by their paths."""
    visible = [wanted(path) for path in call.apart.position_paths]
    return Choice(
        [
            visible[place.position] and is_inexact_array(leaf)
            for place, leaf in zip(call.apart.places, call.apart.leaves)
        ]
    )


def filter_jvp(
    fn: tp.Callable[..., T],
    primals: tp.Sequence[tp.Any],
    tangents: tp.Sequence[tp.Any],
    **kwargs: tp.Any,
) -> tuple[T, tp.Any]:
    """The value of a function and its derivative in one direction, for arguments of any type.

    Args:
        fn: a function of `primals` and `kwargs`; its result may be anything.
        primals: the arguments.
        tangents: the direction, in the form of `primals`; None for a leaf that is a constant, as every
            one is that has no derivative.

    Returns:
        `(fn(*primals), tangents_out)`; the latter in the form of the result, with None at leaves
        that do not depend on what has a tangent.

    Raises:
        ValueError: for tangents of another form, naming the place.
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
    call = Call(fn, tuple(primals), kwargs)
    apart, bound = call.apart, call.num_bound
    possible = Choice([is_inexact_array_like(x) for x in apart.leaves])
    shown = ((*[None] * bound, *tangents), {})
    given = possible.alone(aligned(apart, shown, possible, "filter_jvp: tangents"))
    choice = Choice([t is not None for t in given])
    leaves = [jnp.asarray(x) for x in choice.chosen(apart.leaves)]
    derived = Derived(call, choice, lambda x: is_inexact_array(x) and in_this_trace(x))
    run = lambda x: derived.run(x)
    _, out, crossed = jax.jvp(run, (leaves,), (choice.chosen(given),), has_aux=True)
    return call.put_back(crossed), derived.output(out)


def filter_vjp(fun: tp.Callable[..., tp.Any], *primals: tp.Any, has_aux: bool = False) -> tp.Any:
    """The value of a function, and the function from cotangents of it to those of the arguments.

    Args:
        fun: a function of `primals`; it may return anything.
        primals: the arguments; differentiated are their floating-point and complex arrays.
        has_aux: `fun` returns `(value, aux)`, of which only the value is differentiated.

    Returns:
        `(value, vjp_fun)`, or `(value, vjp_fun, aux)`. `vjp_fun` takes a cotangent in the form of the
        value, with None at leaves that are no floating-point or complex arrays, and gives a tuple of
        one for each primal. `vjp_fun` is a pytree.

    Raises:
        ValueError: (by `vjp_fun`) for a cotangent of another form or dtype, naming the place.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> value, vjp_fun = nnx.filter_vjp(lambda x, n: (x**n, "power"), jnp.array(3.0), 2)
    >>> vjp_fun((jnp.array(1.0), None))
    (Array(6., dtype=float32, weak_type=True), None)
    """
    call = Call(fun, primals, {})
    choice = inexact_leaves(call, lambda path: path[0] == 0 and path[1] >= call.num_bound)
    derived = Derived(call, choice, is_inexact_array, has_aux)
    leaves = choice.chosen(call.apart.leaves)
    _, vjp, crossed = jax.vjp(lambda x: derived.run(x), leaves, has_aux=True)
    result = call.put_back(crossed)
    vjp_fun = jax.tree_util.Partial(derived.kept(), vjp)
    if has_aux:
        return result[0], vjp_fun, result[1]
    return result, vjp_fun


# Jacobians ----------------------------------------------------------------------------------------


class FilterJacobian(_Derivative):
    """A function that computes a Jacobian, as `filter_jacfwd` and `filter_jacrev` return it."""

    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        call, options = self._enter(args, kwargs), self.options
        choice = choose(call, options.arg, call.num_bound)
        derived = Derived(call, choice, is_inexact_array_like, options.has_aux)
        transform = getattr(jax, options.name.removeprefix("filter_"))
        jacobian, crossed = transform(lambda x: derived.run(x), has_aux=True)(
            choice.chosen(call.apart.leaves)
        )
        rows = [call.arguments(choice.alone(row))[0] for row in jacobian]
        found = derived.output(rows)
        result = call.put_back(crossed)
        return (found, result[1]) if options.has_aux else found


def filter_jacfwd(fun: tp.Any, has_aux: bool = False) -> tp.Any:
    """The Jacobian with respect to the first argument, by forward differentiation.

    Args:
        fun: a function of anything that returns anything.
        has_aux: it returns `(value, aux)`; the result is then `(jacobian, aux)`.

    Returns:
        A function that gives, in the form of the value, at each floating-point leaf a tree in the form
        of the first argument, and None elsewhere.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_jacfwd(lambda p: p[0] * p[1])((jnp.ones(2), 3))[0].tolist()
    [[3.0, 0.0], [0.0, 3.0]]
    """
    return FilterJacobian(fun, GradOptions("filter_jacfwd", has_aux))


def filter_jacrev(fun: tp.Any, has_aux: bool = False) -> tp.Any:
    """The Jacobian with respect to the first argument, by backward differentiation.

    As `filter_jacfwd` otherwise.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_jacrev(lambda p: p[0] * p[1])((jnp.ones(2), 3))[0].tolist()
    [[3.0, 0.0], [0.0, 3.0]]
    """
    return FilterJacobian(fun, GradOptions("filter_jacrev", has_aux))


def filter_hessian(fun: tp.Any, has_aux: bool = False) -> tp.Any:
    """The Hessian with respect to the first argument.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter_hessian(lambda x: (x**2).sum())(jnp.ones(2)).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    return filter_jacfwd(filter_jacrev(fun, has_aux), has_aux)
