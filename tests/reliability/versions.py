"""The tests with every version of Python, JAX and the other dependencies that the project claims.

    python -m tests.reliability.versions list
    python -m tests.reliability.versions run oldest jax-0.11.0
    python -m tests.reliability.versions all --whole

Each row of the table is one environment, made with venv and pip. What is claimed is read from
pyproject.toml, what exists is asked of the package registry, so no version is listed here:

* `python-X`: the newest of everything, for each interpreter that is found;
* `jax-X`: each release of JAX from the oldest claimed on, with the oldest Python that has it;
* `oldest`: the oldest claimed version of everything at once, on the oldest Python;
* `oldest-NAME`: the oldest of one dependency alone, with the newest of the others that allow it, for
  what users install (the tests' own tools have no rows);
* `pre`: the newest of everything, pre-releases too: what the next release of JAX will break;
* `required`, `required-oldest`: the built wheel with the required dependencies alone trains a model.

The tests of a row are the quick tier, the laws, and the files that use the dependencies most
(`--tier few` is the last of these with a dozen others, `--tier quick` the quick tier alone, `--whole`
all tests but those of examples, of benchmarks and beside the peers), with every warning an error.
Interpreters are looked for on PATH and in `~/.pyenv/versions`, or given with `--python`. An
environment that exists is used again; `--fresh` makes it again, as one has to for releases of today.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import typing as tp
import xml.etree.ElementTree
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.conftest import QUICK

ROOT = Path(__file__).parents[2]
NOT_IN_ROWS = ["tests/parity", "tests/examples", "tests/benchmarks"]
DEPENDENT = """
checkpoint/test_checkpoint.py checkpoint/test_safetensors.py inspect/test_display.py
migrate/test_spellings.py serving/test_export.py training/test_optimizer.py
""".split()
FEW = """
boundary/test_aliases.py checkpoint/test_mapping.py filtered/test_trees.py
graph/test_plans.py sharding/test_abstract.py
transforms/test_build.py transforms/test_calls.py transforms/test_partial.py transforms/test_trees.py
variables/test_variable.py
""".split()
SHOWN = ["jax", "numpy", "optax", "orbax-checkpoint", "safetensors", "treescope", "rich"]
TIERS = ("few", "quick", "usual", "whole")


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python that is here."""

    command: str
    version: str
    free_threaded: bool = False

    @property
    def name(self) -> str:
        """Its minor version, with the `t` of a free-threaded build."""
        return ".".join(self.version.split(".")[:2]) + "t" * self.free_threaded


@dataclasses.dataclass(frozen=True)
class Row:
    """One environment.

    Attributes:
        name: of the row.
        python: the interpreter.
        requirements: what pip is asked for.
        options: of `pip install`.
        wheel: whether the built wheel is installed and checked, in place of the tests.
    """

    name: str
    python: Interpreter
    requirements: tuple[str, ...]
    options: tuple[str, ...] = ()
    wheel: bool = False


class Claims:
    """What pyproject.toml says of versions."""

    def __init__(self, text: str) -> None:
        project = tomllib.loads(text)["project"]
        self.oldest_python = project["requires-python"].removeprefix(">=")
        self.required = [Requirement(line) for line in project["dependencies"]]
        self.extras: dict[str, list[str]] = project["optional-dependencies"]

    def of_extra(self, name: str) -> list[Requirement]:
        """The requirements of an extra, with those of the extras that it names."""
        found = []
        for line in self.extras[name]:
            requirement = Requirement(line)
            if requirement.name == "nnxlite":
                for extra in sorted(requirement.extras):
                    found += self.of_extra(extra)
            else:
                found.append(requirement)
        return found

    @property
    def tested(self) -> list[Requirement]:
        """What the tests need."""
        return self.required + self.of_extra("test")


def oldest(requirement: Requirement, releases: tp.Iterable[str]) -> Requirement:
    """The same requirement of the oldest release that it allows.

    >>> str(oldest(Requirement("flax>=0.12,<0.13"), ["0.13.0", "0.12.4", "0.12.1", "0.11.2"]))
    'flax==0.12.1'
    """
    version = min((v for v in releases if Version(v) in requirement.specifier), key=Version)
    return Requirement(f"{requirement.name}=={version}")


