"""Where Variables hand a freshly made, annotated value to the sharding package.

Variables are a layer below sharding, and this hook is the only connection between them.  Until the
sharding package installs its function, an annotation is metadata and the value stays where it is.
"""

from __future__ import annotations

import typing as tp

Placer = tp.Callable[[tp.Any, tp.Mapping[str, tp.Any]], tp.Any]

_placer: list[Placer] = []


def place(value: tp.Any, metadata: tp.Mapping[str, tp.Any]) -> tp.Any:
    """`value` placed as its metadata says, or unchanged."""
    return _placer[0](value, metadata) if _placer else value


def plug(placer: Placer) -> None:
    """Install the function that places annotated values."""
    _placer[:] = [placer]
