"""The public functions on states; they take other mappings too, and read them as States."""

from __future__ import annotations

import collections.abc as abc
import typing as tp

import jax

from nnxlite._state._definition import FlatItems, FlatState, PathFn, State, as_state
from nnxlite._state._keys import Path
from nnxlite._state._leaves import content
from nnxlite._state._pure import ExtractFn, ReplaceFn, to_int
from nnxlite._state._walk import Mapping, flat, transformed
from nnxlite._traversals import flatten_to_sequence, unflatten_mapping
from nnxlite.filters import Filter
from nnxlite.variables import Variable, is_variable

V = tp.TypeVar("V")
A = tp.TypeVar("A")
M = tp.TypeVar("M", bound=abc.Mapping[tp.Any, tp.Any])


def to_flat_state(state: abc.Mapping[tp.Any, V]) -> FlatState[V]:
    """The leaves of a State, sorted by path; the inverse of `from_flat_state`.

    Args:
        state: a State or nested mapping.

    Returns:
        A `FlatState`: a sequence of pairs (path, leaf).

    Raises:
        TypeError: for something that is not a mapping.

    >>> import nnxlite as nnx
    >>> list(nnx.to_flat_state(nnx.State({"b": {"c": 1}, "a": 2})))
    [(('a',), 2), (('b', 'c'), 1)]
    """
    return FlatState.from_sorted_keys_values(*flat(as_state("to_flat_state", state)))


@tp.overload
def from_flat_state(flat_state: FlatItems[V]) -> State[tp.Any, V]: ...
@tp.overload
def from_flat_state(flat_state: FlatItems[tp.Any], *, cls: type[M]) -> M: ...
def from_flat_state(flat_state: FlatItems[tp.Any], *, cls: tp.Any = State) -> tp.Any:
    """The nested mapping, of class `cls`, of a FlatState or of pairs of path and leaf.

    Where a path comes twice the later leaf counts.

    Args:
        flat_state: a FlatState, or pairs (path, leaf).
        cls: class of the result and of the mappings in it.

    Returns:
        A nested mapping.

    Raises:
        TypeError: for another argument, or when a path leads through a leaf.
        ValueError: for an empty path.

    >>> import nnxlite as nnx
    >>> nnx.from_flat_state([(("b", "c"), 1), (("a",), 2)]) == {"a": 2, "b": {"c": 1}}
    True
    """
    if issubclass(cls, State):
        return cls.from_flat_path(flat_state)
    return _of_class(State.from_flat_path(flat_state), cls)


def _of_class(state: State[tp.Any, tp.Any], cls: tp.Any) -> tp.Any:
    if type(state) is cls:
        return state
    mapping = state.raw_mapping
    return mapping if cls is dict else cls(mapping)


@tp.overload
def split_state(state: Mapping, first: Filter, /) -> State[tp.Any, tp.Any]: ...
@tp.overload
def split_state(
    state: Mapping, first: Filter, second: Filter, /, *filters: Filter
) -> tuple[State[tp.Any, tp.Any], ...]: ...
def split_state(state: Mapping, first: Filter, /, *filters: Filter) -> tp.Any:
    """One State for each filter: the leaves that it is the first to match.

    Args:
        state: a State or nested mapping.
        first, filters: Variable types, strings, predicates, ...; a leaf goes to the first that
            matches.

    Returns:
        A State for one filter and a tuple for several; `merge_state` is the inverse.

    Raises:
        ValueError: when a leaf is left over, or `...` is not the last filter.
        TypeError: for something that is not a mapping or not a filter.

    >>> import nnxlite as nnx
    >>> state = nnx.State({"a": nnx.Param(1), "b": nnx.BatchStat(2)})
    >>> params, rest = nnx.split_state(state, nnx.Param, ...)
    >>> list(params), list(rest)
    (['a'], ['b'])
    """
    return as_state("split_state", state).split(first, *filters)


@tp.overload
def filter_state(state: Mapping, first: Filter, /) -> State[tp.Any, tp.Any]: ...
@tp.overload
def filter_state(
    state: Mapping, first: Filter, second: Filter, /, *filters: Filter
) -> tuple[State[tp.Any, tp.Any], ...]: ...
def filter_state(state: Mapping, first: Filter, /, *filters: Filter) -> tp.Any:
    """As `split_state`, but leaves that no filter matches are left out.

    Args:
        state: a State or nested mapping.
        first, filters: Variable types, strings, predicates, ...; a leaf goes to the first that
            matches.

    Returns:
        A State for one filter, a tuple of States for several.

    Raises:
        TypeError: for something that is not a mapping or not a filter.

    >>> import nnxlite as nnx
    >>> state = nnx.State({"a": nnx.Param(1), "b": nnx.BatchStat(2)})
    >>> list(nnx.filter_state(state, nnx.BatchStat))
    ['b']
    """
    return as_state("filter_state", state).filter(first, *filters)


@tp.overload
def merge_state(state: Mapping, /, *states: Mapping) -> State[tp.Any, tp.Any]: ...
@tp.overload
def merge_state(state: Mapping, /, *states: Mapping, cls: type[M]) -> M: ...
def merge_state(state: Mapping, /, *states: Mapping, cls: tp.Any = State) -> tp.Any:
    """One mapping of class `cls` with the leaves of all; a later one counts where paths agree.

    Keys stay in the order in which they come first. A single State is returned as it is.

    Args:
        state, states: States or nested mappings.
        cls: class of the result.

    Returns:
        A new mapping of class `cls`.

    Raises:
        TypeError: for something that is not a mapping, and when a path of a later one leads through
            a leaf.

    >>> import nnxlite as nnx
    >>> nnx.merge_state(nnx.State({"a": {"b": 1}}), nnx.State({"a": {"c": 2}})).raw_mapping
    {'a': {'b': 1, 'c': 2}}
    """
    if not states and isinstance(state, cls):
        return state
    return _of_class(State.merge(state, *states), cls)


