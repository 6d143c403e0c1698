"""`Variable`: a mutable box for one value, with metadata; the leaf of every object graph.

A Variable is a value and a `VariableDef` (class and metadata, interned where it can be).  It remembers
the trace it was made in and refuses writes from any other, so that no tracer can leak.  Reading gives
the value after the `on_get_value` callbacks, writing stores it after the `on_set_value` callbacks; the
raw forms go around both.  Writing a value never changes the structure of a graph, changing metadata
does.

A class of one's own may override `get_value` and `set_value` (call those of `Variable` in them), and
`create_value` for what becomes of the initial value: `variable[...]`, `variable.value`, operators
and attributes of the value then go through them.

A value may be an array, an abstract array, a Python scalar, any pytree, or (`ref=True`) a JAX array
reference, which other code can share.
"""

from __future__ import annotations

import copy as copy_lib
import dataclasses
import functools
import operator
import types
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite import _sharding_hook
from nnxlite._bases import give_way
from nnxlite._config import EAGER_SHARDING, REF_VARIABLES
from nnxlite._definitions import ByShared
from nnxlite._errors import TraceContextError, short_type
from nnxlite._interning import LOCK
from nnxlite._jax import TraceRef, describe_trace, is_ref, new_ref, same_form, trace_state
from nnxlite._outline import Shown
from nnxlite._text import Text, variable_node
from nnxlite._together import Writes, run_together
from nnxlite._versions import touch
from nnxlite.variables._definition import REQUIRED, VariableDef, define
from nnxlite.variables._metadata import FROZEN, PLACEMENT, VariableMetadata
from nnxlite.variables._operators import ArrayOperators

if tp.TYPE_CHECKING:
    from nnxlite.variables._members import Operators
else:
    Operators = ArrayOperators  # whose operators work for values of any type

T = tp.TypeVar("T")
F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])
V = tp.TypeVar("V", bound="Variable[tp.Any]")


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: tp.Any = _Missing()
"""Stands for an argument that was not given, where None is a value."""

_ARRAY_PROTOCOLS = frozenset(  # what other libraries ask an array for, and its value answers
    ("__array_namespace__", "__cuda_array_interface__", "__dlpack__", "__dlpack_device__")
)
_SHARDING_NAMES = ("sharding", "sharding_names")  # spellings of the entry "out_sharding"


@dataclasses.dataclass(frozen=True)
class VarDefaults(tp.Mapping[str, bool]):
    """The defaults of `Variable(hijax=..., ref=...)`; a mapping as well.

    Args:
        hijax: accepted for compatibility; False.
        ref: whether new Variables hold their values in array references.

    >>> from nnxlite.variables import VarDefaults
    >>> VarDefaults(ref=True)["ref"], dict(VarDefaults())
    (True, {'hijax': False, 'ref': False})
    """

    hijax: bool = False
    ref: bool = False

    def __getitem__(self, name: str) -> bool:
        return dataclasses.asdict(self)[name]

    def __iter__(self) -> tp.Iterator[str]:
        return iter(("hijax", "ref"))

    def __len__(self) -> int:
        return 2


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


def _boxed(definition: VariableDef, value: tp.Any) -> Box:
    box = _new(Box)
    box.definition = definition
    box.trace = trace_state.value
    box.value = value
    box._nnx_version = 0
    return box


_new = object.__new__
set_value = Box.__dict__["value"].__set__
_set_definition = Box.__dict__["definition"].__set__


