"""Depth and width: a deep and wide graph goes through every function.

Nothing recurses through objects, and nothing is worse than linear but for the paths of a chain,
whose spelling is as long as the chain is deep.
"""

import gc
import sys
import time

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite.graph._plan import view

ONE = jnp.ones(2)
DEPTH, BELOW, WIDTH = 3_000, 1_000, 5_000
SECONDS = 20  # generous: they take one or two where nothing else runs


class Pair(nnx.Module):
    def __init__(self):
        self.left = nnx.Param(ONE)
        self.right = nnx.Param(ONE)


@pytest.fixture(scope="module")
def big():
    """Two chains of modules, one of them through lists, and many Variables in each kind of container."""
    chain = lists = 3
    for _ in range(DEPTH):
        chain = nnx.Dict(weight=nnx.Param(ONE), next=chain, number=3)
    for _ in range(BELOW):
        lists = nnx.Dict(weight=nnx.Param(ONE), below=[lists])
    return nnx.Dict(
        chain=chain,
        lists=lists,
        pairs=nnx.List([Pair() for _ in range(WIDTH)]),
        items=[nnx.Param(ONE) for _ in range(WIDTH)],
        attributes=nnx.Dict({f"weight_{n}": nnx.Param(ONE) for n in range(WIDTH)}),
    )


LEAVES = 4 * WIDTH + DEPTH + BELOW


def count(model):
    return nnx.graphdef(model).num_leaves


def update(model):
    other = nnx.clone(model)
    nnx.update(model, nnx.state(other))  # walking
    nnx.update(model, nnx.state(other))  # from a plan
    return count(model)


def edit_and_split(model):
    model.extra = nnx.Param(ONE)
    number = nnx.split(model)[0].num_leaves - 1
    del model.extra
    return number


def pop(model):
    copy = nnx.clone(model)
    popped = nnx.pop(copy, nnx.Param)
    assert count(copy) == 0
    return view(popped).graphdef.num_leaves


def set_mode(model):
    model.set_attributes(raise_if_not_found=False, number=5)
    assert model.chain.next.number == 5
    assert sum(1 for _ in model.iter_modules()) == 3 + WIDTH + DEPTH + BELOW
    return count(model)


FUNCTIONS = {
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
    "set_attributes": set_mode,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_function_takes_deep_and_wide_graphs(big, function):
    assert sys.getrecursionlimit() <= 1500  # nobody has raised it
    start = time.perf_counter()
    assert function(big) == LEAVES
    assert time.perf_counter() - start < SECONDS


def test_a_traversal_is_linear_in_the_number_of_variables():
    def seconds(number):
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
