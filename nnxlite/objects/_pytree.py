"""`Pytree`: objects whose attributes are data or static, and which JAX sees as pytrees.

An attribute's status is decided when it is first assigned, and stays: arrays, Variables, other graph
objects, and containers of any of these are data, everything else is static.
`data(...)` and `static(...)` set it explicitly, as do class annotations `Data[...]`/`Static[...]`
and dataclass fields.

Every object knows the trace in which it was made, and cannot be changed from another one.  Every
structural change moves the version of the object (`touch`), so that the engine's plans are never out
of date.  Rebinding an array attribute to another array is not a structural change.
"""

from __future__ import annotations

import abc
import copy as copy_lib
import dataclasses
import functools
import inspect
import types
import typing as tp

import jax

from nnxlite._base.errors import PYTREES, check_level, give_way, is_ours
from nnxlite._base.interning import Writes
from nnxlite._base.jax import trace_state
from nnxlite._base.outline import Shown
from nnxlite._base.text import Text, object_node
from nnxlite.graph._defs import (
    Assigned,
    Removed,
    adopt_unknown,
    define,
    fill_shell,
    new_shell,
    note_definition_of,
    own_status,
    set_definition,
    set_static,
)
from nnxlite.graph._kinds import GraphNode, Kind, has_data, is_data, is_static_part, kind_of, walk
from nnxlite.objects._fields import Tagged, declared_in, register
from nnxlite.reprlib import text_from
from nnxlite.variables._definition import MISSING

__all__ = ["Object", "Pytree", "check_pytree"]


