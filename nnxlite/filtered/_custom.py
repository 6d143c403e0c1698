"""Custom derivative rules for functions of any pytrees; closures as explicit leaves."""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from nnxlite._base.config import Modes
from nnxlite._base.jax import is_sharding, jaxpr_as_fun
from nnxlite._base.statics import ById
from nnxlite._base.typing import P, R
from nnxlite.boundary._call_def import CallDef, enter
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._leave import leave
from nnxlite.boundary._operands import parameter_names
from nnxlite.boundary._out import Fixed, replay
from nnxlite.filtered._crossing import (
    Call,
    Filtered,
    chosen_first,
    leaves_of,
    refuse_writes,
    tree_out,
)
from nnxlite.filtered._predicates import has_shape, is_array, is_inexact_array
from nnxlite.transforms._tangents import Tangents, zero_tangent
from nnxlite.transforms._wrapper import Options, Unequal, name_of

F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])


def _arrays(values: tp.Iterable[tp.Any]) -> list[tp.Any]:
    """Values as arrays: JAX may pass a rule the Python number that a tracer was made of."""
    return [x if is_array(x) else jnp.asarray(x) for x in values]


def _is_zero(x: tp.Any) -> bool:
    """Whether a tangent is known to be zero: JAX passed none, or there is no derivative."""
    return isinstance(x, SymbolicZero) or getattr(x, "dtype", None) == jax.dtypes.float0


class _Rule(Unequal, Filtered[P, R]):
    """Base of functions with a derivative rule.

    Each is equal only to itself, since its rule is set after it is made.

    Attributes:
        transform: the name of the transform.
        differentiated: what the rule differentiates, in messages.
        refusal: the class of the error if something else is differentiated.
    """

    transform: tp.ClassVar[str]
    differentiated: tp.ClassVar[str]
    refusal: tp.ClassVar[type[Exception]]

    def __init__(self, fn: tp.Any) -> None:
        super().__init__(fn, Options.of(self.transform, Modes(True, True), type(self)))

    def _run(self, call: Call, leaves: list[tp.Any]) -> tp.Any:
        inner, result = call.run(leaves)
        refuse_writes(inner, repr(self))
        return tree_out(result)

    def _covers(self, owner: int | str | None) -> bool:
        """Whether the rule differentiates an argument; see `Call.owners`."""
        raise NotImplementedError  # pragma: no cover - abstract

    def _refuse_perturbed(self, call: Call, perturbed: tp.Iterable[bool]) -> None:
        """Raise an error for a derivative that the rule would drop."""
        for owner, differentiated in zip(call.owners(), perturbed):
            if differentiated and not self._covers(owner):
                names = parameter_names(call.fun)[call.num_bound :]
                if isinstance(owner, int) and owner < len(names):
                    owner = names[owner]
                where = "something it carries" if owner is None else f"the argument {owner!r}"
                raise self.refusal(
                    f"{self!r}: its result is to be differentiated with respect to {where}, and its "
                    f"rule only covers {self.differentiated}. Pass it there, perhaps in a tuple, or "
                    "use jax.lax.stop_gradient."
                )


