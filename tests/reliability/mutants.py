"""How many small changes to the engine the tests notice: mutation testing over a random sample.

    python -m tests.reliability.mutants --map
    python -m tests.reliability.mutants --sample 300 --seed 1

The first command runs the tests that judge (`JUDGES`) and notes which lines of the engine each
one executes. The second draws mutants, as many from each package of `PACKAGES`; for each of them it
runs tests that execute the changed lines until one fails: first the tests of the package itself, the
quickest first, then the laws, then the others. Results are appended to a file, and a command that
is given again goes on where it was stopped. `--only FILE:LINE` runs the mutants of that line again,
against every test that executes it, and `--survivors` those that lived. Python 3.12 or newer.

A mutant is one change to one place: a comparison is reversed or moves its limit, `and` becomes `or`, a
`not` goes, a condition is always true or always false, a number grows by one, `True` becomes
`False`, an operator its opposite, a statement (a call, a write, a `raise`, a `del`, a `break`)
disappears, a function returns None. Texts, annotations and the contents of `raise` statements stay.

Why not cosmic-ray or mutmut: mutmut wraps each function in another one, which an engine that reads
code objects and closures notices; cosmic-ray edits files and starts a process with JAX for each
mutant, and has no operator that deletes statements. Here a server process has imported JAX and
all else but nnxlite; a mutant costs a fork, in which one module is compiled from the changed text.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import functools
import importlib
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
import types
import typing as tp
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

import tests.conftest  # noqa: F401  # the environment, before anything imports JAX

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out" / "mutants"
PACKAGES = ("graph", "boundary", "transforms", "checkpoint")
JUDGES = (
    *(f"tests/{name}" for name in (*PACKAGES, "laws", "objects", "filtered")),
    *("tests/training", "tests/test_state.py", "tests/test_freezing.py", "tests/test_refs.py"),
    *("tests/test_traversals.py", "tests/test_errors_page.py", "tests/inspect/test_diff.py"),
)
TIMED = "tests/graph/test_scale.py"
"""Tests with a limit of seconds: on a busy machine they fail without a mutant, too."""
FIRST = 25
"""Tests in the first attempt at a mutant; few, so that few files are imported."""
CPU = 8.0
"""Seconds of tests that a mutant must outlive, unless its line is named."""


class Mutant(tp.NamedTuple):
    """One change: a piece of the text of a file is replaced."""

    file: str
    lines: tuple[int, int]
    start: int
    end: int
    new: str
    change: str

    @property
    def package(self) -> str:
        return self.file.split("/")[1]

    def text(self) -> str:
        """The whole text of the file after the change."""
        source = (ROOT / self.file).read_bytes()
        return (source[: self.start] + self.new.encode() + source[self.end :]).decode()


OPPOSITE: dict[type, list[tuple[str, str]]] = {
    ast.Eq: [("==", "!=")],
    ast.NotEq: [("!=", "==")],
    ast.Lt: [("<", ">="), ("<", "<=")],
    ast.LtE: [("<=", ">"), ("<=", "<")],
    ast.Gt: [(">", "<="), (">", ">=")],
    ast.GtE: [(">=", "<"), (">=", ">")],
    ast.Is: [("is", "is not")],
    ast.IsNot: [("is not", "is")],
    ast.In: [("in", "not in")],
    ast.NotIn: [("not in", "in")],
    ast.And: [("and", "or")],
    ast.Or: [("or", "and")],
    ast.Add: [("+", "-")],
    ast.Sub: [("-", "+")],
    ast.Mult: [("*", "+")],
    ast.FloorDiv: [("//", "*")],
    ast.Mod: [("%", "*")],
    ast.BitOr: [("|", "&")],
    ast.BitAnd: [("&", "|")],
}


class Mutator(ast.NodeVisitor):
    """All mutants of one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.source = (ROOT / file).read_bytes()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.mutants: list[Mutant] = []
        self.visit(ast.parse(self.source))

    def span(self, node: tp.Any) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def add(self, node: tp.Any, span: tuple[int, int], new: str, change: str) -> None:
        first = self.source[: span[0]].count(b"\n") + 1
        last = node.end_lineno if span == self.span(node) else first
        # As many lines as before: tracebacks and `inspect` read the file on disk.
        below = self.source[slice(*span)].count(b"\n")
        if below:
            new = "pass" + "\n" * below if new == "pass" else "(" + "\n" * below + f"{new})"
        self.mutants.append(Mutant(self.file, (first, last), *span, new, change))

    def replace(self, node: ast.AST, new: str, why: str = "") -> None:
        span = self.span(node)
        old = " ".join(self.source[slice(*span)].decode().split())
        self.add(node, span, new, f"{why}{old[:60]} -> {new}")

    def between(self, op: ast.AST, left: ast.AST, right: ast.AST) -> None:
        """Change the operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = self.source[start:end].decode()
        for old, new in OPPOSITE.get(type(op), ()):
            if gap.count(old) == 1:
                at = start + len(gap[: gap.index(old)].encode())
                around = " ".join(
                    self.source[self.span(left)[0] : self.span(right)[1]].decode().split()
                )
                self.add(left, (at, at + len(old)), new, f"{old} -> {new} in {around[:60]}")

    def condition(self, test: ast.expr, *constants: str) -> None:
        for constant in constants:
            self.replace(test, constant, "condition ")

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for op, left, right in zip(node.ops, operands, operands[1:]):
            self.between(op, left, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:]):
            self.between(node.op, left, right)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(
            isinstance(x, ast.Constant) and x.value is None for x in (node.left, node.right)
        ):
            self.between(node.op, node.left, node.right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start = self.span(node)[0]
            around = " ".join(self.source[slice(*self.span(node))].decode().split())
            self.add(node, (start, start + 4), "", f"no `not` in {around[:60]}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self.replace(node, str(node.value + 1))

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in ("tp.TYPE_CHECKING", "TYPE_CHECKING"):
            self.condition(node.test, "True", "False")
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node.test, "True", "False")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.condition(test, "True", "False")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.condition(node.test, "False")
        self.generic_visit(node)

    def removed(self, node: ast.stmt) -> None:
        self.replace(node, "pass", "no ")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.removed(node)
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self.removed(node)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.removed(node)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and ast.unparse(node.value) != "None":
            self.replace(node.value, "None", "returns ")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.removed(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.removed(node)

    visit_Break = visit_Continue = removed

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not any("overload" in ast.unparse(decorator) for decorator in node.decorator_list):
            for child in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
                self.visit(child)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Assertions are for type checkers and readers."""

    visit_JoinedStr = visit_Assert