class PytreeMeta(abc.ABCMeta):
    """Checks every new object after its `__init__`."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of `__init__`, for `inspect.signature` and `help`, which would show `__call__` below."""
        init: tp.Any = cls.__init__
        if init is object.__init__:
            return inspect.Signature()
        signature = inspect.signature(init)
        return signature.replace(parameters=[*signature.parameters.values()][1:])

    if not tp.TYPE_CHECKING:

        def __call__(cls, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
            make = functools.partial(_built, cls) if cls._nnx_frozen else super().__call__
            new = make(*args, **kwargs)
            if isinstance(new, GraphNode):
                check_object(new)
            return new


def check_object(node: tp.Any) -> None:
    """Compute the definition: decides the status of every attribute, and checks the static ones."""
    define(node, new=True)
    for name, value in node._nnx_dict.items():
        if type(value) in _CONTAINERS:
            _refuse_tags(node, name, value)


_SCALARS = frozenset({int, str, bool, float, type(None), type})
_EXACT = frozenset({int, str, bool, type})  # equal ones are interchangeable (0.0, -0.0 are not)
_CONTAINERS = frozenset({list, tuple, dict})
_WHOLE = frozenset({"__dict__", "__class__"})  # assigning to these replaces the whole object


def _filled(node: tp.Any) -> tp.Any:
    """An object that the `__new__` of another base makes; that may have assigned attributes."""
    if not hasattr(node, "_nnx_status"):
        fill_shell(node, None, trace_state.value)
    return node


def _noticed(method: tp.Callable[..., None]) -> tp.Callable[..., None]:
    """A method of the user's for writes, which may write around ours and so notify nobody."""

    @functools.wraps(method)
    def noticed(self: tp.Any, *args: tp.Any) -> None:
        known, before = _filled(self)._nnx_def, dict(self._nnx_dict)
        try:
            method(self, *args)
        finally:
            if known is not None and self._nnx_def is known and _has_changed(self, before):
                set_definition(self, None)

    noticed._nnx_notices = True  # type: ignore[attr-defined]
    return noticed


def _has_changed(node: tp.Any, before: dict[tp.Any, tp.Any]) -> bool:
    """Whether the structure of an object is another than with these attributes."""
    now, status = node._nnx_dict, node._nnx_status
    return now.keys() != before.keys() or any(
        now[name] is not value and not (status.get(name) and _keeps_structure(value, now[name]))
        for name, value in before.items()
    )


def _set_by_class(cls: type, name: str) -> bool:
    """Whether a descriptor of the class, such as a property, handles assignments to the name."""
    if getattr(cls, name, MISSING) is MISSING:  # nearly always; faster than the search below
        return False
    members = (base.__dict__[name] for base in cls.__mro__ if name in base.__dict__)
    return hasattr(next(members, None), "__set__")


def _refuse_tags(node: tp.Any, name: tp.Any, value: tp.Any) -> None:
    """Raise ValueError if `data(...)` or `static(...)` is inside a container."""
    for part in walk(value):
        if type(part) is Tagged:
            raise ValueError(
                f"Found unexpected tags on attribute '{type(node).__name__}.{name}': {part!r} is "
                f"inside a {type(value).__name__}. Values from nnx.data(...) and nnx.static(...) "
                "should be assigned to attributes directly, they should not be inside other structures."
            )


ModuleMeta = ObjectMeta = PytreeMeta  # other names of the reference


class Pytree(Shown, GraphNode, metaclass=PytreeMeta):
    """Base of objects whose attributes are data or static.

    Subclasses are JAX pytrees unless they are defined with `class Foo(Pytree, pytree=False)`.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> class Affine(nnx.Pytree):
    ...     def __init__(self, size):
    ...         self.size = size
    ...         self.shift = jnp.zeros(size)
    >>> jax.tree.map(lambda x: x + 1, Affine(2)).shift.tolist()
    [1.0, 1.0]
    """

    __slots__ = ()

    _nnx_is_pytree: tp.ClassVar[bool] = True
    _nnx_can_be_pytree: tp.ClassVar[bool] = True
    _nnx_declared: tp.ClassVar[dict[str, bool] | None] = None
    _nnx_following: tp.ClassVar[tp.Any] = None  # the `__new__` of a base behind this one
    _nnx_written: tp.ClassVar[bool] = False  # whether a frozen class has a hand-written `__init__`
    _nnx_key: tp.ClassVar[tp.Callable[[tp.Any], tp.Any]] = jax.tree_util.GetAttrKey

    def __new__(cls, *args: tp.Any, **kwargs: tp.Any) -> tp.Self:
        if cls._nnx_following is not None:
            return _filled(cls._nnx_following(cls, *args, **kwargs))
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments: it has no __init__.")
        return _empty(cls)

    def __init_subclass__(cls, *, pytree: bool | None = None, **kwargs: tp.Any) -> None:
        super().__init_subclass__(**kwargs)
        slots = cls.__dict__.get("__slots__", ())
        if slots:
            raise TypeError(
                f"Pytree does not support __slots__, found __slots__={slots!r} in "
                f"'{cls.__name__}'. The attributes of graph objects live in __dict__, where "
                "transforms can see them; remove __slots__."
            )
        if pytree and not cls._nnx_can_be_pytree:
            raise ValueError(
                "Object is not a pytree, but 'pytree' was explicitly set to True for type "
                f"{cls.__name__}. Derive it from Pytree or Module instead."
            )
        cls._nnx_is_pytree = cls._nnx_can_be_pytree and PYTREES.given(pytree)
        cls._nnx_declared = None
        following = super().__new__
        if following is not object.__new__:
            cls._nnx_following = following
        give_way(cls, Pytree, ("__copy__", "__delattr__", "__reduce_ex__"))
        for name in ("__setattr__", "__delattr__", "__setstate__"):
            method = getattr(cls, name)
            ours = is_ours(method) and cls._nnx_following is None
            if not ours and not hasattr(method, "_nnx_notices"):
                setattr(cls, name, _noticed(method))
        if cls._nnx_is_pytree:
            register(cls)

    # attributes ------------------------------------------------------------------------------

    if not tp.TYPE_CHECKING:

        def __setattr__(self, name: str, value: tp.Any) -> None:
            if name not in self._nnx_status:
                if name in _WHOLE:
                    self._nnx_renew(name, value)
                    return
                if _set_by_class(type(self), name):
                    object.__setattr__(self, name, value)
                    return
            self._nnx_assign(name, value)

        def __delattr__(self, name: str) -> None:
            if name in self._nnx_dict:
                self._nnx_discard(name)
            else:
                object.__delattr__(self, name)

    def _nnx_assign(self, name: tp.Any, value: tp.Any) -> None:
        """Assign an attribute; its status is decided now or known from before."""
        if trace_state.value is not self._nnx_trace:
            self._nnx_refuse(name)
        attributes: tp.Any = self._nnx_dict
        status = self._nnx_status
        known = status.get(name)
        value, is_data_now = self._nnx_decided(name, value, known if self._nnx_is_pytree else None)
        if known is is_data_now and name in attributes:
            old = attributes[name]
            if old is value:
                return
            if known:
                if _keeps_structure(old, value):
                    attributes[name] = value
                    return
            elif type(value) in _EXACT and type(old) is type(value) and old == value:
                return
            elif type(value) in _SCALARS and self._nnx_version:
                set_static(self, name, value)
                return
        is_new = known is not is_data_now
        if is_new and type(status) is not dict:
            status = own_status(self)
        if self._nnx_version:  # now, too: what interrupts the rest must leave no plan valid
            set_definition(self, None)
        attributes[name] = value
        if is_new:
            tp.cast(tp.Any, status)[name] = is_data_now
        _set_def(self, None)
        if self._nnx_version:
            set_definition(self, None)

    def _nnx_discard(self, name: tp.Any) -> None:
        """Remove an existing attribute."""
        writes = Writes()
        self._nnx_edit(writes, {}, (name,))
        writes.make()

    def _nnx_edit(self, writes: Writes, assigned: Assigned, removed: Removed = ()) -> None:
        """Note that attributes get other values or are added, and that others are removed."""
        if trace_state.value is not self._nnx_trace:
            self._nnx_refuse(next(iter((*assigned, *removed)), "items"))
        attributes: tp.Any = self._nnx_dict
        status, structural = own_status(self), bool(removed)
        for name in removed:
            writes.add(attributes.pop, name, None)
            writes.add(status.pop, name, None)
        for name, value in assigned.items():
            known, old = status.get(name), attributes.get(name, MISSING)
            value, is_data_now = self._nnx_decided(name, value, known)
            if known is is_data_now and old is value:
                continue
            if known is not is_data_now:
                writes.add(status.__setitem__, name, is_data_now)
            writes.add(attributes.__setitem__, name, value)
            structural |= not (known and is_data_now and _keeps_structure(old, value))
        if structural:
            note_definition_of(writes, self, None)

    def _nnx_renew(
        self, name: str, value: tp.Any, status: dict[tp.Any, bool] | None = None
    ) -> None:
        """Replace `__dict__` or the class, and decide all statuses again where they are not given."""
        if trace_state.value is not self._nnx_trace:
            self._nnx_refuse(name)
        try:
            object.__setattr__(self, name, value)
            _set_status(self, {} if status is None else status)
            if status is None:
                adopt_unknown(self)
        finally:
            set_definition(self, None)

    def _nnx_decided(
        self, name: tp.Any, value: tp.Any, known: bool | None = None
    ) -> tuple[tp.Any, bool]:
        """A value without its mark, and the status of an attribute that gets it, whose own is `known`.

        Raises ValueError for a value that it cannot get: data where it is static, or marks inside.
        """
        if type(value) is Tagged:
            value, known = value.value, value.is_data if self._nnx_is_pytree else None
            if known is False and has_data(value):
                raise ValueError(
                    f"Found data in value of type '{type(value).__name__}' annotated with "
                    f"nnx.static(...) when setting attribute {name!r} of Pytree type "
                    f"'{type(self).__name__}': arrays, Variables or objects. Assign it without "
                    "nnx.static, or wrap it with nnx.data(...)."
                )
        if known is None:
            declares = self._nnx_declares()
            if type(value) in _SCALARS and not (declares or self._nnx_frozen):
                return value, False
            known = declares.get(name)
            if known is None:
                if self._nnx_frozen:  # functions and text are static, in containers too
                    return value, not is_static_part(value)
                if is_data(value):
                    return value, True
                if kind_of(value) == Kind.OTHER:
                    return value, False
        if type(value) in _CONTAINERS:
            _refuse_tags(self, name, value)
        if known is None:
            known = has_data(value) or not self._nnx_is_pytree
        elif not known and type(value) not in _SCALARS and has_data(value):
            kind = type(value).__name__
            what = (
                f"Found data on value of type '{kind}' assigned"
                if type(value) in _CONTAINERS
                else f"Cannot assign data value of type '{kind}'"
            )
            raise ValueError(
                f"{what} to static attribute {name!r} of Pytree type '{type(self).__name__}'. The "
                "status of an attribute is decided at its first assignment. To make it data write: "
                f"self.{name} = nnx.data(...)"
            )
        return value, known

    @classmethod
    def _nnx_declares(cls) -> dict[str, bool]:
        """The statuses declared by annotations and dataclass fields."""
        declared = cls.__dict__.get("_nnx_declared")
        if declared is None:  # computed with the first instance, after class decorators have run
            declared = cls._nnx_declared = declared_in(cls) if cls._nnx_is_pytree else {}
        return declared

    def _nnx_refuse(self, name: tp.Any) -> None:
        check_level(self, self._nnx_trace, str(name))

    # copies ----------------------------------------------------------------------------------

    def __copy__(self) -> tp.Self:
        new = _empty(type(self))
        if leaves := getattr(self, "_nnx_leaves", None):
            _set_leaves(new, leaves)
        _set_status(new, dict(self._nnx_status))
        _set_dict(new, dict(self._nnx_dict))
        return new

    def __deepcopy__(self, memo: dict[int, tp.Any]) -> tp.Self:
        memo[id(self)] = new = tp.cast(tp.Self, Pytree.__copy__(self))
        _set_dict(new, {k: copy_lib.deepcopy(v, memo) for k, v in self._nnx_dict.items()})
        return new

    def __reduce_ex__(self, protocol: tp.SupportsIndex) -> tp.Any:
        if type(self).__reduce__ is not object.__reduce__:  # the user's own way
            return self.__reduce__()
        return _empty, (type(self),), self.__getstate__()

    def __getstate__(self) -> tp.Any:
        return {**self._nnx_dict, _STATUS: dict(self._nnx_status)}

    def __setstate__(self, state: tp.Any) -> None:
        """Replace all attributes by those of a state that `__getstate__` returned."""
        attributes = dict(state)
        status = attributes.pop(_STATUS, {})  # a subclass may leave the statuses out
        self._nnx_renew("__dict__", attributes, dict(status))

    # text ------------------------------------------------------------------------------------

    def __nnx_text__(self) -> Text:
        parts = getattr(type(self), "__nnx_repr__", None)  # see `nnx.reprlib`
        return object_node(type(self), self._nnx_dict) if parts is None else text_from(parts(self))


class Object(Pytree, pytree=False):
    """A graph object that is not a JAX pytree; its attributes are not checked.

    >>> import nnxlite as nnx
    >>> class Table(nnx.Object):
    ...     def __init__(self):
    ...         self.rows = [nnx.Param(1.0)]
    >>> len(nnx.to_flat_state(nnx.state(Table())))
    1
    """

    __slots__ = ()

    _nnx_can_be_pytree = False


_set_dict = GraphNode.__dict__["__dict__"].__set__
_set_def = GraphNode.__dict__["_nnx_def"].__set__
_set_leaves = GraphNode.__dict__["_nnx_leaves"].__set__
_set_status = GraphNode.__dict__["_nnx_status"].__set__


def _keeps_structure(old: tp.Any, new: tp.Any) -> bool:
    """Whether the structure stays the same where one data value takes the place of another."""
    if old is None or new is None:
        return False
    kinds = kind_of(old), kind_of(new)
    return kinds == (Kind.ARRAY, Kind.ARRAY) or (
        kinds[1] == Kind.OTHER and kinds[0] in (Kind.OTHER, Kind.ARRAY)
    )


_STATUS = "_nnx_status"  # the key of the statuses in the pickled state


def _empty(cls: type[tp.Any]) -> tp.Any:
    return new_shell(cls, None, trace_state.value)


def check_pytree(pytree: tp.Any) -> None:
    """Run the checks made after `__init__` again.

    Args:
        pytree: an object.

    Raises:
        ValueError: if a static attribute contains data or `data`/`static` marks are nested.
        TypeError: for anything but a `Pytree`.

    >>> import nnxlite as nnx
    >>> nnx.check_pytree(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    """
    if not isinstance(pytree, Pytree):
        raise TypeError(f"check_pytree: Expected a Pytree, got {type(pytree).__name__}.")
    check_object(pytree)


# Frozen modules --------------------------------------------------------------------------------

_building: set[int] = set()
"""The frozen objects whose `__init__` runs, by their ids: these can be assigned to."""


class BoundMethod:
    """A method bound to a module: callable, and a pytree with the module's leaves."""

    __slots__ = ("__func__", "__self__", "__weakref__")

    def __init__(self, func: tp.Any, instance: tp.Any) -> None:
        self.__func__ = func
        self.__self__ = instance

    def __call__(self, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __eq__(self, other: tp.Any) -> bool:
        return (
            type(other) is BoundMethod
            and self.__func__ is other.__func__
            and self.__self__ is other.__self__
        )

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))

    def __getattr__(self, name: str) -> tp.Any:
        if name in BoundMethod.__slots__:  # not assigned yet
            raise AttributeError(name)
        if name == "__signature__":  # without `self`, as for every method
            return inspect.signature(types.MethodType(self.__func__, self.__self__))
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<bound method {self.__func__.__qualname__} of {self.__self__!r}>"

    def __reduce__(self) -> tp.Any:
        return getattr, (self.__self__, self.__func__.__name__)


