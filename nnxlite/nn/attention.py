"""Attention: the functions.  (The layer is in `multi_head_attention.py`.)

For every query, attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762) computes a mean
of the values, weighted by how well their keys match the query:

    weights = softmax(query . key / sqrt(depth) + bias)      where the mask is True
    result  = sum over keys of weights * value

Arrays have the shape (*batch, length, heads, depth).  Keys and values may have fewer heads than
queries, a divisor of their number (grouped-query attention; with one head, multi-query attention):
neighbouring query heads then share a key head.  Weights, masks and biases have the shape
(*batch, heads, query length, key length), or one that broadcasts to it.

There are two implementations.  The *fused* one is `jax.nn.dot_product_attention`, which computes
logits and softmax in float32.  With `implementation="cudnn"`, on an NVIDIA GPU and in a half-precision
dtype, it is a flash kernel, which stores no logits.  Otherwise JAX leaves it to XLA, which stores them
all: memory grows with the square of the length.  The *explicit* one always has the weights, in the dtype
of the query, so that they can be recorded and be subject to dropout.
"""

from __future__ import annotations

import contextlib
import functools
import math
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnxlite.nn._common import Precision, broadcast_shape, broadcasts_to, check_rate, name_of
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn, default_promote_dtype
from nnxlite.objects._module import Module
from nnxlite.variables._kinds import Intermediate

__all__ = ["combine_masks", "dot_product_attention", "make_attention_mask", "make_causal_mask"]

