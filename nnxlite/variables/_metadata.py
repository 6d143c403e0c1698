"""The metadata of Variables: how they are given, read and changed, and the names of axes in them.

A transform that adds an axis names it: `{PARTITION_NAME: name, other: name, ...}`. The first entry is
for the sharding annotation and the callbacks; each other one is for the tuple of names that a
Variable has under that entry of its metadata, if it has one.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as tp
from operator import itemgetter

from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite._base.errors import check_level
from nnxlite._base.interning import LOCK
from nnxlite.variables._definition import (
    HOOKS,
    MISSING,
    REQUIRED,
    Box,
    as_hooks,
    boxed,
    define,
    redefine,
)

FROZEN = "nnx_frozen"
"""The metadata entry of a frozen Variable; only those have it."""

PLACEMENT = "nnx_placement"
"""The metadata entry with the spec by which a Variable was put on a mesh, with a part for each axis."""

PARTITION_NAME = "partition_name"
"""Key in `transform_metadata` for the name of the axis that a transform adds."""

_SHARDING_NAMES = ("sharding", "sharding_names")  # spellings of the entry "out_sharding"

T = tp.TypeVar("T")
P = tp.ParamSpec("P")
Hook = tp.Callable[..., tp.Any]
Hooks = Hook | tp.Sequence[Hook]


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
    given = (on_set_value, on_get_value, on_create_value, on_add_axis, on_remove_axis)
    hooks = tuple(map(as_hooks, given))

    @functools.wraps(initializer)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> VariableMetadata[T]:
        return VariableMetadata(initializer(*args, **kwargs), *hooks, metadata=dict(metadata))

    return wrapper


def normal_entries(entries: dict[str, tp.Any]) -> dict[str, tp.Any]:
    """Metadata under its one spelling, `out_sharding`."""
    return {"out_sharding" if k in _SHARDING_NAMES else k: v for k, v in entries.items()}


def normal(metadata: dict[str, tp.Any], ref: bool, eager_sharding: bool) -> dict[str, tp.Any]:
    required = {"hijax": False, "ref": ref, "eager_sharding": eager_sharding}
    return {**normal_entries(metadata), **required} if metadata else required


class HasMetadata:
    """The methods of a Variable for its metadata.

    Attributes:
        required_metadata: names of the entries that every Variable has.
    """

    __slots__ = ()

    required_metadata: tp.ClassVar[frozenset[str]] = frozenset(REQUIRED)

    _box: Box

    @property
    def sharding_names(self) -> tp.Any:
        """The axis names given as `sharding=` (or `sharding_names=`), or None."""
        return self._box.definition.metadata.get("out_sharding")

    @classmethod
    def from_metadata(cls, value: tp.Any, attributes: tp.Mapping[str, tp.Any]) -> tp.Self:
        """A Variable with exactly these metadata entries, made without running any callback.

        Args:
            value: the value.
            attributes: the metadata.
        """
        new = object.__new__(cls)
        definition = define(tp.cast(tp.Any, cls), {**REQUIRED, **attributes})
        object.__setattr__(new, "_box", boxed(definition, value))
        return new

    def get_metadata(
        self,
        name: str | None = None,
        default: tp.Any = MISSING,
        *,
        exclude_required: bool | None = None,
    ) -> tp.Any:
        """One entry (or `default`), or, without a name, a dict of all.

        Args:
            name: of the entry.
            default: what to return where there is none.
            exclude_required: leave out the entries every Variable has (`hijax`, `ref`, ...).

        Raises:
            KeyError: when there is no such entry and no default.
            TypeError: for a name together with `exclude_required`, or a default without a name.
        """
        entries = self._box.definition.metadata
        if name is not None:
            if exclude_required is not None:
                raise TypeError(
                    f"{type(self).__name__}.get_metadata takes a name or exclude_required, not "
                    f"both; got name={name!r}, exclude_required={exclude_required!r}."
                )
            if name in entries:
                return entries[name]
            if default is not MISSING:
                return default
            raise KeyError(
                f"{type(self).__name__} has no metadata {name!r}; it has {sorted(entries)}."
            )
        if default is not MISSING:
            raise TypeError(
                f"{type(self).__name__}.get_metadata: Cannot provide a default value when 'name' is "
                f"not provided; got default={default!r}. Without a name it gives all the metadata."
            )
        if exclude_required:
            return {k: v for k, v in entries.items() if k not in REQUIRED}
        return dict(entries)

    def set_metadata(self, *args: tp.Any, **kwargs: tp.Any) -> None:
        """`set_metadata(name, value)`, `set_metadata(name=value)`, or a mapping that replaces all.

        Args:
            args: a name and a value, or one mapping.
            kwargs: entries by name.

        Raises:
            TypeError: for other arguments, or none.
            ValueError: for a change of `hijax` or `ref`.
        """
        replaces = len(args) == 1 and isinstance(args[0], tp.Mapping) and not kwargs
        if replaces:
            kwargs = dict(args[0])
        elif len(args) == 2 and isinstance(args[0], str) and not kwargs:
            kwargs = {args[0]: args[1]}
        elif args or not kwargs:
            call = f"{type(self).__name__}.set_metadata"
            if args and kwargs:
                call = f"Cannot mix positional and keyword arguments in {call}: it"
            raise TypeError(
                f"{call} takes (name, value), keywords, or one mapping; got {len(args)} positional "
                f"and {len(kwargs)} keyword arguments."
            )
        self._check_fixed(kwargs)
        new = normal_entries(kwargs)
        with LOCK:  # what another thread sets at the same time stays, too
            # No comprehension here: on CPython 3.13 one that a trace function stops keeps the lock.
            kept = self._box.definition.metadata
            if replaces:
                kept = dict(zip(REQUIRED, itemgetter(*REQUIRED)(kept)))
            self._redefine({**kept, **new})

    def has_metadata(self, name: str) -> bool:
        """Whether there is an entry of this name.

        Args:
            name: of the entry.
        """
        return name in self._box.definition.metadata

    def del_metadata(self, name: str) -> None:
        """Remove one entry.

        Args:
            name: of the entry.

        Raises:
            KeyError: where there is none.
            ValueError: for one that every Variable has.
        """
        self._check_level(name)
        self.get_metadata(name)
        if name in REQUIRED:
            raise ValueError(
                f"Cannot delete `{name}` metadata of {type(self).__name__}: every Variable has it."
            )
        with LOCK:
            entries = dict(self._box.definition.metadata)
            entries.pop(name, None)
            self._redefine(entries)

    def _check_fixed(self, updates: tp.Mapping[str, tp.Any]) -> None:
        for name in ("hijax", "ref"):
            if name in updates and bool(updates[name]) != bool(
                self._box.definition.metadata.get(name)
            ):
                raise ValueError(
                    f"Cannot change `{name}` metadata of {type(self).__name__} from "
                    f"{bool(self._box.definition.metadata.get(name))} to {updates[name]!r}; make a new "
                    "Variable, or use vars_as."
                )

    def _redefine(self, entries: dict[str, tp.Any]) -> None:
        self._check_level("metadata")
        self._define_as(entries)

    def _define_as(self, entries: dict[str, tp.Any]) -> None:
        """Have these metadata, at whatever trace level."""
        definition = define(tp.cast(tp.Any, type(self)), entries)
        if definition is not self._box.definition:
            redefine(self._box, definition)

    def add_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Tell the `on_add_axis` callbacks of a new axis; `spmd.add_axis` names it in metadata as well.

        Args:
            axis_index: the position of the axis.
            axis_name: its name, or None.
        """
        for hook in self._box.definition.hooks("on_add_axis"):
            hook(self, axis_index, axis_name)

    def remove_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Tell the `on_remove_axis` callbacks of a removed axis; see `add_axis`.

        Args:
            axis_index: the position of the axis.
            axis_name: its name, or None.
        """
        for hook in self._box.definition.hooks("on_remove_axis"):
            hook(self, axis_index, axis_name)

    def _check_level(self, what: str = "value") -> None:
        """Raise TraceContextError for a write from another trace level than the Variable's own."""
        check_level(self, self._box.trace, what, variable=True)


