"""Descriptions that come from outside: what is read of JSON, and what of it is shown.

A file may be damaged, or written to deceive.  Of two entries of one name, `json` would take the last,
another reader perhaps the first; a file of brackets ends in a RecursionError, which is not a ValueError.
"""

from __future__ import annotations

import collections
import json
import os
import typing as tp

LARGEST = 1 << 29
"""Bytes of a description; that of a million arrays has a fifth of it."""


def is_file(path: tp.Any) -> bool:
    """Whether there is a file at a path, and not a pipe, which blocks, or a device without an end."""
    text = os.fspath(path)
    return path.is_file() if "://" in text else os.path.isfile(text)


def read_json(path: tp.Any) -> tp.Any:
    """The content of a JSON file; ValueError for anything else."""
    if not is_file(path):
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes")
    return parse_json(text)


def parse_json(text: bytes) -> tp.Any:
    """The content of a JSON file in UTF-8; ValueError for anything else.

    >>> from nnxlite.checkpoint.untrusted import parse_json
    >>> parse_json(b'{"a": [1]}')
    {'a': [1]}
    >>> parse_json(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: 'a' appears twice
    """
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_without_repetition)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_repetition(pairs: list[tuple[str, tp.Any]]) -> dict[str, tp.Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name[:80]!r} appears twice")
    return found


def printable(text: str) -> str:
    r"""A text for a terminal, where control characters could move the cursor or hide what follows.

    >>> from nnxlite.checkpoint.untrusted import printable
    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """`printable`, for a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def strings(table: tp.Any) -> dict[str, str]:
    """A dictionary of texts; ValueError for anything else."""
    if not isinstance(table, dict) or not all(isinstance(text, str) for text in table.values()):
        raise ValueError(f"{repr(table)[:80]} is not a table of texts")
    return table


def shape_of(sizes: tp.Any) -> tuple[int, ...]:
    """A list of sizes as the shape of an array; ValueError for anything that NumPy has no array of."""
    if (
        not isinstance(sizes, list)
        or len(sizes) > 64
        or not all(type(size) is int and 0 <= size < 2**63 for size in sizes)
    ):
        raise ValueError(f"{repr(sizes)[:80]} is not a shape")
    return tuple(sizes)
