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

if tp.TYPE_CHECKING:
    from nnxlite.variables._members import Binary, Unary, ValueMembers
else:
    ValueMembers = tp.Generic

T = tp.TypeVar("T")
V = tp.TypeVar("V")
Operate: tp.TypeAlias = tp.Callable[[tp.Any, tp.Any], tp.Any]


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


def _binary(operate: Operate) -> Binary:
    def method(self: tp.Any, other: tp.Any) -> tp.Any:
        return operate(self.get_value(), unwrap(other))

    return _named(method, "", operate)


def _unary(operate: tp.Callable[[tp.Any], tp.Any]) -> Unary:
    def method(self: tp.Any) -> tp.Any:
        return operate(self.get_value())

    return _named(method, "", operate)


def _reflected(operate: Operate) -> Binary:
    def method(self: tp.Any, other: tp.Any) -> tp.Any:
        return operate(unwrap(other), self.get_value())

    return _named(method, "r", operate)


def _in_place(operate: Operate) -> tp.Callable[[V, tp.Any], V]:
    def method(self: tp.Any, other: tp.Any) -> tp.Any:
        self.set_value(operate(self.get_value(), unwrap(other)))
        return self

    return _named(method, "i", operate)


def _named(method: tp.Any, prefix: str, operate: tp.Any) -> tp.Any:
    """A method under the name by which Python calls it, in tracebacks too."""
    name = f"__{prefix}{operate.__name__.strip('_')}__"
    method.__name__, method.__qualname__ = name, f"ArrayOperators.{name}"
    method.__code__ = method.__code__.replace(co_name=name, co_qualname=method.__qualname__)
    return method


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

    # arithmetic and bitwise ------------------------------------------------------------------

    __add__ = _binary(operator.add)
    __sub__ = _binary(operator.sub)
    __mul__ = _binary(operator.mul)
    __truediv__ = _binary(operator.truediv)
    __floordiv__ = _binary(operator.floordiv)
    __mod__ = _binary(operator.mod)
    __matmul__ = _binary(operator.matmul)
    __lshift__ = _binary(operator.lshift)
    __rshift__ = _binary(operator.rshift)
    __and__ = _binary(operator.and_)
    __or__ = _binary(operator.or_)
    __xor__ = _binary(operator.xor)

    def __divmod__(self, other: tp.Any) -> tuple[T, T]:
        return divmod(self.get_value(), unwrap(other))

    def __pow__(self, other: tp.Any, modulo: tp.Any = None) -> T:
        return pow(self.get_value(), unwrap(other), unwrap(modulo))

    # the same with the operands reflected ----------------------------------------------------

    __radd__ = _reflected(operator.add)
    __rsub__ = _reflected(operator.sub)
    __rmul__ = _reflected(operator.mul)
    __rtruediv__ = _reflected(operator.truediv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __rmod__ = _reflected(operator.mod)
    __rmatmul__ = _reflected(operator.matmul)
    __rlshift__ = _reflected(operator.lshift)
    __rrshift__ = _reflected(operator.rshift)
    __rand__ = _reflected(operator.and_)
    __ror__ = _reflected(operator.or_)
    __rxor__ = _reflected(operator.xor)

    def __rdivmod__(self, other: tp.Any) -> tuple[T, T]:
        return divmod(unwrap(other), self.get_value())

    def __rpow__(self, other: tp.Any, modulo: tp.Any = None) -> T:
        return pow(unwrap(other), self.get_value(), unwrap(modulo))

    # in place: the value is replaced, the Variable stays -------------------------------------

    __iadd__ = _in_place(operator.add)
    __isub__ = _in_place(operator.sub)
    __imul__ = _in_place(operator.mul)
    __itruediv__ = _in_place(operator.truediv)
    __ifloordiv__ = _in_place(operator.floordiv)
    __imod__ = _in_place(operator.mod)
    __imatmul__ = _in_place(operator.matmul)
    __ilshift__ = _in_place(operator.lshift)
    __irshift__ = _in_place(operator.rshift)
    __iand__ = _in_place(operator.and_)
    __ior__ = _in_place(operator.or_)
    __ixor__ = _in_place(operator.xor)
    __ipow__ = _in_place(operator.pow)

    # comparison, elementwise -----------------------------------------------------------------

    __eq__: Binary = _binary(operator.eq)  # type: ignore[assignment]
    __ne__: Binary = _binary(operator.ne)  # type: ignore[assignment]
    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)
    __hash__ = object.__hash__  # by identity: the value may change

    # one operand -----------------------------------------------------------------------------

    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __invert__ = _unary(operator.invert)
    __trunc__ = _unary(math.trunc)
    __floor__ = _unary(math.floor)
    __ceil__ = _unary(math.ceil)

    def __abs__(self) -> T:
        return abs(self.get_value())

    def __round__(self, ndigits: int = 0) -> T:
        return round(self.get_value(), ndigits)

    # conversion ------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        value = self.get_value()
        return len(value) > 0 if getattr(value, "ndim", 0) else bool(value)

    def __int__(self) -> int:
        return int(self.get_value())

    def __float__(self) -> float:
        return float(self.get_value())

    def __complex__(self) -> complex:
        return complex(self.get_value())

    def __index__(self) -> int:
        return operator.index(self.get_value())

    def __format__(self, spec: str) -> str:
        return format(self.get_value(), spec) if spec else str(self)

    def __array__(self, dtype: tp.Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.get_value(), dtype=dtype, copy=copy)

    def __jax_array__(self) -> tp.Any:
        value = self.get_value()
        return value if isinstance(value, jax.Array) else jnp.asarray(value)

    # sequence --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.get_value())

    def __iter__(self) -> tp.Iterator[tp.Any]:
        return iter(self.get_value())

    def __reversed__(self) -> tp.Iterator[tp.Any]:
        return reversed(self.get_value())

    def __contains__(self, item: tp.Any) -> bool:
        return unwrap(item) in self.get_value()
