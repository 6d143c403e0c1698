"""Prefixes: settings for the parts of the arguments of a transform.

A prefix such as `in_axes=(0, None)` gives one setting to each argument.  For graph objects a setting
can depend on the Variable: `StateAxes`, `StateSharding` and `DiffState` map filters to settings.  A
Variable that is reached by two paths must get the same setting by both.

The specs of the filtered transforms are prefixes of other settings: `node_prefix` takes which
parts of a prefix are settings.  `_labels.py` makes one setting for each leaf of them.
"""

from __future__ import annotations

import typing as tp

import jax

from nnxlite._base.errors import path_text
from nnxlite._base.jax import as_integer, flatten_one_level, is_pytree_leaf, key_name
from nnxlite._state._definition import State
from nnxlite.boundary._inputs import is_root
from nnxlite.filters import Filter, PathIn, Predicate, to_predicate
from nnxlite.graph._kinds import Kind, kind_of
from nnxlite.graph._rebuild import Path
from nnxlite.objects._fields import Held, keyed_children
from nnxlite.variables._definition import MISSING
from nnxlite.variables._variable import Variable


class PrefixMapping:
    """Settings that depend on the Variable, by filter; the first filter that matches decides."""

    what: tp.ClassVar[str] = "setting"
    _filters: tuple[Filter, ...] = ()
    _settings: tuple[tp.Any, ...] = ()
    _predicates: tuple[Predicate, ...] = ()

    def __init__(
        self, mapping: tp.Mapping[tp.Any, tp.Any] | tp.Iterable[tuple[Filter, tp.Any]]
    ) -> None:
        if isinstance(mapping, State):
            mapping = _by_setting(mapping)
        pairs = mapping.items() if isinstance(mapping, tp.Mapping) else mapping
        pairs = tuple((f, s) for f, s in pairs)
        self._filters = tuple(f for f, _ in pairs)
        self._settings = tuple(as_integer(s) for _, s in pairs)
        self._predicates = tuple(map(to_predicate, self._filters))

    @property
    def filters(self) -> tuple[Filter, ...]:
        """The filters, in order."""
        return self._filters

    def lookup(self, path: Path, variable: tp.Any) -> tp.Any:
        """The setting of the first filter that matches; MISSING where none does."""
        pairs = zip(self._predicates, self._settings)
        return next((s for matches, s in pairs if matches(path, variable)), MISSING)

    def map_prefix(self, path: Path, variable: tp.Any) -> tp.Any:
        """The setting of the first filter that matches.

        Raises ValueError where none does.
        """
        setting = self.lookup(path, variable)
        if setting is MISSING:
            raise ValueError(
                f"No {self.what} found for {leaf_kind(variable)} at '{path_text(path)}': "
                f"{self._none_found()}"
            )
        return setting

    def _none_found(self) -> str:
        kind = type(self).__name__
        return f"none of the filters {self._filters} of {kind} matches. Add one, or `...: None`."

    def _key(self) -> tp.Any:
        return self._filters, self._settings

    def __eq__(self, other: tp.Any) -> bool:
        return type(other) is type(self) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    def __repr__(self) -> str:
        inside = ", ".join(f"{f!r}: {s!r}" for f, s in zip(self._filters, self._settings))
        return f"{type(self).__name__}({{{inside}}})"


def _by_setting(state: State) -> list[tuple[Filter, tp.Any]]:
    """A State of settings as pairs: for each setting a filter for the paths that have it."""
    pairs: list[tuple[tp.Any, list[Path]]] = []
    for path, leaf in state.flat_state():
        setting = getattr(leaf, "raw_value", leaf)
        paths = next((paths for known, paths in pairs if known == setting), None)
        if paths is None:
            pairs.append((setting, paths := []))
        paths.append(path)
    return [(PathIn(*paths), setting) for setting, paths in pairs]


def leaf_kind(variable: tp.Any) -> str:
    """The class of a Variable, for messages."""
    return type(variable).__name__ if isinstance(variable, Variable) else "array"


class StateAxes(PrefixMapping, tp.Mapping[Filter, tp.Any]):
    """Axes by Variable filter, for `vmap`, `pmap` and `scan`; from a mapping or a State of axes.

    Args:
        filter_axes: for each filter an axis, None, or `Carry` in `scan`; the first filter that
            matches a Variable decides. A State of axes works too.

    >>> import nnxlite as nnx
    >>> nnx.StateAxes({nnx.Param: 0, ...: None}).axes
    (0, None)
    """

    what = "axis"

    def __init__(
        self, filter_axes: tp.Mapping[tp.Any, tp.Any] | tp.Iterable[tuple[Filter, tp.Any]], /
    ) -> None:
        super().__init__(filter_axes)

    @property
    def axes(self) -> tuple[tp.Any, ...]:
        """The axes, in the order of the filters."""
        return self._settings

    def __getitem__(self, key: Filter) -> tp.Any:
        if key not in self._filters:
            raise KeyError(key)
        return self._settings[self._filters.index(key)]

    def __iter__(self) -> tp.Iterator[Filter]:
        return iter(self._filters)

    def __len__(self) -> int:
        return len(self._filters)


