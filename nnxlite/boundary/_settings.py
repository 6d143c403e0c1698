"""Output leaves in groups: how results whose structure is known only after tracing get their settings.

`vmap`, `pmap` and `shard_map` need the axis (or spec) of each output before they call the function, but
what the function writes is known only afterwards.  So outputs leave in groups, one for each setting in
the prefixes; which leaf is in which group crosses as static data.
"""

from __future__ import annotations

import dataclasses
import typing as tp

import jax
import numpy as np

from nnxlite._base.errors import path_text
from nnxlite._base.jax import PyTreeDef
from nnxlite.boundary._call_def import CallDef, paths_of, template_of
from nnxlite.boundary._labels import (
    array_settings,
    broadcast,
    conflict,
    leaves_of_code,
    setting_of,
    shown,
)
from nnxlite.boundary._outdef import OutDef, Outputs, Source, came_from, output_paths, pick
from nnxlite.boundary._partition import Division, Partition
from nnxlite.boundary._prefixes import PrefixMapping, is_setting
from nnxlite.graph._rebuild import Path


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of outputs in groups, without their values.

    Attributes:
        definition: what leaves.
        treedef: of the list of outputs.
        division: of the leaves in them.
    """

    definition: OutDef
    treedef: PyTreeDef
    division: Division


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
    result = array_settings(settings, left.treedef, left.where, what)
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


def no_room(axis: tp.Any, value: tp.Any, name: str) -> str | None:
    """The problem if an output cannot get its axis, because its slices have too few; or None."""
    if not isinstance(axis, int) or axis in (0, -1):
        return None
    for shape in map(np.shape, jax.tree_util.tree_leaves(value)):
        if not -len(shape) - 1 <= axis <= len(shape):
            return (
                f"axis {axis} of {name} is out of bounds: each slice of it has shape {shape}. Give "
                "it another axis, in out_axes or, if it belongs to an argument, in in_axes."
            )
    return None


def pack(
    out: Outputs, settings: list[tp.Any], order: tuple[tp.Any, ...]
) -> tuple[Layout, tuple[list[tp.Any], ...]]:
    """Output leaves in groups, one for each setting in `order`."""
    partition = Partition(tuple(settings), order)
    structure = jax.tree_util.tree_structure([0] * len(settings))
    return Layout(out.definition, structure, Division(partition)), partition.split(out.values)


def unpack(layout: Layout, groups: tp.Sequence[tp.Sequence[tp.Any]]) -> Outputs:
    """The inverse of `pack`, outside."""
    leaves = layout.division.join(*groups)
    return Outputs(layout.definition, jax.tree_util.tree_unflatten(layout.treedef, leaves))
