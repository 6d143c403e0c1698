"""Labels: one setting for each leaf of the arguments of a transform, and for each of its outputs.

`broadcast` gives each part of a tree its setting in a prefix, and `labels` each leaf below; all paths of
a shared leaf must agree.

`vmap`, `pmap` and `shard_map` need the axis (or spec) of each output before they call the function, but
what the function writes is known only afterwards.  So outputs leave in groups, one for each setting in
the prefixes; which leaf is in which group crosses as static data.
"""

from __future__ import annotations

import typing as tp

import jax
import numpy as np

from nnxlite import filters
from nnxlite._base.errors import path_text
from nnxlite.boundary._call_def import ArgumentLeaf, CallDef, paths_of, template_of
from nnxlite.boundary._out import OutDef, Outputs, Source, came_from, output_paths, pick
from nnxlite.boundary._prefixes import NodePrefix, PrefixMapping, Stops, is_setting, leaf_kind
from nnxlite.graph._rebuild import Code, Decoded, NodeCode, Path
from nnxlite.variables._definition import MISSING, VariableDef
from nnxlite.variables._variable import make


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


_ASK_PATHS = (filters.PathContains, filters.PathIn, filters._Joined, filters.Not)


def labels(
    call: CallDef,
    settings: list[tp.Any],
    what: str,
    seen: tp.Sequence[tp.Any] = (),
    first_decides: tp.Callable[[int, int], bool] = lambda first, again: False,
    meaning: tp.Callable[[tp.Any, Path, int], tp.Any] | None = None,
) -> list[tp.Any]:
    """The one setting of each leaf of the arguments, from that of each position of their treedef.

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

    Raises ValueError where a shared Variable would get two different settings.
    """
    places, first = call.leaves(), settings[0] if settings else None
    same = all(part is first for part in settings) and not isinstance(first, PrefixMapping)
    if same and meaning is None:
        return [first] * len(places)  # sharing cannot disagree
    decoded = call.graphdef.decoded
    further = () if same and not isinstance(first, _ASK_PATHS) else further_leaves(call)

    def variable(leaf: int) -> tp.Any:
        return seen[leaf] if seen else shown(decoded, tp.cast(int, places[leaf].graph_leaf))

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
            texts = (f"at '{x.text()}'" for x in (places[leaf], place))
            raise conflict(what, variable(leaf), next(texts), one, next(texts), other)
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


def setting_of(part: tp.Any, path: Path, variable: tp.Any) -> tp.Any:
    """What a part of a prefix says of a Variable (or array), by its path from there."""
    return part.map_prefix(path, variable) if isinstance(part, PrefixMapping) else part


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


def shown(decoded: Decoded, leaf: int) -> tp.Any:
    """What filters see of a leaf: its Variable, or the array; without its value."""
    value, node = tp.cast(tp.Any, _Unseen)(), decoded.leaf_nodes[leaf]
    definition = decoded.node_defs[node] if node >= 0 else None
    if not isinstance(definition, VariableDef):
        return value
    without_hooks = definition.with_values(definition.values)
    without_hooks.plain_read = True
    return make(without_hooks, value)


def further_leaves(call: CallDef) -> list[tuple[int, ArgumentLeaf]]:
    """The further paths of the leaves that have several, each with the number of the leaf."""
    known = call.cache.get("further")
    if known is not None:
        return known
    numbers: dict[int | None, list[tuple[int, Path]]] = {}
    for number, leaf in enumerate(call.leaves()):
        numbers.setdefault(leaf.graph_leaf, []).append((number, leaf.inside))
    decoded, paths, seen = call.graphdef.decoded, call.paths(), set[Code]()
    further: list[tuple[int, ArgumentLeaf]] = []
    for (root, *path), code in decoded.visit():
        for graph_leaf, tail in leaves_of_code(decoded, code) if code in seen else ():
            position, below = call.where[root], (*path, *tail)
            for number, inside in numbers.get(graph_leaf, ()):
                at = (*paths[position], *below, *inside)
                leaf = ArgumentLeaf(position, root, below, at, graph_leaf, inside)
                further.append((number, leaf))
        if isinstance(code, NodeCode):
            seen.add(code)
    return call.remember("further", further)


def leaves_of_code(decoded: Decoded, code: Code) -> list[tuple[int, Path]]:
    """The leaves at or below what a code describes, each with its path from there, the last one first.

    Messages name the first that is wrong, so in most models a kernel and not a bias.
    """
    pairs = [(decoded.leaf_of(below), path) for path, below in decoded.visit(code)]
    return [(leaf, path) for leaf, path in reversed(pairs) if leaf >= 0]


def leaf_shardings(call: CallDef, in_shardings: tp.Any) -> tuple[list[tp.Any], list[tp.Any]]:
    """`in_shardings` of `jit`, by leaf and by root; static arguments have none."""
    args, kwargs = call.template()
    static = call.static_positions()
    crosses = lambda arg: not (type(arg) is int and arg in static)
    args = tuple(filter(crosses, args))
    if isinstance(in_shardings, list):
        in_shardings = tuple(in_shardings)
    settings = broadcast(in_shardings, args, "in_shardings")
    settings += [None] * len(jax.tree_util.tree_leaves([*filter(crosses, kwargs.values())]))
    for position in static:
        settings.insert(position, None)
    by_leaf = labels(call, settings, "sharding")
    return by_leaf, [settings[i] for i in call.where]


