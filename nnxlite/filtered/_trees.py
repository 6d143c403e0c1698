"""Functions on whole trees: `partition` and `combine`, questions, small edits, text.

They walk trees level by level, and copy them with their sharing.
"""

from __future__ import annotations

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import path_text, short_type
from nnxlite._base.jax import flatten_one_level, is_pytree_leaf, key_name
from nnxlite._base.text import Style, Text, expanded, laid_out, open_up, short
from nnxlite._state._walk import sorted_keys
from nnxlite.boundary._inputs import Inputs, is_root
from nnxlite.filtered._specs import MASK, IsLeaf, answers, has_shape, is_array, leaves_of
from nnxlite.graph._kinds import OBJECT, VARIABLE, is_static_part, kind_of
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import iter_graph
from nnxlite.objects._pytree import Pytree
from nnxlite.variables._variable import Variable, make


def children(value: tp.Any, also: tuple[type, ...] = ()) -> list[tuple[Path, tp.Any]]:
    """The parts one level down, with their paths from there.

    Those of an object are its data attributes, and static ones of the types in `also`; the value of a
    Variable has the Variable's own path.
    """
    kind = kind_of(value)
    if kind == VARIABLE:
        return [((), value.get_raw_value())]
    if kind == OBJECT:
        status, attributes = value._nnx_status, value._nnx_dict.items()
        return [((n,), v) for n, v in attributes if status.get(n) or isinstance(v, also)]
    found = _level(value)
    return [((name,), child) for name, child in zip(*found[:2])] if found else []


def _level(value: tp.Any) -> tuple[tp.Sequence[tp.Any], tp.Sequence[tp.Any], tp.Any, tp.Any] | None:
    """Names and children of a container, what equal ones share, and how to build one; None for a leaf.

    The keys of a dict may be of several types, unlike for JAX.
    """
    if type(value) is dict:
        keys = tuple(sorted_keys(value))
        return keys, [value[key] for key in keys], keys, lambda new: dict(zip(keys, new))
    if value is None or is_pytree_leaf(value):
        return None
    pairs, treedef = flatten_one_level(value)
    names = [key_name(key) for key, _ in pairs]
    return names, [part for _, part in pairs], treedef, treedef.unflatten


Values = tuple[tp.Any, ...]


def copied(
    what: str,
    trees: Values,
    leaf: tp.Callable[..., tp.Any],
    stops: tp.Callable[[tp.Any], bool] = lambda part: False,
    finish: tp.Callable[[tp.Any, tp.Any], None] = lambda lead, copy: None,
) -> tp.Any:
    """A copy of a tree with its sharing, in which leaves are replaced.

    Several trees may be walked together: of their parts at one path, None where a tree has none, the
    first that is not None (the lead) gives the form, and the static parts of objects. An object is
    filled after the containers around it, so a chain of objects may be of any length.

    Args:
        what: the function that copies, for messages.
        trees: the trees.
        leaf: gives the copy of a leaf, from whether it is in a container that an attribute of an object
            has, and what each tree has there.
        stops: whether a part is a leaf, and not walked into.
        finish: is called with each object and its copy, once that has its data.

    Raises ValueError naming the path where two trees differ in structure.
    """
    # By id: the lead, which so stays alive, and its copy.
    copies: dict[int, tuple[tp.Any, tp.Any]] = {}
    pending: list[tuple[Path, Values, tp.Any]] = []

    def copy_of(path: Path, lead: tp.Any, values: Values) -> tp.Any:
        for value in values:
            if value is not None and type(value) is not type(lead):
                differ(what, path, lead, value)
        if isinstance(lead, Variable):
            raw = tuple(None if v is None else v.get_raw_value() for v in values)
            return make(lead._box.definition, part(path, raw, False))
        copy = lead.__copy__()
        pending.append((path, values, copy))
        return copy

    def part(path: Path, values: Values, in_container: bool) -> tp.Any:
        lead = first_given(*values)
        if lead is None or stops(lead):
            return leaf(in_container, *values)
        if kind_of(lead) in (OBJECT, VARIABLE):
            if id(lead) not in copies:
                copies[id(lead)] = lead, copy_of(path, lead, values)
            return copies[id(lead)][1]
        found, levels = _level(lead), [None if value is None else _level(value) for value in values]
        for value, other in zip(values, levels):
            same = other is found is None or (other and found and other[2] == found[2])
            if not (value is None or same):
                differ(what, path, lead, value)
        if found is None:
            return leaf(in_container, *values)
        names, _, _, build = found
        below = zip(*[[None] * len(names) if level is None else level[1] for level in levels])
        new = [part((*path, name), parts, in_container) for name, parts in zip(names, below)]
        return build(new)

    out = part((), trees, False)
    while pending:
        path, values, copy = pending.pop()
        lead = first_given(*values)
        for name, child in list(lead._nnx_dict.items()):
            if lead._nnx_status.get(name):
                parts = tuple(None if v is None else v._nnx_dict.get(name) for v in values)
                is_object = kind_of(child) in (OBJECT, VARIABLE)
                in_container = not is_object and _level(child) is not None
                copy._nnx_dict[name] = part((*path, name), parts, in_container)
        finish(lead, copy)
    return out


