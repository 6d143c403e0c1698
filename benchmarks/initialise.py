"""Building a transformer of 12 layers: object by object, and in one compiled program."""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp

from benchmarks.harness import Budget, Calls, Sampler, case
from benchmarks.models import library, transformer

LAYERS = 12
BESIDE = Budget(1.0, "flax")
numbered = jax.jit(jax.random.fold_in)


def finished(model: tp.Any) -> None:
    """Wait for the array that is drawn last, and so for all of them."""
    model.norm.scale.get_value().block_until_ready()


def eager(name: str, layers: int = LAYERS) -> Sampler:
    """Every array drawn by a call of its own, every object made."""
    nnx = library(name)
    return Calls(lambda: finished(transformer(nnx, layers)))


def compiled(name: str, layers: int = LAYERS) -> Sampler:
    """One program draws all arrays; the objects are made from its results."""
    nnx = library(name)
    build = nnx.jit(lambda: transformer(nnx, layers))
    return Calls(lambda: finished(build()))


def drawing(layers: int):
    """A function that makes the parameters of `transformer` from a key, without any objects."""
    nnx = library("nnxlite")
    abstract = nnx.eval_shape(lambda: transformer(nnx, layers))
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(abstract, nnx.Param))]
    matrix, vector = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()

    def draw(key: jax.Array) -> list[jax.Array]:
        return [
            (matrix if len(shape) > 1 else vector)(numbered(key, number), shape, jnp.float32)
            for number, shape in enumerate(shapes)
        ]

    return draw


def by_hand(layers: int = LAYERS, *, jit: bool) -> Sampler:
    """The limit: the arrays alone."""
    draw, key = drawing(layers), jax.random.key(0)
    make = jax.jit(draw) if jit else draw
    return Calls(lambda: jax.block_until_ready(make(key)))


@case("initialise", f"{LAYERS}-layer transformer, eagerly", BESIDE)
def eagerly():
    """From the second model on, when JAX has compiled what draws each shape."""
    return {
        "limit": lambda: by_hand(jit=False),
        "nnxlite": lambda: eager("nnxlite"),
        "flax": lambda: eager("flax"),
    }


@case("initialise", f"{LAYERS}-layer transformer, in one program", BESIDE)
def in_one_program():
    """From the second model on, when the program is compiled."""
    return {
        "limit": lambda: by_hand(jit=True),
        "nnxlite": lambda: compiled("nnxlite"),
        "flax": lambda: compiled("flax"),
    }
