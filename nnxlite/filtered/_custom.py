"""Derivative rules by hand, for functions of anything; and closures made explicit."""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._jax import jaxpr_as_fun
from nnxlite.boundary import leave
from nnxlite.filtered._apart import Apart
from nnxlite.filtered._crossing import (
    Call,
    Choice,
    bound_arguments,
    put_back,
    refuse_writes,
    take_out,
    tree_out,
)
from nnxlite.filtered._grad import aligned, inexact_arguments
from nnxlite.filtered._predicates import is_array, is_inexact_array
from nnxlite.transforms._callables import name_of

F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])


def _arrays(values: tp.Sequence[tp.Any]) -> list[tp.Any]:
    """Arrays, also where JAX hands a rule the Python number that a tracer was made of."""
    return [x if is_array(x) else jnp.asarray(x) for x in values]


class _Rule:
    """Base of functions with a derivative rule."""

    kind: tp.ClassVar[str]

    def __init__(self, fn: tp.Any) -> None:
        self.fn = fn
        functools.update_wrapper(tp.cast(tp.Any, self), fn, updated=())
        self.__wrapped__ = fn

    def __get__(self, instance: tp.Any, owner: tp.Any = None) -> tp.Any:
        return self if instance is None else functools.partial(tp.cast(tp.Any, self), instance)

    def __repr__(self) -> str:
        return f"{self.kind}({name_of(self.fn)})"

    def _enter(self, args: tp.Any, kwargs: tp.Any) -> Call:
        return Call(self.fn, *bound_arguments(self.fn, args, kwargs))

    def _run(self, call: Call, leaves: list[tp.Any]) -> tp.Any:
        inner, result = call.run(leaves)
        refuse_writes(inner, repr(self))
        return tree_out(result)


class FilterCustomJvp(_Rule):
    """A function with a rule for its tangents, as `filter_custom_jvp` returns it."""

    kind = "filter_custom_jvp"
    _rule: tp.Any = None

    def defjvp(self, rule: F) -> F:
        """Set the rule, `rule(primals, tangents, **kwargs) -> (value, tangent)`.

        Tangents are None at leaves that have no derivative; the rule may give None for zero.
        """
        self._rule = rule
        return rule

    def def_jvp(self, rule: F) -> F:
        """The same as `defjvp`."""
        return self.defjvp(rule)

    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        rule = self._rule
        if rule is None:
            raise AttributeError(f"{self!r} has no rule yet: define it with .defjvp.")
        call = self._enter(args, kwargs)
        leaves = call.apart.leaves
        choice = inexact_arguments(call)
        others = Choice([is_array(x) and not m for x, m in zip(leaves, choice.mask)])

        @jax.custom_jvp
        def run(chosen: list[tp.Any], rest: list[tp.Any]) -> tp.Any:
            return self._run(call, others.into(choice.into(leaves, chosen), rest))

        @run.defjvp
        def run_jvp(primals: tp.Any, tangents: tp.Any) -> tp.Any:
            given = others.into(choice.into(leaves, _arrays(primals[0])), _arrays(primals[1]))
            (inner_args, named), inner = call.apart.enter(given)
            directions = call.arguments(choice.alone(tangents[0]))
            visible = inner_args[call.num_bound :]
            bound = inner_args[: call.num_bound]
            value, tangent = rule((*bound, *visible), (*[None] * len(bound), *directions), **named)
            refuse_writes(inner, f"the rule of {self!r}")
            fixed, arrays = tree_out(value)
            return (fixed, arrays), (fixed, self._tangents(value, tangent))

        fixed, arrays = run(choice.chosen(leaves), others.chosen(leaves))
        return fixed.value.build(arrays)

    def _tangents(self, value: tp.Any, tangent: tp.Any) -> list[tp.Any]:
        """A tangent for each array of the value."""
        apart = Apart(value)
        inexact = Choice([is_inexact_array(x) for x in apart.leaves])
        found = aligned(apart, tangent, inexact, f"the tangent of {self!r}", required=False)
        by_leaf = inexact.alone(found)
        out = []
        for leaf, direction in zip(apart.leaves, by_leaf):
            if not is_array(leaf):
                continue
            if not is_inexact_array(leaf):
                out.append(np.zeros(leaf.shape, jax.dtypes.float0))
            elif direction is None:
                out.append(jnp.zeros_like(leaf))
            else:
                out.append(jnp.asarray(direction, leaf.dtype))
        return out


