"""Linear, LinearGeneral, Einsum and Embed: attributes that are exchanged, and products of one's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nnxlite as nnx
from nnxlite.nn.dtypes import promote_dtype
from tests.nn.quick import QUICK, normal, quick


def test_parameters_can_be_exchanged_and_added():
    layer = nnx.Linear(3, 4, use_bias=False, **QUICK, rngs=nnx.Rngs(0))
    assert layer.bias is None
    layer.bias = nnx.Param(jnp.ones(4))  # the status of the attribute is data from the start
    assert [path for path, _ in nnx.to_flat_state(nnx.state(layer))] == [("bias",), ("kernel",)]
    np.testing.assert_allclose(layer(jnp.zeros(3)), np.ones(4))
    layer.kernel, layer.bias = nnx.Param(jnp.ones((2, 5))), None
    assert layer(jnp.ones((7, 2))).shape == (7, 5)


def test_products_get_the_options_of_jaxs_own():
    seen = []

    def product(*args, **options):
        seen.append(options)
        return 2 * lax.dot_general(*args, **options)

    x, f32 = normal(2, 3), jnp.float32
    for make, own in (
        (nnx.Linear, {"dot_general": product}),
        (nnx.LinearGeneral, {"dot_general": product}),
        (nnx.LinearGeneral, {"dot_general_cls": lambda: product}),
    ):
        seen.clear()
        plain, layer = (make(3, 4, **QUICK, **o, rngs=nnx.Rngs(0)) for o in ({}, own))
        bias = layer.bias.value
        np.testing.assert_allclose(layer(x) - bias, 2 * (plain(x) - bias), rtol=1e-5, atol=1e-6)
        layer.preferred_element_type = f32
        layer(x)
        usual = {"precision": None, "out_sharding": None}
        assert seen == [usual, {**usual, "preferred_element_type": f32}]


def test_linear_general_keeps_batch_axes_as_a_hashable_mapping():
    layer = nnx.LinearGeneral(3, 4, batch_axis={0: 2}, **QUICK, rngs=nnx.Rngs(0))
    assert layer.batch_axis == {0: 2} and len(layer.batch_axis) == 1
    assert hash(layer.batch_axis) == hash(nnx.clone(layer).batch_axis)
    assert repr(layer.batch_axis) == "FrozenMapping({0: 2})"


def test_biases_broadcast_where_rank_promotion_is_forbidden():
    with jax.numpy_rank_promotion("raise"):
        assert nnx.Linear(3, 4, **QUICK, rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape == (2, 4)
        assert nnx.Conv(3, 4, 3, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 3))).shape == (2, 8, 4)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "int32"])
def test_small_integers_count_from_the_end_of_a_large_table(dtype):
    embed = nnx.Embed(300, 1, embedding_init=quick, rngs=nnx.Rngs(0))
    last = 255 if dtype == "uint8" else -1
    expected = np.asarray(embed.embedding[...])[[last, 5]]
    np.testing.assert_array_equal(embed(jnp.array([last, 5], dtype)), expected)


def test_arrays_that_agree_are_not_cast():
    x, y = jnp.ones(2), jnp.ones(3)
    assert promote_dtype((x, None, y))[0] is x
    assert promote_dtype((x, y), dtype=jnp.float32)[1] is y
    assert promote_dtype((x,), dtype="float32")[0] is x
