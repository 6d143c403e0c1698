"""Runs programs that use packages of PyPI, under Flax and under nnxlite, and compares them.

python -m tests.ecosystem                  # all of them, a table
python -m tests.ecosystem --only qwix      # one (may be repeated)
python -m tests.ecosystem --write          # the table becomes docs/ecosystem.md

The packages are installed from PyPI into an environment of their own (`--env`), on top of the JAX and
Flax of the Python that runs this. A program in `programs/` is the same file for both: it imports
`flax.nnx`, and `python -m nnxlite.flax` replaces that.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import sysconfig
import typing as tp
from pathlib import Path

from tests.ecosystem.packages import PACKAGES, Package

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
PAGE = ROOT / "docs" / "ecosystem.md"
START = "<!-- the table: python -m tests.ecosystem --write -->\n"
END = "<!-- end of the table -->\n"
BASE = ("jax", "jaxlib", "flax", "numpy")
"""Their versions are those of the Python that runs this."""


class Failure(Exception):
    """What went wrong, in a sentence or with the end of a program's output."""


def made(folder: Path, packages: tp.Sequence[Package]) -> Path:
    """The Python of the environment, with the packages in it."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        below = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (site / "below.pth").write_text(below)
    exact = folder / "constraints.txt"
    exact.write_text("".join(f"{name}=={importlib.metadata.version(name)}\n" for name in BASE))
    pins = [f"{package.name}=={package.version}" for package in packages]
    needs = sorted({need for package in packages for need in package.needs.split()})
    install(python, "--no-deps", *pins)
    if needs:
        install(python, "-c", str(exact), *needs)
    return python


def install(python: Path, *what: str) -> None:
    """Runs pip, which asks the network for nothing that is there already."""
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *what]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        said = errors[-1] if errors else done.stderr.strip()
        raise Failure(f"The packages cannot be installed from PyPI. pip says: {said}")


def run(python: Path, package: Package, options: tp.Sequence[str], seconds: float) -> tp.Any:
    """Runs a program once, in a process of its own; what it reports has `numbers` and `ms`."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environ |= {"ECOSYSTEM_SECONDS": str(seconds), **package.environ}
    environ.pop("NNXLITE_FLAX", None)
    command = [str(python), "-W", "ignore", *options, str(PROGRAMS / package.program)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise Failure("\n".join(done.stderr.strip().splitlines()[-6:]))
    return json.loads(lines[-1])


@dataclasses.dataclass
class Row:
    """A line of the table. A time is the lowest of the medians of its processes."""

    package: Package
    flax: float = math.nan
    nnxlite: float = math.nan
    numbers: str = ""
    failure: str = ""


def compare(python: Path, package: Package, rounds: int, seconds: float) -> Row:
    """Runs a program in both ways, in turns."""
    runs: dict[str, list[tp.Any]] = {"Flax": [], "nnxlite": []}
    for _ in range(rounds):
        for name, options in (("Flax", ()), ("nnxlite", ("-m", "nnxlite.flax"))):
            try:
                runs[name].append(run(python, package, options, seconds))
            except Failure as failure:
                return Row(package, failure=f"fails under {name}: {failure}")
    theirs, ours = (min(one["ms"] for one in found) for found in runs.values())
    numbers = agreement(*(found[0]["numbers"] for found in runs.values()))
    return Row(package, theirs, ours, numbers)


def agreement(theirs: list[float], ours: list[float]) -> str:
    """To which digit two lists of numbers are equal."""
    if len(theirs) != len(ours):
        return f"{len(theirs)} numbers and {len(ours)}"
    differ = [(a, b) for a, b in zip(theirs, ours) if a != b and (a == a or b == b)]  # or both NaN
    gaps = [abs(a - b) for a, b in differ]
    if not gaps:
        return "bit for bit"
    return f"to {max(int(-math.log10(max(gaps) / max(map(abs, theirs)))), 0)} digits"


def table(rows: tp.Sequence[Row]) -> str:
    """The rows in Markdown, the largest ratio first."""
    lines = [
        "| package | what is timed | numbers | Flax, ms | nnxlite, ms | ratio |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: 0 if row.failure else -row.flax / row.nnxlite):
        name, numbers, times = f"{row.package.name} {row.package.version}", row.numbers, " | | "
        if row.failure:
            numbers = row.failure.splitlines()[-1]
        else:
            times = f"{row.flax:.3g} | {row.nnxlite:.3g} | {row.flax / row.nnxlite:.1f}"
        lines.append(f"| {name} | {row.package.about} | {numbers} | {times} |")
    return "\n".join(lines) + "\n"


def described() -> str:
    """What the times were measured with."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"CPython {platform.python_version()}, {versions}, CPU with {cores} cores."


def written(page: str, rows: tp.Sequence[Row]) -> str:
    """The page with a new table in place of the one between the two marks."""
    before, rest = page.split(START)
    return f"{before}{START}\n{described()}\n\n{table(rows)}\n{END}{rest.split(END)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ecosystem")
    folder = Path.home() / ".cache" / "nnxlite" / f"ecosystem-{platform.python_version()}"
    parser.add_argument("--env", type=Path, default=folder, help=f"the environment ({folder})")
    parser.add_argument("--only", action="append", metavar="NAME", help="one package; repeatable")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind (3)")
    parser.add_argument("--quick", action="store_true", help="one short process of each kind")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    names = [package.name for package in PACKAGES]
    unknown = sorted(set(options.only or ()) - set(names))
    if unknown:
        parser.error(f"no package {', '.join(unknown)} in the table: {', '.join(names)}")
    packages = [x for x in PACKAGES if not options.only or x.name in options.only]
    try:
        python = made(options.env.absolute(), packages)
    except Failure as failure:
        print(failure, file=sys.stderr)
        return 1
    rows: list[Row] = []
    for package in packages:
        row = compare(python, package, *((1, 0.2) if options.quick else (options.rounds, 1.5)))
        said = row.failure or f"{row.numbers}, {row.flax / row.nnxlite:.2f} times as fast"
        print(f"{package.name}: {said}", flush=True)
        rows.append(row)
    print(f"\n{described()}\n\n{table(rows)}")
    if options.write:
        PAGE.write_text(written(PAGE.read_text(), rows))
    bad = [row for row in rows if row.failure or not row.numbers.startswith(("bit", "to "))]
    print(f"{len(rows) - len(bad)} passed, {len(bad)} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