# Outputs --------------------------------------------------------------------------------------------


def mentioned(*prefixes: tp.Any) -> tuple[tp.Any, ...]:
    """Every setting that occurs in some prefixes, each once, in order of first occurrence."""
    out: list[tp.Any] = []
    for prefix in prefixes:
        for setting in jax.tree_util.tree_leaves(prefix, is_leaf=is_setting):
            inside = setting._settings if isinstance(setting, PrefixMapping) else (setting,)
            out += [s for s in inside if s not in out]
    return tuple(out)


Meaning: tp.TypeAlias = tp.Callable[[tp.Any, Path, tp.Any, Source], tp.Any]
"""From a setting, a path, a Variable and the source of its value to the setting of that one leaf."""


def output_settings(
    call: CallDef,
    out: Outputs,
    value_settings: tp.Sequence[tp.Any],
    root_settings: tp.Sequence[tp.Any],
    out_prefix: tp.Any,
    what: str,
    default: tp.Any,
    meaning: Meaning = lambda setting, *_: setting,
) -> list[tp.Any]:
    """The setting of each output, from those of the graph leaves and roots of the arguments.

    Written Variables keep their input setting; new Variables of an argument follow its prefix; the
    result follows `out_prefix`. `default` is the setting where none is given; None leaves it open.
    `meaning` says what a setting means for one leaf, where settings may be functions of leaves.

    Raises ValueError where the result refers to a leaf that has another setting already.
    """
    left, decoded = out.definition, out.definition.graphdef.decoded
    settings = broadcast(out_prefix, template_of(left.treedef), what)
    roots = set(left.where)
    arrays = [i for i in range(left.treedef.num_leaves) if i not in roots]
    for i in arrays:
        if isinstance(settings[i], PrefixMapping):
            raise not_for_arrays(settings[i], what, path_text(paths_of(left.treedef)[i]))
    new: dict[int, tp.Any] = {}
    first, last = left.first_result, left.first_result + len(left.where)
    by_root = [*root_settings[:first], *[settings[position] for position in left.where]]
    codes = [*decoded.roots[:first], *left.roots, *decoded.roots[last:]]
    for root, code in enumerate(codes):
        place, *start = (root,) if root < last else came_from(call, left, root)
        of_root = by_root[place]
        for leaf, below in leaves_of_code(decoded, code):
            source, path = left.sources[leaf], (*start, *below)
            is_new = source < 0 and ~source not in new
            before = None if is_new else pick(source, value_settings, new)
            if not is_new and (of_root is before or not first <= root < last):
                continue
            variable = shown(decoded, leaf)
            here = setting_of(of_root, path, variable)
            if is_new:
                new[~source] = here
                continue
            here, before = (meaning(x, path, variable, source) for x in (here, before))
            if not (here is before or here == before or (here is None and default is None)):
                known = f"at '{call.graph_leaves()[source].text()}'" if source >= 0 else ""
                position = left.where[root - first]
                again = path_text((*paths_of(left.treedef)[position], *path))
                again = f"in the result at '{again}'"
                raise conflict(what, variable, known or "at its first place", before, again, here)
    written = [value_settings[leaf] for leaf in left.written]
    result = [settings[i] for i in arrays]
    return [*result, *written, *[new.get(number, default) for number in range(len(out.new))]]


def new_variables(out: Outputs) -> list[tp.Any]:
    """For each new value what filters see of it."""
    left = out.definition
    leaves = left.new_leaves()
    return [shown(left.graphdef.decoded, leaves[number]) for number in range(len(out.new))]


def output_names(call: CallDef, definition: OutDef) -> list[str]:
    """The names of all outputs, for messages; see `output_paths`."""
    paths = output_paths(call, definition)
    counts = definition.num_arrays, len(definition.written)
    kinds = ["the result"] * counts[0] + ["the value at"] * counts[1]
    kinds += ["the new Variable"] * (len(paths) - len(kinds))
    starts = [1] * counts[0] + [0] * (len(paths) - counts[0])  # "result" is in the words already
    return [f"{k} '{path_text(path[i:])}'" for k, path, i in zip(kinds, paths, starts)]


def refuse_no_room(what: object, call: CallDef, out: Outputs, axes: tp.Sequence[tp.Any]) -> None:
    """Raise ValueError where an output cannot get its axis, because its slices have too few.

    Args:
        what: the transform and its function, for the message.
        call, out: the arguments, and the outputs.
        axes: the setting of each output.
    """
    for number, (axis, value) in enumerate(zip(axes, out.values)):
        if not isinstance(axis, int) or axis in (0, -1):
            continue
        for shape in map(np.shape, jax.tree_util.tree_leaves(value)):
            if not -len(shape) - 1 <= axis <= len(shape):
                raise ValueError(
                    f"{what}: axis {axis} of {output_names(call, out.definition)[number]} is out of "
                    f"bounds: each slice of it has shape {shape}. Give it another axis, in out_axes "
                    "or, if it belongs to an argument, in in_axes."
                )
