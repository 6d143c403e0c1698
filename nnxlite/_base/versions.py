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

`Writes` are those that no interrupt can separate: all of them are made, or none.  Python handles a
signal, such as that of Ctrl-C, and raises what another thread asks it to raise, between two instructions
of Python code.  While a builtin function runs it does neither.  So the writes of a call are collected
first, each as a builtin function and its arguments, and one builtin loop makes them all.
"""

from __future__ import annotations

import itertools
import operator
import typing as tp

from nnxlite._base.interning import LOCK

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


# Writes -------------------------------------------------------------------------------------


def run_together(calls: tp.Iterable[tuple[tp.Any, ...]]) -> None:
    """Call builtin functions, each with its arguments, in one step; `calls` must not be a generator."""
    # A list has the results, so what the calls remove is dropped after them all.
    list(itertools.starmap(operator.call, calls))


class Writes:
    """Writes to be made together.

    >>> from nnxlite._base.versions import Writes
    >>> some, writes = {}, Writes()
    >>> writes.add(some.__setitem__, "a", 1)
    >>> writes.add(some.__setitem__, "b", 2)
    >>> writes.make()
    >>> some
    {'a': 1, 'b': 2}
    """

    __slots__ = ("_calls", "_changed", "_foreign")

    def __init__(self) -> None:
        self._calls: list[tuple[tp.Any, ...]] = []
        self._foreign: list[tuple[tp.Any, ...]] = []
        self._changed: list[Versioned] = []

    def add(self, function: tp.Any, *args: tp.Any) -> None:
        """Note a write by a builtin function."""
        self._calls.append((function, *args))

    def add_all(self, calls: tp.Iterable[tuple[tp.Any, ...]]) -> None:
        """Note several of them, each a function and its arguments."""
        self._calls += calls

    def add_foreign(self, function: tp.Any, *args: tp.Any) -> None:
        """Note a write by code that can be interrupted, and may fail: it is made before the others."""
        self._foreign.append((function, *args))

    def touch(self, node: Versioned) -> None:
        """Note that the writes change the structure of an object."""
        self._changed.append(node)

    def make(self) -> None:
        """Make all writes."""
        for function, *args in self._foreign:
            function(*args)
        if not self._changed:
            run_together(self._calls)
            return
        # Not under the lock: Python 3.13 does not release it where a comprehension is interrupted.
        observed = [node for node in self._changed if node._nnx_version]
        resets = [(object.__setattr__, node, "_nnx_version", 0) for node in observed]
        move = [(setattr, epoch, "now", next_number())] if observed else []
        with LOCK:
            # The epoch last: an observer reads it first.
            run_together([*self._calls, *resets, *move])
            list(map(touch, self._changed))  # another thread may have looked in between
