"""Structural versions: how a cached view of an object graph knows that it is still valid.

Every object of a graph has a slot `_nnx_version`.  Zero means that no traversal has recorded its
structure since it last changed; a positive number, unique in the process, stands for exactly one set
of names and children.  A traversal calls `observe` on each object and records the number; an edit
calls `touch`, which resets it to zero.  Equal numbers therefore mean the same names and children, and
edits of an object that was never observed cost nothing.  Static values are part of the definition
of an object, which is interned: equal versions and the same definition mean an unchanged structure.

The epoch is one number for the process that changes whenever any observed structure does, so that
"nothing changed anywhere" is a single comparison.  An edit changes the object first, then its
version, then the epoch; an observer reads them in the opposite order.  So no observer can take a stale
view for a valid one, and no lock is needed.
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

    def move(self) -> None:
        """Record that some structure has changed (call it after the change)."""
        self.now = next_number()


epoch = _Epoch()
"""`epoch.now` differs from its earlier value when any observed structure has changed since."""


class Versioned(tp.Protocol):
    """Anything with a structural version: objects, States, the boxes of Variables."""

    _nnx_version: int


def observe(node: Versioned) -> int:
    """The version of the present structure of a node, assigned now if it has none."""
    version = node._nnx_version
    if not version:
        version = next_number()
        object.__setattr__(node, "_nnx_version", version)
    return version


def touch(node: Versioned) -> None:
    """Record that the node's structure has changed (call it after the change)."""
    if node._nnx_version:
        object.__setattr__(node, "_nnx_version", 0)
        epoch.move()
