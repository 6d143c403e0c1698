"""What type checkers know of a Variable's operators, and of what it takes from its value.

A `Variable[jax.Array]` has the operators, methods and attributes of the array, with their parameters
and results; with a value of any other type their results are `Any`.  At run time this module is not
imported: `ArrayOperators` and `Variable.__getattr__` do the work.  A test compares the names.
"""

from __future__ import annotations

import typing as tp

import jax

from nnxlite.variables._operators import ArrayOperators

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
    """An operator of an array and anything that can be combined with it, Variables included."""
    return array + other


def unary(array: jax.Array, /) -> jax.Array:
    """An operator of one array."""
    return -array


Binary: tp.TypeAlias = Method[[tp.Any], jax.Array]
Unary: tp.TypeAlias = Method[[], jax.Array]


class ValueMembers(tp.Generic[T]):
    """The operators of `ArrayOperators`, and the members of an array."""

    # operators -------------------------------------------------------------------------------

    __add__: Binary = Method(binary)
    __sub__: Binary = Method(binary)
    __mul__: Binary = Method(binary)
    __truediv__: Binary = Method(binary)
    __floordiv__: Binary = Method(binary)
    __mod__: Binary = Method(binary)
    __matmul__: Binary = Method(binary)
    __lshift__: Binary = Method(binary)
    __rshift__: Binary = Method(binary)
    __and__: Binary = Method(binary)
    __or__: Binary = Method(binary)
    __xor__: Binary = Method(binary)
    __pow__: Binary = Method(binary)
    __radd__: Binary = Method(binary)
    __rsub__: Binary = Method(binary)
    __rmul__: Binary = Method(binary)
    __rtruediv__: Binary = Method(binary)
    __rfloordiv__: Binary = Method(binary)
    __rmod__: Binary = Method(binary)
    __rmatmul__: Binary = Method(binary)
    __rlshift__: Binary = Method(binary)
    __rrshift__: Binary = Method(binary)
    __rand__: Binary = Method(binary)
    __ror__: Binary = Method(binary)
    __rxor__: Binary = Method(binary)
    __rpow__: Binary = Method(binary)
    __lt__: Binary = Method(binary)
    __le__: Binary = Method(binary)
    __gt__: Binary = Method(binary)
    __ge__: Binary = Method(binary)
    __neg__: Unary = Method(unary)
    __pos__: Unary = Method(unary)
    __invert__: Unary = Method(unary)

    # Methods, as builtins ask for them by protocols, of which a descriptor is no part.

    @tp.overload  # type: ignore[override]
    def __eq__(self: ValueMembers[jax.Array], other: tp.Any) -> jax.Array: ...
    @tp.overload
    def __eq__(self, other: tp.Any) -> tp.Any: ...
    def __eq__(self, other: tp.Any) -> tp.Any: ...
    @tp.overload  # type: ignore[override]
    def __ne__(self: ValueMembers[jax.Array], other: tp.Any) -> jax.Array: ...
    @tp.overload
    def __ne__(self, other: tp.Any) -> tp.Any: ...
    def __ne__(self, other: tp.Any) -> tp.Any: ...
    @tp.overload
    def __divmod__(self: ValueMembers[jax.Array], other: tp.Any) -> tuple[jax.Array, jax.Array]: ...
    @tp.overload
    def __divmod__(self, other: tp.Any) -> tp.Any: ...
    def __divmod__(self, other: tp.Any) -> tp.Any: ...
    @tp.overload
    def __rdivmod__(
        self: ValueMembers[jax.Array], other: tp.Any
    ) -> tuple[jax.Array, jax.Array]: ...
    @tp.overload
    def __rdivmod__(self, other: tp.Any) -> tp.Any: ...
    def __rdivmod__(self, other: tp.Any) -> tp.Any: ...
    @tp.overload
    def __abs__(self: ValueMembers[jax.Array]) -> jax.Array: ...
    @tp.overload
    def __abs__(self) -> tp.Any: ...
    def __abs__(self) -> tp.Any: ...
    @tp.overload
    def __round__(self: ValueMembers[jax.Array], ndigits: int = 0) -> jax.Array: ...
    @tp.overload
    def __round__(self, ndigits: int = 0) -> tp.Any: ...
    def __round__(self, ndigits: int = 0) -> tp.Any: ...

    def __hash__(self) -> int: ...

    # methods and attributes ------------------------------------------------------------------

    all = Method(jax.Array.all)
    any = Method(jax.Array.any)
    argmax = Method(jax.Array.argmax)
    argmin = Method(jax.Array.argmin)
    argsort = Method(jax.Array.argsort)
    astype = Method(jax.Array.astype)
    block_until_ready = Method(lambda array: array.block_until_ready())
    clip = Method(jax.Array.clip)
    conj = Method(jax.Array.conj)
    cumprod = Method(jax.Array.cumprod)
    cumsum = Method(jax.Array.cumsum)
    devices = Method(lambda array: array.devices())
    diagonal = Method(jax.Array.diagonal)
    dot = Method(jax.Array.dot)
    flatten = Method(jax.Array.flatten)
    item = Method(jax.Array.item)
    max = Method(jax.Array.max)
    mean = Method(jax.Array.mean)
    min = Method(jax.Array.min)
    nonzero = Method(jax.Array.nonzero)
    prod = Method(jax.Array.prod)
    ravel = Method(jax.Array.ravel)
    repeat = Method(jax.Array.repeat)
    reshape = Method(jax.Array.reshape)
    round = Method(jax.Array.round)
    searchsorted = Method(jax.Array.searchsorted)
    sort = Method(jax.Array.sort)
    squeeze = Method(jax.Array.squeeze)
    std = Method(jax.Array.std)
    sum = Method(jax.Array.sum)
    swapaxes = Method(jax.Array.swapaxes)
    take = Method(jax.Array.take)
    tolist = Method(lambda array: array.tolist())
    trace = Method(jax.Array.trace)
    transpose = Method(jax.Array.transpose)
    var = Method(jax.Array.var)
    view = Method(jax.Array.view)

    T = Attribute(lambda array: array.T)
    at = Attribute(lambda array: array.at)
    dtype = Attribute(lambda array: array.dtype)
    imag = Attribute(lambda array: array.imag)
    itemsize = Attribute(lambda array: array.itemsize)
    mT = Attribute(lambda array: array.mT)
    nbytes = Attribute(lambda array: array.nbytes)
    ndim = Attribute(lambda array: array.ndim)
    real = Attribute(lambda array: array.real)
    sharding = Attribute(lambda array: array.sharding)
    size = Attribute(lambda array: array.size)
    weak_type = Attribute(lambda array: array.weak_type)


class Operators(ValueMembers[T], ArrayOperators[T]):
    """Both; of what both have, the first counts."""
