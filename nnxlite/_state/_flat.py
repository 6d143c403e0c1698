"""`FlatState`, the leaves of a State as a sequence, and the functions on states.

Most functions are methods of `State` as well.  They take other mappings, and read them as States.
"""

from __future__ import annotations

import collections.abc as abc
import typing as tp

import jax

from nnxlite._base.errors import non_exhaustive, path_text
from nnxlite._base.outline import Shown
from nnxlite._base.text import Text, sequence_node
from nnxlite._state._walk import (
    STATES,
    Mapping,
    Pairs,
    Path,
    content,
    flat,
    nested,
    same_leaf,
    sort_key,
    sorted_keys,
    state_of,
    transformed,
)
from nnxlite._state.traversals import flatten_to_sequence, unflatten_mapping
from nnxlite.filters import Filter, filters_to_predicates, match_index
from nnxlite.variables._definition import MISSING
from nnxlite.variables._variable import Variable, is_variable

if tp.TYPE_CHECKING:
    from nnxlite._state._definition import State

V = tp.TypeVar("V")
A = tp.TypeVar("A")

FlatItems: tp.TypeAlias = abc.Mapping[Path, V] | abc.Iterable[tuple[Path, V]]
"""Leaves with their paths: a FlatState is one."""


class FlatState(Shown, abc.Sequence[tuple[Path, V]]):
    """The leaves of a State as a sequence of (path, leaf) pairs; a pytree of the leaves.

    Args:
        items: a mapping, or an iterable of pairs, from paths to leaves.
        sort: whether to bring them into the order of paths; False when they are in it.

    >>> import nnxlite as nnx
    >>> flat = nnx.FlatState([(("b",), 1), (("a", "c"), 2)], sort=True)
    >>> flat.paths, flat.leaves
    ((('a', 'c'), ('b',)), [2, 1])
    """

    __slots__ = ("_paths", "_leaves", "__weakref__")

    _paths: tuple[Path, ...]
    _leaves: list[V]

    def __init__(self, items: FlatItems[V], /, *, sort: bool) -> None:
        pairs = pairs_of("FlatState", items)
        if sort:
            try:
                pairs.sort(key=lambda pair: pair[0])
            except TypeError:  # keys of different kinds
                pairs.sort(key=lambda pair: [sort_key(key) for key in pair[0]])
        self._paths = tuple([path for path, _ in pairs])
        self._leaves = [leaf for _, leaf in pairs]

    @staticmethod
    def from_sorted_keys_values(
        keys: abc.Sequence[Path], values: abc.Sequence[A], /
    ) -> FlatState[A]:
        """A FlatState of paths that are sorted already, which is not checked.

        A list of values is taken over, not copied.  Raises ValueError where there are not as many
        values as paths.

        Args:
            keys: the paths.
            values: the leaves, in their order.
        """
        if len(keys) != len(values):
            raise ValueError(f"A FlatState of {len(keys)} paths cannot have {len(values)} leaves.")
        new: FlatState[A] = object.__new__(FlatState)
        new._paths = tuple(keys)
        new._leaves = values if type(values) is list else list(values)
        return new

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths, in order."""
        return self._paths

    @property
    def leaves(self) -> list[V]:
        """The leaves, in the order of the paths."""
        return self._leaves

    @tp.overload
    def __getitem__(self, index: int) -> tuple[Path, V]: ...
    @tp.overload
    def __getitem__(self, index: slice) -> FlatState[V]: ...
    def __getitem__(self, index: int | slice) -> tuple[Path, V] | FlatState[V]:
        if isinstance(index, slice):
            return FlatState.from_sorted_keys_values(self._paths[index], self._leaves[index])
        return self._paths[index], self._leaves[index]

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> abc.Iterator[tuple[Path, V]]:
        return iter(zip(self._paths, self._leaves, strict=True))

    def __contains__(self, item: object) -> bool:
        return any(
            type(item) is tuple and len(item) == 2 and p == item[0] and same_leaf(x, item[1])
            for p, x in self
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType] - leaves may be mutable

    def __eq__(self, other: object) -> bool:
        """Whether paths and leaves are equal; leaves compare as in `State`."""
        if not isinstance(other, FlatState):
            return NotImplemented
        return self._paths == other._paths and all(map(same_leaf, self._leaves, other._leaves))

    def __reduce__(self) -> tp.Any:
        return FlatState.from_sorted_keys_values, (self._paths, self._leaves)

    __str__ = Shown.__repr__

    def __nnx_text__(self) -> Text:
        return sequence_node(self, self)

    def to_nested_state(self) -> State[tp.Any, V]:
        """The State of the same leaves; the inverse of `to_flat_state`."""
        return state_of(self)

    def split(self, first: Filter, /, *filters: Filter) -> tp.Any:
        """See `nnx.split_state`.

        Args:
            first, filters: Variable types, strings, predicates, ...
        """
        return _divided(self, (first, *filters), _sorted, exhaustive=True)

    def filter(self, first: Filter, /, *filters: Filter) -> tp.Any:
        """See `nnx.filter_state`.

        Args:
            first, filters: Variable types, strings, predicates, ...
        """
        return _divided(self, (first, *filters), _sorted, exhaustive=False)

    @staticmethod
    def merge(
        flat_state: abc.Iterable[tuple[Path, A]], /, *flat_states: abc.Iterable[tuple[Path, A]]
    ) -> FlatState[A]:
        """One FlatState of the leaves of all.

        A path that several have comes once for each, in their order; in `to_nested_state` the last
        one counts.

        Args:
            flat_state, flat_states: FlatStates, or pairs of path and leaf.
        """
        if not flat_states and isinstance(flat_state, FlatState):
            return flat_state
        pairs = [pair for flat in (flat_state, *flat_states) for pair in flat]
        return FlatState(pairs, sort=True)


def _sorted(pairs: list[tuple[Path, tp.Any]]) -> FlatState[tp.Any]:
    paths, leaves = [path for path, _ in pairs], [leaf for _, leaf in pairs]
    return FlatState.from_sorted_keys_values(paths, leaves)


jax.tree_util.register_pytree_node(
    FlatState,
    lambda flat: (flat._leaves, flat._paths),
    lambda paths, leaves: FlatState.from_sorted_keys_values(paths, list(leaves)),
)


def pairs_of(what: str, items: tp.Any) -> list[tuple[Path, tp.Any]]:
    """Pairs of path and leaf, the paths as tuples."""
    if not isinstance(items, abc.Iterable):
        raise TypeError(
            f"{what} needs a mapping from paths to leaves, or an iterable of (path, leaf) pairs, "
            f"got {type(items).__name__}."
        )
    pairs = items.items() if isinstance(items, abc.Mapping) else items
    return [(tuple(path), leaf) for path, leaf in pairs]


def _divided(
    pairs: Pairs,
    filters: tuple[Filter, ...],
    made: tp.Callable[[list[tuple[Path, tp.Any]]], tp.Any],
    *,
    exhaustive: bool,
) -> tp.Any:
    """The leaves that each filter is the first to match, as `made` of them; a tuple for several.

    With `exhaustive`, raises ValueError where one is left over.
    """
    predicates = filters_to_predicates(filters)
    groups: list[list[tuple[Path, tp.Any]]] = [[] for _ in (*predicates, None)]
    for path, leaf in pairs:
        index = match_index(predicates, path, leaf)
        groups[-1 if index is None else index].append((path, leaf))
    rest = groups.pop()
    if exhaustive and rest:
        raise ValueError(non_exhaustive(filters, rest))
    states = [made(group) for group in groups]
    return tuple(states) if len(states) > 1 else states[0]


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
    return _sorted(flat(as_state("to_flat_state", state)))


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
    pairs = flat(as_state("split_state", state))
    return _divided(pairs, (first, *filters), state_of, exhaustive=True)


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
    pairs = flat(as_state("filter_state", state))
    return _divided(pairs, (first, *filters), state_of, exhaustive=False)


def to_pure_dict(
    state: Mapping, extract_fn: tp.Callable[[tp.Any], tp.Any] | None = None
) -> dict[tp.Any, tp.Any]:
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
    value = lambda leaf: leaf.get_value() if isinstance(leaf, Variable) else leaf
    extract = extract_fn or value
    return nested([(path, extract(leaf)) for path, leaf in flat(as_state("to_pure_dict", state))])


def replace_by_pure_dict(
    state: State[tp.Any, tp.Any],
    pure_dict: Mapping,
    replace_fn: tp.Callable[[tp.Any, tp.Any], tp.Any] | None = None,
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
    if type(state) not in STATES:
        raise TypeError(f"replace_by_pure_dict needs a State, got {type(state).__name__}.")
    if not isinstance(pure_dict, abc.Mapping):
        raise TypeError(f"replace_by_pure_dict needs a mapping, got {type(pure_dict).__name__}.")
    replace = replace_fn or _replace
    found: list[tuple[tp.Any, tp.Any, tp.Any]] = []
    todo: list[tuple[Path, tp.Any, Mapping]] = [((), state, pure_dict)]
    while todo:
        prefix, node, given = todo.pop()
        for name, value in given.items():
            path, key = (*prefix, name), name if name in node else to_int(name)
            current = node[key] if key in node else MISSING
            is_inner = isinstance(value, abc.Mapping)
            if is_inner and (not value or type(current) in STATES):
                todo.append((path, current, value))
                continue
            whole = isinstance(current, Variable) and isinstance(content(current), abc.Mapping)
            if current is MISSING or type(current) in STATES or (is_inner and not whole):
                there = f"there are the keys {sorted_keys(node)}"
                raise ValueError(
                    f"key in pure_dict not available in state: {path}; the path '{path_text(path)}' "
                    f"holds {_kind(value)}, but in the State "
                    f"{there if current is MISSING else f'it holds {_kind(current)}'}."
                )
            found.append((node, key, replace(current, value)))
    for node, key, leaf in found:
        node[key] = leaf


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
    if type(tree) in STATES:  # iterative, where JAX would recurse
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


as_pure = pure


def as_state(function: str, state: tp.Any) -> tp.Any:
    """The argument as a State; other mappings are copied into one."""
    if type(state) in STATES:
        return state
    if isinstance(state, FlatState):
        return state.to_nested_state()
    if isinstance(state, abc.Mapping):
        return STATES[0](state)
    raise TypeError(
        f"{function} needs a State (or another mapping), got {type(state).__name__}. For an object "
        "with Variables in it, take nnx.state(object) first."
    )


def _replace(leaf: tp.Any, value: tp.Any) -> tp.Any:
    return leaf.replace(value) if isinstance(leaf, Variable) else value


def _kind(value: tp.Any) -> str:
    if isinstance(value, abc.Mapping):
        return f"an inner mapping with the keys {sorted_keys(value)}"
    return f"a leaf ({type(value).__name__})"


def to_int(key: tp.Any) -> tp.Any:
    """The number that a string spells, or the key itself."""
    if isinstance(key, str):
        try:
            return int(key)
        except ValueError:
            pass
    return key
