"""Modes of a layer: a flag is given in the call, or else kept by the layer, and must be somewhere.

A mode (`deterministic`, `use_running_average`, `decode`) is a static attribute, so that `train`,
`eval` and `view` can set it; an argument of the call goes before it, and None means "not given".
"""

from __future__ import annotations

import typing as tp

from nnxlite.nn._names import layer_name

M = tp.TypeVar("M")


def resolve_mode(layer: tp.Any, name: str, given: M | None, kept: M | None) -> M:
    """The mode `name` of a layer: the argument of the call if there is one, else the attribute.

    Raises ValueError, with both ways out, when neither is set.
    """
    if given is not None:
        return given
    if kept is not None:
        return kept
    kind = type(layer).__name__
    raise ValueError(
        f"{layer_name(layer)}: No `{name}` argument was provided to {kind}, and none is set. Pass "
        f"`{name}=...` to the call, give it to the constructor ({kind}(..., {name}=...)), or "
        f"set it on a whole model with `model.train()`, `model.eval()` or `nnx.view(model, {name}=...)`."
    )
