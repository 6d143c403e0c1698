"""What MkDocs calls while it builds the site.

Files outside `docs/` that pages link to become pages. Entries of the API have the name that programs
write, and links to the guides that use it most.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(
    r"\]\(((?:\.\./)+)(examples/\w+|tests/[\w/]+|\.ci/\w+|CHANGELOG|LICENSE)(\.\w+)?\)"
)
"""Links of a page to a file of the repository that is not in `docs/`."""
ENTRY = re.compile(r"^(::: nnxlite\.([\w.]+))$(?:\n\n> .*)?", re.MULTILINE)
"""The line of a page that stands for the docstring of a name, and the summary below it."""


USED = re.compile(r"\bnnx\.([\w.]*\w)")
REFERENCE = ("api", "benchmarks", "cheat-sheet", "differences", "ecosystem", "errors", "index")
"""Pages that name everything, and explain nothing in particular."""


@functools.cache
def guides() -> dict[str, tuple[str, collections.Counter[str]]]:
    """The guides by path: the title, and how often the page has each name of the library."""
    out: dict[str, tuple[str, collections.Counter[str]]] = {}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").as_posix()
        if not set(REFERENCE) & {*path.parts, path.stem}:
            text = path.read_text(encoding="utf-8")
            title = text.partition("\n")[0].removeprefix("# ")
            out[name] = title, collections.Counter(USED.findall(text))
    return out


def see_also(name: str, limit: int = 3) -> list[tuple[str, str]]:
    """The guides that use a name most, with their titles."""
    used = [(words[name], path, title) for path, (title, words) in guides().items()]
    used.sort(key=lambda entry: (-entry[0], entry[1]))
    return [(path, title) for times, path, title in used[:limit] if times > 1]


def source_page(path: Path) -> str:
    """A page with the text of a file; a script is introduced by the first line of its docstring."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".md":
        return text.replace("](docs/", "](../")
    intro = (
        (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        if path.suffix == ".py"
        else ""
    )
    return f"# `{name}`\n\n{intro}\n\n````{path.suffix[1:] or 'text'}\n{text}\n````\n"


def page_name(path: str) -> str:
    """Where the site has a file: `examples/digits.py` is `source/examples/digits.md`."""
    return f"source/{path.lstrip('.')}.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside that some page links to."""
    linked: set[str] = set()
    for file in files.documentation_pages():
        if file.src_uri.endswith(".md"):
            linked |= {
                match[2] + (match[3] or "") for match in OUTSIDE.finditer(file.content_string)
            }
    for name in sorted(linked):
        if (ROOT / name).is_file():  # what is not there stays a broken link, which fails the build
            page = File.generated(config, page_name(name), content=source_page(ROOT / name))
            files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside lead to those pages, and head the entries of the API."""
    here = "../" * page.file.src_uri.count("/")

    def inside(match: re.Match[str]) -> str:
        name = match[2] + (match[3] or "")
        known = files.get_file_from_path(page_name(name))
        return f"]({here}{page_name(name)})" if known else match[0]

    def headed(match: re.Match[str]) -> str:
        options = f"      heading: nnx.{match[2]}\n      toc_label: {match[2]}\n"
        links = ", ".join(f"[{title}](../{path})" for path, title in see_also(match[2]))
        return f"{match[1]}\n    options:\n{options}" + (f"\nSee also: {links}\n" if links else "")

    return OUTSIDE.sub(inside, ENTRY.sub(headed, markdown))