class Variable(Shown, Operators[T]):
    """A mutable box for a value, with metadata.

    It takes part in arithmetic like its value. What transforms and optimizers do with it depends on
    its class: see `Param`, `BatchStat`, `Cache`.

    Args:
        value: an array, a scalar, any pytree, or a `VariableMetadata`.
        hijax: accepted for compatibility; True raises ValueError (use `ref=True`).
        ref: hold the value in a JAX array reference.
        eager_sharding: place the value on the mesh at creation, where it has a sharding annotation.
        **metadata: any further entries; `on_get_value`, `on_set_value`, `on_create_value`,
            `on_add_axis` and `on_remove_axis` are callbacks.

    Raises:
        ValueError: for `hijax=True`.
        TypeError: for `ref=True` where the value is not an array.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> count = nnx.Variable(jnp.array(0), tag="steps")
    >>> count += 2
    >>> int(count.value), count.tag
    (2, 'steps')

    Callbacks see each value that is read or written:

    >>> limited = nnx.Variable(jnp.array(3.0), on_set_value=lambda variable, x: jnp.minimum(x, 1.0))
    >>> limited.value = jnp.array(5.0)
    >>> float(limited.value), float(2 * limited)
    (1.0, 2.0)
    """

    __slots__ = ("__weakref__", "_box")

    required_metadata: tp.ClassVar[frozenset[str]] = REQUIRED
    """The metadata that every Variable has."""

    _box: Box
    _nnx_plain_def: tp.ClassVar[VariableDef]
    _nnx_reads_plainly: tp.ClassVar[bool]  # whether `get_value` is the one of this class

    @tp.overload
    def __init__(self, value: VariableMetadata[T], **metadata: tp.Any) -> None: ...
    @tp.overload
    def __init__(
        self,
        value: T,
        *,
        hijax: bool | None = None,
        ref: bool | None = None,
        eager_sharding: bool | None = None,
        **metadata: tp.Any,
    ) -> None: ...
    def __init__(
        self,
        value: T | VariableMetadata[T],
        *,
        hijax: bool | None = None,
        ref: bool | None = None,
        eager_sharding: bool | None = None,
        **metadata: tp.Any,
    ) -> None:
        if hijax:
            _refuse_hijax(type(self).__name__)
        raw: tp.Any = value
        if isinstance(raw, VariableMetadata):
            metadata = {**metadata, **raw.to_metadata()}
            raw = raw.raw_value
        if isinstance(raw, Variable):
            raw = raw.get_value()
        if ref is None:
            ref = bool(metadata.pop("ref", REF_VARIABLES.get()))
        if is_ref(raw):
            ref = True
        if eager_sharding is None:
            eager_sharding = EAGER_SHARDING.get()
        if metadata or ref or not eager_sharding:
            definition = define(type(self), _normal(metadata, ref, eager_sharding))
        else:
            definition = type(self)._nnx_plain_def
        box = _boxed(definition, raw)
        _set_box(self, box)
        for hook in definition.create_hooks:
            raw = hook(self, raw)
        raw = self.create_value(raw)
        if metadata and definition.metadata.get("out_sharding") is not None:
            raw = _sharding_hook.place(raw, definition.metadata)
        if ref and not is_ref(raw):
            raw = _new_ref_of(type(self), raw)
        box.value = raw

    def __init_subclass__(cls, **kwargs: tp.Any) -> None:
        super().__init_subclass__(**kwargs)
        give_way(cls, Variable, ("__copy__", "__deepcopy__", "__format__", "__reduce_ex__"))
        _register(cls)

    # reading and writing the value -----------------------------------------------------------

    @property
    def value(self) -> T:
        """The value, after the `on_get_value` callbacks; assigning writes it."""
        box = self._box
        return box.value if box.definition.plain_read else self.get_value()

    @value.setter
    def value(self, value: T) -> None:
        self.set_value(value)

    @tp.overload
    def get_value(self) -> T: ...
    @tp.overload
    def get_value(self: Variable[jax.Array], *, index: tp.Any) -> jax.Array: ...
    @tp.overload
    def get_value(self, *, index: tp.Any) -> tp.Any: ...
    def get_value(self, *, index: tp.Any = MISSING) -> tp.Any:
        """The value, or the part of it at `index`, after the `on_get_value` callbacks.

        Args:
            index: an index of arrays; by default the whole.
        """
        value = self._box.value if self._box.definition.plain_read else self._read(index)
        if index is MISSING or index is Ellipsis:
            return value
        if self._box.definition.is_ref and not self._box.definition.get_hooks:
            return value
        return tp.cast(tp.Any, value)[index]

    def set_value(self, value: T, *, index: tp.Any = MISSING) -> None:
        """Write the value, or the part of it at `index`, through the `on_set_value` callbacks.

        Without an index the new value replaces the old one, whatever its shape and dtype.
        At an index, `...` included, an array keeps its shape and dtype: the new part is broadcast
        and cast to fit, as by `array.at[index].set(value)`.

        Args:
            value: the new value, or new part of it.
            index: an index of arrays; by default the whole.

        Raises:
            TraceContextError: when called from another trace level than the Variable's own.
            ValueError: for a part that does not broadcast, or another shape than the reference's.
        """
        if trace_state.value is not self._box.trace and not self._writes_through(value):
            self._refuse_write("value")
        new: tp.Any = value
        if isinstance(new, Variable):
            new = new.get_value()
        if not self._box.definition.plain_write:
            for hook in self._box.definition.set_hooks:
                new = hook(self, new)
            if self._box.definition.is_ref and is_ref(self._box.value):
                self._write_ref(new, index)
                return
        if index is not MISSING:
            new = _replace_at(self._box.value, index, new)
        self._box.value = new

    def _writes_through(self, new: tp.Any) -> bool:
        """Whether a write goes into a reference, which JAX lets every transform write into."""
        return self._box.definition.is_ref and is_ref(self._box.value) and not is_ref(new)

    def _write_ref(self, new: tp.Any, index: tp.Any) -> None:
        ref: tp.Any = self._box.value
        if is_ref(new):
            self._box.value = new
            return
        if index is MISSING and np.shape(new) != ref.shape:
            raise ValueError(
                f"{type(self).__name__}(ref=True) refers to {short_type(ref)}, and a reference "
                f"keeps its shape; got {short_type(new)} of shape {np.shape(new)}."
            )
        if index is MISSING or index is Ellipsis:
            ref[...] = jnp.broadcast_to(jnp.asarray(new, ref.dtype), ref.shape)
        else:
            part = ref[index]
            ref[index] = jnp.broadcast_to(jnp.asarray(new, part.dtype), part.shape)

    @tp.overload
    def __getitem__(self, key: types.EllipsisType) -> T: ...
    @tp.overload
    def __getitem__(self: Variable[jax.Array], key: tp.Any) -> jax.Array: ...
    @tp.overload
    def __getitem__(self, key: tp.Any) -> tp.Any: ...
    def __getitem__(self, key: tp.Any) -> tp.Any:
        box = self._box
        if key is Ellipsis and box.definition.plain_read:
            return box.value
        return self.get_value(index=key)

    def __setitem__(self, key: tp.Any, value: tp.Any) -> None:
        self.set_value(value, index=key)

    def __delitem__(self, key: tp.Any) -> None:
        changed = copy_lib.copy(tp.cast(tp.Any, self.get_value()))
        del changed[key]
        self.set_value(changed)

    def get_raw_value(self) -> T:
        """The stored value, around every callback (a reference for `ref=True`)."""
        return self._box.value

    def set_raw_value(self, value: T, *, _unsafe_bypass_check: bool = False) -> None:
        """Store a value, around every callback.

        Args:
            value: the new value.

        Raises:
            TraceContextError: when called from another trace level than the Variable's own.
        """
        if trace_state.value is not self._box.trace and not _unsafe_bypass_check:
            self._refuse_write("value")
        self._box.value = value

    @property
    def raw_value(self) -> T:
        """The stored value, around every callback."""
        return self._box.value

    @raw_value.setter
    def raw_value(self, value: T) -> None:
        self.set_raw_value(value)

    def create_value(self, value: T) -> T:
        """What the initial value becomes: that value, unless a class overrides this.

        Args:
            value: the value after the `on_create_value` callbacks.
        """
        return value

    def _read(self, index: tp.Any = MISSING) -> tp.Any:
        value: tp.Any = self._box.value
        if self._box.definition.is_ref and is_ref(value):
            partial = index is not MISSING and not self._box.definition.get_hooks
            value = value[index] if partial else value[...]
        for hook in self._box.definition.get_hooks:
            value = hook(self, value)
        return value

    def _refuse_write(self, what: str = "value") -> tp.NoReturn:
        raise TraceContextError(
            type(self).__name__, what, describe_trace(self._box.trace), _running(), variable=True
        )

    # identity and kind -----------------------------------------------------------------------

    @property
    def type(self) -> type[tp.Self]:
        """The Variable's class."""
        return type(self)

    @property
    def var_type(self) -> type[tp.Self]:
        """The Variable's class."""
        return type(self)

    @property
    def ref(self) -> bool:
        """Whether the value lives in a JAX array reference."""
        return self._box.definition.is_ref

    @property
    def hijax(self) -> bool:
        """Always False; see `Variable`."""
        return False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return tp.cast(tp.Any, self._box.value).shape

    @property
    def sharding_names(self) -> tp.Any:
        """The axis names given as `sharding=` (or `sharding_names=`), or None."""
        return self._box.definition.metadata.get("out_sharding")

    # metadata --------------------------------------------------------------------------------

    @classmethod
    def from_metadata(cls, value: T, attributes: tp.Mapping[str, tp.Any]) -> tp.Self:
        """A Variable with exactly these metadata entries, made without running any callback.

        Args:
            value: the value.
            attributes: the metadata.
        """
        new = object.__new__(cls)
        entries = {**_REQUIRED_DEFAULTS, **attributes}
        _set_box(new, _boxed(define(cls, entries), value))
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
        if len(args) == 1 and isinstance(args[0], tp.Mapping) and not kwargs:
            entries = self._box.definition.metadata
            kept = {k: v for k, v in entries.items() if k in REQUIRED}
            self._check_fixed(args[0])
            self._redefine({**kept, **_normal_entries(dict(args[0]))})
            return
        if len(args) == 2 and isinstance(args[0], str) and not kwargs:
            kwargs = {args[0]: args[1]}
        elif args and kwargs:
            raise TypeError(
                f"Cannot mix positional and keyword arguments in {type(self).__name__}.set_metadata: "
                f"it takes (name, value), keywords, or one mapping; got {len(args)} positional and "
                f"{len(kwargs)} keyword arguments."
            )
        elif args or not kwargs:
            raise TypeError(
                f"{type(self).__name__}.set_metadata takes (name, value), keywords, or one "
                f"mapping; got {len(args)} positional and {len(kwargs)} keyword arguments."
            )
        self._check_fixed(kwargs)
        with LOCK:  # what another thread sets at the same time stays, too
            self._redefine({**self._box.definition.metadata, **_normal_entries(kwargs)})

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
        if trace_state.value is not self._box.trace:
            self._refuse_write(name)
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
        if trace_state.value is not self._box.trace:
            self._refuse_write("metadata")
        self._define_as(entries)

    def _define_as(self, entries: dict[str, tp.Any]) -> None:
        """Have these metadata, at whatever trace level."""
        definition = define(type(self), entries)
        if definition is not self._box.definition:
            touch(self._box)  # before, too: what interrupts this must not leave a plan valid
            self._box.definition = definition
            touch(self._box)

    def _become(self, kind: type[Variable[tp.Any]]) -> None:
        """Change the class: the definition names it."""
        box = self._box
        if trace_state.value is not box.trace:
            self._refuse_write("__class__")
        definition = define(kind, box.definition.metadata)
        touch(box)
        object.__setattr__(self, "__class__", kind)
        box.definition = definition
        touch(box)

    def __getattr__(self, name: str) -> tp.Any:
        lacks = f"'{type(self).__name__}' object has no attribute"
        if name.startswith("__") and name.endswith("__") and name not in _ARRAY_PROTOCOLS:
            raise AttributeError(f"{lacks} {name!r}")
        try:
            box = _get_box(self)
        except AttributeError:  # an instance not yet filled, as during unpickling
            raise AttributeError(f"{lacks} {name!r}") from None
        definition, value = box.definition, box.value
        if name in definition.metadata:
            return definition.metadata[name]
        try:
            return getattr(value if definition.plain_read else self.get_value(), name)
        except AttributeError:
            raise AttributeError(
                f"{lacks} {name!r}: it is no metadata, and its value of type "
                f"'{type(value).__name__}' has none of that name"
            ) from None

    def __setattr__(self, name: str, value: tp.Any) -> None:
        kept = getattr(type(self), name, None)
        if name == "__class__":
            self._become(value)
            return
        if kept is not None and not (isinstance(kept, property) and kept.fset is None):
            object.__setattr__(self, name, value)
            return
        if trace_state.value is not self._box.trace:
            self._refuse_write(name)
        raise AttributeError(
            f"Cannot set attribute {name} of {type(self).__name__}. To set Variable metadata use "
            f"`variable.set_metadata({name}=...)`; to write the value, `variable.value = ...`."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            f"Cannot delete attribute {name} of {type(self).__name__}. To delete Variable metadata use "
            f"`variable.del_metadata({name!r})`."
        )

    def add_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Tell the `on_add_axis` callbacks of a new axis; `spmd.add_axis` names it in metadata, too.

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

    # copies ----------------------------------------------------------------------------------

    def copy(
        self, value: tp.Any = MISSING, *, _copy_ref: bool = True, **updates: tp.Any
    ) -> tp.Self:
        """A new Variable of the same class and metadata, optionally with other value or entries.

        Args:
            value: the new value; by default the present one.
            updates: metadata entries to change or add.
        """
        return self.replace(value, _copy_ref=_copy_ref, **updates)

    def replace(
        self, value: tp.Any = MISSING, *, _copy_ref: bool = True, **updates: tp.Any
    ) -> tp.Self:
        """A new Variable like this one, with another value or other metadata entries.

        `ref=True` moves the value into an array reference of its own, `ref=False` out of one.

        Args:
            value: the new value, or a Variable of the same class; by default the present one.
            updates: metadata entries to change or add.

        Raises:
            ValueError: when `value` is a Variable of another class, or for `hijax=True`.
            TypeError: for `ref=True` where the value is not an array.
        """
        raw = self._box.value if value is MISSING else value
        if isinstance(raw, Variable):
            if type(raw) is not type(self):
                raise ValueError(
                    f"Cannot replace a {type(self).__name__} by a {type(raw).__name__}."
                )
            updates = {**raw._box.definition.metadata, **updates}
            raw = raw._box.value
        definition = self._box.definition
        if updates:
            if updates.get("hijax"):
                _refuse_hijax(f"{type(self).__name__}.replace")
            definition = define(type(self), {**definition.metadata, **_normal_entries(updates)})
        held: tp.Any = raw
        if definition.is_ref:
            if _copy_ref or not is_ref(held):
                held = _new_ref_of(type(self), held[...] if is_ref(held) else held)
        elif is_ref(held):
            held = held[...]
        return tp.cast(tp.Self, make(definition, held))

    def to_state(
        self, value: tp.Any = MISSING, *, _copy_ref: bool = True, **updates: tp.Any
    ) -> tp.Self:
        """The same as `copy`.

        Args:
            value: the new value; by default the present one.
            updates: metadata entries to change or add.
        """
        return self.replace(value, _copy_ref=_copy_ref, **updates)

    def copy_from(self, other: Variable[T]) -> None:
        """Take over value and metadata of another Variable.

        Args:
            other: a Variable of the same class.

        Raises:
            ValueError: where it is not of the same class.
        """
        if type(self) is not type(other):
            raise ValueError(
                f"Cannot copy from incompatible container, expected {type(self).__name__}, got "
                f"{type(other).__name__}. To take over the value alone, assign it to .value."
            )
        self.update_from_state(other)

    def update_from_state(self, variable_state: Variable[T]) -> None:
        """Take over value and metadata of another Variable, whatever its class.

        A frozen Variable stays frozen, any other does not become so.

        Args:
            variable_state: the other Variable.
        """
        writes = Writes()
        note_definition(writes, self, self._definition_like(variable_state))
        note_raw(writes, self, variable_state.get_raw_value())
        writes.make()

    def _definition_like(self, other: Variable[tp.Any]) -> VariableDef:
        """The definition with the metadata of another Variable, but for what a Variable keeps."""
        own, theirs = self._box.definition, other._box.definition
        if theirs.shared is own.shared:
            return own
        kept = {k: own.metadata[k] for k in _KEPT if k in own.metadata}
        others = {k: v for k, v in theirs.metadata.items() if k not in (FROZEN, PLACEMENT)}
        return define(type(self), {**others, **kept})

    def __copy__(self) -> tp.Self:
        return self.replace(_copy_ref=False)

    def __deepcopy__(self, memo: dict[int, tp.Any]) -> tp.Self:
        new = self.replace(_copy_ref=True)
        memo[id(self)] = new
        new._box.definition = copy_lib.deepcopy(new._box.definition, memo)
        if not new._box.definition.is_ref:
            new._box.value = copy_lib.deepcopy(self._box.value, memo)
        return new

    def __getstate__(self) -> tp.Any:
        value: tp.Any = self._box.value
        return {
            "value": value[...] if is_ref(value) else value,
            "metadata": self._box.definition.metadata,
        }

    def __setstate__(self, state: tp.Any) -> None:
        """Replace the value and the metadata by those of a state that `__getstate__` returned."""
        definition, value = define(type(self), state["metadata"]), state["value"]
        if definition.is_ref:
            value = _new_ref_of(type(self), value)
        try:
            box = _get_box(self)
        except AttributeError:  # a new Variable, as it is unpickled
            _set_box(self, _boxed(definition, value))
            return
        if trace_state.value is not box.trace:
            self._refuse_write("__setstate__")
        touch(box)
        box.definition, box.value = definition, value
        touch(box)

    def __reduce_ex__(self, protocol: tp.SupportsIndex) -> tp.Any:
        if type(self).__reduce__ is not object.__reduce__:  # the user's own way
            return self.__reduce__()
        return _empty, (type(self),), self.__getstate__()

    # other -----------------------------------------------------------------------------------

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Call the value.

        Args:
            args, kwargs: arguments of the value.
        """
        return tp.cast(tp.Any, self.get_value())(*args, **kwargs)

    __str__ = Shown.__repr__  # it is short

    def __nnx_text__(self) -> Text:
        value: tp.Any = self._box.value
        shown = {k: v for k, v in self._box.definition.metadata.items() if _shown(k, v)}
        return variable_node(type(self), value[...] if is_ref(value) else value, shown)


_get_box = Variable.__dict__["_box"].__get__
_set_box = Variable.__dict__["_box"].__set__

_KEPT = ("hijax", "ref", FROZEN, PLACEMENT)
"""Metadata that a Variable keeps when it takes over that of another."""
_REQUIRED_DEFAULTS = {"hijax": False, "ref": False, "eager_sharding": True}


def is_variable(value: tp.Any) -> bool:
    """Whether a value is a Variable, where trees end."""
    return isinstance(value, Variable)


def make(definition: VariableDef, value: tp.Any) -> Variable[tp.Any]:
    """A Variable of a known definition at the present trace level.  For the engine only."""
    new = object.__new__(definition.type)
    _set_box(new, _boxed(definition, value))
    return new


def store_together(pairs: tp.Iterable[tuple[Box, tp.Any]]) -> None:
    """Replace the raw values of several boxes in one step; see `_together`."""
    run_together([(set_value, box, value) for box, value in pairs])


def note_raw(writes: Writes, variable: Variable[tp.Any], value: tp.Any) -> None:
    """Note that a Variable gets another raw value; a reference stays, and gets the content."""
    if variable._box.trace is not trace_state.value:
        variable._refuse_write()
    raw: tp.Any = variable._box.value
    content = value[...] if is_ref(value) and value is not raw else value
    if not (variable._box.definition.is_ref and is_ref(raw)):
        writes.add(set_value, variable._box, content)
    elif raw is not value:
        writes.add_foreign(operator.setitem, raw, ..., content)


def note_definition(writes: Writes, variable: Variable[tp.Any], new: VariableDef) -> None:
    """Note that a Variable gets other metadata."""
    box = variable._box
    if new is not box.definition:
        writes.add(_set_definition, box, new)
        writes.touch(box)


def versioned(node: tp.Any) -> tp.Any:
    """What carries the structural version of a node: the box of a Variable, else the node itself."""
    return node._box if isinstance(node, Variable) else node


def write_raw(variable: Variable[tp.Any], value: tp.Any) -> None:
    """Replace the raw value, as `note_raw` says."""
    writes = Writes()
    note_raw(writes, variable, value)
    writes.make()


def _empty(cls: type[V]) -> V:
    return object.__new__(cls)


def _running() -> str:
    return describe_trace(trace_state.value)


def _refuse_hijax(what: str) -> tp.NoReturn:
    raise ValueError(
        f"{what}(hijax=True) is not available: hijax Variables are an experiment of JAX. Use "
        "ref=True for a Variable that lives in a JAX array reference."
    )


def _new_ref_of(cls: type, value: tp.Any) -> tp.Any:
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        raise TypeError(
            f"{cls.__name__}(ref=True) holds its value in a JAX array reference, which takes an "
            f"array or a number, got {short_type(value)}."
        )
    return new_ref(jnp.asarray(value))


def _shown(name: str, value: tp.Any) -> bool:
    usual = EAGER_SHARDING.default if name == "eager_sharding" else False
    return name not in REQUIRED or value != usual


def _normal_entries(entries: dict[str, tp.Any]) -> dict[str, tp.Any]:
    """Metadata under its one spelling, `out_sharding`."""
    return {"out_sharding" if k in _SHARDING_NAMES else k: v for k, v in entries.items()}


def _normal(metadata: dict[str, tp.Any], ref: bool, eager_sharding: bool) -> dict[str, tp.Any]:
    required = {"hijax": False, "ref": ref, "eager_sharding": eager_sharding}
    return {**_normal_entries(metadata), **required} if metadata else required


def _replace_at(value: tp.Any, index: tp.Any, new: tp.Any) -> tp.Any:
    """`value` with the part at `index` replaced; never edits `value` itself.

    An array keeps shape and dtype; at `...`, any other value is replaced as a whole.
    """
    if index is Ellipsis and same_form(value, new):
        return new
    if isinstance(value, jax.Array):
        return value.at[index].set(new)
    if index is Ellipsis and not isinstance(value, np.ndarray):
        return new
    changed = copy_lib.copy(value)
    changed[index] = new
    return changed


# As a pytree a Variable is a node with one child, its raw value; the definition is static.

_VALUE_KEY = jax.tree_util.GetAttrKey("value")


def current_definition(box: Box) -> VariableDef:
    """The definition of a Variable, renewed where its metadata were edited in place."""
    definition = box.definition
    if definition.mutable:
        now = definition.current()
        if now is not definition:
            touch(box)  # before, too: what interrupts this must not leave a plan valid
            box.definition = now
            touch(box)
            return now
    return definition


def _private_side(box: Box) -> ByShared:
    return ByShared(current_definition(box).snapshot())


def _flatten(variable: Variable[tp.Any]) -> tuple[tuple[tp.Any], VariableDef | ByShared]:
    box = variable._box
    static = box.definition
    return (box.value,), static if static.public is None else _private_side(box)


def _flatten_with_keys(variable: Variable[tp.Any]) -> tuple[tuple[tp.Any], VariableDef | ByShared]:
    (value,), static = _flatten(variable)
    return ((_VALUE_KEY, value),), static


def _register(cls: type[Variable[tp.Any]]) -> None:
    cls._nnx_reads_plainly = cls.get_value is Variable.get_value
    cls._nnx_plain_def = define(cls, dict(_REQUIRED_DEFAULTS))

    def unflatten(
        definition: VariableDef | ByShared, children: tp.Iterable[tp.Any]
    ) -> Variable[tp.Any]:
        new = object.__new__(cls)
        (value,) = children
        if isinstance(definition, ByShared):
            definition = tp.cast(VariableDef, definition.item).for_variable()
        _set_box(new, _boxed(definition, value))
        return new

    jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, unflatten, _flatten)


_register(Variable)


class VarDefaultsContext:
    """What `var_defaults(...)` gives: leaving its `with` block brings the former defaults back.

    As a decorator it sets the defaults for each call of the function, and for nothing else.
    """

    def __init__(self, former: tuple[bool, ...], ref: bool | None) -> None:
        self._former = former
        self._ref = ref

    def __call__(self, fun: F) -> F:
        REF_VARIABLES.restore(self._former)

        @functools.wraps(fun)
        def wrapper(*args: tp.Any, **kwargs: tp.Any) -> tp.Any:
            with REF_VARIABLES.scope(REF_VARIABLES.given(self._ref)):
                return fun(*args, **kwargs)

        return tp.cast(F, wrapper)

    def __enter__(self) -> VarDefaults:
        return var_defaults()

    def __exit__(self, *exc: tp.Any) -> None:
        REF_VARIABLES.restore(self._former)


@tp.overload
def var_defaults() -> VarDefaults: ...


@tp.overload
def var_defaults(*, ref: bool, hijax: bool | None = None) -> VarDefaultsContext: ...


@tp.overload
def var_defaults(*, hijax: bool, ref: bool | None = None) -> VarDefaultsContext: ...


def var_defaults(
    *, hijax: bool | None = None, ref: bool | None = None
) -> VarDefaults | VarDefaultsContext:
    """Set the defaults of `Variable(ref=...)`, at once, for a `with` block or a function; or read them.

    They hold for the present context: other threads and tasks have their own.

    Args:
        hijax: accepted for compatibility; True raises ValueError.
        ref: the new default of `ref`.

    Returns:
        Without arguments the `VarDefaults` in force, otherwise a context manager, which is also a
        decorator.

    >>> import nnxlite as nnx
    >>> with nnx.var_defaults(ref=True):
    ...     v = nnx.Param(nnx.initializers.ones_init()(None, (2,)))
    >>> v.ref, nnx.var_defaults().ref
    (True, False)
    >>> @nnx.var_defaults(ref=True)
    ... def make():
    ...     return nnx.Param(1.0).ref
    >>> make(), nnx.var_defaults().ref
    (True, False)
    """
    if hijax is None and ref is None:
        return VarDefaults(ref=REF_VARIABLES.get())
    if hijax:
        _refuse_hijax("var_defaults")
    former = REF_VARIABLES.stack()
    if ref is not None:
        REF_VARIABLES.restore((*former[:-1], bool(ref)))
    return VarDefaultsContext(former, ref)
