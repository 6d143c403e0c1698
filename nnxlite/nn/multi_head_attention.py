"""`MultiHeadAttention`: attention with learned projections, and a cache for decoding.

The layer projects its inputs to queries, keys and values of several heads, lets an attention
function (`dot_product_attention`, by default) combine them, and projects the result back.

Decoding generates a sequence position by position.  `init_cache` allocates a cache for the keys
and values of a whole sequence; each call with `decode=True` takes the next position, or the next few
(a prompt, say), writes their keys and values to the next free entries, and lets each attend to all
entries up to its own.  This is causal by construction: a decoding step gives the same result as its
positions in one call over the whole sequence with `is_causal=True`.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from nnxlite._base.jax import as_integers
from nnxlite.boundary._call_def import parameters_of
from nnxlite.nn import _common, initializers
from nnxlite.nn._common import NO_METADATA, Arguments, KeySource, Metadata, OutSharding, Precision
from nnxlite.nn.attention import Implementation, dot_product_attention, logit_like
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn, default_promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.linear import LinearGeneral, default_kernel_init
from nnxlite.nn.lora_kernel import Product
from nnxlite.nn.normalization import LayerNorm
from nnxlite.objects._fields import data
from nnxlite.objects._module import Module, layer_name, note_layer
from nnxlite.objects._rngs import Rngs, RngStream
from nnxlite.variables._kinds import Cache

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(Module):
    """Multi-head attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    Args:
        num_heads: number of query heads; divides `qkv_features`.
        in_features: features of the query input.
        qkv_features: features of all query heads together; `in_features` by default.
        out_features: features of the result; `in_features` by default.
        num_kv_heads: number of key and value heads, a divisor of `num_heads` (the default): with
            fewer it is grouped-query attention, with one multi-query attention.
        in_kv_features: features of the key and value inputs; `in_features` by default.
        dtype: dtype of the computation; None: what input and parameters promote to.
        param_dtype: dtype of the parameters.
        broadcast_dropout: drop the same weights for all examples and heads.
        dropout_rate: the probability that a weight is set to zero.
        deterministic: the mode; True means no dropout, None leaves it to the call.
        precision: precision of the products, as in `jax.lax.dot_general`.
        kernel_init, bias_init: initializers of the projections.
        out_kernel_init, out_bias_init: those of the output projection, if others.
        use_bias: whether the projections have biases.
        attention_fn: a function like `dot_product_attention`, called with query, key and value and
            the keyword arguments `mask`, `dropout_rng`, `dropout_rate`, `broadcast_dropout`,
            `deterministic`, `dtype`, `precision`, `module` and `is_causal`; also `input_positions`
            if the call has them, or in a decoding step if the function has this parameter, and
            `implementation` if it is set.
        decode: the mode; True means decoding steps, None leaves it to the call.
        normalize_qk: apply a `LayerNorm` to the projected queries and keys.
        qkv_promote_dtype, out_promote_dtype, ln_promote_dtype: cast input and parameters of the
            projections and norms to the dtype of the computation.
        qkv_dot_general, out_dot_general: replacements for `jax.lax.dot_general`.
        qkv_dot_general_cls, out_dot_general_cls: called at each use to make such a product.
        rngs: the stream "params" is drawn for query, key, value, their norms, and the output, in
            this order; the stream "dropout" is forked if the layer has a stream of its own.
        keep_rngs: whether the layer has its own random stream for dropout; otherwise calls must
            pass one.
        kernel_metadata, bias_metadata, query_ln_scale_metadata, key_ln_scale_metadata: metadata of
            the parameters.
        out_kernel_metadata, out_bias_metadata: those of the output projection; if empty, those of
            the other projections.
        implementation: "cudnn" for the flash kernel of NVIDIA GPUs, in half precision and without
            dropout; see `dot_product_attention`. By default XLA computes and stores all logits.

    Attributes:
        query, key, value: `LinearGeneral`s to (heads, head_dim).
        query_ln, key_ln: `LayerNorm`s, or None.
        out: a `LinearGeneral` from (heads, head_dim) to `out_features`.
        cached_key, cached_value, cache_index: `Cache`s made by `init_cache`, or None.

    Raises:
        ValueError: for numbers of heads that do not divide the features or each other, or a dropout
            rate outside [0, 1).

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> layer = nnx.MultiHeadAttention(2, 8, num_kv_heads=1, decode=False, rngs=nnx.Rngs(0))
    >>> x = nnx.Rngs(1).normal((3, 5, 8))
    >>> whole = layer(x, is_causal=True)
    >>> whole.shape
    (3, 5, 8)
    >>> layer.init_cache(x.shape)
    >>> steps = [layer(x[:, i : i + 1], decode=True) for i in range(5)]
    >>> bool(jnp.allclose(jnp.concatenate(steps, axis=1), whole, atol=1e-5))
    True
    """

    num_heads: int
    in_features: int
    qkv_features: int
    out_features: int
    num_kv_heads: int
    in_kv_features: int
    dtype: Dtype | None
    dropout_rate: float
    broadcast_dropout: bool
    deterministic: bool | None
    decode: bool | None
    precision: Precision
    attention_fn: tp.Callable[..., jax.Array]
    implementation: Implementation | None
    query_ln: LayerNorm | None
    key_ln: LayerNorm | None
    rngs: RngStream | None
    cached_key: Cache[jax.Array] | None
    cached_value: Cache[jax.Array] | None
    cache_index: Cache[jax.Array] | None

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: Precision = None,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = initializers.zeros,
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        attention_fn: tp.Callable[..., jax.Array] = dot_product_attention,
        decode: bool | None = None,
        normalize_qk: bool = False,
        qkv_promote_dtype: PromoteDtypeFn = default_promote_dtype,
        out_promote_dtype: PromoteDtypeFn = default_promote_dtype,
        ln_promote_dtype: PromoteDtypeFn = default_promote_dtype,
        qkv_dot_general: Product | None = None,
        out_dot_general: Product | None = None,
        qkv_dot_general_cls: tp.Callable[[], Product] | None = None,
        out_dot_general_cls: tp.Callable[[], Product] | None = None,
        rngs: Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Metadata = NO_METADATA,
        out_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
        out_bias_metadata: Metadata = NO_METADATA,
        query_ln_scale_metadata: Metadata = NO_METADATA,
        key_ln_scale_metadata: Metadata = NO_METADATA,
        implementation: Implementation | None = None,
    ) -> None:
        arguments = Arguments(self, locals())
        arguments.set_attributes(
            qkv_features=in_features if qkv_features is None else qkv_features,
            out_features=in_features if out_features is None else out_features,
            in_kv_features=in_features if in_kv_features is None else in_kv_features,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        )
        if num_heads < 1 or self.qkv_features % num_heads:
            raise ValueError(
                f"{layer_name(self)}: Memory dimension ({self.qkv_features}) must be divisible by "
                f"'num_heads' heads ({num_heads}). It is qkv_features, or else in_features."
            )
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(
                f"{layer_name(self)}: num_heads ({num_heads}) must be divisible by num_kv_heads "
                f"({self.num_kv_heads}): equally many query heads share each key head."
            )
        _common.check_rate(self, "dropout_rate", dropout_rate)
        self.head_dim = self.qkv_features // num_heads

        shared = ("kernel_init", "kernel_metadata", "bias_init", "bias_metadata")
        products = ("promote_dtype", "dot_general", "dot_general_cls")
        names = ("use_bias", "precision", "dtype", "param_dtype", "rngs", *shared)
        options = arguments.passed_on(*names)
        of_qkv = options | arguments.passed_on(*products, prefix="qkv_")
        heads, kv_heads = (num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        self.query = LinearGeneral(in_features, heads, **of_qkv)
        self.key = LinearGeneral(self.in_kv_features, kv_heads, **of_qkv)
        self.value = LinearGeneral(self.in_kv_features, kv_heads, **of_qkv)
        self.query_ln, self.key_ln = data(None), data(None)
        if normalize_qk:
            of_norm = arguments.passed_on("dtype", "param_dtype", "rngs")
            of_norm |= {"use_bias": False, "promote_dtype": ln_promote_dtype}
            norm = functools.partial(LayerNorm, self.head_dim, **of_norm)
            self.query_ln = norm(scale_metadata=query_ln_scale_metadata)
            self.key_ln = norm(scale_metadata=key_ln_scale_metadata)
        of_out = arguments.passed_on(*shared, *products, prefix="out_")
        options |= {name: value for name, value in of_out.items() if value}  # or as the others
        self.out = LinearGeneral(heads, self.out_features, axis=(-2, -1), **options)
        keeps_stream = keep_rngs and dropout_rate > 0
        self.rngs = _common.own_stream(self, rngs, "dropout") if keeps_stream else None
        self.cached_key, self.cached_value, self.cache_index = data(None), data(None), data(None)

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: KeySource | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: OutSharding = None,
        qkv_sharding: OutSharding = None,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """The result for every query, (*batch, query length, out_features).

        Args:
            inputs_q: (*batch, query length, in_features); the next positions, mostly
                one, when decoding.
            inputs_k: (*batch, key length, in_kv_features); `inputs_q` by default.
            inputs_v: of the same shape; `inputs_k` by default.
            mask: broadcasts to (*batch, heads, query length, key length), where the key length is
                that of the cache when decoding; False excludes a key for a query.
            deterministic: the mode of this call; by default that of the layer.
            rngs: the source of the key for dropout, or the key itself; takes precedence over the
                layer's own.
            sow_weights: record the weights as the `Intermediate` `attention_weights`.
            decode: the mode of this call; by default that of the layer.
            is_causal: let each query attend only to keys up to its own position.  A decoding step
                does so anyway.
            out_sharding: sharding of the result, where the mesh has explicit axes.
            qkv_sharding: sharding of queries, keys and values.
            input_positions: positions of the queries, for an attention function that uses them; in a
                decoding step the default is the index in the cache.

        Under a transform a decoding step cannot raise an error when the cache is full; it returns
        NaN instead.

        Raises:
            ValueError: if a mode is set nowhere, the shapes of inputs, mask or cache do not match, a
                decoding step has no cache or one without enough free entries, or dropout has no key.
            TypeError: for keys or values of another number of features.
        """
        if inputs_k is None:
            if inputs_v is not None:
                raise ValueError(
                    f"{layer_name(self)}: `inputs_k` cannot be None if `inputs_v` is not None. Pass "
                    "an input that serves as both keys and values as inputs_k alone."
                )
            inputs_k = inputs_q
        inputs_v = inputs_k if inputs_v is None else inputs_v
        decode = _common.resolve_mode(self, "decode", decode, self.decode)
        drops = self.dropout_rate > 0 and not _common.resolve_mode(
            self, "deterministic", deterministic, self.deterministic
        )
        _check_input(self, "inputs_q", inputs_q, self.in_features)
        _check_input(self, "inputs_k", inputs_k, self.in_kv_features)
        _check_input(self, "inputs_v", inputs_v, self.in_kv_features)

        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        fits = None
        if decode:
            key, value, mask, positions, fits = _decode(self, query, key, value, mask)
            if input_positions is None and takes_positions(self.attention_fn):
                input_positions = positions
        optional = {"input_positions": input_positions}
        optional["implementation"] = getattr(self, "implementation", None)  # not in other libraries
        drawn = (rngs, self.rngs, "dropout", _PURPOSE, "keep_rngs=True")
        dropout_rng = _common.draw_key(self, *drawn) if drops else None
        try:
            x = self.attention_fn(
                query,
                key,
                value,
                mask=mask,
                dropout_rng=dropout_rng,
                dropout_rate=self.dropout_rate,
                broadcast_dropout=self.broadcast_dropout,
                deterministic=not drops,
                dtype=self.dtype,
                precision=self.precision,
                module=self if sow_weights else None,
                is_causal=is_causal and not decode,
                **{name: value for name, value in optional.items() if value is not None},
            )
        except (TypeError, ValueError) as error:
            note_layer(error, self)
            raise
        y = self.out(x, out_sharding=out_sharding)
        # After the projection: XLA makes this choice in the kernel that adds the bias.
        return y if fits is None else jnp.where(fits, y, jnp.nan)

    def init_cache(self, input_shape: tp.Sequence[int], dtype: Dtype = jnp.float32) -> None:
        """Allocate an empty cache for decoding, in place of the present one if there is one.

        A stack of layers, made by `vmap`, gets a cache for each of them, stacked like its parameters.

        Args:
            input_shape: the shape of a whole input, (*batch, length, features).
            dtype: dtype of the cached keys and values, to which they are rounded.

        Raises ValueError for a shape of fewer than two dimensions.
        """
        if len(input_shape) < 2:
            raise ValueError(
                f"{layer_name(self)}: init_cache takes the shape of a whole input, (*batch, length, "
                f"features); got {tuple(input_shape)}."
            )
        stack = _stack_of(self)
        shape = (*stack, *input_shape[:-1], self.num_kv_heads, self.head_dim)
        self.cached_key = Cache(jnp.zeros(shape, dtype))
        self.cached_value = Cache(jnp.zeros(shape, dtype))
        self.cache_index = Cache(jnp.zeros(stack, jnp.int32))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tp.Sequence[int] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Set the modes, and make sure that there is a cache; None leaves a mode unchanged.

        A new cache has the dtype of the computation: `dtype`, or that of the parameters.

        Args:
            deterministic: whether to skip dropout.
            decode: whether to decode: each call takes the next position, or the next few.
            batch_size: the batch dimensions of the cache.
            max_length: the length of the cache; one that has these sizes is kept with its content.

        Raises ValueError if only one of `batch_size` and `max_length` is given.
        """
        if (batch_size is None) != (max_length is None):
            raise ValueError(
                "MultiHeadAttention.set_view makes a cache of batch_size and max_length, and needs "
                f"both or none; got batch_size={batch_size}, max_length={max_length}."
            )
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if batch_size is not None and max_length is not None:
            sizes = *as_integers(batch_size), max_length
            if self.cached_key is None or self.cached_key.shape[:-2] != (*_stack_of(self), *sizes):
                self.init_cache((*sizes, self.in_features), _dtype_of(self))


