"""The command line: what would change, as a diff, and what needs a decision, by line."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
from pathlib import Path

from nnxlite.migrate import _files
from nnxlite.migrate._edits import Note
from nnxlite.migrate._errors import UnreadableError
from nnxlite.migrate._program import load_libcst
from nnxlite.migrate._sources import SOURCES, migrate_notebook, migrate_text

DESCRIPTION = """Rewrite programs from Flax NNX for nnxlite, and list what needs a decision (or, with
--from equinox, what the names of Equinox become). Without --write nothing is changed."""
STATUS = """Exit status: 0, done or nothing to do; 1, with --check: something would change or needs a
decision; 2, a file cannot be read."""


@dataclasses.dataclass
class Totals:
    """What a run has seen."""

    files: int = 0
    changed: int = 0
    lines: int = 0
    notes: int = 0
    unreadable: int = 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, with the arguments of the process or others; returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        load_libcst()
        paths = [*_files.programs(map(Path, options.paths), options.exclude)]
    except (ImportError, FileNotFoundError) as error:
        print(f"nnxlite.migrate: {error}", file=sys.stderr)
        return 2
    totals = Totals()
    for path in paths:
        try:
            _migrate(path, options, totals)
        except (UnreadableError, OSError) as error:
            totals.unreadable += 1
            line, column = getattr(error, "line", 1), getattr(error, "column", 1)
            print(f"{path}:{line}:{column}: {error}", file=sys.stderr)
    if not options.quiet:
        print(_summary(totals, options.write))
    if totals.unreadable:
        return 2
    return int(options.check and (totals.notes > 0 or (totals.changed > 0 and not options.write)))


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    options = argparse.ArgumentParser(
        "python -m nnxlite.migrate", description=DESCRIPTION, epilog=STATUS
    )
    options.add_argument(
        "paths", nargs="+", metavar="PATH", help="a program, a notebook or a directory"
    )
    options.add_argument("--write", action="store_true", help="change the files")
    options.add_argument(
        "--check", action="store_true", help="exit with 1 where anything is left to do"
    )
    options.add_argument(
        "--from",
        dest="source",
        choices=SOURCES,
        default="nnx",
        help="what they were written for (default: nnx); equinox is only reported",
    )
    options.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="names or paths to leave out",
    )
    options.add_argument("--quiet", action="store_true", help="show notes and errors only")
    return options


def _migrate(path: Path, options: argparse.Namespace, totals: Totals) -> None:
    text, encoding, mark = _files.read(path)
    migrate = migrate_notebook if path.suffix == ".ipynb" else migrate_text
    done = migrate(text, options.source)
    totals.files += 1
    totals.notes += len(done.notes)
    if done.text != text:
        lines = [
            *difflib.unified_diff(_lines(text), _lines(done.text), f"a/{path}", f"b/{path}", n=2)
        ]
        totals.changed += 1
        totals.lines += sum(line.startswith("+") for line in lines[2:])
        if not options.quiet:
            _show(lines)
        if options.write:
            _files.write(path, done.text, encoding, mark)
    for note in done.notes:
        print(describe(path, note))


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def describe(path: Path, note: Note) -> str:
    """A note as one line: where, what, what to do, and where to read on."""
    cell = f"cell {note.cell}:" if note.cell else ""
    return f"{path}:{cell}{note.line}:{note.column}: {note.what}: {note.hint} [docs/{note.page}]"


def _show(lines: list[str]) -> None:
    """Print a diff, with colours where the output is a terminal."""
    text = "".join(line if line.endswith("\n") else line + "\n" for line in lines)
    if not sys.stdout.isatty():
        sys.stdout.write(text.replace("\r\n", "\n"))
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(text, "diff", background_color="default", word_wrap=True))


def _summary(totals: Totals, written: bool) -> str:
    verb = "changed" if written else "would change"
    parts = [
        f"{_count(totals.files, 'file')} read",
        f"{totals.changed} {verb} ({_count(totals.lines, 'line')})",
        f"{totals.notes} to decide",
    ]
    parts += [f"{totals.unreadable} unreadable"] if totals.unreadable else []
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
