"""Convolutions over any number of spatial axes: `Conv` and `ConvTranspose`.

Inputs have the layout `(*batch, *spatial, in_features)` with as many spatial axes as the kernel and
any number of batch axes, none included; the kernel has the layout `(*kernel_size, in, out)`.

Padding is one of

    "SAME"       zeros, so that with stride one the output is as large as the input
    "SAME_LOWER" the same, with an odd element in front
    "VALID"      none
    "CIRCULAR"   the input repeats periodically
    "REFLECT"    the input is mirrored at its borders (Conv only)
    "CAUSAL"     zeros in front, so that no output sees later input (Conv with one axis only)
    p            p zeros on both sides of each axis
    [p, (l, r)]  for each axis, a number for both sides or a pair for front and back
"""

from __future__ import annotations

import math
import typing as tp

import jax
import jax.numpy as jnp
from jax import lax

from nnxlite.nn import _common
from nnxlite.nn._common import NO_METADATA, Axes, Metadata, OutSharding, Padding, Pads, Precision
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn, default_promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.linear import default_bias_init, default_kernel_init
from nnxlite.nn.lora_kernel import Product, add_adapter, weight_of
from nnxlite.objects._module import layer_name
from nnxlite.objects._rngs import Rngs

__all__ = ["Conv", "ConvTranspose"]


def canonicalize_padding(padding: Padding, rank: int) -> str | list[tuple[int, int]]:
    """Padding in JAX's form: a name, unchanged, or a pair of numbers for each of `rank` axes.

    Raises ValueError for anything else.

    >>> from nnxlite.nn.linear import canonicalize_padding
    >>> canonicalize_padding([1, (0, 2)], rank=2)
    [(1, 1), (0, 2)]
    """
    if isinstance(padding, str):
        return padding
    pads = _common.padding_of("canonicalize_padding", padding, (), rank)
    return pads if isinstance(pads, str) else list(pads)


def _as_tuples(given: tp.Any) -> tp.Any:
    """Lists and NumPy arrays as tuples, at every level, so that the value is hashable."""
    given = _common.without_numpy(given)
    if isinstance(given, tp.Sequence) and not isinstance(given, str):
        return tuple(_as_tuples(g) for g in given)
    return given


class _Convolution(_common.AffineLayer):
    """What both convolutions share: their attributes, and how their parameters are made."""

    in_features: int
    out_features: int
    kernel_size: tuple[int, ...]
    kernel_shape: tuple[int, ...]
    strides: tp.Any
    padding: tp.Any
    kernel_dilation: tp.Any
    use_bias: bool
    mask: jax.Array | None
    _nnx_pads: tp.ClassVar[tp.Callable[[tp.Any], Pads]]

    def _nnx_set_up(self, arguments: _common.Arguments, *kernel_features: int) -> None:
        """Set the attributes, check them, and make the parameters.

        Args:
            arguments: those of the constructor.
            *kernel_features: sizes of the last two axes of the kernel.
        """
        values = arguments.values
        size = _common.check_sizes(self, "kernel_size", values["kernel_size"])
        lists = ("strides", "padding", "input_dilation", "kernel_dilation")
        hashable = {name: _as_tuples(values[name]) for name in lists if name in values}
        arguments.set_attributes(kernel_size=size, **hashable)
        self.kernel_shape = (*size, *kernel_features)
        _per_axis(self, "strides")
        _per_axis(self, "kernel_dilation")
        self._nnx_pads()
        _check_mask(self, self.kernel_shape)
        self.kernel = arguments.parameter("kernel", self.kernel_shape)
        self.bias = arguments.parameter("bias", (self.out_features,))


# These functions read public attributes of a layer only: `nnx.Conv.__call__(other, x)` works for any
# object that has the same attributes.


def _per_axis(layer: tp.Any, name: str) -> tuple[int, ...]:
    """One number for each spatial axis, from an attribute that may also be None (for 1) or a number."""
    given = _common.without_numpy(getattr(layer, name))
    rank = len(layer.kernel_size)
    if given is None:
        return (1,) * rank
    sizes = _common.check_sizes(layer, name, given)
    if not isinstance(given, tp.Sequence):
        sizes *= rank
    if len(sizes) != rank or 0 in sizes:
        raise ValueError(
            f"{layer_name(layer)}: `{name}` must be a positive number, or one for each of "
            f"the {rank} axes of kernel_size={layer.kernel_size}; got {given!r}."
        )
    return sizes


