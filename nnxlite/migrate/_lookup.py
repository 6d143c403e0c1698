"""What nnxlite offers, looked up in nnxlite itself."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
import typing as tp


@functools.cache
def missing(path: str) -> str:
    """The first part of a dotted name below `nnxlite` that does not exist, or an empty text."""
    value: tp.Any = importlib.import_module("nnxlite")
    walked = ["nnxlite"]
    for part in path.split(".")[1:]:
        if not isinstance(value, (types.ModuleType, type)):
            return ""  # attributes of an instance are known when the program runs
        walked.append(part)
        try:
            value = getattr(value, part)
        except ImportError:
            return ""  # it needs a package that is not installed
        except AttributeError:
            try:
                value = importlib.import_module(".".join(walked))
            except ImportError:
                return ".".join(walked)
    return ""


@functools.cache
def parameters(path: str) -> frozenset[str] | None:
    """The names of the parameters of a function or class; None where any name is accepted."""
    value: tp.Any = importlib.import_module("nnxlite")
    for part in path.split(".")[1:]:
        value = getattr(value, part, None)
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in found):
        return None
    return frozenset(parameter.name for parameter in found)
