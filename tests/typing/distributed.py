"""What type checkers infer of several processes."""

from __future__ import annotations

import typing as tp
from typing import assert_type

import jax

import nnxlite as nnx

mesh = jax.make_mesh((1,), ("data",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
assert_type(nnx.distributed.local_rows(sharding, 4).shape, tuple[tp.Any, ...])
assert_type(nnx.distributed.to_global(jax.numpy.ones((4, 2)), sharding, size=4), jax.Array)
assert_type(nnx.distributed.initialize(initialization_timeout=60), None)
assert_type(nnx.distributed.barrier("ready", timeout=60), None)
assert_type(nnx.distributed.exchange("names", "a"), list[str])
with nnx.distributed.agreed("reading"):
    pass
assert_type(nnx.distributed.gather(jax.numpy.ones(2)), jax.Array)
assert_type(nnx.distributed.shutdown(), None)