# Names of axes --------------------------------------------------------------------------------

Names: tp.TypeAlias = tp.Mapping[str, tp.Any]
Change: tp.TypeAlias = tp.Callable[[tuple[tp.Any, ...]], tp.Iterable[tp.Any]]


def add_axis(variable: HasMetadata, index: int, names: Names) -> None:
    """Put the names of a new axis into the metadata."""
    new = {
        key: changed_names(axes, _inserted(index, name))
        for key, name, axes in _axis_names(variable, names)
    }
    variable.add_axis(index, names[PARTITION_NAME])
    if new:
        variable.set_metadata(**new)


def add_unnamed_axis(variable: HasMetadata, index: int, ndim: int) -> None:
    """Put None for a new axis into the annotation, if that is one for `ndim` axes without it."""
    annotation = variable.sharding_names
    if isinstance(annotation, (tuple, list, PartitionSpec, NamedSharding, Format)):
        if len(_names_in(annotation)) <= ndim:
            new = changed_names(annotation, _inserted(index, None))
            variable.set_metadata(out_sharding=new)


def remove_axis(variable: HasMetadata, index: int, names: Names) -> None:
    """Take the names of a removed axis out of the metadata.

    Raises ValueError, with nothing changed, where that axis has another name.
    """
    new: dict[str, tp.Any] = {}
    for key, name, axes in _axis_names(variable, names):
        left = list(_names_in(axes))
        removed = left.pop(index) if -len(left) <= index < len(left) else None
        if removed != name:
            where = "the sharding names" if key == "out_sharding" else "the names"
            under = "" if key == "out_sharding" else f" under {key!r}"
            raise ValueError(
                f"{type(variable).__name__} has {where} {_names_in(axes)}{under}: axis {index} "
                f"is {removed!r}, not {name!r} as the transform says. Give both the same name."
            )
        new[key] = changed_names(axes, lambda _, left=left: left)
    variable.remove_axis(index, names[PARTITION_NAME])
    if new:
        variable.set_metadata(**new)


