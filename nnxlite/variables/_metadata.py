"""Metadata that travels with an initial value: what an annotated initializer returns."""

from __future__ import annotations

import dataclasses
import functools
import typing as tp

from nnxlite.variables._definition import HOOKS

FROZEN = "nnx_frozen"
"""The metadata entry of a frozen Variable; only those have it."""

PLACEMENT = "nnx_placement"
"""The metadata entry with the spec by which a Variable was put on a mesh, with a part for each axis."""

T = tp.TypeVar("T")
P = tp.ParamSpec("P")
Hook = tp.Callable[..., tp.Any]
Hooks = Hook | tp.Sequence[Hook]


def as_hooks(hooks: Hooks) -> tuple[Hook, ...]:
    """One callback or several, as a tuple."""
    return (hooks,) if callable(hooks) else tuple(hooks)


@dataclasses.dataclass
class VariableMetadata(tp.Generic[T]):
    """A value together with the metadata that its Variable shall carry.

    Passing one to `Variable(...)` as the value sets both; an entry here wins over metadata of the
    same name given to the Variable by keyword.

    Args:
        raw_value: the value.
        on_set_value, on_get_value, on_create_value, on_add_axis, on_remove_axis: callbacks, as for
            `Variable`.
        metadata: further entries.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.Param(nnx.VariableMetadata(jnp.zeros(2), metadata={"tag": "bias"})).tag
    'bias'
    """

    raw_value: T
    on_set_value: tuple[Hook, ...] = ()
    on_get_value: tuple[Hook, ...] = ()
    on_create_value: tuple[Hook, ...] = ()
    on_add_axis: tuple[Hook, ...] = ()
    on_remove_axis: tuple[Hook, ...] = ()
    metadata: dict[str, tp.Any] = dataclasses.field(default_factory=dict)

    def to_metadata(self) -> dict[str, tp.Any]:
        """All entries as one dict; event names only where there is a callback."""
        hooks = {name: as_hooks(getattr(self, name)) for name in HOOKS}
        return {**self.metadata, **{name: given for name, given in hooks.items() if given}}


def with_metadata(
    initializer: tp.Callable[P, T],
    on_set_value: Hooks = (),
    on_get_value: Hooks = (),
    on_create_value: Hooks = (),
    on_add_axis: Hooks = (),
    on_remove_axis: Hooks = (),
    **metadata: tp.Any,
) -> tp.Callable[P, VariableMetadata[T]]:
    """An initializer whose result carries metadata into the Variable that is made of it.

    Args:
        initializer: any function that returns an initial value.
        on_set_value, on_get_value, on_create_value, on_add_axis, on_remove_axis: callbacks
            `(variable, ...)`, one or several for each event.
        metadata: further entries for `Variable.get_metadata`.

    Returns:
        An initializer of the same arguments, which returns a `VariableMetadata`.

    >>> import nnxlite as nnx, jax
    >>> init = nnx.with_metadata(nnx.initializers.zeros_init(), tag="head")
    >>> nnx.Param(init(jax.random.key(0), (3,))).get_metadata("tag")
    'head'
    """
    hooks = {
        "on_set_value": as_hooks(on_set_value),
        "on_get_value": as_hooks(on_get_value),
        "on_create_value": as_hooks(on_create_value),
        "on_add_axis": as_hooks(on_add_axis),
        "on_remove_axis": as_hooks(on_remove_axis),
    }

    @functools.wraps(initializer)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> VariableMetadata[T]:
        return VariableMetadata(initializer(*args, **kwargs), metadata=dict(metadata), **hooks)

    return wrapper
