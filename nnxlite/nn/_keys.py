"""The random key of a layer: from an argument of the call, or from a stream of the layer."""

from __future__ import annotations

import typing as tp

import jax

from nnxlite._base.errors import short_type
from nnxlite.nn import initializers
from nnxlite.objects._rngs import Rngs, RngStream
from nnxlite.objects._scopes import layer_name

KeySource = Rngs | RngStream | jax.Array
"""Several streams, of which one is chosen by name; one stream; or the key itself."""

KEYLESS: tp.Final = (initializers.zeros, initializers.ones)
"""Initializers that ignore their key, so that none has to be drawn."""


def own_stream(layer: tp.Any, rngs: Rngs | RngStream | None, name: str) -> RngStream | None:
    """The stream of a layer: forked from the stream `name` of `rngs`, or from `rngs` itself.

    Raises:
        AttributeError: if `rngs` does not have this stream.
        TypeError: if `rngs` is of another type.
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
    """A key for one call: from its argument, or else from the layer's own stream.

    Args:
        layer: the layer, for messages.
        given: the argument of the call.
        own: the stream of the layer.
        name: the stream to draw from if there are several.
        purpose: why a key is needed, as a sentence.
        keep: the argument of the constructor that gives the layer a stream of its own.

    Raises:
        ValueError: if there is neither.
        AttributeError: if the source does not have this stream.
        TypeError: if the source is of another type.
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
