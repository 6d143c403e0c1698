"""Pictures of the figures: every ratio beside its budget, and cost against size.

Both are drawn from what `report.as_json` made, so a file kept by `--json` can be drawn later.
Matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import typing as tp
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.harness import quantity
from benchmarks.report import figures

FORMATS = (".svg", ".png")
# Ours is filled, everybody else is hollow; the colours can be told apart by colour-blind readers.
MARKERS = {
    "nnxlite": {"marker": "o", "color": "#0072b2"},
    "flax": {"marker": "s", "color": "#d55e00"},
    "equinox": {"marker": "^", "color": "#009e73"},
    "limit": {"marker": "x", "color": "#555555"},
    "others": {"marker": "D", "color": "#cc79a7"},
}
MISSED = "#c00000"
EACH = ", for each "  # between the work and what grows, in the names of the growth cases


@dataclass(frozen=True)
class Row:
    """One line of the picture of ratios: every contender as a multiple of one of them.

    `of` is that contender; where a budget is absolute, the multiples are of the budget itself.
    """

    label: str
    of: str
    ratios: dict[str, float]
    subject: str
    at_most: float | None
    met: bool | None


def rows(case: dict[str, tp.Any]) -> list[Row]:
    """A row for each budget of a case; without one, a row beside the limit or the reference."""
    medians = {name: spread.median for name, spread in figures(case).items()}
    budgets = case["budgets"] or [{"of": of} for of in ("limit", "flax") if of in medians][:1]
    found = []
    for budget in budgets:
        of, at_most = budget["of"], budget.get("at_most")
        base = at_most if of is None else medians.get(of)
        if base is None:
            continue
        subject = budget.get("subject", "nnxlite")
        ratios = {name: median / base for name, median in medians.items()}
        if of is not None and budget.get("spent"):
            ratios[subject] = budget["spent"]["median"]
        label = of if of is not None else quantity(at_most, case["unit"])
        mark = at_most if of is not None else 1.0
        found.append(Row(case["case"], label, ratios, subject, mark, budget.get("met")))
    return found


def draw(content: dict[str, tp.Any], target: Path) -> list[Path]:
    """Write the pictures that `content` has figures for; returns their paths.

    Into a folder go `ratios.svg` and `growth.svg`; beside a file `name.svg` of ratios goes
    `name-growth.svg`.
    """
    growing = [case for case in content["cases"] if case["bench"] == "growth"]
    others = [case for case in content["cases"] if case["bench"] != "growth"]
    if target.is_dir():
        files = target / "ratios.svg", target / "growth.svg"
    else:
        files = target, target.with_stem(f"{target.stem}-growth")
    written = []
    for file, cases, paint in zip(files, (others, growing), (ratios_figure, growth_figure)):
        if cases:
            save(paint(cases), file)
            written.append(file)
    return written


def save(figure: tp.Any, file: Path) -> None:
    """Write a figure; the same figures make the same file."""
    from matplotlib import rc_context

    metadata = {"Date": None} if file.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": "nnxlite", "svg.fonttype": "path"}):
        figure.savefig(file, metadata=metadata, dpi=150)


def ratios_figure(cases: list[dict[str, tp.Any]]) -> tp.Any:
    """All ratios on a logarithmic axis, a block of lines for each bench."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    blocks = [
        (bench, [row for case in group for row in rows(case)])
        for bench, group in groupby(cases, lambda case: case["bench"])
    ]
    lines = sum(len(block) + 1 for _, block in blocks)
    figure = Figure(figsize=(11, 1.4 + 0.23 * lines), layout="constrained")
    axes = figure.add_subplot()
    ticks, labels, height, used = [], [], 0, {}
    for bench, block in blocks:
        axes.text(0, height, f" {bench}", transform=axes.get_yaxis_transform(), va="center",
                  weight="bold", size=8)  # fmt: skip
        height += 1
        for row in block:
            axes.axhline(height, color="#eeeeee", zorder=0)
            for name, ratio in row.ratios.items():
                style = MARKERS.get(name, MARKERS["others"])
                filled = style["color"] if name == row.subject or name == "nnxlite" else "none"
                points = axes.plot(
                    ratio, height, ls="", ms=6 if name == row.subject else 5,
                    marker=style["marker"], mec=style["color"], mfc=filled, zorder=3,
                )  # fmt: skip
                used.setdefault(name if name in MARKERS else "others", points[0])
            if row.at_most is not None:
                budget = axes.plot(
                    row.at_most, height, ls="", marker="|", ms=11, mew=2.5, zorder=2,
                    color=MISSED if row.met is False else "#000000",
                )  # fmt: skip
                used.setdefault("budget (red: missed)", budget[0])
            ticks.append(height)
            labels.append(f"{row.label}   / {row.of}")
            height += 1
    axes.axvline(1.0, color="#999999", lw=0.8, zorder=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.set_yticks(ticks, labels, size=7)
    axes.set_ylim(height, -1)
    axes.set_xlabel("times what stands after the slash (left is better)")
    figure.legend(
        used.values(), used.keys(), loc="outside upper center", ncols=len(used), fontsize=8
    )
    return figure


CHART = {
    ("dispatch", "train step, 72 arrays"): "training step, 72 arrays",
    ("dispatch", "train step, 702 arrays"): "training step, 702 arrays",
    ("loops", "training as in tutorials, 24 layers"): "training with train(), eval(), metrics",
    ("loops", "GAN step"): "GAN: two models, two optimizers",
    ("loops", "decoding with a cache, batch 1"): "decoding with a cache, batch 1",
    ("loops", "sharded training step, 8 devices"): "sharded training step, 8 devices",
    ("dispatch", "step that reads 200 and writes one"): "step: reads 200 arrays, writes one",
    ("filtered", "filter_jit, 72 arrays read"): "filter_jit, 72 arrays read",
    ("eager", "grad"): "grad outside jit",
    ("pytree", "flatten 100 Linears"): "jax.tree.flatten, 100 layers",
}
"""The cases of the chart in the README, from the top, and what they are called there."""
TITLES = {"limit": "plain JAX", "nnxlite": "nnxlite", "flax": "Flax NNX", "equinox": "Equinox"}


def chart_figure(content: dict[str, tp.Any]) -> tp.Any:
    """The rows of `CHART` as multiples of plain JAX on flat leaves, to be read 800 pixels wide."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    cases = {(case["bench"], case["case"]): case for case in content["cases"]}
    figure = Figure(figsize=(8, 5), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    largest = 2.0
    for height, key in enumerate(CHART):
        axes.axhline(height, color="#eeeeee", zorder=0)
        medians = {n: s.median for n, s in figures(cases[key]).items()} if key in cases else {}
        if "limit" not in medians:
            continue
        for name in [name for name in reversed(TITLES) if name in medians]:
            ratio = medians[name] / medians["limit"]
            if name == "nnxlite":  # taken round by round
                ratio = cases[key]["nnxlite_to"]["limit"]["median"]
            largest = max(largest, ratio)
            color, ours = MARKERS[name]["color"], name == "nnxlite"
            axes.plot(
                ratio, height, ls="", ms=9 if ours else 7, marker=MARKERS[name]["marker"],
                mec=color, mfc=color if ours else "white", mew=1.5, zorder=4 if ours else 3,
                label=TITLES[name],
            )  # fmt: skip
            text = f"{ratio:.3g}x" if ratio >= 10 else f"{ratio:.2f}x"
            if ours:  # in a column of its own, where no marker is
                place, offset, align, weight = 0.55, 0, "right", "bold"
            else:  # to the right, beyond a marker of ours that is near
                near = medians.get("nnxlite", 0.0) / medians[name]
                place, offset, align, weight = ratio, 16 if 1 < near < 1.4 else 7, "left", "normal"
            if name != "limit":
                axes.annotate(
                    text, (place, height), xytext=(offset, 0), textcoords="offset points",
                    va="center", ha=align, size=9, color=color, weight=weight,
                )  # fmt: skip
        axes.annotate(
            quantity(medians["limit"], cases[key]["unit"]), (1.01, height), size=9, va="center",
            xycoords=axes.get_yaxis_transform(), color=MARKERS["limit"]["color"],
            annotation_clip=False,
        )  # fmt: skip
    axes.annotate(
        TITLES["nnxlite"], (0.55, -1), size=9, va="center", ha="right", weight="bold",
        color=MARKERS["nnxlite"]["color"],
    )  # fmt: skip
    axes.annotate(
        "1x is", (1.01, -1), xycoords=axes.get_yaxis_transform(), size=9, va="center",
        color=MARKERS["limit"]["color"], annotation_clip=False,
    )  # fmt: skip
    axes.axvline(1.0, color=MARKERS["limit"]["color"], lw=1, zorder=1)
    axes.set_xlim(0.35, largest * 2)
    axes.xaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50, 100, 200]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.set_yticks(range(len(CHART)), CHART.values(), size=10)
    axes.tick_params(left=False)
    axes.set_ylim(len(CHART) - 0.5, -1.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    few = "" if content.get("judged", True) else " (few rounds: not to be relied on)"
    axes.set_xlabel(
        f"time, as a multiple of plain JAX on flat arrays; left is better{few}", size=10
    )
    shown = dict(zip(*reversed(axes.get_legend_handles_labels())))
    order = [title for title in dict.fromkeys(("nnxlite", *TITLES.values())) if title in shown]
    figure.legend(
        [shown[title] for title in order], order, loc="outside upper center", ncols=4, fontsize=10,
        frameon=False,
    )  # fmt: skip
    return figure


def growth_figure(cases: list[dict[str, tp.Any]]) -> tp.Any:
    """A panel for each thing that grows, with a line for each work: all of it against the size."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    panels: dict[str, list[tuple[str, dict[str, tp.Any]]]] = {}
    for case in cases:
        work, _, noun = case["case"].partition(EACH)
        panels.setdefault(noun, []).append((work, case))
    columns = min(3, len(panels))
    figure = Figure(figsize=(4 * columns, 3.4 * -(-len(panels) // columns)), layout="constrained")
    grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).ravel()
    for axes in grid:
        axes.set_visible(False)
    for axes, (noun, lines) in zip(grid, panels.items()):
        axes.set_visible(True)
        costs: list[float] = []
        for (work, case), style in zip(lines, MARKERS.values()):
            each = {int(name.replace(",", "")): s.median for name, s in figures(case).items()}
            sizes = sorted(each)
            if not sizes:
                continue
            whole = [size * each[size] for size in sizes]
            costs += whole
            marker, color = style["marker"], style["color"]
            axes.plot(sizes, whole, marker=marker, color=color, ms=5, label=work)
            proportional = [size * each[sizes[-1]] for size in sizes]
            axes.plot(sizes, proportional, color=color, lw=0.7, ls=":")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: quantity(y, "seconds")))
        axes.set_ylim(min(costs, default=1e-6) / 2, max(costs, default=1.0) * 2)
        thing, *more = noun.split(" ", 1)
        axes.set_xlabel(" ".join([f"{thing}s", *more]))
        axes.legend(fontsize=7)
    figure.suptitle("The whole work against its size (dotted: in proportion)", size=10)
    return figure
