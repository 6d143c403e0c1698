"""Types of `filter_grad` and `filter_value_and_grad` for type checkers.

The gradient has the type of the first argument of the call.
"""

from __future__ import annotations

import typing as tp

import jax

from nnxlite._typing import Numbers, P, R
from nnxlite.filtered._crossing import Filtered

A = tp.TypeVar("A")
T = tp.TypeVar("T")
F_co = tp.TypeVar("F_co", bound=tp.Callable[..., tp.Any], covariant=True)


class TreeGrad(Filtered[..., tp.Any], tp.Generic[F_co]):
    """What `filter_grad(f)` returns."""

    @tp.overload
    def __call__(
        self: TreeGrad[tp.Callable[tp.Concatenate[tp.Any, P], tp.Any]],
        arg: Numbers,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> jax.Array: ...
    @tp.overload
    def __call__(
        self: TreeGrad[tp.Callable[tp.Concatenate[tp.Any, P], tp.Any]],
        arg: T,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...
    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Differentiate."""


class TreeGradAux(Filtered[..., tp.Any], tp.Generic[F_co]):
    """What `filter_grad(f, has_aux=True)` returns."""

    @tp.overload
    def __call__(
        self: TreeGradAux[tp.Callable[tp.Concatenate[tp.Any, P], tuple[tp.Any, A]]],
        arg: Numbers,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[jax.Array, A]: ...
    @tp.overload
    def __call__(
        self: TreeGradAux[tp.Callable[tp.Concatenate[tp.Any, P], tuple[tp.Any, A]]],
        arg: T,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[T, A]: ...
    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Differentiate."""


class TreeValueAndGrad(Filtered[..., tp.Any], tp.Generic[F_co]):
    """What `filter_value_and_grad(f)` returns."""

    @tp.overload
    def __call__(
        self: TreeValueAndGrad[tp.Callable[tp.Concatenate[tp.Any, P], R]],
        arg: Numbers,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[R, jax.Array]: ...
    @tp.overload
    def __call__(
        self: TreeValueAndGrad[tp.Callable[tp.Concatenate[tp.Any, P], R]],
        arg: T,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[R, T]: ...
    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Differentiate."""


class TreeValueAndGradAux(Filtered[..., tp.Any], tp.Generic[F_co]):
    """What `filter_value_and_grad(f, has_aux=True)` returns."""

    @tp.overload
    def __call__(
        self: TreeValueAndGradAux[tp.Callable[tp.Concatenate[tp.Any, P], tuple[R, A]]],
        arg: Numbers,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[tuple[R, A], jax.Array]: ...
    @tp.overload
    def __call__(
        self: TreeValueAndGradAux[tp.Callable[tp.Concatenate[tp.Any, P], tuple[R, A]]],
        arg: T,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[tuple[R, A], T]: ...
    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Differentiate."""
