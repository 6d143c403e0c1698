"""Bytes: of modules and Variables, and of a training step at its peak.

Arrays are shared between the objects that are counted, so that what counts is the objects. What is
counted is what Python allocates, as `tracemalloc` sees it, until the objects are all there.

The peak of a step is what XLA plans for it: arguments, results and scratch space, less the results
that lie where arguments lay.
"""

from __future__ import annotations

import gc
import tracemalloc
import typing as tp
from collections.abc import Callable

import jax.numpy as jnp

from benchmarks.construct import Plain, small_class, small_equinox
from benchmarks.dispatch import X, Y, flat_train
from benchmarks.harness import Budget, Once, Sampler, case
from benchmarks.models import WIDTH, library, train_body, wide, with_adam

BESIDE = Budget(1.0, "flax")
OBJECTS = 1_000
BLOCKS = 50
VALUE = jnp.ones(2)


def allocated(make: Callable[[], object], count: int = OBJECTS, units: int = 1) -> Sampler:
    """The bytes of what `make` returns, for each of the `units` in it."""

    def run() -> float:
        make()  # what exists once only, such as caches of its class, is there by now
        kept = [None] * count
        gc.collect()
        tracemalloc.start()
        for i in range(count):
            kept[i] = make()
        gc.collect()
        total, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return total / (count * units)

    return Once(run)


def bytes_case(name: str, *budgets: Budget):
    """A case that counts bytes."""
    return case("memory", name, *budgets, unit="bytes")


@bytes_case("module with two static attributes", BESIDE)
def modules():
    """The limit is a plain Python object."""

    def module(build: Callable[[], type]) -> Sampler:
        small = build()
        return allocated(lambda: small(3, "small"))

    return {
        "limit": lambda: module(lambda: Plain),
        "nnxlite": lambda: module(lambda: small_class("nnxlite")),
        "flax": lambda: module(lambda: small_class("flax")),
        "equinox": lambda: module(small_equinox),
    }


@bytes_case("Variable, its array apart", BESIDE)
def variables():
    """The limit is a Python object with one attribute and nothing else."""

    class Box:
        __slots__ = ("value",)

        def __init__(self, value):
            self.value = value

    def variable(name: str) -> Sampler:
        nnx = library(name)
        return allocated(lambda: nnx.Param(VALUE))

    return {
        "limit": lambda: allocated(lambda: Box(VALUE)),
        "nnxlite": lambda: variable("nnxlite"),
        "flax": lambda: variable("flax"),
    }


@bytes_case("Linear, its arrays apart", BESIDE)
def layers():
    """All settings of a layer and its two Params."""

    def linear(name: str) -> Sampler:
        nnx = library(name)
        kernel, bias, rngs = jnp.zeros((WIDTH, WIDTH)), jnp.zeros(WIDTH), nnx.Rngs(0)
        inits = {"kernel_init": lambda *_: kernel, "bias_init": lambda *_: bias}
        return allocated(lambda: nnx.Linear(WIDTH, WIDTH, **inits, rngs=rngs))

    return {name: (lambda name=name: linear(name)) for name in ("nnxlite", "flax")}


@bytes_case(f"result of split, for each of {OBJECTS:,} Variables", BESIDE)
def parts():
    """A GraphDef and a State that the caller keeps."""

    def split(name: str) -> Sampler:
        nnx = library(name)
        model = wide(nnx, OBJECTS)
        for _ in range(3):  # what the library itself keeps of a model is the next case
            nnx.split(model)
        return allocated(lambda: nnx.split(model), 10, OBJECTS)

    return {name: (lambda name=name: split(name)) for name in ("nnxlite", "flax")}


@bytes_case(f"model in use, for each of {OBJECTS:,} Variables")
def models():
    """Modules of two Variables each, split a few times: what makes later calls cheap is included."""

    def used(name: str) -> Sampler:
        nnx = library(name)

        def make():
            model = wide(nnx, OBJECTS)
            for _ in range(3):
                nnx.split(model)
            return model

        return allocated(make, 3, OBJECTS)

    return {name: (lambda name=name: used(name)) for name in ("nnxlite", "flax")}


def peak(step: tp.Any, *args: tp.Any) -> float:
    """The most memory that a jitted step needs at one time, as XLA plans it."""
    plan = step.lower(*args).compile().memory_analysis()
    taken = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    return taken - plan.alias_size_in_bytes


@bytes_case(f"peak of a train step, {14 * BLOCKS + 2} arrays, donated", Budget(1.0, "limit"))
def peaks():
    """By hand all leaves are donated; `donate="written"` finds out which they are."""

    def step(name: str, **jit_options: tp.Any) -> Sampler:
        nnx = library(name)
        model, optimizer = with_adam(nnx, BLOCKS)
        return Once(lambda: peak(nnx.jit(train_body(nnx), **jit_options), model, optimizer, X, Y))

    def limit() -> Sampler:
        step, leaves = flat_train(BLOCKS, donate_argnums=0)
        return Once(lambda: peak(step, leaves, X, Y))

    return {
        "limit": limit,
        "nnxlite": lambda: step("nnxlite", donate="written"),
        "flax": lambda: step("flax", donate_argnums=(0, 1)),
        "not donated": lambda: step("nnxlite"),
    }
