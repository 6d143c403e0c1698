"""Building objects."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.harness import Budget, Calls, Sampler, case
from benchmarks.models import WIDTH, library


class Plain:
    """A Python object with two attributes."""

    def __init__(self, width: int, name: str):
        self.width = width
        self.name = name


def small_class(name: str):
    """A class of modules with two static attributes."""
    nnx = library(name)

    class Small(nnx.Module):
        def __init__(self, width: int, name: str):
            self.width = width
            self.name = name

    return Small


def small_equinox():
    """A class of modules with two static fields."""
    import equinox as eqx

    class Small(eqx.Module):
        width: int = eqx.field(static=True)
        name: str = eqx.field(static=True)

    return Small


def small_object(cls) -> Calls:
    """Making one."""
    return Calls(lambda: cls(3, "small"))


def activated(name: str) -> Sampler:
    """A module with an activation function that captured a number."""
    nnx = library(name)

    def leaky(slope: float):
        return lambda x: jnp.where(x > 0, x, slope * x)

    class Activated(nnx.Module):
        def __init__(self):
            self.activation = leaky(0.1)

    return Calls(lambda: nnx.graphdef(Activated()))


def linear(name: str) -> Sampler:
    """A Linear, its random numbers included."""
    nnx = library(name)
    rngs = nnx.Rngs(0)
    return Calls(lambda: nnx.Linear(WIDTH, WIDTH, rngs=rngs).kernel[...].block_until_ready())


def equinox_linear() -> Sampler:
    """A Linear, its random numbers included."""
    import equinox as eqx

    key = jax.random.key(0)
    return Calls(lambda: eqx.nn.Linear(WIDTH, WIDTH, key=key).weight.block_until_ready())


@case("construct", "module with two static attributes", Budget(10e-6))
def small():
    """The limit is a plain Python class."""
    return {
        "limit": lambda: small_object(Plain),
        "nnxlite": lambda: small_object(small_class("nnxlite")),
        "flax": lambda: small_object(small_class("flax")),
        "equinox": lambda: small_object(small_equinox()),
    }


@case("construct", "GraphDef of a module with a closure", Budget(50e-6))
def with_closure():
    """A closure is made in each round: what it captured decides whether two modules are equal."""
    return {name: lambda name=name: activated(name) for name in ("nnxlite", "flax")}


@case("construct", f"Linear({WIDTH}, {WIDTH})")
def building_linear():
    """Kernel, bias and the random stream that fills them."""
    return {
        "nnxlite": lambda: linear("nnxlite"),
        "flax": lambda: linear("flax"),
        "equinox": equinox_linear,
    }
