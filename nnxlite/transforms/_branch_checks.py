"""Checks that branches leave the same structure, and descriptions of how two differ."""

from __future__ import annotations

import typing as tp

import jax

from nnxlite._errors import path_text
from nnxlite._jax import key_name
from nnxlite.boundary import (
    Body,
    CallDef,
    OutDef,
    described,
    edits_text,
    fresh_text,
    graph_difference,
    node_text,
    output_roots,
    tree_difference,
    tree_text,
)
from nnxlite.graph import NodeCode
from nnxlite.transforms._wrapper import name_of


def branch_name(name: str, number: int) -> str:
    """The name of a branch in messages and among the operands."""
    return ("true_fun", "false_fun")[number] if name == "cond" else f"branch {number}"


def check_branches(
    name: str,
    funs: tp.Sequence[tp.Callable[..., tp.Any]],
    call: CallDef,
    bodies: list[Body],
    definitions: list[OutDef],
    values: list[tp.Any],
) -> None:
    """Raise TypeError where the branches do not leave the same structure."""
    first = definitions[0]
    for number, (body, definition) in enumerate(zip(bodies[1:], definitions[1:]), 1):
        names = f"{branch_name(name, 0)} ({name_of(funs[0])}) and {branch_name(name, number)} "
        names += f"({name_of(funs[number])})"
        mine = jax.tree_util.tree_structure(bodies[0].shapes.result)
        theirs = jax.tree_util.tree_structure(body.shapes.result)
        if definition != first or mine != theirs:
            both = bodies[0], body
            difference = _structure_difference(call, both, first, definition, mine, theirs)
            raise TypeError(
                f"{name} branch outputs must have the same structure, but {names} differ: "
                f"{difference}. Make every "
                "branch create, remove and return the same objects and attributes."
            )
        for what, where, x, y in _pairs(call, bodies[0], body, definition, values):
            if described(x) != described(y):
                raise TypeError(
                    f"{name} branches must {what}, but {names} differ at {where()}: {described(x)} and "
                    f"{described(y)}. Convert one of the two, for example with .astype."
                )


def _pairs(
    call: CallDef, one: Body, other: Body, definition: OutDef, values: list[tp.Any]
) -> tp.Iterator[tuple[str, tp.Callable[[], str], tp.Any, tp.Any]]:
    """The outputs of two branches of equal structure: what must be equal, where, and both sides.

    The path takes long to compute, so `where` is a function, which is called only for a difference.
    """
    results = jax.tree_util.tree_leaves_with_path(one.shapes.result)
    for (path, x), y in zip(results, jax.tree_util.tree_leaves(other.shapes.result)):
        of_result = lambda path=path: f"'{path_text(map(key_name, path))}' of their results"
        yield "have equal output types", of_result, x, y
    for number, (x, y) in enumerate(zip(one.shapes.fresh, other.shapes.fresh)):
        of_fresh = lambda number=number: f"'{fresh_text(call, definition, number)}'"
        yield "leave equal types", of_fresh, x, y
    a, b = (dict(zip(body.definition.written, body.shapes.written)) for body in (one, other))
    for leaf in definition.written:  # a branch that does not write leaves the old value
        of_leaf = lambda leaf=leaf: f"'{call.graph_leaves()[leaf].text()}'"
        yield "leave equal types", of_leaf, a.get(leaf, values[leaf]), b.get(leaf, values[leaf])


def _structure_difference(
    call: CallDef, bodies: tuple[Body, Body], a: OutDef, b: OutDef, a_tree: tp.Any, b_tree: tp.Any
) -> str:
    a_tree, b_tree = a.treedef or a_tree, b.treedef or b_tree
    words = result_words(call, bodies[0]), result_words(call, bodies[1])
    whole = (
        f"the first returns {tree_text(a_tree, words[0])}, the second {tree_text(b_tree, words[1])}"
    )
    if a_tree != b_tree:
        if not (a_tree.num_leaves and b_tree.num_leaves):  # one of them is None, say
            return whole
        return f"the result of the second is {tree_difference(a_tree, b_tree, words)}"
    if a.where != b.where:
        return whole
    returned = [", ".join(_returned(call, d)) for d in (a, b)]
    if returned[0] != returned[1]:
        return f"the first returns {returned[0]}, the second {returned[1]}"
    parts = [edits_text(call, d.graph) for d in (a, b)]
    if parts[0] != parts[1]:
        return f"the first changes {parts[0]}, the second {parts[1]}"
    results = [call.graphdef if d.graph is None else d.graph.graphdef for d in (a, b)]
    difference = graph_difference(results[0], results[1], output_roots(call, a))
    return f"from the first to the second, {difference}"


def result_words(call: CallDef, body: Body) -> list[str]:
    """What each leaf of the result of a body is: an object, a State, or the type of an array."""
    definition = body.definition
    words = [described(x) for x in jax.tree_util.tree_leaves(body.shapes.result)]
    if definition.treedef is not None:
        for position, word in zip(definition.where, _returned(call, definition)):
            words.insert(position, word)
    return words


def _returned(call: CallDef, definition: OutDef) -> list[str]:
    """The objects that a branch returns, in words."""
    graph = definition.graph
    nodes: list[int | None] = [code.number for code in definition.nodes]
    kinds: list[str] = [""] * len(nodes)
    if graph is not None:
        decoded = graph.graphdef.decoded
        codes = decoded.roots[graph.first_result : graph.first_result + len(definition.where)]
        numbers = [code.number if isinstance(code, NodeCode) else None for code in codes]
        nodes = [None if n is None else graph.origin[n] for n in numbers]
        kinds = ["State" if n is None else decoded.node_defs[n].type.__name__ for n in numbers]
    return [f"a new {k}" if n is None else node_text(call, n) for n, k in zip(nodes, kinds)]
