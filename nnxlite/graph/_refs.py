"""Between arrays and array references, over whole graphs.

Each function gives a copy of a graph in which some leaves are stored in another way: arrays in
references, references as arrays, Variables with `ref=True` or without.  What is not converted is
shared with the original.  A leaf with two paths would become two, so it is refused.
"""

from __future__ import annotations

import typing as tp

from nnxlite._errors import path_text
from nnxlite._jax import is_ref
from nnxlite.filters import Filter, Predicate, to_predicate
from nnxlite.graph._functional import build, checked_view
from nnxlite.graph._graphdef import Path
from nnxlite.graph._kinds import ARRAY, REF, VARIABLE, kind_of
from nnxlite.graph._nodes import children_of
from nnxlite.graph._walk import is_graph_node
from nnxlite.variables import Variable, array_ref

A = tp.TypeVar("A")
_LEAVES = frozenset({ARRAY, REF, VARIABLE})


def _arrays(path: Path, leaf: tp.Any) -> bool:
    """Arrays, and Variables that hold one."""
    return kind_of(_raw(leaf)) == ARRAY


def _refs(path: Path, leaf: tp.Any) -> bool:
    """Array references, and Variables that hold one."""
    return is_ref(_raw(leaf))


def _raw(leaf: tp.Any) -> tp.Any:
    return leaf.get_raw_value() if isinstance(leaf, Variable) else leaf


def to_refs(node: A, /, only: Filter = _arrays) -> A:
    """A copy of a graph whose arrays are array references.

    A Variable that contains an array becomes one with `ref=True`.

    Args:
        node: a graph object, or any structure of arrays.
        only: which leaves are converted; all arrays by default.

    Returns:
        A new graph of the same structure.

    Raises:
        ValueError: when an array or Variable that is converted has several paths.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> model = nnx.to_refs(nnx.Dict(w=jnp.zeros(2), b=nnx.Param(jnp.zeros(2))))
    >>> nnx.is_array_ref(model.w), model.b.ref
    (True, True)
    """
    chosen = to_predicate(only)

    def convert(leaf: tp.Any) -> tp.Any:
        return leaf.replace(ref=True) if isinstance(leaf, Variable) else array_ref(leaf)

    return _convert(node, lambda path, x: chosen(path, x) and _arrays(path, x), convert)


def to_arrays(node: A, /, *, only: Filter = _refs, allow_duplicates: bool = False) -> A:
    """A copy of a graph whose array references are arrays.

    A Variable with `ref=True` becomes one without.

    Args:
        node: a graph object, or any structure of array references.
        only: which leaves are converted; all references by default.
        allow_duplicates: convert a reference that has several paths once for each of them.

    Returns:
        A new graph of the same structure.

    Raises:
        ValueError: when a reference that is converted has several paths.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> array, number = nnx.to_arrays([nnx.array_ref(1.0), 2.0])
    >>> float(array), number
    (1.0, 2.0)
    """
    chosen = to_predicate(only)

    def convert(leaf: tp.Any) -> tp.Any:
        return leaf.replace(ref=False) if isinstance(leaf, Variable) else leaf[...]

    wanted: Predicate = lambda path, x: chosen(path, x) and _refs(path, x)
    return _convert(node, wanted, convert, allow_duplicates)


def with_vars(
    node: A,
    /,
    *,
    hijax: bool | None = None,
    ref: bool | None = None,
    mutable: bool | None = None,
    only: Filter = ...,
    allow_duplicates: bool = False,
) -> A:
    """A copy of a graph whose Variables hold their values another way.

    Args:
        node: a graph object, or any pytree of them.
        hijax: accepted for compatibility; True raises ValueError (use `ref=True`).
        ref: True moves values into JAX array references, False out of them.
        mutable: sets the metadata entry of this name.
        only: which Variables are meant; all by default.
        allow_duplicates: convert a Variable that has several paths, as one.

    Returns:
        A new graph of the same structure.

    Raises:
        ValueError: when a Variable that is converted is found at several paths, or for hijax=True.
        TypeError: for `ref=True` where a value is not an array.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> in_refs = nnx.with_vars(model, ref=True)
    >>> in_refs.kernel.ref, model.kernel.ref
    (True, False)
    """
    if hijax:
        raise ValueError(
            "with_vars(hijax=True) is not available: hijax Variables are an experiment of JAX. Use "
            "ref=True for Variables that live in JAX array references."
        )
    given = {"ref": ref, "mutable": mutable}
    wanted = {name: value for name, value in given.items() if value is not None}
    chosen = to_predicate(only)

    def differs(path: Path, leaf: tp.Any) -> bool:
        return (
            isinstance(leaf, Variable)
            and any(leaf.get_metadata(name, None) != value for name, value in wanted.items())
            and chosen(path, leaf)
        )

    return _convert(node, differs, lambda leaf: leaf.replace(**wanted), allow_duplicates)


def vars_as(
    node: A,
    /,
    *,
    hijax: bool | None = None,
    ref: bool | None = None,
    mutable: bool | None = None,
    only: Filter = ...,
    allow_duplicates: bool = False,
) -> A:
    """The same as `with_vars`, under its former name.

    Args:
        node, hijax, ref, mutable, only, allow_duplicates: as for `with_vars`.

    Returns:
        A new graph of the same structure.

    >>> import nnxlite as nnx
    >>> nnx.vars_as(nnx.Dict(w=nnx.Param(1.0)), mutable=False).w.get_metadata("mutable")
    False
    """
    return with_vars(
        node, hijax=hijax, ref=ref, mutable=mutable, only=only, allow_duplicates=allow_duplicates
    )


def _convert(
    node: A,
    wanted: Predicate,
    convert: tp.Callable[[tp.Any], tp.Any],
    allow_duplicates: bool = False,
) -> A:
    """A copy of a graph whose wanted leaves are converted."""
    seen = checked_view(node, True, "map")
    if not allow_duplicates:
        _refuse_duplicates(node, wanted)
    leaves = [
        convert(leaf) if wanted(path, leaf) else leaf
        for path, leaf in zip(seen.graphdef.paths, seen.leaves)
    ]
    return build(seen.graphdef, leaves)


def _refuse_duplicates(node: tp.Any, wanted: Predicate) -> None:
    """Raise ValueError where a wanted leaf has several paths."""
    paths: dict[int, list[Path]] = {}
    converted: set[int] = set()
    keep: list[tp.Any] = []  # identities stay taken while the walk lasts
    visited: set[int] = set()
    pending: list[tuple[Path, tp.Any]] = [((), node)]
    while pending:
        path, value = pending.pop()
        keep.append(value)
        kind = kind_of(value)
        if kind in _LEAVES:
            chosen = wanted(path, value)
            if chosen:
                converted.add(id(value))
            if chosen or kind != ARRAY:  # an array left alone may well have other paths
                paths.setdefault(id(value), []).append(path)
        elif not is_graph_node(value) or id(value) not in visited:
            visited.add(id(value))
            pending.extend(((*path, name), child) for name, child in reversed(children_of(value)))
    for number, found in paths.items():
        if len(found) > 1 and number in converted:
            listed = "".join(f"  {path_text(path)}\n" for path in found)
            raise ValueError(f"Found duplicate at paths:\n  ---\n{listed}  ---")
