"""Calling a jitted step: what the walk over the objects adds to a plain `jax.jit`.

The limit is traced from the very same step, through split and merge, so that XLA runs the same
program; it is called with a flat list of arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import typing as tp

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness import Budget, Calls, Prepared, Sampler, case
from benchmarks.models import (
    WIDTH,
    library,
    read_mostly,
    read_mostly_body,
    train_body,
    with_adam,
)

READ_MOSTLY = 200
X = jnp.ones((4, WIDTH))
Y = jnp.zeros((4, WIDTH))
ROW = jnp.ones(4)


def flat_train(blocks: int, **jit_options: tp.Any):
    """The limit: a step under `jax.jit`, and the flat list of all leaves, all of them written."""
    nnx = library("nnxlite")
    body = train_body(nnx)
    graphdef, state = nnx.split(with_adam(nnx, blocks))
    leaves, treedef = jax.tree.flatten(state)
    assert len(leaves) == 14 * blocks + 2, len(leaves)

    @functools.partial(jax.jit, **jit_options)
    def step(leaves, x, y):
        model, optimizer = nnx.merge(graphdef, treedef.unflatten(leaves))
        loss = body(model, optimizer, x, y)
        return loss, jax.tree.leaves(nnx.state((model, optimizer)))

    return step, leaves


def flat_train_step(blocks: int, **jit_options: tp.Any):
    """`run()` calls the limit."""
    step, leaves = flat_train(blocks, **jit_options)

    def run():
        nonlocal leaves
        loss, leaves = step(leaves, X, Y)
        loss.block_until_ready()

    return run


def train_step(name: str, blocks: int, **jit_options: tp.Any):
    """`run()` calls `nnx.jit` on the model and the optimizer."""
    nnx = library(name)
    model, optimizer = with_adam(nnx, blocks)
    step = nnx.jit(train_body(nnx), **jit_options)
    return lambda: step(model, optimizer, X, Y).block_until_ready()


def equinox_train_step(blocks: int, **jit_options: tp.Any):
    """`run()` calls `filter_jit` on a model written by hand with the same arrays."""
    import equinox as eqx

    class Block(eqx.Module):
        kernel: jax.Array
        bias: jax.Array
        scale: jax.Array
        shift: jax.Array
        mean: jax.Array
        var: jax.Array

        def __call__(self, x):
            x = x @ self.kernel + self.bias
            mean, var = x.mean(0), x.var(0)
            y = (x - mean) * (jax.lax.rsqrt(var + 1e-5) * self.scale) + self.shift
            moved = (0.99 * self.mean + 0.01 * mean, 0.99 * self.var + 0.01 * var)
            return jax.nn.relu(y), moved

    keys = jax.random.split(jax.random.key(0), blocks)
    zeros, ones = jnp.zeros(WIDTH), jnp.ones(WIDTH)
    model = [
        Block(jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH, zeros, ones, zeros, zeros, ones)
        for key in keys
    ]
    # Every array has a buffer of its own, so that all of them can be donated.
    model = jax.tree.map(jnp.copy, model)
    is_param = [Block(True, True, True, True, False, False) for _ in range(blocks)]
    tx = optax.adam(1e-3)
    opt_state = (jnp.zeros((), jnp.int32), tx.init(eqx.filter(model, is_param)))

    @functools.partial(eqx.filter_jit, **jit_options)
    def step(carry, x, y):
        model, (count, opt_state) = carry
        params, stats = eqx.partition(model, is_param)

        def loss_of(params):
            z, moved = x, []
            for block in eqx.combine(params, stats):
                z, new = block(z)
                moved.append(new)
            return jnp.mean((z - y) ** 2), moved

        (loss, moved), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        model = eqx.combine(eqx.apply_updates(params, updates), stats)
        model = [
            dataclasses.replace(block, mean=mean, var=var)
            for block, (mean, var) in zip(model, moved, strict=True)
        ]
        return (model, (count + 1, opt_state)), loss

    carry = (model, opt_state)

    def run():
        nonlocal carry
        carry, loss = step(carry, X, Y)
        loss.block_until_ready()

    return run


def unrelated_change():
    """Change the structure of an object that no model refers to; the models' own versions stay."""
    nnx = library("nnxlite")

    class Other(nnx.Module):
        pass

    other, numbers = Other(), itertools.count()

    def change():
        other.number = next(numbers)

    return change


def alone(run) -> Sampler:
    """`run` timed call by call, like a contender that must prepare each call."""
    return Prepared(lambda: None, lambda _: run())


def after_change(run) -> Sampler:
    """`run` after a structure change elsewhere."""
    return Prepared(unrelated_change(), lambda _: run())


