"""Results as JSON; and JSON, just made or kept in a file, as tables and beside earlier results."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import typing as tp
from itertools import groupby

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Result, Spread, quantity

RECOMPILED = "*"
PACKAGES = ("nnxlite", "jax", "jaxlib", "numpy", "optax", "flax", "equinox")
SLOWER = 1.1  # a change beyond this, outside both spreads, is called a change
LARGER = {"seconds": ("slower", "faster"), "bytes": ("more", "less")}


def machine() -> dict[str, str]:
    """Where and with what the figures were taken."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": str(os.cpu_count()),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        **versions,
    }


def spread_text(spread: Spread | None, show: tp.Callable[[float], str]) -> str:
    """The median, and half the distance of the quartiles in percent of it, if there is any."""
    if spread is None:
        return "-"
    if spread.low == spread.high:
        return show(spread.median)
    percent = 50 * (spread.high - spread.low) / spread.median
    return f"{show(spread.median)} ±{percent:.0f}%"


def ratio_text(value: float) -> str:
    """Such as `1.05x`; a ratio below a half as its inverse."""
    return f"{value:.2f}x" if value >= 0.5 else f"1/{1 / value:.1f}x"


VERDICTS = {True: "[green]met[/]", False: "[red]MISSED[/]", None: "[yellow]-[/]"}


def print_results(content: dict[str, tp.Any], console: Console) -> None:
    """One table for each bench of what `as_json` made; then what could not be measured."""
    cases, judged = content["cases"], content.get("judged", True)
    for bench, group in groupby(cases, lambda case: case["bench"]):
        console.print(bench_table(bench, list(group)))
    if not judged:
        console.print("Few rounds: such figures are not held against the budgets.", markup=False)
    for case in cases:
        for name, reason in case["failed"].items():
            console.print(f"{case['bench']}: {case['case']}: {name}: {reason}", markup=False)
    if any(case["recompiled"] for case in cases):
        console.print(f"{RECOMPILED} compiled again while it was timed", markup=False)


def bench_table(bench: str, cases: list[dict[str, tp.Any]]) -> Table:
    """A row for each case and each further budget of it."""
    table = Table(title=bench, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    names = list(dict.fromkeys(name for case in cases for name in contender_names(case)))
    names.sort(key=size_of)
    table.add_column("work", min_width=24)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("budget", min_width=16)
    for case in cases:
        cells = [figure_cell(case, name) for name in names]
        for budget in case["budgets"] or (None,):
            table.add_row(case["case"], *cells, *budget_cells(case, budget))
            cells = [""] * len(names)
    return table


def figures(case: dict[str, tp.Any]) -> dict[str, Spread]:
    """What each contender of a case takes; files of the first days have seconds only."""
    measured = case[case.get("unit", "seconds")]
    return {name: Spread(**figure) for name, figure in measured.items()}


def contender_names(case: dict[str, tp.Any]) -> list[str]:
    """All contenders of a case, those without a figure too."""
    return [*figures(case), *case["failed"]]


def size_of(name: str) -> int:
    """The number that a contender's name is, so that sizes stand in their order; else 0."""
    digits = name.replace(",", "")
    return int(digits) if digits.isdigit() else 0


def figure_cell(case: dict[str, tp.Any], name: str) -> str:
    """What one contender takes."""
    mark = RECOMPILED if name in case["recompiled"] else ""
    return spread_text(figures(case).get(name), lambda x: quantity(x, case["unit"])) + mark


def budget_cells(case: dict[str, tp.Any], budget: dict[str, tp.Any] | None) -> tuple[str, str, str]:
    """The ratio that was measured, the verdict, and the budget."""
    relative = budget is not None and budget["of"] is not None
    numbers = budget["spent"] if relative else case["nnxlite_to"].get("limit")
    ratio = spread_text(Spread(**numbers) if numbers else None, ratio_text)
    return (ratio, VERDICTS[budget["met"]], budget["budget"]) if budget else (ratio, "", "")


def as_json(results: list[Result], judged: bool = True) -> dict[str, tp.Any]:
    """Medians and quartiles in each case's unit, ratios to `nnxlite`'s rivals, budgets, verdicts.

    Figures of few rounds are not `judged`: they have no verdicts.
    """
    cases = [case_json(result, judged) for result in results]
    return {"machine": machine(), "judged": judged, "cases": cases}


def case_json(result: Result, judged: bool = True) -> dict[str, tp.Any]:
    """One case of `as_json`."""

    def numbers(spread: Spread | None) -> dict[str, float] | None:
        return None if spread is None else vars(spread).copy()

    unit = result.case.unit
    budgets = [
        {
            "budget": budget.text(unit),
            **vars(budget),
            "spent": numbers(result.spent(budget)),
            "met": result.met(budget) if judged else None,
        }
        for budget in result.case.budgets
    ]
    return {
        "bench": result.case.bench,
        "case": result.case.name,
        "rounds": max(map(len, result.samples.values()), default=0),
        "unit": unit,
        unit: {name: numbers(result.figure(name)) for name in result.samples},
        "nnxlite_to": {
            name: numbers(result.ratio("nnxlite", name))
            for name in result.samples
            if name != "nnxlite" and "nnxlite" in result.samples
        },
        "recompiled": sorted(result.recompiled),
        "failed": result.failed,
        "budgets": budgets,
    }


def worst(runs: list[dict[str, tp.Any]]) -> dict[str, tp.Any]:
    """Of several runs, each budget as it came out worst, with the figures of the worst of them.

    Machine, order, and cases without a budget are those of the last run.
    """
    cases = []
    for case in runs[-1]["cases"]:
        key = case["bench"], case["case"]
        same = [c for run in runs for c in run["cases"] if (c["bench"], c["case"]) == key]
        budgets = [max(each, key=strain) for each in zip(*(c["budgets"] for c in same))]
        shown = max(reversed(same), key=lambda c: max(map(strain, c["budgets"]), default=0.0))
        cases.append({**shown, "budgets": budgets})
    judged = all(run.get("judged", True) for run in runs)
    return {"machine": runs[-1]["machine"], "judged": judged, "cases": cases}


def strain(budget: dict[str, tp.Any]) -> float:
    """The share of a budget that is spent; 0 where there is no figure."""
    return budget["spent"]["median"] / budget["at_most"] if budget["spent"] else 0.0


def print_comparison(old: dict[str, tp.Any], new: dict[str, tp.Any], console: Console) -> None:
    """The figures of both files side by side, for every contender that both have."""
    table = Table(title="compared", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("bench", "work", "contender"):
        table.add_column(column)
    for column in ("before", "now", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    earlier = {(case["bench"], case["case"]): figures(case) for case in old["cases"]}
    for case in new["cases"]:
        before = earlier.get((case["bench"], case["case"]), {})
        show = functools.partial(quantity, unit=case["unit"])
        for name, now in figures(case).items():
            if name in before:
                past = before[name]
                table.add_row(
                    case["bench"],
                    case["case"],
                    name,
                    spread_text(past, show),
                    spread_text(now, show),
                    f"{now.median / past.median:.2f}x",
                    change(past, now, LARGER[case["unit"]]),
                )
    console.print(table)


def change(past: Spread, now: Spread, words: tuple[str, str] = LARGER["seconds"]) -> str:
    """Say a change only where it is larger than the spread of either figure."""
    if now.median > SLOWER * past.median and now.low > past.high:
        return f"[red]{words[0]}[/]"
    if past.median > SLOWER * now.median and past.low > now.high:
        return f"[green]{words[1]}[/]"
    return ""
