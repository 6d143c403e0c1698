"""What a Variable contains: its static half (class and metadata), and the box with its value.

A Variable is a value plus a `VariableDef`.  Definitions with equal content are one object, so that
comparing, hashing and caching them is comparing identities; a definition also knows in advance
whether reading or writing needs anything beyond touching the value (hooks, references).

Metadata that may be edited, or are equal without being interchangeable (a list, a settings object, a
hook that is defined again), stay with their Variable, whose definition is then private; see
`_base/interning.py`.

A transform that adds an axis names it: `{PARTITION_NAME: name, other: name, ...}`. The first entry is
for the sharding annotation and the callbacks; each other one is for the tuple of names that a
Variable has under that entry of its metadata, if it has one.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as tp
from operator import itemgetter

import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite._base.errors import check_level, short_type
from nnxlite._base.interning import LOCK, Definition, touch
from nnxlite._base.jax import NUMBERS, TraceRef, is_ref, new_ref, trace_state
from nnxlite._base.statics import Facts, alike, atoms, facts, own_copy

if tp.TYPE_CHECKING:
    from nnxlite.variables._variable import Variable

__all__ = ["PARTITION_NAME", "VariableMetadata"]


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: tp.Any = _Missing()
"""Stands for an argument that was not given, where None is a value."""

HOOKS = ("on_get_value", "on_set_value", "on_create_value", "on_add_axis", "on_remove_axis")
REQUIRED = {"hijax": False, "ref": False, "eager_sharding": True}
"""Metadata every Variable has."""


def as_hooks(hooks: tp.Any) -> tuple[tp.Callable[..., tp.Any], ...]:
    """One callback or several, as a tuple."""
    return tuple(hooks) if isinstance(hooks, (tuple, list)) else (hooks,)


class VariableDef(Definition):
    """Class and metadata of a Variable; what a `GraphDef` keeps of it."""

    __slots__ = (
        "create_hooks",
        "get_hooks",
        "is_ref",
        "metadata",
        "plain_read",
        "set_hooks",
        "type",
    )

    def __init__(self, *content: tp.Any) -> None:
        super().__init__(*content)
        if len(self.own) > 1:  # the order in which metadata were given does not count
            order = sorted(self.own, key=lambda i: str(self.head[1 + i]))
            self.atoms = tuple([atom for i in order for atom in atoms(self.values[i])])
        self.type: type[Variable] = self.head[0]
        self.metadata: dict[str, tp.Any] = dict(zip(self.head[1:], self.values))
        self.is_ref = bool(self.metadata.get("ref", False))
        self.create_hooks = self.hooks("on_create_value")
        self.get_hooks = self.hooks("on_get_value")
        self.set_hooks = self.hooks("on_set_value")
        self.plain_read = not self.get_hooks and not self.is_ref and self.type._nnx_reads_plainly

    @staticmethod
    def _key(head: tuple[tp.Any, ...], known: tuple[Facts, ...]) -> tp.Any:
        return head[0], frozenset(zip(head[1:], [part.key for part in known]))

    def hooks(self, name: str) -> tuple[tp.Callable[..., tp.Any], ...]:
        """The callbacks for one event: those given as metadata, else the class's own method."""
        given = as_hooks(self.metadata.get(name, ()))
        own = getattr(self.type, name, None)
        return given if given or own is None else (own,)

    def current(self) -> VariableDef:
        """This definition, or that of the metadata as they are now where these were edited in place."""
        if not self.mutable:
            return self
        now = define(self.type, self.metadata)
        return self if now.matches(self) else now

    def is_like(self, other: tp.Any) -> bool:
        """Whether another definition has the same metadata, where objects are the same ones."""
        if self.matches(other):
            return True
        if type(other) is not VariableDef or self.type is not other.type:
            return False
        mine, theirs = self.metadata, other.metadata
        return mine.keys() == theirs.keys() and all(alike(v, theirs[k]) for k, v in mine.items())

    def for_variable(self) -> VariableDef:
        """This definition with its own copies of the builtin containers, which no Variable has."""
        return self.mapped(own_copy) if self.own else self

    def keeping(self, before: VariableDef) -> VariableDef:
        """This definition with the entries of an earlier one that are equal to its own."""
        values = list(self.values)
        for i in self.own:
            earlier = before.metadata.get(self.head[1 + i], MISSING)
            if facts(earlier).key == self.facts[i].key:
                values[i] = earlier
        return self.with_values(values)

    def __repr__(self) -> str:
        shown = "".join(f", {k}={v!r}" for k, v in self.metadata.items() if k not in REQUIRED)
        return f"VariableDef({self.type.__name__}{shown})"


