"""Jitted calls leave nothing behind: ten thousand take no more memory than a thousand (law L9)."""

from __future__ import annotations

import gc
import tracemalloc
import typing as tp

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlite as nnx

X = jnp.ones((2, 3))


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.tied = self.first.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.first(x)) @ self.tied


@nnx.jit
def train_step(model: Net, optimizer: nnx.Optimizer[Net]) -> jax.Array:
    def loss_of(model: Net) -> jax.Array:
        return jnp.mean(model(X) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def sow(model: Net) -> None:
    model.sow(nnx.Intermediate, "seen", model.first(X))


SLACK = 100_000  # bytes: lists that Python keeps for the next one
TX = optax.adam(1e-3)
MODEL = Net()
OPTIMIZER = nnx.Optimizer(MODEL, TX, wrt=nnx.Param)


def the_same_model() -> None:
    train_step(MODEL, OPTIMIZER)


def new_objects() -> None:
    model = nnx.clone(MODEL)
    train_step(model, nnx.Optimizer(model, TX, wrt=nnx.Param))


def structure_changes() -> None:
    sow(MODEL)
    nnx.pop(MODEL, nnx.Intermediate)


def held() -> tuple[int, int, int]:
    """Objects that Python tracks, arrays that JAX keeps, and bytes that were allocated."""
    gc.collect()
    return len(gc.get_objects()), len(jax.live_arrays()), tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize(
    ("use", "few", "many"),
    [(the_same_model, 1000, 10_000), (new_objects, 20, 200), (structure_changes, 100, 1000)],
)
def test_L9_many_calls_take_no_more_memory_than_few(
    use: tp.Callable[[], None], few: int, many: int
) -> None:
    tracemalloc.start()
    try:
        for _ in range(few):
            use()
        objects, arrays, size = held()
        for _ in range(many):
            use()
        objects_after, arrays_after, size_after = held()
    finally:
        tracemalloc.stop()
    assert arrays_after <= arrays
    assert objects_after <= objects + few // 10
    assert size_after <= size + SLACK