jax.tree_util.register_pytree_with_keys(
    BoundMethod,
    lambda method: (((jax.tree_util.GetAttrKey("__self__"), method.__self__),), method.__func__),
    lambda func, children: BoundMethod(func, *children),
)


class _Method:
    """A function in a frozen class: reading it from an instance returns a `BoundMethod`."""

    def __init__(self, func: types.FunctionType) -> None:
        functools.update_wrapper(tp.cast(tp.Any, self), func)
        self.func = func

    def __get__(self, instance: tp.Any, owner: tp.Any = None) -> tp.Any:
        return self.func if instance is None else BoundMethod(self.func, instance)


def freeze_class(cls: type[Pytree]) -> None:
    """Make a class frozen, when it is being defined."""
    cls._nnx_written = cls._nnx_written or "__init__" in cls.__dict__
    dataclasses.dataclass(init=not cls._nnx_written, repr=False, eq=False)(cls)
    cls._nnx_declared = declared_in(cls)
    cls._nnx_assign = _assign
    cls._nnx_edit = _edit
    cls._nnx_closed = property(lambda node: id(node) not in _building)  # pyright: ignore[reportAttributeAccessIssue]
    cls._nnx_replaced = _replaced
    for name, value in list(cls.__dict__.items()):
        is_special = name.startswith("_nnx_") or (name.startswith("__") and name.endswith("__"))
        if isinstance(value, types.FunctionType) and not is_special:
            setattr(cls, name, _Method(value))