class StateSharding(PrefixMapping):
    """Shardings by Variable filter, for `jit` and `shard_map`; from a mapping or a State of shardings.

    Args:
        filter_sharding: for each filter a `PartitionSpec`, a sharding, or None; the first filter
            that matches a Variable decides. A State of shardings works too.

    >>> import nnxlite as nnx, jax
    >>> P = jax.sharding.PartitionSpec
    >>> nnx.StateSharding({nnx.Param: P("data"), ...: P()}).shardings[1] == P()
    True
    """

    what = "sharding"

    def __init__(
        self, filter_sharding: tp.Mapping[tp.Any, tp.Any] | tp.Iterable[tuple[Filter, tp.Any]], /
    ) -> None:
        super().__init__(filter_sharding)

    @property
    def shardings(self) -> tuple[tp.Any, ...]:
        """The shardings, in the order of the filters."""
        return self._settings


class NodePrefix(PrefixMapping):
    """Settings for the parts of one object or State, by path; for a part they hold for all below it.

    Args:
        kind: name of the class of the object.
        settings: by path.
    """

    def __init__(self, kind: str, settings: tp.Mapping[Path, tp.Any]) -> None:
        self._kind = kind
        self._by_path = {path: as_integer(setting) for path, setting in settings.items()}
        self._filters = tuple(self._by_path)
        self._settings = tuple(self._by_path.values())

    def _place(self, path: Path) -> Path | None:
        ends = range(len(path), -1, -1)
        return next((path[:end] for end in ends if path[:end] in self._by_path), None)

    def lookup(self, path: Path, variable: tp.Any) -> tp.Any:
        """The setting of the part that the path leads to or through; MISSING where there is none."""
        place = self._place(path)
        return MISSING if place is None else self._by_path[place]

    def _none_found(self) -> str:
        listed = ", ".join(f"'{path_text(path)}'" for path in self._by_path) or "nothing"
        return (
            f"the prefix of type {self._kind} has {listed}. A prefix must have the structure of what it "
            "is for: make it with nnx.prefix."
        )

    def refuse_unused(self, paths: tp.Iterable[Path]) -> None:
        """Raise ValueError for a setting of a part that none of the paths leads to or through."""
        used = {self._place(path) for path in paths}
        for place, setting in self._by_path.items():
            if place not in used and setting is not None:
                raise ValueError(
                    f"The prefix of type {self._kind} has {setting!r} at '{path_text(place)}', where "
                    "the argument has nothing. A prefix must have the structure of what it is for: "
                    "make it with nnx.prefix."
                )

    def __repr__(self) -> str:
        parts = (f"{path_text(path)!r}: {s!r}" for path, s in self._by_path.items())
        return f"{self._kind}({{{', '.join(parts)}}})"


class DiffState(PrefixMapping):
    """Which Variables of an argument to differentiate.

    Args:
        argnum: number of the argument.
        filter: the Variables.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> only_bias = nnx.DiffState(0, nnx.PathContains("bias"))
    >>> list(nnx.grad(lambda m: m.kernel.sum() + m.bias.sum(), argnums=only_bias)(model))
    ['bias']
    """

    def __init__(self, argnum: int, filter: Filter) -> None:
        super().__init__([(filter, True)])
        self.argnum = as_integer(argnum)
        self.filter = filter

    def map_prefix(self, path: Path, variable: tp.Any) -> bool:
        """Whether a Variable is differentiated.

        Args:
            path: its path in the argument.
            variable: the Variable, or an array.
        """
        return self.lookup(path, variable) is True

    def _key(self) -> tp.Any:
        return self.argnum, self.filter

    def __repr__(self) -> str:
        return f"DiffState(argnum={self.argnum}, filter={self.filter!r})"


class _Named(type):
    """A class whose `repr` is its name alone."""

    def __repr__(cls) -> str:
        return cls.__name__


class Carry(metaclass=_Named):
    """Marks the carry in `scan`'s `in_axes` and `out_axes`; `Carry()` is the class itself.

    >>> import nnxlite as nnx
    >>> nnx.Carry() is nnx.Carry
    True
    """

    def __new__(cls) -> tp.Any:
        return cls


