"""Types of the transforms for type checkers: the options that overloads share, and derivatives.

A transform is declared twice, as a function of a function and as a decorator, and `grad` several times,
since its result depends on its options and on the argument that is differentiated.  The options are
listed once, here; a test compares them with the parameters of the transforms.
"""

from __future__ import annotations

import typing as tp

from jax import Array

from nnxlite._base.jax import Numbers, RematPolicy
from nnxlite._state._definition import State
from nnxlite.objects._pytree import Pytree
from nnxlite.transforms._derivatives import Argnums
from nnxlite.transforms._wrapper import P, R, Transform
from nnxlite.variables._variable import Variable

A = tp.TypeVar("A")
T = tp.TypeVar("T")
F_co = tp.TypeVar("F_co", bound=tp.Callable[..., tp.Any], covariant=True)

AnyState: tp.TypeAlias = State[tp.Any, tp.Any]


# Options ------------------------------------------------------------------------------------------


class ModeKeywords(tp.TypedDict, total=False):
    """How a transform treats objects."""

    graph: bool | None
    graph_updates: bool | None


class JitKeywords(ModeKeywords, total=False):
    """The options of `jit` and `jit_partial`."""

    in_shardings: tp.Any
    out_shardings: tp.Any
    static_argnums: int | tp.Sequence[int] | None
    static_argnames: str | tp.Iterable[str] | None
    donate_argnums: int | tp.Sequence[int] | None
    donate_argnames: str | tp.Iterable[str] | None
    keep_unused: bool
    device: tp.Any
    backend: str | None
    inline: bool
    donate: tp.Literal["written"] | None
    max_traces: int | None


class AxesKeywords(ModeKeywords, total=False):
    """The options that `vmap`, `pmap` and `scan` have in common."""

    in_axes: tp.Any
    out_axes: tp.Any
    transform_metadata: tp.Mapping[str, tp.Any]


class VmapKeywords(AxesKeywords, total=False):
    """The options of `vmap`."""

    axis_name: tp.Hashable | None
    axis_size: int | None
    spmd_axis_name: tp.Hashable | None


class PmapKeywords(AxesKeywords, total=False):
    """The options of `pmap`."""

    axis_name: tp.Hashable | None
    axis_size: int | None
    static_broadcasted_argnums: int | tp.Sequence[int]
    devices: tp.Sequence[tp.Any] | None
    backend: str | None
    donate_argnums: int | tp.Sequence[int]


class ScanKeywords(AxesKeywords, total=False):
    """The options of `scan`."""

    length: int | None
    reverse: bool
    unroll: int | bool
    _split_transpose: bool


class ShardMapKeywords(ModeKeywords, total=False):
    """The options of `shard_map`."""

    mesh: tp.Required[tp.Any]
    in_specs: tp.Required[tp.Any]
    out_specs: tp.Required[tp.Any]
    axis_names: tp.AbstractSet[tp.Any]
    check_vma: bool


class RematKeywords(ModeKeywords, total=False):
    """The options of `remat`."""

    prevent_cse: bool
    static_argnums: int | tuple[int, ...]
    policy: RematPolicy | None


class JaxprKeywords(ModeKeywords, total=False):
    """The options of `make_jaxpr`."""

    static_argnums: int | tp.Sequence[int]


class NumericGradKeywords(tp.TypedDict, total=False):
    """The options of `grad` that JAX's has as well."""

    holomorphic: bool
    allow_int: bool
    reduce_axes: tp.Sequence[tp.Any]


class GraphGradKeywords(NumericGradKeywords, total=False):
    """The options of `grad` where gradients of objects are States."""

    graph: tp.Literal[True] | None
    graph_updates: tp.Literal[True] | None


class FirstGradKeywords(GraphGradKeywords, total=False):
    """The same where the first argument is differentiated."""

    argnums: tp.Literal[0]


class GradKeywords(NumericGradKeywords, ModeKeywords, total=False):
    """The options of `grad`."""

    argnums: Argnums
    has_aux: bool


# Derivatives --------------------------------------------------------------------------------------
#
# The gradient of an object is a State; that of a State, a Variable or an array is another one. The type
# of the argument is known from the call, so the gradient has a type for a loss function without
# annotations as well.

Leaf = tp.TypeVar("Leaf", bound=AnyState | Variable[tp.Any])


class Derivative(Transform[..., tp.Any], tp.Generic[F_co]):
    """Base of the following; `vmap` and `jit` of one are declared as of the same class."""


G = tp.TypeVar("G", bound=Derivative[tp.Any])
_Function: tp.TypeAlias = tp.Callable[tp.Concatenate[T, P], R]


class Grad(Derivative[F_co]):
    """What `grad(f)` returns."""

    @tp.overload
    def __call__(
        self: Grad[_Function[tp.Any, P, tp.Any]], arg: Pytree, /, *args: P.args, **kwargs: P.kwargs
    ) -> AnyState: ...
    @tp.overload
    def __call__(
        self: Grad[_Function[tp.Any, P, tp.Any]], arg: Numbers, /, *args: P.args, **kwargs: P.kwargs
    ) -> Array: ...
    @tp.overload
    def __call__(
        self: Grad[_Function[tp.Any, P, tp.Any]], arg: Leaf, /, *args: P.args, **kwargs: P.kwargs
    ) -> Leaf: ...
    @tp.overload
    def __call__(
        self: Grad[_Function[T, P, tp.Any]], arg: T, /, *args: P.args, **kwargs: P.kwargs
    ) -> tp.Any: ...
    @tp.overload
    def __call__(self: Grad[tp.Callable[..., tp.Any]], /, **kwargs: tp.Any) -> tp.Any: ...
    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Differentiate."""


class GradAux(Derivative[F_co]):
    """What `grad(f, has_aux=True)` returns."""

    @tp.overload
    def __call__(
        self: GradAux[_Function[tp.Any, P, tuple[tp.Any, A]]],
        arg: Pytree,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[AnyState, A]: ...
    @tp.overload
    def __call__(
        self: GradAux[_Function[tp.Any, P, tuple[tp.Any, A]]],
        arg: Numbers,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[Array, A]: ...
    @tp.overload
    def __call__(
        self: GradAux[_Function[tp.Any, P, tuple[tp.Any, A]]],
        arg: Leaf,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[Leaf, A]: ...
    @tp.overload
    def __call__(
        self: GradAux[_Function[T, P, tuple[tp.Any, A]]],
        arg: T,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[tp.Any, A]: ...
    @tp.overload
    def __call__(
        self: GradAux[tp.Callable[..., tuple[tp.Any, A]]], /, **kwargs: tp.Any
    ) -> tuple[tp.Any, A]: ...
    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Differentiate."""


class ValueAndGrad(Derivative[F_co]):
    """What `value_and_grad(f)` returns; the value is that of `f`, also where it has an aux."""

    @tp.overload
    def __call__(
        self: ValueAndGrad[_Function[tp.Any, P, R]],
        arg: Pytree,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[R, AnyState]: ...
    @tp.overload
    def __call__(
        self: ValueAndGrad[_Function[tp.Any, P, R]],
        arg: Numbers,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[R, Array]: ...
    @tp.overload
    def __call__(
        self: ValueAndGrad[_Function[tp.Any, P, R]], arg: Leaf, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, Leaf]: ...
    @tp.overload
    def __call__(
        self: ValueAndGrad[_Function[T, P, R]], arg: T, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, tp.Any]: ...
    @tp.overload
    def __call__(
        self: ValueAndGrad[tp.Callable[..., R]], /, **kwargs: tp.Any
    ) -> tuple[R, tp.Any]: ...
    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Differentiate."""
