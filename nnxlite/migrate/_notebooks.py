"""Notebooks: the code cells as one program, and edits of it made in the text of the file.

The file is never written as JSON again.  Edits replace the strings of changed lines; all else, outputs
and indentation included, stays as it was.
"""

from __future__ import annotations

import dataclasses
import json
import json.scanner
import re
import typing as tp

from nnxlite.migrate._edits import Edit, apply
from nnxlite.migrate._errors import UnreadableError

MAGIC = re.compile(
    r"^(?P<indent>[ \t]*)(?P<code>(?:%%?[A-Za-z]|[!?])[^\n]*|[^\n#'\"]*(?:=\s*[!%][^\n]*|\?))$",
    re.M,
)
CELL_MAGIC = re.compile(r"\s*%%(?!time|capture)")


class _Text(str):
    """A string of the file, and where it is there, quotes included."""

    start: int
    stop: int


def _parse(text: str) -> tp.Any:
    """The content of a file of JSON, with `_Text` for strings that are values."""
    decoder: tp.Any = json.JSONDecoder()
    plain = decoder.parse_string

    def parse_string(whole: str, begin: int, strict: bool = True) -> tuple[_Text, int]:
        value, stop = plain(whole, begin, strict)
        found = _Text(value)
        found.start, found.stop = begin - 1, stop
        return found, stop

    decoder.parse_string = parse_string
    decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    try:
        return decoder.decode(text)
    except json.JSONDecodeError as error:
        raise UnreadableError(f"not JSON: {error.msg}", error.lineno, error.colno) from error
    except RecursionError as error:
        raise UnreadableError("not JSON: it is nested too deeply") from error


@dataclasses.dataclass(frozen=True)
class _Line:
    """A string of the source of a cell, where it begins in the program, and its cell."""

    begin: int
    text: _Text
    cell: int


class Notebook:
    """The code of a notebook."""

    def __init__(self, text: str):
        self.text = text
        content = _parse(text)
        if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
            raise UnreadableError("not a notebook: it has no list `cells`")
        self._lines: list[_Line] = []
        self._cells: list[int] = []
        """The line of the program on which each code cell begins, from 0."""
        code = ""
        for cell in content["cells"]:
            if not isinstance(cell, dict):
                raise UnreadableError("not a notebook: a cell is not a table")
            if cell.get("cell_type") != "code":
                continue
            source = cell.get("source", [])
            strings = [source] if isinstance(source, str) else source
            if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
                raise UnreadableError("not a notebook: the source of a cell is not text")
            self._cells.append(code.count("\n"))
            whole = "".join(strings)
            begin = len(code)
            for string in strings:
                self._lines.append(_Line(begin, tp.cast(_Text, string), len(self._cells)))
                begin += len(string)
            code += _without_magics(whole) + "\n"
        self.program = code

    def place(self, line: int) -> tuple[int, int]:
        """The number of the cell, and the line in it, of a line of the program; all from 1."""
        cell = max(i for i, first in enumerate(self._cells) if first < line)
        return cell + 1, line - self._cells[cell]

    def with_edits(self, edits: list[Edit]) -> str:
        """The file with edits of the program made in it."""
        changes: dict[int, list[Edit]] = {}
        for edit in edits:
            index = max(i for i, line in enumerate(self._lines) if line.begin <= edit.start)
            first, stop, text = self._lines[index], edit.stop, edit.text
            while stop > self._lines[index].begin + len(self._lines[index].text):
                # An import of several lines: what follows its first line goes.
                index += 1
                line = self._lines[index]
                rest = min(stop - line.begin, len(line.text))
                changes.setdefault(index, []).append(Edit(0, rest, ""))
            stop = min(stop, first.begin + len(first.text))
            home = self._lines.index(first)
            local = Edit(edit.start - first.begin, stop - first.begin, text)
            changes.setdefault(home, []).append(local)
        new = []
        for index, local in changes.items():
            string = self._lines[index].text
            new.append(self._string(string, apply(string, local)))
        return apply(self.text, new)

    def _string(self, old: _Text, new: str) -> Edit:
        """The edit of the file that puts one or several strings in the place of one."""
        raw = self.text[old.start : old.stop]
        whole = not re.search(r"[\[,]\s*\Z", self.text[: old.start])  # the cell is one string
        lines = [new] if whole else new.splitlines(keepends=True) or [""]
        space = re.search(r"\s*\Z", self.text[: old.start])
        between = "," + (space[0] if space else "")
        ascii_only = raw.isascii()
        return Edit(
            old.start,
            old.stop,
            between.join(json.dumps(line, ensure_ascii=ascii_only) for line in lines),
        )


def _without_magics(source: str) -> str:
    """The code of a cell, with what only IPython understands blanked, character by character."""
    if CELL_MAGIC.match(source):
        return re.sub(r"[^\n]", " ", source)

    def blank(match: re.Match[str]) -> str:
        return match["indent"] + "0".ljust(len(match["code"]))

    return MAGIC.sub(blank, source)