def is_setting(value: tp.Any) -> bool:
    """Whether a part of a prefix is a setting, and not a container of settings."""
    return value is None or isinstance(value, PrefixMapping) or value is Carry


Stops: tp.TypeAlias = tp.Callable[[tp.Any], bool]
"""Whether a part of a prefix is a setting itself, as opposed to a container of settings."""


def by_path(prefix: tp.Any) -> tp.Any:
    """A prefix in which objects and States of settings are replaced by mappings from paths to settings.

    Raises ValueError for a Variable in place of a setting.
    """

    def one(part: tp.Any) -> tp.Any:
        if isinstance(part, Variable):
            raise ValueError(
                f"Variables prefixes are not supported: found a {type(part).__name__} in place of "
                "a setting. Give the setting itself, for the entire Variable."
            )
        if is_setting(part) or not is_root(part):
            return as_integer(part)
        return node_prefix(part)

    return jax.tree_util.tree_map(one, prefix, is_leaf=lambda x: is_setting(x) or is_root(x))


def node_prefix(part: tp.Any, stops: Stops = is_setting) -> NodePrefix:
    """The settings in an object, a State or a Variable, by path.

    Raises ValueError for an object in a cycle, of which there are settings at endless paths.
    """
    settings: dict[Path, tp.Any] = {}
    pending: list[tuple[Path, tp.Any, tuple[int, ...]]] = [((), part, ())]
    while pending:
        path, value, above = pending.pop()
        if type(value) is Held:  # a static part of the object, or a function that is a setting
            if not stops(value.value):
                continue
            value = value.value
        if isinstance(value, Variable) or stops(value) or is_pytree_leaf(value):
            settings[path] = value.get_raw_value() if isinstance(value, Variable) else value
            continue
        if id(value) in above:
            raise ValueError(
                f"The prefix of type {type(part).__name__} contains itself at '{path_text(path)}'. "
                "Choose the settings by filter instead."
            )
        is_object = kind_of(value) == Kind.OBJECT
        below = keyed_children(value, stops) if is_object else flatten_one_level(value)[0]
        above = (*above, id(value))
        pending += [((*path, key_name(key)), child, above) for key, child in reversed(below)]
    return NodePrefix(type(part).__name__, settings)


def refuse_foreign_axes(name: str, what: str, prefix: tp.Any) -> None:
    """Raise TypeError where a prefix of axes contains something else."""
    for setting in jax.tree_util.tree_leaves(prefix, is_leaf=is_setting):
        inside = setting._settings if isinstance(setting, PrefixMapping) else (setting,)
        for axis in inside:
            if not (isinstance(axis, int) or is_setting(axis)):
                raise TypeError(
                    f"{name} {what} must be an int, None, or (nested) container with those types "
                    f"as leaves, but got {axis!r} of type '{type(axis).__name__}' in {prefix!r}. "
                    "nnx.StateAxes chooses by Variable."
                )


def check_scan_axes(in_axes: tp.Any, out_axes: tp.Any) -> None:
    """Raise TypeError or ValueError for axes that `scan` cannot have."""
    counts: list[int] = []
    for what, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        refuse_foreign_axes("scan", what, axes)
        parts = axes if isinstance(axes, tuple) else (axes,)
        counts.append(parts.count(Carry))
        nested = [part for part in parts if part is not Carry]
        if Carry in jax.tree_util.tree_leaves(nested, is_leaf=is_setting):
            raise ValueError(
                f"Carry must be at the top level, it cannot be nested. Found axes={axes!r}. "
                "Make the carry one argument (any pytree)."
            )
    for path, setting in jax.tree_util.tree_leaves_with_path(out_axes, is_leaf=is_setting):
        inside = setting._settings if isinstance(setting, PrefixMapping) else (setting,)
        for word, refused in (("carry", Carry), ("broadcast", None)):
            if setting is not Carry and any(axis is refused for axis in inside):
                where = "".join(map(str, path))
                shown = f"out_axes={setting!r}" if setting is None else repr(setting)
                raise ValueError(
                    f"Cannot {word} output state. Got {shown} at: out_axes{where}. Every result of "
                    "an iteration needs an axis, or is the carry as a whole."
                )
    shown = f"in_axes={in_axes!r} and out_axes={out_axes!r}"
    if bool(counts[0]) != bool(counts[1]):
        raise ValueError(
            f"If one of in_axes or out_axes has Carry, the other must also have Carry. Got {shown}."
        )
    if max(counts) > 1:
        raise ValueError(
            f"Found multiple Carry definitions in {shown}. Make the carries one pytree."
        )
