"""Structural versions: how a cached view of an object graph knows that it is still true.

Every object that takes part in a graph has a slot `_nnx_version`.  Zero means that nobody has recorded
its structure since it last changed; a positive number, unique in the process, stands for exactly
one structure.  A traversal calls `observe` on what it visits and keeps the number; an edit calls
`touch`, which forgets the number.  Equal numbers therefore mean an unchanged structure, and an
object that nobody observed pays nothing for its edits.

The epoch is one process-wide number that moves whenever any observed structure changes, so that
"nothing anywhere changed" is a single comparison.  An edit changes the object first, then its
version, then the epoch; an observer reads them in the opposite order.  That makes a stale view
impossible to mistake for a fresh one, with no lock.
"""

from __future__ import annotations

import itertools
import typing as tp

_numbers = itertools.count(1)
next_number = _numbers.__next__  # atomic


class _Epoch:
    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


epoch = _Epoch()
"""`epoch.now` differs from an earlier reading when any observed structure changed since."""


class Versioned(tp.Protocol):
    """What takes part in a graph: anything with a structural version."""

    _nnx_version: int


def observe(node: Versioned) -> int:
    """The version of the node's present structure, assigned now if it has none."""
    version = node._nnx_version
    if not version:
        version = next_number()
        object.__setattr__(node, "_nnx_version", version)
    return version


def touch(node: Versioned) -> None:
    """Record that the node's structure has changed (call it after the change)."""
    if node._nnx_version:
        object.__setattr__(node, "_nnx_version", 0)
        epoch.now = next_number()
