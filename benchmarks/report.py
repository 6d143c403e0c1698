"""Results as tables, as JSON, and beside earlier results."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import typing as tp
from itertools import groupby

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Budget, Result, Spread, duration

RECOMPILED = "*"
PACKAGES = ("nnxlite", "jax", "jaxlib", "numpy", "optax", "flax", "equinox")
SLOWER = 1.1  # a change beyond this, outside both spreads, is called a change


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
    """The median, and half the distance of the quartiles in percent of it."""
    if spread is None:
        return "-"
    percent = 50 * (spread.high - spread.low) / spread.median
    return f"{show(spread.median)} ±{percent:.0f}%"


def ratio_text(value: float) -> str:
    """Such as `1.05x`; a ratio below a half as its inverse."""
    return f"{value:.2f}x" if value >= 0.5 else f"1/{1 / value:.1f}x"


def verdict(result: Result, budget: Budget) -> str:
    """Whether a budget is kept, for the table."""
    return {True: "[green]met[/]", False: "[red]MISSED[/]", None: "[yellow]-[/]"}[
        result.met(budget)
    ]


def print_results(results: list[Result], console: Console) -> None:
    """One table for each bench; then what could not be measured."""
    for bench, group in groupby(results, lambda result: result.case.bench):
        console.print(bench_table(bench, list(group)))
    for result in results:
        for name, reason in result.failed.items():
            console.print(
                f"{result.case.bench}: {result.case.name}: {name}: {reason}", markup=False
            )
    if any(result.recompiled for result in results):
        console.print(f"{RECOMPILED} compiled again while it was timed", markup=False)


def bench_table(bench: str, results: list[Result]) -> Table:
    """A row for each case and each further budget of it."""
    table = Table(title=bench, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    names = list(dict.fromkeys(name for result in results for name in contender_names(result)))
    table.add_column("work", min_width=24)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("budget", min_width=20)
    table.add_column("", no_wrap=True)
    for result in results:
        times = []
        for name in names:
            mark = RECOMPILED if name in result.recompiled else ""
            times.append(spread_text(result.time(name), duration) + mark)
        for budget in result.case.budgets or (None,):
            table.add_row(result.case.name, *times, *budget_cells(result, budget))
            times = [""] * len(names)
    return table


def contender_names(result: Result) -> list[str]:
    """All contenders of a case, those without a figure too."""
    return [*result.samples, *result.failed]


def budget_cells(result: Result, budget: Budget | None) -> tuple[str, str, str]:
    """The ratio that was measured, the budget, and the verdict."""
    if budget is None:
        return spread_text(result.ratio("nnxlite", "limit"), ratio_text), "", ""
    of = budget.of or "limit"
    spent = result.ratio(budget.subject, of)
    return spread_text(spent, ratio_text), str(budget), verdict(result, budget)


def as_json(results: list[Result]) -> dict[str, tp.Any]:
    """Medians and quartiles in seconds, ratios to `nnxlite`'s rivals, budgets and verdicts."""
    return {"machine": machine(), "cases": [case_json(result) for result in results]}


def case_json(result: Result) -> dict[str, tp.Any]:
    """One case of `as_json`."""

    def numbers(spread: Spread | None) -> dict[str, float] | None:
        return None if spread is None else vars(spread).copy()

    budgets = [
        {"budget": str(b), "spent": numbers(result.spent(b)), "met": result.met(b)}
        for b in result.case.budgets
    ]
    return {
        "bench": result.case.bench,
        "case": result.case.name,
        "rounds": max(map(len, result.samples.values()), default=0),
        "seconds": {name: numbers(result.time(name)) for name in result.samples},
        "nnxlite_to": {
            name: numbers(result.ratio("nnxlite", name))
            for name in result.samples
            if name != "nnxlite" and "nnxlite" in result.samples
        },
        "recompiled": sorted(result.recompiled),
        "failed": result.failed,
        "budgets": budgets,
    }


def print_comparison(old: dict[str, tp.Any], new: dict[str, tp.Any], console: Console) -> None:
    """The figures of both files side by side, for every contender that both have."""
    table = Table(title="compared", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("bench", "work", "contender"):
        table.add_column(column)
    for column in ("before", "now", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    earlier = {(case["bench"], case["case"]): case["seconds"] for case in old["cases"]}
    for case in new["cases"]:
        before = earlier.get((case["bench"], case["case"]), {})
        for name, figure in case["seconds"].items():
            if name in before:
                past, now = Spread(**before[name]), Spread(**figure)
                table.add_row(
                    case["bench"],
                    case["case"],
                    name,
                    spread_text(past, duration),
                    spread_text(now, duration),
                    f"{now.median / past.median:.2f}x",
                    change(past, now),
                )
    console.print(table)


def change(past: Spread, now: Spread) -> str:
    """Say a change only where it is larger than the spread of either figure."""
    if now.median > SLOWER * past.median and now.low > past.high:
        return "[red]slower[/]"
    if past.median > SLOWER * now.median and past.low > now.high:
        return "[green]faster[/]"
    return ""
