"""The static half of a Variable: its class and its metadata.

A Variable is a value plus a `VariableDef`.  Definitions with equal content are one object, so that
comparing, hashing and caching them is comparing identities; a definition also knows in advance
whether reading or writing needs anything beyond touching the value (hooks, references).

Metadata that may be edited, or are equal without being interchangeable (a list, a settings object, a
hook that is defined again), stay with their Variable, whose definition is then private; see
`_definitions`.
"""

from __future__ import annotations

import typing as tp

from nnxlite._definitions import ELSEWHERE, Definition
from nnxlite._interning import Table
from nnxlite._statics import alike, facts, own_copy

if tp.TYPE_CHECKING:
    from nnxlite.variables._variable import Variable

HOOKS = ("on_get_value", "on_set_value", "on_create_value", "on_add_axis", "on_remove_axis")
REQUIRED = frozenset({"hijax", "ref", "eager_sharding"})
"""Metadata every Variable has."""


class VariableDef(Definition):
    """Class and metadata of a Variable; what a `GraphDef` keeps of it.

    Equal definitions are the same object, unless they are private.

    Attributes:
        own: names of the entries that stay with the Variable.
        copied: whether one of them contains a builtin container, of which each Variable has its own.
        mutable: whether one of them may be edited in place.
    """

    __slots__ = (
        "_snapshot",
        "copied",
        "create_hooks",
        "get_hooks",
        "is_ref",
        "metadata",
        "mutable",
        "own",
        "plain_read",
        "plain_write",
        "set_hooks",
        "type",
    )

    def __init__(
        self,
        type_: type[Variable],
        metadata: dict[str, tp.Any],
        key: tp.Any,
        own: tuple[str, ...] = (),
        mutable: bool = False,
        public: VariableDef | None = None,
    ) -> None:
        super().__init__(key, public, [metadata[name] for name in own])
        self.type = type_
        self.metadata = metadata
        self.own = own
        self.mutable = mutable
        self.copied = any(own_copy(metadata[name]) is not metadata[name] for name in own)
        self._snapshot: VariableDef | None = None
        self.is_ref = bool(metadata.get("ref", False))
        self.create_hooks = self.hooks("on_create_value")
        self.get_hooks = self.hooks("on_get_value")
        self.set_hooks = self.hooks("on_set_value")
        self.plain_read = not self.get_hooks and not self.is_ref and type_._nnx_reads_plainly
        self.plain_write = not self.set_hooks and not self.is_ref

    def hooks(self, name: str) -> tuple[tp.Callable[..., tp.Any], ...]:
        """The callbacks for one event: those given as metadata, else the class's own method."""
        given = self.metadata.get(name, ())
        given = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        own = getattr(self.type, name, None)
        return given if given or own is None else (own,)

    def current(self) -> VariableDef:
        """This definition, or that of the metadata as they are now where these were edited in place."""
        if not self.mutable:
            return self
        now = define(self.type, self.metadata)
        return self if now.matches(self) else now

    def is_like(self, other: tp.Any) -> bool:
        """Whether another definition has the same metadata, where objects are the same ones."""
        if self.matches(other):
            return True
        if type(other) is not VariableDef or self.type is not other.type:
            return False
        mine, theirs = self.metadata, other.metadata
        return mine.keys() == theirs.keys() and all(alike(v, theirs[k]) for k, v in mine.items())

    def snapshot(self) -> VariableDef:
        """This definition with copies of the builtin containers in it, which no Variable has."""
        if not self.copied:
            return self
        if self._snapshot is None:
            self._snapshot = self.for_variable()
        return self._snapshot

    def for_variable(self) -> VariableDef:
        """The definition of a new Variable like this one, with its own builtin containers."""
        return self.mapped(own_copy) if self.copied else self

    def mapped(self, change: tp.Callable[[tp.Any], tp.Any]) -> VariableDef:
        """The definition with each entry of its own replaced by an equal one."""
        if not self.own:
            return self
        metadata = {**self.metadata, **{name: change(self.metadata[name]) for name in self.own}}
        return VariableDef(self.type, metadata, self.key, self.own, self.mutable, self.public)

    def keeping(self, before: VariableDef) -> VariableDef:
        """This definition with the entries of an earlier one that are equal to its own."""
        same = [n for n in self.own if n in before.own and _equal(self, before, n)]
        if not same:
            return self
        metadata = {**self.metadata, **{name: before.metadata[name] for name in same}}
        return VariableDef(self.type, metadata, self.key, self.own, self.mutable, self.public)

    def __repr__(self) -> str:
        shown = "".join(f", {k}={v!r}" for k, v in self.metadata.items() if k not in REQUIRED)
        return f"VariableDef({self.type.__name__}{shown})"

    def __reduce__(self) -> tp.Any:
        return define, (self.type, self.metadata)


def _equal(one: VariableDef, other: VariableDef, name: str) -> bool:
    return bool(facts(one.metadata[name]).key == facts(other.metadata[name]).key)


_interned: Table[VariableDef] = Table("key")


def define(type_: type[Variable], metadata: dict[str, tp.Any]) -> VariableDef:
    """The definition for a class and metadata (the dict is adopted; do not change it later)."""
    names = sorted(metadata, key=str)
    every = [facts(metadata[name]) for name in names]
    key = (type_, *names, *[part.key for part in every])
    own = tuple([name for name, part in zip(names, every) if not part.exact])
    shared = _interned.find(key)
    if shared is None:
        kept = {**metadata, **dict.fromkeys(own, ELSEWHERE)} if own else metadata
        shared = _interned.add(key, VariableDef(type_, kept, key))
    if not own:
        return shared
    mutable = any(part.mutable for part in every)
    return VariableDef(type_, metadata, key, own, mutable, shared)
