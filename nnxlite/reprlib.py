"""`nnx.reprlib`: a `repr` for your own classes, in the style of modules and states.

>>> import nnxlite as nnx
>>> class Point(nnx.reprlib.Representable):
...     def __nnx_repr__(self):
...         yield nnx.reprlib.Object(type="Point")
...         yield nnx.reprlib.Attr("x", 1)
>>> Point()
Point(
  x=1
)
"""

from __future__ import annotations

import dataclasses
import typing as tp

from nnxlite._base.text import Atom, Entry, Text, text_of


@dataclasses.dataclass
class Object:
    """The outer part of a text form: the name and the brackets."""

    type: str | type
    start: str = "("
    end: str = ")"
    kv_sep: str = "="
    indent: str = "  "
    empty_repr: str = ""
    comment: str = ""
    same_line: bool = False


@dataclasses.dataclass
class Attr:
    """One entry of a text form."""

    key: str
    value: tp.Any
    start: str = ""
    end: str = ""
    use_raw_value: bool = False
    use_raw_key: bool = False


class Representable:
    """Base of classes that describe their text form in `__nnx_repr__`."""

    __slots__ = ()

    def __nnx_repr__(self) -> tp.Iterator[Object | Attr]:
        """One `Object`, then an `Attr` for each entry."""
        raise NotImplementedError(f"{type(self).__name__} needs a method __nnx_repr__.")

    def __nnx_text__(self) -> Text:
        return text_from(self.__nnx_repr__())

    def __repr__(self) -> str:
        self.__nnx_repr__()  # raises where the class does not define it
        return text_of(self)


def get_repr(obj: Representable) -> str:
    """The text form of a `Representable`."""
    return repr(obj)


def text_from(parts: tp.Iterable[Object | Attr]) -> Text:
    """One level of a text form, from the parts that `__nnx_repr__` yields."""
    first, *rest = parts
    whole, entries = tp.cast(Object, first), tp.cast(list[Attr], rest)
    name = whole.type if isinstance(whole.type, str) else whole.type.__name__
    if not entries:
        return Text(f"{name}{whole.start}{whole.empty_repr}{whole.end}", "", "")
    return Text(
        name,
        whole.start,
        whole.end,
        tuple(_entry(attr, whole.kv_sep) for attr in entries),
        comment=whole.comment.strip(" #"),
        breaks=not whole.same_line,
    )


def _entry(attr: Attr, separator: str) -> Entry:
    value = attr.value
    if attr.use_raw_value or attr.end:
        value = Atom(f"{value if attr.use_raw_value else repr(value)}{attr.end}")
    return Entry(attr.key, f"{attr.start}{attr.key}{separator}", value)
