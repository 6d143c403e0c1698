"""The position of a data iterator, as an item of a checkpoint.

An iterator says where it is as bytes or as JSON (`get_state`), of a length that changes.  A checkpoint
restores arrays of known shapes, so that what it gets is bytes in an array of a size to spare.  Each
process may be at another place in its data: all get the places of all.
"""

from __future__ import annotations

import json
import typing as tp

import jax
import numpy as np

from nnxlite._base.errors import short_type
from nnxlite.objects._containers import Dict
from nnxlite.variables._variable import Variable

ROOM = 2**14
"""Bytes that a position may have before its array is larger."""


class Resumable(tp.Protocol):
    """An iterator over data that can say where it is, and go there: one of Grain, for example."""

    def get_state(self) -> tp.Any:
        """Where it is, as bytes or as JSON: numbers, text, None, and lists and dicts of such."""
        ...

    def set_state(self, state: tp.Any, /) -> None:
        """Go where it was when `get_state` returned this."""
        ...


def position(data: Resumable) -> Dict:
    """What to save of an iterator, or to restore into."""
    state = data.get_state()
    content, kind = state, "bytes"
    if not isinstance(state, bytes):
        try:
            content, kind = json.dumps(state).encode(), "json"
            alike = json.loads(content) == state
        except (TypeError, ValueError):
            alike = False
        if not alike:
            raise TypeError(
                f"loop: get_state of {type(data).__name__} returns {short_type(state)}; it has to "
                "return bytes, or what JSON stores: numbers, text, None, lists, and dicts by text."
            )
    packed = f"{kind} {len(content)}\n".encode() + content
    room = max(ROOM, 1 << (2 * len(packed)).bit_length())
    own = np.frombuffer(packed.ljust(room, b"\0"), np.uint8)
    if jax.process_count() == 1:
        return Dict(states=Variable(own[None]))
    from jax.experimental import multihost_utils  # only where there are several processes

    return Dict(states=Variable(multihost_utils.process_allgather(own)))


def go_to(data: Resumable, saved: Dict) -> None:
    """Set an iterator to a position that was restored."""
    states = np.asarray(saved["states"].get_raw_value())
    head, _, content = states[jax.process_index()].tobytes().partition(b"\n")
    kind, length = head.decode().split()
    content = content[: int(length)]
    data.set_state(content if kind == "bytes" else json.loads(content))
