"""`Dropout`: regularisation by setting random elements to zero."""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from nnxlite.nn._common import KeySource, check_rate, draw_key, own_stream, resolve_mode
from nnxlite.objects._fields import data
from nnxlite.objects._module import Module, layer_name
from nnxlite.objects._rngs import Rngs, RngStream

__all__ = ["Dropout"]


class Dropout(Module):
    """Sets random elements of its input to zero, and scales the others by `1 / (1 - rate)`.

    The result has the shape and dtype of the input, and the same mean over many draws.  It is the
    input itself if `deterministic` is set or the rate is zero.  Source: Srivastava et al.,
    "Dropout: A Simple Way to Prevent Neural Networks from Overfitting" (2014).

    Args:
        rate: the probability that an element is set to zero, from 0 to 1.
        broadcast_dims: axes along which all elements are dropped together.
        deterministic: whether to return the input unchanged; None leaves it to each call.
        rng_collection: name of the stream to draw from.
        rngs: the source of random keys.  The layer has a stream of its own, forked from the stream
            `rng_collection` (or from the default one if there is none of this name).

    Raises:
        TypeError: for a rate that is not a number, `rngs` of another type, or an input that is not
            floating.
        ValueError: for a rate outside [0, 1]; when called without a key, or without
            `deterministic` if the layer has none.
        KeyError: if `rngs` does not have this stream.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    >>> sorted(set(dropout(jnp.ones(100)).tolist()))
    [0.0, 2.0]
    >>> dropout(jnp.ones(3), deterministic=True).tolist()
    [1.0, 1.0, 1.0]
    """

    rngs: RngStream | None

    def __init__(
        self,
        rate: float,
        *,
        broadcast_dims: tp.Sequence[int] = (),
        deterministic: bool | None = False,
        rng_collection: str = "dropout",
        rngs: Rngs | RngStream | None = None,
    ) -> None:
        check_rate(self, "rate", rate, below_one=False)
        self.rate = rate
        self.broadcast_dims = tuple(broadcast_dims)
        self.deterministic = deterministic
        self.rng_collection = rng_collection
        self.rngs = data(own_stream(self, _named(self, rngs), rng_collection))

    def __call__(
        self, inputs: jax.Array, *, deterministic: bool | None = None, rngs: KeySource | None = None
    ) -> jax.Array:
        """The input with random elements set to zero.

        Args:
            inputs: a floating array.
            deterministic: whether to return the input unchanged; takes precedence over the layer's
                own mode.
            rngs: the source of the key, or the key itself; takes precedence over the layer's own.
        """
        if resolve_mode(self, "deterministic", deterministic, self.deterministic):
            return inputs
        fixed = not isinstance(self.rate, Tracer)
        if fixed:
            check_rate(self, "rate", self.rate, below_one=False)
        if fixed and self.rate == 0:
            return inputs
        if fixed and self.rate == 1:
            return jnp.zeros_like(inputs)
        x = jnp.asarray(inputs)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"{layer_name(self)} scales what it keeps, which needs a floating input; got "
                f"{x.dtype}{list(x.shape)}. Cast the input, or use deterministic=True."
            )
        key = draw_key(
            self, _named(self, rngs), self.rngs, self.rng_collection, _PURPOSE, "rngs=rngs"
        )
        keep = 1.0 - self.rate
        mask = jax.random.bernoulli(key, keep, _mask_shape(self, x.shape))
        mask = jnp.broadcast_to(mask, x.shape)
        sharding = jax.typeof(x).sharding
        if any(axis is not None for axis in sharding.spec):  # a mesh with explicit axes
            mask = jax.reshard(mask, sharding)
        return lax.select(mask, (x / keep).astype(x.dtype), jnp.zeros_like(x))

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set the mode of this layer; `nnx.view` calls it on its copy.

        Args:
            deterministic: if True, the layer gives its input back unchanged.
        """
        if deterministic is not None:
            self.deterministic = deterministic


_PURPOSE = (
    "`deterministic` is False, but no `rngs` argument was provided to Dropout "
    "(not needed with deterministic=True or after model.eval())"
)


def _named(layer: Dropout, rngs: tp.Any) -> tp.Any:
    """The layer's stream of an `Rngs`; looked up by item, since an attribute may have the same name."""
    return rngs[layer.rng_collection] if isinstance(rngs, Rngs) else rngs


def _mask_shape(layer: Dropout, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = list(shape)
    for axis in layer.broadcast_dims:
        if not -len(sizes) <= axis < len(sizes):
            raise IndexError(
                f"{layer_name(layer)}: broadcast_dims={layer.broadcast_dims} names the axis "
                f"{axis}, and the input has shape {shape}."
            )
        sizes[axis] = 1
    return tuple(sizes)
