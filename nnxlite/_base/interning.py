"""How "the same" and "nothing has changed" are one comparison: interning, definitions, versions, writes.

Interning: one object for each content, so that comparing contents is comparing identities. A `Table`
returns the object that was made first for a key. It keeps nothing alive, neither the object nor the
key: the key is an attribute of the object, and the table refers to the object weakly, by the hash of
its key. So a key may lead back to the object, as the key of a static bound method does through the
owner of the method: the garbage collector sees that cycle and frees it. A `WeakValueDictionary` refers
to its keys strongly, and would never free it.

Threads that look up equal content at the same time get the same object.  So does a signal handler or a
finalizer, which Python may run in the middle of a lookup, in the thread that has the lock.

Definitions: static data that equal objects share, and the values that each keeps for itself.

A definition describes the static side of an object, a Variable or a container.  Equal ones are one
object, interned by their key, so that "same structure" is `is`.

What an interned definition contains turns up in every object that it describes.  So it contains only
values that cannot change and are interchangeable where they are equal (*exact* ones, see `statics`).
Any other value, such as a list, a settings object or a function that is defined again, stays with its
object, which has a *private* definition with the values; its `public` one is interned and has the keys.
Programs are shared by the public one; objects are rebuilt from the private one.

Versions: how a cached view of an object graph knows that it is still valid.

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

import collections
import contextlib
import copy as copy_lib
import itertools
import operator
import os
import threading
import typing as tp
import weakref

from nnxlite._base.statics import Facts, atoms, facts, with_atoms

K = tp.TypeVar("K")
T = tp.TypeVar("T")

LOCK = threading.RLock()
"""The one lock of the process: held for a moment where threads write what they share.

