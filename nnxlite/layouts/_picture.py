"""The picture of a layout: which part of each array a device has."""

from __future__ import annotations

import typing as tp

import numpy as np

from nnxlite._base.errors import importing
from nnxlite._base.text import clip, human_bytes
from nnxlite.layouts._placement import Placement
from nnxlite.layouts._plan import AnyMesh
from nnxlite.layouts._specs import parts_of, spec_text, ways

if tp.TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 32
MOST_DEVICES = 64
"""How much fits a picture: the largest arrays, and the first devices."""


def draw(rows: list[tuple[str, list[Placement]]], mesh: AnyMesh) -> Figure:
    """The picture of a layout, from its rows; see `Layout.draw`."""
    with importing('Drawing a layout needs matplotlib: pip install "nnxlite[examples]".'):
        from matplotlib.figure import Figure

    entries = [entry for _, same in rows for entry in same]
    rows = sorted(rows, key=lambda row: -sum(entry.bytes for entry in row[1]))[:MOST_ROWS]
    axes = tuple(mesh.shape.items())
    devices = int(np.prod([size for _, size in axes]))
    shown = min(devices, MOST_DEVICES)
    parts = np.array([_shades(same[0], mesh, axes, shown) for _, same in rows])
    whole = sum(entry.bytes_per_device for entry in entries if entry.is_replicated)
    divided = sum(entry.bytes_per_device for entry in entries) - whole

    figure = Figure(figsize=(6 + 0.25 * shown, 2.2 + 0.24 * len(rows)), layout="constrained")
    grid, bars = figure.subplots(2, 1, height_ratios=[max(len(rows), 4), 4], sharex=True)
    grid.set_facecolor("lightgray")  # of what is replicated
    grid.imshow(parts, cmap="viridis", aspect="auto", vmin=0, vmax=1)
    grid.set_yticks(range(len(rows)), [_label(*row) for row in rows], fontsize=7)
    grid.set_xticks(np.arange(shown + 1) - 0.5, minor=True)
    grid.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    grid.grid(which="minor", color="white", linewidth=1)
    grid.tick_params(which="both", length=0)
    described = " x ".join(f"{name} {size}" for name, size in axes)
    grid.set_title(f"Parts by device ({described}); one colour, one part", fontsize=9)
    bars.bar(range(shown), [divided] * shown, color="tab:blue", label="divided")
    bars.bar(range(shown), [whole] * shown, bottom=divided, color="tab:gray", label="replicated")
    bars.yaxis.set_major_formatter(lambda size, _: human_bytes(int(size)))
    bars.tick_params(labelsize=7)
    more = f" (the first {shown} of {devices:,})" if shown < devices else ""
    bars.set_xlabel(f"device{more}", fontsize=8)
    bars.legend(fontsize=7, loc="lower right")
    return figure


def _shades(entry: Placement, mesh: AnyMesh, axes: tp.Any, shown: int) -> list[float]:
    """For each device a number from 0 to 1 for its part; NaN, which is not drawn, for a whole array."""
    count = ways(entry.spec, mesh)
    parts = parts_of(entry.spec, axes)[:shown]
    return [np.nan if count == 1 else part / (count - 1) for part in parts]


def _label(name: str, same: list[Placement]) -> str:
    count = f"{len(same)} x " if len(same) > 1 else ""
    return f"{clip(name, 48)}  {count}{same[0].shape}  {spec_text(same[0].spec)}"
