"""Edits and notes: what rules answer with, and what is left of a program once the edits are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, order=True)
class Edit:
    """The characters from `start` to `stop` become `text`."""

    start: int
    stop: int
    text: str


@dataclasses.dataclass(frozen=True, order=True)
class Note:
    """Something that needs a decision.

    Attributes:
        line: counted from 1, in the program before it is rewritten.
        column: counted from 1.
        what: the code in question.
        hint: what to do about it.
        page: the page with more about it, relative to the folder `docs`.
        cell: the number of the code cell, from 1, in a notebook; otherwise 0.
    """

    line: int
    column: int
    what: str
    hint: str
    page: str
    cell: int = 0


@dataclasses.dataclass(frozen=True)
class Migration:
    """A rewritten program, and what needs a decision in it."""

    text: str
    notes: tuple[Note, ...] = ()


def apply(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made, which must not overlap."""
    parts, end = [], 0
    for edit in sorted(set(edits)):
        assert edit.start >= end, f"edits overlap at {edit.start}"
        parts += [text[end : edit.start], edit.text]
        end = edit.stop
    return "".join([*parts, text[end:]])
