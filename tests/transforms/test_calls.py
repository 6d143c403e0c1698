"""The price of a jitted call, counted without a clock: how many functions Python calls for it.

Counting sees a walk over the objects that came back, or a call for each Variable, in any machine
and under any load.
"""

from __future__ import annotations

import gc
import sys
import typing as tp

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
    def __init__(self, count: int) -> None:
        self.weights = nnx.List([nnx.Param(jnp.ones(2)) for _ in range(count)])
        self.tied = self.weights[0]

    def grow(self, by: tp.Any = 1.0) -> None:
        for weight in self.weights:
            weight += by


@nnx.jit
def step(model: Model) -> None:
    model.grow()


def positional(model: Model) -> None:
    step(model)


def keyword(model: Model) -> None:
    step(model=model)


@nnx.jit
def nested(models: dict[str, tp.Any], rest: tuple[tp.Any, ...]) -> None:
    models["one"][0].grow(rest[0])


def inside_containers(model: Model) -> None:
    nested({"one": [model]}, (1.0,))


@nnx.jit(static_argnames="by")
def by_static(model: Model, by: float) -> None:
    model.grow(by)


def static(model: Model) -> None:
    by_static(model, by=2.0)


@nnx.jit(donate="written")
def in_place(model: Model) -> None:
    model.grow()


def donated(model: Model) -> None:
    in_place(model)


@nnx.jit
def read_step(model: Model) -> tp.Any:
    return sum(weight.value.sum() for weight in model.weights)


def read(model: Model) -> None:
    read_step(model)


OTHER = Model(3)


def in_turn(model: Model) -> None:
    step(OTHER)
    step(model)


def count_calls(run: tp.Callable[[], object]) -> int:
    """How many functions, of Python or C, are called while `run()` runs."""
    count = 0

    def profile(frame: tp.Any, event: str, argument: tp.Any) -> None:
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


@pytest.mark.parametrize(
    ("use", "ceiling"),
    [
        (positional, CEILING),
        (read, 30),
        (donated, CEILING + 10),
        (keyword, 45),
        (static, 65),
        (inside_containers, 85),
        (in_turn, 95),  # two calls
    ],
)
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
    def sows(model: Model) -> None:
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