def map_state(f: PathFn, state: Mapping) -> State[tp.Any, tp.Any]:
    """The State of `f(path, leaf)` for each leaf.

    Args:
        f: a function of a path, a tuple of keys, and a leaf.
        state: a State or nested mapping.

    Returns:
        A new State of the same structure.

    >>> import nnxlite as nnx
    >>> nnx.map_state(lambda path, x: x + 1, nnx.State({"a": {"b": 1}})).raw_mapping
    {'a': {'b': 2}}
    """
    return as_state("map_state", state).map(f)


def diff(state: Mapping, other: Mapping) -> State[tp.Any, tp.Any]:
    """The leaves of `state` at paths where `other` has no leaf; the same as `state - other`.

    >>> import nnxlite as nnx
    >>> nnx.statelib.diff(nnx.State({"a": 1, "b": 2}), nnx.State({"a": 9})).raw_mapping
    {'b': 2}
    """
    return as_state("diff", state) - as_state("diff", other)


def to_pure_dict(state: Mapping, extract_fn: ExtractFn | None = None) -> dict[tp.Any, tp.Any]:
    """Nested plain dicts of the values in a State, as for a checkpoint.

    Args:
        state: a State or nested mapping.
        extract_fn: what a leaf becomes; by default a Variable's value, and other leaves themselves.

    Returns:
        New nested dicts, with the keys of the State.

    >>> import nnxlite as nnx
    >>> nnx.to_pure_dict(nnx.State({"a": {"b": nnx.Param(1)}}))
    {'a': {'b': 1}}
    """
    return as_state("to_pure_dict", state).to_pure_dict(extract_fn)


def replace_by_pure_dict(
    state: State[tp.Any, tp.Any], pure_dict: Mapping, replace_fn: ReplaceFn | None = None
) -> None:
    """Put the values of a pure dict, which may be partial, into the leaves of a State.

    A key that the State has as a number may be a string in the dict, as after JSON.

    Args:
        state: a State, which is changed in place.
        pure_dict: nested dicts of values.
        replace_fn: `replace_fn(leaf, value)` gives the new leaf; by default a copy of a Variable
            with the new value, and otherwise the value.

    Raises:
        ValueError: before anything is replaced, for a path that the State does not have.

    >>> import nnxlite as nnx
    >>> state = nnx.State({"a": {0: nnx.Param(1)}, "b": 2})
    >>> nnx.replace_by_pure_dict(state, {"a": {"0": 3}})
    >>> nnx.to_pure_dict(state)
    {'a': {0: 3}, 'b': 2}
    """
    if not isinstance(state, State):
        raise TypeError(f"replace_by_pure_dict needs a State, got {type(state).__name__}.")
    state.replace_by_pure_dict(pure_dict, replace_fn)


def restore_int_paths(pure_dict: Mapping) -> dict[tp.Any, tp.Any]:
    """Nested plain dicts with the keys that spell a whole number turned back into numbers.

    Undoes what formats with string keys only do to a pure dict.

    Args:
        pure_dict: nested mappings.

    Returns:
        New nested dicts.

    Raises:
        ValueError: when two keys become the same.

    >>> import nnxlite as nnx
    >>> nnx.restore_int_paths({"layers": {"0": 1, "1": 2}})
    {'layers': {0: 1, 1: 2}}
    """
    pairs = flatten_to_sequence(as_state("restore_int_paths", pure_dict))
    restored: dict[Path, tp.Any] = {}
    former: dict[Path, Path] = {}
    for path, leaf in pairs:
        new = tuple([to_int(key) for key in path])
        if new in former:
            raise ValueError(f"The paths {former[new]} and {path} both become {new}.")
        restored[new], former[new] = leaf, path
    return unflatten_mapping(restored)


@tp.overload
def pure(tree: Variable[A]) -> A: ...
@tp.overload
def pure(tree: A) -> A: ...
def pure(tree: tp.Any) -> tp.Any:
    """The tree with every Variable in it, Variables inside Variables too, replaced by its value.

    Callbacks do not run; a Variable that lives in a reference gives the content.

    Args:
        tree: any pytree, with Variables in it.

    Returns:
        A new tree of the same structure.

    >>> import nnxlite as nnx
    >>> nnx.pure({"a": [nnx.Param(1), 2]})
    {'a': [1, 2]}
    """
    if isinstance(tree, State):  # iterative, where JAX would recurse
        wrap = type(tree)._nnx_wrap
        return wrap(transformed(tree._mapping, wrap, _pure_tree))
    return _pure_tree(tree)


def _pure_tree(tree: tp.Any) -> tp.Any:
    return jax.tree.map(_pure_leaf, tree, is_leaf=is_variable)


def _pure_leaf(leaf: tp.Any) -> tp.Any:
    if not isinstance(leaf, Variable):
        return leaf
    value = content(leaf)
    return value if hasattr(value, "dtype") else _pure_tree(value)


@tp.overload
def as_pure(tree: Variable[A]) -> A: ...
@tp.overload
def as_pure(tree: A) -> A: ...
def as_pure(tree: tp.Any) -> tp.Any:
    """The same as `pure`.

    Args:
        tree: any pytree, with Variables in it.

    Returns:
        A new tree of the same structure.

    >>> import nnxlite as nnx
    >>> nnx.as_pure([nnx.Param(1), 2])
    [1, 2]
    """
    return pure(tree)
