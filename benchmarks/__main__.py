"""The command line: choose benches, run them, print and keep the figures."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing as tp
from pathlib import Path

from rich.console import Console

# Importing a bench registers its cases.
from benchmarks import (  # noqa: F401
    construct,
    dispatch,
    filtered,
    functional,
    growth,
    importing,
    layers,
    pytree,
    report,
    tracing,
    transforms,
    variable,
)
from benchmarks.harness import CASES, QUICK, Pace, measure

BENCHES = (
    "dispatch",
    "filtered",
    "functional",
    "pytree",
    "variable",
    "construct",
    "import",
    "eager",
    "jitted",
    "tracing",
    "layers",
    "growth",
)
WIDTH = 140  # of tables that go to a file


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
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that all works")
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
    console.print(", ".join(f"{k} {v}" for k, v in report.machine().items()), highlight=False)
    results = []
    chosen = [case for case in CASES if case.bench in (options.only or BENCHES)]
    for case in sorted(chosen, key=lambda case: BENCHES.index(case.bench)):
        with console.status(f"{case.bench}: {case.name}"):
            results.append(measure(case, pace))
    report.print_results(results, console)
    figures = report.as_json(results)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.compare:
        report.print_comparison(options.compare, figures, console)
    return int(any(result.failed.keys() - {"flax", "equinox"} for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
