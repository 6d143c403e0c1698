"""What a Variable contains: its static half (class and metadata), and the box with its value.

A Variable is a value plus a `VariableDef`.  Definitions with equal content are one object, so that
comparing, hashing and caching them is comparing identities; a definition also knows in advance
whether reading or writing needs anything beyond touching the value (hooks, references).

Metadata that may be edited, or are equal without being interchangeable (a list, a settings object, a
hook that is defined again), stay with their Variable, whose definition is then private; see
`_definitions`.
"""

from __future__ import annotations

import typing as tp

from nnxlite._base.interning import ELSEWHERE, Definition, Table
from nnxlite._base.jax import TraceRef, trace_state
from nnxlite._base.statics import alike, facts, own_copy
from nnxlite._base.versions import touch

if tp.TYPE_CHECKING:
    from nnxlite.variables._variable import Variable


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: tp.Any = _Missing()
"""Stands for an argument that was not given, where None is a value."""

HOOKS = ("on_get_value", "on_set_value", "on_create_value", "on_add_axis", "on_remove_axis")
REQUIRED = {"hijax": False, "ref": False, "eager_sharding": True}
"""Metadata every Variable has."""


def as_hooks(hooks: tp.Any) -> tuple[tp.Callable[..., tp.Any], ...]:
    """One callback or several, as a tuple."""
    return tuple(hooks) if isinstance(hooks, (tuple, list)) else (hooks,)


class VariableDef(Definition):
    """Class and metadata of a Variable; what a `GraphDef` keeps of it.

    Equal definitions are the same object, unless they are private.

    Attributes:
        own: names of the entries that stay with the Variable.
        copied: whether one of them contains a builtin container, of which each Variable has its own.
        mutable: whether one of them may be edited in place.
    """

    __slots__ = (
        "copied",
        "create_hooks",
        "get_hooks",
        "is_ref",
        "metadata",
        "mutable",
        "own",
        "plain_read",
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
        self.is_ref = bool(metadata.get("ref", False))
        self.create_hooks = self.hooks("on_create_value")
        self.get_hooks = self.hooks("on_get_value")
        self.set_hooks = self.hooks("on_set_value")
        self.plain_read = not self.get_hooks and not self.is_ref and type_._nnx_reads_plainly

    def hooks(self, name: str) -> tuple[tp.Callable[..., tp.Any], ...]:
        """The callbacks for one event: those given as metadata, else the class's own method."""
        given = as_hooks(self.metadata.get(name, ()))
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

    def for_variable(self) -> VariableDef:
        """This definition with its own copies of the builtin containers, which no Variable has."""
        return self.mapped(own_copy) if self.copied else self

    def mapped(self, change: tp.Callable[[tp.Any], tp.Any]) -> VariableDef:
        """The definition with each entry of its own replaced by an equal one."""
        return self._with({name: change(self.metadata[name]) for name in self.own})

    def keeping(self, before: VariableDef) -> VariableDef:
        """This definition with the entries of an earlier one that are equal to its own."""
        mine, theirs = self.metadata, before.metadata
        both = [name for name in self.own if name in before.own]
        same = [n for n in both if facts(mine[n]).key == facts(theirs[n]).key]
        return self._with({name: theirs[name] for name in same})

    def _with(self, own: dict[str, tp.Any]) -> VariableDef:
        if not own:
            return self
        metadata = {**self.metadata, **own}
        return VariableDef(self.type, metadata, self.key, self.own, self.mutable, self.public)

    def __repr__(self) -> str:
        shown = "".join(f", {k}={v!r}" for k, v in self.metadata.items() if k not in REQUIRED)
        return f"VariableDef({self.type.__name__}{shown})"

    def __reduce__(self) -> tp.Any:
        return define, (self.type, self.metadata)


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


class Box:
    """The content of a Variable: raw value, definition, its trace, and its structural version.

    It is an object of its own so that the engine can refer to it directly: reading and writing a
    slot of this plain class is several times faster than one of a class with `__getattr__`.
    """

    __slots__ = ("__weakref__", "_nnx_version", "definition", "trace", "value")

    value: tp.Any
    definition: VariableDef
    trace: TraceRef
    _nnx_version: int


def boxed(definition: VariableDef, value: tp.Any) -> Box:
    box = _new(Box)
    box.definition = definition
    box.trace = trace_state.value
    box.value = value
    box._nnx_version = 0
    return box


_new = object.__new__


def redefine(box: Box, definition: VariableDef) -> None:
    """Give a box another definition, which is a change of structure."""
    touch(box)  # before, too: what interrupts this must not leave a plan valid
    box.definition = definition
    touch(box)


set_value = Box.__dict__["value"].__set__
set_definition = Box.__dict__["definition"].__set__


def current_definition(box: Box) -> VariableDef:
    """The definition of a Variable, renewed where its metadata were edited in place."""
    definition = box.definition
    if definition.mutable:
        now = definition.current()
        if now is not definition:
            redefine(box, now)
        return now
    return definition
