"""Errors for what a function must not return, store or change."""

from __future__ import annotations

import contextlib
import contextvars
import typing as tp

import jax

from nnxlite._base.captures import captures
from nnxlite._base.errors import path_text, short_type
from nnxlite._base.jax import describe_trace, in_this_trace, is_ref, key_name, trace_state
from nnxlite.boundary._call_def import CallDef, Inner
from nnxlite.boundary._inputs import is_root
from nnxlite.boundary._outdef import OutDef, Outputs, output_paths
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._kinds import GraphNode
from nnxlite.graph._walk import iter_graph
from nnxlite.variables._variable import Variable


def refuse_foreign_outputs(call: CallDef, out: Outputs, name: str = "the function") -> None:
    """Raise TypeError where a function returned or stored something that JAX cannot return.

    Args:
        call: the arguments, with the user's names.
        out: the outputs.
        name: of the function.
    """
    for number, value in enumerate(out.values):
        for leaf in filter(_is_foreign, jax.tree_util.tree_leaves(value)):
            path = output_paths(call, out.definition)[number]
            kind = type(leaf).__name__
            if number < out.definition.num_arrays:
                raise TypeError(
                    f"{name} returned a value of type '{kind}' at '{path_text(path[1:])}', "
                    "which is not a valid JAX type. Return arrays, objects, or pytrees of these; static "
                    "values can be attributes of objects."
                )
            raise TypeError(
                f"{name} stored a value of type '{kind}' at '{path_text(path)}', which is not a "
                "valid JAX type. Store an array; to make an attribute static, assign "
                "nnx.static(value)."
            )


def refuse_non_arrays(
    name: str, call: CallDef, leaves: tp.Sequence[tp.Any], remedy: str, inside: str | None = None
) -> None:
    """Raise TypeError naming the first leaf of the arguments that JAX does not accept.

    Called after JAX refused the arguments; returns if JAX had another reason.

    Args:
        name: of the transform.
        call, leaves: the arguments.
        remedy: what to do instead.
        inside: the same for a leaf inside a module or container, where it differs.
    """
    pairs = zip(call.leaves(), leaves)
    parts = ((leaf.text(), x) for leaf, value in pairs for x in jax.tree_util.tree_leaves(value))
    bad = next((pair for pair in parts if _is_foreign(pair[1])), None)
    if bad is not None:
        if inside is not None and not str(bad[0]).isidentifier():
            remedy = inside
        raise TypeError(
            f"{name}: cannot interpret argument '{bad[0]}' as an array, it is of type "
            f"'{type(bad[1]).__name__}'. {remedy}"
        ) from None


def _is_foreign(value: tp.Any) -> bool:
    try:
        jax.typeof(value)
    except TypeError:
        return True
    return False


def refuse_captured(
    nodes: list[tp.Any], origin: tuple[int | None, ...], graphdef: GraphDef[tp.Any]
) -> None:
    """Raise ValueError where the outputs contain an object from outside the transform."""
    here = trace_state.value
    for number, (node, old) in enumerate(zip(nodes, origin)):
        trace = node._box.trace if isinstance(node, Variable) else getattr(node, "_nnx_trace", here)
        if old is None and trace is not here:
            root, *path = graphdef.decoded.path(graphdef.decoded.node_frames[number])
            copy = "nnx.clone(captured)"
            if isinstance(node, Variable):
                copy = "nnx.merge(graphdef, state, copy=True) of a captured state, " + copy
            raise ValueError(
                "Cannot extract graph node from different trace level: the "
                f"{type(node).__name__} at '{path_text(path)}' (of value {root}) is returned or "
                f"stored, and belongs to {describe_trace(trace)}. Pass it to the transformed function "
                f"as an argument instead of capturing it, or return a copy: {copy}."
            )


