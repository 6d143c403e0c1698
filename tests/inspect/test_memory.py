"""`memory`: bytes by kind and device, each array once, and what a compiled step needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import nnxlite as nnx


def trained():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def test_bytes_by_kind_and_device():
    model, optimizer = trained()
    used = nnx.memory(model, optimizer)
    params = 4 * (2 * 3 + 3 + 3 + 3)
    wanted = {"Param": params, "BatchStat": 4 * 6, "optimizer state": 2 * params + 8}
    assert used.by_kind == wanted
    assert used.total == sum(wanted.values()) and used.step is None
    assert used.by_device == {"cpu:0": used.total}


def test_what_is_shared_counts_once():
    model, _ = trained()
    used = nnx.memory(model)
    model.again = model.layers[0].kernel
    both = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
    assert nnx.memory(model).by_kind == used.by_kind
    assert nnx.memory(model, both).by_kind == {**used.by_kind, "optimizer state": 4}
    model.alias = nnx.Param(model.again[...])  # another Variable around the same array
    assert nnx.memory(model).total == used.total


def test_arrays_that_are_not_on_a_device():
    deleted = jnp.ones(3)
    deleted.delete()
    used = nnx.memory(
        {
            "host": nnx.Param(np.ones(4, np.int8)),
            "abstract": nnx.Param(jax.ShapeDtypeStruct((5,), "float32")),
            "deleted": nnx.Param(deleted),
            "bare": jnp.ones(7, "int8"),
            "tree": nnx.Cache({"k": jnp.ones(2, "int8"), "n": 3}),
            "key": nnx.RngKey(jax.random.key(0)),
            "scalar": 3,
        }
    )
    assert used.by_device == {"not allocated": 20, "cpu:0": 17, "deleted": 12, "host": 4}
    assert used.by_kind["other arrays"] == 7 and used.by_kind["Cache"] == 2
    sizes, model = [], nnx.Dict(w=nnx.Param(jnp.ones(2)))
    nnx.jit(lambda model: sizes.append(nnx.memory(model).by_device))(model)
    assert sizes == [{"not allocated": 8}]


def test_sharded_and_replicated_arrays():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    split = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, PartitionSpec("x")))
    copied = jax.device_put(jnp.ones(3), NamedSharding(mesh, PartitionSpec()))
    used = nnx.memory(nnx.Dict(split=nnx.Param(split), copied=nnx.Param(copied)))
    assert used.by_kind == {"Param": 32 + 12}
    assert used.by_device == {"cpu:0": 16 + 12, "cpu:1": 16 + 12}


def test_what_a_step_needs_is_from_the_compiled_program():
    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: model(x).sum())(model))

    model, optimizer = trained()
    x = jax.ShapeDtypeStruct((4, 2), "float32")
    used = nnx.memory(model, optimizer, step, x).step
    found = step.lower(model, optimizer, x).compile().memory_analysis()
    assert used.arguments == found.argument_size_in_bytes >= nnx.memory(model, optimizer).total + 32
    assert used.temporary == found.temp_size_in_bytes
    assert used.peak == used.arguments + used.outputs - used.aliased + used.temporary
    plain = nnx.memory(model, None, lambda model, x, *, scale: model(x) * scale, x, scale=2.0).step
    assert plain.outputs >= 4 * 3 * 4
    assert model.layers[0].kernel[...].shape == (2, 3)  # nothing was run
    with pytest.raises(
        TypeError, match=r"memory: expected a function as step, got ShapeDtypeStruct"
    ):
        nnx.memory(model, optimizer, x)


def test_the_table():
    model = nnx.Dict(w=nnx.Param(jnp.ones((300, 1_000))), s=nnx.BatchStat(jnp.ones(3)))
    assert str(nnx.memory(model)) == (
        """\
┏━━━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━┓
┃ memory    ┃     bytes ┃        ┃
┡━━━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━┩
│ BatchStat │        12 │   12 B │
│ Param     │ 1,200,000 │ 1.2 MB │
├───────────┼───────────┼────────┤
│ total     │ 1,200,012 │ 1.2 MB │
├───────────┼───────────┼────────┤
│ on cpu:0  │ 1,200,012 │ 1.2 MB │
└───────────┴───────────┴────────┘
"""
    )
    assert "│ step: peak " in str(nnx.memory(model, None, lambda model: model.w.sum()))
