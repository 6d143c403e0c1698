"""What type checkers infer of layouts on a mesh."""

from __future__ import annotations

from typing import assert_type

import jax
import numpy as np
import optax

import nnxlite as nnx

mesh = nnx.make_mesh(data=-1)
assert_type(mesh, jax.sharding.Mesh)
model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
layout = nnx.shard(model, mesh, "fsdp")
assert_type(layout, nnx.Layout)
assert_type(nnx.plan_layout(model, mesh, nnx.Plan(fsdp="data")), nnx.Layout)
assert_type(nnx.plan_layout(model, mesh, {"kernel": (None, "data"), "bias": None}), nnx.Layout)
assert_type(layout.entries, tuple[nnx.Placement, ...])
assert_type(layout.entries[0].spec, jax.sharding.PartitionSpec)
assert_type(layout.entries[0].why, str)
assert_type(layout.bytes_per_device, int)
assert_type(layout.replicated, tuple[nnx.Placement, ...])
assert_type(layout.batch, jax.sharding.NamedSharding)
assert_type(layout.put(np.ones((8, 2))), jax.Array)


def build() -> tuple[nnx.Linear, nnx.Optimizer[nnx.Linear]]:
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


assert_type(nnx.init_sharded(build, mesh, "fsdp"), tuple[nnx.Linear, nnx.Optimizer[nnx.Linear]])
assert_type(
    nnx.init_sharded(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)), mesh, "fsdp"), nnx.Linear
)
