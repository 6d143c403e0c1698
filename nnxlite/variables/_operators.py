"""Every operator of an array, for classes that hold a value: `ArrayOperators`.

An expression such as `x @ layer.kernel + layer.bias` means the same whether its operands are
arrays or Variables that hold arrays: each operator reads the value (`get_value`), unwraps the other
operand if that is a Variable too, and lets Python combine the two.  As the reference has it, the
truth of a Variable is that of a scalar, and otherwise whether it is longer than zero (`if bias:`);
and `round` without digits keeps the dtype.  Comparisons are elementwise, as
those of arrays are; hashing goes by identity, since the value may change.

In-place forms (`variable += x`) write the new value (`set_value`) and give back the variable
itself: the name stays bound to the same Variable, and everything that shares it sees the change.
"""

from __future__ import annotations

import copy as copy_lib
import math
import operator
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.jax import same_form

T = tp.TypeVar("T")
R = tp.TypeVar("R")

if tp.TYPE_CHECKING:

    class Member(tp.Generic[R]):
        """What type checkers know of a member of the value: its type for an array, else Any."""

        def __init__(self, read: tp.Callable[[jax.Array], R]) -> None: ...

        @tp.overload
        def __get__(self, variable: ValueMembers[jax.Array], owner: tp.Any = None) -> R: ...
        @tp.overload
        def __get__(self, variable: ValueMembers[tp.Any], owner: tp.Any = None) -> tp.Any: ...
        def __get__(self, variable: tp.Any, owner: tp.Any = None) -> tp.Any: ...

    def binary(array: jax.Array) -> tp.Callable[[tp.Any], jax.Array]:
        """An operator of the value and anything that can be combined with it, Variables included."""
        ...

    class ValueMembers(tp.Generic[T]):
        """Operators, and the members that programs use most; `Variable.__getattr__` reads the others."""

        astype = Member(lambda array: array.astype)
        max = Member(lambda array: array.max)
        mean = Member(lambda array: array.mean)
        min = Member(lambda array: array.min)
        reshape = Member(lambda array: array.reshape)
        sum = Member(lambda array: array.sum)

        T = Member(lambda array: array.T)
        at = Member(lambda array: array.at)
        dtype = Member(lambda array: array.dtype)
        ndim = Member(lambda array: array.ndim)
        sharding = Member(lambda array: array.sharding)
        size = Member(lambda array: array.size)

        __add__ = __sub__ = __mul__ = __truediv__ = Member(binary)
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __floordiv__ = __mod__ = __matmul__ = (
            __add__
        )
        __rfloordiv__ = __rmod__ = __rmatmul__ = __lshift__ = __rshift__ = __and__ = __or__ = (
            __add__
        )
        __rlshift__ = __rrshift__ = __rand__ = __ror__ = __xor__ = __rxor__ = __add__
        __lt__ = __le__ = __gt__ = __ge__ = __add__
        __eq__: Member[tp.Callable[[tp.Any], jax.Array]] = Member(binary)  # type: ignore[assignment]
        __ne__: Member[tp.Callable[[tp.Any], jax.Array]] = Member(binary)  # type: ignore[assignment]
        __hash__ = object.__hash__
        __neg__ = __pos__ = __invert__ = Member(lambda array: array.__neg__)
        __trunc__ = __floor__ = __ceil__ = __neg__

        def __int__(self) -> int: ...

        def __float__(self) -> float: ...

        def __complex__(self) -> complex: ...

        def __index__(self) -> int: ...

        def __len__(self) -> int: ...

        def __iter__(self) -> tp.Iterator[tp.Any]: ...

        def __reversed__(self) -> tp.Iterator[tp.Any]: ...

        def _in_place(self, other: tp.Any) -> tp.Self: ...

        __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = _in_place
        __imatmul__ = __ilshift__ = __irshift__ = __iand__ = __ior__ = __ixor__ = _in_place
        __ipow__ = _in_place

else:
    ValueMembers = tp.Generic


def unwrap(operand: tp.Any) -> tp.Any:
    """The value of a Variable; anything else as it is.

    >>> from nnxlite.variables import Param
    >>> from nnxlite.variables._operators import unwrap
    >>> unwrap(Param(3)), unwrap(4)
    (3, 4)
    """
    return operand.get_value() if isinstance(operand, ArrayOperators) else operand