def rows_for(
    claims: Claims,
    pythons: tp.Sequence[Interpreter],
    releases: tp.Callable[[Interpreter, str], tp.Sequence[str]],
) -> list[Row]:
    """The rows for the interpreters that are here and the releases that each can install."""
    pythons = [p for p in pythons if Version(p.version) >= Version(claims.oldest_python)]
    usual = [python for python in pythons if not python.free_threaded]
    first, last = usual[0], usual[-1]
    tested = tuple(map(str, claims.tested))
    floors = {r.name: str(oldest(r, releases(first, r.name))) for r in claims.tested}
    required = tuple(floors[requirement.name] for requirement in claims.required)
    rows = [
        Row("oldest", first, tuple(floors.values())),
        Row("pre", last, tested, ("--pre",)),
        Row("required", last, (), wheel=True),
        Row("required-oldest", first, required, wheel=True),
    ]
    (jax,) = [requirement for requirement in claims.required if requirement.name == "jax"]
    found: dict[str, Interpreter] = {}
    for python in usual:
        for version in releases(python, "jax"):
            if Version(version) in jax.specifier:
                found.setdefault(version, python)
    for version in sorted(found, key=Version):
        rows.append(Row(f"jax-{version}", found[version], (*tested, f"jax=={version}")))
    rows += [Row(f"python-{python.name}", python, tested) for python in pythons]
    without = {"jax", "jaxlib", *[Requirement(line).name for line in claims.extras["test"]]}
    for name, requirement in floors.items():
        if name not in without:
            rows.append(Row(f"oldest-{name}", first, (*tested, requirement)))
    return rows


# What is on this machine --------------------------------------------------------------------

_ABOUT = (
    "import platform, sysconfig; "
    "print(platform.python_version(), sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
)


def interpreters(given: tp.Sequence[str]) -> list[Interpreter]:
    """The given interpreters, or those that are found, the newest of each minor version, in order."""
    commands = list(given)
    if not commands:
        for folder in os.environ.get("PATH", "").split(os.pathsep):
            commands += glob.glob(os.path.join(folder, "python3.[0-9]*"))
        commands += glob.glob(os.path.expanduser("~/.pyenv/versions/*/bin/python3.[0-9]*"))
    found: dict[str, Interpreter] = {}
    for command in commands:
        if not re.fullmatch(r"python3(\.\d+t?)?", Path(command).name) and not given:
            continue
        asked = subprocess.run([command, "-c", _ABOUT], capture_output=True, text=True)
        if asked.returncode:  # a shim of pyenv without a version behind it
            continue
        version, free_threaded = asked.stdout.split()
        python = Interpreter(command, version, free_threaded == "1")
        known = found.get(python.name)
        if known is None or Version(known.version) < Version(version):
            found[python.name] = python
    return sorted(found.values(), key=lambda p: (Version(p.version), p.free_threaded))


def releases_of(output: str) -> list[str]:
    """The versions in what `pip index versions` prints, without pre-releases.

    >>> releases_of("jax (0.12.0)\\nAvailable versions: 0.12.0, 0.11.2, 0.11.0rc1")
    ['0.12.0', '0.11.2']
    """
    (line,) = re.findall(r"^Available versions: (.*)$", output, re.M)
    return [version for version in line.split(", ") if not Version(version).is_prerelease]


@functools.cache
def registered(python: Interpreter, package: str) -> list[str]:
    """The releases of a package in the registry that this interpreter can install."""
    command = [python.command, "-m", "pip", "index", "versions", package]
    asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{asked.stderr}")
    return releases_of(asked.stdout)


# One row ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """What came of one row."""

    row: Row
    outcome: str
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    failed: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def environment(row: Row, folder: Path, fresh: bool, log: tp.IO[str]) -> Path | None:
    """The Python of the environment of a row, made where it is missing; None if pip refuses."""
    home = folder / row.name
    python = home / "bin" / "python"
    wanted = json.dumps([row.python.command, row.python.version, row.requirements, row.options])
    stamp = home / "installed.json"
    if not fresh and stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([row.python.command, "-m", "venv", home], check=True, stdout=log, stderr=log)
    things = list(row.requirements)
    if row.wheel:
        things.append(str(built_wheel(python, home, log)))
    install = [python, "-m", "pip", "install", "-q", *row.options, *things]
    if subprocess.run(install, stdout=log, stderr=log).returncode:
        return None
    stamp.write_text(wanted)
    return python


def built_wheel(python: Path, home: Path, log: tp.IO[str]) -> Path:
    """The wheel of the working tree, built from a copy, which leaves no files of a build behind."""
    copy = home / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "nnxlite", copy / "nnxlite", ignore=ignored)
    command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", home / "wheel", copy]
    subprocess.run(command, check=True, stdout=log, stderr=log)
    (wheel,) = (home / "wheel").glob("nnxlite-*.whl")
    return wheel


