"""The static half of a Variable: its class and its metadata, interned.

A Variable is a value plus a `VariableDef`.  Definitions with equal content are one object, so that
comparing, hashing and caching them is comparing identities; a definition also knows in advance
whether reading or writing needs anything beyond touching the value (hooks, references).
"""

from __future__ import annotations

import typing as tp

from nnxlite._interning import Table
from nnxlite._statics import FIXED, content_key, is_current, stability

if tp.TYPE_CHECKING:
    from nnxlite.variables._variable import Variable

HOOKS = ("on_get_value", "on_set_value", "on_create_value", "on_add_axis", "on_remove_axis")
REQUIRED = frozenset({"hijax", "ref", "eager_sharding"})
"""Metadata every Variable has."""


class VariableDef:
    """Class and metadata of a Variable; what a `GraphDef` keeps of it.

    Equal definitions are the same object.
    """

    __slots__ = (
        "__weakref__",
        "create_hooks",
        "get_hooks",
        "is_ref",
        "key",
        "metadata",
        "plain_read",
        "plain_write",
        "set_hooks",
        "stability",
        "type",
    )

    def __init__(
        self, type_: type[Variable], metadata: dict[str, tp.Any], key: tp.Any = None
    ) -> None:
        self.type = type_
        self.metadata = metadata
        self.key = key
        self.stability = max(map(stability, metadata.values()), default=FIXED)
        self.is_ref = bool(metadata.get("ref", False))
        self.create_hooks = self.hooks("on_create_value")
        self.get_hooks = self.hooks("on_get_value")
        self.set_hooks = self.hooks("on_set_value")
        self.plain_read = not self.get_hooks and not self.is_ref and type_._nnx_reads_plainly
        self.plain_write = not self.set_hooks and not self.is_ref

    def content(self) -> tuple[tp.Any, ...]:
        """The key of the definition as the metadata are now."""
        return _key(self.type, self.metadata)

    def hooks(self, name: str) -> tuple[tp.Callable[..., tp.Any], ...]:
        """The callbacks for one event: those given as metadata, else the class's own method."""
        given = self.metadata.get(name, ())
        given = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        own = getattr(self.type, name, None)
        return given if given or own is None else (own,)

    def __repr__(self) -> str:
        shown = "".join(f", {k}={v!r}" for k, v in self.metadata.items() if k not in REQUIRED)
        return f"VariableDef({self.type.__name__}{shown})"

    def __reduce__(self) -> tp.Any:
        return define, (self.type, self.metadata)


_interned: Table[VariableDef] = Table("key", is_current)


def define(type_: type[Variable], metadata: dict[str, tp.Any]) -> VariableDef:
    """The one definition for a class and metadata (the dict is adopted; do not change it later)."""
    key = _key(type_, metadata)
    cached = _interned.find(key)
    return cached or _interned.add(key, VariableDef(type_, metadata, key))


def _key(type_: type[Variable], metadata: dict[str, tp.Any]) -> tuple[tp.Any, ...]:
    names = sorted(metadata, key=str)
    return (type_, *names, *[content_key(metadata[name]) for name in names])
