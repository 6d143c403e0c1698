"""Where a layer that draws at random gets its key from: the call, or a stream of its own."""

from __future__ import annotations

import typing as tp

import jax

from nnxlite._errors import short_type
from nnxlite.nn import initializers
from nnxlite.nn._names import layer_name
from nnxlite.objects import Rngs, RngStream

KeySource = Rngs | RngStream | jax.Array
"""Streams (a named one is drawn from), one stream, or the key itself."""

KEYLESS: tp.Final = (initializers.zeros, initializers.ones)
"""Initializers that make no use of their key, and so can do without."""


def own_stream(layer: tp.Any, rngs: Rngs | RngStream | None, name: str) -> RngStream | None:
    """The stream a layer keeps: forked from the stream `name`, or from the one that is given.

    Raises:
        AttributeError: when `rngs` has no such stream.
        TypeError: for `rngs` of another type.
    """
    if isinstance(rngs, Rngs):
        return getattr(rngs, name).fork()
    if isinstance(rngs, RngStream):
        return rngs.fork()
    if rngs is None:
        return None
    raise TypeError(
        f"{type(layer).__name__}: `rngs` must be an Rngs, such as rngs=nnx.Rngs(0), an RngStream or "
        f"None; got {short_type(rngs)}."
    )


def draw_key(
    layer: tp.Any,
    given: KeySource | None,
    own: RngStream | None,
    name: str,
    purpose: str,
    keep: str,
) -> jax.Array:
    """A key for one call, from its argument or else from the layer's own stream.

    Args:
        layer: the layer, for messages.
        given: the source that the call got.
        own: the stream that the layer keeps.
        name: the stream to draw from, of several.
        purpose: what a key is needed for, as a sentence.
        keep: the argument of the constructor that makes the layer keep a stream.

    Raises:
        ValueError: when there is no source.
        AttributeError: when the source has no such stream.
        TypeError: for a source of another type.
    """
    source = own if given is None else given
    if isinstance(source, Rngs):
        return getattr(source, name)()
    if isinstance(source, RngStream):
        return source()
    if isinstance(source, jax.Array):
        return source
    kind = type(layer).__name__
    if source is None:
        raise ValueError(
            f"{layer_name(layer)}: {purpose}. Pass a key, or streams, with the call (rngs=...), or "
            f"let the layer keep a stream ({kind}(..., {keep}))."
        )
    raise TypeError(
        f"{layer_name(layer)}: `rngs` must be an Rngs, an RngStream or a key, got {short_type(source)}."
    )
