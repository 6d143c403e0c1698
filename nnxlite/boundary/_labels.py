"""Labels: one setting for each leaf of the arguments of a transform, and for each of its outputs.

A prefix such as `in_axes=(0, None)` gives one setting to each argument.  For graph objects a setting
can depend on the Variable: `StateAxes`, `StateSharding` and `DiffState` map filters to settings.
`broadcast` gives each part of a tree its setting in a prefix, and `labels` each leaf below; all paths of
a shared leaf must agree.  The specs of the filtered transforms are prefixes of other settings:
`node_prefix` takes which parts of a prefix are settings.

`vmap`, `pmap` and `shard_map` need the axis (or spec) of each output before they call the function, but
what the function writes is known only afterwards.  So outputs leave in groups, one for each setting in
the prefixes; which leaf is in which group crosses as static data.
"""

from __future__ import annotations

import typing as tp

import jax

from nnxlite import filters
from nnxlite._base.errors import path_text
from nnxlite._base.jax import as_integer, flatten_one_level, is_pytree_leaf, key_name
from nnxlite._state._definition import State
from nnxlite.boundary._call_def import ArgumentLeaf, CallDef, paths_of
from nnxlite.boundary._inputs import further_leaves, is_root, leaves_of_code
from nnxlite.boundary._out import Outputs, Source, came_from, output_roots, pick
from nnxlite.filters import Filter, PathIn, Predicate, to_predicate
from nnxlite.graph._kinds import Kind, kind_of
from nnxlite.graph._rebuild import Decoded, Path
from nnxlite.objects._fields import Held, keyed_children
from nnxlite.variables._definition import MISSING, VariableDef
from nnxlite.variables._variable import Variable, make

__all__ = ["Carry", "DiffState", "StateAxes", "StateSharding"]

_Pairs: tp.TypeAlias = tp.Mapping[tp.Any, tp.Any] | tp.Iterable[tuple[Filter, tp.Any]]


class PrefixMapping:
    """Settings that depend on the Variable, by filter; the first filter that matches decides."""

    what: tp.ClassVar[str] = "setting"
    _filters: tuple[Filter, ...] = ()
    _settings: tuple[tp.Any, ...] = ()
    _predicates: tuple[Predicate, ...] = ()

    def __init__(self, mapping: _Pairs) -> None:
        if isinstance(mapping, State):
            mapping = _by_setting(mapping)
        pairs = [*(mapping.items() if isinstance(mapping, tp.Mapping) else mapping)]
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
    paths_by_setting: dict[tp.Any, list[Path]] = {}
    for path, leaf in state.flat_state():
        paths_by_setting.setdefault(getattr(leaf, "raw_value", leaf), []).append(path)
    return [(PathIn(*paths), setting) for setting, paths in paths_by_setting.items()]


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

    def __init__(self, filter_axes: _Pairs, /) -> None:
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

    def __init__(self, filter_sharding: _Pairs, /) -> None:
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


def settings_in(*prefixes: tp.Any) -> tp.Iterator[tp.Any]:
    """Every setting that some prefixes may give to a leaf."""
    for part in jax.tree_util.tree_leaves(prefixes, is_leaf=is_setting):
        yield from part._settings if isinstance(part, PrefixMapping) else (part,)


def refuse_foreign_axes(name: str, what: str, prefix: tp.Any) -> None:
    """Raise TypeError where a prefix of axes contains something else."""
    for axis in settings_in(prefix):
        if not (isinstance(axis, int) or is_setting(axis)):
            raise TypeError(
                f"{name} {what} must be an int, None, or (nested) container with those types "
                f"as leaves, but got {axis!r} of type '{type(axis).__name__}' in {prefix!r}. "
                "nnx.StateAxes chooses by Variable."
            )


# Labels -------------------------------------------------------------------------------------------


def broadcast(
    prefix: tp.Any, tree: tp.Any, what: str, stops: Stops = is_setting, chooser: str = ""
) -> list[tp.Any]:
    """The setting of each leaf of a tree.

    Args:
        prefix, tree: the settings, and what they are for.
        what: the settings, for messages.
        stops: which parts of the prefix are settings.
        chooser: what chooses by Variable, for messages.

    Raises ValueError where the prefix does not match the tree.
    """
    settings, treedef = jax.tree_util.tree_flatten(prefix, is_leaf=stops)
    try:
        below = treedef.flatten_up_to(tree)
    except (ValueError, TypeError):
        of = {"in": "arguments", "out": "result"}.get(what.partition("_")[0], "tree")
        structure = jax.tree_util.tree_structure(tree)
        chooser = chooser or f"nnx.State{'Axes' if what.endswith('axes') else 'Sharding'}"
        raise ValueError(
            f"{what} is not a prefix of the {of}: {what}={prefix!r} has the structure {treedef}, the "
            f"structure of the {of} is {structure}. Give one setting to each part, or to all; an "
            f"object is one part, and {chooser} chooses by Variable."
        ) from None
    pairs = zip(settings, below)
    return [setting for setting, part in pairs for _ in jax.tree_util.tree_leaves(part)]


