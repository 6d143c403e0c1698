"""What several families of layers share: argument types, size checks, and the products themselves.

The products come in two forms.  Under a JAX transform a layer issues plain `lax` operations, which
are the cheapest to trace.  Run eagerly it calls the same operations through `jax.jit`, whose
compiled dispatch costs a fraction of the Python dispatch of `lax`; the values are the same.
"""

from __future__ import annotations

import functools
import operator
import types
import typing as tp

import jax
import numpy as np
from jax import lax

from nnxlite._jax import is_tracing
from nnxlite.nn._names import layer_name
from nnxlite.nn.dtypes import Dtype
from nnxlite.variables import Variable

Metadata = tp.Mapping[str, tp.Any]
"""Keyword arguments for the Variable that holds a parameter."""

NO_METADATA: tp.Final[Metadata] = types.MappingProxyType({})

Precision = tp.Any
"""None, a name such as "highest", a `jax.lax.Precision`, a pair of these, or a dot algorithm."""

OutSharding = tp.Any
"""A `NamedSharding` or `PartitionSpec` for the output, or None."""

Axes = int | tp.Sequence[int]


def value_of(parameter: Variable[jax.Array] | None) -> jax.Array | None:
    """The array in an optional parameter."""
    return None if parameter is None else parameter[...]


class DotGeneralFn(tp.Protocol):
    """A replacement for `jax.lax.dot_general`, such as a quantised product."""

    def __call__(
        self,
        lhs: tp.Any,
        rhs: tp.Any,
        dimension_numbers: tp.Any,
        *,
        precision: Precision = None,
        out_sharding: OutSharding = None,
    ) -> jax.Array:
        """The product; gets `preferred_element_type` too where the layer was given one."""
        ...


class FrozenMapping(tp.Mapping[tp.Any, tp.Any]):
    """A hashable mapping, fit for a static attribute.

    >>> from nnxlite.nn._common import FrozenMapping
    >>> FrozenMapping({0: 5})
    FrozenMapping({0: 5})
    """

    __slots__ = ("_items",)

    def __init__(self, items: tp.Mapping[tp.Any, tp.Any] = NO_METADATA) -> None:
        self._items = dict(items)

    def __getitem__(self, key: tp.Any) -> tp.Any:
        return self._items[key]

    def __iter__(self) -> tp.Iterator[tp.Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenMapping({self._items!r})"


def check_size(layer: tp.Any, name: str, value: tp.Any) -> int:
    """`value` as a size: a whole number, zero or more; raises TypeError otherwise."""
    try:
        size = operator.index(value)
    except TypeError:
        size = -1
    if size < 0:
        raise TypeError(
            f"{layer_name(layer)}: `{name}` must be a whole number, zero or more, got {value!r}."
        )
    return size


def check_sizes(layer: tp.Any, name: str, values: Axes) -> tuple[int, ...]:
    """One size or several, as a tuple."""
    values = plain(values)
    if isinstance(values, tp.Sequence) and not isinstance(values, str):
        return tuple(check_size(layer, name, v) for v in values)
    return (check_size(layer, name, values),)


def as_tuple(values: Axes) -> tuple[int, ...]:
    """One axis or several, as a tuple."""
    values = plain(values)
    return tuple(values) if isinstance(values, tp.Sequence) else (values,)


def plain(values: tp.Any) -> tp.Any:
    """A NumPy array as a list of numbers; anything else as it is."""
    return values.tolist() if isinstance(values, np.ndarray) else values


def feature_mismatch(layer: tp.Any, inputs: tp.Any, kernel: tp.Any, name: str = "kernel") -> str:
    """The message for inputs whose last axis does not fit a parameter (its second-last axis)."""
    shape, expected = tuple(inputs.shape), kernel.shape[-2]
    found = f"{shape[-1]} on its last axis" if shape else "no axis at all"
    return (
        f"{layer_name(layer)} expects {expected} feature(s) on the last axis of its input: "
        f"`{name}` has shape {tuple(kernel.shape)}; got an input of shape {shape}, with {found}."
    )


def affine(
    dot_general: DotGeneralFn | None,
    lhs: jax.Array,
    rhs: jax.Array,
    bias: jax.Array | None,
    dimension_numbers: tp.Any,
    precision: Precision,
    preferred_element_type: Dtype | None,
    out_sharding: OutSharding,
) -> jax.Array:
    """The general product of two arrays, by `dot_general` or JAX's own, plus a bias."""
    if dot_general is None or dot_general is lax.dot_general:
        if out_sharding is None:
            compiled = _traced_affine if is_tracing() else _eager_affine
            return compiled(lhs, rhs, bias, dimension_numbers, precision, preferred_element_type)
        dot_general = lax.dot_general
    options: dict[str, tp.Any] = {}
    if preferred_element_type is not None:
        options["preferred_element_type"] = preferred_element_type
    y = dot_general(
        lhs,
        rhs,
        dimension_numbers,
        precision=precision,
        out_sharding=out_sharding,
        **options,
    )
    return add_bias(y, bias)


def _affine(
    lhs: jax.Array,
    rhs: jax.Array,
    bias: jax.Array | None,
    dimension_numbers: tp.Any,
    precision: tp.Any,
    element: tp.Any,
    rounded: bool = False,
) -> jax.Array:
    y = lax.dot_general(
        lhs, rhs, dimension_numbers, precision=precision, preferred_element_type=element
    )
    if bias is None:
        return y
    # Without the barrier a compiler may keep digits that the product's dtype does not have.
    return _add_bias(lax.optimization_barrier(y) if rounded else y, bias)


_eager_affine = jax.jit(functools.partial(_affine, rounded=True), static_argnums=(3, 4, 5))
_traced_affine = jax.jit(_affine, static_argnums=(3, 4, 5), inline=True)  # one step, traced once


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """`y + bias` along the last axes of `y`; `y` itself where there is no bias."""
    if bias is None:
        return y
    if is_tracing():
        return _add_bias(y, bias)
    return _eager_add_bias(y, bias)


def _add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    if bias.ndim < y.ndim:
        bias = lax.reshape(bias, (1,) * (y.ndim - bias.ndim) + bias.shape)
    return lax.add(y, bias) if y.dtype == bias.dtype else y + bias


_eager_add_bias = jax.jit(_add_bias)
