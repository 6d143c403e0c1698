"""Donation, leaf by leaf: the groups of leaves of a compiled call, and which may be donated."""

from __future__ import annotations

import contextlib
import typing as tp
import warnings

from nnxlite.boundary import Partition
from nnxlite.filtered._crossing import Call
from nnxlite.transforms import refuse_shared_buffers

Donate = tp.Literal["all", "all-except-first", "warn", "warn-except-first", "none"]

GROUPS = KEPT, DONATED, STATIC = "kept", "donated", "static"
"""The groups of leaves: traced ones, whose buffers are kept or donated, and those in the key."""


@contextlib.contextmanager
def without_warnings(donate: str) -> tp.Iterator[None]:
    """Suppress JAX's warnings about buffers that are not reused, unless `donate=` asks for them."""
    if not donate.startswith("all"):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


def grouped(what: object, call: Call, groups: tp.Sequence[str]) -> Partition:
    """The leaves of a call of `what` in their groups.

    Raises ValueError where one buffer would be donated twice, or donated and read.
    """
    partition = Partition(tuple(groups), GROUPS)
    find_texts = lambda: [f"'{call.text_of(place)}'" for place in call.form.places]
    refuse_shared_buffers(what, call.leaves, partition.positions[1], find_texts)
    return partition
