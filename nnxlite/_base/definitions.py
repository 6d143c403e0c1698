"""Definitions: static data that equal objects share, and the values that each keeps for itself.

A definition describes the static side of an object, a Variable or a container.  Equal ones are one
object, interned by their key, so that "same structure" is `is`.

What an interned definition contains turns up in every object that it describes.  So it contains only
values that cannot change and are interchangeable where they are equal (*exact* ones, see `_statics`).
Any other value, such as a list, a settings object or a function that is defined again, stays with its
object, which has a *private* definition with the values; its `public` one is interned and has the keys.
Programs are shared by the public one; objects are rebuilt from the private one.
"""

from __future__ import annotations

import copy as copy_lib
import typing as tp

from nnxlite._base.statics import atoms, with_atoms


class _Elsewhere:
    def __repr__(self) -> str:
        return "..."


ELSEWHERE: tp.Any = _Elsewhere()
"""Stands in a public definition for a value that stays with its object."""


class Definition:
    """Base of what is interned by a key, and may be private.

    Attributes:
        key: what makes two definitions equal.
        public: of a private definition the interned one; None where this one is interned.
        atoms: the objects in the values that stay with the owner, in order.
    """

    __slots__ = ("__weakref__", "atoms", "key", "public")

    def __init__(self, key: tp.Any, public: tp.Any, own: tp.Iterable[tp.Any] = ()) -> None:
        self.key = key
        self.public: tp.Any = public
        self.atoms: tuple[tp.Any, ...] = tuple([atom for value in own for atom in atoms(value)])

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

    def mapped(self, change: tp.Callable[[tp.Any], tp.Any]) -> tp.Self:
        """The definition with each value that stays with the owner replaced by an equal one."""
        raise NotImplementedError  # pragma: no cover - abstract

    def swapped(self, instead: tp.Mapping[int, tp.Any]) -> tp.Self:
        """The definition with other objects in it, by the identity of those that it has."""
        if not any(id(atom) in instead for atom in self.atoms):
            return self
        return self.mapped(lambda value: with_atoms(value, instead))

    def __copy__(self) -> tp.Self:
        return self

    def __deepcopy__(self, memo: dict[int, tp.Any]) -> tp.Self:
        if self.public is None:
            return self
        return self.mapped(lambda value: copy_lib.deepcopy(value, memo))


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
