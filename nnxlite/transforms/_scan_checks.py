"""Checks of `scan`: prefixes, sizes of axes, and the outputs of its body."""

from __future__ import annotations

import typing as tp

import jax

from nnxlite._errors import path_text
from nnxlite.boundary import (
    SHARED,
    Body,
    CallDef,
    CameIn,
    Carry,
    Edit,
    FilterMapping,
    Fresh,
    OutGraph,
    edits_text,
    leaves_of_code,
    no_room,
    output_names,
    refuse_replaced,
    structure_error,
    template_of,
    tree_difference,
)
from nnxlite.graph import static_def

_NO_LEAVES = static_def(None)


def check_prefixes(in_axes: tp.Any, out_axes: tp.Any) -> None:
    """Raise ValueError for an invalid use of Carry."""
    for axes in (in_axes, out_axes):
        parts = axes if isinstance(axes, tuple) else (axes,)
        for part in parts:
            inside = jax.tree_util.tree_leaves(
                part, is_leaf=lambda x: x is None or isinstance(x, FilterMapping)
            )
            if part is not Carry and any(setting is Carry for setting in inside):
                raise ValueError(
                    f"Carry must be at the top level, it cannot be nested. Found axes={axes!r}. "
                    "Make the carry one argument (any pytree)."
                )

    _check_results(out_axes)

    def count(axes: tp.Any) -> int:
        return (axes if isinstance(axes, tuple) else (axes,)).count(Carry)

    if bool(count(in_axes)) != bool(count(out_axes)):
        raise ValueError(
            "If one of in_axes or out_axes has Carry, the other must also have Carry. Got "
            f"in_axes={in_axes!r} and out_axes={out_axes!r}."
        )
    if count(in_axes) > 1 or count(out_axes) > 1:
        raise ValueError(
            f"Found multiple Carry definitions in in_axes={in_axes!r} or out_axes={out_axes!r}. "
            "Make the carries one pytree."
        )


def _check_results(out_axes: tp.Any) -> None:
    """Raise ValueError where a result would be broadcast, or a part of an object carried."""
    settings, _ = jax.tree_util.tree_flatten_with_path(
        out_axes, is_leaf=lambda x: x is None or isinstance(x, FilterMapping)
    )
    for path, setting in settings:
        inside = setting._settings if isinstance(setting, FilterMapping) else [setting]
        for word, refused in (("carry", Carry), ("broadcast", None)):
            if setting is not Carry and any(axis is refused for axis in inside):
                where = "".join(map(str, path))
                shown = f"out_axes={setting!r}" if setting is None else repr(setting)
                raise ValueError(
                    f"Cannot {word} output state. Got {shown} at: out_axes{where}. Every result of "
                    "an iteration needs an axis, or is the carry as a whole."
                )


def check_length(
    call: CallDef,
    leaves: tp.Sequence[tp.Any],
    axes: tp.Sequence[tp.Any],
    scanned: tp.Sequence[int],
    length: int | None,
) -> None:
    """Raise ValueError where sizes and `length` disagree, or there are neither.

    Args:
        call, leaves: the arguments.
        axes: of each leaf.
        scanned: which leaves have one.
        length: as given to `scan`.
    """
    sizes: dict[int, str] = {}
    names = call.leaves()
    for leaf in scanned:
        name, axis = names[leaf].text(), axes[leaf]
        for part in jax.tree_util.tree_leaves(leaves[leaf]):
            shape = jax.typeof(part).shape
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"scan: the value at '{name}' has shape {shape} and no axis {axis} to "
                    "scan over. Give its axis in in_axes, None for a constant, or Carry."
                )
            sizes.setdefault(shape[axis], name)
    if length is not None and any(size != length for size in sizes):
        raise ValueError(
            f"scan got `length` argument of {length} which disagrees with leading axis "
            f"sizes {list(sizes)} (at {', '.join(map(repr, sizes.values()))}). Leave `length` out, "
            "or scan over axes of that size."
        )
    if len(sizes) > 1:
        parts = [f"{size} at '{name}'" for size, name in sizes.items()]
        raise ValueError(
            f"scan got values with different axis sizes: {', '.join(parts)}. Give all the same "
            "size, or None to what is the same in every iteration."
        )
    if not sizes and length is None:
        raise ValueError(
            "scan got no values to scan over and `length` not provided. Pass length, or an "
            "axis for an argument in in_axes."
        )


