"""Checks that the body of a loop keeps the structure of its carry."""

from __future__ import annotations

import typing as tp

import jax
import numpy as np

from nnxlite._errors import path_text
from nnxlite.boundary import (
    Body,
    CallDef,
    Handover,
    OutGraph,
    edits_text,
    graph_difference,
    refuse_replaced,
    structure_error,
    tree_difference,
)
from nnxlite.graph import GraphDef, NodeCode, build_nodes, resolve, traverse
from nnxlite.transforms._branch_checks import result_words


def check_loop(name: str, updates: bool, num_bounds: int, call: CallDef, body: Body) -> None:
    """Raise ValueError or TypeError where the body's result does not have the structure of the carry.

    Args:
        name: of the loop.
        updates: whether structure changes propagate.
        num_bounds: how many arguments come before the carry.
        call: the arguments.
        body: the body.
    """
    treedef = body.shapes.treedef
    tree = call.template()[0][-1]
    wanted = jax.tree_util.tree_structure(tree)
    graph = body.definition.graph
    rebinds = name == "fori_loop" or not updates
    # The reference's classes: a loop over objects compares references first.
    references = name == "while_loop" or not updates
    error = ValueError if references and call.where else TypeError
    start = "body function carry input and carry output must have the same pytree structure"
    if error is ValueError:
        start = "requires body function's input and output to have the same reference and pytree "
        start += "structure"
    start = f"{name} {start}, but they differ"
    before = {position - num_bounds for position in call.where}
    if treedef != wanted:
        error = structure_error(wanted, treedef, before)
        words = argument_words(call, num_bounds), result_words(call, body)
        raise error(f"{start}: the output is {tree_difference(wanted, treedef, words)}.")
    misplaced = sorted(before ^ set(body.definition.where))
    if misplaced:
        path = call.paths()[misplaced[0] + num_bounds]
        sides = ["an object", "an array"][:: 1 if misplaced[0] in before else -1]
        raise error(
            f"{start} at '{path_text(path)}': the input is {sides[0]}, the output "
            f"{sides[1]}. Return objects and Variables where they came in."
        )
    handover: Handover | str = body.extra[-1]
    if graph is not None:
        edits = graph.edits
        if isinstance(handover, Handover) and rebinds:
            edits = handover.edits
        if edits or graph.kinds:
            changes = edits_text(call, graph)
            raise error(
                f"{start}: the body changes {changes}. A loop cannot change the structure of its "
                "carry: make attributes and objects before the loop."
            )
    if isinstance(handover, str):
        result = _result_graphdef(graph, len(body.definition.where)) if graph else call.graphdef
        if result is not call.graphdef:
            difference = graph_difference(call.graphdef, result, call.root_paths())
            raise error(f"{start} in the objects: {difference}.")
        raise error(f"{start}: the body {handover}.")
    if not updates:
        refuse_replaced(call, handover, name)


def argument_words(call: CallDef, first: int = 0) -> list[str]:
    """What each leaf of the arguments is, from a position on: an object or an array."""
    words, decoded = ["an array"] * call.treedef.num_leaves, call.graphdef.decoded
    for position, code in zip(call.where, decoded.roots):
        is_node = isinstance(code, NodeCode)
        kind = decoded.node_defs[code.number].type.__name__ if is_node else "State"
        words[position] = f"the {kind}"
    return words[first:]


def _result_graphdef(graph: OutGraph, count: int) -> GraphDef[tp.Any]:
    """The definition of the graph below the result alone."""
    decoded = graph.graphdef.decoded
    leaves: list[tp.Any] = [np.zeros(())] * decoded.num_leaves
    nodes = build_nodes(decoded, leaves)
    codes = decoded.roots[graph.first_result : graph.first_result + count]
    roots = [resolve(code, nodes, leaves) for code in codes]
    return GraphDef(traverse(roots).tokens, len(roots))
