"""Whether cost grows in proportion: time for each Variable of models of 100 to 100,000."""

from __future__ import annotations

import itertools

from benchmarks.harness import Budget, Calls, Prepared, Sampler, case
from benchmarks.models import library, wide

SIZES = (100, 1_000, 10_000, 100_000)
# Twice the time for each Variable over a hundredfold size: caches of the processor, not the engine.
LINEAR = Budget(2.0, of=f"{1_000:,}", subject=f"{100_000:,}")


def sizes(work):
    """`work(size)` for every size, its time counted for one Variable."""
    return {f"{size:,}": (lambda size=size: work(size)) for size in SIZES}


def traversal(size: int) -> Sampler:
    """A split right after the structure changed."""
    nnx = library("nnxlite")
    model, numbers = wide(nnx, size), itertools.count(1)

    def change():
        model.mark = next(numbers)

    return Prepared(change, lambda _: nnx.split(model), size)


def split(size: int) -> Sampler:
    """A split of a structure that is known."""
    nnx = library("nnxlite")
    model = wide(nnx, size)
    return Calls(lambda: nnx.split(model), size)


def jit_call(size: int) -> Sampler:
    """A jitted call that counts itself in one Variable of the model."""
    nnx = library("nnxlite")
    model = wide(nnx, size)

    @nnx.jit
    def step(model):
        model.calls[...] = model.calls[...] + 1

    def run():
        step(model)
        model.calls[...].block_until_ready()

    return Calls(run, size)


@case("growth", "traversal, for each Variable", LINEAR)
def growing_traversal():
    """The walk over all objects."""
    return sizes(traversal)


@case("growth", "split, for each Variable", LINEAR)
def growing_split():
    """Reading the leaves of a known structure."""
    return sizes(split)


@case("growth", "jit call, for each Variable", LINEAR)
def growing_jit_call():
    """All leaves go in, one comes out."""
    return sizes(jit_call)
