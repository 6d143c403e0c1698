"""What a value is to the engine: its kind, and what is done with containers and plain objects.

*Kinds.* Every value met in a traversal is one of a few kinds. The decision is cached by type, so
that a traversal costs one dict lookup per value.

*Containers* are lists, tuples, dicts, States, named tuples and pytree nodes. Objects and Variables
are not: they have an identity, `_rebuild.py` treats them itself. A class of the user's own
becomes a graph node, not a container, with `register_graph_node_type`. A named tuple is a pytree
node that needs no treedef.

*Plain objects* are neither graph objects nor pytrees: a class that forgot to derive from `Module`,
a dataclass with arrays in it. They are static values. Their content is not trained, saved, counted
or switched to another mode, and is a constant of each program. The reference accepts it, and a
program may mean it, so there is a warning, not an error: once for each attribute of a class, unless
the value was marked with `nnx.static`. Programs must not leave a tracer in such an object: those
below the arguments are noted when objects are rebuilt, and a write of data to one is taken back and
refused when the function has returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing as tp
import weakref

import jax
import numpy as np

from nnxlite._base.errors import path_text, short_type, warn_user
from nnxlite._base.jax import (
    PyTreeDef,
    Ref,
    Tracer,
    flatten_one_level,
    is_pytree_leaf,
    is_ref,
    key_name,
)
from nnxlite._base.statics import is_trusted
from nnxlite._state._definition import State
from nnxlite._state._flat import sort_key, sorted_keys
from nnxlite.variables._variable import Variable

__all__ = ["has_data", "is_data", "register_data_type"]


class Kind:
    """What a value is: a graph object, Variable, State, builtin container, other registered pytree node,
    array-like leaf, array reference, user-registered graph node, or anything else."""

    OBJECT, VARIABLE, STATE, LIST, TUPLE, DICT, PYTREE, ARRAY, REF, CUSTOM, OTHER = range(11)


class Leaves:
    """What is a leaf in a plain container besides data: nothing, numbers, all but None."""

    STRICT, NUMBERS, EVERY = range(3)


CONTAINERS = frozenset({Kind.STATE, Kind.LIST, Kind.TUPLE, Kind.DICT, Kind.PYTREE})
NODES = CONTAINERS | {Kind.OBJECT, Kind.CUSTOM}
"""The kinds of values that have children."""


class GraphNode:
    """Base of every object that the engine knows by its own structure.

    Its attributes live in `__dict__`, which is `_nnx_dict` inside the library; each is data or static as
    `_nnx_status` says.  `_nnx_def` is the interned definition of the present structure, or None where it
    must be worked out again.
    `_nnx_decided` gives the value and the status of an attribute that is assigned.
    `_nnx_closed` says that nothing can be assigned to it: another object takes its place instead, made
    by `_nnx_replaced`. `_nnx_sort` puts the caller's attributes in the order that copies in a transform
    have, where somebody loops over them. Of an object that JAX has built, `_nnx_leaves` are the paths of
    leaves in its containers that are static elsewhere. `_nnx_searched` is the version that is in no
    circle.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_nnx_def",
        "_nnx_leaves",
        "_nnx_plans",
        "_nnx_searched",
        "_nnx_status",
        "_nnx_trace",
        "_nnx_version",
    )

    _nnx_closed: bool = False
    _nnx_decided: tp.ClassVar[tp.Callable[..., tuple[tp.Any, bool]]]
    _nnx_def: tp.Any
    _nnx_definitions: tp.ClassVar[dict[tp.Any, tp.Any]]
    _nnx_dict: dict[tp.Any, tp.Any]
    _nnx_frozen: tp.ClassVar[bool] = False
    _nnx_leaves: frozenset[tuple[tp.Any, ...]]
    _nnx_plans: dict[tp.Any, tp.Any] | None
    _nnx_replaced: tp.ClassVar[tp.Callable[[tp.Any, tp.Mapping[tp.Any, tp.Any]], tp.Any]]
    _nnx_searched: int
    _nnx_status: tp.Mapping[tp.Any, bool]
    _nnx_trace: weakref.ReferenceType
    _nnx_version: int

    def _nnx_sort(self) -> None: ...


GraphNode._nnx_dict = GraphNode.__dict__["__dict__"]  # the descriptor: `vars` of a List is a view


