"""What the examples share: two options, and the look of their pictures."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, BLUE, RED = "#22303c", "#8aa1b4", "#d1603d"
STYLE = {
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def options(description: str, **others: str) -> argparse.Namespace:
    """`quick`: a short run; `out`: a folder, which is made here; `others`: numbers."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short run, and a weaker result")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder; default: out")
    for name, text in others.items():
        parser.add_argument(f"--{name}", type=int, help=text)
    chosen = parser.parse_args()
    try:  # before training, not after it
        chosen.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"{parser.prog}: error: cannot write to {chosen.out}: {error.strerror}")
    return chosen


@contextlib.contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of this size in inches, written to `path` at the end of the block, which is printed."""
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, dpi=130)
        plt.close(figure)
    print(f"picture: {path}")


def curves(path: Path, series: dict[str, Any], xlabel: str, ylabel: str, **others: Any) -> None:
    """A picture of values by name, or of (position, value) pairs; `others` as for `Axes.set`."""
    with picture(path, 7, 3.6) as figure:
        axes = figure.subplots()
        for (name, values), colour in zip(series.items(), (BLUE, RED, INK, "#5b8c5a")):
            points = values if np.ndim(values) == 2 else enumerate(values)
            axes.plot(*zip(*points), color=colour, label=name, lw=1.6)
        axes.set(xlabel=xlabel, ylabel=ylabel, **others)
        axes.legend()


def tiles(axes: Axes, images: np.ndarray, title: str, white: float, black: float) -> None:
    """Images of 8 x 8 pixels, (rows, columns, 64), with a margin around each."""
    rows, columns, _ = np.shape(images)
    sheet = np.asarray(images).reshape(rows, columns, 8, 8)
    sheet = np.pad(sheet, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=white)
    sheet = sheet.transpose(0, 2, 1, 3).reshape(rows * 10, columns * 10)
    axes.imshow(sheet, cmap="gray_r", vmin=white, vmax=black)
    axes.set(xticks=[], yticks=[], title=title)
