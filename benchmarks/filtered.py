"""Calling a `filter_jit` step, beside the peer and beside `jax.jit` on the flat leaves."""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp

from benchmarks.harness import Budget, Calls, case
from benchmarks.models import WIDTH, library

NAMES = ("kernel", "bias", "scale", "shift", "mean", "var")


def arrays_of(blocks: int) -> list[dict[str, jax.Array]]:
    """Six small arrays for each block."""
    return [{name: jnp.ones(WIDTH) * n for n, name in enumerate(NAMES)} for _ in range(blocks)]


def calling(step: tp.Any, model: tp.Any) -> Calls:
    """`step(model)` in a loop."""
    return Calls(lambda: step(model).block_until_ready())


def variables_step(blocks: int) -> tuple[tp.Any, tp.Any]:
    """A step, and a model of modules that hold Variables."""
    nnx = library("nnxlite")
    parts = [{k: nnx.Param(v) for k, v in block.items()} for block in arrays_of(blocks)]
    model = nnx.List([nnx.Dict(**part) for part in parts])
    return nnx.filter_jit(lambda m: m[0].kernel + m[-1].var), model


def of_variables(blocks: int) -> Calls:
    """Modules that hold Variables."""
    return calling(*variables_step(blocks))


def of_frozen(blocks: int) -> Calls:
    """Frozen modules that hold arrays."""
    nnx = library("nnxlite")

    class Block(nnx.Module, frozen=True):
        kernel: jax.Array
        bias: jax.Array
        scale: jax.Array
        shift: jax.Array
        mean: jax.Array
        var: jax.Array

    class Stack(nnx.Module, frozen=True):
        blocks: list

    model = Stack([Block(**block) for block in arrays_of(blocks)])
    return calling(nnx.filter_jit(lambda m: m.blocks[0].kernel + m.blocks[-1].var), model)


def of_equinox(blocks: int) -> Calls:
    """The peer's modules."""
    import equinox as eqx

    class Block(eqx.Module):
        kernel: jax.Array
        bias: jax.Array
        scale: jax.Array
        shift: jax.Array
        mean: jax.Array
        var: jax.Array

    class Stack(eqx.Module):
        blocks: list

    model = Stack([Block(**block) for block in arrays_of(blocks)])
    return calling(eqx.filter_jit(lambda m: m.blocks[0].kernel + m.blocks[-1].var), model)


def of_leaves(blocks: int) -> Calls:
    """The limit: the flat list of leaves."""
    leaves = jax.tree.leaves(arrays_of(blocks))
    return calling(jax.jit(lambda leaves: leaves[2] + leaves[-1]), leaves)


for blocks in (12, 117):
    count = 6 * blocks

    @case(
        "filtered",
        f"filter_jit, {count} arrays read",
        Budget(1.5, "limit"),
        Budget(0.5, "equinox"),
        Budget(0.5, "equinox", "nnxlite, frozen"),
    )
    def reading(blocks=blocks):
        """A model that is read as a whole."""
        return {
            "limit": lambda: of_leaves(blocks),
            "nnxlite": lambda: of_variables(blocks),
            "nnxlite, frozen": lambda: of_frozen(blocks),
            "equinox": lambda: of_equinox(blocks),
        }
