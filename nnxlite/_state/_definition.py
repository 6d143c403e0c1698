"""`State` and `FlatState`: the two forms of path-keyed leaves, and how filters divide them."""

from __future__ import annotations

import collections.abc as abc
import copy as copy_lib
import types
import typing as tp

import jax

from nnxlite._errors import path_text
from nnxlite._outline import Shown
from nnxlite._state._keys import Path, in_order, sorted_keys, sorted_pairs
from nnxlite._state._leaves import same, same_leaf
from nnxlite._state._pure import ExtractFn, ReplaceFn, extract_value, replacements
from nnxlite._state._walk import (
    MISSING,
    NODES,
    STATES,
    Mapping,
    adopted,
    as_dicts,
    flat,
    nested,
    reaches,
    transformed,
)
from nnxlite._text import Text, mapping_node, sequence_node
from nnxlite._versions import epoch, touch
from nnxlite.filters import Filter, Predicate, filters_to_predicates, match_index

K = tp.TypeVar("K")
V = tp.TypeVar("V")
A = tp.TypeVar("A")
S = tp.TypeVar("S", bound="State[tp.Any, tp.Any]")

FlatItems: tp.TypeAlias = abc.Mapping[Path, V] | abc.Iterable[tuple[Path, V]]
"""Leaves with their paths: a FlatState is one."""


class PathFn(tp.Protocol):
    """What a leaf becomes, given its path."""

    def __call__(self, path: Path, leaf: tp.Any, /) -> tp.Any:
        """The new leaf."""
        ...


if tp.TYPE_CHECKING:
    _Methods = abc.MutableMapping
else:

    class _Methods(tp.Generic[K, V]):
        """The mixin methods of a mutable mapping, without its slow `isinstance`."""

        __slots__ = ()

        popitem = abc.MutableMapping.popitem
        clear = abc.MutableMapping.clear
        update = abc.MutableMapping.update


