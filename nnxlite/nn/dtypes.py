"""The dtype a layer computes in.

A layer has two dtypes: `param_dtype`, in which its parameters are stored, and `dtype`, in which it
computes.  If `dtype` is None, the layer computes in the dtype that inputs and parameters promote
to, and always in a floating or complex one.  `promote_dtype` casts the arrays of a layer; every
layer accepts another function for this (its argument `promote_dtype`).
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp

Dtype = jax.typing.DTypeLike


class PromoteDtypeFn(tp.Protocol):
    """A function that casts arrays (None stays None) to the dtype of the computation."""

    def __call__(
        self, args: tuple[tp.Any, ...], /, *, dtype: tp.Any = None, inexact: bool = True
    ) -> tuple[tp.Any, ...]:
        """The arrays, in the same order, in one dtype."""
        ...


def canonicalize_dtype(*args: tp.Any, dtype: Dtype | None = None, inexact: bool = True) -> Dtype:
    """The dtype to compute in: `dtype` if given, else what `args` promote to (None is skipped).

    With `inexact`, integers and booleans promote to a floating dtype, and a given `dtype` that is
    neither floating nor complex raises ValueError.

    >>> import jax.numpy as jnp
    >>> from nnxlite.nn.dtypes import canonicalize_dtype
    >>> canonicalize_dtype(jnp.ones(2, jnp.bfloat16), None, jnp.ones(2))
    dtype('float32')
    >>> canonicalize_dtype(jnp.arange(2))
    dtype('float32')
    """
    if dtype is None:
        common = jnp.result_type(*[jnp.asarray(x) for x in args if x is not None])
        if inexact and not jnp.issubdtype(common, jnp.inexact):
            return jnp.promote_types(jnp.float32, common)
        return common
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"Dtype must be inexact: a layer computes in a floating or complex dtype, got "
            f"{jnp.dtype(dtype).name!r}. Leave `dtype` out to let inputs and parameters decide."
        )
    return dtype


def promote_dtype(
    args: tp.Iterable[tp.Any], /, *, dtype: Dtype | None = None, inexact: bool = True
) -> tuple[tp.Any, ...]:
    """The arrays `args`, in the dtype of `canonicalize_dtype`; None stays None.

    Arrays that already have this dtype are returned unchanged.

    >>> import jax.numpy as jnp
    >>> from nnxlite.nn.dtypes import promote_dtype
    >>> x, none = promote_dtype((jnp.ones(2), None), dtype=jnp.bfloat16)
    >>> x.dtype, none
    (dtype(bfloat16), None)
    """
    if not isinstance(args, tp.Iterable):
        raise TypeError(
            f"promote_dtype takes a tuple of arrays (or None), as in promote_dtype((x, kernel)); got "
            f"{args!r} alone."
        )
    arrays = tuple(args)
    if _agree(arrays, dtype, inexact):
        return arrays
    target = canonicalize_dtype(*arrays, dtype=dtype, inexact=inexact)
    return tuple(None if x is None else jnp.asarray(x, target) for x in arrays)


default_promote_dtype = promote_dtype
"""`promote_dtype` where a parameter of this name hides it: the default of that parameter."""


def _agree(arrays: tuple[tp.Any, ...], dtype: tp.Any, inexact: bool) -> bool:
    """Whether all are JAX arrays of the requested dtype, none weakly typed: no cast is needed."""
    common = dtype
    for x in arrays:
        if x is None:
            continue
        if not isinstance(x, _Array) or x.weak_type:
            return False
        if common is None:
            common = x.dtype
        elif x.dtype is not common and x.dtype != common:
            return False
    return common is not None and (not inexact or jnp.issubdtype(common, jnp.inexact))


_Array: tp.Any = jax.Array  # a module global is read faster, and every call of a layer does so