def define(type_: type[Variable], metadata: dict[str, tp.Any]) -> VariableDef:
    """The definition for a class and metadata."""
    return VariableDef.of((type_, *metadata), tuple(metadata.values()))


class Box:
    """The content of a Variable: raw value, definition, its trace, and its structural version.

    It is an object of its own so that the engine can refer to it directly: reading and writing a
    slot of this plain class is several times faster than one of a class with `__getattr__`.
    """

    __slots__ = ("__weakref__", "_nnx_version", "definition", "trace", "value")

    value: tp.Any
    definition: VariableDef
    trace: TraceRef
    _nnx_version: int


def boxed(definition: VariableDef, value: tp.Any) -> Box:
    box = _new(Box)
    box.definition = definition
    box.trace = trace_state.value
    box.value = value
    box._nnx_version = 0
    return box


_new = object.__new__


def redefine(box: Box, definition: VariableDef) -> None:
    """Give a box another definition, which is a change of structure."""
    touch(box)  # before, too: what interrupts this must not leave a plan valid
    box.definition = definition
    touch(box)


set_value = Box.__dict__["value"].__set__
set_definition = Box.__dict__["definition"].__set__


def current_definition(box: Box) -> VariableDef:
    """The definition of a Variable, renewed where its metadata were edited in place."""
    definition = box.definition
    if definition.mutable:
        now = definition.current()
        if now is not definition:
            redefine(box, now)
        return now
    return definition


def as_stored(definition: VariableDef, value: tp.Any, *, copy: bool = True) -> tp.Any:
    """A value as a Variable of this definition stores it: in a reference of its own, or bare.

    With `copy=False` a reference stays the same one.

    Raises TypeError for one that no reference takes.
    """
    if is_ref(value):
        if definition.is_ref and not copy:
            return value
        value = value[...]
    if not definition.is_ref:
        return value
    cls = definition.type
    if not isinstance(value, NUMBERS):
        raise TypeError(
            f"{cls.__name__}(ref=True) holds its value in a JAX array reference, which takes an "
            f"array or a number, got {short_type(value)}."
        )
    return new_ref(jnp.asarray(value))


def refuse_hijax(what: str) -> tp.NoReturn:
    raise ValueError(
        f"{what}(hijax=True) is not available: hijax Variables are an experiment of JAX. Use "
        "ref=True for a Variable that lives in a JAX array reference."
    )


# Metadata --------------------------------------------------------------------------------------

FROZEN = "nnx_frozen"
"""The metadata entry of a frozen Variable; only those have it."""

PLACEMENT = "nnx_placement"
"""The metadata entry with the spec by which a Variable was put on a mesh, with a part for each axis; for
a pytree a tuple of the specs of its arrays."""

PARTITION_NAME = "partition_name"
"""Key in `transform_metadata` for the name of the axis that a transform adds."""

_SHARDING_NAMES = ("sharding", "sharding_names")  # spellings of the entry "out_sharding"