def first_given(*values: tp.Any) -> tp.Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def differ(what: str, path: Path, one: tp.Any, other: tp.Any) -> tp.NoReturn:
    """Raise ValueError for two parts of different structure."""

    def shown(value: tp.Any) -> str:
        found = None if kind_of(value) in (OBJECT, VARIABLE) else _level(value)
        if found is None:
            return short_type(value)
        return f"{short_type(value)} with {len(found[0])} children {[*found[0]]}"

    raise ValueError(
        f"{what}: the trees differ in structure at '{path_text(path)}': one has {shown(one)}, another "
        f"{shown(other)}."
    )


def combined(
    fun: tp.Callable[..., tp.Any],
    trees: tp.Sequence[tp.Any],
    what: str,
    is_leaf: tp.Callable[[tp.Any], bool] | None = None,
) -> tp.Any:
    """Trees joined leaf by leaf: `fun(*leaves)`, with None where a tree has no leaf.

    The first tree that is not None gives the form at each path, and the static parts of objects: their
    static attributes, and functions, text and other objects in their containers. `fun` decides about
    every leaf, also where all trees, or below a container all but one, are None.

    Raises ValueError naming the path where two trees differ in structure.
    """
    stops = is_leaf or (lambda part: False)

    def leaf(in_container: bool, *values: tp.Any) -> tp.Any:
        lead = first_given(*values)
        is_fixed = in_container and lead is not None and is_static_part(lead)
        return lead if is_fixed and not stops(lead) else fun(*values)

    return copied(what, tuple(trees), leaf, stops)


T = tp.TypeVar("T")


def filter(
    pytree: T,
    filter_spec: tp.Any,
    inverse: bool = False,
    replace: tp.Any = None,
    is_leaf: IsLeaf | None = None,
) -> T:
    """A tree with only the leaves that a spec selects, and None for the others.

    Graph objects in the tree keep their types and sharing; the result has new ones. A shared
    Variable is one leaf. Static attributes are not leaves and stay.

    Args:
        pytree: any pytree, or a graph object.
        filter_spec: a bool, a function of a leaf, a Variable filter (`nnx.Param`, ...), or a pytree
            of these that is a prefix of the tree.
        inverse: return the leaves that the spec does not select instead.
        replace: what to put in place of the other leaves.
        is_leaf: parts for which it is true are leaves.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: for a spec that is not a prefix of the tree, or one that selects a shared Variable
            by one path and not by another.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.filter([jnp.array(1.0), "name"], nnx.is_array)
    [Array(1., dtype=float32, weak_type=True), None]
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.filter(model, nnx.PathContains("bias")).kernel.value is None
    True
    """
    chosen, rest = partition(pytree, filter_spec, replace, is_leaf)
    return rest if inverse else chosen


