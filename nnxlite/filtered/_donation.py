"""Donation, leaf by leaf: the groups of leaves of a compiled call, and which may be donated."""

from __future__ import annotations

import contextlib
import typing as tp
import warnings

from nnxlite._base.jax import as_integers
from nnxlite.transforms._donation import Owner

Donate = tp.Literal["all", "all-except-first", "warn", "warn-except-first", "none"]
Donated: tp.TypeAlias = str | tuple[int | str, ...]
"""One of the texts of `Donate`, or the arguments that are donated, by number or name."""


@contextlib.contextmanager
def without_warnings(donate: Donated) -> tp.Iterator[None]:
    """Suppress JAX's warnings about buffers that are not reused, unless `donate=` asks for them."""
    if isinstance(donate, str) and not donate.startswith("all"):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


def as_donated(donate: tp.Any) -> Donated:
    """The value of `donate=` as an option.

    Raises ValueError where it is neither a known text nor the numbers or names of arguments.
    """
    if donate in tp.get_args(Donate):
        return donate
    several = tuple(donate) if isinstance(donate, (list, tuple)) else (donate,)
    given = as_integers(several)
    if isinstance(donate, str) or any(type(x) not in (int, str) for x in given):
        raise ValueError(
            f"filter_jit: donate={donate!r}; it must be one of {tp.get_args(Donate)}, or a number, or a "
            "list of numbers and names, of arguments."
        )
    return given


def donated_owners(
    what: str, donate: Donated, names: tp.Sequence[str], owners: tp.Sequence[Owner]
) -> tp.Container[Owner]:
    """The arguments whose arrays are donated.

    Args:
        what: the transform and its function, for messages.
        donate: the option.
        names: of the parameters that may be given by position.
        owners: the arguments of the leaves of a call.

    Raises ValueError for an argument that the call does not have.
    """
    found = dict.fromkeys(owners)
    if isinstance(donate, str):
        return [o for o in found if o != 0 or not donate.endswith("except-first")]
    chosen: set[Owner] = set()
    for one in donate:
        number = names.index(one) if one in names else one
        if isinstance(number, int) and number < 0:
            number += sum(isinstance(owner, int) for owner in found)
        name = names[number] if isinstance(number, int) and number < len(names) else one
        here = {owner for owner in (number, name) if owner in found}
        if not here:
            raise ValueError(
                f"{what}: donate= names the argument {one!r}, and the call has arrays in "
                f"{[owner for owner in found if owner is not None]}."
            )
        chosen |= here
    return chosen
