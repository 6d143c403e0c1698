"""Names below `flax.nnx` that libraries reach for and nnxlite does not have otherwise.

They are added to the modules named `flax.nnx...` alone.
"""

from __future__ import annotations

import importlib
import typing as tp

SUBMODULES: tuple[str, ...] = ("deprecations", "ids")
"""Submodules that are made of `EXTRA` alone: `ids` for `flax.nnx.ids`."""


def _of(module: str, table: str) -> tp.Callable[[], dict[str, tp.Any]]:
    """The names in a table of one of the modules beside this one, imported when they are needed."""
    return lambda: getattr(importlib.import_module(f"nnxlite.flax.{module}"), table)


EXTRA: dict[str, tp.Callable[[], dict[str, tp.Any]]] = {
    "": _of("_private", "GRAPH"),
    "deprecations": _of("_layers", "DEPRECATIONS"),
    "graph": _of("_pickles", "GRAPH"),
    "graphlib": _of("_pickles", "GRAPH"),
    "ids": _of("_layers", "IDS"),
    "nn.linear": _of("_layers", "LINEAR"),
    "nn.normalization": _of("_layers", "NORMALIZATION"),
    "object": _of("_private", "OBJECT"),
    "pytreelib": _of("_private", "OBJECT"),
    "variablelib": _of("_pickles", "VARIABLE"),
}
"""For the path of a submodule ("" is `flax.nnx`, "nn.linear" a layer's file): its further names."""


def prepare() -> None:
    """Run once, when `flax.nnx` is first imported: what classes of nnxlite need beyond names."""
    from nnxlite.flax import _pickles, _private
    from nnxlite.sharding.linen_rules import share_rules_with_linen

    _private.prepare()
    _pickles.install()
    share_rules_with_linen()
