"""Jitted calls leave nothing behind: ten thousand take no more memory than a thousand (law L9)."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.transforms.models import EACH

X = jnp.ones((2, 3))
NO_VALUE = {
    "custom_vjp",
    "eval_shape",
    "filter_eval_shape",
    "make_jaxpr",
    "pmap",
    "filter_pmap",
    "cached_partial",
}


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.tied = self.first.kernel

    def __call__(self, x):
        return self.norm(self.first(x)) @ self.tied


def held():
    """Objects that Python tracks, arrays that JAX keeps, and bytes that were allocated."""
    gc.collect()
    return len(gc.get_objects()), len(jax.live_arrays()), tracemalloc.get_traced_memory()[0]


def jitted(model):
    nnx.jit(lambda model: model.first(X))(model)


def donated(model):
    nnx.jit(lambda model, x: model.first(x), donate_argnums=1)(model, X + 1)


def donated_where_written(model):
    def write(model):
        model.first.bias[...] += 1.0

    nnx.jit(write, donate="written")(model)


def differentiated_by_a_filter(model):
    wrt = nnx.DiffState(0, lambda path, leaf: "bias" in path)
    nnx.grad(lambda model: model.first(X).sum(), argnums=wrt)(model)


@pytest.mark.parametrize(
    ("use", "before"),
    [(jitted, 5), (donated, 5), (donated_where_written, 5), (differentiated_by_a_filter, 64)],
)
def test_L9_functions_that_are_gone_leave_nothing_on_a_model_that_lives(use, before):
    model = Net()
    for _ in range(before):  # until what is bounded is full
        use(model)
    objects, _, _ = held()
    for _ in range(5):
        use(model)
    # From JAX 0.11 on, something of a donating function's program stays: 97 objects with 0.12.
    newer = jax.__version_info__ >= (0, 11) and use in (donated, donated_where_written)
    assert held()[0] <= objects + (600 if newer else 50)


@pytest.mark.parametrize("name", ["scan", "cond", "while_loop", "fori_loop", "switch", "remat"])
def test_L9_an_eager_loop_or_branch_keeps_no_array_that_its_body_has_captured(name):
    def once(value):
        array = jnp.full((), value)
        EACH[name](lambda x: x + array)(jnp.zeros(()))
        return weakref.ref(array)

    gone = [once(float(value)) for value in range(1, 4)]
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


@pytest.mark.parametrize("name", [name for name in EACH if name not in NO_VALUE])
def test_a_transform_of_a_closure_leaves_no_tracer_behind(name):
    @jax.jit
    def program(y):
        x = y * 2
        return EACH[name](lambda m: m.w * x.sum())(nnx.Dict(w=nnx.Param(jnp.float32(2))))

    with jax.checking_leaks():
        program(jnp.ones(3))
        EACH[name](lambda m: m.w * 2.0)(nnx.Dict(w=nnx.Param(jnp.float32(2))))