class CustomNode(tp.NamedTuple):
    """How a class registered with `register_graph_node_type` is flattened and rebuilt."""

    flatten: tp.Callable[[tp.Any], tuple[tp.Sequence[tuple[tp.Any, tp.Any]], tp.Any]]
    set_key: tp.Callable[[tp.Any, tp.Any, tp.Any], None]
    pop_key: tp.Callable[[tp.Any, tp.Any], tp.Any]
    create_empty: tp.Callable[[tp.Any], tp.Any]
    clear: tp.Callable[[tp.Any], None]
    init: tp.Callable[[tp.Any, tp.Any], None]


CUSTOM_NODES: dict[type, CustomNode] = {}
DATA_TYPES: set[type] = set()

NOT_OBJECTS = (
    *(type, str, bytes, bool, int, float, complex, type(None)),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
"""Classes of static values that have no attributes to look into."""

kind_by_type: dict[type, int] = {
    **dict.fromkeys((*NOT_OBJECTS, type(...)), Kind.OTHER),
    list: Kind.LIST,
    tuple: Kind.TUPLE,
    dict: Kind.DICT,
    np.ndarray: Kind.ARRAY,
}
MOST_KINDS = 4096
# Key: a type. Dropped when a class is registered. Threads: each entry is a single write of
# a dict. Bound: MOST_KINDS. It keeps classes alive that JAX would not: named tuples, and those with
# `pytree=False`. Working these out in each walk would take 13 % of a jitted call with 20 named tuples.
# Earned by a first `split` (`functional`): 12 %.
_OF_CLASSES = frozenset({Kind.OBJECT, Kind.VARIABLE, Kind.STATE, Kind.PYTREE, Kind.CUSTOM})


def kind_of(value: tp.Any) -> int:
    """The kind of a value, as in `Kind`."""
    kind = kind_by_type.get(type(value))
    return classify(value) if kind is None else kind


def classify(value: tp.Any) -> int:
    """Work out the kind of a value whose type has not been seen; cache it where it is final."""
    cls = type(value)
    if issubclass(cls, GraphNode):
        kind = Kind.OBJECT
    elif issubclass(cls, Variable):
        kind = Kind.VARIABLE
    elif issubclass(cls, State):
        kind = Kind.STATE
    elif cls in CUSTOM_NODES:
        kind = Kind.CUSTOM
    elif issubclass(cls, Ref):
        return Kind.REF
    elif issubclass(cls, Tracer):
        return Kind.REF if is_ref(value) else Kind.ARRAY
    elif isinstance(value, (jax.Array, np.ndarray)):
        kind = Kind.ARRAY
    elif (isinstance(value, tuple) and hasattr(cls, "_fields")) or not is_pytree_leaf(value):
        kind = Kind.PYTREE
    else:
        return Kind.OTHER  # may still be registered later
    if len(kind_by_type) >= MOST_KINDS:
        for known, its_kind in kind_by_type.copy().items():
            if its_kind in _OF_CLASSES:
                kind_by_type.pop(known, None)
    kind_by_type[cls] = kind
    if kind != Kind.CUSTOM and cls in CUSTOM_NODES:  # registered by another thread, just now
        kind_by_type[cls] = kind = Kind.CUSTOM
    return kind


def register_graph_node_type(
    type: type,
    flatten: tp.Callable[..., tp.Any],
    set_key: tp.Callable[..., None],
    pop_key: tp.Callable[..., tp.Any],
    create_empty: tp.Callable[..., tp.Any],
    clear: tp.Callable[..., None],
    init: tp.Callable[..., None],
) -> None:
    """Make instances of a foreign class graph nodes: shared, mutable, rebuilt by transforms.

    Args:
        flatten: node to (pairs (key, value), hashable metadata).
        set_key: (node, key, value), writes one entry.
        pop_key: (node, key), removes an entry and returns it.
        create_empty: metadata to an empty node.
        clear: removes every entry of a node.
        init: (node, pairs), fills an empty node.

    Raises ValueError when the class is registered already or is a graph node by nature.
    """
    if type in CUSTOM_NODES or issubclass(type, GraphNode):
        raise ValueError(f"Node type {type.__name__} is already registered.")
    CUSTOM_NODES[type] = CustomNode(flatten, set_key, pop_key, create_empty, clear, init)
    kind_by_type.pop(type, None)


def register_data_type(type_: type, /) -> type:
    """Treat instances of a class as data when they are assigned to attributes; returns the class.

    Args:
        type_: the class.

    Returns:
        The class, so that this is a decorator too.

    >>> import nnxlite as nnx
    >>> @nnx.register_data_type
    ... class Table: ...
    >>> nnx.is_data(Table())
    True
    """
    DATA_TYPES.add(type_)
    return type_


def is_data(value: tp.Any, /) -> bool:
    """Whether a value is data by its own type.

    Arrays, array references, Variables, graph objects, and instances of types registered with
    `register_data_type` are data; containers and everything else are not.

    Args:
        value: anything.

    Returns:
        A bool.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.is_data(jnp.zeros(2)), nnx.is_data(3), nnx.is_data([jnp.zeros(2)])
    (True, False, False)
    """
    kind = kind_of(value)
    if kind == Kind.OTHER:
        return type(value) in DATA_TYPES
    return kind in DATA_KINDS


DATA_KINDS = frozenset({Kind.OBJECT, Kind.VARIABLE, Kind.ARRAY, Kind.REF, Kind.CUSTOM})


def is_node(x: tp.Any) -> bool:
    """Whether `x` is something with children: an object, a container, a pytree node."""
    return kind_of(x) in NODES or x is None


def is_graph_node(x: tp.Any) -> bool:
    """Whether `x` is shared by reference: an object or a Variable."""
    return kind_of(x) in (Kind.OBJECT, Kind.CUSTOM, Kind.VARIABLE)


def is_node_leaf(x: tp.Any) -> bool:
    """Whether `x` is a leaf of graphs: a Variable, an array, or an array reference."""
    return kind_of(x) in (Kind.VARIABLE, Kind.ARRAY, Kind.REF)


def jax_to_nnx_path(jax_path: tp.Iterable[tp.Any], /) -> tuple[tp.Any, ...]:
    """A key path of JAX as plain names.

    >>> import nnxlite as nnx, jax
    >>> pairs = jax.tree_util.tree_leaves_with_path({"a": [1]})
    >>> [nnx.graphlib.jax_to_nnx_path(path) for path, leaf in pairs]
    [('a', 0)]
    """
    return tuple(key_name(key) for key in jax_path)


def is_static_value(value: tp.Any) -> bool:
    """Whether a value in a container is static: no data by its type, and nothing that contains any.

    A `jax.ShapeDtypeStruct` stands for an array, and so is a leaf. It is not data by itself: as an
    attribute it describes an input, say, and is static.
    """
    if kind_of(value) != Kind.OTHER or type(value) in DATA_TYPES:
        return False
    return not isinstance(value, jax.ShapeDtypeStruct)


def is_static_part(value: tp.Any) -> bool:
    """Whether a value is static where numbers are leaves: a function, text, an object without a kind.

    That is so in a frozen module, and for JAX and the filtered transforms in containers of any object.
    None is not such a part: it has no leaves, and may be where a leaf was.
    """
    return value is not None and is_static_value(value) and not _is_number(value)


def _is_number(value: tp.Any) -> bool:
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return not isinstance(value, (str, bytes))
    return hasattr(type(value), "__jax_array__")


def is_static_item(value: tp.Any, loose: int) -> bool:
    """Whether a value in a container is static."""
    if loose == Leaves.EVERY:
        return False
    return is_static_part(value) if loose == Leaves.NUMBERS else is_static_value(value)


# Containers -------------------------------------------------------------------------------------

Children = tp.Sequence[tp.Any]


def flatten_container(
    value: tp.Any, kind: int
) -> tuple[tuple[tp.Any, ...], Children, PyTreeDef | None]:
    """The keys and children of a container; for pytree nodes the structure of this level as well."""
    if kind in (Kind.LIST, Kind.TUPLE):
        return tuple(range(len(value))), value, None
    if kind in (Kind.DICT, Kind.STATE):
        keys = tuple(sorted_keys(value))
        return keys, [value[key] for key in keys], None
    if issubclass(type(value), tuple) and hasattr(value, "_fields"):
        return type(value)._fields, value, None
    pairs, treedef = flatten_one_level(value)
    return tuple(key_name(key) for key, _ in pairs), [child for _, child in pairs], treedef


def build_container(form: tp.Any, children: list[tp.Any]) -> tp.Any:
    """A container of this form with these children, in the order of `flatten_container`."""
    kind = form.kind
    if kind == Kind.LIST:
        return children
    if kind == Kind.TUPLE:
        return tuple(children)
    if kind == Kind.PYTREE:
        if form.treedef is None:
            return form.type(*children)
        return jax.tree_util.tree_unflatten(form.treedef, children)
    mapping = dict(zip(form.keys, children))
    return mapping if kind == Kind.DICT else form.type._nnx_wrap(mapping)  # type: ignore[attr-defined]


def items_of(value: tp.Any, kind: int) -> list[tuple[tp.Any, tp.Any]]:
    """The (name, child) pairs of a container, in the order in which they are traversed."""
    keys, children, _ = flatten_container(value, kind)
    pairs = list(zip(keys, children))
    return sorted(pairs, key=lambda pair: sort_key(pair[0])) if kind == Kind.PYTREE else pairs


def has_data(value: tp.Any, /) -> bool:
    """Whether a value is data or a container with data at any depth.

    Args:
        value: anything.

    Returns:
        A bool.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.has_data([1, (jnp.zeros(2),)]), nnx.has_data([1, "a"])
    (True, False)
    """
    return any(is_data(part) for part in walk(value))


def walk(value: tp.Any) -> tp.Iterator[tp.Any]:
    """A value and, through plain containers and pytree nodes, everything inside it."""
    pending = [value]
    entered: dict[int, tp.Any] = {}  # with the values: some are new, and their ids must stay taken
    while pending:
        value = pending.pop()
        yield value
        kind = kind_of(value)
        if kind in CONTAINERS and id(value) not in entered:
            entered[id(value)] = value
            pending.extend(part for _, part in items_of(value, kind))


# Data in plain objects --------------------------------------------------------------------------

LEVELS = 3
"""How deep plain objects in plain objects are searched when a definition is made."""
OBJECTS = 200
"""How many objects and containers are searched then."""


class Part(tp.NamedTuple):
    """A static value, or what is below one in containers and plain objects.

    Attributes:
        path: from the value that was searched.
        value: the part itself.
        owner: the innermost plain object that contains it, or None.
        attributes: those of the part; empty where it is not a plain object.
    """

    path: tuple[tp.Any, ...]
    value: tp.Any
    owner: tp.Any
    attributes: dict[str, tp.Any]


def attributes_of(value: tp.Any) -> dict[str, tp.Any]:
    """The attributes of a plain object; empty for everything else."""
    if isinstance(value, NOT_OBJECTS) or kind_of(value) != Kind.OTHER:
        return {}
    if is_trusted(type(value).__module__):
        return {}
    attributes = dict(getattr(value, "__dict__", ()))
    if dataclasses.is_dataclass(value):  # one with slots
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        attributes.update({name: getattr(value, name) for name in names})
    return attributes


def is_hidden_data(value: tp.Any) -> bool:
    """Whether a value in a plain object should be in a graph object: an array, Variable or object."""
    return isinstance(value, (jax.Array, Variable, GraphNode))


def parts_of(
    values: tp.Iterable[tp.Any], levels: float = LEVELS, limit: float = OBJECTS
) -> tp.Iterator[Part]:
    """Some static values and what is below them in lists, tuples, dicts and plain objects, each once."""
    pending: list[tuple[tuple[tp.Any, ...], tp.Any, tp.Any, int]]
    pending = [((), value, None, 0) for value in values]
    seen: dict[int, tp.Any] = {}
    while pending and len(seen) < limit:
        path, part, owner, level = pending.pop()
        if isinstance(part, NOT_OBJECTS) or id(part) in seen:
            continue
        seen[id(part)] = part
        attributes: dict[str, tp.Any] = {}
        pairs: tp.Iterable[tuple[tp.Any, tp.Any]] = ()
        below = owner
        if isinstance(part, (list, tuple)):
            pairs = enumerate(part)
        elif isinstance(part, dict):
            pairs = part.items()
        elif level <= levels and (attributes := attributes_of(part)):
            pairs, below, level = attributes.items(), part, level + 1
        yield Part(path, part, owner, attributes)
        pending += [((*path, name), child, below, level) for name, child in pairs]


def find_hidden(value: tp.Any, levels: int = LEVELS, limit: int = OBJECTS) -> Part | None:
    """The first data in the plain objects in and below a static value; None if there is none."""
    parts = parts_of([value], levels, limit)
    return next((p for p in parts if p.owner is not None and is_hidden_data(p.value)), None)


def mark_static(value: tp.Any) -> None:
    """Note that a value was marked with `nnx.static`: data in it is meant to be there."""
    for part in parts_of([value], levels=-1, limit=float("inf")):
        if kind_of(part.value) == Kind.OTHER:
            try:
                _marked[id(part.value)] = part.value
            except TypeError:  # no weak references to it
                _marked_classes.add(type(part.value))


_marked: weakref.WeakValueDictionary[int, tp.Any] = weakref.WeakValueDictionary()
_marked_classes: weakref.WeakSet[type] = weakref.WeakSet()
_warned: weakref.WeakKeyDictionary[type, set[tp.Any]] = weakref.WeakKeyDictionary()


def is_marked(value: tp.Any) -> bool:
    """Whether a value was marked with `nnx.static`."""
    return _marked.get(id(value)) is value or type(value) in _marked_classes


def warn_of_hidden(cls: type, name: tp.Any, value: tp.Any) -> None:
    """Warn, once for an attribute of a class, that its static value contains data in a plain object."""
    if isinstance(value, NOT_OBJECTS) or name in _warned.get(cls, ()):
        return
    found = find_hidden(value)
    if found is None or is_marked(value) or is_marked(found.owner):
        return
    _warned.setdefault(cls, set()).add(name)
    kind, where = type(found.owner).__name__, path_text((name, *found.path))
    warn_user(
        f"{cls.__name__}: '{where}' is {_a(found.value)} in a {kind}, which is neither an nnx.Module "
        "nor a pytree. It is static: not trained, saved, counted or switched by train() and eval(), "
        f"and a constant of every program. Derive {kind} from nnx.Module (or nnx.Pytree), or, if it is "
        f"meant, write self.{name} = nnx.static(...)."
    )


def _a(value: tp.Any) -> str:
    text = short_type(value)
    return f"an {text}" if text[:1] in "AEIOUaeio" else f"a {text}"


# Writes in a program -------------------------------------------------------------------------------

Noted = list[tuple[tp.Any, dict[str, tp.Any]]]
"""Plain objects with data, and their attributes."""


def note_hidden(values: tp.Iterable[tp.Any]) -> Noted:
    """The plain objects with data in and below some static values, as they are now."""
    return [(part.value, part.attributes) for part in parts_of(values) if part.attributes]


def take_back(noted: Noted) -> tuple[tp.Any, str, tp.Any] | None:
    """Take back the writes of data to plain objects; returns owner, name and value of one of them."""
    first = None
    for owner, before in noted:
        for name, value in attributes_of(owner).items():
            if value is before.get(name) or not is_hidden_data(value):
                continue
            first = first or (owner, name, value)
            if name in before:
                object.__setattr__(owner, name, before[name])
            else:
                object.__delattr__(owner, name)
    return first


@contextlib.contextmanager
def hidden_writes_undone(nodes: tp.Iterable[tp.Any]) -> tp.Iterator[None]:
    """Take back the writes of data to plain objects in these objects that the block makes."""
    noted = note_hidden(value for node in nodes for value in getattr(node, "__dict__", {}).values())
    try:
        yield
    finally:
        take_back(noted)


def refuse_hidden_writes(noted: Noted) -> None:
    """Raise ValueError where data was written to a plain object, with its attributes as they were."""
    written = take_back(noted)
    if written is None:
        return
    owner, name, value = written
    kind = type(owner).__name__
    raise ValueError(
        f"A function under a transform wrote {_a(value)} to the attribute {name!r} of a {kind}, which "
        "is neither an nnx.Module nor a pytree: outside, the value would be a tracer, so the write was "
        f"taken back. Derive {kind} from nnx.Module or nnx.Pytree, keep the value in a Variable of a "
        "module, or return it."
    )
