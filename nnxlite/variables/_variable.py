"""`Variable`: a mutable box for one value, with metadata; the leaf of every object graph.

A Variable is a value and a `VariableDef` (class and metadata, interned where it can be).  It records
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
import operator
import types
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import EAGER_SHARDING, REF_VARIABLES, give_way, short_type
from nnxlite._base.interning import ByShared, Writes, run_together, touch
from nnxlite._base.jax import is_ref, trace_state
from nnxlite._base.outline import Shown
from nnxlite._base.text import Text, variable_node
from nnxlite.variables._definition import (
    FROZEN,
    MISSING,
    PLACEMENT,
    REQUIRED,
    Box,
    HasMetadata,
    VariableDef,
    VariableMetadata,
    as_stored,
    boxed,
    current_definition,
    define,
    normal,
    normal_entries,
    place,
    redefine,
    refuse_hijax,
    set_definition,
    set_value,
)
from nnxlite.variables._operators import ArrayOperators, replace_at

__all__ = ["Variable"]

T = tp.TypeVar("T")
V = tp.TypeVar("V", bound="Variable[tp.Any]")


_ARRAY_PROTOCOLS = frozenset(  # what other libraries ask an array for, and its value answers
    ("__array_namespace__", "__cuda_array_interface__", "__dlpack__", "__dlpack_device__")
)


class Variable(Shown, HasMetadata, ArrayOperators[T]):
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
            refuse_hijax(type(self).__name__)
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
            definition = define(type(self), normal(metadata, ref, eager_sharding))
        else:
            definition = type(self)._nnx_plain_def
        box = boxed(definition, raw)
        _set_box(self, box)
        for hook in definition.create_hooks:
            raw = hook(self, raw)
        raw = self.create_value(raw)
        if metadata and definition.metadata.get("out_sharding") is not None:
            raw = place(raw, definition.metadata)
        box.value = as_stored(definition, raw, copy=False) if ref else raw

    def __init_subclass__(cls, **kwargs: tp.Any) -> None:
        super().__init_subclass__(**kwargs)
        give_way(cls, Variable, ("__copy__", "__deepcopy__", "__format__", "__reduce_ex__"))
        _register(cls)

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
        value: tp.Any = self._box.value
        definition, whole = self._box.definition, index is MISSING or index is Ellipsis
        if not definition.plain_read:
            if definition.is_ref and is_ref(value):
                if not (whole or definition.get_hooks):
                    return value[index]
                value = value[...]
            for hook in definition.get_hooks:
                value = hook(self, value)
        return value if whole else value[index]

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
        box, new = self._box, tp.cast(tp.Any, value)
        into_ref = box.definition.is_ref and is_ref(box.value)
        if trace_state.value is not box.trace and not (into_ref and not is_ref(new)):
            self._check_level()  # JAX lets every transform write into a reference
        if isinstance(new, Variable):
            new = new.get_value()
        for hook in box.definition.set_hooks:
            new = hook(self, new)
        if into_ref and not is_ref(new):
            self._write_ref(new, index)
        elif index is MISSING or into_ref:
            box.value = new
        else:
            box.value = replace_at(box.value, index, new)

    def _write_ref(self, new: tp.Any, index: tp.Any) -> None:
        ref: tp.Any = self._box.value
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
        if not _unsafe_bypass_check:
            self._check_level()
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

    @property
    def type(self) -> type[tp.Self]:
        """The Variable's class."""
        return type(self)

    var_type = type

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
        box = self._box
        return tp.cast(tp.Any, self.get_value() if box.definition.get_hooks else box.value).shape

    def _become(self, kind: type[Variable[tp.Any]]) -> None:
        """Change the class: the definition names it."""
        self._check_level("__class__")
        definition = define(kind, self._box.definition.metadata)
        touch(self._box)
        object.__setattr__(self, "__class__", kind)
        redefine(self._box, definition)

    def __getattr__(self, name: str) -> tp.Any:
        lacks = f"'{type(self).__name__}' object has no attribute"
        if name.startswith("__") and name.endswith("__") and name not in _ARRAY_PROTOCOLS:
            raise AttributeError(f"{lacks} {name!r}")
        try:
            box = _get_box(self)
        except AttributeError:  # an instance not yet filled
            raise AttributeError(f"{lacks} {name!r}") from None
        definition, value = box.definition, box.value
        if name in definition.metadata:
            return definition.metadata[name]
        try:
            return getattr(value if definition.plain_read else self.get_value(), name)
        except AttributeError:
            raise AttributeError(
                f"{lacks} {name!r}: neither its metadata nor its value of type "
                f"'{type(value).__name__}' has it"
            ) from None

    def __setattr__(self, name: str, value: tp.Any) -> None:
        member = getattr(type(self), name, None)
        if name == "__class__":
            self._become(value)
            return
        if member is not None and not (isinstance(member, property) and member.fset is None):
            object.__setattr__(self, name, value)
            return
        self._check_level(name)
        raise AttributeError(
            f"Cannot set attribute {name} of {type(self).__name__}. To set Variable metadata use "
            f"`variable.set_metadata({name}=...)`; to write the value, `variable.value = ...`."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            f"Cannot delete attribute {name} of {type(self).__name__}. To delete Variable metadata use "
            f"`variable.del_metadata({name!r})`."
        )

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
                refuse_hijax(f"{type(self).__name__}.replace")
            definition = define(type(self), {**definition.metadata, **normal_entries(updates)})
        return tp.cast(tp.Self, make(definition, as_stored(definition, raw, copy=_copy_ref)))

    copy = to_state = replace

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
        own, theirs = self._box.definition.current(), other._box.definition.current()
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
        elif is_ref(self._box.value):  # which others may have as well
            new._box.value = memo.setdefault(id(self._box.value), new._box.value)
        return new

    def __getstate__(self) -> tp.Any:
        value: tp.Any = self._box.value
        return {
            "value": value[...] if is_ref(value) else value,
            "metadata": self._box.definition.metadata,
        }

    def __setstate__(self, state: tp.Any) -> None:
        """Replace the value and the metadata by those of a state that `__getstate__` returned."""
        definition = define(type(self), state["metadata"])
        value = as_stored(definition, state["value"])
        try:
            box = _get_box(self)
        except AttributeError:  # a new Variable, as it is unpickled
            _set_box(self, boxed(definition, value))
            return
        self._check_level("__setstate__")
        touch(box)
        box.value = value
        redefine(box, definition)

    def __reduce_ex__(self, protocol: tp.SupportsIndex) -> tp.Any:
        if type(self).__reduce__ is not object.__reduce__:  # the user's own way
            return self.__reduce__()
        return _empty, (type(self),), self.__getstate__()

    def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        """Call the value.

        Args:
            args, kwargs: arguments of the value.
        """
        return tp.cast(tp.Any, self.get_value())(*args, **kwargs)

    __str__ = Shown.__repr__  # it is short

    def __nnx_text__(self) -> Text:
        value: tp.Any = self._box.value
        usual = {**REQUIRED, "eager_sharding": EAGER_SHARDING.default}
        metadata = self._box.definition.metadata
        shown = {k: v for k, v in metadata.items() if k not in usual or v != usual[k]}
        return variable_node(type(self), value[...] if is_ref(value) else value, shown)


