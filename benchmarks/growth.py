"""Whether cost grows in proportion: to Variables, to depth, to sharing, to arguments.

Every time is that of the whole work divided by the size; where cost grows in proportion it stays
the same from one size to the next, save that what a call costs at all weighs less and less.
"""

from __future__ import annotations

import itertools
import typing as tp
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from benchmarks.harness import Budget, Calls, Prepared, Sampler, case
from benchmarks.models import chain, library, repeated, wide


@dataclass(frozen=True)
class Growth:
    """What grows. `build` returns the arguments of a call of some size, for a given library.

    The first argument has the Variable `calls` and the static attribute `mark`.
    """

    noun: str
    sizes: tuple[int, ...]
    build: Callable[[tp.Any, int], tuple[tp.Any, ...]]

    @property
    def budget(self) -> Budget:
        """Twice the time for each over a hundredfold size: the processor's caches, not the engine."""
        return Budget(2.0, of=f"{self.sizes[-3]:,}", subject=f"{self.sizes[-1]:,}")


def traversal(growth: Growth, size: int) -> Sampler:
    """A split right after the structure changed: the walk over all objects."""
    nnx = library("nnxlite")
    roots, numbers = growth.build(nnx, size), itertools.count(1)

    def change():
        roots[0].mark = next(numbers)

    return Prepared(change, lambda _: nnx.split(roots), size)


def split(growth: Growth, size: int) -> Sampler:
    """A split of a structure that is known: reading the leaves."""
    nnx = library("nnxlite")
    roots = growth.build(nnx, size)
    return Calls(lambda: nnx.split(roots), size)


def jit_call(growth: Growth, size: int) -> Sampler:
    """A jitted call that counts itself in one Variable: all leaves go in, one comes out."""
    nnx = library("nnxlite")
    roots = growth.build(nnx, size)

    @nnx.jit
    def step(first, *others):
        first.calls[...] = first.calls[...] + 1

    def run():
        step(*roots)
        roots[0].calls[...].block_until_ready()

    return Calls(run, size)


def shared_variable(nnx: tp.Any, size: int):
    """One Variable, `size` times in a list."""
    return (repeated(nnx, nnx.Param(jnp.ones(2)), size),)


def shared_block(nnx: tp.Any, size: int):
    """One layer, `size` times in a list."""
    return (repeated(nnx, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), size),)


def arguments(nnx: tp.Any, size: int):
    """`size` small models."""
    return tuple(wide(nnx, 2) for _ in range(size))


GROWTHS = (
    Growth("Variable", (100, 1_000, 10_000, 100_000), lambda nnx, size: (wide(nnx, size),)),
    Growth("module of a chain", (10, 100, 1_000, 10_000), lambda nnx, size: (chain(nnx, size),)),
    Growth("reference to one Variable", (1, 10, 100, 1_000), shared_variable),
    Growth("reference to one layer", (1, 10, 100, 1_000), shared_block),
    Growth("argument", (1, 10, 100), arguments),
)
WORKS = {"traversal": traversal, "split": split, "jit call": jit_call}

for growth, (name, work) in itertools.product(GROWTHS, WORKS.items()):

    @case("growth", f"{name}, for each {growth.noun}", growth.budget)
    def growing(growth=growth, work=work):
        """The contenders are the sizes."""
        return {f"{size:,}": (lambda size=size: work(growth, size)) for size in growth.sizes}
