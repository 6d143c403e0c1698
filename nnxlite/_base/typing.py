"""Type variables and protocols by which programs annotate their own functions."""

from __future__ import annotations

import typing as tp

if tp.TYPE_CHECKING:
    import jax
    import numpy as np

A = tp.TypeVar("A")
B = tp.TypeVar("B")
C = tp.TypeVar("C")
F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])
K = tp.TypeVar("K")
M = tp.TypeVar("M", bound="Module")  # type: ignore[name-defined]  # noqa: F821 - of nnxlite.objects
P = tp.ParamSpec("P")
R = tp.TypeVar("R")
S = tp.TypeVar("S")
V = tp.TypeVar("V")
Leaf = tp.TypeVar("Leaf")
Node = tp.TypeVar("Node")

Numbers: tp.TypeAlias = "jax.Array | np.ndarray | complex"
"""Arrays and numbers: `complex` includes int and float for type checkers."""

RematPolicy: tp.TypeAlias = tp.Callable[..., bool]
"""Which intermediate values `remat` keeps for the backward pass; see `jax.checkpoint_policies`."""


class Key(tp.Hashable, tp.Protocol):
    """A key of a path: hashable, with an order."""

    def __lt__(self, other: tp.Any, /) -> bool:
        """Whether it comes before another."""
        ...


_State = tp.TypeVar("_State", covariant=True)


class ApplyCaller(tp.Protocol[_State]):
    """What `nnx.call` and `GraphDef.apply` give: a call returns (output, (graphdef, state))."""

    def __getattr__(self, name: str) -> ApplyCaller[_State]:
        """The same for an attribute."""
        ...

    def __getitem__(self, key: tp.Any) -> ApplyCaller[_State]:
        """The same for an item."""
        ...

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tuple[tp.Any, _State]:
        """Merge, call, split."""
        ...
