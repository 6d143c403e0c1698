"""Patterns of dotted names: `blocks.*.kernel`, `encoder.**`, `layers.{i}.attention.weight`.

`*` stands for any text within one segment, `**` for any number of segments (also none), and `{name}`
for one whole segment, the same wherever the name is used again.  What a pattern matched can be filled
into another one: the `*`s and the `**`s in their order, names by name.  Of several ways to match, the
one counts in which the first wildcard stands for as much as possible, then the second, and so on.

Names come from files.  A regular expression of several wildcards that tries all ways would never end for
some of them, so the name is matched from its end, each wildcard taking as little as possible.  That
is the same way, and what stands between two wildcards need not be moved once it was found: the
expression has atomic groups, and takes time in proportion to the name.
"""

from __future__ import annotations

import operator
import re
import typing as tp

Bindings: tp.TypeAlias = dict[str, str]
"""What the wildcards of a pattern matched."""

# `**` takes the dot before it along: a `**` that matches nothing leaves none.
_WILDCARD = re.compile(r"(\.\*\*(?![^.])|\*|\{[A-Za-z_][A-Za-z_0-9]*\})")


class Pattern:
    """A pattern of dotted names.

    Attributes:
        text: as it was written.
        wildcards: the names of its wildcards; of those without a name, `*1`, `*2`, `**1`, ...

    >>> from nnxlite.checkpoint.patterns import Pattern
    >>> found = Pattern("h.{i}.mlp.**").match("h.3.mlp.c_fc.weight")
    >>> found
    {'i': '3', '**1': '.c_fc.weight'}
    >>> Pattern("blocks.{i}.**").fill(found)
    'blocks.3.c_fc.weight'
    >>> Pattern("*.kernel").match("blocks.0.kernel") is None
    True
    """

    __slots__ = ("_groups", "_literals", "_regex", "text", "wildcards")

    def __init__(self, text: str) -> None:
        self.text = text
        parts = _WILDCARD.split(f".{text}")
        self._literals = parts[::2]
        self._groups: list[str] = []  # the wildcards in their order, with repetitions
        for wildcard in (part.strip(".{}") for part in parts[1::2]):
            number = 1 + sum(group.rstrip("0123456789") == wildcard for group in self._groups)
            self._groups.append(f"{wildcard}{number}" if wildcard[0] == "*" else wildcard)
        self.wildcards = frozenset(self._groups)
        last, *before = [re.escape(literal[::-1]) for literal in reversed(self._literals)]
        blocks = [last]  # of a name that is read from its end; each `**` begins one
        for group, literal in zip(reversed(self._groups), before):
            if group.startswith("**"):
                blocks.append(r"((?:[^.]+\.)*?)" + literal)
            else:
                blocks[-1] += f"(?>([^.]{'*' if group[0] == '*' else '+'}?){literal})"
        inner = [f"(?>{block})" for block in blocks[1:-1]]
        self._regex = re.compile("".join([blocks[0], *inner, *blocks[1:][-1:]]), re.DOTALL)

    def match(self, name: str) -> Bindings | None:
        """What the wildcards stand for in a name that matches; None for a name that does not."""
        found = self._regex.fullmatch(f".{name}"[::-1])
        if found is None:
            return None
        texts = [text[::-1] for text in reversed(found.groups())]
        bindings = dict(zip(self._groups, texts))
        same = all(bindings[group] == text for group, text in zip(self._groups, texts))
        return bindings if same else None

    def fill(self, bindings: Bindings) -> str:
        """The name that results where the wildcards stand for these texts; KeyError without one."""
        texts = [*(bindings[group] for group in self._groups), ""]
        filled = "".join(map(operator.add, self._literals, texts))
        return filled.removeprefix(".")

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"