_PURPOSE = (
    "'rngs' must be provided for dropout (not needed with deterministic=True or after model.eval())"
)

# These functions read public attributes of a layer only, so that `nnx.MultiHeadAttention.__call__(other,
# x)` works for any object that has the same attributes.


def _check_input(layer: MultiHeadAttention, name: str, x: jax.Array, features: int) -> None:
    shape = np.shape(x)
    if len(shape) < 2 or shape[-1] != features:
        kind = ValueError if name == "inputs_q" or len(shape) < 2 else TypeError
        got = shape[-1] if shape else "none"
        raise kind(
            f"{layer_name(layer)}: Incompatible input dimension, got {got} but module expects "
            f"{features}: {name} has the shape (*batch, length, {features}); got {shape}."
        )


def _stack_of(layer: MultiHeadAttention) -> tuple[int, ...]:
    """The axes in front that the parameters of a stack of layers have."""
    kernel = getattr(layer.key, "kernel", None)
    return () if kernel is None else tuple(kernel.shape[:-3])


def _dtype_of(layer: MultiHeadAttention) -> Dtype:
    """The dtype that keys and values are computed in, for inputs that do not promote the parameters'."""
    if layer.dtype is not None:
        return layer.dtype
    names = ("kernel", "bias", "scale")
    parts = (layer.key, layer.value, layer.key_ln)
    parameters = [getattr(part, name, None) for part in parts for name in names]
    dtypes = [x.dtype for x in parameters if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.result_type(*dtypes) if dtypes else jnp.float32


def _decode(
    layer: MultiHeadAttention,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Write keys and values to the cache; what the step attends to.

    Returns:
        Keys, values and mask of the whole cache; the positions of the queries, (query length,); whether
        the cache had enough free entries, or None if that is known.
    """
    cached_keys, cached_values, count = layer.cached_key, layer.cached_value, layer.cache_index
    if cached_keys is None or cached_values is None or count is None:
        raise ValueError(
            f"{layer_name(layer)}: Autoregressive cache not initialized, call "
            "init_cache((*batch, length, features)) first, or nnx.view(model, decode=True, "
            "batch_size=..., max_length=...)."
        )
    keys, values, index = cached_keys.get_value(), cached_values.get_value(), count.get_value()
    *batch, length, _, _ = keys.shape
    _check_step(layer, query, key, keys, index)
    steps = query.shape[-3]
    positions = index + jnp.arange(steps, dtype=index.dtype)
    filled = jnp.arange(length) <= positions[:, None]
    filled = jnp.broadcast_to(filled, (*batch, 1, steps, length))
    heads = (*batch, layer.num_heads, steps, length)
    mask = logit_like(layer, "mask", mask, heads)
    mask = filled if mask is None else filled & mask.astype(bool)
    axis = len(batch)
    keys = lax.dynamic_update_slice_in_dim(keys, key.astype(keys.dtype), index, axis)
    values = lax.dynamic_update_slice_in_dim(values, value.astype(values.dtype), index, axis)
    cached_keys.set_value(keys)
    cached_values.set_value(values)
    keys, values = keys.astype(key.dtype), values.astype(value.dtype)  # as without a cache
    count.set_value(index + steps)
    fits = index + steps <= length if isinstance(index, Tracer) else None
    return keys, values, mask, positions, fits


def _check_step(
    layer: MultiHeadAttention, query: jax.Array, key: jax.Array, cached: jax.Array, index: jax.Array
) -> None:
    length, steps = cached.shape[-3], query.shape[-3]
    expected = (*cached.shape[:-3], steps, *cached.shape[-2:])
    if key.shape != expected or query.shape[:-2] != expected[:-2] or not 0 < steps <= length:
        raise ValueError(
            f"{layer_name(layer)}: Autoregressive cache shape error, expected key shape "
            f"{expected} instead got {key.shape}. It decodes the next positions, at most {length}; "
            f"the cache has shape {cached.shape}, the query {query.shape}."
        )
    if not isinstance(index, Tracer) and int(index) + steps > length:
        last = int(index) + steps - 1
        filled = "all" if int(index) == length else f"{int(index)} of"
        raise ValueError(
            f"{layer_name(layer)} cannot decode position {last}: {filled} {length} entries of its "
            "cache are filled. Make a longer one with init_cache, which also empties it."
        )


def takes_positions(attention_fn: tp.Callable[..., tp.Any]) -> bool:
    """Whether an attention function has a parameter `input_positions` that is None by default."""
    parameters = parameters_of(attention_fn) or ()  # a callable may have no signature
    return any(p.name == "input_positions" and p.default is None for p in parameters)
