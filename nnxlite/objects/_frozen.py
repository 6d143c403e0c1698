"""Frozen modules: immutable, with dataclass fields, and with bound methods that are pytrees.

`class Layer(nnx.Module, frozen=True)` declares its attributes as annotations, as a dataclass does.
Arrays, Variables, graph objects and numbers are leaves, in containers as well, unless the field is
marked `field(static=True)`.  Functions, text and other objects are static wherever they stand; `tree_at`
can replace them.  `__init__` is generated if the class does not define its own.  After it nothing can be
assigned: `tree_at` makes a changed copy.

Only the attributes are frozen.  A Variable in a frozen module can still be written.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing as tp

import jax

from nnxlite._base.interning import Writes
from nnxlite.graph._traverse import Assigned, Names
from nnxlite.objects._fields import Tagged, declared_in
from nnxlite.objects._pytree import Pytree

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


def freeze(cls: type[Pytree]) -> None:
    """Make a class frozen, when it is being defined."""
    cls._nnx_written = cls._nnx_written or "__init__" in cls.__dict__
    dataclasses.dataclass(init=not cls._nnx_written, repr=False, eq=False)(cls)
    cls._nnx_declared = declared_in(cls)
    cls._nnx_built = classmethod(_built)
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


def _edit(self: tp.Any, writes: Writes, assigned: Assigned, removed: Names = ()) -> None:
    _check_open(self, next(iter((*assigned, *removed))))
    Pytree._nnx_edit(self, writes, assigned, removed)
