"""Differences of structures, by path: what messages say where two structures should be equal."""

from __future__ import annotations

import typing as tp

import jax

from nnxlite._errors import path_text
from nnxlite._jax import PyTreeDef, key_name
from nnxlite.boundary._inputs import CallDef
from nnxlite.boundary._outdef import OutGraph
from nnxlite.graph import ArrayCode, Code, ContainerCode, GraphDef, ObjectDef, Path, StaticDef
from nnxlite.variables import VariableDef

SHOWN = 5
"""How many differences a message lists."""


def structure_error(
    before: PyTreeDef, after: PyTreeDef, roots: tp.Container[int] = ()
) -> type[Exception]:
    """The class of the error for a carry that comes out as another pytree; the reference's classes.

    It is TypeError where nothing but arrays became trees; `roots` are the leaves that are objects.
    """
    tree = jax.tree_util.tree_unflatten(after, range(after.num_leaves))
    try:
        parts = before.flatten_up_to(tree)
    except ValueError:
        return ValueError
    kept = all(isinstance(part, int) for i, part in enumerate(parts) if i in roots)
    return TypeError if kept else ValueError


def tree_difference(before: PyTreeDef, after: PyTreeDef) -> str:
    """How two pytree structures differ: the paths that only one of them has.

    >>> import jax
    >>> from nnxlite.boundary._differences import tree_difference
    >>> before, after = map(jax.tree.structure, ({"a": 1, "b": 2}, {"a": 1, "c": (2, 3)}))
    >>> tree_difference(before, after)
    "without 'b', with 'c.0', 'c.1'"
    """
    old, new = _leaf_paths(before), _leaf_paths(after)
    if _ROOT in old or _ROOT in new:
        return f"{after} in place of {before}"
    parts = []
    for word, one, other in (("without", old, new), ("with", new, old)):
        missing = [repr(path) for path in one if path not in other]
        if missing:
            more = ", ..." if len(missing) > SHOWN else ""
            parts.append(f"{word} {', '.join(missing[:SHOWN])}{more}")
    return ", ".join(parts) or f"{after} in place of {before}"


_ROOT = path_text(())


def _leaf_paths(treedef: PyTreeDef) -> dict[str, None]:
    tree = jax.tree_util.tree_unflatten(treedef, range(treedef.num_leaves))
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {path_text(map(key_name, path)): None for path, _ in paths}


def graph_difference(
    before: GraphDef[tp.Any], after: GraphDef[tp.Any], roots: tp.Sequence[Path] = ()
) -> str:
    """How two graphs differ: each path where they do, with both sides.

    Args:
        before, after: the graphs.
        roots: where the roots are; by number, if not given.
    """
    old, new = _by_path(before, roots), _by_path(after, roots)
    parts = []
    for path in {**old, **new}:
        a, b = old.get(path, "nothing"), new.get(path, "nothing")
        if a != b and not _inside(path, parts):
            parts.append((path, f"'{path_text(path)}': {a} became {b}"))
    more = f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
    return "; ".join(text for _, text in parts[:SHOWN]) + more


def edits_text(call: CallDef, graph: OutGraph | None, skip: int = 1) -> str:
    """The structure changes that a function made to its arguments, in words."""
    if graph is None:
        return "no structure"
    out = []
    for number, names, removed in graph.edits:
        where = node_text(call, tp.cast(int, graph.origin[number]), skip)
        out.append(f"attributes {[*names, *removed]} of {where}")
    out += [f"metadata of {node_text(call, old, skip)}" for old, _ in graph.kinds]
    return ", ".join(out) or "no structure"


def node_text(call: CallDef, node: int, skip: int = 1) -> str:
    """The path of an object among the arguments, without its first `skip` names."""
    decoded = call.graphdef.decoded
    root, *below = decoded.path(decoded.node_frames[node])
    return f"'{call.text_of(root, below, skip)}'"


def _inside(path: tuple[tp.Any, ...], parts: list[tuple[tuple[tp.Any, ...], str]]) -> bool:
    """Whether a difference above a path is listed already."""
    return any(path[: len(above)] == above for above, _ in parts)


def _by_path(
    graphdef: GraphDef[tp.Any], roots: tp.Sequence[Path] = ()
) -> dict[tuple[tp.Any, ...], str]:
    """What is at each path, in words."""
    decoded = graphdef.decoded
    names: list[Path] = [(i,) for i in range(graphdef.num_roots)]
    if graphdef.num_roots == 1:
        names = [()]
    names[: len(roots)] = roots
    frames = [decoded.path(frame) for frame in decoded.node_frames]
    own = [(*names[root], *path) for root, *path in frames]
    out: dict[tuple[tp.Any, ...], str] = {}

    def visit(path: tuple[tp.Any, ...], code: Code) -> None:
        if isinstance(code, StaticDef):
            out[path] = repr(code.value)
        elif isinstance(code, ContainerCode):
            out[path] = f"a {code.definition.type.__name__}"
            for name, child in zip(code.definition.keys, code.codes):
                visit((*path, name), child)
        elif isinstance(code, ArrayCode):
            out[path] = "an array"
        elif own[code.number] != path:
            out[path] = f"what is at '{path_text(own[code.number])}'"
        else:
            out[path] = _described(decoded.node_defs[code.number])

    for number, code in enumerate(decoded.roots):
        visit(names[number], code)
    for number, codes in decoded.children:
        definition: ObjectDef = decoded.node_defs[number]
        for name, value in definition.template.items():
            out[*own[number], name] = repr(value)
        for name, code in zip(definition.layout.data, codes):
            visit((*own[number], name), code)
    return dict(sorted(out.items(), key=lambda pair: [str(part) for part in pair[0]]))


def _described(definition: tp.Any) -> str:
    if isinstance(definition, VariableDef):
        entries = {k: v for k, v in definition.metadata.items() if k not in _EVERY_VARIABLE_HAS}
        inside = ", ".join(f"{k}={v!r}" for k, v in entries.items())
        return f"{definition.type.__name__}({inside})" if inside else definition.type.__name__
    kind = getattr(definition, "type", None)
    return kind.__name__ if kind is not None else "an array reference"


_EVERY_VARIABLE_HAS = ("hijax", "ref", "eager_sharding")
