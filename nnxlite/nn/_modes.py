"""Modes of a layer: flags that are set on the layer or passed with a call.

A mode (`deterministic`, `use_running_average`, `decode`) is a static attribute, so that `train`,
`eval` and `view` can set it.  An argument of the call takes precedence; None means "not set".
"""

from __future__ import annotations

import typing as tp

from nnxlite.objects._scopes import layer_name

M = tp.TypeVar("M")

SET_BY_TRAIN: tp.Final = ("deterministic", "use_running_average")
"""The modes that `Module.train` and `Module.eval` set."""


def resolve_mode(layer: tp.Any, name: str, given: M | None, own: M | None) -> M:
    """The mode `name` of a layer: the argument of the call if there is one, else the attribute.

    Raises ValueError, which explains both, if neither is set.
    """
    if given is not None:
        return given
    if own is not None:
        return own
    kind = type(layer).__name__
    ways = f"`model.set_attributes({name}=False)`"
    if name in SET_BY_TRAIN:
        ways = "`model.train()`, `model.eval()`"
    raise ValueError(
        f"{layer_name(layer)}: No `{name}` argument was provided to {kind}, and none is set. Pass "
        f"`{name}=...` to the call, give it to the constructor ({kind}(..., {name}=...)), or "
        f"set it on a whole model with {ways} or `nnx.view(model, {name}=...)`."
    )
