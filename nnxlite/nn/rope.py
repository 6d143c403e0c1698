"""Rotary position embedding: `RoPE`, and attention that uses it.

RoPE (Su et al. 2021, https://arxiv.org/abs/2104.09864) rotates pairs of features of a query or key
by an angle proportional to its position, so that the product of the two depends only on the
distance between them.  Feature i is paired with feature i + depth/2; from one position to the next,
pair i is rotated by `theta ** (-2 i / depth)`.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp

from nnxlite.nn._common import broadcasts_to
from nnxlite.nn.attention import check_shapes, dot_product_attention
from nnxlite.objects._fields import data
from nnxlite.objects._module import Module
from nnxlite.variables._variable import Variable

__all__ = ["RoPE", "dot_product_attention_with_rope"]


class RoPE(Module):
    """Rotates the features of each position by angles proportional to the position.

    Args:
        theta: base of the angles; the larger, the slower the last pairs rotate.
        embedding_size, max_seq_len: pass both or neither.  With both, sines and cosines for this
            depth and the positions below `max_seq_len` are computed once and stored.

    Attributes:
        cached_sin, cached_cos: Variables of shape (max_seq_len, embedding_size // 2), or None.

    Raises:
        ValueError: if only one of the two sizes is given, or the depth is odd.
        TypeError: for an input with another depth than the stored sines, or longer than these.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> rope = nnx.RoPE()
    >>> rope(jnp.ones((3, 2)))[0].tolist()
    [1.0, 1.0]
    """

    cached_sin: Variable[jax.Array] | None
    cached_cos: Variable[jax.Array] | None

    def __init__(
        self,
        theta: float = 10000.0,
        embedding_size: int | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        if (embedding_size is None) != (max_seq_len is None):
            raise ValueError(
                "RoPE: Either both `embedding_size` and `max_seq_len` or none of them must be "
                f"provided; got embedding_size={embedding_size}, max_seq_len={max_seq_len}."
            )
        self.theta = theta
        self.cached_sin, self.cached_cos = data(None), data(None)
        if embedding_size is not None and max_seq_len is not None:
            dtype = jnp.result_type(float)
            sin, cos = _angles(self.theta, jnp.arange(max_seq_len), embedding_size, dtype)
            self.cached_sin, self.cached_cos = Variable(sin), Variable(cos)

    def __call__(self, x: jax.Array, input_positions: jax.Array | None = None) -> jax.Array:
        """The input with its features rotated, (..., length, depth).

        Args:
            x: (..., length, depth), of an even depth.
            input_positions: (length,), or (..., length) that broadcasts; by default 0, 1, 2, ...

        The result is float32 if the input is less precise.
        """
        x = jnp.asarray(x)
        if x.ndim < 2:
            raise ValueError(f"RoPE takes inputs (..., length, depth), got shape {x.shape}.")
        sin, cos = (_twice(part, x.ndim) for part in _sin_cos(self, x, input_positions))
        first, second = jnp.split(x, 2, axis=-1)
        return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def _sin_cos(rope: RoPE, x: jax.Array, positions: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Sines and cosines for an input, (..., length, depth // 2)."""
    shape, dtype = x.shape, jnp.finfo(jnp.promote_types(x.dtype, jnp.float32)).dtype
    length, depth = shape[-2:]
    if positions is not None:
        return _angles(rope.theta, _checked_positions(positions, shape), depth, dtype)
    if rope.cached_sin is None or rope.cached_cos is None:
        return _angles(rope.theta, jnp.arange(length), depth, dtype)
    sin, cos = rope.cached_sin[...], rope.cached_cos[...]
    if length > sin.shape[0] or depth != 2 * sin.shape[1]:
        raise TypeError(
            f"RoPE(embedding_size={2 * sin.shape[1]}, max_seq_len={sin.shape[0]}) got an input "
            f"of shape {shape}: {length} positions of depth {depth}. Make it for these sizes, "
            "or without sizes."
        )
    return sin[:length].astype(dtype), cos[:length].astype(dtype)


def _angles(
    theta: float, positions: jax.Array, depth: int, dtype: tp.Any
) -> tuple[jax.Array, jax.Array]:
    """Sine and cosine of every angle, positions.shape + (depth // 2,)."""
    if depth < 2 or depth % 2:
        raise ValueError(
            f"RoPE pairs features: `embedding_size` must be positive and even, and it is {depth}."
        )
    steps = 1.0 / theta ** (jnp.arange(0, depth, 2, dtype=dtype) / depth)
    angles = positions[..., None].astype(dtype) * jnp.expand_dims(
        steps, tuple(range(positions.ndim))
    )
    return jnp.sin(angles), jnp.cos(angles)


def _twice(part: jax.Array, ndim: int) -> jax.Array:
    """Sines or cosines for both halves of the features, with `ndim` axes."""
    both = jnp.concatenate([part, part], axis=-1)
    return jnp.expand_dims(both, tuple(range(ndim - both.ndim)))


def _checked_positions(positions: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The positions, which must broadcast to the input's shape without its depth."""
    positions = jnp.asarray(positions)
    same_length = positions.ndim > 0 and positions.shape[-1] == shape[-2]
    if not same_length or not broadcasts_to(positions.shape, shape[:-1]):
        raise ValueError(
            f"RoPE got input_positions of shape {positions.shape} for an input of shape {shape}; "
            f"they need the length of the input, {shape[-2]}, and must broadcast to {shape[:-1]}."
        )
    return positions


def dot_product_attention_with_rope(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    rope: tp.Callable[..., jax.Array],
    input_positions: jax.Array | None = None,
    attention_fn: tp.Callable[..., jax.Array] = dot_product_attention,
    **kwargs: tp.Any,
) -> jax.Array:
    """`dot_product_attention` with queries and keys rotated by their positions.

    Use it as the `attention_fn` of `MultiHeadAttention`; in a decoding step the layer passes the
    position of its token.

    Args:
        query, key, value: as in `dot_product_attention`, (*batch, length, heads, depth).
        rope: a `RoPE`, or a function like it: of an array (*batch, heads, length, depth) and, if
            there are any, positions.
        input_positions: positions of the queries, (length,) or (*batch, length); by default 0, 1,
            2, ...  Keys have the same positions if there are as many of them as queries, and 0, 1,
            2, ... otherwise.
        attention_fn: what rotated queries and keys are given to.
        **kwargs: as in `dot_product_attention`.

    Returns:
        An array (*batch, query length, heads, value depth).

    >>> import functools
    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    >>> layer = nnx.MultiHeadAttention(2, 8, attention_fn=attend, decode=False, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 5, 8))).shape
    (1, 5, 8)
    """

    def rotated(x: jax.Array, positions: jax.Array | None) -> jax.Array:
        x = jnp.swapaxes(x, -3, -2)
        if positions is None:
            x = rope(x)
        else:
            positions = jnp.asarray(positions)
            x = rope(x, positions[..., None, :] if positions.ndim > 1 else positions)
        return jnp.swapaxes(x, -3, -2)

    check_shapes(query, key, value)
    same_length = key.shape[-3] == query.shape[-3]
    key = rotated(key, input_positions if same_length else None)
    return attention_fn(rotated(query, input_positions), key, value, **kwargs)