_get_box = Variable.__dict__["_box"].__get__
_set_box = Variable.__dict__["_box"].__set__

_KEPT = ("hijax", "ref", FROZEN, PLACEMENT)
"""Metadata that a Variable keeps when it takes over that of another."""


def is_variable(value: tp.Any) -> bool:
    """Whether a value is a Variable, where trees end."""
    return isinstance(value, Variable)


def make(definition: VariableDef, value: tp.Any) -> Variable[tp.Any]:
    """A Variable of a known definition at the present trace level.  For the engine only."""
    new = object.__new__(definition.type)
    _set_box(new, boxed(definition, value))
    return new


def store_together(pairs: tp.Iterable[tuple[Box, tp.Any]]) -> None:
    """Replace the raw values of several boxes in one step; see `Writes`."""
    run_together([(set_value, box, value) for box, value in pairs])


def note_raw(writes: Writes, variable: Variable[tp.Any], value: tp.Any) -> None:
    """Note that a Variable gets another raw value; a reference stays, and gets the content."""
    variable._check_level()
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
        writes.add(set_definition, box, new)
        writes.touch(box)


def versioned(node: tp.Any) -> tp.Any:
    """What carries the structural version of a node: the box of a Variable, else the node itself."""
    return node._box if isinstance(node, Variable) else node


def _empty(cls: type[V]) -> V:
    """A Variable that `__setstate__` fills, the user's own one perhaps: it has no metadata yet."""
    return object.__new__(cls)


_VALUE_KEY = jax.tree_util.GetAttrKey("value")  # as a pytree a Variable has one child


def _flatten(variable: Variable[tp.Any]) -> tuple[tuple[tp.Any], VariableDef | ByShared]:
    box = variable._box
    static: tp.Any = box.definition
    if static.public is not None:
        static = ByShared(current_definition(box).for_variable())
    return (box.value,), static


def _flatten_with_keys(variable: Variable[tp.Any]) -> tuple[tuple[tp.Any], VariableDef | ByShared]:
    (value,), static = _flatten(variable)
    return ((_VALUE_KEY, value),), static


def _register(cls: type[Variable[tp.Any]]) -> None:
    cls._nnx_reads_plainly = cls.get_value is Variable.get_value
    cls._nnx_plain_def = define(cls, dict(REQUIRED))

    def unflatten(
        definition: VariableDef | ByShared, children: tp.Iterable[tp.Any]
    ) -> Variable[tp.Any]:
        new = object.__new__(cls)
        (value,) = children
        if isinstance(definition, ByShared):
            definition = tp.cast(VariableDef, definition.item).for_variable()
        _set_box(new, boxed(definition, value))
        return new

    jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, unflatten, _flatten)


_register(Variable)
