"""How docstrings become Markdown: a Griffe extension that `.mkdocs.yml` names.

Docstrings here have their examples as `>>>` lines without a heading, and name other functions in
backticks. Markdown takes `>>>` for a quotation, so these lines are fenced. A name that the pages of
the API list, such as `nnx.split` or `GraphDef`, becomes a link.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import typing as tp
from pathlib import Path

import griffe

EXAMPLE = re.compile(
    r"""(?:^(?P<indent>[ ]*)>>>\ .*\n            # the first line of an example
        (?:(?P=indent).*\S.*\n)*                 # more of it, up to an empty line
        (?:[ ]*\n(?=(?P=indent)>>>\ ))?)+        # another example right below
    """,
    re.MULTILINE | re.VERBOSE,
)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"(?<![`\[])`(nnx\.[\w.]+|[A-Z]\w+)`(?![`\]])")


@functools.cache
def listed() -> frozenset[str]:
    """The names that have an entry to link to."""
    # By its file: `build` on the path of imports may be a package of that name.
    spec = importlib.util.spec_from_file_location(
        "docs_build", Path(__file__).with_name("build.py")
    )
    assert spec and spec.loader
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return frozenset(entry.name for entry in build.entries() if entry.cells is None)


def fenced(text: str) -> str:
    """A docstring with its examples as blocks of code."""

    def fence(match: re.Match[str]) -> str:
        indent = match["indent"]
        return f"{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"

    return EXAMPLE.sub(fence, text + "\n").rstrip()


def linked(text: str, itself: str) -> str:
    """A docstring whose names of other public objects are links, outside of its blocks of code."""

    def link(match: re.Match[str]) -> str:
        name = match[1].removeprefix("nnx.")
        if name not in listed() or name.rpartition(".")[2] == itself:
            return match[0]
        return f"[`{match[1]}`][nnxlite.{name}]"

    parts: list[str] = []
    end = 0
    for code in FENCE.finditer(text):
        parts += [NAME.sub(link, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, NAME.sub(link, text[end:])])


class Docstrings(griffe.Extension):
    """Rewrites each docstring as soon as its object has been read."""

    def on_object(self, *, obj: griffe.Object, **_: tp.Any) -> None:
        """Fence the examples of an object and link its names."""
        if obj.docstring:
            obj.docstring.value = linked(fenced(obj.docstring.value), obj.name)

    def on_class(self, *, cls: griffe.Class, **_: tp.Any) -> None:
        """Name the base classes that a reader can look up; the others are parts of the engine."""
        cls.bases = [base for base in cls.bases if str(base).partition("[")[0] in shown_bases()]


@functools.cache
def shown_bases() -> frozenset[str]:
    """The classes that an entry names as bases."""
    return frozenset(name for name in listed() if name[0].isupper()) | {"Exception", "Protocol"}
