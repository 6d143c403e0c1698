"""The price of a jitted call, counted without a clock: how many functions Python calls for it.

Counting sees a walk over the objects that came back, or a call for each Variable, in any machine
and under any load.
"""

from __future__ import annotations

import gc
import sys

import jax.numpy as jnp
import pytest

import nnxlite as nnx

CEILING = 40
"""Calls for one jitted call (18 to 34 were seen), whatever the number of Variables."""


@pytest.fixture(autouse=True)
def one_cpu_device(monkeypatch):
    """The tests run on several CPU devices, where a call also looks at what is in flight."""
    monkeypatch.setattr("nnxlite.transforms._jit.has_several_cpus", lambda: False)


class Model(nnx.Module):
    def __init__(self, count):
        self.weights = nnx.List([nnx.Param(jnp.ones(2)) for _ in range(count)])
        self.tied = self.weights[0]

    def grow(self, by=1.0):
        for weight in self.weights:
            weight += by


OTHER = Model(3)
step = nnx.jit(lambda model: model.grow())
by_static = nnx.jit(lambda model, by: model.grow(by), static_argnames="by")
nested = nnx.jit(lambda models, rest: models["one"][0].grow(rest[0]))
read = nnx.jit(lambda model: sum(weight.value.sum() for weight in model.weights))
in_place = nnx.jit(lambda model: model.grow(), donate="written")
USES = {
    "positional": (lambda model: step(model), CEILING),
    "read": (lambda model: read(model), 30),
    "donated": (lambda model: in_place(model), CEILING + 10),
    "keyword": (lambda model: step(model=model), 45),
    "static": (lambda model: by_static(model, by=2.0), 65),
    "inside containers": (lambda model: nested({"one": [model]}, (1.0,)), 85),
    "two in turn": (lambda model: (step(OTHER), step(model)), 95),
}


def count_calls(run):
    """How many functions, of Python or C, are called while `run()` runs."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # what a collection calls is no part of the price
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


@pytest.mark.parametrize(("use", "ceiling"), USES.values(), ids=USES)
def test_a_call_costs_the_same_for_10_and_for_200_variables(use, ceiling):
    counts = []
    for size in (10, 200):
        model = Model(size)
        for _ in range(3):
            use(model)
        counts.append(count_calls(lambda model=model: use(model)))
    small, large = counts
    assert small <= ceiling
    assert large <= small + 5


def test_a_thousand_variables():
    model = Model(1000)
    for _ in range(3):
        step(model)
    assert count_calls(lambda: step(model)) <= CEILING


def test_long_static_lists_and_dicts():
    model = Model(10)
    model.words = {f"word {n}": n for n in range(1000)}
    model.numbers = list(range(1000, 2000))
    for _ in range(3):
        step(model)
    assert count_calls(lambda: step(model)) <= CEILING + 30


def test_a_bound_method():
    model = Model(10)
    grow = nnx.jit(model.grow)
    for _ in range(3):
        grow()
    assert count_calls(grow) <= CEILING


def test_after_a_structure_change_the_next_call_is_quick_again():
    @nnx.jit
    def sows(model):
        model.sow(nnx.Intermediate, "seen", model.tied.value)
        model.grow()

    model = Model(10)
    sows(model)
    nnx.pop(model, nnx.Intermediate)
    sows(model)
    for _ in range(2):
        step(model)
    assert count_calls(lambda: step(model)) <= CEILING
    model.mark = 1
    step(model)
    step(model)
    assert count_calls(lambda: step(model)) <= CEILING


def test_a_change_elsewhere_costs_no_call_for_each_variable():
    model, other = Model(200), Model(3)
    for number in range(3):
        step(model)
        step(other)
        other.mark = number
    assert count_calls(lambda: step(model)) <= CEILING + 25


def test_options_have_the_names_of_their_transform_alone():
    options = nnx.remat(lambda m: m).options
    with pytest.raises(AttributeError, match="no_such_option"):
        options.no_such_option
