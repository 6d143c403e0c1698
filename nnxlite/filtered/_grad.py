"""Derivatives with respect to some leaves of the arguments, and rules for them.

Each function of objects becomes a function of the differentiated leaves alone; derivatives are returned
in trees of the arguments' own types, with None at all other leaves.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from nnxlite._base.jax import F, Numbers, P, R, in_this_trace, is_sharding
from nnxlite.boundary._call_def import Partition, parameter_names
from nnxlite.boundary._out import Fixed
from nnxlite.filtered._specs import (
    answers,
    call_of,
    filtered,
    is_array,
    is_inexact_array,
    is_inexact_array_like,
    leaves_of,
    tree_out,
)
from nnxlite.transforms._call import Call
from nnxlite.transforms._derivatives import Derivation, Tangents, of_arguments, zero_tangent
from nnxlite.transforms._wrapper import Transform, Unequal, decorated
from nnxlite.variables._definition import MISSING

__all__ = ["filter_custom_jvp", "filter_custom_vjp", "filter_grad", "filter_hessian"]
__all__ += ["filter_jacfwd", "filter_jacrev", "filter_jvp", "filter_value_and_grad", "filter_vjp"]

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


Primals = tp.TypeVarTuple("Primals")
First: tp.TypeAlias = tp.Callable[tp.Concatenate[tp.Any, P], R]
"""A function whose first argument is differentiated."""


def _divided(t: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tuple[Call, Partition]:
    """A call, and its leaves divided into those of the first argument to differentiate and the rest."""
    if not args:
        raise TypeError(
            f"{t!r} differentiates its first argument, which must be given, and by position."
        )
    call = Call(t.options, t.bound, args, kwargs)
    before, after = [False] * call.num_bound, [False] * (len(args) - 1)
    names = dict.fromkeys({**t.bound.kwargs, **kwargs}, False)
    spec = ((*before, t.options.arg, *after), names)
    return call, Partition.chosen(answers(call.inputs, spec))


def _run_grad(t: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    call, partition = _divided(t, args, kwargs)
    derivation = Derivation(call, partition, t.options.has_aux, wanted=None)
    shown = lambda grads: call.arguments(partition.join(grads))[0]
    return derivation.gradients(shown, "choose them with arg=")


def _grad(fun: tp.Any, name: str, has_aux: bool, options: dict[str, tp.Any]) -> tp.Any:
    if "argnums" in options:
        raise ValueError(
            f"{name} takes no argnums=: it differentiates its first argument. To differentiate "
            "several things, pass them together in a tuple as the first argument."
        )
    arg = options.pop("arg", is_inexact_array)
    given = {"has_aux": has_aux, "arg": arg, "jax_options": tuple(options.items())}
    return decorated(Transform, fun, filtered(name, _run_grad, **given))


@tp.overload
def filter_grad(
    fun: First[P, tp.Any], *, has_aux: tp.Literal[False] = False, **gradkwargs: tp.Any
) -> TreeGrad[P]: ...
@tp.overload
def filter_grad(
    fun: First[P, tuple[tp.Any, A]], *, has_aux: tp.Literal[True], **gradkwargs: tp.Any
) -> TreeGradAux[P, A]: ...
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
    selected = Partition.chosen(t is not None for t in given)
    return Derivation(call, selected, False, depends).pushed_forward(given)


@tp.overload
def filter_vjp(
    fun: tp.Callable[[*Primals], T], *primals: *Primals, has_aux: tp.Literal[False] = False
) -> tuple[T, tp.Callable[[tp.Any], tuple[*Primals]]]: ...
@tp.overload
def filter_vjp(
    fun: tp.Callable[[*Primals], tuple[T, A]], *primals: *Primals, has_aux: tp.Literal[True]
) -> tuple[T, tp.Callable[[tp.Any], tuple[*Primals]], A]: ...
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
    selected = Partition.chosen(isinstance(i, int) and is_inexact_array(x) for x, i in owners)
    form = Tangents("filter_vjp: the cotangent", ValueError, ValueError, needed="all")
    return Derivation(call, selected, has_aux, is_inexact_array).pulled_back(form)


# Jacobians ----------------------------------------------------------------------------------------


def _run_jacobian(t: Transform[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    call, partition = _divided(t, args, kwargs)
    derivation = Derivation(call, partition, t.options.has_aux, is_inexact_array_like)
    transform = getattr(jax, t.name.removeprefix("filter_"))
    jacobian, (fixed, crossing) = transform(derivation.run, has_aux=True)(derivation.chosen)
    (definition, of_value, _), (_, *aux) = fixed.value, derivation.finish(crossing)
    rows = [call.arguments(partition.join(row))[0] for row in jacobian]
    tree = definition.build(of_value.join(rows))
    return (tree, *aux) if aux else tree


def _jacobian(fun: tp.Any, name: str, has_aux: bool) -> tp.Any:
    return Transform(fun, filtered(name, _run_jacobian, has_aux=has_aux, arg=is_inexact_array))


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


# Rules --------------------------------------------------------------------------------------------


def _arrays(values: tp.Iterable[tp.Any]) -> list[tp.Any]:
    """Values as arrays: JAX may pass a rule the Python number that a tracer was made of."""
    return [x if is_array(x) else jnp.asarray(x) for x in values]


def _nonzero(tangents: tp.Iterable[tp.Any]) -> list[tp.Any]:
    """Tangents, None where one is known to be zero: JAX passed none, or the leaf has no derivative."""
    float0 = jax.dtypes.float0
    zero = lambda x: isinstance(x, SymbolicZero) or getattr(x, "dtype", None) == float0
    return [None if zero(x) else jnp.asarray(x) for x in tangents]


class _Rule(Unequal, Transform[P, R]):
    """Base of functions with a derivative rule.

    Each is equal only to itself, since its rule is set after it is made.

    Attributes:
        needed: how to set its rules, in messages.
        covers: whether they differentiate an argument; see `Call.owners`.
        differentiated: what they differentiate, in messages.
        refusal: the class of the error if something else is differentiated.
        rules: the user's functions, None for one that was not given.
    """

    needed = differentiated = ""
    covers: tp.ClassVar[tp.Any]
    refusal: tp.ClassVar[type[Exception]]
    rules: tuple[tp.Any, ...]

    def refuse_perturbed(self, call: Call, perturbed: tp.Iterable[bool]) -> None:
        """Raise an error for a derivative that the rules would drop."""
        for owner, differentiated in zip(call.owners(), perturbed):
            if differentiated and not self.covers(owner):
                names = parameter_names(call.fun)[call.num_bound :]
                if isinstance(owner, int) and owner < len(names):
                    owner = names[owner]
                where = "something it carries" if owner is None else f"the argument {owner!r}"
                raise self.refusal(
                    f"{self!r}: its result is to be differentiated with respect to {where}, and its "
                    f"rule only covers {self.differentiated}. Pass it there, perhaps in a tuple, or "
                    "use jax.lax.stop_gradient."
                )


def _run_rule(rule: tp.Any, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]) -> tp.Any:
    """Call a function that has rules.

    Raises AttributeError where there is none yet.
    """
    call = Call(rule.options, rule.bound, args, kwargs)
    partition = Partition.chosen(map(is_array, call.leaves))
    arrays, rest = partition.split(call.leaves)

    def run(given: list[tp.Any]) -> tp.Any:
        inner, result = call.run(partition.join(given, rest))
        call.refuse_writes(inner, repr(rule))
        return tree_out(result)

    if None in rule.rules:
        raise AttributeError(f"{rule!r} has no {rule.needed}.")
    ruled = run if is_sharding() else rule.with_rules(run, call, partition, rest)
    fixed, out = ruled(arrays)
    return fixed.value.build(out)


class FilterCustomJvp(_Rule[P, R]):
    """A function with a rule for its tangents, as `filter_custom_jvp` returns it."""

    needed = "rule yet: define it with .defjvp"
    covers = staticmethod(lambda owner: isinstance(owner, int))
    differentiated = "the positional arguments"
    refusal = ValueError
    rules = (None,)

    def defjvp(self, rule: F) -> F:
        """Set the rule, `rule(primals, tangents, **kwargs) -> (value, tangent)`.

        A tangent is None at each leaf that is not being differentiated; the rule may give None for
        zero.
        """
        self.rules = (rule,)
        return rule

    def_jvp = defjvp

    def with_rules(
        self, run: tp.Callable[..., tp.Any], call: Call, partition: Partition, rest: list[tp.Any]
    ) -> tp.Callable[..., tp.Any]:
        """A function of the arrays of a call, with its rule, for JAX.

        Args:
            run: the function alone.
            call, partition, rest: the call, which of its leaves are arrays, and the others.
        """
        (rule,), ruled = self.rules, jax.custom_jvp(run)

        def run_jvp(primals: tp.Any, tangents: tp.Any) -> tp.Any:
            directions = partition.join(_nonzero(tangents[0]))
            self.refuse_perturbed(call, [t is not None for t in directions])
            (inner, named), entered = call.enter(partition.join(_arrays(primals[0]), rest))
            value, tangent = rule(inner[call.num_bound :], call.arguments(directions), **named)
            call.refuse_writes(entered, f"the rule of {self!r}")
            tree, (fixed, out) = leaves_of(value), tree_out(value)
            wanted = [is_inexact_array(x) for x in tree.leaves]
            form = Tangents(f"the tangent of {self!r}", ValueError, wanted=wanted)
            pairs = zip(tree.leaves, form.of_leaves(tree.definition, tree.leaves, tangent))
            along = [zero_tangent(x) if t is None else t for x, t in pairs if is_array(x)]
            return (fixed, out), (fixed, along)

        ruled.defjvp(run_jvp, symbolic_zeros=True)
        return ruled


def filter_custom_jvp(fn: tp.Callable[P, R]) -> FilterCustomJvp[P, R]:
    """A function with a custom forward derivative; `jax.custom_jvp` for arguments of any type.

    The floating-point and complex arrays of the positional arguments are differentiated. The function
    must not change its arguments.

    Args:
        fn: a function of anything; give its derivative with `defjvp`.

    Returns:
        A function like `fn`, with the method `defjvp(rule)`: `rule(primals, tangents)` returns the
        result and its tangent. Tangents are None where nothing is differentiated.

    Raises:
        ValueError: where a keyword argument, or something the function carries, is differentiated.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> @nnx.filter_custom_jvp
    ... def call(fn, x):
    ...     return fn(x)
    >>> @call.defjvp
    ... def call_jvp(primals, tangents):
    ...     fn, x = primals
    ...     _, tx = tangents
    ...     return call(fn, x), 10 * tx
    >>> jax.grad(lambda x: call(jnp.sin, x))(0.0)
    Array(10., dtype=float32, weak_type=True)
    """
    return FilterCustomJvp(fn, filtered("filter_custom_jvp", _run_rule))


class FilterCustomVjp(_Rule[P, R]):
    """A function with a rule for its cotangents, as `filter_custom_vjp` returns it."""

    needed = "rules yet: define them with .defvjp, or .def_fwd and .def_bwd"
    covers = staticmethod(lambda owner: owner == 0)
    differentiated = "the first argument"
    refusal = RuntimeError
    rules = (None, None)
    _perturbed = False

    def defvjp(self, fn_fwd: tp.Any, fn_bwd: tp.Any) -> None:
        """Set both rules.

        Args:
            fn_fwd: `(vjp_arg, *args, **kwargs) -> (value, residuals)`.
            fn_bwd: `(residuals, grad_value, vjp_arg, *args, **kwargs) -> grad_vjp_arg`; `grad_value`
                is None at each leaf that no cotangent reached.
        """
        self.rules, self._perturbed = (fn_fwd, fn_bwd), False

    def def_fwd(self, fn_fwd: F) -> F:
        """Set the forward rule, `(perturbed, vjp_arg, *args, **kwargs) -> (value, residuals)`.

        `perturbed` has the form of `vjp_arg`, with a bool for each leaf: whether it is differentiated.
        """
        self.rules, self._perturbed = (fn_fwd, self.rules[1]), True
        return fn_fwd

    def def_bwd(self, fn_bwd: F) -> F:
        """Set the backward rule: `(residuals, grad_value, perturbed, vjp_arg, *args, **kwargs)`."""
        self.rules, self._perturbed = (self.rules[0], fn_bwd), True
        return fn_bwd

    def with_rules(
        self, run: tp.Callable[..., tp.Any], call: Call, partition: Partition, rest: list[tp.Any]
    ) -> tp.Callable[..., tp.Any]:
        """See `FilterCustomJvp`."""
        (fwd, bwd), ruled, bound = self.rules, jax.custom_vjp(run), call.num_bound

        def flags(perturbed: tp.Sequence[tp.Any]) -> tuple[tp.Any, ...]:
            return call.arguments(perturbed)[:1] if self._perturbed else ()

        def forward(given: list[tp.Any]) -> tp.Any:
            perturbed = tuple(map(bool, partition.join([x.perturbed for x in given])))
            self.refuse_perturbed(call, perturbed)
            values = _arrays(x.value for x in given)
            (inner, named), entered = call.enter(partition.join(values, rest))
            value, residuals = fwd(*flags(perturbed), *inner[bound:], **named)
            call.refuse_writes(entered, f"the forward rule of {self!r}")
            return tree_out(value), (tree_out(residuals), Fixed(perturbed), values)

        def backward(saved: tp.Any, cotangent: tp.Any) -> tp.Any:
            (of_residuals, residuals), perturbed, values = saved
            of_value, cotangents = cotangent
            leaves = partition.join(values, rest)
            inner, named = call.definition.build(leaves)
            residuals = of_residuals.value.build(residuals)
            grad = of_value.value.build(_nonzero(cotangents), blank=True)
            gradient = bwd(residuals, grad, *flags(perturbed.value), *inner[bound:], **named)
            wanted = [o == 0 and is_inexact_array(x) for x, o in zip(leaves, call.owners())]
            what = f"the gradient that the backward rule of {self!r} returns"
            tree = (*[None] * bound, gradient), {}
            form = Tangents(what, ValueError, wanted=wanted)
            return (partition.split(form.of_leaves(call.definition, leaves, tree))[0],)

        ruled.defvjp(forward, backward, symbolic_zeros=True)
        return ruled


def filter_custom_vjp(fn: tp.Callable[P, R]) -> FilterCustomVjp[P, R]:
    """A function with a custom backward derivative; `jax.custom_vjp` for arguments of any type.

    The floating-point and complex arrays of its first argument are differentiated. Arguments, result and
    residuals may be of any type. The function must not change its arguments.

    Args:
        fn: a function of anything; give its derivative with `defvjp`.

    Returns:
        A function like `fn`, with the method `defvjp(forward, backward)`: `forward` takes the
        arguments and returns the result and residuals, `backward(residuals, grad, *args)` the
        gradient of the first argument.

    Raises:
        RuntimeError: where another argument, or something the function carries, is differentiated.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> @nnx.filter_custom_vjp
    ... def clip(x, limit):
    ...     return x
    >>> def forward(x, limit):
    ...     return x, None
    >>> def backward(residuals, grad, x, limit):
    ...     return jnp.clip(grad, -limit, limit)
    >>> clip.defvjp(forward, backward)
    >>> jax.grad(lambda x: 10 * clip(x, 1.0))(0.0)
    Array(1., dtype=float32, weak_type=True)
    """
    return FilterCustomVjp(fn, filtered("filter_custom_vjp", _run_rule))
