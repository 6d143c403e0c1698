"""Conv: a convolution of one's own, and its arguments; pools."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import QUICK, normal


def test_conv_takes_another_convolution():
    seen = {}

    def convolution(lhs, rhs, strides, padding, **options):
        seen.update(options, strides=strides, padding=padding)
        return jax.lax.conv_general_dilated(lhs, rhs, strides, padding, **options)

    circular = functools.partial(nnx.Conv, 2, 4, [3], [2], padding="CIRCULAR", **QUICK)
    own = {"conv_general_dilated": convolution, "preferred_element_type": jnp.float32}
    layer, plain = circular(**own, rngs=nnx.Rngs(0)), circular(rngs=nnx.Rngs(0))
    x = normal(1, 6, 2)
    np.testing.assert_array_equal(layer(x), plain(x))
    assert (seen["strides"], seen["padding"]) == ((2,), "VALID")
    assert seen["preferred_element_type"] is jnp.float32


def test_lists_become_tuples():
    layer = nnx.Conv(2, 4, [3, 3], [1, 2], padding=[[1, 2], 0], **QUICK, rngs=nnx.Rngs(0))
    assert (layer.kernel_size, layer.strides) == ((3, 3), (1, 2))
    assert layer.padding == ((1, 2), 0)


# Pools ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
def test_what_is_padded_never_wins(dtype):
    x = jnp.full((3, 1), 5, dtype)
    np.testing.assert_array_equal(nnx.max_pool(x, (3,), padding="SAME"), x)
    np.testing.assert_array_equal(nnx.min_pool(x, (3,), padding=((1, 1),)), x)
    low = jnp.full((3, 1), jnp.iinfo(dtype).min if dtype == jnp.int32 else 0, dtype)
    np.testing.assert_array_equal(nnx.max_pool(low, (3,), padding="SAME"), low)
    bools = jnp.array([[False], [True], [True]])
    assert nnx.max_pool(bools, (2,)).tolist() == [[True], [True]]
    assert nnx.min_pool(bools, (2,)).tolist() == [[False], [True]]


def test_means_of_small_dtypes_do_not_overflow():
    for dtype, value in (("uint8", 200), ("int8", -100), ("float16", 2000), ("bool", 1)):
        x = jnp.full((49, 1), value, dtype)
        for counts in (True, False):
            mean = nnx.avg_pool(x, (49,), count_include_pad=counts)
            assert mean.dtype == ("float16" if dtype == "float16" else "float32")
            assert mean.tolist() == [[value]]
