"""Kinds of statements, as tables of templates.

A table has a head for each kind, `name weight flags`, and below it, indented, the templates to choose
from. A template is program text with

- `<<a|b|c>>`: one of these texts;
- `$node`, `$node2`, `$node:word`: an expression of a kind, see `HOLES`; the same hole is the same text;
- `$m`, `$m2`: a new name that starts with this letter;
- ` ; ` between statements, and `\\n` between the lines of one.
"""

from __future__ import annotations

import dataclasses
import random
import re
import typing as tp

CHOICE = re.compile(r"<<((?:(?!<<|>>).)*)>>")
HOLE = re.compile(r"\$([a-z_]+)(\d*)((?::[a-z]+)*)")


class Chance:
    """Draws from a random generator, and new names."""

    def __init__(self, rng: random.Random, counter: list[int] | None = None):
        self.rng = rng
        self.counter = [0] if counter is None else counter
        self.filled: dict[str, tp.Any] = {}  # what stands for the holes of the template at hand

    def chance(self, p: float) -> bool:
        """True with probability p."""
        return self.rng.random() < p

    def one(self, options: tp.Sequence[tp.Any]) -> tp.Any:
        """One of the options."""
        return self.rng.choice(options)

    def some(self, options: tp.Iterable[tp.Any], low: int, high: int) -> list[tp.Any]:
        """Between low and high of the options, without repetition."""
        options = list(options)
        return self.rng.sample(options, min(len(options), self.rng.randint(low, high)))

    def fresh(self, prefix: str) -> str:
        """A new name."""
        self.counter[0] += 1
        return f"{prefix}{self.counter[0]}"


Hole: tp.TypeAlias = tp.Callable[..., "str | None"]
HOLES: dict[str, Hole] = {}
"""What stands for a hole: a text, or None where nothing in scope is of that kind."""


@dataclasses.dataclass
class Kind:
    """A kind of statement: its templates, how often it is chosen, and where it may stand."""

    name: str
    weight: float
    flags: tp.Collection[str]  # "body" of a function; "structural": changes that of an argument
    templates: list[str]


KINDS: list[Kind] = []


def table(text: str) -> None:
    """Register the kinds of a table."""
    for block in re.split(r"\n(?=\S)", text.strip()):
        head, *templates = [line.strip() for line in block.splitlines() if line.strip()]
        name, weight, *flags = head.split()
        KINDS.append(Kind(name, float(weight), flags, templates))


def hole(make: tp.Any) -> tp.Any:
    """Register a function as the hole of its name."""
    HOLES[make.__name__] = make
    return make


def name_of(s: tp.Any, key: str) -> str:
    """The new name that stands for a hole of one letter."""
    return s.filled.setdefault(key, s.fresh(key[0]))


def expand(s: tp.Any, template: str, holes: dict[str, tp.Any] = HOLES) -> list[str] | None:
    """The statements of a template; None where a hole cannot be filled."""
    before, s.filled = s.filled, {}
    while CHOICE.search(template):
        template = CHOICE.sub(lambda found: s.one(found[1].split("|")), template)
    fills: list[str | None] = []

    def fill(found: re.Match[str]) -> str:
        name, number, words = found.groups()
        key = name + number
        if len(name) == 1:
            return name_of(s, key)
        if None in fills:  # the holes that follow may depend on it
            return ""
        if words:  # of a function: each time another text
            fills.append(holes[name](s, number, words.split(":")))
            return fills[-1] or ""
        if key not in s.filled:
            s.filled[key] = holes[name](s)
            fills.append(s.filled[key])
        return s.filled[key] or ""

    text = HOLE.sub(fill, template).replace("\\n", "\n")
    s.filled = before
    return None if None in fills else text.split(" ; ")


def made(s: tp.Any, template: str, holes: dict[str, tp.Any] = HOLES) -> str:
    """The text of a template that is one expression; empty where a hole cannot be filled."""
    return " ; ".join(expand(s, template, holes) or [])
