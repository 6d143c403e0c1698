"""Linear maps over one or several axes: `Linear`, `LinearGeneral` and `Einsum`.

All three contract axes of the input with axes of a learned kernel and add a learned bias along the
new axes:

    Linear         the last axis of the input, with a matrix
    LinearGeneral  any axes, into any number of new ones, with separate weights along batch axes
    Einsum         whatever an einsum equation says

The kernel is stored in `param_dtype`; the product is computed in `dtype`, or, if that is None, in
what input and parameters promote to.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing as tp

import jax
import jax.numpy as jnp
from jax import lax

from nnxlite.nn import _common, initializers
from nnxlite.nn._common import NO_METADATA, Arguments, Axes, Metadata, OutSharding, Precision
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn, default_promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.lora_kernel import LoRAKernel, Product, add_adapter, weight_of
from nnxlite.objects._module import layer_name, note_layer
from nnxlite.objects._rngs import Rngs
from nnxlite.variables._definition import VariableMetadata

__all__ = ["Einsum", "Linear", "LinearGeneral"]

default_kernel_init: tp.Final[Initializer] = initializers.lecun_normal()
default_bias_init: tp.Final[Initializer] = initializers.zeros_init()

NO_AXES: tp.Final[tp.Mapping[int, int]] = types.MappingProxyType({})


class Linear(_common.AffineLayer):
    """A linear map of the last axis: `y = x @ kernel + bias`.

    Maps an array of shape `(..., in_features)` to `(..., out_features)`.

    Args:
        in_features, out_features: sizes of the last axis before and after.
        use_bias: whether there is a bias.
        dtype: dtype of the computation; None: what input and parameters promote to.
        param_dtype: dtype of the parameters.
        precision: precision of the product, as in `jax.lax.dot_general`.
        kernel_init, bias_init: initializers of kernel and bias.
        dot_general: the product to use in place of `jax.lax.dot_general`.
        promote_dtype: casts input, kernel and bias to the dtype of the computation.
        preferred_element_type: dtype the product accumulates in and returns.
        rngs: the stream "params" is drawn once for the kernel, then once for the bias.
        kernel_metadata, bias_metadata: metadata of the parameters, such as a sharding.

    Attributes:
        kernel: Param of shape (in_features, out_features).
        bias: Param of shape (out_features,), or None.

    Raises:
        TypeError: for a size that is not a whole number, or an input of another size.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> layer.kernel.shape, layer.bias.shape, layer(jnp.ones((2, 3))).shape
    ((3, 4), (4,), (2, 4))
    """

    in_features: int
    out_features: int
    use_bias: bool
    dot_general: Product

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Precision = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        dot_general: Product = lax.dot_general,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        arguments = Arguments(self, locals())
        sizes = arguments.sizes("in_features", "out_features")
        self.kernel = arguments.parameter("kernel", sizes)
        self.bias = arguments.parameter("bias", sizes[1:])
        arguments.set_attributes()

    def __call__(self, inputs: jax.Array, out_sharding: OutSharding = None) -> jax.Array:
        """The image of `inputs`, (..., in_features) -> (..., out_features).

        Args:
            inputs: array whose last axis has the size `in_features`.
            out_sharding: sharding of the product, where the mesh has explicit axes.
        """
        x, kernel, bias = _common.promoted(self, inputs)
        if x.shape[-1:] != kernel.shape[:1]:
            raise TypeError(_common.feature_mismatch(self, x, kernel))
        axes = (((x.ndim - 1,), (0,)), ((), ()))
        options = _common.product_options(self, out_sharding)
        y = _common.current(self.dot_general)(x, kernel, axes, **options)
        y = add_adapter(y, x, self.kernel, _dot_general(axes), options)
        return _common.add_bias(y, bias)


def _dot_general(numbers: lax.DotDimensionNumbers) -> Product:
    """JAX's product along these axes, for an adapter."""
    return lambda x, kernel, **options: lax.dot_general(x, kernel, numbers, **options)


