"""Every `raise` in nnxlite is reached by a test that reads its message.

A pytest plugin, for Python 3.12 or newer. While tests run it notes whose message a test read, and the
session fails if a `raise` statement is left:

    python -m pytest -n auto -p tests.reliability.raises

The interpreter reports each exception (`sys.monitoring`), so that a run takes no longer.

**A test reads a message** when `pytest.raises(..., match=...)` or `ExceptionInfo.match` matched it,
when a line of the test says `str(caught.value)`, or when `capsys.readouterr` returned it.

**A raise statement is reached** when a test reads a message that contains the text of an exception
that the statement raised in that test. So an error counts where it is raised, wherever it was
built; one that is caught and repeated in another message counts with that message; and it does
not matter that JAX takes the library's frames out of tracebacks. A text of one word has to be the
whole message: it might be part of any other.

**What does not count** as a statement to reach is one without a message of its own: a bare `raise`,
and the `raise` of a class, such as the `NotImplementedError` of an abstract method, or a signal
that the library catches itself. Nor does `nnxlite/flax`, which replaces `flax.nnx` for a whole process:
tests/flax reads its messages as what other processes print.
"""

import ast
import dis
import linecache
import sys
import types
import typing as tp
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nnxlite"
TOOL = 3
RAISE = dis.opmap["RAISE_VARARGS"]


class Statement(tp.NamedTuple):
    """A `raise` statement: its file below `nnxlite/`, its line, and what it raises."""

    file: str
    line: int
    raises: str

    def __str__(self) -> str:
        return f"nnxlite/{self.file}:{self.line}: raise {self.raises}"


def statements() -> list[Statement]:
    """The `raise` statements of nnxlite that a test must reach."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file.startswith("flax/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and not is_class(node.exc):
                text = " ".join(ast.unparse(node.exc).split())
                found.append(Statement(file, node.lineno, text[:70]))
    return sorted(found)


def is_class(raised: ast.expr | None) -> bool:
    """Whether what is raised has no message: it is there already, or is the name of a class."""
    return raised is None or (isinstance(raised, ast.Name) and raised.id[0].isupper())


class Readings:
    """Notes which `raise` statements the messages came from that tests read."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        """What was reached: a file below `nnxlite/` and a line."""
        self.raised: set[tuple[str, str, int]] = set()
        """The texts of exceptions that were raised in this test, with the file and line."""

    def seen(self, code: types.CodeType, offset: int, error: BaseException) -> None:
        """An exception is raised, or passes through the frame of this code."""
        # What a trace function raises, as tests of interrupts do, has an offset that means nothing.
        known = code.co_filename.startswith(PREFIX) and 0 <= offset < len(code.co_code)
        if known and code.co_code[offset] == RAISE:
            file = code.co_filename[len(PREFIX) :]
            lines = [line for start, end, line in code.co_lines() if start <= offset < end]
            self.raised.add((str(error), file, lines[0] or 0))

    def read(self, message: str) -> None:
        """A test reads this message."""
        for text, file, line in self.raised:
            if text == message or (" " in text and text in message):
                self.lines.add((file, line))

    def watch(self) -> None:
        """From now on, note each exception, and each message that is read."""
        sys.monitoring.use_tool_id(TOOL, "nnxlite raises")
        sys.monitoring.register_callback(TOOL, sys.monitoring.events.RAISE, self.seen)
        sys.monitoring.set_events(TOOL, sys.monitoring.events.RAISE)
        matches, match = pytest.RaisesExc.matches, pytest.ExceptionInfo.match
        value = pytest.ExceptionInfo.value

        def noted_matches(context: tp.Any, exception: tp.Any) -> bool:
            matched = matches(context, exception)
            if matched and context.match is not None:
                self.read(str(exception))
            return matched

        def noted_match(caught: tp.Any, pattern: tp.Any) -> tp.Any:
            __tracebackhide__ = True
            matched = match(caught, pattern)
            self.read(str(value.fget(caught)))
            return matched

        def noted_value(caught: tp.Any) -> BaseException:
            error = value.fget(caught)
            reader = sys._getframe(1)
            if "str(" in linecache.getline(reader.f_code.co_filename, reader.f_lineno):
                self.read(str(error))
            return error

        printed = pytest.CaptureFixture.readouterr

        def noted_output(capture: tp.Any) -> tp.Any:
            output = printed(capture)
            self.read(f"{output.out}\n{output.err}")
            return output

        pytest.CaptureFixture.readouterr = noted_output  # type: ignore[method-assign]
        pytest.RaisesExc.matches = noted_matches  # type: ignore[method-assign]
        pytest.ExceptionInfo.match = noted_match  # type: ignore[method-assign]
        pytest.ExceptionInfo.value = property(noted_value, doc=value.__doc__)  # type: ignore[method-assign]

    def left(self) -> list[Statement]:
        return [s for s in statements() if (s.file, s.line) not in self.lines]


PREFIX = f"{PACKAGE}/"
readings = Readings()


def pytest_configure(config: pytest.Config) -> None:
    if sys.version_info < (3, 12):
        raise pytest.UsageError("tests.reliability.raises needs Python 3.12 or newer.")
    readings.watch()


def pytest_unconfigure(config: pytest.Config) -> None:
    sys.monitoring.free_tool_id(TOOL)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A message is read in the test that provokes it."""
    readings.raised.clear()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: tp.Any, error: object) -> None:
    """A worker of pytest-xdist hands over what its tests reached."""
    workeroutput = getattr(node, "workeroutput", {})
    readings.lines.update(map(tuple, workeroutput.get("raises", ())))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that would have passed, if a statement is left."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["raises"] = sorted(readings.lines)
    elif session.exitstatus == pytest.ExitCode.OK and readings.left():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what is left, and how many there are."""
    left = readings.left()
    terminalreporter.section("raise statements whose message no test read")
    counts = f"{len(statements())} raise statements, {len(left)} left"
    terminalreporter.write_line("\n".join([*map(str, left), counts]))
