"""Pooling: values against numpy windows, gradients, and messages."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nnxlite as nnx


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
def test_what_is_padded_never_wins(dtype):
    x = jnp.full((3, 1), 5, dtype)
    np.testing.assert_array_equal(nnx.max_pool(x, (3,), padding="SAME"), x)
    np.testing.assert_array_equal(nnx.min_pool(x, (3,), padding=((1, 1),)), x)
    low = jnp.full((3, 1), jnp.iinfo(dtype).min if dtype == jnp.int32 else 0, dtype)
    np.testing.assert_array_equal(nnx.max_pool(low, (3,), padding="SAME"), low)


def test_pools_of_truth_values():
    x = jnp.array([[False], [True], [True]])
    assert nnx.max_pool(x, (2,)).tolist() == [[True], [True]]
    assert nnx.min_pool(x, (2,)).tolist() == [[False], [True]]


def test_pool_takes_any_associative_function():
    x = jnp.arange(1.0, 7.0).reshape(6, 1)
    y = nnx.pool(x, 1.0, lax.mul, (2,), (2,), "VALID")
    np.testing.assert_allclose(y[:, 0], [2, 12, 30])


def test_paddings_in_numbers_are_those_of_a_convolution():
    x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    for padding, pairs in ((1, ((1, 1), (1, 1))), ([1, (0, 2)], ((1, 1), (0, 2)))):
        y = nnx.max_pool(x, (2, 2), padding=padding)
        np.testing.assert_array_equal(y, nnx.max_pool(x, (2, 2), padding=pairs))


def test_means_of_small_dtypes_do_not_overflow():
    for dtype, value in (("uint8", 200), ("int8", -100), ("float16", 2000), ("bool", 1)):
        x = jnp.full((49, 1), value, dtype)
        for counts in (True, False):
            mean = nnx.avg_pool(x, (49,), count_include_pad=counts)
            assert mean.dtype == ("float16" if dtype == "float16" else "float32")
            assert mean.tolist() == [[value]]
