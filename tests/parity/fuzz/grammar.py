"""Kinds of statements, as tables of templates or as functions that write one.

A table has a head for each kind, `name weight flags`, and below it, indented, the templates to choose
from. A template is program text with

- `<<a|b|c>>`: one of these texts;
- `$node`, `$node2`: an expression of a kind, see `HOLES`; the same hole is the same text again;
- `$m`, `$m2`: a new name that starts with this letter;
- ` ; ` between statements, and `\\n` between the lines of one.
"""

from __future__ import annotations

import dataclasses
import re
import typing as tp

from tests.parity.fuzz.scope import Scope

Maker = tp.Callable[[Scope], "list[str] | str | None"]
CHOICE = re.compile(r"<<((?:(?!<<|>>).)*)>>")
HOLE = re.compile(r"\$([a-z_]+)(\d*)")


@dataclasses.dataclass
class Kind:
    """A kind of statement: how it is made, how often, and where it may stand."""

    name: str
    make: Maker
    weight: float
    body: bool  # may stand in the body of a function
    structural: bool  # changes the structure of an argument


KINDS: list[Kind] = []
TEMPLATES: list[tuple[str, str]] = []
"""Every template, after the name of its kind."""
HOLES: dict[str, tp.Callable[[Scope], str | None]] = {}
"""What stands for a hole: a text, or None where nothing in scope is of that kind."""


def statement(weight: float = 1.0, body: bool = False, structural: bool = False) -> tp.Any:
    """Register a function as a kind of statement."""

    def add(make: Maker) -> Maker:
        KINDS.append(Kind(make.__name__, make, weight, body, structural))
        return make

    return add


def hole(make: tp.Callable[[Scope], str | None]) -> tp.Any:
    """Register a function as a hole of its name."""
    HOLES[make.__name__] = make
    return make


def table(text: str) -> None:
    """Register the kinds of a table."""
    for block in re.split(r"\n(?=\S)", text.strip()):
        head, *templates = [line.strip() for line in block.splitlines() if line.strip()]
        name, weight, *flags = head.split()
        make = lambda s, templates=templates: expand(s, s.one(templates))
        KINDS.append(Kind(name, make, float(weight), "body" in flags, "structural" in flags))
        TEMPLATES.extend((name, template) for template in templates)


def expand(s: tp.Any, template: str, holes: tp.Any = HOLES) -> list[str] | None:
    """The statements of a template; None where a hole cannot be filled."""
    while CHOICE.search(template):
        template = CHOICE.sub(lambda found: s.one(found[1].split("|")), template)
    filled: dict[str, str | None] = {}

    def fill(found: re.Match[str]) -> str:
        if found[0] not in filled:
            name = found[1]
            filled[found[0]] = s.fresh(name) if len(name) == 1 else holes[name](s)
        return filled[found[0]] or ""

    text = HOLE.sub(fill, template).replace("\\n", "\n")
    return None if None in filled.values() else text.split(" ; ")
