"""`ring_attention`: attention over a sequence that is spread over devices.

Each device has a part of the queries, keys and values.  Keys and values travel round the ring of
devices, one hop in each step, and every device attends to each part as it passes by (Liu et al. 2023,
https://arxiv.org/abs/2310.01889).  The softmax is put together from the parts (Milakov and Gimelshein
2018, https://arxiv.org/abs/1805.02867):

    top    the largest logit so far, for each query
    total  the sum of exp(logit - top) so far
    mean   the sum of exp(logit - top) * value so far, which is divided by the total at the end

The backward pass goes round the ring once more, and computes the weights again from top and total, so
that no device ever stores more than its part, nor any weights.
"""

from __future__ import annotations

import functools
import math
import typing as tp

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from nnxlite._base.jax import current_mesh
from nnxlite.nn._common import Precision, check_rate
from nnxlite.nn.attention import check_shapes, logit_like
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn, default_promote_dtype


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    axis: str = "sequence",
    mesh: tp.Any = None,
    is_causal: bool = False,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: Precision = None,
    module: tp.Any = None,
    promote_dtype: PromoteDtypeFn = default_promote_dtype,
) -> jax.Array:
    """`dot_product_attention` over a sequence that lies along an axis of the mesh.

    Use it as the `attention_fn` of `MultiHeadAttention`.  Other axes of the mesh are left to JAX: batch
    and heads may be sharded too.  Inside a `shard_map` over `axis`, the arrays are the parts of one
    device; anywhere else they are whole.

    Args:
        query: (*batch, query length, heads, depth).
        key: (*batch, key length, key heads, depth), where key heads divides heads.
        value: of the shape of `key`, or of another depth.
        mask: broadcasts to (*batch, heads, query length, key length), where the key length is that of
            all devices together; False (or zero) excludes a key for a query.
        axis: the mesh axis that the sequence lies along.
        mesh: the mesh; the one of `jax.set_mesh` by default.
        is_causal: exclude keys at later positions than the query.
        broadcast_dropout: drop the same keys for all examples and heads.
        dropout_rng: the key for dropout.
        dropout_rate: the probability that a weight is set to zero.  The weights that are dropped are
            others than those of `dot_product_attention` for the same key.
        deterministic: whether to skip dropout.
        dtype: dtype of the computation; None: what the inputs promote to.  Logits and sums are at
            least float32.
        precision: precision of the products, as in `jax.lax.dot_general`.
        module: must be None, since no device has all weights of a query to record them.
        promote_dtype: casts query, key and value to the dtype of the computation.

    Returns:
        An array (*batch, query length, heads, value depth), of the dtype of the computation.

    Raises:
        ValueError: for shapes that do not match, lengths that the axis does not divide, a mesh that
            is missing or has no such axis, weights that are to be recorded, a dropout rate outside
            [0, 1), dropout without a key.
        TypeError: for a mask that does not broadcast.

    >>> import functools
    >>> import jax, jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> mesh = jax.make_mesh((1,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> attend = functools.partial(nnx.ring_attention, mesh=mesh)
    >>> layer = nnx.MultiHeadAttention(2, 8, attention_fn=attend, decode=False, rngs=nnx.Rngs(0))
    >>> x = nnx.Rngs(1).normal((3, 4, 8))
    >>> whole = nnx.clone(layer)
    >>> whole.attention_fn = nnx.dot_product_attention
    >>> bool(jnp.allclose(layer(x, is_causal=True), whole(x, is_causal=True), atol=1e-5))
    True
    """
    check_rate("ring_attention", "dropout_rate", dropout_rate)
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    check_shapes(query, key, value)
    if module is not None:
        raise ValueError(
            "ring_attention cannot record the weights (module=..., sow_weights=True): each device "
            "has only those of the keys that pass by. Use nnx.dot_product_attention to look at them."
        )
    drops = dropout_rate > 0 and not deterministic
    if drops and dropout_rng is None:
        raise ValueError(
            "ring_attention: dropout_rng is required when dropout_rate > 0 and deterministic=False; "
            f"dropout_rate={dropout_rate}."
        )
    size, inside, mesh = _axis(axis, mesh)
    parts = size if inside else 1  # how many times longer the whole key sequence is than `key`
    if mask is not None:
        shape = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3] * parts)
        mask = tp.cast(jax.Array, logit_like("ring_attention", "mask", mask, shape)).astype(bool)
        mask = jnp.broadcast_to(mask, (*mask.shape[:-2], *shape[-2:]))
        mask = jnp.expand_dims(mask, tuple(range(query.ndim - mask.ndim)))
    settings = _Settings(
        axis, size, is_causal, float(dropout_rate) if drops else 0.0, broadcast_dropout, precision
    )
    rng = jax.random.key(0) if dropout_rng is None else dropout_rng
    if inside:
        return _ring(settings, query, key, value, mask, rng)
    _check_lengths(axis, size, query, key)
    return _over_mesh(settings, mesh, query, key, value, mask, rng)


