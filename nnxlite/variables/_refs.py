"""Array references: arrays that can be written in place and shared, JAX's own `Ref`.

A reference may be wherever an array may: in an attribute, in a plain container, inside a
Variable (`ref=True`).  Two places that hold one reference share its content, inside transforms too.
`var_defaults` makes references the default of Variables.
"""

from __future__ import annotations

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.config import REF_VARIABLES, switch
from nnxlite._base.errors import short_type
from nnxlite._base.jax import Ref, is_ref, new_ref

ArrayRef = Ref
"""The class of array references; `isinstance(x, ArrayRef)` is true for traced ones as well."""


def array_ref(value: tp.Any) -> tp.Any:
    """A fresh array reference with the content of an array or a number.

    Reading and writing go through indexing: `ref[...]`, `ref[0] = 1.0`.

    Args:
        value: an array or a number.

    Returns:
        A reference of the same shape and dtype.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> ref = nnx.array_ref(jnp.zeros(2))
    >>> ref[0] = 1.0
    >>> ref[...]
    Array([1., 0.], dtype=float32)
    """
    return new_ref(jnp.asarray(value))


def is_array_ref(value: tp.Any) -> bool:
    """Whether a value is an array reference.

    Args:
        value: anything.

    Returns:
        A bool.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.is_array_ref(nnx.array_ref(1.0)), nnx.is_array_ref(jnp.array(1.0))
    (True, False)
    """
    return is_ref(value)


def new_ref_of(cls: type, value: tp.Any) -> tp.Any:
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        raise TypeError(
            f"{cls.__name__}(ref=True) holds its value in a JAX array reference, which takes an "
            f"array or a number, got {short_type(value)}."
        )
    return new_ref(jnp.asarray(value))


def refuse_hijax(what: str) -> tp.NoReturn:
    raise ValueError(
        f"{what}(hijax=True) is not available: hijax Variables are an experiment of JAX. Use "
        "ref=True for a Variable that lives in a JAX array reference."
    )


@dataclasses.dataclass(frozen=True)
class VarDefaults(tp.Mapping[str, bool]):
    """The defaults of `Variable(hijax=..., ref=...)`; a mapping as well.

    Args:
        hijax: accepted for compatibility; False.
        ref: whether new Variables hold their values in array references.

    >>> from nnxlite.variables import VarDefaults
    >>> VarDefaults(ref=True)["ref"], dict(VarDefaults())
    (True, {'hijax': False, 'ref': False})
    """

    hijax: bool = False
    ref: bool = False

    def __getitem__(self, name: str) -> bool:
        return dataclasses.asdict(self)[name]

    def __iter__(self) -> tp.Iterator[str]:
        return iter(("hijax", "ref"))

    def __len__(self) -> int:
        return 2


class VarDefaultsContext(switch):
    """What `var_defaults(...)` gives: leaving its `with` block brings the former defaults back.

    As a decorator it sets the defaults for each call of the function, and for nothing else.
    """

    _setting = REF_VARIABLES

    def __enter__(self) -> VarDefaults:
        super().__enter__()
        return var_defaults()


@tp.overload
def var_defaults() -> VarDefaults: ...  # pyright: ignore[reportOverlappingOverload]
@tp.overload
def var_defaults(*, hijax: bool | None = ..., ref: bool | None = ...) -> VarDefaultsContext: ...
def var_defaults(
    *, hijax: bool | None = None, ref: bool | None = None
) -> VarDefaults | VarDefaultsContext:
    """Set the defaults of `Variable(ref=...)`, at once, for a `with` block or a function; or read them.

    They hold for the present context: other threads and tasks have their own.

    Args:
        hijax: accepted for compatibility; True raises ValueError.
        ref: the new default of `ref`.

    Returns:
        Without arguments the `VarDefaults` in force, otherwise a context manager, which is also a
        decorator.

    >>> import nnxlite as nnx
    >>> with nnx.var_defaults(ref=True):
    ...     v = nnx.Param(nnx.initializers.ones_init()(None, (2,)))
    >>> v.ref, nnx.var_defaults().ref
    (True, False)
    >>> @nnx.var_defaults(ref=True)
    ... def make():
    ...     return nnx.Param(1.0).ref
    >>> make(), nnx.var_defaults().ref
    (True, False)
    """
    if hijax is None and ref is None:
        return VarDefaults(ref=REF_VARIABLES.get())
    if hijax:
        refuse_hijax("var_defaults")
    return VarDefaultsContext(bool(REF_VARIABLES.given(ref)))
