"""Attention over a sequence that lies along an axis of the mesh: a function to copy.

Every device has its part of the queries, keys and values.  Keys and values go round the ring of
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
from jax.sharding import PartitionSpec as P

import nnxlite as nnx


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    axis: str = "sequence",
    is_causal: bool = False,
    **others: tp.Any,
) -> jax.Array:
    """`nnx.dot_product_attention` on the mesh of `jax.set_mesh`; an `attention_fn` of a layer.

    Args:
        query: (*batch, query length, heads, depth); the axis divides its length, and that of the keys.
        key: (*batch, key length, key heads, depth), where key heads divides heads.
        value: of the shape of `key`, or of another depth.
        mask: broadcasts to (*batch, heads, query length, key length); False excludes a key for a query.
        axis: the mesh axis that the sequence lies along. The others are left to JAX. In a mesh without
            it, this is `nnx.dot_product_attention`.
        is_causal: exclude keys at later positions than the query.
        others: as a layer passes them; along a ring nothing is dropped or recorded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.axis_names:
        attend = functools.partial(nnx.dot_product_attention, is_causal=is_causal, **others)
        return attend(query, key, value, mask=mask)
    if (
        others.get("module") is not None
        or others.get("dropout_rate")
        and not others["deterministic"]
    ):
        raise ValueError(
            "ring_attention neither drops nor records weights: no device has them all."
        )
    lead = (None,) * (query.ndim - 3)
    along, rows = P(*lead, axis), P(*lead, None, axis)
    if mask is not None:
        shape = (*query.shape[:-3], 1, query.shape[-3], key.shape[-3])
        mask = jnp.broadcast_to(mask, jnp.broadcast_shapes(jnp.shape(mask), shape)).astype(bool)
    return jax.shard_map(
        functools.partial(ring, (axis, mesh.shape[axis], is_causal)),
        in_specs=(along, along, along, rows),
        out_specs=along,
        axis_names={axis},
        check_vma=False,  # the rule of the derivative is ours
    )(query, key, value, mask)


Ring: tp.TypeAlias = tuple[str, int, bool]
"""The axis, its size, and whether attention is causal."""


def logits_at(
    settings: Ring, query: jax.Array, key: jax.Array, mask: jax.Array | None, step: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Logits (*batch, key heads, group, queries, keys) of the keys that are here now, and their mask."""
    axis, size, is_causal = settings
    here = lax.axis_index(axis)
    source = (here - step) % size
    queries, keys = query.shape[-4], key.shape[-3]
    logits = product("...qhgd,...khd->...hgqk", query, key) / math.sqrt(query.shape[-1])
    allowed = None
    if mask is not None:
        allowed = lax.dynamic_slice_in_dim(mask, source * keys, keys, mask.ndim - 1)
        groups = (1, 1) if allowed.shape[-3] == 1 else query.shape[-3:-1]
        allowed = allowed.reshape(*allowed.shape[:-3], *groups, queries, keys)
    if is_causal:
        rows = here * queries + jnp.arange(queries)[:, None]
        causal = rows >= source * keys + jnp.arange(keys)
        allowed = causal if allowed is None else allowed & causal
    if allowed is not None:  # a query without any key gets the mean of all values
        logits = jnp.where(allowed, logits, jnp.finfo(logits.dtype).min * 0.7)
    return logits, allowed


def product(equation: str, one: jax.Array, other: jax.Array) -> jax.Array:
    """A product in the dtype of `other`, summed in float32 at least."""
    dtype = jnp.promote_types(other.dtype, jnp.float32)
    return jnp.einsum(equation, one.astype(other.dtype), other, preferred_element_type=dtype)


def rotated(settings: Ring, tree: tp.Any) -> tp.Any:
    """What the previous device of the ring has."""
    hops = [(i, (i + 1) % settings[1]) for i in range(settings[1])]
    return jax.tree.map(lambda x: lax.ppermute(x, settings[0], hops), tree)


def grouped(query: jax.Array, key: jax.Array) -> jax.Array:
    """Queries (*batch, length, key heads, group, depth): a group shares a key head."""
    *lead, heads, depth = query.shape
    return query.reshape(*lead, key.shape[-2], heads // key.shape[-2], depth)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring(
    settings: Ring, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """The result for the queries of this device."""
    return forward(settings, query, key, value, mask)[0]


def forward(
    settings: Ring, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, tp.Any]:
    groups = grouped(query, key)
    dtype = jnp.promote_types(query.dtype, jnp.float32)

    def add(carry: tp.Any, step: jax.Array) -> tp.Any:
        (top, total, mean), (key, value) = carry
        logits, _ = logits_at(settings, groups, key, mask, step)
        larger = jnp.maximum(top, logits.max(-1))
        scale, weights = jnp.exp(top - larger), jnp.exp(logits - larger[..., None])
        mean = mean * scale[..., None] + product("...hgqk,...khd->...hgqd", weights, value)
        sums = larger, total * scale + weights.sum(-1), mean
        return (sums, rotated(settings, (key, value))), None

    rows = (*groups.shape[:-4], *groups.shape[-3:-1], groups.shape[-4])
    zeros = jnp.zeros((*rows, value.shape[-1]), dtype)
    sums = jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), zeros
    first, _ = add((sums, (key, value)), jnp.array(0))  # by itself: explicit axes are in its types
    ((top, total, mean), _), _ = lax.scan(add, first, jnp.arange(1, settings[1]))
    out = jnp.moveaxis(mean / total[..., None], -2, -4)
    out = out.reshape(*query.shape[:-1], value.shape[-1]).astype(query.dtype)
    return out, (query, key, value, mask, out, top, total)


def backward(settings: Ring, saved: tp.Any, cotangent: jax.Array) -> tp.Any:
    """The cotangents; those of keys and values travel with them, back to the device that owns them."""
    query, key, value, mask, out, top, total = saved
    groups = grouped(query, key)
    cotangent = grouped(cotangent, value)
    inner = (cotangent.astype(total.dtype) * grouped(out, value).astype(total.dtype)).sum(-1)
    inner = jnp.moveaxis(inner, -3, -1)[..., None]  # like the logits
    scale = 1.0 / math.sqrt(query.shape[-1])

    def hop(carry: tp.Any, step: jax.Array) -> tp.Any:
        d_query, (key, value, d_key, d_value) = carry
        logits, allowed = logits_at(settings, groups, key, mask, step)
        weights = jnp.exp(logits - top[..., None]) / total[..., None]
        d_value = d_value + product("...hgqk,...qhgd->...khd", weights, cotangent)
        d_weights = product("...qhgd,...khd->...hgqk", cotangent, value)
        d_logits = weights * (d_weights - inner) * scale
        if allowed is not None:
            d_logits = jnp.where(allowed, d_logits, 0)
        d_query = d_query + product("...hgqk,...khd->...qhgd", d_logits, key)
        d_key = d_key + product("...hgqk,...qhgd->...khd", d_logits, groups)
        return (d_query, rotated(settings, (key, value, d_key, d_value))), None

    zeros = functools.partial(jnp.zeros_like, dtype=total.dtype)
    start = zeros(groups), (key, value, zeros(key), zeros(value))
    (d_query, (_, _, d_key, d_value)), _ = lax.scan(hop, start, jnp.arange(settings[1]))
    pairs = ((d_query.reshape(query.shape), query), (d_key, key), (d_value, value))
    return *(d.astype(x.dtype) for d, x in pairs), None


ring.defvjp(forward, backward)