def refuse_dead_tracers(nodes: list[tp.Any], graphdef: GraphDef[tp.Any]) -> None:
    """Raise ValueError where a static attribute of an object that leaves captures a tracer."""
    for number, node in enumerate(nodes):
        if not isinstance(node, GraphNode):
            continue
        for name, value in node._nnx_dict.items():
            tracer = _captured_tracer(value)
            if tracer is None:
                continue
            _, *path = graphdef.decoded.path(graphdef.decoded.node_frames[number])
            at = path_text((*path, name))
            advice = getattr(node, "_nnx_captures_advice", "")
            raise ValueError(
                f"The {type(node).__name__} that leaves the transform captures a tracer "
                f"{short_type(tracer)} in its static attribute '{at}', which is dead outside. "
                + (advice or "Store the value in an nnx.Variable of the object, and read it there.")
            )


def _captured_tracer(value: tp.Any) -> tp.Any:
    """A tracer of this trace that a function in a static value captures, or None."""
    todo, seen = [value], dict[int, tp.Any]()
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (str, jax.Array, Variable, GraphNode)):
            continue
        if is_ref(item):
            continue
        seen[id(item)] = item
        if isinstance(item, dict):  # an element that is an array is data
            todo += item.values()
        elif isinstance(item, (tuple, list)) and not hasattr(item, "update"):
            todo += item
        else:
            dead = next(filter(in_this_trace, captures(item)), None)
            if dead is not None:
                return dead
    return None


def refuse_aliases(inner: Inner, result: tp.Any) -> None:
    """Raise ValueError where a result contains a Variable of the arguments."""
    call = inner.call
    came_in = {
        id(inner.nodes[n]): i for i, n in enumerate(call.graphdef.decoded.leaf_nodes) if n >= 0
    }
    places = jax.tree_util.tree_leaves_with_path(result, is_leaf=is_root)
    below = (
        (above, path, value)
        for above, root in places
        for path, value in (iter_graph(root, graph=True) if is_root(root) else ())
    )
    for above, path, variable in below:
        leaf = came_in.get(id(variable))
        if leaf is None:
            continue
        raise ValueError(
            f"Duplicate {type(variable).__name__} found at paths: "
            f"'{path_text((*map(key_name, above), *path))}' of the result, "
            f"'{call.graph_leaves()[leaf].text()}' of the arguments. A transform with "
            "graph_updates=False (or graph=False) does not support Variable aliasing, only values "
            "leave: return the value (variable[...]); what is written into the Variable is kept in "
            "any case."
        )


_FIXED: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "nnxlite_fixed_structure", default=frozenset()
)


@contextlib.contextmanager
def fixed_structure(ids: frozenset[int]) -> tp.Iterator[None]:
    """Within the block, transforms refuse to change the structure of objects and Variables, by id.

    The refusal is a ValueError, raised before anything is written.
    """
    outer = _FIXED.get()
    token = _FIXED.set(outer | ids if outer else ids)
    try:
        yield
    finally:
        _FIXED.reset(token)


def refuse_fixed(outer: list[tp.Any], left: OutDef) -> None:
    """Raise ValueError where the structure of a fixed object or Variable would change."""
    fixed = _FIXED.get()
    if not fixed:
        return
    for number, names, removed in left.edits:
        node = outer[tp.cast(int, left.origin[number])]
        if id(node) in fixed:
            raise ValueError(structure_changed(node, (*names, *removed)))
    for old, _ in left.kinds:
        if id(outer[old]) in fixed:
            raise ValueError(structure_changed(outer[old], ("metadata",)))


def structure_changed(node: tp.Any, names: tuple[tp.Any, ...]) -> str:
    """The message for a function that changes a structure that must stay the same."""
    what = ", ".join(repr(name) for name in names)
    return (
        f"The graph structure of a {type(node).__name__} was changed where it must stay the same "
        f"({what}): it is among the arguments of cached_partial. Undo temporary changes before the "
        "function returns (nnx.pop removes what Module.sow stores), make attributes before "
        "cached_partial is called, or call the function itself."
    )
