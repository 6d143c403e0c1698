"""What type checkers know of a Variable's operators, and of what it takes from its value.

A `Variable[jax.Array]` has the operators of the array, and the methods and attributes that programs use
most, with their parameters and results; further ones, and those of a value of any other type, are `Any`.
At run time this module is not imported: `Variable.__getattr__` reads the members.
"""

from __future__ import annotations

import typing as tp

import jax

T = tp.TypeVar("T")
P = tp.ParamSpec("P")
R = tp.TypeVar("R")


class Method(tp.Generic[P, R]):
    """A method of the value: `Method(jax.Array.sum)`."""

    def __init__(self, method: tp.Callable[tp.Concatenate[jax.Array, P], R]) -> None: ...

    @tp.overload
    def __get__(
        self, variable: ValueMembers[jax.Array], owner: tp.Any = None
    ) -> tp.Callable[P, R]: ...
    @tp.overload
    def __get__(self, variable: ValueMembers[tp.Any], owner: tp.Any = None) -> tp.Any: ...
    def __get__(self, variable: tp.Any, owner: tp.Any = None) -> tp.Any: ...


class Attribute(tp.Generic[R]):
    """An attribute of the value: `Attribute(lambda array: array.T)`."""

    def __init__(self, read: tp.Callable[[jax.Array], R]) -> None: ...

    @tp.overload
    def __get__(self, variable: ValueMembers[jax.Array], owner: tp.Any = None) -> R: ...
    @tp.overload
    def __get__(self, variable: ValueMembers[tp.Any], owner: tp.Any = None) -> tp.Any: ...
    def __get__(self, variable: tp.Any, owner: tp.Any = None) -> tp.Any: ...


def binary(array: jax.Array, other: tp.Any, /) -> jax.Array:
    """An operator of the value and anything that can be combined with it, Variables included."""
    raise NotImplementedError


def unary(array: jax.Array, /) -> jax.Array:
    """An operator of the value alone."""
    raise NotImplementedError


class ValueMembers(tp.Generic[T]):
    """Methods and attributes of an array that programs use much; the type of any other is Any."""

    argmax = Method(jax.Array.argmax)
    astype = Method(jax.Array.astype)
    clip = Method(jax.Array.clip)
    dot = Method(jax.Array.dot)
    flatten = Method(jax.Array.flatten)
    item = Method(jax.Array.item)
    max = Method(jax.Array.max)
    mean = Method(jax.Array.mean)
    min = Method(jax.Array.min)
    reshape = Method(jax.Array.reshape)
    round = Method(jax.Array.round)
    squeeze = Method(jax.Array.squeeze)
    std = Method(jax.Array.std)
    sum = Method(jax.Array.sum)
    transpose = Method(jax.Array.transpose)
    var = Method(jax.Array.var)

    T = Attribute(lambda array: array.T)
    at = Attribute(lambda array: array.at)
    dtype = Attribute(lambda array: array.dtype)
    ndim = Attribute(lambda array: array.ndim)
    sharding = Attribute(lambda array: array.sharding)
    size = Attribute(lambda array: array.size)

    # operators

    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = Method(binary)
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = Method(binary)
    __matmul__ = __lshift__ = __rshift__ = __and__ = __or__ = __xor__ = Method(binary)
    __rmatmul__ = __rlshift__ = __rrshift__ = __rand__ = __ror__ = __rxor__ = Method(binary)
    __lt__ = __le__ = __gt__ = __ge__ = Method(binary)
    __eq__: Method[[tp.Any], jax.Array] = Method(binary)  # type: ignore[assignment]
    __ne__: Method[[tp.Any], jax.Array] = Method(binary)  # type: ignore[assignment]
    __hash__ = object.__hash__
    __neg__ = __pos__ = __invert__ = __trunc__ = __floor__ = __ceil__ = Method(unary)

    def __int__(self) -> int: ...

    def __float__(self) -> float: ...

    def __complex__(self) -> complex: ...

    def __index__(self) -> int: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> tp.Iterator[tp.Any]: ...

    def __reversed__(self) -> tp.Iterator[tp.Any]: ...

    def _in_place(self, other: tp.Any) -> tp.Self: ...

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = _in_place
    __imatmul__ = __ilshift__ = __irshift__ = __iand__ = __ior__ = __ixor__ = __ipow__ = _in_place
