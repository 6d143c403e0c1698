"""The command line: what would change, as a diff, and what needs a decision, by line."""

from __future__ import annotations

import argparse
import collections
import difflib
import functools
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from nnxlite.migrate import _SOURCES, UnreadableError, _need_libcst, migrate_text

DESCRIPTION = """Rewrite programs from Flax NNX for nnxlite, and list what needs a decision (or, with
--from equinox, what the names of Equinox become). Without --write nothing is changed."""
STATUS = """Exit status: 0, done or nothing to do; 1, with --check: something would change or needs a
decision; 2, a file cannot be read."""
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, with the arguments of the process or others; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m nnxlite.migrate", description=DESCRIPTION, epilog=STATUS
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a program or a directory")
    flag = functools.partial(parser.add_argument, action="store_true")
    flag("--write", help="change the files")
    flag("--check", help="exit with 1 where anything is left to do")
    flag("--quiet", help="show notes and errors only")
    text = "what they were written for (default: nnx); equinox is only reported"
    parser.add_argument("--from", dest="source", choices=_SOURCES, default="nnx", help=text)
    options = parser.parse_args(arguments)
    try:
        _need_libcst()
        paths = dict.fromkeys(path for name in options.paths for path in programs(Path(name)))
    except (ImportError, FileNotFoundError) as error:
        print(f"nnxlite.migrate: {error}", file=sys.stderr)
        return 2
    totals: collections.Counter[str] = collections.Counter()
    for path in paths:
        try:
            _migrate(path, options, totals)
        except (UnreadableError, OSError) as error:
            totals["unreadable"] += 1
            line, column = getattr(error, "line", 1), getattr(error, "column", 1)
            print(f"{path}:{line}:{column}: {error}", file=sys.stderr)
    if not options.quiet:
        verb = "changed" if options.write else "would change"
        print(
            f"files read: {totals['files']}, {verb}: {totals['changed']} ({totals['lines']} lines), "
            f"to decide: {totals['notes']}, unreadable: {totals['unreadable']}"
        )
    if totals["unreadable"]:
        return 2
    left = totals["notes"] or (totals["changed"] and not options.write)
    return int(options.check and left > 0)


def programs(path: Path) -> Iterator[Path]:
    """A file, or the programs below a directory in order, without hidden and installed ones.

    Raises:
        FileNotFoundError: the path does not exist.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        parts = file.relative_to(path).parts
        hidden = any(part.startswith(".") or part in SKIPPED for part in parts)
        if file == path or (file.suffix in (".py", ".pyi") and not hidden):
            yield file


def _migrate(path: Path, options: argparse.Namespace, totals: collections.Counter[str]) -> None:
    if path.suffix == ".ipynb":
        raise UnreadableError("a notebook: make a program of it first, with `jupytext --to py`")
    content = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UnreadableError(f"cannot be decoded: {error}") from error
    done = migrate_text(text, options.source)
    totals.update(files=1, notes=len(done.notes))
    if done.text != text:
        old, new = (s.replace("\r\n", "\n").splitlines(keepends=True) for s in (text, done.text))
        lines = list(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}", n=2))
        totals.update(changed=1, lines=sum(line.startswith("+") for line in lines[2:]))
        if not options.quiet:
            print("".join(line if line.endswith("\n") else line + "\n" for line in lines), end="")
        if options.write:
            path.write_bytes(done.text.encode(encoding))
    for note in done.notes:  # where, what, what to do, and where to read on
        print(f"{path}:{note.line}:{note.column}: {note.what}: {note.hint} [docs/{note.page}]")
