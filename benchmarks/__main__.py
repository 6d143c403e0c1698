"""The command line: choose benches, run them, print, draw and keep the figures."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import typing as tp
from pathlib import Path

from rich.console import Console

# Importing a bench registers its cases.
from benchmarks import (  # noqa: F401
    checkpoints,
    construct,
    dispatch,
    filtered,
    functional,
    growth,
    importing,
    initialise,
    layers,
    loops,
    memory,
    plot,
    pytree,
    report,
    sharded,
    stages,
    tracing,
    transforms,
    variable,
)
from benchmarks.harness import CASES, QUICK, Case, Pace, measure
from benchmarks.plot import CHART

BENCHES = (
    "loops",
    "sharded",
    "dispatch",
    "filtered",
    "functional",
    "pytree",
    "variable",
    "construct",
    "initialise",
    "import",
    "eager",
    "jitted",
    "tracing",
    "layers",
    "growth",
    "memory",
    "stages",
    "checkpoints",
)
PEERS = {"flax", "equinox"}  # need not be there
WIDTH = 150  # of tables that go to a file


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> tp.NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def earlier_results(text: str) -> dict[str, tp.Any]:
    """The content of a file that `--json` wrote."""
    try:
        content = json.loads(Path(text).read_text())
        content["cases"]
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise argparse.ArgumentTypeError(f"{text} is not a file written by --json") from None
    return content


def whole_results(text: str) -> dict[str, tp.Any]:
    """The same, where all that is printed and drawn has to be in it."""
    content = earlier_results(text)
    if any("unit" not in case for case in content["cases"]):
        raise argparse.ArgumentTypeError(f"{text} is of an earlier version, which kept less")
    return content


def drawable(text: str) -> Path:
    """A folder, or a path of a picture; and Matplotlib is there."""
    path = Path(text)
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError('needs matplotlib: pip install -e ".[bench]"')
    if path.is_dir():
        return path
    if path.suffix not in plot.FORMATS:
        endings = " or ".join(plot.FORMATS)
        raise argparse.ArgumentTypeError(f"{text} is neither a folder nor ends in {endings}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text}: there is no {path.parent}")
    return path


def writable_file(text: str) -> Path:
    """A path that can be written, found out before anything is measured."""
    path = Path(text)
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {error.strerror}") from None
    return path


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen benches; the exit status is 1 where nnxlite itself has no figure."""
    parser = Parser(prog="python -m benchmarks", description="What nnxlite costs.")
    parser.add_argument(
        "--only",
        action="append",
        choices=BENCHES,
        metavar="NAME",
        help=f"run this bench (may be given more than once): {', '.join(BENCHES)}",
    )
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write the figures")
    parser.add_argument(
        "--compare", type=earlier_results, metavar="OLD.json", help="show earlier figures beside"
    )
    parser.add_argument(
        "--plot", type=drawable, metavar="FILE", help="draw an .svg or .png, or all into a folder"
    )
    parser.add_argument(
        "--chart", type=drawable, metavar="FILE", help="draw the ten rows that the README shows"
    )
    parser.add_argument(
        "--load",
        action="append",
        type=whole_results,
        metavar="OLD.json",
        help="measure nothing; show these figures (of several files, the worst of each case)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few rounds: shows that all works, and judges nothing"
    )
    parser.add_argument("--rounds", type=int, help=f"default: {Pace.rounds}")
    options = parser.parse_args(arguments)
    pace = QUICK if options.quick else Pace()
    if options.rounds is not None:
        if options.rounds < 2:
            parser.error(f"argument --rounds: at least 2, not {options.rounds}")
        pace = dataclasses.replace(pace, rounds=options.rounds)

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    benches = options.only or BENCHES
    wanted = lambda bench, name: bench in benches and (not options.chart or (bench, name) in CHART)
    if options.load:
        figures = report.worst(options.load)
    else:
        chosen = [case for case in CASES if wanted(case.bench, case.name)]
        figures = measured(chosen, pace, console, judged=not options.quick)
    figures["cases"] = [case for case in figures["cases"] if wanted(case["bench"], case["case"])]
    console.print(", ".join(f"{k} {v}" for k, v in figures["machine"].items()), highlight=False)
    report.print_results(figures, console)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.compare:
        report.print_comparison(options.compare, figures, console)
    if options.plot:
        for file in plot.draw(figures, options.plot):
            console.print(f"wrote {file}", highlight=False)
    if options.chart:
        plot.save(plot.chart_figure(figures), options.chart)
        console.print(f"wrote {options.chart}", highlight=False)
    return int(any(case["failed"].keys() - PEERS for case in figures["cases"]))


def measured(cases: list[Case], pace: Pace, console: Console, *, judged: bool) -> dict[str, tp.Any]:
    """The figures of some cases, in the order of `BENCHES`."""
    results = []
    for case in sorted(cases, key=lambda case: BENCHES.index(case.bench)):
        with console.status(f"{case.bench}: {case.name}"):
            results.append(measure(case, pace))
    return report.as_json(results, judged)


if __name__ == "__main__":
    raise SystemExit(main())
