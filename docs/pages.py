"""The code of a page: its Python blocks are one program, and an `output` block is what it prints.

An `output` block contains what the blocks since the last `output` block print, compared as doctest
does: `...` stands for any text, and spaces at the end of a line do not count. `run` gives both
sides; `stored` is the page with what it prints now, which `python docs/build.py --outputs` writes.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import linecache
import re
import sys
import typing as tp
from pathlib import Path

BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Output(tp.NamedTuple):
    """An `output` block of a page."""

    line: int
    start: int
    end: int
    """Where its text is in the page."""
    written: str
    printed: str

    @property
    def agrees(self) -> bool:
        """Whether the block contains what the page prints."""
        written, printed = (
            "".join(line.rstrip() + "\n" for line in text.strip("\n").split("\n"))
            for text in (self.written, self.printed)
        )
        return doctest.OutputChecker().check_output(written, printed, doctest.ELLIPSIS)


def run(page: Path) -> list[Output]:
    """Run the Python of a page in one namespace; its output blocks beside what was printed."""
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, tp.Any] = {"__name__": "__docs__"}
    lines = [""] * (text.count("\n") + 1)
    printed = io.StringIO()
    outputs: list[Output] = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(2))
        if match[1] == "output":
            outputs.append(Output(line, *match.span(2), match[2], printed.getvalue()))
            printed.seek(0)
            printed.truncate()
        elif match[1] == "python":
            code = match[2].splitlines()
            lines[line : line + len(code)] = code
            # A traceback, and `inspect.getsource`, then read the page.
            whole = "\n".join(lines)
            linecache.cache[str(page)] = (len(whole), None, whole.splitlines(True), str(page))
            program = compile("\n" * line + match[2], str(page), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(printed):
                exec(program, namespace)
    return outputs


def stored(page: Path) -> str:
    """A page with what it prints in its output blocks; those that agree stay as they are."""
    text = page.read_text(encoding="utf-8")
    for output in reversed(run(page)):
        if not output.agrees:
            shown = "".join(line.rstrip() + "\n" for line in output.printed.splitlines())
            text = text[: output.start] + shown + text[output.end :]
    return text


if __name__ == "__main__":  # run pages; the exit code says whether their output blocks agree
    sys.exit(not all(output.agrees for page in sys.argv[1:] for output in run(Path(page))))
