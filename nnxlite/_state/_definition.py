"""`State`: path-keyed leaves as nested mappings, and the functions on states."""

from __future__ import annotations

import collections.abc as abc
import copy as copy_lib
import itertools
import typing as tp

import jax

from nnxlite._base.errors import path_text
from nnxlite._base.interning import epoch, touch
from nnxlite._base.outline import Shown
from nnxlite._base.text import Text, mapping_node
from nnxlite._state._flat import (
    INNER_MAPPINGS,
    STATES,
    FlatItems,
    Mapping,
    Path,
    as_dicts,
    as_state,
    content,
    filter_state,
    flat,
    in_order,
    nested,
    pairs_of,
    reaches,
    same,
    sorted_keys,
    split_state,
    state_of,
    to_flat_state,
    transformed,
)
from nnxlite._state.traversals import flatten_to_sequence, unflatten_mapping
from nnxlite.variables._definition import MISSING
from nnxlite.variables._variable import Variable, is_variable

__all__ = ["State", "as_pure", "from_flat_state", "map_state", "merge_state"]
__all__ += ["pure", "replace_by_pure_dict", "restore_int_paths", "to_pure_dict"]

K = tp.TypeVar("K")
V = tp.TypeVar("V")
A = tp.TypeVar("A")
M = tp.TypeVar("M", bound=abc.Mapping[tp.Any, tp.Any])


PathFn: tp.TypeAlias = tp.Callable[[Path, tp.Any], tp.Any]
"""What a leaf becomes, given its path."""


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
    replace = replace_fn or (lambda leaf, x: leaf.replace(x) if isinstance(leaf, Variable) else x)
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


class State(Shown, abc.MutableMapping[K, V]):
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

    def __init__(
        self,
        mapping: abc.Mapping[K, tp.Any] | abc.Iterable[tuple[K, tp.Any]],
        /,
        *,
        _copy: bool = True,
    ) -> None:
        source: tp.Any = mapping
        if type(source) in STATES:
            source = source._mapping
        elif not isinstance(source, abc.Mapping):
            if not isinstance(source, abc.Iterable):
                raise TypeError(
                    f"{type(self).__name__} needs a mapping or an iterable of (key, value) pairs, got "
                    f"{type(source).__name__}."
                )
            source = dict(source)
        if _copy or not isinstance(source, dict):
            source = transformed(source, type(self)._nnx_wrap)
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
            value = self._mapping[key] = tp.cast(tp.Any, self._nnx_wrap(value))
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

    # writing ---------------------------------------------------------------------------------

    def __setitem__(self, key: K, value: tp.Any) -> None:
        if isinstance(value, abc.Mapping):
            value = self._nnx_inner(key, value)
        touch(self)  # before and after: what interrupts this must leave no plan valid
        self._mapping[key] = value
        touch(self)

    def setdefault(self, key: K, default: tp.Any = None) -> tp.Any:
        """What is under a key, where `default` is put first if there is nothing.

        Args:
            key: the key.
            default: a leaf, or a mapping, which becomes a State.
        """
        if key not in self:
            self[key] = default
        return self[key]  # not `default`: what is written to that, the State does not see

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
        return type(self), (self.raw_mapping,)

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
        known = dict(flat(as_state("State - other", other)))
        return State.from_flat_path([pair for pair in flat(self) if pair[0] not in known])

    flat_state = to_flat_state
    split = split_state
    filter = filter_state
    to_pure_dict = to_pure_dict
    replace_by_pure_dict = replace_by_pure_dict

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
        items = pairs_of("State.from_flat_path", flat_state)
        pairs = [(tuple(path), leaf) for path, leaf in items]
        if not all(path for path, _ in pairs):
            raise ValueError("A leaf with an empty path has no place in a State.")
        return cls._nnx_wrap(nested(pairs, cls._nnx_wrap))

    def map(self, f: PathFn) -> State[K, tp.Any]:
        """The State of `f(path, leaf)`.

        Args:
            f: a function of a path, a tuple of keys, and a leaf.
        """
        return state_of([(path, f(path, leaf)) for path, leaf in flat(self)])

    @staticmethod
    def merge(state: Mapping, /, *states: Mapping) -> State[tp.Any, tp.Any]:
        """See `nnx.merge_state`.

        Args:
            state, states: States or nested mappings.
        """
        if not states and isinstance(state, State):
            return state
        parts = [flat(as_state("State.merge", s), as_given=True) for s in (state, *states)]
        return state_of(itertools.chain(*parts))


_SLOTS = frozenset({"_mapping", "_nnx_version"})
_set_mapping = State.__dict__["_mapping"].__set__
_set_version = State.__dict__["_nnx_version"].__set__
_get_version = State.__dict__["_nnx_version"].__get__


# States as pytrees: one DictKey a level, sorted; the static data are the keys. Inner States are dicts
# to JAX, as in the reference: functions over pytrees (those of optax) look for dicts.


def _flatten(state: State[tp.Any, tp.Any]) -> tuple[abc.Sequence[tp.Any], Path]:
    keys, children = in_order(as_dicts(state._mapping))
    return children, keys


def _flatten_with_keys(state: State[tp.Any, tp.Any]) -> tuple[tp.Any, Path]:
    children, keys = _flatten(state)
    return tuple(zip(map(jax.tree_util.DictKey, keys), children, strict=True)), keys


def _register(cls: type[State[tp.Any, tp.Any]]) -> None:
    STATES.append(cls)
    INNER_MAPPINGS.add(cls)
    new, set_mapping, set_version = object.__new__, _set_mapping, _set_version

    def unflatten(keys: Path, children: abc.Iterable[tp.Any]) -> State[tp.Any, tp.Any]:
        state = new(cls)
        set_mapping(state, dict(zip(keys, children)))
        set_version(state, 0)
        return state

    jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, unflatten, _flatten)


_register(State)


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