It is reentrant because signal handlers and finalizers also change objects.  A fork waits for it, so
that the child does not inherit it from a thread that it does not have.
"""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release
    )


class Bounded(dict[K, T]):
    """A cache of at most `most` entries: the oldest makes room for a new one.

    >>> from nnxlite._base.interning import Bounded
    >>> squares = Bounded(2)
    >>> for n in (1, 2, 3):
    ...     squares[n] = n * n
    >>> squares
    {2: 4, 3: 9}
    """

    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        self.most = most

    def __setitem__(self, key: K, value: T) -> None:
        if len(self) >= self.most and key not in self:
            excess = len(self) + 1 - self.most
            for oldest in tuple(self)[:excess]:  # a copy: other threads write, too
                self.pop(oldest, None)
        super().__setitem__(key, value)

    def get_or_make(self, key: K, make: tp.Callable[[], T]) -> T:
        """The value of a key, which is made where there is none; two threads may both make one."""
        value = self.get(key)
        if value is None:
            new = make()
            value = self.get(key)
            if value is None:
                value = self[key] = new
        return value


class _Entry(weakref.ref):
    """A weak reference with the hash under which it is filed."""

    __slots__ = ("hash",)

    hash: int


class Table(tp.Generic[T]):
    """The objects of one kind, by their key.

    Args:
        key: name of the attribute that is the key of an object.

    >>> from nnxlite._base.interning import Table
    >>> class Colour:
    ...     def __init__(self, name):
    ...         self.name = name
    >>> colours = Table("name")
    >>> red = colours.add("red", Colour("red"))
    >>> colours.find("red") is red, colours.add("red", Colour("red")) is red
    (True, True)
    >>> del red
    >>> colours.find("red") is None
    True
    """

    __slots__ = ("_dead", "_entries", "_key_of")

    def __init__(self, key: str) -> None:
        self._key_of: tp.Callable[[T], tp.Any] = operator.attrgetter(key)
        self._entries: dict[int, list[_Entry]] = {}
        self._dead: collections.deque[_Entry] = collections.deque()

    def find(self, key: tp.Any) -> T | None:
        """The object with this key, or None; raises TypeError for an unhashable key."""
        for entry in self._entries.get(hash(key), ()):
            known = entry()
            if known is not None and self._key_of(known) == key:
                return known
        return None

    def add(self, key: tp.Any, new: T) -> T:
        """The object with this key: `new`, unless another was there first."""
        with LOCK:
            with contextlib.suppress(IndexError):  # a finalizer that interns has forgotten it
                while self._dead:  # the garbage collector fills it: it must not wait for a lock
                    self._forget(self._dead.popleft())
            entry = _Entry(new, self._dead.append)
            entry.hash = hash(key)
            known = self.find(key)
            if known is None:
                self._file(entry)
                return new
            del entry  # before `new` is, which it would report
            return known

    def _file(self, entry: _Entry) -> None:
        self._entries.setdefault(entry.hash, []).append(entry)

    def _forget(self, entry: _Entry) -> None:
        number = getattr(entry, "hash", -1)  # never a hash: an interrupt came before it was set
        entries = self._entries.get(number, [])
        if entry in entries:  # else an interrupt came before it was filed
            entries.remove(entry)
        if not entries:
            for other in self._entries.pop(number, ()):  # filed just now, by a finalizer
                self._file(other)

    def __len__(self) -> int:
        return sum(map(len, self._entries.values())) - len(self._dead)


# Definitions --------------------------------------------------------------------------------


class _Elsewhere:
    def __repr__(self) -> str:
        return "..."


ELSEWHERE: tp.Any = _Elsewhere()
"""Stands in a public definition for a value that stays with its object."""


class Definition:
    """The static side of a node: interned by its key, or private. Each subclass has a table of its own.

    Attributes:
        head: the part that has no values: a class, names.
        values: the static values.
        facts: what is known of each value.
        key: what makes two definitions equal.
        public: of a private definition the interned one; None where this one is interned.
        own: positions of the values that stay with the owner.
        mutable: positions of those that can be edited in place.
        atoms: the objects in the values that stay with the owner, in order.
    """

    __slots__ = (
        *("__weakref__", "atoms", "facts", "head", "key", "mutable", "own", "public", "values"),
    )

    _table: tp.ClassVar[Table[tp.Any]]

    def __init_subclass__(cls) -> None:
        cls._table = Table("key")

    def __init__(
        self,
        head: tuple[tp.Any, ...],
        values: tuple[tp.Any, ...] = (),
        known: tuple[Facts, ...] = (),
        public: tp.Any = None,
    ) -> None:
        self.head, self.values, self.facts, self.public = head, values, known, public
        self.own: tuple[int, ...] = ()
        self.mutable: tuple[int, ...] = ()
        self.atoms: tuple[tp.Any, ...] = ()
        if public is None:
            self.key = self._key(head, known)
            return
        self.key = public.key
        self.own = tuple([i for i, part in enumerate(known) if not part.exact])
        self.mutable = tuple([i for i in self.own if known[i].mutable])
        self.atoms = tuple([atom for i in self.own for atom in atoms(values[i])])

    @staticmethod
    def _key(head: tuple[tp.Any, ...], known: tuple[Facts, ...]) -> tp.Any:
        return (*head, *[part.key for part in known])

    @classmethod
    def of(
        cls,
        head: tuple[tp.Any, ...],
        values: tuple[tp.Any, ...],
        known: tuple[Facts, ...] | None = None,
    ) -> tp.Self:
        """The definition with this content, which nobody may edit later."""
        known = tuple(map(facts, values)) if known is None else known
        key, table = cls._key(head, known), cls._table
        exact = all(part.exact for part in known)
        shared = table.find(key)
        if shared is None:
            public = values
            if not exact:
                public = tuple([v if part.exact else ELSEWHERE for v, part in zip(values, known)])
            shared = table.add(key, cls(head, public, known))
        return shared if exact else cls(head, values, known, shared)

    @property
    def shared(self) -> tp.Any:
        """What it shares with equal ones: the interned definition."""
        return self if self.public is None else self.public

    def matches(self, other: tp.Any) -> bool:
        """Whether another definition has the same content: an equal key, and the same objects."""
        if self is other:
            return True
        if self.public is None or self.public is not getattr(other, "public", None):
            return False
        return all(a is b for a, b in zip(self.atoms, other.atoms))

    def with_values(self, values: tp.Sequence[tp.Any]) -> tp.Self:
        """The definition with equal values that are other objects; an interned one stays as it is."""
        if self.public is None or all(map(operator.is_, values, self.values)):
            return self
        return type(self)(self._head_of(values), tuple(values), self.facts, self.public)

    def _head_of(self, values: tp.Sequence[tp.Any]) -> tuple[tp.Any, ...]:
        """The head of a definition with these values."""
        return self.head

    def mapped(self, change: tp.Callable[[tp.Any], tp.Any]) -> tp.Self:
        """The definition with each value that stays with the owner replaced by an equal one."""
        return self.with_values(
            [change(v) if i in self.own else v for i, v in enumerate(self.values)]
        )

    def swapped(self, instead: tp.Mapping[int, tp.Any]) -> tp.Self:
        """The definition with other objects in it, by the identity of those that it has."""
        if not any(id(atom) in instead for atom in self.atoms):
            return self
        return self.mapped(lambda value: with_atoms(value, instead))

    def __copy__(self) -> tp.Self:
        return self

    def __deepcopy__(self, memo: dict[int, tp.Any]) -> tp.Self:
        return self.mapped(lambda value: copy_lib.deepcopy(value, memo))

    def __reduce__(self) -> tp.Any:
        return type(self).of, (self.head, self.values)


class ByShared:
    """A private definition as static data for JAX: equal where what it shares is the same."""

    __slots__ = ("item",)

    def __init__(self, item: Definition) -> None:
        self.item = item

    def __eq__(self, other: tp.Any) -> bool:
        return type(other) is ByShared and self.item.shared is other.item.shared

    def __hash__(self) -> int:
        return hash(self.item.shared)

    def __repr__(self) -> str:
        return repr(self.item)


# Versions --------------------------------------------------------------------------------------


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


def observe(node: tp.Any) -> int:
    """The version of the present structure of an object, State or box, assigned now if it has none."""
    version = node._nnx_version
    if not version:
        version = next_number()
        object.__setattr__(node, "_nnx_version", version)
    return version


def touch(node: tp.Any) -> None:
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

    >>> from nnxlite._base.interning import Writes
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
        self._changed: list[tp.Any] = []

    def add(self, function: tp.Any, *args: tp.Any) -> None:
        """Note a write by a builtin function."""
        self._calls.append((function, *args))

    def add_all(self, calls: tp.Iterable[tuple[tp.Any, ...]]) -> None:
        """Note several of them, each a function and its arguments."""
        self._calls += calls

    def add_foreign(self, function: tp.Any, *args: tp.Any) -> None:
        """Note a write by code that can be interrupted, and may fail: it is made before the others."""
        self._foreign.append((function, *args))

    def touch(self, node: tp.Any) -> None:
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