def installed(python: Path) -> dict[str, str]:
    """The version of each package of an environment."""
    command = [python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {canonicalize_name(item["name"]): item["version"] for item in json.loads(listed)}


def run_row(row: Row, folder: Path, tier: str, workers: str, fresh: bool) -> Result:
    """Make the environment of a row, and run its tests."""
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with open(folder / f"{row.name}.log", "w") as log:
        python = environment(row, folder, fresh, log)
        if python is None:
            return Result(row, "not installable", seconds=time.monotonic() - start)
        result = Result(row, "", installed(python))
        if row.wheel:
            command = _check_wheel(python, folder / row.name)
        else:
            report = folder / f"{row.name}.xml"
            command = [python, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += [*chosen(tier), "-n", workers, f"--junitxml={report}"]
        log.flush()
        variables = {**os.environ, "JAX_PLATFORMS": "cpu", "CI": "true"}
        where = folder / row.name if row.wheel else ROOT
        done = subprocess.run(command, cwd=where, env=variables, stdout=log, stderr=log)
    if not row.wheel and report.exists():
        result.counts, result.failed = counted(report.read_text())
    result.outcome = "failed" if done.returncode else "passed"
    result.seconds = time.monotonic() - start
    return result


def _check_wheel(python: Path, home: Path) -> list[tp.Any]:
    (wheel,) = (home / "wheel").glob("nnxlite-*.whl")
    return [python, "-W", "error", ROOT / ".ci" / "check_wheel.py", wheel]


def chosen(tier: str) -> list[str]:
    """The arguments of pytest for a tier."""
    if tier == "whole":
        return [f"--ignore={name}" for name in NOT_IN_ROWS]
    quick = sorted(QUICK)
    tiers = {"few": [*FEW, *DEPENDENT], "quick": quick, "usual": [*quick, "laws", *DEPENDENT]}
    return [f"tests/{name}" for name in tiers[tier]]


def counted(report: str) -> tuple[dict[str, int], list[str]]:
    """The numbers in a report of pytest, and which tests failed.

    >>> case = '<testcase classname="a" name="b"><failure/></testcase>'
    >>> counted(f'<x><testsuite tests="3" failures="1" errors="0" skipped="1">{case}</testsuite></x>')
    ({'passed': 1, 'failed': 1, 'skipped': 1}, ['a::b'])
    """
    suite = xml.etree.ElementTree.fromstring(report).find("testsuite")
    assert suite is not None
    tests, failed, errors, skipped = (
        int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
    )
    names = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    passed = tests - failed - errors - skipped
    return {"passed": passed, "failed": failed + errors, "skipped": skipped}, names


# The table ----------------------------------------------------------------------------------


def line(result: Result) -> str:
    """A line of the table."""
    versions = " ".join(f"{n} {result.versions[n]}" for n in SHOWN if n in result.versions)
    counts = " ".join(f"{number} {word}" for word, number in result.counts.items() if number)
    cells = [
        f"{result.row.name:24}",
        f"{result.row.python.version:8}",
        f"{result.outcome:15}",
        f"{counts:32}",
        f"{result.seconds:5.0f} s",
        versions,
    ]
    return "  ".join(cells).rstrip()


def main(arguments: tp.Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the number of rows that did not pass."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["list", "run", "all"])
    parser.add_argument("rows", nargs="*", help="names of rows, for `run`")
    parser.add_argument("--python", action="append", default=[], help="an interpreter to use")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "versions")
    parser.add_argument("--tier", choices=TIERS, default="usual")
    parser.add_argument("--whole", dest="tier", action="store_const", const="whole")
    parser.add_argument("--fresh", action="store_true", help="make each environment again")
    parser.add_argument("-n", dest="workers", default="0", help="processes, as of pytest-xdist")
    options = parser.parse_args(arguments)
    os.environ.pop("PYTHONPATH", None)  # pip takes what is found there as installed
    os.environ.pop("XLA_FLAGS", None)  # those of the JAX that is here
    claims = Claims((ROOT / "pyproject.toml").read_text())
    rows = rows_for(claims, interpreters(options.python), registered)
    if options.what == "list":
        for row in rows:
            print(f"{row.name:24}  {row.python.version:8}  {' '.join(row.requirements)}")
        return 0
    if options.what == "run":
        if unknown := set(options.rows) - {row.name for row in rows}:
            parser.error(f"no row is called {', '.join(sorted(unknown))}; see `list`")
        rows = [row for row in rows if row.name in options.rows]
    results = []
    for row in rows:
        results.append(run_row(row, options.folder, options.tier, options.workers, options.fresh))
        print(line(results[-1]), flush=True)
        for name in results[-1].failed:
            print(f"    {name}")
    failed = [result for result in results if result.outcome != "passed"]
    print(f"{len(results)} rows, {len(failed)} not passed; logs in {options.folder}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