_ASK_PATHS = (filters.PathContains, filters.PathIn, filters._Joined, filters.Not)


def labels(
    call: CallDef,
    settings: list[tp.Any],
    what: str,
    seen: tp.Sequence[tp.Any] = (),
    first_decides: tp.Callable[[int, int], bool] = lambda first, again: False,
    meaning: tp.Callable[[tp.Any, Path, int], tp.Any] | None = None,
) -> list[tp.Any]:
    """The one label of each leaf of the arguments, from the setting of each position of their treedef.

    A setting of an object may be a `PrefixMapping`, such as `StateAxes` and `DiffState`, which chooses
    for each leaf; `broadcast` makes such a list of a prefix.

    Args:
        call, settings: the arguments, and the settings.
        what: the settings, for messages.
        seen: what filters see of each leaf. The result is then for these values alone; without it
            a filter that asks for a value raises TypeError.
        first_decides: whether the first path decides for a leaf that is at two positions; otherwise
            both must agree.
        meaning: what a setting, chosen for a path and the number of a leaf, says about this leaf; the
            parts of an object of settings that the arguments do not have are then ignored.

    Raises ValueError where a shared leaf would get two different labels.
    """
    places, first = call.leaves(), settings[0] if settings else None
    same = all(part is first for part in settings) and not isinstance(first, PrefixMapping)
    if same and meaning is None:
        return [first] * len(places)  # sharing cannot disagree
    decoded = call.graphdef.decoded
    further = () if same and not isinstance(first, _ASK_PATHS) else further_leaves(call)

    def variable(leaf: int) -> tp.Any:
        return seen[leaf] if seen else filter_view(decoded, tp.cast(int, places[leaf].graph_leaf))

    def setting(leaf: int, place: ArgumentLeaf) -> tp.Any:
        part = settings[place.position]
        path = place.path if place.root is None else place.below
        if isinstance(part, PrefixMapping):
            if place.root is None:
                raise not_for_arrays(part, what, place.text())
            # It need not have one for further paths.
            again = place is not places[leaf]
            again = again and (place.root == places[leaf].root or isinstance(part, NodePrefix))
            part = (part.lookup if again else part.map_prefix)(path, variable(leaf))
        return part if meaning is None or part is MISSING else meaning(part, path, leaf)

    out = [setting(leaf, place) for leaf, place in enumerate(places)]
    for leaf, place in further:
        if first_decides(places[leaf].position, place.position):
            continue
        one, other = out[leaf], setting(leaf, place)
        if not (other is one or other is MISSING or other == one):
            before, here = (f"at '{x.text()}'" for x in (places[leaf], place))
            raise conflict(what, variable(leaf), before, one, here, other)
    every = (*places, *[place for _, place in further])
    for position in call.where if meaning is None else ():
        part = settings[position]
        if isinstance(part, NodePrefix):
            part.refuse_unused([place.below for place in every if place.position == position])
    return out


def not_for_arrays(setting: PrefixMapping, what: str, where: str) -> ValueError:
    """The error for a setting that depends on the Variable, and is given to a leaf without any."""
    return ValueError(
        f"Cannot use {setting!r} on non-graph nodes: as {what} it is given to the leaf at '{where}', "
        "which has no Variables. Give the leaf a setting of its own."
    )


def conflict(
    what: str, variable: tp.Any, first: str, one: tp.Any, again: str, other: tp.Any
) -> ValueError:
    """The error for a shared leaf with two different settings, and where it has them."""
    return ValueError(
        f"Inconsistent aliasing detected: different {what} for a shared {leaf_kind(variable)}: "
        f"{first} it is {one!r}, {again} it is {other!r}. Give both the same setting, or use a copy "
        "(nnx.clone) in one of the places."
    )


