"""`nnxlite.flax` beside the rest of Flax: rules for logical names, and what pickles contain."""

from __future__ import annotations

import pytest

from tests.flax.test_hook import printed

pytest.importorskip("flax")

RULES = """
import nnxlite.flax
from flax import linen, nnx
import jax.numpy as jnp
weights = nnx.Param(jnp.ones((8, 8)), out_sharding=("embed", "mlp"), eager_sharding=False)
specs = []
step = nnx.jit(lambda p: specs.append(str(nnx.get_partition_spec(p).get_value())) or p + 1)
step(weights)
with linen.logical_axis_rules((("embed", "x"), ("mlp", "y"))):
    step(weights), step(weights)
step(weights)
print(*specs)
try:
    with linen.logical_axis_rules(("embed", "x")):
        pass
except ValueError as error:
    print(error)
"""


def test_rules_of_linen_are_part_of_the_key_of_a_program():
    specs, message = printed("-c", RULES)
    assert specs == "P('embed', 'mlp') P('x', 'y')"
    assert "A logical axis rule is a pair" in message