def _leaves(tree: tp.Any, spec: tp.Any, is_leaf: IsLeaf | None) -> Inputs:
    """The leaves of a tree; `is_leaf` is called only for parts below the literals of the spec."""
    if is_leaf is None:
        return leaves_of(tree)
    ends = lambda part: is_root(part) or MASK.is_literal(part)
    stops = lambda part: is_root(part) or is_leaf(part)
    close = lambda part: _Closed(part) if is_leaf(part) else part
    below = lambda _, part: jax.tree_util.tree_map(close, part, is_leaf=stops)
    try:
        closed = jax.tree_util.tree_map(below, spec, tree, is_leaf=ends)
    except ValueError:  # the spec is not a prefix, and `answers` has a better message for it
        closed = tree
    parts = leaves_of(closed)
    parts.arrays = [x.value if type(x) is _Closed else x for x in parts.arrays]
    return parts


@dataclasses.dataclass
class _Closed:
    """A part of a tree that counts as one leaf."""

    value: tp.Any


def partition(
    pytree: T,
    filter_spec: tp.Any,
    replace: tp.Any = None,
    is_leaf: IsLeaf | None = None,
) -> tuple[T, T]:
    """The leaves that a spec selects and the rest, as two trees; see `filter`.

    `combine` is the inverse.

    Args:
        pytree: any pytree, or a graph object.
        filter_spec, replace, is_leaf: as for `filter`.

    Returns:
        Two trees of the same structure, with `replace` in place of the leaves of the other.

    Raises:
        ValueError: as for `filter`.

    >>> import nnxlite as nnx
    >>> nnx.partition([1, "a", 2.5], lambda x: isinstance(x, str))
    ([None, 'a', None], [1, None, 2.5])
    >>> nnx.combine(*nnx.partition([1, "a", 2.5], lambda x: isinstance(x, str)))
    [1, 'a', 2.5]
    """
    tree = _leaves(pytree, filter_spec, is_leaf)
    mask = answers(tree, filter_spec)
    call, leaves = tree.definition, tree.leaves
    chosen = call.build([x if m else replace for x, m in zip(leaves, mask)])
    rest = call.build([replace if m else x for x, m in zip(leaves, mask)])
    return chosen, rest


def combine(*pytrees: T, is_leaf: IsLeaf | None = None) -> T:
    """One tree of several: at each leaf the first value that is not None.

    Args:
        pytrees: trees of one structure, up to None.
        is_leaf: parts for which it is true are leaves.

    Returns:
        A tree of the structure of the trees; graph objects in it are new.

    Raises:
        ValueError: for trees of different structure, naming the path; or for no trees.

    >>> import nnxlite as nnx
    >>> nnx.combine([None, 2, 3], [1, None, 4])
    [1, 2, 3]
    """
    if not pytrees:
        raise ValueError("combine needs at least one pytree.")
    return combined(first_given, pytrees, "combine", is_leaf)


def apply_updates(model: T, updates: tp.Any) -> T:
    """A tree with updates added; where an update is None the leaf is unchanged.

    Args:
        model: any pytree, or a graph object. It is not changed; the result has its sharing.
        updates: a tree of the same structure, up to None, as `filter_grad` and optax give them.

    Returns:
        A tree of the structure of `model`; graph objects in it are new.

    Raises:
        ValueError: for updates of another structure, naming the path, or an update of a None.

    >>> import nnxlite as nnx
    >>> nnx.apply_updates([1.0, "name"], [0.5, None])
    [1.5, 'name']
    """
    return combined(_add, (model, updates), "apply_updates")


def _add(value: tp.Any, update: tp.Any) -> tp.Any:
    if update is None:
        return value
    if value is None:
        raise ValueError(
            f"apply_updates: the update {short_type(update)} belongs to a None of the model, and would "
            "be dropped. Give None there."
        )
    return value + update


