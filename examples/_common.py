"""What the examples share: three options, and the look of their pictures."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
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
    """`quick`: a short run; `out`: a folder, which is made here; `seed`; `others`: numbers."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short run, and a weaker result")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder; default: out")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
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
    """A figure of this size in inches, written to `path` at the end of the block."""
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, dpi=130)
        plt.close(figure)