class _Unseen(jax.Array):
    """Stands for an array when filters look at it; raises for every question about its value."""

    type = jax.Array
    __slots__ = ()

    def __getattribute__(self, name: str) -> tp.Any:
        if name in ("type", "_refuse") or (name.startswith("__") and name not in _OPERATORS):
            return object.__getattribute__(self, name)
        if not hasattr(jax.Array, name):  # such as `tolist`, which concrete arrays have
            raise AttributeError(f"An array has no attribute {name!r}.")
        return self._refuse(name)

    def _refuse(self, name: str) -> tp.NoReturn:
        raise TypeError(
            "A filter given to a transform decides by path, class and metadata, not by the value, "
            f"and asked for {name!r}. Mark the Variables that are meant, with set_metadata."
        )

    def __repr__(self) -> str:
        return "array"


# Python looks for operators on the class.
_OPERATORS = {name for name in {*dir(jax.Array)} - {*dir(object)} if name.startswith("__")}
_OPERATORS |= {f"__{name}__" for name in "len iter contains eq lt le gt ge".split()}
for _name in _OPERATORS:
    if callable(getattr(jax.Array, _name, len)):
        setattr(_Unseen, _name, lambda self, *_, name=_name: self._refuse(name))


def filter_view(decoded: Decoded, leaf: int) -> tp.Any:
    """What filters see of a leaf: its Variable, or the array; without its value."""
    value, node = tp.cast(tp.Any, _Unseen)(), decoded.leaf_nodes[leaf]
    definition = decoded.node_defs[node] if node >= 0 else None
    if not isinstance(definition, VariableDef):
        return value
    # One of its own, not the interned one, since it is changed.
    content = definition.head, definition.values, definition.facts, definition.public
    without_hooks = VariableDef(*content)
    without_hooks.plain_read = True
    return make(without_hooks, value)


# Outputs --------------------------------------------------------------------------------------------


def mentioned(*prefixes: tp.Any) -> tuple[tp.Any, ...]:
    """Every setting that occurs in some prefixes, each once, in order of first occurrence."""
    return tuple(dict.fromkeys(settings_in(*prefixes)))


Meaning: tp.TypeAlias = tp.Callable[[tp.Any, Path, tp.Any, Source], tp.Any]
"""From a setting, a path, a Variable and the source of its value to the setting of that one leaf."""


def output_settings(
    call: CallDef,
    out: Outputs,
    value_settings: tp.Sequence[tp.Any],
    root_settings: tp.Sequence[tp.Any],
    out_prefix: tp.Any,
    what: str,
    default: tp.Any = None,
    meaning: Meaning | None = None,
) -> list[tp.Any]:
    """The setting of each output, from those of the graph leaves and roots of the arguments.

    Written Variables keep their input setting; new Variables of an argument follow its prefix; the
    result follows `out_prefix`. `default` is the setting where none is given; None leaves it open.
    `meaning` says what a setting means for one leaf, where settings are functions of leaves.

    Raises ValueError where the result refers to a leaf that has another setting already.
    """
    left, decoded = out.definition, out.definition.graphdef.decoded
    settings, arrays = broadcast(out_prefix, left.template(), what), left.array_positions()
    for i in arrays:
        if isinstance(settings[i], PrefixMapping):
            raise not_for_arrays(settings[i], what, path_text(paths_of(left.treedef)[i]))
    new: dict[int, tp.Any] = {}
    first, last = left.first_result, left.first_result + len(left.where)
    by_root = [*root_settings[:first], *[settings[position] for position in left.where]]
    for root, code in enumerate(decoded.roots if left.where or out.new else ()):
        place, *start = (root,) if root < last else came_from(call, left, root)
        part = by_root[place]
        for leaf, below in leaves_of_code(decoded, code):
            source, path = left.sources[leaf], (*start, *below)
            is_new = source < 0 and ~source not in new
            before = None if is_new else pick(source, value_settings, new)
            if not is_new and (part is before or not first <= root < last):
                continue
            variable = filter_view(decoded, leaf)
            here = part.map_prefix(path, variable) if isinstance(part, PrefixMapping) else part
            if is_new:
                new[~source] = here
                continue
            if meaning is not None:
                here, before = (meaning(x, path, variable, source) for x in (here, before))
            if not (here is before or here == before or (here is None and default is None)):
                known = call.graph_leaves()[source].text() if source >= 0 else ""
                known = f"at '{known}'" if known else "at its first place"
                again = path_text((*output_roots(call, left)[root][1:], *path))
                raise conflict(what, variable, known, before, f"in the result at '{again}'", here)
    written = [value_settings[leaf] for leaf in left.written]
    result = [settings[i] for i in arrays]
    return [*result, *written, *[new.get(number, default) for number in range(len(out.new))]]


def new_variables(out: Outputs) -> list[tp.Any]:
    """For each new value what filters see of it."""
    left = out.definition
    leaves = left.new_leaves()
    return [filter_view(left.graphdef.decoded, leaves[number]) for number in range(len(out.new))]