def _axis(axis: str, mesh: tp.Any) -> tuple[int, bool, tp.Any]:
    """The number of devices along the axis; whether each already has its part; the mesh."""
    here = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(here.axis_names, here.axis_types))
    if kinds.get(axis) is AxisType.Manual:
        return here.shape[axis], True, here
    mesh = current_mesh() if mesh is None else mesh
    if mesh is None:
        raise ValueError(
            f"ring_attention needs a mesh with the axis {axis!r}. Pass mesh=..., or call it within "
            "jax.set_mesh(mesh)."
        )
    if axis not in mesh.axis_names:
        raise ValueError(
            f"ring_attention: the mesh with axes {tuple(mesh.axis_names)} has no axis {axis!r}. Name "
            "the one that the sequence lies along, as in functools.partial(nnx.ring_attention, "
            f"axis={next(iter(mesh.axis_names), 'sequence')!r})."
        )
    # Inside a shard_map over other axes, JAX expects the mesh on which those are manual.
    return mesh.shape[axis], False, here if AxisType.Manual in kinds.values() else mesh


def _check_lengths(axis: str, size: int, query: jax.Array, key: jax.Array) -> None:
    for name, x in (("query", query), ("key", key)):
        if x.shape[-3] % size:
            raise ValueError(
                f"ring_attention: the {name} has length {x.shape[-3]} (shape {x.shape}), which the "
                f"{size} devices along the mesh axis {axis!r} do not divide. Pad the sequence, and "
                "exclude the padding with a mask."
            )


class _Settings(tp.NamedTuple):
    """What is known about a ring when it is traced."""

    axis: str
    size: int
    is_causal: bool
    rate: float
    broadcast: bool
    precision: Precision


class _Part(tp.NamedTuple):
    """The logits of a device's queries for the keys it currently has, with mask and dropout."""

    logits: jax.Array  # (*batch, key heads, group, query length, key length)
    allowed: jax.Array | None  # of a shape that broadcasts to it
    factor: jax.Array | None  # what dropout multiplies the weights by


def _attend(
    settings: _Settings,
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None,
    rng: jax.Array,
    step: jax.Array,
) -> _Part:
    here = lax.axis_index(settings.axis)
    source = (here - step) % settings.size
    queries, keys = query.shape[-4], key.shape[-3]
    logits = _product("...qhgd,...khd->...hgqk", query, key, settings)
    logits = logits / math.sqrt(query.shape[-1])
    allowed = None
    if mask is not None:
        allowed = lax.dynamic_slice_in_dim(mask, source * keys, keys, mask.ndim - 1)
        grouped = (1, 1) if allowed.shape[-3] == 1 else query.shape[-3:-1]
        allowed = allowed.reshape(*allowed.shape[:-3], *grouped, queries, keys)
    if settings.is_causal:
        rows = here * queries + jnp.arange(queries)[:, None]
        causal = rows >= source * keys + jnp.arange(keys)
        allowed = causal if allowed is None else allowed & causal
    if allowed is not None:
        # As in dot_product_attention: a query without any key gets the mean of all values.
        logits = jnp.where(allowed, logits, jnp.finfo(logits.dtype).min * 0.7)
    factor = None
    if settings.rate:
        shape = (queries, keys) if settings.broadcast else logits.shape
        rng = jax.random.fold_in(rng, here * settings.size + source)
        keep = jax.random.bernoulli(rng, 1.0 - settings.rate, shape)
        factor = keep.astype(logits.dtype) / (1.0 - settings.rate)
    return _Part(logits, allowed, factor)


def _product(equation: str, one: jax.Array, other: jax.Array, settings: _Settings) -> jax.Array:
    """A product of arrays of the computation's dtype, in float32 at least."""
    dtype = jnp.promote_types(other.dtype, jnp.float32)
    one = one.astype(other.dtype)
    return jnp.einsum(
        equation, one, other, precision=settings.precision, preferred_element_type=dtype
    )


def _rotated(settings: _Settings, tree: tp.Any) -> tp.Any:
    """What the previous device of the ring has."""
    hops = [(i, (i + 1) % settings.size) for i in range(settings.size)]
    return jax.tree.map(lambda x: lax.ppermute(x, settings.axis, hops), tree)