class FilterCustomJvp(_Rule[P, R]):
    """A function with a rule for its tangents, as `filter_custom_jvp` returns it."""

    transform = "filter_custom_jvp"
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

    def def_jvp(self, rule: F) -> F:
        """The same as `defjvp`."""
        return self.defjvp(rule)

    def _covers(self, owner: int | str | None) -> bool:
        return isinstance(owner, int)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        rule = self._rule
        if rule is None:
            raise AttributeError(f"{self!r} has no rule yet: define it with .defjvp.")
        call = self.call(args, kwargs)
        partition = chosen_first(map(is_array, call.leaves))
        arrays, rest = partition.split(call.leaves)

        @jax.custom_jvp
        def run(given: list[tp.Any]) -> tp.Any:
            return self._run(call, partition.join(given, rest))

        def run_jvp(primals: tp.Any, tangents: tp.Any) -> tp.Any:
            given = [None if _is_zero(t) else jnp.asarray(t) for t in tangents[0]]
            directions = partition.join(given)
            self._refuse_perturbed(call, [t is not None for t in directions])
            values = partition.join(_arrays(primals[0]), rest)
            (inner, named), entered = call.enter(values)
            value, tangent = rule(inner[call.num_bound :], call.arguments(directions), **named)
            refuse_writes(entered, f"the rule of {self!r}")
            fixed, out = tree_out(value)
            return (fixed, out), (fixed, self._tangents(value, tangent))

        run.defjvp(run_jvp, symbolic_zeros=True)
        fixed, out = self._run(call, partition.join(arrays, rest)) if is_sharding() else run(arrays)
        return fixed.value.build(out)

    def _tangents(self, value: tp.Any, tangent: tp.Any) -> list[tp.Any]:
        """A tangent for each array of the value."""
        tree = leaves_of(value)
        wanted = [is_inexact_array(x) for x in tree.leaves]
        form = Tangents(f"the tangent of {self!r}", ValueError, wanted=wanted)
        given = form.of_leaves(tree.definition, tree.leaves, tangent)
        return [
            zero_tangent(leaf) if direction is None else direction
            for leaf, direction in zip(tree.leaves, given)
            if is_array(leaf)
        ]


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

    def _covers(self, owner: int | str | None) -> bool:
        return owner == 0

    def __call__(self, vjp_arg: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> R:
        if self._fwd is None or self._bwd is None:
            raise AttributeError(
                f"{self!r} has no rules yet: define them with .defvjp, or .def_fwd and .def_bwd."
            )
        call = self.call((vjp_arg, *args), kwargs)
        form, bound = call.definition, call.num_bound
        partition = chosen_first(map(is_array, call.leaves))
        arrays, rest = partition.split(call.leaves)

        def flags(perturbed: tp.Sequence[tp.Any]) -> tuple[tp.Any, ...]:
            return (call.arguments(perturbed)[0],) if self._perturbed else ()

        @jax.custom_vjp
        def run(given: list[tp.Any]) -> tp.Any:
            return self._run(call, partition.join(given, rest))

        def forward(given: list[tp.Any]) -> tp.Any:
            perturbed = tuple(map(bool, partition.join([x.perturbed for x in given])))
            self._refuse_perturbed(call, perturbed)
            values = _arrays(x.value for x in given)
            (inner, named), entered = call.enter(partition.join(values, rest))
            value, residuals = self._fwd(*flags(perturbed), *inner[bound:], **named)
            refuse_writes(entered, f"the forward rule of {self!r}")
            return tree_out(value), (tree_out(residuals), Fixed(perturbed), values)

        def backward(saved: tp.Any, cotangent: tp.Any) -> tp.Any:
            (fixed_residuals, residuals), fixed_perturbed, values = saved
            fixed, cotangents = cotangent
            inner, named = form.build(partition.join(values, rest))
            gradient = self._bwd(
                fixed_residuals.value.build(residuals),
                fixed.value.build([None if _is_zero(x) else x for x in cotangents], blank=True),
                *flags(fixed_perturbed.value),
                *inner[bound:],
                **named,
            )
            owners = zip(call.leaves, call.owners())
            wanted = [self._covers(i) and is_inexact_array(x) for x, i in owners]
            what = f"the gradient that the backward rule of {self!r} returns"
            returned = Tangents(what, ValueError, wanted=wanted).of_leaves(
                form, call.leaves, ((*[None] * bound, gradient), {})
            )
            return (partition.split(returned)[0],)

        run.defvjp(forward, backward, symbolic_zeros=True)
        fixed, out = self._run(call, partition.join(arrays, rest)) if is_sharding() else run(arrays)
        return fixed.value.build(out)


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


# Closures ------------------------------------------------------------------------------------------


class _Traced(tp.NamedTuple):
    """A traced function: its name, its program, and the static side of its arguments and result."""

    name: str
    jaxpr: tp.Any
    given: Fixed
    in_shapes: list[tp.Any]
    out: tp.Any
    out_shapes: list[tp.Any]


@jax.tree_util.register_pytree_node_class
class ClosureConverted(tp.Generic[P, R]):
    """A function whose captured arrays are leaves, as `filter_closure_convert` returns it.

    Attributes:
        consts: the captured arrays.
    """

    def __init__(self, consts: list[tp.Any], traced: _Traced) -> None:
        self.consts = consts
        self._traced = traced

    def tree_flatten(self) -> tp.Any:
        """For JAX."""
        return (self.consts,), ById(self._traced)

    @classmethod
    def tree_unflatten(cls, traced: ById, children: tp.Any) -> ClosureConverted[P, R]:
        """For JAX."""
        return cls(children[0], traced.value)

    @property
    def in_struct(self) -> tp.Any:
        """The example arguments, `(args, kwargs)`, with a `jax.ShapeDtypeStruct` for each array."""
        return self._traced.given.value.build(self._traced.in_shapes)

    @property
    def out_struct(self) -> tp.Any:
        """The result, with a `jax.ShapeDtypeStruct` for each array."""
        traced = self._traced
        like = [np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in traced.in_shapes]
        return replay(
            Inputs(traced.given.value.build(like), trees=True),
            jax.tree_util.tree_unflatten(traced.out, traced.out_shapes),
        )

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        traced = self._traced
        inputs = Inputs((args, kwargs), trees=True)
        given, arrays = tree_out((args, kwargs))
        if given != traced.given or _forms(arrays) != _forms(traced.in_shapes):
            raise ValueError(
                f"{traced.name} was closure-converted for other arguments: call it with the "
                "structure, shapes and static leaves of the example."
            )
        out = jaxpr_as_fun(traced.jaxpr, self.consts)(*arrays)
        crossing = jax.tree_util.tree_unflatten(traced.out, map(jnp.asarray, out))
        return replay(inputs, crossing)

    def __repr__(self) -> str:
        return f"ClosureConverted({self._traced.name}, {len(self.consts)} consts)"


def _forms(arrays: tp.Iterable[tp.Any]) -> list[tp.Any]:
    return [(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in arrays]


def filter_closure_convert(
    fn: tp.Callable[P, R], *args: tp.Any, **kwargs: tp.Any
) -> ClosureConverted[P, R]:
    """A function whose captured arrays are explicit: they are leaves of the function itself.

    The function is traced for the example arguments, not run; call the result with arguments of the
    same structure, shapes, dtypes and static leaves. A `jax.ShapeDtypeStruct` is an example of an
    array.

    Args:
        fn: the function.
        args, kwargs: examples of its arguments.

    Returns:
        A function of the same arguments, and a pytree of the arrays that it captured; `out_struct`
        has the shapes and dtypes of its result.

    Raises:
        ValueError: (by the result) for arguments of another form than the example.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> weight = jnp.array(3.0)
    >>> converted = nnx.filter_closure_convert(lambda x: x * weight, jnp.array(1.0))
    >>> jax.tree.leaves(converted), float(converted(jnp.array(2.0)))
    ([Array(3., dtype=float32, weak_type=True)], 6.0)
    >>> converted.out_struct
    ShapeDtypeStruct(shape=(), dtype=float32)
    """
    given, arrays = tree_out((args, kwargs), has_shape)

    def run(*traced: tp.Any) -> tp.Any:
        (inner_args, named), inner = enter(tp.cast(CallDef, given.value), traced)
        out = leave(inner, fn(*inner_args, **named))  # pyright: ignore[reportCallIssue] - of examples
        return out.as_arrays(is_array)

    closed, crossing = jax.make_jaxpr(run, return_shape=True)(*arrays)
    shapes, out = jax.tree_util.tree_flatten(crossing)
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    traced = _Traced(
        name_of(fn),
        closed.jaxpr,
        given,
        [*map(struct, closed.in_avals)],
        out,
        [*map(struct, shapes)],
    )
    return ClosureConverted(list(closed.consts), traced)
