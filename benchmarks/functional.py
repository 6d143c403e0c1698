"""Taking a model of 100 Linears apart and putting it together: the first time and from then on."""

from __future__ import annotations

import typing as tp
from collections.abc import Callable

import jax

from benchmarks.harness import Budget, Calls, Prepared, Sampler, case
from benchmarks.models import library, linears

LAYERS = 100

Operation = Callable[[tp.Any], Callable[[tp.Any], object]]
"""Given the library, what to do to a model (an operand may be made from another such model)."""


def split(nnx: tp.Any):
    """To a GraphDef and a State."""
    return nnx.split


def state(nnx: tp.Any):
    """The State alone."""
    return nnx.state


def update(nnx: tp.Any):
    """Write a whole State back."""
    values = nnx.state(linears(nnx, LAYERS))
    return lambda model: nnx.update(model, values)


def clone(nnx: tp.Any):
    """A copy of all objects."""
    return nnx.clone


def merge(nnx: tp.Any):
    """New objects from a GraphDef and a State; the model itself plays no part."""
    parts = nnx.split(linears(nnx, LAYERS))
    return lambda model: nnx.merge(*parts)


def again(name: str, operation: Operation) -> Sampler:
    """The operation on one model, over and over."""
    nnx = library(name)
    model, run = linears(nnx, LAYERS), operation(nnx)
    return Calls(lambda: run(model))


def first(name: str, operation: Operation) -> Sampler:
    """The operation on a model that nothing has looked at yet."""
    nnx = library(name)
    return Prepared(lambda: linears(nnx, LAYERS), operation(nnx))


def steps_of_state(name: str) -> Sampler:
    """Steps that a State goes through, from one to the next."""
    nnx = library(name)
    state = nnx.state(linears(nnx, LAYERS))
    step = jax.jit(lambda state: jax.tree.map(lambda x: 0.999 * x, state))

    def run():
        nonlocal state
        state = step(state)
        return jax.block_until_ready(state["layers"][0]["kernel"])

    return Calls(run)


@case("functional", "State through jax.jit", Budget(1.0, "flax"))
def states():
    """What a loop does that was written for functions of arrays."""
    return {name: lambda name=name: steps_of_state(name) for name in ("nnxlite", "flax")}


def register(operation: Operation, sampler: Callable[..., Sampler], when: str, faster: float):
    """A case for one operation in both libraries."""

    @case("functional", f"{operation.__name__}, {when}", Budget(1 / faster, "flax"))
    def build():
        return {name: lambda name=name: sampler(name, operation) for name in ("nnxlite", "flax")}


for operation in (split, state, update):
    register(operation, again, "from the second time", 30)
for operation in (split, state, update):
    register(operation, first, "first time", 15)
for operation in (merge, clone):
    register(operation, again, f"{LAYERS} Linears", 8)