def tree_equal(
    *pytrees: tp.Any, typematch: bool = False, rtol: tp.Any = 0.0, atol: tp.Any = 0.0
) -> bool | jax.Array:
    """Whether trees are equal: in structure, static values, sharing, and every leaf.

    Arrays are equal with the same shape, dtype and values; NaN differs from itself. A number is equal
    to numbers only, not to an array.

    Args:
        pytrees: trees, or graph objects.
        typematch: leaves must also have the same type, so that NumPy and JAX arrays differ.
        rtol, atol: tolerances for floating-point and complex arrays.

    Returns:
        A bool; or, where values decide and some array is of JAX, a JAX array of one bool (which also
        works under `jit`).

    >>> import nnxlite as nnx
    >>> nnx.tree_equal([1, "a"], [1, "a"]), nnx.tree_equal([1], (1,))
    (True, False)
    """
    if len(pytrees) < 2:
        return True
    first, *others = map(leaves_of, pytrees)
    answer: tp.Any = True
    for other in others:
        if first.definition.key != other.definition.key:
            return False
        for x, y in zip(first.leaves, other.leaves):
            same = _same_leaf(x, y, typematch, rtol, atol)
            if same is False:
                return False
            answer = same if answer is True else (answer if same is True else answer & same)
    return answer


