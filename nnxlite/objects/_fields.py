"""What a class or an assignment says of the status of attributes: data or static.

`data(...)` and `static(...)`, around a value or as fields of a dataclass; the annotations `Data[...]`
and `Static[...]`; `dataclass`, and `field` for the fields of frozen modules.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing as tp

from nnxlite._base.jax import own_annotations
from nnxlite.graph._kinds import mark_static
from nnxlite.variables._definition import MISSING

T = tp.TypeVar("T")
_MISSING: tp.Any = MISSING

if tp.TYPE_CHECKING:
    Data = tp.Annotated[T, "data"]
    Static = tp.Annotated[T, "static"]
else:

    class _Mark:
        """A class annotation for the status of an attribute: `Data[list]`, `Static[tuple]`.

        >>> import nnxlite as nnx, jax
        >>> class Scaled(nnx.Pytree):
        ...     factor: nnx.Data[float]
        ...     def __init__(self):
        ...         self.factor = 3.0
        >>> jax.tree.leaves(Scaled())
        [3.0]
        """

        def __init__(self, status: bool) -> None:
            self.status = status
            self.__name__ = "Data" if status else "Static"

        def __getitem__(self, item: tp.Any) -> tp.Any:
            return tp.Annotated[item, self]

        def __call__(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
            raise TypeError(f"{self.__name__} is for annotations: `name: {self.__name__}[type]`.")

        def __repr__(self) -> str:
            return self.__name__

    Data = _Mark(True)
    Static = _Mark(False)


class Tagged:
    """A value with the status that its attribute is to have."""

    __slots__ = ("is_data", "value")

    def __init__(self, value: tp.Any, is_data: bool) -> None:
        self.value = value
        self.is_data = is_data

    def __repr__(self) -> str:
        return f"{'data' if self.is_data else 'static'}({self.value!r})"


def data(value: T = _MISSING, /, **kwargs: tp.Any) -> T:
    """Make an attribute data: `self.x = nnx.data(3.0)`; as a field, `x: int = nnx.data()`.

    Args:
        value: the value to assign; without it the result is a dataclass field specifier.
        kwargs: arguments of `dataclasses.field`, for the field form.

    Returns:
        The value, marked; or a dataclass field.

    >>> import nnxlite as nnx, jax
    >>> class Scaled(nnx.Pytree):
    ...     def __init__(self):
    ...         self.factor = nnx.data(3.0)
    >>> jax.tree.leaves(Scaled())
    [3.0]
    """
    return _tag(value, True, kwargs)


def static(value: T = _MISSING, /, **kwargs: tp.Any) -> T:
    """Make an attribute static, asserting that it has no data in it; or a static dataclass field.

    Assigning raises ValueError if the value contains arrays, Variables or graph objects.

    Args:
        value: the value to assign; without it the result is a dataclass field specifier.
        kwargs: arguments of `dataclasses.field`, for the field form.

    Returns:
        The value, marked; or a dataclass field.

    >>> import nnxlite as nnx, jax
    >>> class Named(nnx.Pytree):
    ...     def __init__(self, name):
    ...         self.name = nnx.static(name)
    >>> jax.tree.leaves(Named("head"))
    []
    """
    if value is not MISSING:
        mark_static(value)
    return _tag(value, False, kwargs)


def _tag(value: tp.Any, status: bool, kwargs: dict[str, tp.Any]) -> tp.Any:
    if value is not MISSING:
        if kwargs:
            name = "data" if status else "static"
            raise TypeError(
                f"nnx.{name}() accepts either a single positional argument or keyword arguments, "
                f"but not both; got also {sorted(kwargs)}. As a dataclass field write "
                f"{name}(default=value, ...)."
            )
        if not isinstance(value, Tagged):
            return Tagged(value, status)
        if value.is_data is not status:
            raise ValueError(
                "Found unexpected tags: nnx.data(...) and nnx.static(...) exclude each other, got both "
                f"around a value of type '{type(value.value).__name__}'."
            )
        return value
    metadata = {**(kwargs.pop("metadata", None) or {}), "static": not status}
    return dataclasses.field(**kwargs, metadata=metadata)


def field(
    *,
    converter: tp.Callable[[tp.Any], tp.Any] | None = None,
    static: bool = False,
    **kwargs: tp.Any,
) -> tp.Any:
    """A field of a frozen module.

    Args:
        converter: called with the value assigned in `__init__`; its result becomes the field.
        static: the field is part of the structure, not a leaf; it must be hashable.
        kwargs: as for `dataclasses.field`.

    Returns:
        A field, to be assigned in the class body.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> class Scale(nnx.Module, frozen=True):
    ...     factor: jax.Array = nnx.field(converter=jnp.asarray)
    ...     name: str = nnx.field(static=True, default="scale")
    >>> jax.tree.leaves(Scale(2.0))
    [Array(2., dtype=float32, weak_type=True)]
    """
    metadata = dict(kwargs.pop("metadata", None) or {})
    if static:
        metadata["static"] = True
    if converter is not None:
        metadata["converter"] = converter
    return dataclasses.field(metadata=metadata, **kwargs)


_DECLARATION = re.compile(r"\s*(?:\w+\.)*(Data|Static)\s*\[")


def declared_in(cls: type) -> dict[str, bool]:
    """Statuses declared by annotations and fields in class bodies; those of subclasses override."""
    out: dict[str, bool] = {}
    for base in reversed(cls.__mro__):
        for name, annotation in own_annotations(base).items():
            if isinstance(annotation, str):
                if match := _DECLARATION.match(annotation):
                    out[name] = match.group(1) == "Data"
            else:
                for mark in getattr(annotation, "__metadata__", ()):
                    if mark is Data or mark is Static:
                        out[name] = mark is Data
        fields = base.__dict__.get("__dataclass_fields__", {}).values()
        for name, value in [*((f.name, f) for f in fields), *base.__dict__.items()]:
            if isinstance(value, dataclasses.Field) and "static" in value.metadata:
                out[name] = not value.metadata["static"]
            elif type(value) is Tagged:  # a default value
                out[name] = value.is_data
    return out


@tp.dataclass_transform(field_specifiers=(data, static, dataclasses.field))
def dataclass(
    cls: tp.Any = None,
    /,
    *,
    init: bool = True,
    eq: bool = True,
    order: bool = False,
    unsafe_hash: bool = False,
    match_args: bool = True,
    kw_only: bool = False,
    frozen: bool = False,
    slots: bool = False,
    weakref_slot: bool = False,
) -> tp.Any:
    """`dataclasses.dataclass` for Pytree classes, with `data()` and `static()` as field specifiers.

    The class keeps its own `repr`. Arguments are those of `dataclasses.dataclass`; `slots=True`
    raises TypeError.

    Args:
        cls: the class; without it a decorator is returned.
        init, eq, order, unsafe_hash, match_args, kw_only, frozen, slots, weakref_slot: as for
            `dataclasses.dataclass`. A frozen one without data, such as settings, may be a static
            argument of a transform.

    Returns:
        The class.

    >>> import nnxlite as nnx, jax
    >>> @nnx.dataclass
    ... class Point(nnx.Pytree):
    ...     x: float = nnx.data()
    ...     name: str = nnx.static(default="p", kw_only=True)
    >>> jax.tree.leaves(Point(1.0))
    [1.0]
    """
    if slots or weakref_slot:
        raise TypeError(
            "nnx.dataclass(slots=True) is not possible: the attributes of graph objects live in "
            "__dict__, where transforms can see them. Leave `slots` and `weakref_slot` out."
        )
    decorate = functools.partial(
        dataclasses.dataclass,
        init=init,
        repr=False,
        eq=eq,
        order=order,
        unsafe_hash=unsafe_hash,
        match_args=match_args,
        kw_only=kw_only,
        frozen=frozen,
    )
    return decorate if cls is None else decorate(cls)
