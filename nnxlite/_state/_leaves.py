"""Single leaves: the value in one, and whether two are equal."""

from __future__ import annotations

import collections.abc as abc
import typing as tp

import jax

from nnxlite._jax import is_ref
from nnxlite._state._walk import MISSING, Mapping
from nnxlite.variables import Variable


def content(leaf: tp.Any) -> tp.Any:
    """The raw value of a Variable, or another leaf, read out of its reference where it lives in one."""
    value: tp.Any = leaf.get_raw_value() if isinstance(leaf, Variable) else leaf
    return value[...] if is_ref(value) else value


def same(a: Mapping, b: Mapping) -> bool:
    """Whether two nested mappings have the same keys and equal leaves."""
    todo: list[tuple[Mapping, Mapping]] = [(a, b)]
    while todo:
        a, b = todo.pop()
        if a is b:
            continue
        if len(a) != len(b):
            return False
        for key, x in a.items():
            y = b.get(key, MISSING)
            if isinstance(x, abc.Mapping) and isinstance(y, abc.Mapping):
                todo.append((x, y))
            elif not same_leaf(x, y):
                return False
    return True


def same_leaf(x: tp.Any, y: tp.Any) -> bool:
    """Whether two leaves are equal: Variables by class, metadata and value, arrays by content."""
    if x is y:
        return True
    if x is MISSING or y is MISSING:
        return False
    if isinstance(x, Variable) and isinstance(y, Variable):
        return (
            type(x) is type(y)
            and x.get_metadata() == y.get_metadata()
            and same_leaf(content(x), content(y))
        )
    if hasattr(x, "dtype") and hasattr(y, "dtype"):
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        if isinstance(x, jax.ShapeDtypeStruct) or isinstance(y, jax.ShapeDtypeStruct):
            return bool(x == y)
        return bool((x == y).all())
    return bool(x == y)