def _built(cls: tp.Any, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
    """A new object, which is immutable once its `__init__` has ended."""
    new = cls.__new__(cls, *args, **kwargs)
    if not isinstance(new, cls):
        return new
    _building.add(id(new))
    try:
        new.__init__(*args, **kwargs)
        _complete(new)
    finally:
        _building.discard(id(new))
    return new


def _complete(node: tp.Any) -> None:
    """Assign defaults and apply converters, at the end of `__init__`.

    Raises TypeError for a field without a value.
    """
    missing = []
    for declared in dataclasses.fields(node):
        name = declared.name
        if name not in node._nnx_dict:
            if declared.default is not dataclasses.MISSING:
                node._nnx_assign(name, declared.default)
            elif declared.default_factory is not dataclasses.MISSING:
                node._nnx_assign(name, declared.default_factory())
            else:
                missing.append(name)
                continue
        converter = declared.metadata.get("converter")
        if converter is not None:
            node._nnx_assign(name, converter(node._nnx_dict[name]))
    if missing:
        raise TypeError(
            f"{type(node).__name__}: __init__ ended without a value for the fields {missing}. "
            "Every field of a frozen module must be assigned by then."
        )


def _check_open(node: tp.Any, name: tp.Any) -> None:
    if id(node) not in _building:
        raise dataclasses.FrozenInstanceError(
            f"cannot assign to field {name!r}: {type(node).__name__} is a frozen module. Make a "
            f"changed copy: nnx.tree_at(lambda m: m.{name}, module, new_value)."
        )


def _assign(self: tp.Any, name: tp.Any, value: tp.Any) -> None:
    _check_open(self, name)
    if name not in self.__dataclass_fields__:
        raise AttributeError(
            f"{type(self).__name__} has no field {name!r}. Declare every attribute of a frozen "
            f"module in the class body, such as `{name}: jax.Array`."
        )
    # As when it is new: a converter may give a value of another kind.
    Pytree._nnx_assign(self, name, Tagged(*self._nnx_decided(name, value)))


def _replaced(self: tp.Any, assigned: Assigned) -> tp.Any:
    """A copy with other values of some fields."""
    new, writes = self.__copy__(), Writes()
    Pytree._nnx_edit(new, writes, assigned)
    writes.make()
    return new


def _edit(self: tp.Any, writes: Writes, assigned: Assigned, removed: Removed = ()) -> None:
    _check_open(self, next(iter((*assigned, *removed))))
    Pytree._nnx_edit(self, writes, assigned, removed)


INITIALIZING = "_pytree__initializing"
"""Name of an attribute that objects have while `lazy_init` runs; wrapped modules of Linen read it."""


def set_initializing(node: Pytree, value: bool) -> None:
    """Give an object this attribute, or take it away."""
    if value:
        Pytree.__setattr__(node, INITIALIZING, True)
    elif INITIALIZING in vars(node):
        Pytree.__delattr__(node, INITIALIZING)