def check_body(
    name: str,
    updates: bool,
    call: CallDef,
    body: Body,
    roles: list[tp.Any],
    in_carry: tp.Any,
    out_carry: tp.Callable[[tp.Any], tp.Any],
) -> None:
    """Raise an error where the body writes a constant, or changes the structure of its carry.

    Args:
        name: of the scanned function.
        updates: whether structure changes propagate.
        call: the arguments.
        body: the body.
        roles: of the graph leaves.
        in_carry: the part of the arguments that is the carry, positions for leaves.
        out_carry: gives that part of a result.
    """
    definition = body.definition
    (_, _, fresh_settings), handover = body.extra
    for leaf in definition.written:
        if roles[leaf] is None:
            raise ValueError(
                f"scan: the body writes '{call.graph_leaves()[leaf].text()}', which is broadcast "
                "(axis None): the writes of the iterations would be lost. Carry it, with Carry in "
                "in_axes or nnx.StateAxes({...: nnx.Carry}), or give it an axis."
            )
    graph = definition.graph
    if handover is SHARED:
        raise TypeError(
            "scan body function carry input and carry output must have the same pytree "
            f"structure, but the body {SHARED}."
        )
    if isinstance(handover, str):
        raise ValueError(
            f"Carry references must be the same between iterations: the body of {name} must return "
            "the objects of its carry themselves, in their places. Update them in place "
            "(nnx.update) instead of returning new ones."
        )
    error = TypeError if updates else ValueError
    if graph is not None:
        carried = {source for _, source in handover.slots}
        for leaf, setting in enumerate(fresh_settings):
            if Fresh(leaf) not in carried and not isinstance(setting, int):
                raise error(
                    "scan body function carry input and carry output must have the same pytree "
                    f"structure, but they differ: the body adds {_added(graph, leaf)} to "
                    "an argument that is carried or broadcast. Create it before the loop, or "
                    "give the argument an axis."
                )
        if _restructures(updates, call, graph, handover.edits, roles, fresh_settings):
            raise error(
                "scan body function carry input and carry output must have the same pytree "
                f"structure, but they differ: the body changes {edits_text(call, graph)}, of "
                "an argument that is carried or broadcast. Do this before the loop or after "
                "it, or give the argument an axis."
            )
    if not updates:
        refuse_replaced(call, handover, "scan")
    _check_room(name, call, body)
    _check_structure(updates, call, body, in_carry, out_carry)


def _added(graph: OutGraph, number: int) -> str:
    """The leaf that the body adds, and its path, by the number of its fresh value."""
    decoded = graph.graphdef.decoded
    leaf = graph.fresh_leaves()[number]
    _, *path = decoded.path(decoded.leaf_frames[leaf])
    node = decoded.leaf_nodes[leaf]
    kind = decoded.node_defs[node].type.__name__ if node >= 0 else "array"
    return f"{kind} '{path_text(path)}'"


def _restructures(
    updates: bool,
    call: CallDef,
    graph: OutGraph,
    edits: tp.Sequence[Edit],
    roles: list[tp.Any],
    fresh: tp.Sequence[tp.Any],
) -> bool:
    """Whether the next iteration would have other Variables than this one at some paths."""
    came_in, decoded = call.graphdef.decoded, graph.graphdef.decoded
    codes_in, codes_out = dict(came_in.children), dict(decoded.children)
    if any(roles[came_in.node_leaves[old]] is Carry for old, _ in graph.kinds):
        return True
    only_adds = all(
        not removed
        and not {*names} & {*came_in.node_defs[tp.cast(int, graph.origin[number])].layout.data}
        for number, names, removed in graph.edits
    )
    for number, names, removed in edits:
        old = tp.cast(int, graph.origin[number])
        before = dict(zip(came_in.node_defs[old].layout.data, codes_in[old]))
        after = dict(zip(decoded.node_defs[number].layout.data, codes_out[number]))
        for name in (*names, *removed):
            settings = [
                roles[leaf] for leaf, _ in leaves_of_code(came_in, before.get(name, _NO_LEAVES))
            ]
            sources = [
                graph.sources[leaf]
                for leaf, _ in leaves_of_code(decoded, after.get(name, _NO_LEAVES))
            ]
            added = [source.pick(roles, fresh) for source in sources]
            if only_adds and all(isinstance(source, CameIn) for source in sources):
                if updates or {*added} == {None}:
                    continue  # another name for a Variable that every iteration has
            settings += added
            if not all(isinstance(s, int) for s in settings):
                return True
    return False


def _check_room(name: str, call: CallDef, body: Body) -> None:
    """Raise ValueError for an output whose slices have too few axes for the axis that it gets."""
    shapes = body.shapes
    result = jax.tree_util.tree_leaves(shapes.result)
    axes = [axis for part in body.extra[0] for axis in part]
    for number, (axis, value) in enumerate(zip(axes, [*result, *shapes.written, *shapes.fresh])):
        if no_room(axis, value, ""):
            leaves = [leaf.text() for leaf in call.graph_leaves()]
            output = output_names(body.definition, shapes.treedef, leaves).all()[number]
            raise ValueError(f"{name}: {no_room(axis, value, output)}")


def _check_structure(
    updates: bool,
    call: CallDef,
    body: Body,
    before: tp.Any,
    out_carry: tp.Callable[[tp.Any], tp.Any],
) -> None:
    """Raise an error where the carry comes out as another pytree than it went in."""
    after = out_carry(template_of(body.shapes.treedef))
    structures = [jax.tree_util.tree_structure(part) for part in (before, after)]
    if structures[0] != structures[1]:
        # The reference's classes: with updates it compares references first.
        positions = jax.tree_util.tree_leaves(before)
        roots = {i for i, position in enumerate(positions) if position in call.where}
        error = ValueError if updates else structure_error(structures[0], structures[1], roots)
        raise error(
            "scan body function carry input and carry output must have the same pytree "
            f"structure, but they differ: the output is {tree_difference(*structures)}."
        )