@functools.cache
def all_mutants(package: str) -> list[Mutant]:
    """Each mutant of a package that compiles, in order of file and position."""
    files = sorted((ROOT / "nnxlite" / package).rglob("*.py"))
    return [m for path in files for m in Mutator(path.relative_to(ROOT).as_posix()).mutants]


def sample(count: int, seed: int) -> list[Mutant]:
    """As many mutants of each package, drawn without replacement; the packages take turns."""
    drawn = []
    for package in PACKAGES:
        mutants = [*all_mutants(package)]
        random.Random(f"{package} {seed}").shuffle(mutants)
        drawn.append(mutants[: -(-count // len(PACKAGES))])
    return [mutant for group in zip(*drawn) for mutant in group][:count]


class Loader(SourceFileLoader):
    """Imports a module from changed text, or with events for each line it executes."""

    changed: tp.ClassVar[dict[str, str]] = {}
    watched: tp.ClassVar[bool] = False

    def get_code(self, fullname: str) -> types.CodeType | None:
        file = Path(self.path).relative_to(ROOT).as_posix()
        if file in self.changed:
            return compile(self.changed[file], self.path, "exec", dont_inherit=True)
        code = super().get_code(fullname)
        if self.watched and code is not None:
            watch(code)
        return code


class Finder(MetaPathFinder):
    """Finds the modules of the packages, for `Loader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(tuple(f"nnxlite.{package}" for package in PACKAGES)):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(fullname, spec.origin)
        return spec


TOOL = 4
executed: set[tuple[str, int]] = set()


def watch(code: types.CodeType) -> None:
    """Ask for an event at each line of a code object and those within."""
    sys.monitoring.set_local_events(TOOL, code, sys.monitoring.events.LINE)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            watch(constant)


class Recorder:
    """A pytest plugin: writes down which lines each test executes."""

    def __init__(self, file: tp.TextIO) -> None:
        self.file = file
        sys.monitoring.use_tool_id(TOOL, "nnxlite tests")
        sys.monitoring.register_callback(TOOL, sys.monitoring.events.LINE, self.line)

    def line(self, code: types.CodeType, line: int) -> object:
        executed.add((code.co_filename, line))
        return sys.monitoring.DISABLE

    def pytest_runtest_protocol(self) -> None:
        executed.clear()
        sys.monitoring.restart_events()
        self.passed, self.started = True, time.process_time()

    def pytest_runtest_logreport(self, report: tp.Any) -> None:
        self.passed &= report.passed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if not self.passed:
            return
        lines = collections.defaultdict(list)
        for name, line in sorted(executed):
            lines[Path(name).relative_to(ROOT).as_posix()].append(line)
        self.file.write(json.dumps([nodeid, round(self.spent, 3), lines]) + "\n")

    def pytest_runtest_teardown(self) -> None:
        self.spent = time.process_time() - self.started


OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # Hypothesis is imported already


def record(judges: Sequence[str]) -> None:
    """Run the tests and append to the map which lines they execute, and how long they take."""
    import pytest

    OUT.mkdir(parents=True, exist_ok=True)
    sys.meta_path.insert(0, Finder())
    Loader.watched = True
    with (OUT / f"map-{os.getpid()}.jsonl").open("w") as file:
        pytest.main([*OPTIONS, *judges], plugins=[Recorder(file)])


class Judge(tp.NamedTuple):
    """A test: its id, its seconds, and the lines that it executes, by file."""

    id: str
    seconds: float
    lines: dict[str, list[int]]


def judges() -> list[Judge]:
    """The tests of the map."""
    found = {}
    for path in sorted(OUT.glob("map*.jsonl")):
        for line in path.read_text().splitlines():
            judge = Judge(*json.loads(line))
            if not judge.id.startswith(TIMED):
                found[judge.id] = judge
    return list(found.values())


def chosen(mutant: Mutant, tests: list[Judge], limit: float | None) -> list[Judge]:
    """The tests that execute the changed lines, in the order in which they run."""
    first, last = mutant.lines

    def executes(test: Judge) -> bool:
        return any(first <= line <= last for line in test.lines.get(mutant.file, ()))

    def order(test: Judge) -> tuple[int, float]:
        own, laws = f"tests/{mutant.package}/", "tests/laws/"
        group = 0 if test.id.startswith(own) else 1 if test.id.startswith(laws) else 2
        return group, test.seconds

    matches = [test for test in tests if executes(test)]
    if not matches:  # a line that only the import executes
        matches = [test for test in tests if mutant.file in test.lines]
    matches.sort(key=order)
    total, taken = 0.0, []
    for test in matches:
        total += test.seconds
        if limit is not None and total > limit and taken:
            break
        taken.append(test)
    return taken


class Verdict(tp.NamedTuple):
    """Killed, timeout, lived, unreached or error; by which test, of how many."""

    verdict: str
    by: str
    tests: int


def judged(mutant: Mutant, tests: list[Judge]) -> Verdict:
    """Run the tests with the mutant, in a process of their own, until one fails."""
    if not tests:
        return Verdict("unreached", "", 0)
    reader, writer = os.pipe()
    cpu = int(20 + 5 * sum(test.seconds for test in tests))
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            log = os.open(OUT / "last.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
            by = failing(mutant, [test.id for test in tests])
            os.write(writer, (by or "nothing").encode())
        finally:
            os._exit(0)
    os.close(writer)
    # One that waits for ever uses no CPU; one that does not stop is ended by the kernel.
    patience = 120 + 10 * cpu
    answered, _, _ = select.select([reader], [], [], patience)
    with os.fdopen(reader) as answer:
        by = answer.read() if answered else ""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if by.startswith("error"):  # a test of the map that is there no longer
        return Verdict("error", by, len(tests))
    if by == "nothing":
        return Verdict("lived", "", len(tests))
    return Verdict("killed" if by else "timeout", by, len(tests))


def failing(mutant: Mutant, ids: list[str]) -> str:
    """The first test that fails with the mutant, or nothing."""
    import pytest

    class First:
        by = ""

        def pytest_runtest_logreport(self, report: tp.Any) -> None:
            if report.failed:
                self.by = self.by or report.nodeid

        def pytest_collectreport(self, report: tp.Any) -> None:
            if report.failed:
                self.by = self.by or f"import of {report.nodeid}"

    Loader.changed[mutant.file] = mutant.text()
    sys.meta_path.insert(0, Finder())
    first = First()
    code = pytest.main([*OPTIONS, "-x", *ids], plugins=[first])
    return first.by or ("" if code == 0 else f"error: pytest ended with {code}")


def warm() -> None:
    """Import what nnxlite and the tests import besides themselves; every mutant inherits it."""
    packages = "sys, nnxlite, nnxlite.checkpoint, hypothesis.strategies, pytest"
    script = f"import {packages}; print(*sys.modules)"
    names = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, text=True
    )
    for name in names.stdout.split():
        if name.partition(".")[0] not in ("nnxlite", "tests", "__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    if any(name.partition(".")[0] == "nnxlite" for name in sys.modules):
        raise RuntimeError("nnxlite is imported, and its mutants would not be.")


def run(mutants: list[Mutant], out: Path, limit: float | None) -> None:
    """Judge each mutant that the file of results does not have, and add what became of it."""
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(r["file"], r["start"], r["change"]) for r in known}
    tests = judges()
    warm()
    with out.open("a") as file:
        for mutant in mutants:
            if (mutant.file, mutant.start, mutant.change) in done:
                continue
            started, taken = time.monotonic(), chosen(mutant, tests, limit)
            verdict = judged(mutant, taken[:FIRST])
            if verdict.verdict == "lived" and taken[FIRST:]:
                verdict = judged(mutant, taken[FIRST:])._replace(tests=len(taken))
            place = {"file": mutant.file, "line": mutant.lines[0], "start": mutant.start}
            result = {**place, "change": mutant.change, **verdict._asdict()}
            result["wall"] = round(time.monotonic() - started, 1)
            print(json.dumps(result), file=file, flush=True)


def counts(out: Path) -> str:
    """One line: how many mutants there are of each verdict."""
    results = [json.loads(line) for line in out.read_text().splitlines()]
    number = collections.Counter(result["verdict"] for result in results)
    return f"{len(results)} mutants: " + ", ".join(
        f"{n} {verdict}" for verdict, n in number.items()
    )


def main() -> None:
    """The commands of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--map", nargs="*", metavar="TEST", help="note what the tests execute")
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--package", action="append", choices=PACKAGES, help="only of these")
    parser.add_argument("--survivors", action="store_true", help="those that lived, once more")
    parser.add_argument("--only", action="append", metavar="FILE:LINE")
    parser.add_argument("--out", type=Path, default=OUT / "results.jsonl")
    options = parser.parse_args()
    os.environ["CI"] = "1"  # the same examples of Hypothesis for all
    if options.map is not None:
        return record(options.map or JUDGES)
    mutants, limit, out = sample(options.sample, options.seed), CPU, options.out
    mutants = [m for m in mutants if m.package in (options.package or PACKAGES)]
    if options.survivors or options.only:
        limit, out = None, OUT / f"again-{int(time.time())}.jsonl"
        if options.survivors:
            results = map(json.loads, options.out.read_text().splitlines())
            lived = {
                (r["file"], r["start"], r["change"]) for r in results if r["verdict"] == "lived"
            }
            mutants = [m for m in mutants if (m.file, m.start, m.change) in lived]
        else:
            everything = [m for package in PACKAGES for m in all_mutants(package)]
            mutants = [m for m in everything if f"{m.file}:{m.lines[0]}" in options.only]
    run(mutants, out, limit)
    print(counts(out))


if __name__ == "__main__":
    main()
