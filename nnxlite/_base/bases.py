"""Classes of the library among other bases of a user's class: whose method counts."""

from __future__ import annotations

import typing as tp


def is_ours(method: tp.Any) -> bool:
    """Whether a method or class is one of this library."""
    return (getattr(method, "__module__", None) or "").partition(".")[0] == "nnxlite"


def give_way(cls: type, ours: type, names: tp.Iterable[str]) -> None:
    """Give a class the methods of these names that bases behind `ours` have, if it has ours as yet.

    For methods that the reference does not have: there, those of a base behind it count.
    """
    behind = cls.__mro__[cls.__mro__.index(ours) + 1 : -1]
    for name in names:
        if getattr(cls, name) is getattr(ours, name):
            found = (b.__dict__[name] for b in behind if name in b.__dict__ and not is_ours(b))
            if (method := next(found, None)) is not None:
                setattr(cls, name, method)
