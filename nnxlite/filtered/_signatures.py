"""Types of `filter_grad` and `filter_value_and_grad` for type checkers.

The gradient has the type of the first argument of the call.
"""

from __future__ import annotations

import typing as tp

from jax import Array

from nnxlite._base.typing import Numbers, P, R
from nnxlite.transforms._wrapper import Transform

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
