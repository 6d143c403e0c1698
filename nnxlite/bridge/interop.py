"""Submodules of another kind inside a `bridge.Module`: of Linen, and of nnx."""

from __future__ import annotations

import typing as tp

from flax import linen

from nnxlite.bridge.module import Scope, adopted, current_context
from nnxlite.bridge.wrappers import ToNNX
from nnxlite.objects._module import Module
from nnxlite.objects._rngs import Rngs
from nnxlite.transforms._compiles import eval_shape


def _add(
    make: tp.Callable[[Scope], Module], name: str | None, what: str, cls: type | None = None
) -> tp.Any:
    """A submodule of the running module, with a name of its own under `compact`."""
    entry = current_context()
    if entry is None:
        raise ValueError(
            f"{what}() only needed inside bridge Module: call it in `setup` or under `compact`."
        )
    scope = entry.module.scope
    if scope is None:
        raise ValueError(
            f"{what}: {type(entry.module).__name__} is not bound; call it by `init` or `apply`."
        )
    module = make(scope)
    if name is None and not entry.in_compact:
        return module  # the attribute that it is assigned to names it
    return adopted(entry, module, cls or type(module), name)


def linen_in_bridge_mdl(linen_module: linen.Module, name: str | None = None) -> ToNNX:
    """A Linen module as a submodule of the running `bridge.Module`.

    Args:
        linen_module: the Linen module.
        name: the attribute; by default the one it is assigned to in `setup`, or class and number.

    Returns:
        A `ToNNX`, which the first call in `init` initializes.

    Raises:
        ValueError: outside of a `bridge.Module`.

    >>> import nnxlite as nnx, flax.linen as nn, jax.numpy as jnp
    >>> class Net(nnx.bridge.Module):
    ...     @nnx.bridge.compact
    ...     def __call__(self, x):
    ...         return nnx.bridge.interop.linen_in_bridge_mdl(nn.Dense(4))(x)
    >>> Net().init(0, jnp.ones((1, 3)))["params"]["Dense_0"]["kernel"].shape
    (3, 4)
    """

    def make(scope: Scope) -> ToNNX:
        module = ToNNX(linen_module, scope.rngs)
        if scope.initializing:
            module.to_nnx__initializing = True
        return module

    return _add(make, name, "linen_in_bridge_mdl", type(linen_module))


def nnx_in_bridge_mdl(factory: tp.Callable[[Rngs], Module], name: str | None = None) -> Module:
    """An `nnx.Module` as a submodule of the running `bridge.Module`.

    Args:
        factory: makes it from random streams.
        name: as for `linen_in_bridge_mdl`.

    Returns:
        The module. Where `apply` has no streams, it has the variables of `apply` alone.

    Raises:
        ValueError: outside of a `bridge.Module`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Net(nnx.bridge.Module):
    ...     def setup(self):
    ...         make = lambda rngs: nnx.Linear(3, 4, rngs=rngs)
    ...         self.head = nnx.bridge.interop.nnx_in_bridge_mdl(make)
    ...     def __call__(self, x):
    ...         return self.head(x)
    >>> Net().init(0, jnp.ones((1, 3)))["params"]["head"]["kernel"].shape
    (3, 4)
    """

    def make(scope: Scope) -> Module:
        return factory(scope.rngs) if len(scope.rngs) else eval_shape(lambda: factory(Rngs(0)))

    return _add(make, name, "nnx_in_bridge_mdl")
