"""Names below `flax.nnx` that libraries reach for and nnxlite does not have otherwise.

They are added to the modules named `flax.nnx...` alone.
"""

from __future__ import annotations

import typing as tp

SUBMODULES: tuple[str, ...] = ()
"""Submodules that are made of `EXTRA` alone: `ids` for `flax.nnx.ids`."""

EXTRA: dict[str, tp.Callable[[], dict[str, tp.Any]]] = {}
"""For the path of a submodule ("" is `flax.nnx`, "nn.linear" a layer's file): its further names."""


def prepare() -> None:
    """Run once, when `flax.nnx` is first imported: what classes of nnxlite need beyond names."""
