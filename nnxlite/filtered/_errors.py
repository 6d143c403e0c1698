"""Errors of the filtered transforms, which name leaves by their paths."""

from __future__ import annotations

import typing as tp

from nnxlite._errors import path_text, short_type
from nnxlite.boundary import Inner, leave


def must_be_traced(what: str, where: str, value: tp.Any) -> TypeError:
    """The error for a leaf that must be traced and is not an array."""
    return TypeError(
        f"{what}: the leaf at '{where}' must be traced, but {short_type(value)} "
        f"{value!r} is neither an array nor a number."
    )


def refuse_writes(inner: Inner, what: str) -> None:
    """Raise ValueError where a function changed its arguments and the change would be dropped."""
    definition = leave(inner, None).definition
    if definition.written or definition.graph is not None:
        leaves = inner.call.graph_leaves()
        names = ", ".join(f"'{path_text(leaves[i].below)}'" for i in definition.written[:5])
        raise ValueError(
            f"{what} changes its arguments ({names or 'their structure'}), and the change cannot "
            "leave it. Return the new value instead, and write it outside."
        )
