"""Kinds of statements, as tables of templates.

A table has a head for each kind, `name weight flags`, and below it, indented, the templates to choose
from. A template is program text with

- `<<a|b|c>>`: one of these texts;
- `$node`, `$node2`, `$node:word`: an expression of a kind, see `HOLES`; the same hole is the same text;
- `$m`, `$m2`: a new name that starts with this letter;
- ` ; ` between statements, and `\\n` between the lines of one.
"""

import dataclasses
import re

CHOICE = re.compile(r"<<((?:(?!<<|>>).)*)>>")
HOLE = re.compile(r"\$([a-z_]+)(\d*)((?::[a-z]+)*)")


class Chance:
    """Draws from a random generator, and new names."""

    def __init__(self, rng, counter=None):
        self.rng = rng
        self.counter = [0] if counter is None else counter
        self.filled = {}  # what stands for the holes of the template at hand

    def chance(self, p):
        return self.rng.random() < p

    def one(self, options):
        """One of the options; None where there is none."""
        return self.rng.choice(options) if options else None

    def some(self, options, low, high):
        """Between low and high of the options, without repetition."""
        options = list(options)
        return self.rng.sample(options, min(len(options), self.rng.randint(low, high)))

    def fresh(self, prefix):
        self.counter[0] += 1
        return f"{prefix}{self.counter[0]}"


HOLES = {}
"""What stands for a hole: a text, or None where nothing in scope is of that kind."""


@dataclasses.dataclass
class Kind:
    """A kind of statement: its templates, how often it is chosen, and where it may stand."""

    name: str
    weight: float
    flags: list[str]  # "body" of a function; "structural": changes that of an argument
    templates: list[str]


KINDS: list[Kind] = []


def table(text):
    for block in re.split(r"\n(?=\S)", text.strip()):
        head, *templates = [line.strip() for line in block.splitlines() if line.strip()]
        name, weight, *flags = head.split()
        KINDS.append(Kind(name, float(weight), flags, templates))


def hole(make):
    HOLES[make.__name__] = make
    return make


def name_of(s, key):
    """The new name that stands for a hole of one letter."""
    return s.filled.setdefault(key, s.fresh(key[0]))


def expand(s, template, holes=HOLES):
    """The statements of a template; None where a hole cannot be filled."""
    before, s.filled = s.filled, {}
    while CHOICE.search(template):
        template = CHOICE.sub(lambda found: s.one(found[1].split("|")), template)
    fills: list[str | None] = []

    def fill(found):
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


def made(s, template, holes=HOLES):
    """The text of a template that is one expression; empty where a hole cannot be filled."""
    return " ; ".join(expand(s, template, holes) or [])
