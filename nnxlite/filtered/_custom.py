"""Custom derivative rules for functions of any pytrees; closures as explicit leaves."""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from nnxlite._base.jax import is_sharding
from nnxlite._base.typing import P, R
from nnxlite.boundary._call_def import Partition, parameter_names
from nnxlite.boundary._out import Fixed
from nnxlite.filtered._specs import (
    chosen_first,
    filtered,
    is_array,
    is_inexact_array,
    leaves_of,
    refuse_writes,
    tree_out,
)
from nnxlite.transforms._call import Call
from nnxlite.transforms._derivatives import Tangents, zero_tangent
from nnxlite.transforms._wrapper import Transform, Unequal

F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])


def _arrays(values: tp.Iterable[tp.Any]) -> list[tp.Any]:
    """Values as arrays: JAX may pass a rule the Python number that a tracer was made of."""
    return [x if is_array(x) else jnp.asarray(x) for x in values]


def _nonzero(tangents: tp.Iterable[tp.Any]) -> list[tp.Any]:
    """Tangents, None where one is known to be zero: JAX passed none, or there is no derivative."""
    float0 = jax.dtypes.float0
    zero = lambda x: isinstance(x, SymbolicZero) or getattr(x, "dtype", None) == float0
    return [None if zero(x) else jnp.asarray(x) for x in tangents]


class _Rule(Unequal, Transform[P, R]):
    """Base of functions with a derivative rule.

    Each is equal only to itself, since its rule is set after it is made.

    Attributes:
        transform: the name of the transform.
        needed: how to set its rule, in messages.
        covers: whether the rule differentiates an argument; see `Call.owners`.
        differentiated: what the rule differentiates, in messages.
        refusal: the class of the error if something else is differentiated.
    """

    transform: tp.ClassVar[str]
    needed: tp.ClassVar[str]
    covers: tp.ClassVar[tp.Any]
    differentiated: tp.ClassVar[str]
    refusal: tp.ClassVar[type[Exception]]

    def __init__(self, fn: tp.Any) -> None:
        super().__init__(fn, filtered(self.transform, _run))

    def with_rule(
        self, run: tp.Callable[..., tp.Any], call: Call, partition: Partition, rest: list[tp.Any]
    ) -> tp.Callable[..., tp.Any]:
        """A function of the arrays of a call, with its rule, for JAX.

        Args:
            run: the function alone.
            call, partition, rest: the call, which of its leaves are arrays, and the others.

        Raises AttributeError where there is no rule yet.
        """
        raise AttributeError(f"{self!r} has no {self.needed}.")

    def refuse_perturbed(self, call: Call, perturbed: tp.Iterable[bool]) -> None:
        """Raise an error for a derivative that the rule would drop."""
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


def _run(rule: _Rule[..., tp.Any], args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]) -> tp.Any:
    call = Call(rule.options, rule.bound, args, kwargs)
    partition = chosen_first(map(is_array, call.leaves))
    arrays, rest = partition.split(call.leaves)

    def run(given: list[tp.Any]) -> tp.Any:
        inner, result = call.run(partition.join(given, rest))
        refuse_writes(inner, repr(rule))
        return tree_out(result)

    ruled = rule.with_rule(run, call, partition, rest)
    fixed, out = (run if is_sharding() else ruled)(arrays)
    return fixed.value.build(out)


class FilterCustomJvp(_Rule[P, R]):
    """A function with a rule for its tangents, as `filter_custom_jvp` returns it."""

    transform = "filter_custom_jvp"
    needed = "rule yet: define it with .defjvp"
    covers = staticmethod(lambda owner: isinstance(owner, int))
    differentiated = "the positional arguments"
    refusal = ValueError
    _rule: tp.Any = None

    def defjvp(self, rule: F) -> F:
        """Set the rule, `rule(primals, tangents, **kwargs) -> (value, tangent)`.

        A tangent is None at each leaf that is not being differentiated; the rule may give None for
        zero.
        """
        self._rule = rule
        return rule

    def_jvp = defjvp

    def with_rule(
        self, run: tp.Callable[..., tp.Any], call: Call, partition: Partition, rest: list[tp.Any]
    ) -> tp.Callable[..., tp.Any]:
        """See `_Rule`."""
        if self._rule is None:
            super().with_rule(run, call, partition, rest)
        ruled = jax.custom_jvp(run)

        def run_jvp(primals: tp.Any, tangents: tp.Any) -> tp.Any:
            directions = partition.join(_nonzero(tangents[0]))
            self.refuse_perturbed(call, [t is not None for t in directions])
            (inner, named), entered = call.enter(partition.join(_arrays(primals[0]), rest))
            given = call.arguments(directions)
            value, tangent = self._rule(inner[call.num_bound :], given, **named)
            refuse_writes(entered, f"the rule of {self!r}")
            tree = leaves_of(value)
            wanted = [is_inexact_array(x) for x in tree.leaves]
            form = Tangents(f"the tangent of {self!r}", ValueError, wanted=wanted)
            along = form.of_leaves(tree.definition, tree.leaves, tangent)
            out = tree_out(value)
            pairs = zip(tree.leaves, along)
            return out, (
                out[0],
                [zero_tangent(x) if t is None else t for x, t in pairs if is_array(x)],
            )

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
    return FilterCustomJvp(fn)