class State(Shown, _Methods[K, V]):
    """A nested mapping of leaves, with attribute access; a pytree.

    Args:
        mapping: a mapping, or an iterable of (key, value) pairs; inner mappings become States.
        _copy: False to take over `mapping`, a dict, and the dicts in it, instead of copying them.

    Raises:
        TypeError: when `mapping` is neither.
        ValueError: when it contains itself.

    >>> import nnxlite as nnx
    >>> state = nnx.State({"head": {"bias": 1, "kernel": 2}})
    >>> state.head.bias = 3
    >>> state["head"]["bias"], nnx.to_flat_state(state).paths
    (3, (('head', 'bias'), ('head', 'kernel')))
    """

    __slots__ = ("_mapping", "_nnx_version", "__weakref__")

    _mapping: dict[K, V]
    _nnx_version: int

    if not tp.TYPE_CHECKING:  # any number of parameters, as in the annotation `State[str]`
        __class_getitem__ = classmethod(types.GenericAlias)

    def __init__(
        self,
        mapping: abc.Mapping[K, tp.Any] | abc.Iterable[tuple[K, tp.Any]],
        /,
        *,
        _copy: bool = True,
    ) -> None:
        wrap = type(self)._nnx_wrap
        source: tp.Any = mapping
        if type(source) in STATES:
            source = source._mapping
        elif not isinstance(source, abc.Mapping):
            source = _as_dict(type(self), source)
        if _copy or not isinstance(source, dict):
            source = transformed(source, wrap)
        else:
            source = adopted(source, wrap)
        try:
            former = _get_version(self)
        except AttributeError:  # a new State; else its plans read another mapping now
            former = 0
        _set_mapping(self, source)
        _set_version(self, 0)
        if former:
            epoch.move()

    def __init_subclass__(cls, **kwargs: tp.Any) -> None:
        super().__init_subclass__(**kwargs)
        _register(cls)

    @classmethod
    def _nnx_wrap(cls, mapping: dict[tp.Any, tp.Any]) -> tp.Self:
        """A State over a dict of leaves and States, taken as it is.  For the library only."""
        new = object.__new__(cls)
        _set_mapping(new, mapping)
        _set_version(new, 0)
        return new

    # reading ---------------------------------------------------------------------------------

    @property
    def raw_mapping(self) -> dict[K, tp.Any]:
        """The same leaves in nested plain dicts, built each time."""
        return tp.cast(tp.Any, transformed(self._mapping, None))

    def __getitem__(self, key: K) -> tp.Any:
        value: tp.Any = self._mapping[key]
        if type(value) is dict:  # a pytree operation put it here
            value = self._mapping[key] = tp.cast(tp.Any, type(self)(value))
        return value

    def __getattr__(self, name: str) -> tp.Any:
        if name in _SLOTS or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")
        try:
            return self[tp.cast(tp.Any, name)]
        except KeyError:
            raise AttributeError(self._nnx_no_attribute(name)) from None

    def _nnx_no_attribute(self, name: str) -> str:
        keys = sorted_keys(self._mapping)
        known = ", ".join(map(repr, keys[:10])) + (", ..." if len(keys) > 10 else "")
        return f"No attribute {name!r} in {type(self).__name__}; its keys are: {known or 'none'}."

    def __contains__(self, key: object) -> bool:
        return key in self._mapping

    def __iter__(self) -> abc.Iterator[K]:
        return iter(self._mapping)

    def __reversed__(self) -> abc.Iterator[K]:
        return reversed(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def keys(self) -> abc.KeysView[K]:
        """The keys, in the order they were put in."""
        return self._mapping.keys()

    def values(self) -> abc.ValuesView[tp.Any]:
        """The values, inner mappings as States."""
        return self._nnx_settled().values()

    def items(self) -> abc.ItemsView[K, tp.Any]:
        """The (key, value) pairs, inner mappings as States."""
        return self._nnx_settled().items()

    def _nnx_settled(self) -> dict[K, tp.Any]:
        """The mapping, with what pytree operations left in it made States."""
        mapping = self._mapping
        for key in [k for k, v in mapping.items() if type(v) is dict]:
            self[key]
        return mapping

    def get(self, key: tp.Any, default: tp.Any = None) -> tp.Any:
        """The value under a key, or `default`.

        Args:
            key: the key.
            default: what to return where there is none.
        """
        return self[key] if key in self._mapping else default

    # writing ---------------------------------------------------------------------------------

    def __setitem__(self, key: K, value: tp.Any) -> None:
        if isinstance(value, abc.Mapping):
            value = self._nnx_inner(key, value)
        touch(self)  # before and after: what interrupts this must leave no plan valid
        self._mapping[key] = value
        touch(self)

    def _nnx_inner(self, key: K, value: Mapping) -> State[tp.Any, tp.Any]:
        """What a mapping becomes when it is put in: a State stays the same object."""
        if type(value) not in STATES:
            return type(self)(value)
        if reaches(value, self):
            raise ValueError(
                f"Cannot put a {type(value).__name__} under {key!r} of a {type(self).__name__} "
                "that it contains: a State has no cycles. Put a copy there (copy.deepcopy)."
            )
        return tp.cast(tp.Any, value)

    def __setattr__(self, name: str, value: tp.Any) -> None:
        if name in _SLOTS:
            object.__setattr__(self, name, value)
        elif name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"Cannot set {name!r} of {type(self).__name__}.")
        else:
            self[tp.cast(tp.Any, name)] = value

    def __delitem__(self, key: K) -> None:
        if key in self._mapping:
            touch(self)
        del self._mapping[key]
        touch(self)

    def __delattr__(self, name: str) -> None:
        if name not in self._mapping:
            raise AttributeError(self._nnx_no_attribute(name))
        del self[tp.cast(tp.Any, name)]

    def pop(self, key: K, default: tp.Any = MISSING) -> tp.Any:
        """Take out a key; its value, or `default` (KeyError without one) where it is not there.

        Args:
            key: the key.
            default: what to return where there is none.
        """
        if key not in self._mapping and default is not MISSING:
            return default
        value = self[key]
        del self[key]
        return value

    def setdefault(self, key: K, default: tp.Any = None) -> tp.Any:
        """The value under a key, put there first if there is none.

        Args:
            key: the key.
            default: the new value.
        """
        if key not in self._mapping:
            self[key] = default
        return self[key]

    # comparing and copying -------------------------------------------------------------------

    __hash__ = None  # pyright: ignore[reportAssignmentType] - mutable

    def __eq__(self, other: object) -> bool:
        """Whether the other mapping has the same keys and equal leaves.

        Variables are equal when class, metadata and value are; arrays when shape, dtype and all
        elements are.
        """
        if not isinstance(other, abc.Mapping):
            return NotImplemented
        return same(self, other)

    def __copy__(self) -> tp.Self:
        return self._nnx_wrap(dict(self._mapping))

    def __deepcopy__(self, memo: dict[int, tp.Any]) -> tp.Self:
        copied = lambda leaf: copy_lib.deepcopy(leaf, memo)
        new = memo[id(self)] = self._nnx_wrap(transformed(self._mapping, self._nnx_wrap, copied))
        return new

    def __reduce__(self) -> tp.Any:
        return _restored, (type(self), self.raw_mapping)

    def __nnx_text__(self) -> Text:
        return mapping_node(self, self._mapping)

    # algebra ---------------------------------------------------------------------------------

    def __or__(self, other: Mapping) -> State[tp.Any, tp.Any]:
        if not isinstance(other, abc.Mapping):
            return NotImplemented
        return self if not other else State.merge(self, other)

    def __sub__(self, other: Mapping) -> State[tp.Any, tp.Any]:
        if not isinstance(other, abc.Mapping):
            return NotImplemented
        if not other:
            return self
        known = set(flat(as_state("State - other", other))[0])
        kept = [pair for pair in zip(*flat(self), strict=True) if pair[0] not in known]
        return State.from_flat_path(kept)

    def flat_state(self) -> FlatState[V]:
        """The leaves as a `FlatState`."""
        return FlatState.from_sorted_keys_values(*flat(self))

    @classmethod
    def from_flat_path(cls, flat_state: FlatItems[V], /) -> tp.Self:
        """A State from a mapping, or an iterable of pairs, from paths to leaves.

        Where a path comes twice the later leaf counts.

        Args:
            flat_state: pairs of a path, a tuple of keys, and a leaf.

        Raises:
            TypeError: for another argument, or when a path leads through a leaf.
            ValueError: for an empty path.
        """
        paths, leaves = _unzipped("State.from_flat_path", flat_state)
        if not all(paths):
            raise ValueError("A leaf with an empty path has no place in a State.")
        return cls._nnx_wrap(nested(paths, leaves, cls._nnx_wrap))

    def map(self, f: PathFn) -> State[K, tp.Any]:
        """The State of `f(path, leaf)`.

        Args:
            f: a function of a path, a tuple of keys, and a leaf.
        """
        paths, leaves = flat(self)
        mapped = [f(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        return _state(paths, mapped)

    @tp.overload
    def split(self, first: Filter, /) -> State[K, V]: ...
    @tp.overload
    def split(
        self, first: Filter, second: Filter, /, *filters: Filter
    ) -> tuple[State[K, V], ...]: ...
    def split(self, first: Filter, /, *filters: Filter) -> tp.Any:
        """See `nnx.split_state`.

        Args:
            first, filters: Variable types, strings, predicates, ...
        """
        groups = _split_flat(self.flat_state(), (first, *filters))
        return _one_or_all([group.to_nested_state() for group in groups], filters)

    @tp.overload
    def filter(self, first: Filter, /) -> State[K, V]: ...
    @tp.overload
    def filter(
        self, first: Filter, second: Filter, /, *filters: Filter
    ) -> tuple[State[K, V], ...]: ...
    def filter(self, first: Filter, /, *filters: Filter) -> tp.Any:
        """See `nnx.filter_state`.

        Args:
            first, filters: Variable types, strings, predicates, ...
        """
        groups = _filter_flat(self.flat_state(), (first, *filters))
        return _one_or_all([group.to_nested_state() for group in groups], filters)

    @staticmethod
    def merge(state: Mapping, /, *states: Mapping) -> State[tp.Any, tp.Any]:
        """See `nnx.merge_state`.

        Args:
            state, states: States or nested mappings.
        """
        if not states and isinstance(state, State):
            return state
        parts = [flat(as_state("State.merge", s), as_given=True) for s in (state, *states)]
        paths = [path for paths, _ in parts for path in paths]
        return _state(paths, [leaf for _, leaves in parts for leaf in leaves])

    def to_pure_dict(self, extract_fn: ExtractFn | None = None) -> dict[tp.Any, tp.Any]:
        """See `nnx.to_pure_dict`.

        Args:
            extract_fn: what a leaf becomes.
        """
        paths, leaves = flat(self)
        return nested(paths, map(extract_fn or extract_value, leaves), None)

    def replace_by_pure_dict(self, pure_dict: Mapping, replace_fn: ReplaceFn | None = None) -> None:
        """See `nnx.replace_by_pure_dict`.

        Args:
            pure_dict: nested dicts of values.
            replace_fn: `replace_fn(leaf, value)` gives the new leaf.
        """
        for node, key, leaf in replacements(self, pure_dict, replace_fn):
            node[key] = leaf


tp.cast(tp.Any, abc.MutableMapping).register(State)

_SLOTS = frozenset({"_mapping", "_nnx_version"})
_set_mapping = State.__dict__["_mapping"].__set__
_set_version = State.__dict__["_nnx_version"].__set__
_get_version = State.__dict__["_nnx_version"].__get__


def _as_dict(cls: type, pairs: tp.Any) -> dict[tp.Any, tp.Any]:
    if not isinstance(pairs, abc.Iterable):
        raise TypeError(
            f"{cls.__name__} needs a mapping or an iterable of (key, value) pairs, got "
            f"{type(pairs).__name__}."
        )
    return dict(pairs)


def _restored(cls: type[S], mapping: dict[tp.Any, tp.Any]) -> S:
    return cls(mapping, _copy=False)


# States as pytrees: one DictKey a level, sorted; the static data are the keys. Inner States are dicts
# to JAX, as in the reference: functions over pytrees (those of optax) look for dicts.


def _flatten(state: State[tp.Any, tp.Any]) -> tuple[abc.Sequence[tp.Any], Path]:
    keys, children = in_order(as_dicts(state._mapping))
    return children, keys


def _flatten_with_keys(state: State[tp.Any, tp.Any]) -> tuple[tp.Any, Path]:
    children, keys = _flatten(state)
    return tuple(zip(map(jax.tree_util.DictKey, keys), children, strict=True)), keys


def _register(cls: type[State[tp.Any, tp.Any]]) -> None:
    STATES.add(cls)
    NODES.add(cls)
    new, set_mapping, set_version = object.__new__, _set_mapping, _set_version

    def unflatten(keys: Path, children: abc.Iterable[tp.Any]) -> State[tp.Any, tp.Any]:
        state = new(cls)
        set_mapping(state, dict(zip(keys, children)))
        set_version(state, 0)
        return state

    jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, unflatten, _flatten)


_register(State)


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
        paths, leaves = _unzipped("FlatState", items)
        if sort:
            pairs = sorted_pairs(zip(paths, leaves, strict=True))
            paths, leaves = [path for path, _ in pairs], [leaf for _, leaf in pairs]
        self._paths = tuple(paths)
        self._leaves = leaves

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
        return _state(self._paths, self._leaves)

    @tp.overload
    def split(self, first: Filter, /) -> FlatState[V]: ...
    @tp.overload
    def split(
        self, first: Filter, second: Filter, /, *filters: Filter
    ) -> tuple[FlatState[V], ...]: ...
    def split(self, first: Filter, /, *filters: Filter) -> tp.Any:
        """See `nnx.split_state`.

        Args:
            first, filters: Variable types, strings, predicates, ...
        """
        return _one_or_all(_split_flat(self, (first, *filters)), filters)

    @tp.overload
    def filter(self, first: Filter, /) -> FlatState[V]: ...
    @tp.overload
    def filter(
        self, first: Filter, second: Filter, /, *filters: Filter
    ) -> tuple[FlatState[V], ...]: ...
    def filter(self, first: Filter, /, *filters: Filter) -> tp.Any:
        """See `nnx.filter_state`.

        Args:
            first, filters: Variable types, strings, predicates, ...
        """
        return _one_or_all(_filter_flat(self, (first, *filters)), filters)

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


jax.tree_util.register_pytree_node(
    FlatState,
    lambda flat: (flat._leaves, flat._paths),
    lambda paths, leaves: FlatState.from_sorted_keys_values(paths, list(leaves)),
)


def _unzipped(what: str, items: tp.Any) -> tuple[list[Path], list[tp.Any]]:
    """The paths, as tuples, and the leaves of pairs."""
    if not isinstance(items, abc.Iterable):
        raise TypeError(
            f"{what} needs a mapping from paths to leaves, or an iterable of (path, leaf) pairs, "
            f"got {type(items).__name__}."
        )
    pairs = list(items.items() if isinstance(items, abc.Mapping) else items)
    return [tuple(path) for path, _ in pairs], [leaf for _, leaf in pairs]


def _state(paths: abc.Iterable[Path], leaves: abc.Iterable[tp.Any]) -> State[tp.Any, tp.Any]:
    return State._nnx_wrap(nested(paths, leaves, State._nnx_wrap))


def _deal(
    flat: FlatState[V], predicates: tuple[Predicate, ...]
) -> tuple[list[FlatState[V]], FlatState[V]]:
    """The leaves each predicate is the first to match, and those none matches."""
    groups: list[tuple[list[Path], list[V]]] = [([], []) for _ in predicates]
    rest: tuple[list[Path], list[V]] = ([], [])
    for path, leaf in zip(flat._paths, flat._leaves, strict=True):
        index = match_index(predicates, path, leaf)
        paths, leaves = rest if index is None else groups[index]
        paths.append(path)
        leaves.append(leaf)
    make = FlatState.from_sorted_keys_values
    return [make(*group) for group in groups], make(*rest)


def _split_flat(flat: FlatState[V], filters: tuple[Filter, ...]) -> list[FlatState[V]]:
    groups, rest = _deal(flat, filters_to_predicates(filters))
    if rest:
        raise ValueError(non_exhaustive(filters, rest))
    return groups


def _filter_flat(flat: FlatState[V], filters: tuple[Filter, ...]) -> list[FlatState[V]]:
    return _deal(flat, filters_to_predicates(filters))[0]


def non_exhaustive(filters: abc.Sequence[Filter], rest: abc.Sequence[tuple[Path, tp.Any]]) -> str:
    """The message for leaves that no filter matches."""
    shown = [f"'{path_text(path)}' ({type(leaf).__name__})" for path, leaf in rest[:5]]
    if len(rest) > 5:
        shown.append("...")
    matched = "1 leaf matches" if len(rest) == 1 else f"{len(rest)} leaves match"
    return (
        f"Non-exhaustive filters, got a non-empty remainder: {matched} none of "
        f"{list(filters)}: {', '.join(shown)}. Use `...` as the last filter to match all remaining."
    )


def _one_or_all(groups: list[A], others: tuple[Filter, ...]) -> A | tuple[A, ...]:
    return tuple(groups) if others else groups[0]


def as_state(function: str, state: tp.Any) -> State[tp.Any, tp.Any]:
    """The argument as a State; other mappings are copied into one."""
    if isinstance(state, State):
        return state
    if isinstance(state, FlatState):
        return state.to_nested_state()
    if isinstance(state, abc.Mapping):
        return State(state)
    raise TypeError(
        f"{function} needs a State (or another mapping), got {type(state).__name__}. For an object "
        "with Variables in it, take nnx.state(object) first."
    )