def _same_leaf(x: tp.Any, y: tp.Any, typematch: bool, rtol: tp.Any, atol: tp.Any) -> tp.Any:
    if typematch and type(x) is not type(y):
        if not (isinstance(x, jax.Array) and isinstance(y, jax.Array)):
            return False
    if not (is_array(x) and is_array(y)):
        return not is_array(x) and not is_array(y) and bool(x == y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    xnp = jnp if isinstance(x, jax.Array) or isinstance(y, jax.Array) else np
    if jnp.issubdtype(x.dtype, jnp.inexact):
        same = xnp.allclose(x, y, rtol=rtol, atol=atol)
    else:
        same = xnp.all(x == y)
    return bool(same) if xnp is np else same


def tree_check(pytree: tp.Any) -> None:
    """Check that no container or pytree node appears twice in a tree.

    JAX would make two of it. Graph objects may be shared: the transforms of this library keep their
    sharing.

    Args:
        pytree: any pytree.

    Raises:
        ValueError: naming both paths of a node that appears twice, or that of one inside itself.

    >>> import nnxlite as nnx
    >>> nnx.tree_check({"a": [1], "b": [1]})
    """
    first: dict[int, Path] = {}
    pending: list[tuple[Path, tp.Any]] = [((), pytree)]
    while pending:
        path, value = pending.pop()
        kind = kind_of(value)
        parts = [] if kind == VARIABLE else children(value)
        if not parts or (kind == OBJECT and id(value) in first):
            continue  # a leaf, or empty and so without effect, or an object, which may be shared
        if id(value) in first:
            raise ValueError(
                f"The {type(value).__name__} at '{path_text(first[id(value)])}' appears again at "
                f"'{path_text(path)}'. Crossing a JAX transform makes two of it. Put a copy in one "
                "of the places, or use a graph object (nnx.List, nnx.Dict, a Module), which may be "
                "shared."
            )
        first[id(value)] = path
        pending += [((*path, *step), child) for step, child in reversed(parts)]


def tree_flatten_one_level(pytree: tp.Any) -> tuple[list[tp.Any], tp.Any]:
    """The direct children of a pytree node, and how to put them together.

    A leaf is its own only child.

    Args:
        pytree: any pytree.

    Returns:
        `(children, treedef)`; `jax.tree.unflatten(treedef, children)` gives the node again.

    Raises:
        ValueError: for a node that is its own child.

    >>> import nnxlite as nnx
    >>> nnx.tree_flatten_one_level([1, [2, 3]])[0]
    [1, [2, 3]]
    """
    if pytree is None or is_pytree_leaf(pytree):
        return jax.tree_util.tree_flatten(pytree)
    pairs, treedef = flatten_one_level(pytree)
    if any(child is pytree for _, child in pairs):
        raise ValueError(f"The {type(pytree).__name__} contains itself: it is not a tree.")
    return [child for _, child in pairs], treedef


def tree_inference(pytree: T, value: bool = True) -> T:
    """A copy of a tree with every layer in inference mode (or, with False, in training mode).

    On the modules of this library it sets `deterministic` and `use_running_average`, and everywhere
    attributes called `inference`, where they exist.

    Args:
        pytree: any pytree, or a graph object.
        value: True for inference, False for training.

    Returns:
        A tree of the same structure, with new modules around the same arrays.

    >>> import nnxlite as nnx
    >>> dropout = nnx.Dropout(0.5)
    >>> nnx.tree_inference(dropout).deterministic, dropout.deterministic
    (True, False)
    """
    tree = leaves_of(pytree)
    new = tree.definition.build(tree.leaves)
    for _, node in iter_graph(new):
        if kind_of(node) == OBJECT:
            for name in _MODES:
                if name in node._nnx_dict:
                    Pytree._nnx_assign(node, name, value)  # frozen or not: the copy is ours
    return jax.tree_util.tree_map_with_path(
        lambda path, x: value if path and getattr(path[-1], "name", None) == "inference" else x,
        new,
        is_leaf=is_root,
    )


_MODES = ("deterministic", "use_running_average", "inference")


# Text ----------------------------------------------------------------------------------------------

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def _never(leaf: tp.Any) -> bool:
    return False


def array_text(array: tp.Any) -> str:
    """An array by dtype and shape: `f32[2,3]`.

    >>> import jax.numpy as jnp
    >>> from nnxlite.filtered._trees import array_text
    >>> array_text(jnp.zeros((2, 3)))
    'f32[2,3]'
    """
    name = str(array.dtype)
    letters = name.rstrip("0123456789")
    kind = _SHORT.get(letters, letters) + name[len(letters) :]
    owner = "(numpy)" if isinstance(array, (np.ndarray, np.generic)) else ""
    return f"{kind}[{','.join(map(str, array.shape))}]{owner}"


def tree_pformat(
    pytree: tp.Any,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: tp.Callable[[tp.Any], bool] = _never,
) -> str:
    """A tree as text, with arrays by dtype and shape.

    Args:
        pytree: any pytree, or a graph object.
        width: the number of characters that a line may have, if possible.
        indent: of each level, in characters.
        short_arrays: False writes arrays out.
        struct_as_array: writes `jax.ShapeDtypeStruct`s like arrays.
        truncate_leaf: parts for which it is true are written as `Type(...)`.

    Returns:
        A string, of several lines where one is not enough.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.tree_pformat({"w": jnp.zeros((2, 3)), "name": "head"})
    "{'w': f32[2,3], 'name': 'head'}"
    """

    def leaf(value: tp.Any) -> str:
        if truncate_leaf(value):
            return f"{type(value).__name__}(...)"
        if short_arrays if is_array(value) else struct_as_array and has_shape(value):
            return array_text(value)
        return repr(value) if has_shape(value) else short(value)

    def opened(value: tp.Any) -> Text | None:
        return None if has_shape(value) or truncate_leaf(value) else open_up(value)

    style = Style(leaf, opened, width, indent)
    with expanded(pytree, style) as order:
        return laid_out(order, style)


def tree_pprint(
    pytree: tp.Any,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: tp.Callable[[tp.Any], bool] = _never,
) -> None:
    """Print a tree; arguments as for `tree_pformat`.

    Args:
        pytree: any pytree, or a graph object.
        width, indent, short_arrays, struct_as_array, truncate_leaf: as for `tree_pformat`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.tree_pprint([jnp.zeros(3), "a"])
    [f32[3], 'a']
    """
    text = tree_pformat(
        pytree,
        width=width,
        indent=indent,
        short_arrays=short_arrays,
        struct_as_array=struct_as_array,
        truncate_leaf=truncate_leaf,
    )
    print(text)
