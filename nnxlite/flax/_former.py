"""What `flax.nnx.ids` and `flax.nnx.deprecations` have."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import typing as tp
import warnings


@dataclasses.dataclass(frozen=True)
class UUID:
    """A number of its own."""

    rawid: int


class UUIDManager:
    """Gives out numbers: a call returns the next `UUID`."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self) -> UUID:
        return UUID(next(self._numbers))  # atomic


uuid = UUIDManager()


def deprecated(new_fn: tp.Callable[..., tp.Any]) -> tp.Callable[..., tp.Any]:
    """A function that warns, and calls the one that takes its place."""

    @functools.wraps(new_fn)
    def wrapper(*args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        text = f"This function is deprecated. Use {new_fn.__name__} instead."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return new_fn(*args, **kwargs)

    return wrapper
