"""What a value is to the engine, decided once per type.

Every value met in a traversal is one of a few kinds.  The decision is cached by type, so that a
traversal costs one dict lookup per value.
"""

from __future__ import annotations

import types
import typing as tp
import weakref

import jax
import numpy as np

from nnxlite._jax import Ref, Tracer, is_pytree_leaf, is_ref
from nnxlite._state import State
from nnxlite.variables import Variable

OBJECT, VARIABLE, STATE, LIST, TUPLE, DICT, PYTREE, ARRAY, REF, CUSTOM, OTHER = range(11)
"""Graph object, Variable, State, builtin containers, other registered pytree node, array-like leaf,
array reference, user-registered graph node, and everything else."""

CONTAINERS = frozenset({STATE, LIST, TUPLE, DICT, PYTREE})


class GraphNode:
    """Base of every object that the engine knows by its own structure.

    Its attributes live in `__dict__`, which is `_nnx_dict` inside the library; each is data or static as
    `_nnx_status` says.  `_nnx_def` is the interned definition of the present structure, or None where it
    must be worked out again.
    `_nnx_closed` says that nothing can be assigned to it: another object takes its place instead, made
    by `_nnx_replaced`. Of an object that JAX has built, `_nnx_leaves` are the paths of leaves
    in its containers that are static elsewhere. `_nnx_searched` is the version that is in no circle.
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


GraphNode._nnx_dict = GraphNode.__dict__["__dict__"]  # the descriptor: `vars` of a List is a view


class CustomNode(tp.NamedTuple):
    """How a class registered with `register_graph_node_type` is flattened and rebuilt."""

    type: type
    flatten: tp.Callable[[tp.Any], tuple[tp.Sequence[tuple[tp.Any, tp.Any]], tp.Any]]
    set_key: tp.Callable[[tp.Any, tp.Any, tp.Any], None]
    pop_key: tp.Callable[[tp.Any, tp.Any], tp.Any]
    create_empty: tp.Callable[[tp.Any], tp.Any]
    clear: tp.Callable[[tp.Any], None]
    init: tp.Callable[[tp.Any, tp.Any], None]


CUSTOM_NODES: dict[type, CustomNode] = {}
DATA_TYPES: set[type] = set()

kind_by_type: dict[type, int] = {
    **dict.fromkeys((str, int, float, bool, complex, bytes, type(None), type, type(...)), OTHER),
    **dict.fromkeys(
        (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType), OTHER
    ),
    list: LIST,
    tuple: TUPLE,
    dict: DICT,
    np.ndarray: ARRAY,
}
MOST_KINDS = 4096
# Key: a type. Dropped by `forget`, when a class is registered. Threads: each entry is a single write of
# a dict. Bound: MOST_KINDS. It keeps classes alive that JAX would not: named tuples, and those with
# `pytree=False`. Working these out in each walk would take 13 % of a jitted call with 20 named tuples.
# Earned by a first `split` (`functional`): 12 %.
_OF_CLASSES = frozenset({OBJECT, VARIABLE, STATE, PYTREE, CUSTOM})


def kind_of(value: tp.Any) -> int:
    """The kind of a value, one of the constants of this module."""
    kind = kind_by_type.get(type(value))
    return classify(value) if kind is None else kind


def classify(value: tp.Any) -> int:
    """Work out the kind of a value whose type has not been seen (and remember what is final)."""
    cls = type(value)
    if issubclass(cls, GraphNode):
        kind = OBJECT
    elif issubclass(cls, Variable):
        kind = VARIABLE
    elif issubclass(cls, State):
        kind = STATE
    elif cls in CUSTOM_NODES:
        kind = CUSTOM
    elif issubclass(cls, Ref):
        return REF
    elif issubclass(cls, Tracer):
        return REF if is_ref(value) else ARRAY
    elif isinstance(value, (jax.Array, np.ndarray)):
        kind = ARRAY
    elif isinstance(value, tuple) and hasattr(cls, "_fields"):
        kind = PYTREE
    elif not is_pytree_leaf(value):
        kind = PYTREE
    else:
        return OTHER  # may still be registered later
    if len(kind_by_type) >= MOST_KINDS:
        for known, its_kind in kind_by_type.copy().items():
            if its_kind in _OF_CLASSES:
                forget(known)
    kind_by_type[cls] = kind
    if kind != CUSTOM and cls in CUSTOM_NODES:  # registered by another thread, just now
        kind_by_type[cls] = kind = CUSTOM
    return kind


def forget(cls: type) -> None:
    """Forget the kind of a type, after a registration."""
    kind_by_type.pop(cls, None)


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
    CUSTOM_NODES[type] = CustomNode(type, flatten, set_key, pop_key, create_empty, clear, init)
    forget(type)


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
    if kind == OTHER:
        return type(value) in DATA_TYPES
    return kind in _DATA_KINDS


_DATA_KINDS = frozenset({OBJECT, VARIABLE, ARRAY, REF, CUSTOM})


def is_setting(value: tp.Any) -> bool:
    """Whether a value in a container is static: no data by its type, and nothing that contains any.

    A `jax.ShapeDtypeStruct` stands for an array, and so is a leaf. It is no data by itself: as an
    attribute it describes an input, say, and is static.
    """
    if kind_of(value) != OTHER or type(value) in DATA_TYPES:
        return False
    return not isinstance(value, jax.ShapeDtypeStruct)


def is_static_part(value: tp.Any) -> bool:
    """Whether a value is static where numbers are leaves: a function, text, an object without a kind.

    That is so in a frozen module, and for JAX and the filtered transforms in containers of any object.
    None is not such a part: it has no leaves, and may be where a leaf was.
    """
    return value is not None and is_setting(value) and not _is_number(value)


def _is_number(value: tp.Any) -> bool:
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return not isinstance(value, (str, bytes))
    return hasattr(type(value), "__jax_array__")


STRICT, NUMBERS, EVERY = range(3)
"""What is a leaf in a plain container besides data: nothing, numbers, all but None."""


def is_held(value: tp.Any, loose: int) -> bool:
    """Whether a value in a container is static."""
    if loose == EVERY:
        return False
    return is_static_part(value) if loose == NUMBERS else is_setting(value)
