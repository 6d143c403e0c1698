"""Random streams that a transform broadcasts: each slice or iteration draws the same keys."""

from __future__ import annotations

import typing as tp

from nnxlite._errors import warn_user
from nnxlite.boundary._inputs import CallDef
from nnxlite.variables import RngCount, RngState


def is_random(call: CallDef, leaf: int) -> bool:
    """Whether a graph leaf is the key or the count of a random stream."""
    node = call.graphdef.decoded.leaf_nodes[leaf]
    kind = getattr(call.graphdef.decoded.node_defs[node], "type", None) if node >= 0 else None
    return isinstance(kind, type) and issubclass(kind, RngState)


def warn_of_streams(
    call: CallDef, leaves: tp.Iterable[int], warned: set[str], what: str, remedy: str
) -> None:
    """Warn once of each random stream that draws the same keys again.

    Not of the stream "carry": recurrent layers start every sequence with the same keys.

    Args:
        call: the arguments.
        leaves: the broadcast leaves that were written.
        warned: tags of the streams that the user was warned of.
        what: what happens to the stream.
        remedy: what to do instead.
    """
    decoded = call.graphdef.decoded
    for leaf in leaves:
        node = decoded.leaf_nodes[leaf]
        definition = decoded.node_defs[node]
        if not is_random(call, leaf) or not issubclass(definition.type, RngCount):
            continue
        tag = str(definition.metadata.get("tag", "default"))
        if tag != "carry" and tag not in warned:
            warned.add(tag)
            warn_user(f"The random stream {tag!r} {what} (the same dropout mask, say). {remedy}")
