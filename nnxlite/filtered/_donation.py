"""Donation, leaf by leaf: the groups of leaves of a compiled call, and which may be donated."""

from __future__ import annotations

import contextlib
import typing as tp
import warnings

from nnxlite._jax import is_compiling
from nnxlite.filtered._leaves import Leaves
from nnxlite.transforms import shared_buffer

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


def refuse_shared_buffers(what: str, tree: Leaves, groups: tp.Sequence[str]) -> None:
    """Raise ValueError where one buffer would be donated twice, or donated and read."""
    if not is_compiling():
        return  # nothing is donated
    donated = [leaf for leaf, group in enumerate(groups) if group == DONATED]
    donors = {id(tree.leaves[leaf]): leaf for leaf in reversed(donated)}  # the first of each buffer
    for leaf, x in enumerate(tree.leaves):
        donor = donors.get(id(x), leaf)
        if donor != leaf:
            one, two = (tree.text_of(tree.form.places[i]) for i in (donor, leaf))
            raise shared_buffer(what, f"'{one}'", f"'{two}'")
