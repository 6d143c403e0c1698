"""Where two static values differ that look the same: a number in a schedule, an option in a partial."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing as tp
from collections.abc import Mapping

from nnxlite._text import safely, short

DEEPEST = 12
"""How far values are followed."""


def sides_text(name: str, before: tp.Any, after: tp.Any) -> str:
    """Two values that differ, as `name: before -> after`; if they look the same, a part that does not.

    >>> import optax
    >>> from nnxlite.transforms._looking_inside import sides_text
    >>> sides_text("n", 2, 3)
    'n: 2 -> 3'
    >>> sides_text("tx", optax.scale(0.5), optax.scale(0.25))
    'tx.update.step_size: 0.5 -> 0.25'
    """
    found = safely(lambda one: _first_difference(one, after, DEEPEST, ()), before)
    if not isinstance(found, tuple):
        return f"{name}: another object, which looks the same: {safely(short, before)}"
    names, *parts = found
    return f"{name}{''.join(names)}: {' -> '.join(safely(short, part) for part in parts)}"


def _first_difference(
    before: tp.Any, after: tp.Any, depth: int, above: tuple[int, ...]
) -> tuple[tuple[str, ...], tp.Any, tp.Any] | None:
    """Names that lead to the first two parts that look different, and the parts."""
    if before is after or depth == 0 or id(before) in above:
        return None
    if safely(short, before) != safely(short, after):
        return (), before, after
    one, other = _parts(before), _parts(after)
    for name in [*one, *(name for name in other if name not in one)]:
        found = _first_difference(
            one.get(name, _NOTHING), other.get(name, _NOTHING), depth - 1, (*above, id(before))
        )
        if found is not None:
            names, *parts = found
            return ((name, *names), *parts)
    return None


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


def _parts(value: tp.Any) -> dict[str, tp.Any]:
    """The parts of a value by name, as they are written after the value."""
    if isinstance(value, functools.partial):
        keywords = {f".{name}": part for name, part in value.keywords.items()}
        return {".func": value.func, **_items(value.args), **keywords}
    if isinstance(value, types.MethodType):
        return {"": value.__self__, ".func": value.__func__}
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or ())
        inside = {f".{name}": safely(lambda c: c.cell_contents, cell) for name, cell in cells}
        defaults = {**_items(value.__defaults__ or ()), **_fields(value.__kwdefaults__ or {})}
        return {**inside, **defaults}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _fields(value._asdict())  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple)):
        return _items(value)
    if isinstance(value, Mapping):
        return {f"[{key!r}]": part for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
    return {} if isinstance(value, type) else _fields(getattr(value, "__dict__", {}))


def _items(values: tp.Iterable[tp.Any]) -> dict[str, tp.Any]:
    return {f"[{number}]": part for number, part in enumerate(values)}


def _fields(values: tp.Mapping[str, tp.Any]) -> dict[str, tp.Any]:
    return {f".{name}": part for name, part in values.items()}
