"""What of an object is data: what its class or an assignment says, and what JAX sees of it.

Users say it by `data(...)` and `static(...)`, around a value or as fields of a dataclass; by the
annotations `Data[...]` and `Static[...]`; and by `field`, for the fields of frozen modules.

To JAX the data attributes of an object are the children, and its definition is the treedef's.
A function, text or other object in a container is static there, as it is in an attribute: JAX gets a
`Held` in its place, a node without leaves.  Numbers are leaves.  What a container has in the place of a
leaf once JAX has built the object is a leaf all the same, whatever it is: a tree of labels, shardings or
specs has the structure of its model.  Such an object notes the paths of these leaves.

JAX walks a pytree without end where an object is in a circle, and can crash; on some versions of Python
an exception at depth n takes n levels of recursion from the process.  So an object is searched for
circles before its first level is given away.

Laws: `unflatten(flatten(x))` has the structure and the values of x; the leaves are those that `filtered`
sees, but for shared ones, which are leaves at each path.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing as tp

import jax

from nnxlite._base.errors import path_text
from nnxlite._base.interning import ByShared, observe
from nnxlite._base.jax import own_annotations, trace_state
from nnxlite._base.statics import facts
from nnxlite.graph._defs import ContainerDef, ObjectDef, children_of, definition, new_shell
from nnxlite.graph._kinds import (
    CONTAINERS,
    DATA_KINDS,
    GraphNode,
    Kind,
    build_container,
    flatten_container,
    is_static_part,
    kind_by_type,
    kind_of,
    mark_static,
)
from nnxlite.graph._rebuild import Path
from nnxlite.variables._definition import MISSING

__all__ = ["Data", "Static", "data", "dataclass", "field", "static"]

T = tp.TypeVar("T")

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


def data(value: T = MISSING, /, **kwargs: tp.Any) -> T:
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


def static(value: T = MISSING, /, **kwargs: tp.Any) -> T:
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


# What JAX sees ---------------------------------------------------------------------------------


_OPENED = CONTAINERS - {Kind.STATE}
_TO_BE_SEEN = _OPENED | {None}  # with the classes of unknown kind
_WHOLE = DATA_KINDS | {Kind.STATE}


class Held:
    """A static value in a container, as JAX sees it: a node without leaves.

    Attributes:
        value: the value.
    """

    __slots__ = ("value",)

    def __init__(self, value: tp.Any) -> None:
        self.value = value

    def __eq__(self, other: tp.Any) -> bool:
        if type(other) is not Held:
            return False
        return self.value is other.value or [facts(self.value).key] == [facts(other.value).key]

    def __hash__(self) -> int:
        return hash(facts(self.value).key)

    def __repr__(self) -> str:
        return f"Held({self.value!r})"


jax.tree_util.register_pytree_node(Held, lambda held: ((), held), lambda held, _: held)


KeyedChildren: tp.TypeAlias = list[tuple[tp.Any, tp.Any]]


def register(cls: type[tp.Any]) -> None:
    """Make a class of objects a JAX pytree, whose children are the data attributes."""

    kinds = kind_by_type

    def flatten(node: tp.Any) -> tuple[tuple[tp.Any, ...], ObjectDef | ByShared]:
        form = node._nnx_def
        if form is None or node._nnx_searched != node._nnx_version:
            refuse_circles(node)
        if form is None or form.mutable:
            form = definition(node)
        return _children(node, form), form if form.public is None else ByShared(form)

    def flatten_with_keys(node: tp.Any) -> tuple[KeyedChildren, ObjectDef | ByShared]:
        children, form = flatten(node)
        names = definition(node).names.data
        return [(cls._nnx_key(name), child) for name, child in zip(names, children)], form

    def unflatten(form: tp.Any, children: tp.Iterable[tp.Any]) -> tp.Any:
        if type(form) is ByShared:
            form = tp.cast(ObjectDef, form.item)
        new = new_shell(cls, form, trace_state.value, 0)
        children = tuple(children)
        attributes = form.new_template()
        attributes.update(zip(form.names.data, children))
        _set_dict(new, attributes)
        if not _OPENED.isdisjoint(map(kinds.get, map(type, children))):
            _release(new)
        return new

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


_set_dict = GraphNode.__dict__["__dict__"].__set__
_set_leaves = GraphNode.__dict__["_nnx_leaves"].__set__
_set_searched = GraphNode.__dict__["_nnx_searched"].__set__


def keyed_children(
    node: tp.Any, also: tp.Callable[[tp.Any], bool] = lambda value: False
) -> KeyedChildren:
    """The children of an object with JAX's keys for them; the object may be in a circle.

    Args:
        node: the object.
        also: which static fields of a frozen module are among them.
    """
    form, key = definition(node), type(node)._nnx_key
    pairs = [(key(n), v) for n, v in zip(form.names.data, _children(node, form))]
    fields = form.names.static if node._nnx_frozen else ()
    return pairs + [(key(n), v) for n in fields if also(v := node._nnx_dict[n])]


def _children(node: tp.Any, form: ObjectDef) -> tuple[tp.Any, ...]:
    """The data attributes of an object, with `Held` in the place of static values in containers."""
    values = form.names.data_values(node._nnx_dict)
    if _TO_BE_SEEN.isdisjoint(map(kind_by_type.get, map(type, values))):
        return values
    leaves = getattr(node, "_nnx_leaves", ())

    def held(path: Path, child: tp.Any) -> tp.Any:
        return child if path in leaves else Held(child)

    return tuple([_with_statics(held, v, (name,)) for name, v in zip(form.names.data, values)])


def _with_statics(change: tp.Callable[[Path, tp.Any], tp.Any], value: tp.Any, path: Path) -> tp.Any:
    """A container with other static parts and `Held`, at any depth; the same one without any.

    `change(path, part)` returns what takes the place of one.
    """
    kind = kind_of(value)
    if kind not in _OPENED:
        return value
    keys, children, treedef = flatten_container(value, kind)
    if _WHOLE.issuperset(map(kind_by_type.get, map(type, children))):
        return value
    new = [
        change((*path, key), child)
        if type(child) is Held or is_static_part(child)
        else _with_statics(change, child, (*path, key))
        for key, child in zip(keys, children)
    ]
    if all(x is y for x, y in zip(new, children)):
        return value
    return build_container(ContainerDef((kind, type(value), keys, (), treedef)), new)


def _release(node: tp.Any) -> None:
    """Put values in the place of `Held` in containers of an object, and note leaves that look static."""
    odd: list[Path] = []

    def released(path: Path, part: tp.Any) -> tp.Any:
        if type(part) is Held:
            return part.value
        odd.append(path)
        return part

    attributes = node._nnx_dict
    for name in node._nnx_def.names.data:
        attributes[name] = _with_statics(released, attributes[name], (name,))
    if odd:
        _set_leaves(node, frozenset(odd))


# Circles --------------------------------------------------------------------------------------------


def refuse_circles(root: tp.Any) -> None:
    """Raise ValueError where an object leads back to itself, or to another one below it.

    All that it leads to is searched, as one edit below can close a circle through what has not changed;
    and then not again before its structure changes.
    """
    opened, done = {id(root)}, dict[int, tuple[tp.Any, int]]()
    stack: list[_Open] = [(None, root, observe(root), iter(_below(root)))]
    while stack:
        _, value, version, rest = stack[-1]
        name, child = next(rest, (None, None))  # nothing below is None
        if child is None:
            stack.pop()
            opened.discard(id(value))
            done[id(value)] = value, version
        elif id(child) in opened:
            raise _circle(stack, name, child)
        elif id(child) not in done:
            opened.add(id(child))
            number = observe(child) if kind_of(child) == Kind.OBJECT else 0
            stack.append((name, child, number, iter(_below(child))))
    for value, version in done.values():
        if version:
            _set_searched(value, version)


_Open: tp.TypeAlias = tuple[tp.Any, tp.Any, int, tp.Iterator[tuple[tp.Any, tp.Any]]]
"""A value whose children are being searched: its name, the value, its version, the other children."""


def _below(value: tp.Any) -> list[tuple[tp.Any, tp.Any]]:
    """The children of an object, a Variable or a container that can lead to an object, by name."""
    is_variable = kind_of(value) == Kind.VARIABLE
    pairs = [("value", value._box.value)] if is_variable else children_of(value, static=False)
    return [pair for pair in pairs if kind_of(pair[1]) in _LEAD_ON]


_LEAD_ON = _OPENED | {Kind.OBJECT, Kind.VARIABLE}


def _circle(stack: list[_Open], name: tp.Any, value: tp.Any) -> ValueError:
    root = stack[0][1]
    names = [*[n for n, *_ in stack[1:]], name]
    start = next(number for number, (_, outer, *_) in enumerate(stack) if outer is value)
    cls = type(root).__name__
    first = f"at '{path_text(names[:start])}' " if start else ""
    return ValueError(
        f"{cls} is in a circle, so JAX cannot take it as a pytree: '{path_text(names)}' of it is the "
        f"{type(value).__name__} {first}again, and jax.tree, jax.jit and the like would follow it "
        "without end. Use the transforms of nnx (nnx.jit, nnx.grad), which visit an object once, or "
        f"give JAX the state: graphdef, state = nnx.split({cls.lower()})."
    )