def _grouped(query: jax.Array, key: jax.Array) -> jax.Array:
    """Queries (*batch, length, key heads, group, depth): a group shares a key head."""
    *lead, heads, depth = query.shape
    return query.reshape(*lead, key.shape[-2], heads // key.shape[-2], depth)


@functools.partial(jax.jit, static_argnums=(0, 1))  # for calls outside of every other program
def _over_mesh(
    settings: _Settings, mesh: tp.Any, query: jax.Array, *others: jax.Array | None
) -> jax.Array:
    """`_ring` on every device, for whole arrays."""
    lead = (None,) * (query.ndim - 3)
    along, rows = PartitionSpec(*lead, settings.axis), PartitionSpec(*lead, None, settings.axis)
    return jax.shard_map(
        functools.partial(_ring, settings),
        mesh=mesh,
        in_specs=(along, along, along, rows, PartitionSpec()),
        out_specs=along,
        axis_names={settings.axis},
        check_vma=False,  # the rule of the derivative is ours
    )(query, *others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    settings: _Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    rng: jax.Array,
) -> jax.Array:
    """The result for the queries of this device."""
    return _forward(settings, query, key, value, mask, rng)[0]


def _forward(
    settings: _Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    rng: jax.Array,
) -> tuple[jax.Array, tp.Any]:
    grouped = _grouped(query, key)
    dtype = jnp.promote_types(query.dtype, jnp.float32)

    def add(sums: tp.Any, parts: tp.Any, step: jax.Array) -> tp.Any:
        top, total, mean = sums
        logits, _, factor = _attend(settings, grouped, parts[0], mask, rng, step)
        larger = jnp.maximum(top, logits.max(-1))
        scale, weights = jnp.exp(top - larger), jnp.exp(logits - larger[..., None])
        total = total * scale + weights.sum(-1)
        weights = weights if factor is None else weights * factor
        added = _product("...hgqk,...khd->...hgqd", weights, parts[1], settings)
        return larger, total, mean * scale[..., None] + added

    def hop(carry: tp.Any, step: jax.Array) -> tp.Any:
        sums, parts = carry
        parts = _rotated(settings, parts)
        return (add(sums, parts, step), parts), None

    rows = (*grouped.shape[:-4], *grouped.shape[-3:-1], grouped.shape[-4])
    sums = (
        jnp.full(rows, -jnp.inf, dtype),
        jnp.zeros(rows, dtype),
        jnp.zeros((*rows, value.shape[-1]), dtype),
    )
    sums = add(sums, (key, value), jnp.array(0))
    ((top, total, mean), _), _ = lax.scan(hop, (sums, (key, value)), jnp.arange(1, settings.size))
    out = jnp.moveaxis(mean / total[..., None], -2, -4)
    out = out.reshape(*query.shape[:-1], value.shape[-1]).astype(query.dtype)
    return out, (query, key, value, mask, rng, out, top, total)


def _backward(settings: _Settings, saved: tp.Any, cotangent: jax.Array) -> tp.Any:
    """The cotangents of the operands.

    Those of keys and values travel round the ring with them, back to the device that owns them.
    """
    query, key, value, mask, rng, out, top, total = saved
    grouped = _grouped(query, key)
    cotangent = _grouped(cotangent, value)
    product = functools.partial(_product, settings=settings)
    inner = (cotangent.astype(total.dtype) * _grouped(out, value).astype(total.dtype)).sum(-1)
    inner = jnp.moveaxis(inner, -3, -1)[..., None]  # like the logits
    scale = 1.0 / math.sqrt(query.shape[-1])

    def hop(carry: tp.Any, step: jax.Array) -> tp.Any:
        d_query, parts = carry
        key, value, d_key, d_value = parts
        logits, allowed, factor = _attend(settings, grouped, key, mask, rng, step)
        weights = jnp.exp(logits - top[..., None]) / total[..., None]
        dropped = weights if factor is None else weights * factor
        d_value = d_value + product("...hgqk,...qhgd->...khd", dropped, cotangent)
        d_weights = product("...qhgd,...khd->...hgqk", cotangent, value)
        d_weights = d_weights if factor is None else d_weights * factor
        d_logits = weights * (d_weights - inner) * scale
        if allowed is not None:
            d_logits = jnp.where(allowed, d_logits, 0)
        d_query = d_query + product("...hgqk,...khd->...qhgd", d_logits, key)
        d_key = d_key + product("...hgqk,...qhgd->...khd", d_logits, grouped)
        return (d_query, _rotated(settings, (key, value, d_key, d_value))), None

    zeros = functools.partial(jnp.zeros_like, dtype=total.dtype)
    start = zeros(grouped), (key, value, zeros(key), zeros(value))
    (d_query, (_, _, d_key, d_value)), _ = lax.scan(hop, start, jnp.arange(settings.size))
    d_query = d_query.reshape(query.shape)
    return (
        d_query.astype(query.dtype),
        d_key.astype(key.dtype),
        d_value.astype(value.dtype),
        None,
        None,
    )


_ring.defvjp(_forward, _backward)
