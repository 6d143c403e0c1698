"""`captures`: what a function, or a value made of functions, refers to without being data."""

from __future__ import annotations

import functools
import types
import typing as tp
from collections.abc import Iterator

MOST = 2_000
"""How many values are looked at."""


def captures(value: tp.Any) -> Iterator[tp.Any]:
    """The value, and all that it captures: closures, defaults, arguments of partials, elements.

    What the objects of a user refer to is not followed, only those of optax.

    >>> from nnxlite._base.captures import captures
    >>> rate = 0.5
    >>> def make(rate):
    ...     return lambda x: x * rate
    >>> 0.5 in captures((make(0.5), "text"))
    True
    """
    todo, seen = [value], dict[int, tp.Any]()  # values, so that no id is used again
    while todo and len(seen) < MOST:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        yield item
        match item:
            case types.FunctionType():
                todo += map(_content, item.__closure__ or ())
                todo += [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
                todo += vars(item).values()
            case types.MethodType():
                todo += [item.__func__, item.__self__]
            case functools.partial():
                todo += [item.func, *item.args, *item.keywords.values()]
            case tuple(init=_, update=update):  # optax calls `init` once, when the state is made
                todo.append(update)
            case tuple() | list() | set() | frozenset():
                todo += item
            case dict():
                todo += item.values()
            case _ if type(item).__module__.partition(".")[0] == "optax":
                todo += getattr(item, "__dict__", {}).values()
            case _:
                pass


def _content(cell: types.CellType) -> tp.Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
