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

import math
import operator
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

T = tp.TypeVar("T")


def unwrap(operand: tp.Any) -> tp.Any:
    """The value of a Variable; anything else as it is.

    >>> from nnxlite.variables import Param
    >>> from nnxlite.variables._operators import unwrap
    >>> unwrap(Param(3)), unwrap(4)
    (3, 4)
    """
    return operand.get_value() if isinstance(operand, ArrayOperators) else operand


class ArrayOperators(tp.Generic[T]):
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

    def __add__(self, other: tp.Any) -> tp.Any:
        return self.get_value() + unwrap(other)

    def __sub__(self, other: tp.Any) -> tp.Any:
        return self.get_value() - unwrap(other)

    def __mul__(self, other: tp.Any) -> tp.Any:
        return self.get_value() * unwrap(other)

    def __truediv__(self, other: tp.Any) -> tp.Any:
        return self.get_value() / unwrap(other)

    def __floordiv__(self, other: tp.Any) -> tp.Any:
        return self.get_value() // unwrap(other)

    def __mod__(self, other: tp.Any) -> tp.Any:
        return self.get_value() % unwrap(other)

    def __matmul__(self, other: tp.Any) -> tp.Any:
        return self.get_value() @ unwrap(other)

    def __lshift__(self, other: tp.Any) -> tp.Any:
        return self.get_value() << unwrap(other)

    def __rshift__(self, other: tp.Any) -> tp.Any:
        return self.get_value() >> unwrap(other)

    def __and__(self, other: tp.Any) -> tp.Any:
        return self.get_value() & unwrap(other)

    def __or__(self, other: tp.Any) -> tp.Any:
        return self.get_value() | unwrap(other)

    def __xor__(self, other: tp.Any) -> tp.Any:
        return self.get_value() ^ unwrap(other)

    def __pow__(self, other: tp.Any, modulo: tp.Any = None) -> tp.Any:
        return pow(self.get_value(), unwrap(other), unwrap(modulo))

    def __divmod__(self, other: tp.Any) -> tp.Any:
        return divmod(self.get_value(), unwrap(other))

    # the same with the operands reflected ----------------------------------------------------

    def __radd__(self, other: tp.Any) -> tp.Any:
        return unwrap(other) + self.get_value()

    def __rsub__(self, other: tp.Any) -> tp.Any:
        return unwrap(other) - self.get_value()

    def __rmul__(self, other: tp.Any) -> tp.Any:
        return unwrap(other) * self.get_value()

    def __rtruediv__(self, other: tp.Any) -> tp.Any:
        return unwrap(other) / self.get_value()

    def __rfloordiv__(self, other: tp.Any) -> tp.Any:
        return unwrap(other) // self.get_value()

    def __rmod__(self, other: tp.Any) -> tp.Any:
        return unwrap(other) % self.get_value()

    def __rmatmul__(self, other: tp.Any) -> tp.Any:
        return unwrap(other) @ self.get_value()

    def __rlshift__(self, other: tp.Any) -> tp.Any:
        return unwrap(other) << self.get_value()

    def __rrshift__(self, other: tp.Any) -> tp.Any:
        return unwrap(other) >> self.get_value()

    def __rand__(self, other: tp.Any) -> tp.Any:
        return unwrap(other) & self.get_value()

    def __ror__(self, other: tp.Any) -> tp.Any:
        return unwrap(other) | self.get_value()

    def __rxor__(self, other: tp.Any) -> tp.Any:
        return unwrap(other) ^ self.get_value()

    def __rpow__(self, other: tp.Any, modulo: tp.Any = None) -> tp.Any:
        return pow(unwrap(other), self.get_value(), unwrap(modulo))

    def __rdivmod__(self, other: tp.Any) -> tp.Any:
        return divmod(unwrap(other), self.get_value())

    # in place: the value is replaced, the Variable stays -------------------------------------

    def __iadd__(self, other: tp.Any) -> tp.Self:
        self.set_value(self.get_value() + unwrap(other))
        return self

    def __isub__(self, other: tp.Any) -> tp.Self:
        self.set_value(self.get_value() - unwrap(other))
        return self

    def __imul__(self, other: tp.Any) -> tp.Self:
        self.set_value(self.get_value() * unwrap(other))
        return self

    def __itruediv__(self, other: tp.Any) -> tp.Self:
        self.set_value(self.get_value() / unwrap(other))
        return self

    def __ifloordiv__(self, other: tp.Any) -> tp.Self:
        self.set_value(self.get_value() // unwrap(other))
        return self

    def __imod__(self, other: tp.Any) -> tp.Self:
        self.set_value(self.get_value() % unwrap(other))
        return self

    def __imatmul__(self, other: tp.Any) -> tp.Self:
        self.set_value(self.get_value() @ unwrap(other))
        return self

    def __ilshift__(self, other: tp.Any) -> tp.Self:
        self.set_value(self.get_value() << unwrap(other))
        return self

    def __irshift__(self, other: tp.Any) -> tp.Self:
        self.set_value(self.get_value() >> unwrap(other))
        return self

    def __iand__(self, other: tp.Any) -> tp.Self:
        self.set_value(self.get_value() & unwrap(other))
        return self

    def __ior__(self, other: tp.Any) -> tp.Self:
        self.set_value(self.get_value() | unwrap(other))
        return self

    def __ixor__(self, other: tp.Any) -> tp.Self:
        self.set_value(self.get_value() ^ unwrap(other))
        return self

    def __ipow__(self, other: tp.Any) -> tp.Self:
        self.set_value(self.get_value() ** unwrap(other))
        return self

    # comparison, elementwise -----------------------------------------------------------------

    def __eq__(self, other: tp.Any) -> tp.Any:
        return self.get_value() == unwrap(other)

    def __ne__(self, other: tp.Any) -> tp.Any:
        return self.get_value() != unwrap(other)

    def __lt__(self, other: tp.Any) -> tp.Any:
        return self.get_value() < unwrap(other)

    def __le__(self, other: tp.Any) -> tp.Any:
        return self.get_value() <= unwrap(other)

    def __gt__(self, other: tp.Any) -> tp.Any:
        return self.get_value() > unwrap(other)

    def __ge__(self, other: tp.Any) -> tp.Any:
        return self.get_value() >= unwrap(other)

    __hash__ = object.__hash__  # by identity: the value may change

    # one operand -----------------------------------------------------------------------------

    def __neg__(self) -> tp.Any:
        return -self.get_value()

    def __pos__(self) -> tp.Any:
        return +self.get_value()

    def __invert__(self) -> tp.Any:
        return ~self.get_value()

    def __abs__(self) -> tp.Any:
        return abs(self.get_value())

    def __round__(self, ndigits: int = 0) -> tp.Any:
        return round(self.get_value(), ndigits)

    def __trunc__(self) -> tp.Any:
        return math.trunc(self.get_value())

    def __floor__(self) -> tp.Any:
        return math.floor(self.get_value())

    def __ceil__(self) -> tp.Any:
        return math.ceil(self.get_value())

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