def _pads(layer: Conv) -> Pads:
    """The padding of a convolution."""
    names = ("SAME", "SAME_LOWER", "VALID", "CIRCULAR", "REFLECT", "CAUSAL")
    return _common.padding_of(layer, layer.padding, names, len(layer.kernel_size))


def _pads_of_transpose(layer: ConvTranspose) -> Pads:
    """The padding of a transposed convolution."""
    names = ("SAME", "SAME_LOWER", "VALID", "CIRCULAR")
    return _common.padding_of(layer, layer.padding, names, len(layer.kernel_size))


def _check_mask(layer: tp.Any, kernel_shape: tuple[int, ...]) -> None:
    if layer.mask is not None and tuple(layer.mask.shape) != tuple(kernel_shape):
        raise ValueError(
            f"{layer_name(layer)}: Mask needs to have the same shape as weights. Shapes are: "
            f"{tuple(layer.mask.shape)}, {tuple(kernel_shape)}."
        )


def _parameters(layer: tp.Any, kernel: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The kernel, times the mask if there is one, and the bias."""
    bias = _common.value_of(layer.bias) if layer.use_bias else None
    if layer.mask is None:
        return kernel, bias
    _check_mask(layer, kernel.shape)
    return kernel * jnp.asarray(layer.mask), bias


def _one_batch_axis(
    layer: tp.Any, inputs: jax.Array, features: int
) -> tuple[jax.Array, tuple[int, ...] | None]:
    """The input with one batch axis, and the batch shape to restore (None if it had one axis).

    Raises ValueError unless the input has all spatial axes and `features` features.
    """
    x = inputs if hasattr(inputs, "ndim") else jnp.asarray(inputs)
    rank = len(layer.kernel_size)
    if x.ndim < rank + 1 or x.shape[-1] != features:
        raise ValueError(
            f"{layer_name(layer)} expects an input of shape (*batch, *spatial, {features}) "
            f"with {rank} spatial axes: kernel_size is {layer.kernel_size} and `kernel` has "
            f"shape {layer.kernel.shape}; got {tuple(x.shape)}."
        )
    if x.ndim == rank + 2:
        return x, None
    batch = tuple(x.shape[: x.ndim - rank - 1])
    return jnp.reshape(x, (math.prod(batch), *x.shape[len(batch) :])), batch


class Conv(_Convolution):
    """A convolution over the axes of `kernel_size` (strictly: a cross-correlation).

    Maps `(*batch, *spatial, in_features)` to `(*batch, *smaller or equal spatial, out_features)`.

    Args:
        in_features, out_features: sizes of the last axis before and after.
        kernel_size: size of the kernel along each spatial axis; a number means one axis.
        strides: steps between outputs, one number or one for each axis.
        padding: "SAME", "SAME_LOWER", "VALID", "CIRCULAR", "REFLECT", "CAUSAL" (one axis only), the
            number of zeros on both sides, or a number or pair (front, back) for each axis.
        input_dilation: dilation of the input (needs padding given as numbers).
        kernel_dilation: dilation of the kernel.
        feature_group_count: number of groups that features are divided into; each group of
            outputs depends on its own group of inputs only.
        use_bias: whether there is a bias.
        mask: array of the kernel's shape; the kernel is multiplied by it at each use.
        dtype: dtype of the computation; None: what input and parameters promote to.
        param_dtype: dtype of the parameters.
        precision: precision of the products, as in `jax.lax.conv_general_dilated`.
        kernel_init, bias_init: initializers of kernel and bias.
        conv_general_dilated: a replacement for `jax.lax.conv_general_dilated`.
        promote_dtype: casts input, kernel and bias to the dtype of the computation.
        preferred_element_type: dtype the convolution accumulates in and returns.
        rngs: the stream "params" is drawn once for the kernel, then once for the bias.
        kernel_metadata, bias_metadata: metadata of the parameters, such as a sharding.

    Attributes:
        kernel: Param of shape (*kernel_size, in_features // feature_group_count, out_features).
        bias: Param of shape (out_features,), or None.

    Raises:
        TypeError: for a size that is not a whole number.
        ValueError: for a padding, stride, dilation, group count, mask or input that does not match
            the kernel.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> conv = nnx.Conv(3, 8, (3, 3), strides=2, rngs=nnx.Rngs(0))
    >>> conv.kernel.shape, conv(jnp.ones((4, 28, 28, 3))).shape
    ((3, 3, 3, 8), (4, 14, 14, 8))
    """

    input_dilation: tp.Any
    feature_group_count: int
    conv_general_dilated: Product
    _nnx_pads = _pads

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Axes,
        strides: Axes | None = 1,
        *,
        padding: Padding = "SAME",
        input_dilation: Axes | None = 1,
        kernel_dilation: Axes | None = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Precision = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        conv_general_dilated: Product = lax.conv_general_dilated,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        arguments = _common.Arguments(self, locals())
        _, _, groups = arguments.sizes("in_features", "out_features", "feature_group_count")
        if groups == 0 or in_features % groups or out_features % groups:
            raise ValueError(
                f"{layer_name(self)}: feature_group_count={feature_group_count} must divide "
                f"in_features={in_features} and out_features={out_features}."
            )
        self._nnx_set_up(arguments, in_features // groups, out_features)

    def __call__(self, inputs: jax.Array, out_sharding: OutSharding = None) -> jax.Array:
        """The convolution of `inputs` with the kernel.

        Args:
            inputs: array of shape (*batch, *spatial, in_features).
            out_sharding: sharding of the convolution, where the mesh has explicit axes.
        """
        by_input = self.mask is None and self.feature_group_count == 1  # how an adapter works
        kernel, bias = _parameters(self, weight_of(self.kernel) if by_input else self.kernel[...])
        x, batch = _one_batch_axis(self, inputs, kernel.shape[-2] * self.feature_group_count)
        x, pads = _padded(self, x)
        x, kernel, bias = self.promote_dtype((x, kernel, bias), dtype=self.dtype)
        options = _common.product_options(self, out_sharding)
        window = (_per_axis(self, "strides"), pads)
        layout = {
            "lhs_dilation": _per_axis(self, "input_dilation"),
            "rhs_dilation": _per_axis(self, "kernel_dilation"),
            "dimension_numbers": _dimension_numbers(x.ndim),
            "feature_group_count": self.feature_group_count,
        }
        y = _common.current(self.conv_general_dilated)(x, kernel, *window, **layout, **options)
        if by_input:
            product = lambda x, a, **more: lax.conv_general_dilated(x, a, *window, **layout, **more)
            y = add_adapter(y, x, self.kernel, product, options)
        y = _common.add_bias(y, bias)
        return y if batch is None else jnp.reshape(y, (*batch, *y.shape[1:]))


def _padded(layer: Conv, x: jax.Array) -> tuple[jax.Array, Pads]:
    """The input, padded here if JAX does not support this padding, and the padding left to JAX.

    Raises ValueError for a padding that does not go with the other options. The constructor does not:
    some programs read a layer and never call it, or give it a product that takes any padding.
    """
    pads = _pads(layer)
    if pads == "CAUSAL" and len(layer.kernel_size) != 1:
        raise ValueError(
            f"{layer_name(layer)}: Causal padding is only implemented for 1D convolutions, "
            f"and kernel_size is {layer.kernel_size}."
        )
    dilated = any(d != 1 for d in _per_axis(layer, "input_dilation"))
    if isinstance(pads, str) and dilated and layer.conv_general_dilated is lax.conv_general_dilated:
        raise ValueError(
            f"{layer_name(layer)}: with input_dilation={layer.input_dilation} the padding "
            f"must be given in numbers, got {pads!r}. Give a pair for each axis, or use "
            "ConvTranspose."
        )
    if pads not in ("CAUSAL", "CIRCULAR", "REFLECT"):
        return x, pads
    dilations = _per_axis(layer, "kernel_dilation")
    reach = [(size - 1) * d for size, d in zip(layer.kernel_size, dilations, strict=True)]
    if pads == "CAUSAL":
        return jnp.pad(x, [(0, 0), *((n, 0) for n in reach), (0, 0)]), "VALID"
    widths = [(n // 2, (n + 1) // 2) for n in reach]
    mode = "wrap" if pads == "CIRCULAR" else "reflect"
    return jnp.pad(x, [(0, 0), *widths, (0, 0)], mode=mode), "VALID"


class ConvTranspose(_Convolution):
    """The transpose of a convolution: each input contributes to a window of the output.

    Maps `(*batch, *spatial, in_features)` to `(*batch, *larger or equal spatial, out_features)`;
    "SAME" padding multiplies each spatial size by its stride.  With "CIRCULAR" padding,
    contributions beyond the border wrap around to the other side.

    Args:
        in_features, out_features: sizes of the last axis before and after.
        kernel_size: size of the kernel along each spatial axis; a number means one axis.
        strides: distance between inputs in the output, one number or one for each axis.
        padding: "SAME", "SAME_LOWER" (with strides of one), "VALID", "CIRCULAR", a number, or a
            number or pair (front, back) for each axis. A number is how many zeros are on both sides of
            the input that strides have spread: `kernel_size - 1 - p` for the padding `p` of PyTorch.
        kernel_dilation: dilation of the kernel.
        use_bias: whether there is a bias.
        mask: array of the kernel's shape; the kernel is multiplied by it at each use.
        dtype: dtype of the computation; None: what input and parameters promote to.
        param_dtype: dtype of the parameters.
        precision: precision of the products, as in `jax.lax.conv_transpose`.
        kernel_init, bias_init: initializers of kernel and bias.
        transpose_kernel: flip the kernel and swap its features, which makes the layer the exact
            transpose of a `Conv` with this kernel. (With "CIRCULAR" padding, its result is rotated by
            one element for some sizes of kernel and stride, as in the reference.)
        promote_dtype: casts input, kernel and bias to the dtype of the computation.
        preferred_element_type: dtype the convolution accumulates in and returns.
        rngs: the stream "params" is drawn once for the kernel, then once for the bias.
        kernel_metadata, bias_metadata: metadata of the parameters, such as a sharding.

    Attributes:
        kernel: Param of shape (*kernel_size, in_features, out_features); with `transpose_kernel`,
            (*kernel_size, out_features, in_features).
        bias: Param of shape (out_features,), or None.

    Raises:
        TypeError: for a size that is not a whole number.
        ValueError: for a padding, stride, dilation, mask or input that does not match the kernel.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> up = nnx.ConvTranspose(3, 8, (3, 3), strides=2, rngs=nnx.Rngs(0))
    >>> up(jnp.ones((4, 14, 14, 3))).shape
    (4, 28, 28, 8)
    """

    transpose_kernel: bool
    _nnx_pads = _pads_of_transpose

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Axes,
        strides: Axes | None = None,
        *,
        padding: Padding = "SAME",
        kernel_dilation: Axes | None = None,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: Precision = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        arguments = _common.Arguments(self, locals())
        features = arguments.sizes("in_features", "out_features")
        self._nnx_set_up(arguments, *(reversed(features) if transpose_kernel else features))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The transposed convolution of `inputs` with the kernel.

        Args:
            inputs: array of shape (*batch, *spatial, in_features).
        """
        kernel, bias = _parameters(self, self.kernel[...])
        x, batch = _one_batch_axis(self, inputs, kernel.shape[-1 if self.transpose_kernel else -2])
        x, kernel, bias = self.promote_dtype((x, kernel, bias), dtype=self.dtype)
        strides, pads = _per_axis(self, "strides"), _pads_of_transpose(self)
        if pads == "SAME_LOWER" and any(stride != 1 for stride in strides):
            raise ValueError(
                f"{layer_name(self)}: 'SAME_LOWER' padding needs strides of one, got strides="
                f"{self.strides}. Use 'SAME', or give the padding as numbers."
            )
        y = lax.conv_transpose(
            x,
            kernel,
            strides,
            "VALID" if pads == "CIRCULAR" else pads,
            rhs_dilation=_per_axis(self, "kernel_dilation"),
            transpose_kernel=self.transpose_kernel,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )
        if pads == "CIRCULAR":
            y = _wrapped(y, x.shape[1:-1], strides, self.transpose_kernel)
        y = _common.add_bias(y, bias)
        return y if batch is None else jnp.reshape(y, (*batch, *y.shape[1:]))


def _wrapped(
    y: jax.Array, spatial: tuple[int, ...], strides: tuple[int, ...], flipped: bool
) -> jax.Array:
    """A full output wrapped around to its period, `stride * size` along each spatial axis.

    The surplus is split evenly between both sides; an odd element goes to the front if the kernel
    is flipped, else to the back.
    """
    for axis, (size, stride) in enumerate(zip(spatial, strides, strict=True), start=1):
        period = size * stride
        surplus = y.shape[axis] - period
        front = -((surplus + flipped) // 2) % period
        periods = -(-(front + y.shape[axis]) // period)
        widths = [(0, 0)] * y.ndim
        widths[axis] = (front, periods * period - front - y.shape[axis])
        shape = (*y.shape[:axis], periods, period, *y.shape[axis + 1 :])
        y = jnp.sum(jnp.reshape(jnp.pad(y, widths), shape), axis=axis)
    return y


def _dimension_numbers(ndim: int) -> lax.ConvDimensionNumbers:
    """The layout (batch, *spatial, features) with kernels (*spatial, in, out)."""
    inputs = (0, ndim - 1, *range(1, ndim - 1))
    kernel = (ndim - 1, ndim - 2, *range(ndim - 2))
    return lax.ConvDimensionNumbers(inputs, kernel, inputs)
