"""Conv and ConvTranspose: values against plain loops, paddings, and messages."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import QUICK, normal


@pytest.mark.parametrize("kind", [nnx.Conv, nnx.ConvTranspose])
def test_a_mask_hides_weights_from_result_and_gradient(kind):
    mask = jnp.asarray(np.random.default_rng(1).integers(0, 2, (3, 2, 4)))
    layer = kind(2, 4, 3, mask=mask, **QUICK, rngs=nnx.Rngs(0))
    plain = kind(2, 4, 3, **QUICK, rngs=nnx.Rngs(0))
    plain.kernel.value = plain.kernel.value * mask
    x = normal(5, 2)
    np.testing.assert_array_equal(layer(x), plain(x))
    grads = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(layer)
    assert not np.any(np.asarray(grads["kernel"].value)[np.asarray(mask) == 0])


def test_a_mask_may_be_a_variable():
    layer = nnx.Conv(
        2, 4, 3, mask=nnx.Variable(jnp.zeros((3, 2, 4))), use_bias=False, **QUICK, rngs=nnx.Rngs(0)
    )
    np.testing.assert_array_equal(layer(normal(5, 2)), np.zeros((5, 4)))


def test_conv_takes_another_convolution():
    seen = {}

    def convolution(lhs, rhs, strides, padding, **options):
        seen.update(options, strides=strides, padding=padding)
        return jax.lax.conv_general_dilated(lhs, rhs, strides, padding, **options)

    circular = functools.partial(nnx.Conv, 2, 4, 3, 2, padding="CIRCULAR", **QUICK)
    own = {"conv_general_dilated": convolution, "preferred_element_type": jnp.float32}
    layer, plain = circular(**own, rngs=nnx.Rngs(0)), circular(rngs=nnx.Rngs(0))
    x = normal(1, 6, 2)
    np.testing.assert_array_equal(layer(x), plain(x))
    assert (seen["strides"], seen["padding"]) == ((2,), "VALID")
    assert seen["preferred_element_type"] is jnp.float32


def test_lists_are_kept_as_tuples():
    layer = nnx.Conv(2, 4, [3, 3], [1, 2], padding=[[1, 2], 0], **QUICK, rngs=nnx.Rngs(0))
    assert (layer.kernel_size, layer.strides) == ((3, 3), (1, 2))
    assert layer.padding == ((1, 2), 0)
    assert layer(jnp.ones((6, 6, 2))).shape == (7, 2, 4)