def replace_at(value: tp.Any, index: tp.Any, new: tp.Any) -> tp.Any:
    """`value` with the part at `index` replaced; never edits `value` itself.

    An array keeps shape and dtype; at `...`, any other value is replaced as a whole.
    """
    if index is Ellipsis and same_form(value, new):
        return new
    if isinstance(value, jax.Array):
        return value.at[index].set(new)
    if index is Ellipsis and not isinstance(value, np.ndarray):
        return new
    changed = copy_lib.copy(value)
    changed[index] = new
    return changed


class ArrayOperators(ValueMembers[T]):
    """The operators of an array, in terms of `get_value` and `set_value`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> bias = nnx.Param(jnp.array([1.0, 2.0]))
    >>> 2 * bias + bias
    Array([3., 6.], dtype=float32)
    >>> same = bias
    >>> bias += 1
    >>> same is bias, same.value
    (True, Array([2., 3.], dtype=float32))
    """

    __slots__ = ()

    __array_priority__ = 100  # as a jax.Array: `numpy_array + variable` comes to our `__radd__`

    if tp.TYPE_CHECKING:

        def get_value(self, *, index: tp.Any = ...) -> tp.Any: ...

        def set_value(self, value: tp.Any, *, index: tp.Any = ...) -> None: ...

        def __abs__(self) -> T: ...

        def __divmod__(self, other: tp.Any) -> tuple[T, T]: ...

        def __rdivmod__(self, other: tp.Any) -> tuple[T, T]: ...

    def __pow__(self, other: tp.Any, modulo: tp.Any = None) -> T:
        return pow(self.get_value(), unwrap(other), unwrap(modulo))

    def __rpow__(self, other: tp.Any, modulo: tp.Any = None) -> T:
        return pow(unwrap(other), self.get_value(), unwrap(modulo))

    def __round__(self, ndigits: int = 0) -> T:
        return round(self.get_value(), ndigits)

    def __bool__(self) -> bool:
        value = self.get_value()
        return len(value) > 0 if getattr(value, "ndim", 0) else bool(value)

    def __contains__(self, item: tp.Any) -> bool:
        return unwrap(item) in self.get_value()

    def __format__(self, spec: str) -> str:
        return format(self.get_value(), spec) if spec else str(self)

    def __array__(self, dtype: tp.Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.get_value(), dtype=dtype, copy=copy)

    def __jax_array__(self) -> tp.Any:
        value = self.get_value()
        return value if isinstance(value, jax.Array) else jnp.asarray(value)


# The other operators: `ValueMembers` declares them, with their types.

_Operators: tp.TypeAlias = tuple[tp.Callable[..., tp.Any], ...]

_UNARY: _Operators = (
    *(operator.neg, operator.pos, operator.invert, operator.abs, operator.index),
    *(math.trunc, math.floor, math.ceil, int, float, complex, len, iter, reversed),
)
_COMPARING = operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge
_BINARY: _Operators = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.matmul, operator.lshift, operator.rshift),
    *(operator.and_, operator.or_, operator.xor),
)


def _unary(operate: tp.Any) -> tp.Any:
    def method(self: tp.Any) -> tp.Any:
        return operate(self.get_value())

    return method


def _binary(operate: tp.Any) -> tp.Any:
    def method(self: tp.Any, other: tp.Any) -> tp.Any:
        return operate(self.get_value(), unwrap(other))

    return method


def _reflected(operate: tp.Any) -> tp.Any:
    def method(self: tp.Any, other: tp.Any) -> tp.Any:
        return operate(unwrap(other), self.get_value())

    return method


def _in_place(operate: tp.Any) -> tp.Any:
    """The value is replaced, the Variable stays."""

    def method(self: tp.Any, other: tp.Any) -> tp.Any:
        self.set_value(operate(self.get_value(), unwrap(other)))
        return self

    return method


def _define(prefix: str, form: tp.Callable[[tp.Any], tp.Any], operators: _Operators) -> None:
    """Define methods under the names by which Python calls them."""
    for operate in operators:
        method, name = form(operate), f"__{prefix}{operate.__name__.strip('_')}__"
        method.__name__, method.__qualname__ = name, f"ArrayOperators.{name}"
        setattr(ArrayOperators, name, method)


_define("", _unary, _UNARY)
_define("", _binary, (*_BINARY, *_COMPARING, divmod))
_define("r", _reflected, (*_BINARY, divmod))
_define("i", _in_place, (*_BINARY, operator.pow))
