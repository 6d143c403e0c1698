"""Embed: lookups, the output layer made of the table, and messages."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import quick


def test_a_number_outside_the_table_shows():
    embed = nnx.Embed(7, 3, embedding_init=quick, rngs=nnx.Rngs(0))
    assert np.isnan(embed(jnp.array([7, -8]))).all()


def test_one_row_serves_every_number():
    embed = nnx.Embed(1, 3, embedding_init=quick, rngs=nnx.Rngs(0))
    rows = embed(jnp.array([[0, 5]]))
    np.testing.assert_array_equal(rows, np.broadcast_to(embed.embedding.value[0], (1, 2, 3)))


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "int32"])
def test_small_integers_count_from_the_end_of_a_large_table(dtype):
    embed = nnx.Embed(300, 1, embedding_init=quick, rngs=nnx.Rngs(0))
    last = 255 if dtype == "uint8" else -1
    expected = np.asarray(embed.embedding[...])[[last, 5]]
    np.testing.assert_array_equal(embed(jnp.array([last, 5], dtype)), expected)