class FilterCustomVjp(_Rule[P, R]):
    """A function with a rule for its cotangents, as `filter_custom_vjp` returns it."""

    transform = "filter_custom_vjp"
    needed = "rules yet: define them with .defvjp, or .def_fwd and .def_bwd"
    covers = staticmethod(lambda owner: owner == 0)
    differentiated = "the first argument"
    refusal = RuntimeError
    _fwd: tp.Any = None
    _bwd: tp.Any = None
    _perturbed = False

    def defvjp(self, fn_fwd: tp.Any, fn_bwd: tp.Any) -> None:
        """Set both rules.

        Args:
            fn_fwd: `(vjp_arg, *args, **kwargs) -> (value, residuals)`.
            fn_bwd: `(residuals, grad_value, vjp_arg, *args, **kwargs) -> grad_vjp_arg`; `grad_value`
                is None at each leaf that no cotangent reached.
        """
        self._fwd, self._bwd, self._perturbed = fn_fwd, fn_bwd, False

    def def_fwd(self, fn_fwd: F) -> F:
        """Set the forward rule, `(perturbed, vjp_arg, *args, **kwargs) -> (value, residuals)`.

        `perturbed` has the form of `vjp_arg`, with a bool for each leaf: whether it is differentiated.
        """
        self._fwd, self._perturbed = fn_fwd, True
        return fn_fwd

    def def_bwd(self, fn_bwd: F) -> F:
        """Set the backward rule: `(residuals, grad_value, perturbed, vjp_arg, *args, **kwargs)`."""
        self._bwd, self._perturbed = fn_bwd, True
        return fn_bwd

    def with_rule(
        self, run: tp.Callable[..., tp.Any], call: Call, partition: Partition, rest: list[tp.Any]
    ) -> tp.Callable[..., tp.Any]:
        """See `_Rule`."""
        if self._fwd is None or self._bwd is None:
            super().with_rule(run, call, partition, rest)
        ruled, form, bound = jax.custom_vjp(run), call.definition, call.num_bound

        def flags(perturbed: tp.Sequence[tp.Any]) -> tuple[tp.Any, ...]:
            return call.arguments(perturbed)[:1] if self._perturbed else ()

        def forward(given: list[tp.Any]) -> tp.Any:
            perturbed = tuple(map(bool, partition.join([x.perturbed for x in given])))
            self.refuse_perturbed(call, perturbed)
            values = _arrays(x.value for x in given)
            (inner, named), entered = call.enter(partition.join(values, rest))
            value, residuals = self._fwd(*flags(perturbed), *inner[bound:], **named)
            refuse_writes(entered, f"the forward rule of {self!r}")
            return tree_out(value), (tree_out(residuals), Fixed(perturbed), values)

        def backward(saved: tp.Any, cotangent: tp.Any) -> tp.Any:
            (fixed_residuals, residuals), perturbed, values = saved
            fixed, cotangents = cotangent
            inner, named = form.build(partition.join(values, rest))
            gradient = self._bwd(
                fixed_residuals.value.build(residuals),
                fixed.value.build(_nonzero(cotangents), blank=True),
                *flags(perturbed.value),
                *inner[bound:],
                **named,
            )
            leaves = partition.join(values, rest)
            wanted = [o == 0 and is_inexact_array(x) for x, o in zip(leaves, call.owners())]
            what = f"the gradient that the backward rule of {self!r} returns"
            tree = (*[None] * bound, gradient), {}
            returned = Tangents(what, ValueError, wanted=wanted).of_leaves(form, leaves, tree)
            return (partition.split(returned)[0],)

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
    return FilterCustomVjp(fn)