Implementation = tp.Literal["xla", "cudnn"]


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: Precision = None,
    module: Module | None = None,
    promote_dtype: PromoteDtypeFn = default_promote_dtype,
    is_causal: bool = False,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The mean of the values for every query, (*batch, query length, heads, value depth).

    Args:
        query: (*batch, query length, heads, depth).
        key: (*batch, key length, key heads, depth), where key heads divides heads.
        value: (*batch, key length, key heads, value depth).
        bias: added to the logits; broadcasts to (*batch, heads, query length, key length).  -inf
            excludes a key for a query, as the mask does.
        mask: of the same shape; False (or zero) excludes a key for a query.  A query without any
            key gets the mean of all values.
        broadcast_dropout: drop the same keys for all examples and heads.
        dropout_rng: the key for dropout.
        dropout_rate: the probability that a weight is set to zero, from 0 up to, but not
            including, 1.
        deterministic: whether to skip dropout.
        dtype: dtype of the computation; None: what the inputs promote to.
        precision: precision of the products, as in `jax.lax.dot_general`.
        module: where to record the weights, before dropout: as the `Intermediate`
            `attention_weights`, by `module.sow`.
        promote_dtype: casts query, key and value to the dtype of the computation.
        is_causal: exclude keys at later positions than the query.
        implementation: "cudnn" for the flash kernel of NVIDIA GPUs (float16 or bfloat16), "xla" for
            XLA's; see `jax.nn.dot_product_attention`.  None is what JAX takes by default, XLA, which
            stores all logits; the attention is explicit then if there is dropout, the weights are
            recorded, or values have another depth than keys.

    Returns:
        An array (*batch, query length, heads, value depth), of the dtype of the computation.

    Raises:
        ValueError: for shapes that do not match, a dropout rate outside [0, 1), dropout without a
            key, or an `implementation` together with what only the explicit attention can do.
        TypeError: for a mask or bias that does not broadcast.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> query, value = jnp.ones((1, 2, 4, 8)), jnp.arange(3.0).reshape(1, 3, 1, 1)
    >>> key = jnp.ones((1, 3, 1, 8))
    >>> nnx.dot_product_attention(query, key, value, is_causal=True)[0, :, 0, 0].tolist()
    [0.0, 0.5]
    """
    check_rate("dot_product_attention", "dropout_rate", dropout_rate)
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    check_shapes(query, key, value)
    bias, mask = _terms(query, key, bias, mask)
    drop = dropout_rate > 0 and not deterministic
    if implementation is not None:
        obstacle = _obstacle(drop, module, precision, key, value)
        if obstacle:
            raise ValueError(
                f"dot_product_attention(implementation={implementation!r}) is fused, which "
                f"excludes {obstacle}. Leave `implementation` out."
            )
    elif not (dropout_rate == 0 and module is None and _is_fusible(precision, key, value)):
        weights = _weights(query, key, bias, mask, is_causal, precision, module)
        if drop:
            weights = _dropout(weights, dropout_rate, dropout_rng, broadcast_dropout)
        return _mean_value(weights, value, precision)
    return _fused(query, key, value, bias, mask, is_causal, precision, implementation)


def dot_product_attention_weights(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: Precision = None,
    module: Module | None = None,
    promote_dtype: PromoteDtypeFn = default_promote_dtype,
    is_causal: bool = False,
) -> jax.Array:
    """The weights of `dot_product_attention`, (*batch, heads, query length, key length).

    Arguments and errors are those of `dot_product_attention`.

    >>> import jax.numpy as jnp
    >>> from nnxlite.nn.attention import dot_product_attention_weights
    >>> query, key = jnp.ones((1, 2, 4, 8)), jnp.ones((1, 3, 1, 8))
    >>> dot_product_attention_weights(query, key, is_causal=True)[0, 0].tolist()
    [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    """
    check_rate("dot_product_attention_weights", "dropout_rate", dropout_rate)
    query, key = promote_dtype((query, key), dtype=dtype)
    check_shapes(query, key)
    bias, mask = _terms(query, key, bias, mask)
    weights = _weights(query, key, bias, mask, is_causal, precision, module)
    if dropout_rate > 0 and not deterministic:
        return _dropout(weights, dropout_rate, dropout_rng, broadcast_dropout)
    return weights


def _terms(
    query: jax.Array, key: jax.Array, bias: jax.Array | None, mask: jax.Array | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Bias and mask as arrays that broadcast to the logits."""
    shape = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    bias = logit_like("dot_product_attention", "bias", bias, shape)
    mask = logit_like("dot_product_attention", "mask", mask, shape)
    return bias, None if mask is None else mask.astype(bool)


def _is_fusible(precision: Precision, key: jax.Array, value: jax.Array) -> bool:
    """Whether the fused attention does what is asked for.

    It computes in float32, which is too little for float64; XLA does not support float16 on a CPU.
    """
    known = precision is None or _precision_name(precision) is not None
    return known and key.shape == value.shape and key.dtype not in (jnp.float16, jnp.float64)


def _precision_name(precision: Precision) -> str | None:
    """The name of a precision for `jax.default_matmul_precision`; None if it has none."""
    if isinstance(precision, lax.DotAlgorithmPreset):
        return precision.name
    try:
        return lax.Precision(precision).name.lower()
    except ValueError:  # a pair, or an algorithm
        return None


def _obstacle(
    drop: bool, module: Module | None, precision: Precision, key: jax.Array, value: jax.Array
) -> str:
    """What an `implementation` cannot do, in words; empty if it can do all that is asked for."""
    if drop:
        return "dropout"
    if module is not None:
        return "recording the weights (module=..., sow_weights=True)"
    if precision is not None:
        return f"precision={precision!r}"
    if key.shape != value.shape:
        return f"having values of shape {value.shape} for keys of shape {key.shape}"
    return ""


def _fused(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    is_causal: bool,
    precision: Precision,
    implementation: tp.Any,
) -> jax.Array:
    """Attention by JAX's own function, which supports one batch axis and has no precision argument."""
    if bias is not None and jnp.issubdtype(bias.dtype, jnp.floating):
        bias = jnp.maximum(bias, jnp.finfo(bias.dtype).min)  # as in `_weights`
    shape, batch = query.shape, query.shape[:-3]

    def one_batch_axis(x: tp.Any) -> tp.Any:
        if x is None or len(batch) < 2:
            return x
        x = jnp.reshape(x, (*(1,) * (len(batch) + 3 - x.ndim), *x.shape))
        if math.prod(x.shape[:-3]) == 1:
            return jnp.reshape(x, (1, *x.shape[-3:]))
        return jnp.reshape(jnp.broadcast_to(x, (*batch, *x.shape[-3:])), (-1, *x.shape[-3:]))

    query, key, value, bias, mask = map(one_batch_axis, (query, key, value, bias, mask))
    ambient = contextlib.nullcontext()
    if precision is not None:
        ambient = jax.default_matmul_precision(_precision_name(precision))
    with ambient:
        result = jax.nn.dot_product_attention(
            query, key, value, bias, mask, is_causal=is_causal, implementation=implementation
        )
    return jnp.reshape(result, shape)


def _weights(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    is_causal: bool,
    precision: Precision,
    module: Module | None,
) -> jax.Array:
    """The weights, (*batch, heads, query length, key length), in the query's dtype; in `module` too."""
    dtype, heads, groups = query.dtype, query.shape[-2], key.shape[-2]
    wide = jnp.promote_types(dtype, jnp.float32)  # a logit may be too large for float16
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=wide)
    query = query / jnp.sqrt(query.shape[-1]).astype(dtype)
    if groups == heads:
        logits = product("...qhd,...khd->...hqk", query, key)
    else:
        query = query.reshape(*query.shape[:-2], groups, heads // groups, query.shape[-1])
        logits = product("...qhgd,...khd->...hgqk", query, key)
        logits = logits.reshape(*logits.shape[:-4], heads, *logits.shape[-2:])
    if bias is not None:
        # A row of -inf (all keys excluded) would make the softmax and its gradient NaN.
        logits = jnp.maximum(logits + bias, jnp.finfo(logits.dtype).min)
    if is_causal:
        causal = jnp.tril(jnp.ones(logits.shape[-2:], bool))
        mask = causal if mask is None else jnp.logical_and(mask, causal)
    if mask is not None:
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    weights = jax.nn.softmax(logits).astype(dtype)
    if module is not None:
        module.sow(Intermediate, "attention_weights", weights)
    return weights


def _dropout(weights: jax.Array, rate: float, key: jax.Array | None, broadcast: bool) -> jax.Array:
    """The weights with random ones set to zero and the others scaled up."""
    if key is None:
        raise ValueError(
            "dot_product_attention: dropout_rng is required when dropout_rate > 0 and "
            f"deterministic=False; dropout_rate={rate}."
        )
    shape = weights.shape
    if broadcast:
        shape = (*(1,) * (len(shape) - 2), *shape[-2:])
    keep = jax.random.bernoulli(key, 1.0 - rate, shape)
    return weights * (keep.astype(weights.dtype) / jnp.asarray(1.0 - rate, weights.dtype))


def _mean_value(weights: jax.Array, value: jax.Array, precision: Precision) -> jax.Array:
    """The weighted sums of the values, (*batch, query length, heads, value depth)."""
    *batch, heads, queries, keys = weights.shape
    groups = value.shape[-2]
    if groups == heads:
        return jnp.einsum("...hqk,...khd->...qhd", weights, value, precision=precision)
    weights = weights.reshape(*batch, groups, heads // groups, queries, keys)
    result = jnp.einsum("...hgqk,...khd->...qhgd", weights, value, precision=precision)
    return result.reshape(*batch, queries, heads, value.shape[-1])


def check_shapes(query: jax.Array, key: jax.Array, value: jax.Array | None = None) -> None:
    """Raise ValueError unless the shapes of query, key and value (if any) match."""
    shapes = f"query has shape {query.shape}, key {key.shape}"
    shapes += "" if value is None else f", value {value.shape}"
    value = key if value is None else value

    def refuse(what: str) -> tp.NoReturn:
        raise ValueError(
            f"dot_product_attention: {what}. Arrays are (*batch, length, heads, depth); {shapes}."
        )

    if not query.ndim == key.ndim == value.ndim or query.ndim < 3:
        refuse("query, key and value need the same number of dimensions, three or more")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        refuse("the batch dimensions of query, key and value differ")
    if key.shape[-3] != value.shape[-3]:
        refuse("there must be one value for every key")
    if key.shape[-2] != value.shape[-2]:
        refuse("key and value need the same number of heads")
    if not key.shape[-2] or query.shape[-2] % key.shape[-2]:
        refuse("the number of key heads must divide the number of query heads")
    if query.shape[-1] != key.shape[-1]:
        refuse("query and key need the same depth")


def logit_like(
    caller: tp.Any, name: str, x: jax.Array | None, shape: tuple[int, ...]
) -> jax.Array | None:
    """`x` as an array that broadcasts to the shape of the logits; TypeError if it does not."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if not broadcasts_to(x.shape, shape):
        raise TypeError(
            f"{name_of(caller)} got a {name} of shape {x.shape}, which does not broadcast to "
            f"(*batch, heads, query length, key length) = {shape}."
        )
    return x


def make_attention_mask(
    query_input: jax.Array,
    key_input: jax.Array,
    pairwise_fn: tp.Callable[..., tp.Any] = jnp.multiply,
    extra_batch_dims: int = 0,
    dtype: Dtype = jnp.float32,
) -> jax.Array:
    """A mask made by comparing every query with every key.

    Args:
        query_input: (*batch, query length), what `pairwise_fn` compares: validity, positions or
            segment numbers.
        key_input: (*batch, key length).
        pairwise_fn: an elementwise function of two arguments that broadcast.
        extra_batch_dims: how many batch axes of size one to add in front.
        dtype: dtype of the mask.

    Returns:
        An array of shape (*batch, 1, query length, key length).

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> valid = jnp.array([1.0, 1.0, 0.0])
    >>> print(nnx.make_attention_mask(valid, valid, dtype=jnp.int32)[0])
    [[1 1 0]
     [1 1 0]
     [0 0 0]]
    """
    query_input, key_input = jnp.asarray(query_input), jnp.asarray(key_input)
    if not query_input.ndim or not key_input.ndim:
        raise ValueError(
            "make_attention_mask compares sequences, (*batch, length); got inputs of shape "
            f"{query_input.shape} and {key_input.shape}."
        )
    mask = pairwise_fn(query_input[..., :, None], key_input[..., None, :])
    mask = jnp.expand_dims(mask, -3)
    mask = jnp.expand_dims(mask, tuple(range(extra_batch_dims)))
    return mask.astype(dtype)


def make_causal_mask(
    x: jax.Array, extra_batch_dims: int = 0, dtype: Dtype = jnp.float32
) -> jax.Array:
    """A mask that lets each position attend to itself and to earlier ones.

    Args:
        x: (*batch, length); only its shape matters.
        extra_batch_dims: how many batch axes of size one to add in front.
        dtype: dtype of the mask.

    Returns:
        An array of shape (*batch, 1, length, length).

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> print(nnx.make_causal_mask(jnp.zeros(3), dtype=jnp.int32)[0])
    [[1 0 0]
     [1 1 0]
     [1 1 1]]
    """
    shape = np.shape(x)
    positions = jnp.broadcast_to(jnp.arange(shape[-1]), shape) if shape else jnp.zeros(shape)
    return make_attention_mask(positions, positions, jnp.greater_equal, extra_batch_dims, dtype)


def combine_masks(*masks: jax.Array | None, dtype: Dtype = jnp.float32) -> jax.Array | None:
    """The mask that is True where all of the masks are; None if all of them are None.

    Args:
        *masks: masks with the same number of dimensions; None means no mask.
        dtype: dtype of the result.

    Returns:
        An array of the shape that the masks broadcast to.

    Raises:
        ValueError: for masks of different numbers of dimensions.
        TypeError: for masks that do not broadcast.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> print(nnx.combine_masks(jnp.array([1, 0, 1]), None, jnp.array([1, 1, 0])))
    [1. 0. 0.]
    """
    given = [jnp.asarray(mask, bool) for mask in masks if mask is not None]
    if not given:
        return None
    shapes = [mask.shape for mask in given]
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(f"combine_masks: masks must have same rank, got the shapes {shapes}.")
    if broadcast_shape(*shapes) is None:
        raise TypeError(f"combine_masks got shapes that do not broadcast: {shapes}.")
    return functools.reduce(jnp.logical_and, given).astype(dtype)
