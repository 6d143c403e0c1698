"""Pure values: what leaves a State as one, and where one goes when it comes back."""

from __future__ import annotations

import collections.abc as abc
import typing as tp

from nnxlite._errors import path_text
from nnxlite._state._keys import Path, sorted_keys
from nnxlite._state._leaves import content
from nnxlite._state._walk import MISSING, STATES, Mapping
from nnxlite.variables import Variable


class ExtractFn(tp.Protocol):
    """What a leaf becomes in a pure dict."""

    def __call__(self, leaf: tp.Any, /) -> tp.Any:
        """The pure value of the leaf."""
        ...


class ReplaceFn(tp.Protocol):
    """What replaces a leaf, given its new pure value."""

    def __call__(self, leaf: tp.Any, value: tp.Any, /) -> tp.Any:
        """The new leaf."""
        ...


def extract_value(leaf: tp.Any) -> tp.Any:
    """A Variable's value; other leaves themselves."""
    return leaf.get_value() if isinstance(leaf, Variable) else leaf


def replacements(
    state: tp.Any, pure_dict: tp.Any, replace_fn: ReplaceFn | None
) -> list[tuple[tp.Any, tp.Any, tp.Any]]:
    """What is to be put where in a State: the inner States, the keys and the new leaves.

    Raises TypeError for something that is not a mapping, ValueError for a path that the State does
    not have.
    """
    if not isinstance(pure_dict, abc.Mapping):
        raise TypeError(f"replace_by_pure_dict needs a mapping, got {type(pure_dict).__name__}.")
    replace = replace_fn or _replace
    return [
        (node, key, replace(node[key], value)) for node, key, value in _placed(state, pure_dict)
    ]


def _replace(leaf: tp.Any, value: tp.Any) -> tp.Any:
    return leaf.replace(value) if isinstance(leaf, Variable) else value


def _placed(state: tp.Any, pure_dict: Mapping) -> abc.Iterator[tuple[tp.Any, tp.Any, tp.Any]]:
    """For each value of the pure dict: the inner State and the key it belongs to, and the value."""
    prefix: list[tp.Any] = []
    stack = [(state, iter(pure_dict.items()))]
    while stack:
        node, items = stack[-1]
        for name, value in items:
            key = _known_key(node, name)
            current = MISSING if key is MISSING else node[key]
            if isinstance(value, abc.Mapping) and (not value or type(current) in STATES):
                if value:
                    prefix.append(name)
                    stack.append((current, iter(value.items())))
                    break
                continue
            _check_place((*prefix, name), node, current, value)
            yield node, key, value
        else:
            stack.pop()
            if prefix:
                prefix.pop()


def _known_key(node: tp.Any, name: tp.Any) -> tp.Any:
    if name in node:
        return name
    number = to_int(name)
    return number if number is not name and number in node else MISSING


def _check_place(path: Path, node: tp.Any, current: tp.Any, value: tp.Any) -> None:
    where = f"The path '{path_text(path)}' of the pure dict"
    if current is MISSING:
        raise ValueError(
            f"key in pure_dict not available in state: {path}; the State has the keys "
            f"{sorted_keys(node)} there."
        )
    if type(current) in STATES:
        raise ValueError(
            f"key in pure_dict not available in state: the path '{path_text(path)}' holds a leaf "
            f"({type(value).__name__}), but in the State it leads to an inner mapping with the keys "
            f"{sorted_keys(current)}."
        )
    whole = isinstance(current, Variable) and isinstance(content(current), abc.Mapping)
    if isinstance(value, abc.Mapping) and not whole:
        raise ValueError(
            f"{where} holds a mapping with the keys {sorted_keys(value)}, but in the State it is a "
            f"leaf ({type(current).__name__})."
        )


def to_int(key: tp.Any) -> tp.Any:
    """The number that a string spells, or the key itself."""
    if isinstance(key, str):
        try:
            return int(key)
        except ValueError:
            pass
    return key