class LinearGeneral(_common.AffineLayer):
    """A linear map of several axes at once, optionally with separate weights along batch axes.

    The axes `axis` of the input, of sizes `in_features`, are contracted.  In the output the batch
    axes come first, then the other axes of the input, then the new axes, of sizes `out_features`.

    Args:
        in_features: size or sizes of the contracted axes.
        out_features: size or sizes of the new axes.
        axis: axis or axes of the input to contract; `in_features` lists their sizes in the order
            they have in the input, whatever the order here.
        batch_axis: sizes of the leading axes 0, 1, ... along which weights differ.
        use_bias: whether there is a bias.
        dtype: dtype of the computation; None: what input and parameters promote to.
        param_dtype: dtype of the parameters.
        kernel_init, bias_init: initializers; they are called for a matrix, with all contracted (and
            batch) axes as rows and all new axes as columns, so that fan-in and fan-out are right.
        precision: precision of the product, as in `jax.lax.dot_general`.
        promote_dtype: casts input, kernel and bias to the dtype of the computation.
        dot_general: the product to use in place of `jax.lax.dot_general`.
        dot_general_cls: called at each use to make the product; takes precedence over `dot_general`.
        preferred_element_type: dtype the product accumulates in and returns.
        rngs: the stream "params" is drawn once for the kernel, then once for the bias.
        kernel_metadata, bias_metadata: metadata of the parameters, such as a sharding.

    Attributes:
        kernel: Param of shape (*batch sizes, *in_features, *out_features).
        bias: Param of shape (*batch sizes, *out_features), or None.

    Raises:
        ValueError: if the numbers of sizes and axes differ, or batch axes are not 0, 1, ...
        TypeError: for a size that is not a whole number, or an input of other sizes.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> heads = nnx.LinearGeneral(8, (2, 4), rngs=nnx.Rngs(0))
    >>> heads(jnp.ones((5, 8))).shape
    (5, 2, 4)
    >>> back = nnx.LinearGeneral((2, 4), 8, axis=(-2, -1), rngs=nnx.Rngs(0))
    >>> back(jnp.ones((5, 2, 4))).shape
    (5, 8)
    """

    in_features: tuple[int, ...]
    out_features: tuple[int, ...]
    axis: tuple[int, ...]
    batch_axis: _common.FrozenMapping
    use_bias: bool
    dot_general: Product | None
    dot_general_cls: tp.Callable[[], Product] | None

    def __init__(
        self,
        in_features: Axes,
        out_features: Axes,
        *,
        axis: Axes = -1,
        batch_axis: tp.Mapping[int, int] = NO_AXES,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        precision: Precision = None,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        dot_general: Product | None = None,
        dot_general_cls: tp.Callable[[], Product] | None = None,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        arguments = Arguments(self, locals())
        arguments.set_attributes(
            "promote_dtype",
            "preferred_element_type",
            in_features=_common.check_sizes(self, "in_features", in_features),
            out_features=_common.check_sizes(self, "out_features", out_features),
            axis=_common.as_tuple(axis),
            batch_axis=_common.FrozenMapping(batch_axis),
        )
        self.promote_dtype = promote_dtype  # after the products, as in a repr of the reference
        self.preferred_element_type = preferred_element_type
        if len(self.in_features) != len(self.axis):
            raise ValueError(
                f"{layer_name(self)}: in_features and axis must have the same length. Got "
                f"{self.in_features} and {self.axis}."
            )
        if tuple(batch_axis) != tuple(range(len(batch_axis))):
            raise ValueError(
                f"{layer_name(self)}: batch_dims {tuple(batch_axis)} must be consecutive leading "
                "dimensions starting from 0. They are the keys of batch_axis."
            )
        batch = tuple(batch_axis.values())
        ins, outs = (*batch, *self.in_features), self.out_features
        init = _flat(kernel_init, (math.prod(ins), math.prod(outs)))
        self.kernel = arguments.parameter("kernel", (*ins, *outs), init)
        shape = (*batch, *outs)
        self.bias = arguments.parameter("bias", shape, _flat(bias_init, (math.prod(shape),)))

    def __call__(self, inputs: jax.Array, out_sharding: OutSharding = None) -> jax.Array:
        """The image of `inputs`: (*batch, ..., *in_features) -> (*batch, ..., *out_features).

        Args:
            inputs: array with the sizes `in_features` at the axes `axis`.
            out_sharding: sharding of the product, where the mesh has explicit axes.
        """
        x, kernel, bias = _common.promoted(self, inputs)
        axes = tuple(sorted(a + x.ndim if a < 0 else a for a in self.axis))
        batch = tuple(self.batch_axis)
        _check_input(self, x, kernel, (*batch, *axes))
        dot_general = self.dot_general if self.dot_general_cls is None else self.dot_general_cls()
        dot_general = lax.dot_general if dot_general is None else _common.current(dot_general)
        numbers = ((axes, tuple(range(len(batch), len(batch) + len(axes)))), (batch, batch))
        options = _common.product_options(self, out_sharding)
        y = dot_general(x, kernel, numbers, **options)
        y = add_adapter(y, x, self.kernel, _dot_general(numbers), options)
        if bias is not None and batch:
            between = x.ndim - len(batch) - len(axes)
            sizes = bias.shape
            bias = jnp.reshape(bias, (*sizes[: len(batch)], *(1,) * between, *sizes[len(batch) :]))
        return _common.add_bias(y, bias)


def _check_input(
    layer: LinearGeneral, x: jax.Array, kernel: jax.Array, axes: tuple[int, ...]
) -> None:
    """Raise TypeError unless `x` has the kernel's sizes at the batch and contracted axes."""
    wanted, batch = kernel.shape[: len(axes)], tuple(layer.batch_axis)
    if tuple(x.shape[a] for a in axes if 0 <= a < x.ndim) == wanted:
        return
    sizes = f"{wanted[len(batch) :]} along the axes {layer.axis} of its input"
    if batch:
        sizes += f", and {wanted[: len(batch)]} along the batch axes {batch}"
    raise TypeError(
        f"{layer_name(layer)} expects the sizes {sizes}: `kernel` has shape {kernel.shape}; "
        f"got an input of shape {x.shape}."
    )


def _flat(init: Initializer, flat: tuple[int, ...]) -> Initializer:
    """An initializer that calls `init` for the shape `flat`, and keeps its metadata."""

    def flat_init(key: jax.Array, shape: tp.Sequence[int], dtype: tp.Any = jnp.float32) -> tp.Any:
        value = init(key, flat, dtype)
        if isinstance(value, VariableMetadata):
            return dataclasses.replace(value, raw_value=jnp.reshape(value.raw_value, shape))
        return jnp.reshape(value, shape)

    return flat_init


class Einsum(_common.AffineLayer):
    """An einsum of the input with a learned kernel, plus a bias.

    The first operand of the equation is the input, the second the kernel.  The bias runs along those
    axes of the output that come from the kernel.

    Args:
        einsum_str: equation with two operands and an explicit output, such as "nta,hab->nthb".
        kernel_shape: shape of the kernel.
        bias_shape: shape of the bias: the kernel's axes that occur in the output, in output order
            (axes of size one may come in between); None for no bias.
        dtype: dtype of the computation; None: what input and parameters promote to.
        param_dtype: dtype of the parameters.
        precision: precision of the product, as in `jax.numpy.einsum`.
        kernel_init, bias_init: initializers of kernel and bias.
        promote_dtype: casts input, kernel and bias to the dtype of the computation.
        einsum_op: the function to use in place of `jax.numpy.einsum`.
        preferred_element_type: dtype the product accumulates in and returns.
        rngs: the stream "params" is drawn once for the kernel, then once for the bias.
        kernel_metadata, bias_metadata: metadata of the parameters, such as a sharding.

    Attributes:
        kernel: Param of shape `kernel_shape`.
        bias: Param of shape `bias_shape`, or None.

    Raises:
        ValueError: for an equation without "->" or with another number of operands than two, and
            for shapes that do not match it.
        TypeError: for a bias that does not match the output.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> layer = nnx.Einsum("nta,hab->nthb", (8, 2, 4), (8, 4), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((16, 11, 2))).shape
    (16, 11, 8, 4)
    """

    einsum_str: str
    kernel_shape: tuple[int, ...]
    bias_shape: tuple[int, ...] | None
    einsum_op: Product

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: tp.Sequence[int],
        bias_shape: tp.Sequence[int] | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Precision = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        einsum_op: Product = jnp.einsum,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        arguments = Arguments(self, locals())
        equation = _checked_equation(self, einsum_str)
        shape = _common.check_sizes(self, "kernel_shape", kernel_shape)
        sizes = None if bias_shape is None else _common.check_sizes(self, "bias_shape", bias_shape)
        self.kernel = arguments.parameter("kernel", shape)
        self.bias = arguments.parameter("bias", sizes)
        arguments.set_attributes(einsum_str=equation, kernel_shape=shape, bias_shape=sizes)

    def __call__(
        self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: OutSharding = None
    ) -> jax.Array:
        """The einsum of `inputs` and the kernel, plus the bias.

        Args:
            inputs: the first operand.
            einsum_str: an equation for this call, in place of the layer's own.
            out_sharding: sharding of the product, where the mesh has explicit axes.
        """
        equation = self.einsum_str if einsum_str is None else _checked_equation(self, einsum_str)
        by_input = isinstance(self.kernel, LoRAKernel) and _maps_to_outputs(equation)
        weight = weight_of(self.kernel) if by_input else self.kernel[...]
        arrays = (inputs, weight, _common.value_of(self.bias))
        x, kernel, bias = self.promote_dtype(arrays, dtype=self.dtype)
        options = _common.product_options(self, out_sharding)
        try:
            y = _common.current(self.einsum_op)(equation, x, kernel, **options)
        except (TypeError, ValueError) as error:
            error.add_note(f"It is {equation!r} of shapes {x.shape} and {kernel.shape} (`kernel`).")
            note_layer(error, self)
            raise
        if by_input:
            product = functools.partial(jnp.einsum, equation)
            y = add_adapter(y, x, self.kernel, product, options)
        if bias is None:
            return y
        shape = _bias_in_output(equation, x.ndim, kernel.shape)
        if math.prod(shape) != bias.size:
            raise TypeError(
                f"{layer_name(self)}: a bias of shape {bias.shape} does not fit the output of "
                f"{equation!r} with `kernel` of shape {kernel.shape}; the kernel's output axes "
                f"have the sizes {tuple(n for n in shape if n != 1)}."
            )
        return y + jnp.reshape(bias, shape)


def _maps_to_outputs(equation: str) -> bool:
    """Whether the last axis of the output comes from that of the kernel, and from no other."""
    operands, output = equation.split("->")
    of_x, of_kernel = operands.split(",")
    return of_kernel[-1:] == output[-1:] and output[-1:] not in {*of_x, "."}


def _checked_equation(layer: Einsum, equation: str) -> str:
    """The equation without spaces; raises ValueError unless it is `inputs,kernel->output`."""
    text = str(equation).replace(" ", "")
    if text.count("->") != 1:
        raise ValueError(
            f'{layer_name(layer)}: `einsum_str` equation must be explicit and include "->", as in '
            f"'ab,bc->ac'; got {equation!r}."
        )
    if text.count(",") != 1:
        raise ValueError(
            f"{layer_name(layer)}: `einsum_str` equation must have exactly two operands, the input "
            f"and the kernel, got {text.count(',') + 1} in {equation!r}."
        )
    return text


def _labels(term: str, ndim: int) -> list[str | int]:
    """A label for each axis: its letter, or for the axes of `...` -1, -2, ... from the right."""
    before, dots, after = term.partition("...")
    hidden = ndim - len(before) - len(after) if dots else 0
    return [*before, *range(-hidden, 0), *after]


def _bias_in_output(equation: str, inputs_ndim: int, kernel: tuple[int, ...]) -> tuple[int, ...]:
    """A shape for the bias with every axis of the output: those not from the kernel have size one."""
    operands, output = equation.split("->")
    inputs_term, kernel_term = operands.split(",")
    sizes = dict(zip(_labels(kernel_term, len(kernel)), kernel, strict=True))
    hidden = max(
        sum(isinstance(label, int) for label in _labels(term, ndim))
        for term, ndim in ((inputs_term, inputs_ndim), (kernel_term, len(kernel)))
    )
    named = len(output.replace("...", ""))
    return tuple(sizes.get(label, 1) for label in _labels(output, named + hidden))
