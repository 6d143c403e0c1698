"""Immutable records that are pytrees."""

from __future__ import annotations

import dataclasses
import typing as tp

import jax

STATIC: tp.Mapping[str, tp.Any] = {"static": True}
"""Metadata of a field that is not a child: `dataclasses.field(metadata=STATIC)`."""


@tp.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Struct:
    """Base of frozen dataclasses whose fields are pytree children; subclasses need no decorator.

    A field made with `dataclasses.field(metadata={"static": True})` (or `{"pytree_node": False}`)
    is static: part of the structure, compared and hashed by JAX.

    >>> import nnxlite as nnx, jax
    >>> class Counts(nnx.metrics.Struct):
    ...     right: int
    ...     seen: int
    >>> jax.tree.leaves(Counts(3, 4).replace(seen=5))
    [3, 5]
    """

    def __init_subclass__(cls, **kwargs: tp.Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True)(cls)
        fields = dataclasses.fields(tp.cast(tp.Any, cls))
        static = [f.name for f in fields if _is_static(f)]
        children = [f.name for f in fields if f.name not in static]
        jax.tree_util.register_dataclass(cls, data_fields=children, meta_fields=static)

    def replace(self, **updates: tp.Any) -> tp.Self:
        """A copy with other values in some fields; TypeError for a field that does not exist.

        Args:
            updates: fields by name.
        """
        return dataclasses.replace(tp.cast(tp.Any, self), **updates)


def _is_static(field: dataclasses.Field[tp.Any]) -> bool:
    return bool(field.metadata.get("static")) or field.metadata.get("pytree_node") is False
