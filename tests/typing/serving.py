"""What type checkers infer of what serves."""

from __future__ import annotations

import typing as tp
from typing import assert_type

import jax
import jax.numpy as jnp

import nnxlite as nnx

model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
x = jnp.ones((4, 2))
exported = nnx.export(model, x, shapes="batch, 2")
assert_type(exported, nnx.Exported)
assert_type(exported.weights, dict[str, jax.Array])
assert_type(exported.num_programs, int)
if tp.TYPE_CHECKING:
    assert_type(nnx.load_exported("call"), nnx.Exported)