for blocks in (5, 50):
    arrays = 14 * blocks + 2

    @case("dispatch", f"train step, {arrays} arrays", Budget(1.08, "limit"))
    def plain(blocks=blocks):
        """All arrays are written."""
        return {
            "limit": lambda: Calls(flat_train_step(blocks)),
            "nnxlite": lambda: Calls(train_step("nnxlite", blocks)),
            "flax": lambda: Calls(train_step("flax", blocks)),
            "equinox": lambda: Calls(equinox_train_step(blocks)),
        }

    @case("dispatch", f"train step, {arrays} arrays, donated", Budget(1.1, "limit"))
    def donated(blocks=blocks):
        """All arrays are written and all are donated."""
        return {
            "limit": lambda: Calls(flat_train_step(blocks, donate_argnums=0)),
            "nnxlite": lambda: Calls(train_step("nnxlite", blocks, donate_argnums=(0, 1))),
            "flax": lambda: Calls(train_step("flax", blocks, donate_argnums=(0, 1))),
            "equinox": lambda: Calls(equinox_train_step(blocks, donate="all")),
        }

    @case("dispatch", f"train step, {arrays} arrays, after a change elsewhere")
    def epoch_moved(blocks=blocks):
        """Some other object of the program changed its structure since the last call."""
        return {
            "limit": lambda: alone(flat_train_step(blocks)),
            "nnxlite": lambda: after_change(train_step("nnxlite", blocks)),
            "flax": lambda: alone(train_step("flax", blocks)),
            "equinox": lambda: alone(equinox_train_step(blocks)),
        }


def flat_read_mostly(*, donate: bool = False):
    """The limit: all leaves go in, the count alone comes out again."""
    nnx = library("nnxlite")
    model = read_mostly(nnx, READ_MOSTLY)
    weights, calls = [weight[...] for weight in model.weights], model.calls[...]

    def step(calls, weights, x):
        total = x
        for weight in weights:
            total = total + x * weight
        return total, calls + 1

    step = jax.jit(step, donate_argnums=0 if donate else ())

    def run():
        nonlocal calls
        total, calls = step(calls, weights, ROW)
        total.block_until_ready()

    return run


def read_mostly_step(name: str, **jit_options: tp.Any):
    """`run()` calls `nnx.jit` on a model that is read as a whole and written in one place."""
    nnx = library(name)
    model = read_mostly(nnx, READ_MOSTLY)
    step = nnx.jit(read_mostly_body, **jit_options)
    return lambda: step(model, ROW).block_until_ready()


def equinox_read_mostly(**jit_options: tp.Any):
    """`run()` calls `filter_jit`; the count is returned, as Equinox programs do."""
    import equinox as eqx

    class ReadMostly(eqx.Module):
        weights: list[jax.Array]

    model, calls = ReadMostly([jnp.ones(4) for _ in range(READ_MOSTLY - 1)]), jnp.zeros((), int)

    @functools.partial(eqx.filter_jit, **jit_options)
    def step(calls, model, x):
        total = x
        for weight in model.weights:
            total = total + x * weight
        return calls + 1, total

    def run():
        nonlocal calls
        calls, total = step(calls, model, ROW)
        total.block_until_ready()

    return run


@case("dispatch", f"step that reads {READ_MOSTLY} and writes one", Budget(1.3, "limit"))
def reading():
    """Most of a model is only read, as in evaluation with a counter."""
    return {
        "limit": lambda: Calls(flat_read_mostly()),
        "nnxlite": lambda: Calls(read_mostly_step("nnxlite")),
        "flax": lambda: Calls(read_mostly_step("flax")),
        "equinox": lambda: Calls(equinox_read_mostly()),
    }


@case("dispatch", f"step that reads {READ_MOSTLY} and writes one, donated", Budget(1.2, "limit"))
def reading_donated():
    """The one array that is written gives its buffer; `donate="written"` finds it."""

    def ours() -> Sampler:
        if "donate" not in inspect.signature(library("nnxlite").jit).parameters:
            raise NotImplementedError('nnx.jit has no donate="written" yet')
        return Calls(read_mostly_step("nnxlite", donate="written"))

    return {"limit": lambda: Calls(flat_read_mostly(donate=True)), "nnxlite": ours}


@case("dispatch", f"step that reads {READ_MOSTLY} and writes one, after a change elsewhere")
def reading_epoch_moved():
    """Some other object of the program changed its structure since the last call."""
    return {
        "limit": lambda: alone(flat_read_mostly()),
        "nnxlite": lambda: after_change(read_mostly_step("nnxlite")),
        "flax": lambda: alone(read_mostly_step("flax")),
        "equinox": lambda: alone(equinox_read_mostly()),
    }