T = tp.TypeVar("T")
Hook = tp.Callable[..., tp.Any]


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
            KeyError: when the entry does not exist and no default is given.
            TypeError: for a name together with `exclude_required`, or a default without a name.
        """
        entries = self._box.definition.metadata
        if name is None:
            if default is not MISSING:
                raise TypeError(
                    f"{type(self).__name__}.get_metadata: Cannot provide a default value when 'name' "
                    f"is not provided; got default={default!r}. Without a name it gives all the "
                    "metadata."
                )
            if exclude_required:
                return {k: v for k, v in entries.items() if k not in REQUIRED}
            return dict(entries)
        if exclude_required is not None:
            raise TypeError(
                f"{type(self).__name__}.get_metadata takes a name or exclude_required, not both; got "
                f"name={name!r}, exclude_required={exclude_required!r}."
            )
        if name not in entries and default is MISSING:
            raise KeyError(
                f"{type(self).__name__} has no metadata {name!r}; it has {sorted(entries)}."
            )
        return entries.get(name, default)

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
            present = bool(self._box.definition.metadata.get(name))
            if name in updates and bool(updates[name]) != present:
                raise ValueError(
                    f"Cannot change `{name}` metadata of {type(self).__name__} from {present} to "
                    f"{updates[name]!r}; make a new Variable, or use vars_as."
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
Axes: tp.TypeAlias = tuple[tp.Any, ...]
Renamed: tp.TypeAlias = tp.Callable[[str, tp.Any, Axes], tp.Iterable[tp.Any]]
"""From a key of the metadata, the name of an axis and those of all axes, the new ones."""


def add_axis(variable: HasMetadata, index: int, names: Names) -> None:
    """Put the names of a new axis into the metadata."""
    added: Renamed = lambda key, name, axes: _inserted(axes, index, name)
    _rename(variable, names, added, variable.add_axis, index)


def add_unnamed_axis(variable: HasMetadata, index: int, ndim: int) -> None:
    """Put None for a new axis into the annotation, if that is one for `ndim` axes without it."""
    annotation = variable.sharding_names
    if isinstance(annotation, (tuple, list, PartitionSpec, NamedSharding, Format)):
        if len(_names_in(annotation)) <= ndim:
            new = changed_names(annotation, lambda axes: _inserted(axes, index, None))
            variable.set_metadata(out_sharding=new)


def remove_axis(variable: HasMetadata, index: int, names: Names) -> None:
    """Take the names of a removed axis out of the metadata.

    Raises ValueError, with nothing changed, where that axis has another name.
    """

    def removed(key: str, name: tp.Any, axes: Axes) -> list[tp.Any]:
        left = list(axes)
        found = left.pop(index) if -len(left) <= index < len(left) else None
        if found == name:
            return left
        has = f"sharding names {axes}" if key == "out_sharding" else f"names {axes} under {key!r}"
        raise ValueError(
            f"{type(variable).__name__} has the {has}: axis {index} is {found!r}, not {name!r} as "
            "the transform says. Give both the same name."
        )

    _rename(variable, names, removed, variable.remove_axis, index)


def _rename(
    variable: HasMetadata,
    names: Names,
    change: Renamed,
    hooks: tp.Callable[[int, tp.Any], None],
    index: int,
) -> None:
    """Change the entries of the metadata that name axes, and run the callbacks."""
    metadata, new = variable._box.definition.metadata, {}
    for key, name in names.items():
        axes = metadata.get(key)
        if key not in (*HOOKS, PARTITION_NAME, "out_sharding") and isinstance(axes, tuple):
            new[key] = tuple(change(key, name, axes))
    annotation, name = variable.sharding_names, names[PARTITION_NAME]
    if isinstance(annotation, NamedSharding) and name not in annotation.mesh.axis_names:
        name = None  # it has a mesh, and only that mesh's axes have names
    if annotation is not None:
        named = functools.partial(change, "out_sharding", name)
        new["out_sharding"] = changed_names(annotation, named)
    hooks(index, names[PARTITION_NAME])
    if new:
        variable.set_metadata(**new)


def changed_names(annotation: tp.Any, change: tp.Callable[[Axes], tp.Iterable[tp.Any]]) -> tp.Any:
    """A sharding annotation of the same kind with other names: `change` of those that it has."""
    names = change(_names_in(annotation))
    if isinstance(annotation, Format):  # its layout is for other axes
        annotation = annotation.sharding
    if not isinstance(annotation, NamedSharding):
        return tuple(names)
    spec = PartitionSpec(*names)
    return NamedSharding(annotation.mesh, spec, memory_kind=annotation.memory_kind)


def _names_in(annotation: tp.Any) -> Axes:
    if isinstance(annotation, Format):
        annotation = annotation.sharding
    return tuple(annotation.spec if isinstance(annotation, NamedSharding) else annotation)


def _inserted(axes: Axes, index: int, name: tp.Any) -> list[tp.Any]:
    """The names of axes, which may be fewer than the shape has, with that of a new one."""
    longer = [*axes, *[None] * (index - len(axes))]
    longer.insert(index if index >= 0 else index + len(longer) + 1, name)
    return longer


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
