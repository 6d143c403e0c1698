"""Questions about whole trees, and small edits of them."""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import path_text, short_type
from nnxlite.boundary._inputs import is_root
from nnxlite.filtered._crossing import leaves_of
from nnxlite.filtered._predicates import is_array
from nnxlite.filtered._walk import children, combined
from nnxlite.graph._kinds import OBJECT, VARIABLE, kind_of
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import iter_graph
from nnxlite.objects._pytree import Pytree

T = tp.TypeVar("T")


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
