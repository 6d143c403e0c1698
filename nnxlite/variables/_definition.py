"""What a Variable contains: its static half (class and metadata), and the box with its value.

A Variable is a value plus a `VariableDef`.  Definitions with equal content are one object, so that
comparing, hashing and caching them is comparing identities; a definition also knows in advance
whether reading or writing needs anything beyond touching the value (hooks, references).

Metadata that may be edited, or are equal without being interchangeable (a list, a settings object, a
hook that is defined again), stay with their Variable, whose definition is then private; see
`_base/interning.py`.

Array references, JAX's own `Ref`, can be written in place and shared.  One may be wherever an array may:
in an attribute, in a plain container, inside a Variable (`ref=True`).  Two places that hold one
reference share its content, inside transforms too.
"""

from __future__ import annotations

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.config import REF_VARIABLES, switch
from nnxlite._base.errors import short_type
from nnxlite._base.interning import ELSEWHERE, Definition, Table, touch
from nnxlite._base.jax import Ref, TraceRef, is_ref, new_ref, trace_state
from nnxlite._base.statics import alike, facts, own_copy

if tp.TYPE_CHECKING:
    from nnxlite.variables._variable import Variable


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
    """Class and metadata of a Variable; what a `GraphDef` keeps of it.

    Equal definitions are the same object, unless they are private.

    Attributes:
        own: names of the entries that stay with the Variable.
        copied: whether one of them contains a builtin container, of which each Variable has its own.
        mutable: whether one of them may be edited in place.
    """

    __slots__ = (
        "copied",
        "create_hooks",
        "get_hooks",
        "is_ref",
        "metadata",
        "mutable",
        "own",
        "plain_read",
        "set_hooks",
        "type",
    )

    def __init__(
        self,
        type_: type[Variable],
        metadata: dict[str, tp.Any],
        key: tp.Any,
        own: tuple[str, ...] = (),
        mutable: bool = False,
        public: VariableDef | None = None,
    ) -> None:
        super().__init__(key, public, [metadata[name] for name in own])
        self.type = type_
        self.metadata = metadata
        self.own = own
        self.mutable = mutable
        self.copied = any(own_copy(metadata[name]) is not metadata[name] for name in own)
        self.is_ref = bool(metadata.get("ref", False))
        self.create_hooks = self.hooks("on_create_value")
        self.get_hooks = self.hooks("on_get_value")
        self.set_hooks = self.hooks("on_set_value")
        self.plain_read = not self.get_hooks and not self.is_ref and type_._nnx_reads_plainly

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
        return self.mapped(own_copy) if self.copied else self

    def mapped(self, change: tp.Callable[[tp.Any], tp.Any]) -> VariableDef:
        """The definition with each entry of its own replaced by an equal one."""
        return self._with({name: change(self.metadata[name]) for name in self.own})

    def keeping(self, before: VariableDef) -> VariableDef:
        """This definition with the entries of an earlier one that are equal to its own."""
        mine, theirs = self.metadata, before.metadata
        both = [name for name in self.own if name in before.own]
        same = [n for n in both if facts(mine[n]).key == facts(theirs[n]).key]
        return self._with({name: theirs[name] for name in same})

    def _with(self, own: dict[str, tp.Any]) -> VariableDef:
        if not own:
            return self
        metadata = {**self.metadata, **own}
        return VariableDef(self.type, metadata, self.key, self.own, self.mutable, self.public)

    def __repr__(self) -> str:
        shown = "".join(f", {k}={v!r}" for k, v in self.metadata.items() if k not in REQUIRED)
        return f"VariableDef({self.type.__name__}{shown})"

    def __reduce__(self) -> tp.Any:
        return define, (self.type, self.metadata)


_interned: Table[VariableDef] = Table("key")


def define(type_: type[Variable], metadata: dict[str, tp.Any]) -> VariableDef:
    """The definition for a class and metadata (the dict is adopted; do not change it later)."""
    names = sorted(metadata, key=str)
    every = [facts(metadata[name]) for name in names]
    key = (type_, *names, *[part.key for part in every])
    own = tuple([name for name, part in zip(names, every) if not part.exact])
    shared = _interned.find(key)
    if shared is None:
        kept = {**metadata, **dict.fromkeys(own, ELSEWHERE)} if own else metadata
        shared = _interned.add(key, VariableDef(type_, kept, key))
    if not own:
        return shared
    mutable = any(part.mutable for part in every)
    return VariableDef(type_, metadata, key, own, mutable, shared)


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


# Array references ------------------------------------------------------------------------------


ArrayRef = Ref
"""The class of array references; `isinstance(x, ArrayRef)` is true for traced ones as well."""


def array_ref(value: tp.Any) -> tp.Any:
    """A fresh array reference with the content of an array or a number.

    Reading and writing go through indexing: `ref[...]`, `ref[0] = 1.0`.

    Args:
        value: an array or a number.

    Returns:
        A reference of the same shape and dtype.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> ref = nnx.array_ref(jnp.zeros(2))
    >>> ref[0] = 1.0
    >>> ref[...]
    Array([1., 0.], dtype=float32)
    """
    return new_ref(jnp.asarray(value))


def is_array_ref(value: tp.Any) -> bool:
    """Whether a value is an array reference.

    Args:
        value: anything.

    Returns:
        A bool.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.is_array_ref(nnx.array_ref(1.0)), nnx.is_array_ref(jnp.array(1.0))
    (True, False)
    """
    return is_ref(value)


def held_by(definition: VariableDef, value: tp.Any, *, copy: bool = True) -> tp.Any:
    """A value as a Variable of this definition contains it: in a reference of its own, or bare.

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
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, int, float, complex)):
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


class VarDefaultsContext(switch):
    """What `var_defaults(...)` gives: leaving its `with` block brings the former defaults back.

    As a decorator it sets the defaults for each call of the function, and for nothing else.
    """

    _setting = REF_VARIABLES

    def __enter__(self) -> VarDefaults:
        super().__enter__()
        return var_defaults()


@tp.overload
def var_defaults() -> VarDefaults: ...  # pyright: ignore[reportOverlappingOverload]
@tp.overload
def var_defaults(*, hijax: bool | None = ..., ref: bool | None = ...) -> VarDefaultsContext: ...
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
        refuse_hijax("var_defaults")
    return VarDefaultsContext(bool(REF_VARIABLES.given(ref)))
