"""Reading and writing one Variable."""

from __future__ import annotations

import jax.numpy as jnp

from benchmarks.harness import Budget, Calls, Sampler, case
from benchmarks.models import library

UNITS = 10  # accesses in one call, so that the call itself weighs little


class Plain:
    """What a Variable would be without its duties."""

    def __init__(self, value):
        self.value = value


def read_value(holder) -> Sampler:
    """`holder.value`."""

    def run():
        holder.value
        holder.value
        holder.value
        holder.value
        holder.value
        holder.value
        holder.value
        holder.value
        holder.value
        holder.value

    return Calls(run, UNITS)


def read_item(holder) -> Sampler:
    """`holder[...]`."""

    def run():
        holder[...]
        holder[...]
        holder[...]
        holder[...]
        holder[...]
        holder[...]
        holder[...]
        holder[...]
        holder[...]
        holder[...]

    return Calls(run, UNITS)


def write_item(holder) -> Sampler:
    """`holder[...] = value`."""
    value = jnp.zeros(3)

    def run():
        holder[...] = value

    return Calls(run)


def write_value(holder) -> Sampler:
    """`holder.value = value`."""
    value = jnp.zeros(3)

    def run():
        holder.value = value

    return Calls(run)


def param(name: str):
    """A Param of three numbers."""
    return library(name).Param(jnp.ones(3))


@case("variable", "read variable[...]", Budget(0.5e-6))
def reading_item():
    """The limit is one attribute access."""
    return {
        "limit": lambda: read_value(Plain(jnp.ones(3))),
        "nnxlite": lambda: read_item(param("nnxlite")),
        "flax": lambda: read_item(param("flax")),
    }


@case("variable", "read variable.value", Budget(0.5e-6))
def reading_value():
    """The limit is one attribute access."""
    return {
        "limit": lambda: read_value(Plain(jnp.ones(3))),
        "nnxlite": lambda: read_value(param("nnxlite")),
    }


@case("variable", "write variable[...]")
def writing_item():
    """The limit is one attribute assignment."""
    return {
        "limit": lambda: write_value(Plain(jnp.ones(3))),
        "nnxlite": lambda: write_item(param("nnxlite")),
        "flax": lambda: write_item(param("flax")),
    }