def filter_custom_jvp(fn: tp.Callable[..., tp.Any]) -> FilterCustomJvp:
    """A function whose forward derivative is given by hand; `jax.custom_jvp` for arguments of any type.

    Which leaves are differentiated is decided by their type: floating-point and complex arrays of
    the positional arguments are (keyword-only arguments are not). The function must not change its
    arguments.

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


class FilterCustomVjp(_Rule):
    """A function with a rule for its cotangents, as `filter_custom_vjp` returns it."""

    kind = "filter_custom_vjp"
    _fwd: tp.Any = None
    _bwd: tp.Any = None
    _perturbed = False

    def defvjp(self, fn_fwd: tp.Any, fn_bwd: tp.Any) -> None:
        """Set both rules.

        Args:
            fn_fwd: `(vjp_arg, *args, **kwargs) -> (value, residuals)`.
            fn_bwd: `(residuals, grad_value, vjp_arg, *args, **kwargs) -> grad_vjp_arg`.
        """
        self._fwd, self._bwd, self._perturbed = fn_fwd, fn_bwd, False

    def def_fwd(self, fn_fwd: F) -> F:
        """Set the forward rule, `(perturbed, vjp_arg, *args, **kwargs) -> (value, residuals)`.

        `perturbed` has the form of `vjp_arg` and tells of each leaf whether its gradient may be
        wanted: of floating-point and complex arrays it is.
        """
        self._fwd, self._perturbed = fn_fwd, True
        return fn_fwd

    def def_bwd(self, fn_bwd: F) -> F:
        """Set the backward rule: `(residuals, grad_value, perturbed, vjp_arg, *args, **kwargs)`."""
        self._bwd, self._perturbed = fn_bwd, True
        return fn_bwd

    def __call__(self, vjp_arg: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        if self._fwd is None or self._bwd is None:
            raise AttributeError(
                f"{self!r} has no rules yet: define them with .defvjp, or .def_fwd and .def_bwd."
            )
        call = self._enter((vjp_arg, *args), kwargs)
        apart, leaves = call.apart, call.apart.leaves
        inexact = inexact_arguments(call)
        first = (0, call.num_bound)
        starts = [path[:2] == first for path in apart.position_paths]
        choice = Choice(
            [m and starts[place.position] for m, place in zip(inexact.mask, apart.places)]
        )
        others = Choice([is_array(x) and not m for x, m in zip(leaves, choice.mask)])

        def joined(chosen: list[tp.Any], rest: list[tp.Any]) -> list[tp.Any]:
            return others.into(choice.into(leaves, chosen), rest)

        def extra(given: list[tp.Any]) -> tuple[tp.Any, ...]:
            if not self._perturbed:
                return ()
            return (apart.build(choice.mask)[0][call.num_bound],)

        @jax.custom_vjp
        def run(chosen: list[tp.Any], rest: list[tp.Any]) -> tp.Any:
            return self._run(call, joined(chosen, rest))

        def forward(chosen: list[tp.Any], rest: list[tp.Any]) -> tp.Any:
            given = joined(_arrays(chosen), _arrays(rest))
            (inner_args, named), inner = apart.enter(given)
            value, residuals = self._fwd(*extra(given), *inner_args, **named)
            refuse_writes(inner, f"the forward rule of {self!r}")
            return tree_out(value), (tree_out(residuals), chosen, rest)

        def backward(kept: tp.Any, cotangent: tp.Any) -> tp.Any:
            (fixed_residuals, residuals), chosen, rest = kept
            fixed, arrays = cotangent
            grads = [None if x.dtype == jax.dtypes.float0 else x for x in arrays]
            given = joined(chosen, rest)
            (inner_args, named), _ = apart.enter(given)
            found = self._bwd(
                fixed_residuals.value.build(residuals),
                fixed.value.only(grads),
                *extra(given),
                *inner_args,
                **named,
            )
            shown = ((*[None] * call.num_bound, found), {})
            what = f"the gradient that the backward rule of {self!r} returns"
            matched = aligned(apart, shown, choice, what, required=False)
            return [
                jnp.zeros_like(x) if g is None else jnp.asarray(g, x.dtype)
                for g, x in zip(matched, chosen)
            ], None

        run.defvjp(forward, backward)
        fixed, arrays = run(choice.chosen(leaves), others.chosen(leaves))
        return fixed.value.build(arrays)


def filter_custom_vjp(fn: tp.Callable[..., tp.Any]) -> FilterCustomVjp:
    """A function whose backward derivative is given by hand; `jax.custom_vjp` for anything.

    Differentiated are the floating-point and complex arrays of its first argument; all the rest has
    zero gradient. Arguments, result and residuals may be of any type. The function must not change
    its arguments.

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
    Array(1., dtype=float32)
    """
    return FilterCustomVjp(fn)


# Closures ------------------------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class ClosureConverted:
    """A function with all that it captured as leaves, as `filter_closure_convert` returns it.

    Attributes:
        consts: the captured arrays.
    """

    def __init__(self, consts: list[tp.Any], traced: _Traced) -> None:
        self.consts = consts
        self._traced = traced

    def tree_flatten(self) -> tp.Any:
        """For JAX."""
        return (self.consts,), self._traced

    @classmethod
    def tree_unflatten(cls, traced: _Traced, children: tp.Any) -> ClosureConverted:
        """For JAX."""
        return cls(children[0], traced)

    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        traced = self._traced
        apart = Apart((args, kwargs))
        fixed, arrays = tree_out((args, kwargs))
        if fixed != traced.given or list(map(jax.typeof, arrays)) != traced.avals:
            raise ValueError(
                f"{traced.name} was closure-converted for other arguments: call it with the "
                "structure, shapes and static leaves of the example."
            )
        out = jaxpr_as_fun(traced.jaxpr, self.consts)(*arrays)
        return put_back(apart.inputs, traced.out, out)

    def __repr__(self) -> str:
        return f"ClosureConverted({self._traced.name}, {len(self.consts)} consts)"


class _Traced:
    """A traced function: what it was traced with, its program, and the form of its result."""

    def __init__(self, name: str, given: tp.Any, avals: tp.Any, jaxpr: tp.Any, out: tp.Any) -> None:
        self.name, self.given, self.avals, self.jaxpr, self.out = name, given, avals, jaxpr, out


def filter_closure_convert(
    fn: tp.Callable[..., tp.Any], *args: tp.Any, **kwargs: tp.Any
) -> ClosureConverted:
    """A function with every array it captured made explicit, as leaves of the function itself.

    The function is traced for the example arguments, not run; call the result with arguments of the
    same structure, shapes and static leaves.

    Raises:
        ValueError: (by the result) when it is called with other arguments than it was traced for.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> weight = jnp.array(3.0)
    >>> converted = nnx.filter_closure_convert(lambda x: x * weight, jnp.array(1.0))
    >>> jax.tree.leaves(converted), float(converted(jnp.array(2.0)))
    ([Array(3., dtype=float32, weak_type=True)], 6.0)
    """
    given, arrays = tree_out((args, kwargs))
    apart = Apart((args, kwargs))
    choice = Choice([is_array(x) for x in apart.leaves])

    def run(*traced: tp.Any) -> tp.Any:
        (inner_args, named), inner = apart.enter(choice.into(apart.leaves, traced))
        return take_out(leave(inner, fn(*inner_args, **named)))

    closed, (out, _) = jax.make_jaxpr(run, return_shape=True)(*arrays)
    avals = list(map(jax.typeof, arrays))
    traced = _Traced(name_of(fn), given, avals, closed.jaxpr, out)
    return ClosureConverted(list(closed.consts), traced)
