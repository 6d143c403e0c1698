"""Prefixes: settings for the parts of the arguments of a transform.

A prefix such as `in_axes=(0, None)` gives one setting to each argument.  For graph objects a setting
can depend on the Variable: `StateAxes`, `StateSharding` and `DiffState` map filters to settings.  A
Variable that is reached by two paths must get the same setting by both.

The specs of the filtered transforms are prefixes, too, of other settings: `broadcast` and `node_prefix`
are told which parts of a prefix are settings, and `agreed` what one means for a leaf.
"""

from __future__ import annotations

import typing as tp

import jax
import numpy as np

from nnxlite._errors import path_text
from nnxlite._integers import as_integer
from nnxlite._jax import PyTreeDef, flatten_one_level, is_pytree_leaf, key_name
from nnxlite._state import State
from nnxlite.boundary._inputs import FLAT, ArgumentLeaf, CallDef, is_root, paths_of
from nnxlite.filters import Filter, PathIn, Predicate, to_predicate
from nnxlite.graph import OBJECT, ArrayCode, Code, ContainerCode, Decoded, NodeCode, Path, kind_of
from nnxlite.objects import Held, keyed_children
from nnxlite.variables import MISSING, Variable, VariableDef, make


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
                f"No {self.what} found for {leaf_kind(variable)} at '{path_text(path)}': none of the "
                f"filters {self._filters} of {type(self).__name__} matches. Add one, or `...: None`."
            )
        return setting

    def __eq__(self, other: tp.Any) -> bool:
        return (
            type(other) is type(self)
            and self._filters == other._filters
            and self._settings == other._settings
        )

    def __hash__(self) -> int:
        return hash((type(self), self._filters, self._settings))

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

    A pytree of the settings; those of a leaf with several paths count once.

    Args:
        kind: name of the class of the object.
        settings: by path.
        aliases: for further paths of a leaf its first one; None where that is in another prefix.
    """

    def __init__(
        self,
        kind: str,
        settings: tp.Mapping[Path, tp.Any],
        aliases: tp.Iterable[tuple[Path, Path | None]] = (),
    ) -> None:
        self._kind = kind
        self._aliases = tuple(aliases)
        self._by_path = {path: as_integer(setting) for path, setting in settings.items()}
        self._filters = tuple(self._by_path)
        self._settings = tuple(self._by_path.values())

    def _place(self, path: Path) -> Path | None:
        ends = range(len(path), -1, -1)
        return next((path[:end] for end in ends if path[:end] in self._by_path), None)

    def map_prefix(self, path: Path, variable: tp.Any) -> tp.Any:
        """The setting of the part that the path leads to or through.

        Raises ValueError where there is none.
        """
        place = self._place(path)
        if place is None:
            raise ValueError(
                f"No setting found for {leaf_kind(variable)} at '{path_text(path)}': the prefix of "
                f"type {self._kind} has {self._listed()}. A prefix must have the structure of "
                "what it is for: make it with nnx.prefix."
            )
        return self._by_path[place]

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

    def _listed(self) -> str:
        return ", ".join(f"'{path_text(path)}'" for path in self._by_path) or "nothing"

    def __repr__(self) -> str:
        parts = (f"{path_text(path)!r}: {s!r}" for path, s in self._by_path.items())
        return f"{self._kind}({{{', '.join(parts)}}})"

    def _with_keys(self) -> tp.Any:
        """The settings as one State (or as they are, where there is one for the whole)."""
        others = dict(self._aliases)
        own = {path: s for path, s in self._by_path.items() if path not in others}
        inside = own[()] if () in own else State.from_flat_path(own)
        key = jax.tree_util.GetAttrKey("__state__")
        fixed = tuple((p, self._by_path[p]) for p, first in self._aliases if first is None)
        return ((key, inside),), (self._kind, tuple(own), self._aliases, fixed)

    @classmethod
    def _unflatten(cls, static: tp.Any, children: tp.Iterable[tp.Any]) -> NodePrefix:
        kind, paths, aliases, fixed = static
        (inside,) = children
        settings: dict[Path, tp.Any] = dict(fixed)
        for path in paths:
            part = inside
            for name in path:
                part = part[name]
            settings[path] = part
        settings.update((path, settings[first]) for path, first in aliases if first is not None)
        return cls(kind, settings, aliases)


jax.tree_util.register_pytree_with_keys(NodePrefix, NodePrefix._with_keys, NodePrefix._unflatten)


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

    def __eq__(self, other: tp.Any) -> bool:
        return isinstance(other, DiffState) and (self.argnum, self.filter) == (
            other.argnum,
            other.filter,
        )

    def __hash__(self) -> int:
        return hash((DiffState, self.argnum, self.filter))

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
        is_object = kind_of(value) == OBJECT
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
    out: list[tp.Any] = []
    for setting, part in zip(settings, below):
        out += [setting] * len(jax.tree_util.tree_leaves(part))
    return out


def labels(
    call: CallDef,
    settings: list[tp.Any],
    what: str,
    value: tp.Callable[[int], tp.Any] | None = None,
    first_decides: tp.Callable[[int, int], bool] = lambda first, again: False,
) -> list[tp.Any]:
    """The one setting of each leaf of the arguments, from that of each position of their treedef.

    A setting of an object may be a `PrefixMapping`, such as `StateAxes` and `DiffState`, which chooses
    for each leaf; `broadcast` makes such a list of a prefix.

    Args:
        call, settings: the arguments, and the settings.
        what: the settings, for messages.
        value: gives the value of a graph leaf, for a filter that asks for it: the result is then for
            this call alone. Without it such a filter raises TypeError.
        first_decides: whether the first path decides for a leaf that is in two roots, given by number;
            otherwise both must agree.

    Raises ValueError where a shared Variable would get two different settings.
    """
    arrays = array_settings(settings, call.treedef, call.where, what, call.paths)
    by_root = [settings[i] for i in call.where]
    in_graph = _graph_labels(call, by_root, what, value, first_decides)
    if call.structure is not FLAT:
        in_graph = [in_graph[number] for number, _ in call.inside()]
    return arrays + in_graph


def array_settings(
    settings: list[tp.Any],
    treedef: PyTreeDef,
    where: tp.Sequence[int],
    what: str,
    paths: tp.Callable[[], list[Path]] | None = None,
) -> list[tp.Any]:
    """The settings of the leaves of a tree that are not roots.

    Args:
        settings: by position.
        treedef, where: the tree, and which of its leaves are roots.
        what: the settings.
        paths: gives those of a call, where the tree is one.

    Raises ValueError where one of them depends on the Variable.
    """
    roots = set(where)
    arrays = [i for i in range(treedef.num_leaves) if i not in roots]
    bad = next((i for i in arrays if isinstance(settings[i], PrefixMapping)), None)
    if bad is not None:
        path = paths_of(treedef)[bad] if paths is None else paths()[bad]
        raise not_for_arrays(settings[bad], what, path_text(path))
    return [settings[i] for i in arrays]


def not_for_arrays(setting: PrefixMapping, what: str, where: str) -> ValueError:
    """The error for a setting that depends on the Variable, and is given to a leaf without any."""
    return ValueError(
        f"Cannot use {setting!r} on non-graph nodes: as {what} it is given to the leaf at '{where}', "
        "which has no Variables. Give the leaf a setting of its own."
    )


def _graph_labels(
    call: CallDef,
    by_root: list[tp.Any],
    what: str,
    value: tp.Callable[[int], tp.Any] | None,
    first_decides: tp.Callable[[int, int], bool],
) -> list[tp.Any]:
    """The setting of each graph leaf, from that of each root; see `labels`."""
    decoded = call.graphdef.decoded
    if all(s is by_root[0] and not isinstance(s, PrefixMapping) for s in by_root):
        return by_root[:1] * len(decoded.leaf_nodes)  # sharing cannot disagree
    unseen = [_Unseen() for _ in decoded.leaf_nodes]
    seen = [shown(decoded, leaf, stand_in) for leaf, stand_in in enumerate(unseen)]
    asked: dict[int, list[Path]] = {i: [] for i, s in enumerate(by_root) if type(s) is NodePrefix}
    places = call.graph_leaves()

    def decided(decide: tp.Callable[[Path, tp.Any], tp.Any], leaf: int, below: Path) -> tp.Any:
        """What a filter says of a leaf, without its value, or with it if the filter asked for it."""
        stand_in = unseen[leaf]
        try:
            answer = decide(below, seen[leaf])
        except Exception:
            if value is None or not stand_in.asked:
                raise  # the filter's own: it runs no second time
            answer = MISSING
        if value is None or not stand_in.asked:
            return answer
        stand_in.asked = False
        seen[leaf] = shown(decoded, leaf, value(leaf))
        return decide(below, seen[leaf])

    def setting(leaf: int, place: ArgumentLeaf) -> tp.Any:
        root, first = tp.cast(int, place.root), places[leaf]
        part = by_root[root]
        if not isinstance(part, PrefixMapping):
            return part
        again = place is not first
        if root in asked:
            asked[root].append(place.below)
        elif again and root == first.root:
            return decided(part.lookup, leaf, place.below)
        return decided(part.map_prefix, leaf, place.below)

    further = [
        (leaf, place)
        for leaf, place in further_places(call)
        if not first_decides(tp.cast(int, places[leaf].root), tp.cast(int, place.root))
    ]
    out = agreed(what, places, further, setting, seen.__getitem__)
    for root, paths in asked.items():
        by_root[root].refuse_unused(paths)
    return out


def setting_of(part: tp.Any, path: Path, variable: tp.Any) -> tp.Any:
    """What a part of a prefix says of a Variable (or array), by its path from there."""
    return part.map_prefix(path, variable) if isinstance(part, PrefixMapping) else part


def agreed(
    what: str,
    places: tp.Sequence[ArgumentLeaf],
    further: tp.Iterable[tuple[int, ArgumentLeaf]],
    setting: tp.Callable[[int, ArgumentLeaf], tp.Any],
    variable: tp.Callable[[int], tp.Any],
) -> list[tp.Any]:
    """The setting of each leaf, which must be the same by all of its paths.

    Args:
        what: the settings, for messages.
        places: the first path of each leaf.
        further: the leaves that have further paths, each with one of them.
        setting: gives that of a leaf by one of its paths; MISSING where the first path decides.
        variable: gives what filters see of a leaf.

    Raises ValueError where a shared leaf would get two different settings.
    """
    out = [setting(leaf, place) for leaf, place in enumerate(places)]
    for leaf, place in further:
        one, other = out[leaf], setting(leaf, place)
        if not (other is one or other is MISSING or other == one):
            first, again = (f"at '{x.text()}'" for x in (places[leaf], place))
            raise conflict(what, variable(leaf), first, one, again, other)
    return out


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
    """Stands for an array when filters look at it; raises for every question about its value.

    Attributes:
        asked: whether there was one.
    """

    type = jax.Array
    __slots__ = ("asked",)

    def __init__(self) -> None:
        self.asked = False

    def __getattribute__(self, name: str) -> tp.Any:
        if name in _OWN or (name.startswith("__") and name not in _OPERATORS):
            return object.__getattribute__(self, name)
        if not hasattr(jax.Array, name):
            self.asked = hasattr(np.ndarray, name)  # as concrete arrays have, such as `tolist`
            raise AttributeError(f"An array has no attribute {name!r}.")
        return self._refuse(name)

    def _refuse(self, name: str) -> tp.NoReturn:
        self.asked = True
        raise TypeError(
            "A filter given to a transform decides by path, class and metadata, not by the value, "
            f"and asked for {name!r}. Mark the Variables that are meant, with set_metadata."
        )

    def __repr__(self) -> str:
        return "array"


_OWN = frozenset({"asked", "type", "_refuse"})
# Python looks for operators on the class.
_OPERATORS = {name for name in {*dir(jax.Array)} - {*dir(object)} if name.startswith("__")}
_OPERATORS |= {f"__{name}__" for name in "len iter contains eq lt le gt ge".split()}
for _name in _OPERATORS:
    if callable(getattr(jax.Array, _name, len)):
        setattr(_Unseen, _name, lambda self, *_, name=_name: self._refuse(name))


def shown(decoded: Decoded, leaf: int, value: tp.Any = MISSING) -> tp.Any:
    """What filters see of a leaf: its Variable, or the array; without a value, unless one is given."""
    value = _Unseen() if value is MISSING else value
    node = decoded.leaf_nodes[leaf]
    definition = decoded.node_defs[node] if node >= 0 else None
    if not isinstance(definition, VariableDef):
        return value
    if type(value) is _Unseen:  # no hook can read it
        definition = VariableDef(definition.type, definition.metadata, None)
        definition.plain_read = True
    return make(definition, value)


def further_places(call: CallDef) -> tp.Iterator[tuple[int, ArgumentLeaf]]:
    """Every further path of the graph leaves that have several, each with the number of the leaf."""
    decoded, paths = call.graphdef.decoded, call.paths()
    for number, root, path in _aliases(decoded):
        for leaf, tail in leaves_of_code(decoded, NodeCode(number)):
            position, below = call.where[root], (*path, *tail)
            yield leaf, ArgumentLeaf(position, root, below, (*paths[position], *below), leaf)


def further_leaves(call: CallDef) -> list[tuple[int, ArgumentLeaf]]:
    """The further paths of the leaves that have several, each with the number of the leaf."""
    known = call.cache.get("further")
    if known is None:
        numbers: dict[int | None, list[tuple[int, Path]]] = {}
        for number, leaf in enumerate(call.leaves()):
            numbers.setdefault(leaf.graph_leaf, []).append((number, leaf.inside))
        known = call.remember(
            "further",
            [
                (number, leaf._replace(path=(*leaf.path, *inside), inside=inside))
                for graph_leaf, leaf in further_places(call)
                for number, inside in numbers.get(graph_leaf, ())
            ],
        )
    return known


def _aliases(decoded: Decoded) -> tp.Iterator[tuple[int, int, Path]]:
    """Every further path of a node: (node, root, path from that root)."""
    seen: set[int] = set()

    def visit(code: Code, path: Path) -> tp.Iterator[tuple[int, Path]]:
        if isinstance(code, ContainerCode):
            for key, child in zip(code.definition.keys, code.codes):
                yield from visit(child, (*path, key))
        elif isinstance(code, NodeCode):
            yield code.number, path

    places: list[tuple[int, Path]] = []
    for root, code in enumerate(decoded.roots):
        places += [(n, (root, *p)) for n, p in visit(code, ())]
    for number, codes in decoded.children.items():
        base = decoded.path(decoded.node_frames[number])
        for name, code in zip(decoded.node_defs[number].layout.data, codes):
            places += [(n, (*base, *p)) for n, p in visit(code, (name,))]
    for number, path in places:
        if decoded.path(decoded.node_frames[number]) == path and number not in seen:
            seen.add(number)
            continue
        yield number, path[0], path[1:]


def leaves_of_code(decoded: Decoded, code: Code) -> list[tuple[int, Path]]:
    """The leaves at or below what a code describes, each with its path from there."""
    codes_of = dict(decoded.children)
    out: list[tuple[int, Path]] = []
    done: set[int] = set()
    pending: list[tuple[Code, Path]] = [(code, ())]
    while pending:
        code, path = pending.pop()
        match code:
            case ContainerCode(definition=definition, codes=codes):
                pending.extend((c, (*path, key)) for key, c in zip(definition.keys, codes))
            case ArrayCode(leaf):
                out.append((leaf, path))
            case NodeCode(number) if decoded.node_leaves[number] >= 0:
                out.append((decoded.node_leaves[number], path))
            case NodeCode(number) if number not in done:
                done.add(number)
                names = decoded.node_defs[number].layout.data
                pending.extend((c, (*path, name)) for name, c in zip(names, codes_of[number]))
            case _:
                pass  # a static value, or an object that was entered before
    return out


# Shardings ---------------------------------------------------------------------------------------


def leaf_shardings(call: CallDef, in_shardings: tp.Any) -> tuple[list[tp.Any], list[tp.Any]]:
    """`in_shardings` of `jit` as shardings of the leaves, and of the roots."""
    args, kwargs = call.template()
    if isinstance(in_shardings, list):
        in_shardings = tuple(in_shardings)
    settings = broadcast(in_shardings, args, "in_shardings")
    settings += [None] * len(jax.tree_util.tree_leaves(kwargs))
    by_leaf = labels(call, settings, "sharding")
    return by_leaf, [settings[i] for i in call.where]