def changed_names(annotation: tp.Any, change: Change) -> tp.Any:
    """A sharding annotation of the same kind with other names: `change` of those that it has."""
    names = change(_names_in(annotation))
    if isinstance(annotation, Format):  # its layout is for other axes
        annotation = annotation.sharding
    if not isinstance(annotation, NamedSharding):
        return tuple(names)
    spec = PartitionSpec(*names)
    return NamedSharding(annotation.mesh, spec, memory_kind=annotation.memory_kind)


def _axis_names(variable: HasMetadata, names: Names) -> tp.Iterator[tuple[str, tp.Any, tp.Any]]:
    """Entries of the metadata that name axes: the key, the name of the axis there, the entry."""
    metadata = variable.get_metadata() if len(names) > 1 else {}
    for key, name in names.items():
        axes = metadata.get(key)
        if key not in HOOKS and key != "out_sharding" and isinstance(axes, tuple):
            yield key, name, axes
    annotation, name = variable.sharding_names, names[PARTITION_NAME]
    if isinstance(annotation, NamedSharding) and name not in annotation.mesh.axis_names:
        name = None  # it has a mesh, and only that mesh's axes have names
    if annotation is not None:
        yield "out_sharding", name, annotation


def _names_in(annotation: tp.Any) -> tuple[tp.Any, ...]:
    if isinstance(annotation, Format):
        annotation = annotation.sharding
    return tuple(annotation.spec if isinstance(annotation, NamedSharding) else annotation)


def _inserted(index: int, name: tp.Any) -> Change:
    """Adds the name of a new axis to those of others, which may be fewer than the shape has."""

    def change(names: tuple[tp.Any, ...]) -> list[tp.Any]:
        longer = [*names, *[None] * (index - len(names))]
        longer.insert(index if index >= 0 else index + len(longer) + 1, name)
        return longer

    return change


# Placing values --------------------------------------------------------------------------------

Placer = tp.Callable[[tp.Any, tp.Mapping[str, tp.Any]], tp.Any]

_placer: list[Placer] = []


def place(value: tp.Any, metadata: tp.Mapping[str, tp.Any]) -> tp.Any:
    """A new value placed as its metadata say, or unchanged.

    Variables are a layer below sharding: until that installs its function (`plug`), an annotation is
    metadata, and the value stays where it is.
    """
    return _placer[0](value, metadata) if _placer else value


def plug(placer: Placer) -> None:
    """Install the function that places annotated values."""
    _placer[:] = [placer]
