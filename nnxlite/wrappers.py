"""`nnx.wrappers`: a module as a pair of functions, `init` and `apply`.

The wrappers for modules of Linen are in `nnx.bridge.wrappers`, which is imported when one is used.
"""

from __future__ import annotations

import dataclasses
import importlib
import typing as tp

from nnxlite._base.jax import M as M
from nnxlite.graph._functional import split
from nnxlite.graph._graphdef import GraphDef
from nnxlite.objects._rngs import Rngs


@dataclasses.dataclass(eq=False, repr=False)
class Functional(tp.Generic[M]):
    """A module class with the arguments for an instance; see `functional`.

    Args:
        module_type: the class.
        graphdef: the definition, if it is known.
        args, kwargs: arguments for an instance.

    Attributes:
        graphdef: the definition after `init`, else None.

    >>> import nnxlite as nnx
    >>> layer = nnx.wrappers.Functional(nnx.Linear, None, (2, 3), {})
    >>> sorted(layer.init(rngs=nnx.Rngs(0)))
    ['bias', 'kernel']
    """

    module_type: type[M]
    graphdef: GraphDef[M] | None
    args: tuple[tp.Any, ...]
    kwargs: dict[str, tp.Any]

    def init(self, *, rngs: Rngs | None = None) -> tp.Any:
        """Make the module, and return its state.

        Args:
            rngs: passed to the class, where it is given.
        """
        kwargs = self.kwargs if rngs is None else {**self.kwargs, "rngs": rngs}
        graphdef, state = split(self.module_type(*self.args, **kwargs))
        self.graphdef = graphdef
        return state

    def apply(self, *states: tp.Any) -> tp.Any:
        """A proxy that calls the module with these states; see `GraphDef.apply`.

        Args:
            states: the States of the module.

        Raises:
            ValueError: before `init`.
        """
        if self.graphdef is None:
            raise ValueError(f"{self.module_type.__name__}: call init(rngs=...) before apply.")
        return self.graphdef.apply(*states)


def functional(cls: type[M]) -> tp.Callable[..., Functional[M]]:
    """A function from the arguments of a module class to its `Functional`.

    Args:
        cls: the module class.

    Returns:
        A function of the arguments of the class, which returns a `Functional`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> layer = nnx.wrappers.functional(nnx.Linear)(2, 3)
    >>> state = layer.init(rngs=nnx.Rngs(0))
    >>> y, (graphdef, state) = layer.apply(state)(jnp.ones((1, 2)))
    >>> y.shape
    (1, 3)
    """

    def with_arguments(*args: tp.Any, **kwargs: tp.Any) -> Functional[M]:
        return Functional(cls, None, args, kwargs)

    return with_arguments


_LINEN = frozenset({"ToLinen", "ToNNX", "lazy_init", "linen_rngs_dict", "to_linen"})


def __getattr__(name: str) -> tp.Any:
    if name in _LINEN:
        return getattr(importlib.import_module("nnxlite.bridge.wrappers"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
