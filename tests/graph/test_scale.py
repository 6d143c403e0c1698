"""Depth and width: 10,000 modules in a chain and 100,000 Variables go through every function.

Nothing recurses through objects, and nothing is worse than linear but for the paths of a chain,
whose spelling is as long as the chain is deep.
"""

from __future__ import annotations

import gc
import sys
import time
import typing as tp

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite.graph._plan import view

ONE = jnp.ones(2)
DEPTH, WIDTH = 10_000, 100_000
SECONDS = 20  # generous: they take one or two where nothing else runs


class Link(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(ONE)
        self.number = 3


class Pair(nnx.Module):
    def __init__(self):
        self.left = nnx.Param(ONE)
        self.right = nnx.Param(ONE)


def chain() -> tp.Any:
    root = here = Link()
    for _ in range(DEPTH - 1):
        here.next = here = Link()
    return root


def chain_through_lists() -> tp.Any:
    root = here = Link()
    for _ in range(DEPTH // 5 - 1):
        new = Link()
        here.below = [new]
        here = new
    return root


def modules() -> tp.Any:
    return nnx.List([Pair() for _ in range(WIDTH // 2)])


def plain_list() -> tp.Any:
    return nnx.Dict(items=[nnx.Param(ONE) for _ in range(WIDTH // 5)])


def attributes() -> tp.Any:
    root = nnx.Dict()
    for number in range(WIDTH // 5):
        setattr(root, f"weight_{number}", nnx.Param(ONE))
    return root


SHAPES = {chain: DEPTH, chain_through_lists: DEPTH // 5, modules: WIDTH}
SHAPES |= {plain_list: WIDTH // 5, attributes: WIDTH // 5}


def count(model: tp.Any) -> int:
    return nnx.graphdef(model).num_leaves


def update(model: tp.Any) -> int:
    other = nnx.clone(model)
    nnx.update(model, nnx.state(other))  # walking
    nnx.update(model, nnx.state(other))  # from a plan
    return count(model)


def edit_and_split(model: tp.Any) -> int:
    model.extra = nnx.Param(ONE)
    number = nnx.split(model)[0].num_leaves - 1
    del model.extra
    return number


def pop(model: tp.Any) -> int:
    copy = nnx.clone(model)
    popped = nnx.pop(copy, nnx.Param)
    assert count(copy) == 0
    return view(popped).graphdef.num_leaves


FUNCTIONS: dict[str, tp.Callable[[tp.Any], int]] = {
    "split": lambda m: nnx.split(m)[0].num_leaves,
    "split by path": lambda m: nnx.split(m, nnx.PathContains("x"), ...)[0].num_leaves,
    "state": lambda m: view(nnx.state(m)).graphdef.num_leaves,
    "merge": lambda m: count(nnx.merge(*nnx.split(m, nnx.Param, ...))),
    "merge of a GraphState": lambda m: count(nnx.merge(nnx.unpack(m))),
    "update": update,
    "clone": lambda m: count(nnx.clone(m)),
    "graph=False": lambda m: nnx.split(m, graph=False)[0].num_leaves,
    "iter_graph": lambda m: sum(isinstance(x, nnx.Variable) for _, x in nnx.iter_graph(m)),
    "map": lambda m: count(nnx.map(lambda path, x: x, m)),
    "recursive_map": lambda m: count(nnx.recursive_map(lambda path, x: x, m)),
    "find_duplicates": lambda m: count(m) + len(nnx.find_duplicates(m)),
    "set_metadata": lambda m: (nnx.set_metadata(m, tag=1), count(m))[1],
    "unflatten": lambda m: count(nnx.unflatten(*nnx.flatten(m, with_paths=False))),
    "edit and split": edit_and_split,
    "pop": pop,
}


@pytest.fixture(scope="module", params=SHAPES, ids=lambda make: make.__name__)
def big(request) -> tuple[tp.Any, int]:
    return request.param(), SHAPES[request.param]


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_function_takes_deep_and_wide_graphs(big, function):
    model, expected = big
    limit = sys.getrecursionlimit()
    assert limit <= 1500  # nobody has raised it
    start = time.perf_counter()
    assert function(model) == expected
    assert time.perf_counter() - start < SECONDS


def test_a_traversal_is_linear_in_the_number_of_variables():
    def seconds(number: int) -> float:
        model = nnx.List([Pair() for _ in range(number // 2)])
        times = []
        for _ in range(3):
            model.mark = nnx.Param(ONE)
            gc.collect()
            gc.disable()  # what other tests left would be looked through again and again
            start = time.thread_time()
            nnx.split(model)
            times.append(time.thread_time() - start)
            gc.enable()
            del model.mark
        return min(times)

    small, large = seconds(5_000), seconds(100_000)
    assert large < 20 * small * 4  # linear, with room for a noisy machine and cold caches
