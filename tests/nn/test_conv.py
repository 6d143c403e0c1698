"""Conv and ConvTranspose: values against plain loops, paddings, and messages."""

from __future__ import annotations

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

    layer = nnx.Conv(
        2,
        4,
        3,
        2,
        padding="CIRCULAR",
        conv_general_dilated=convolution,
        preferred_element_type=jnp.float32,
        **QUICK,
        rngs=nnx.Rngs(0),
    )
    plain = nnx.Conv(2, 4, 3, 2, padding="CIRCULAR", **QUICK, rngs=nnx.Rngs(0))
    x = normal(1, 6, 2)
    np.testing.assert_array_equal(layer(x), plain(x))
    assert (seen["strides"], seen["padding"]) == ((2,), "VALID")
    assert seen["preferred_element_type"] is jnp.float32


def test_lists_are_kept_as_tuples():
    layer = nnx.Conv(2, 4, [3, 3], [1, 2], padding=[[1, 2], 0], **QUICK, rngs=nnx.Rngs(0))
    assert (layer.kernel_size, layer.strides) == ((3, 3), (1, 2))
    assert layer.padding == ((1, 2), 0)
    assert layer(jnp.ones((6, 6, 2))).shape == (7, 2, 4)


@pytest.mark.parametrize(
    "options",
    [{"padding": "FOO"}, {"padding": [1]}, {"padding": [(1, 2, 3), 1]}, {"padding": None}],
    ids=str,
)
@pytest.mark.parametrize("kind", [nnx.Conv, nnx.ConvTranspose])
def test_a_padding_that_is_none_is_refused(kind, options):
    with pytest.raises(
        ValueError,
        match=r"Invalid padding format: .* SAME, .*each of the 2 spatial axes",
    ):
        kind(2, 4, (3, 2), **QUICK, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("padding", ["CAUSAL", "REFLECT"])
def test_transposed_convolutions_know_fewer_paddings(padding):
    with pytest.raises(ValueError, match="ConvTranspose: Invalid padding format: .* SAME, SAME_LO"):
        nnx.ConvTranspose(2, 4, 3, padding=padding, **QUICK, rngs=nnx.Rngs(0))


def test_lower_padding_of_transposed_convolutions_needs_strides_of_one():
    layer = nnx.ConvTranspose(2, 4, 3, 2, padding="SAME_LOWER", **QUICK, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"'SAME_LOWER' padding needs strides of one, got str.*2"):
        layer(jnp.ones((1, 5, 2)))


def test_causal_padding_needs_one_axis():
    with pytest.raises(
        ValueError, match=r"only implemented for 1D convolutions, and kernel_size is \(3, 2\)"
    ):
        nnx.Conv(2, 4, (3, 2), padding="CAUSAL", **QUICK, rngs=nnx.Rngs(0))


def test_input_dilation_needs_numbers_for_padding():
    with pytest.raises(ValueError, match="with input_dilation=2 the padding must be given in num"):
        nnx.Conv(2, 4, 3, input_dilation=2, **QUICK, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", ["strides", "kernel_dilation"])
@pytest.mark.parametrize("value", [(1,), (1, 2, 3), 0])
@pytest.mark.parametrize("kind", [nnx.Conv, nnx.ConvTranspose])
def test_strides_and_dilations_are_one_for_each_axis(kind, name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a positive number, or one for each"):
        kind(2, 4, (3, 2), **QUICK, rngs=nnx.Rngs(0), **{name: value})


@pytest.mark.parametrize(("features", "groups"), [((4, 9), 4), ((3, 4), 2), ((4, 4), 0)])
def test_groups_must_divide_the_features(features, groups):
    with pytest.raises(ValueError, match=f"feature_group_count={groups} must divide in_features"):
        nnx.Conv(*features, 3, feature_group_count=groups, **QUICK, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kind", [nnx.Conv, nnx.ConvTranspose])
def test_a_mask_of_another_shape_is_refused_when_made_and_when_called(kind):
    with pytest.raises(ValueError, match=r"Mask needs to have the same shape .*, \(3, 2, 4\)"):
        kind(2, 4, 3, mask=jnp.ones((2, 4)), **QUICK, rngs=nnx.Rngs(0))
    layer = kind(2, 4, 3, mask=jnp.ones((3, 2, 4)), **QUICK, rngs=nnx.Rngs(0))
    layer.mask = jnp.ones((1, 2, 4))
    with pytest.raises(ValueError, match=r"Shapes are: \(1, 2, 4\), \(3, 2, 4\)"):
        layer(jnp.ones((5, 2)))


@pytest.mark.parametrize("shape", [(2, 8, 8, 5), (8, 2), (2,)])
@pytest.mark.parametrize("kind", [nnx.Conv, nnx.ConvTranspose])
def test_an_input_that_does_not_fit_is_named_with_the_kernel(kind, shape):
    layer = kind(2, 4, (3, 3), **QUICK, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=rf"{kind.__name__} expects an input of shape") as error:
        layer(jnp.ones(shape))
    assert "kernel_size is (3, 3) and `kernel` has shape (3, 3, 2, 4)" in str(error.value)
    assert str(error.value).endswith(f"got {shape}.")


def test_a_refused_conv_has_drawn_nothing():
    rngs = nnx.Rngs(0)
    for options in ({"padding": "FOO"}, {"strides": (1, 2)}, {"mask": jnp.ones(2)}):
        with pytest.raises(ValueError):
            nnx.Conv(2, 4, 3, **QUICK, rngs=rngs, **options)
    with pytest.raises(TypeError, match="`kernel_size` must be a whole number"):
        nnx.Conv(2, 4, 2.5, **QUICK, rngs=rngs)
    assert rngs.default.count.value == 0


def test_padding_by_itself():
    assert nnx.nn.linear.canonicalize_padding(2, rank=2) == [(2, 2), (2, 2)]
    with pytest.raises(
        ValueError, match=r"Invalid padding format: \[1\], should be a number, .* 2 spatial axes"
    ):
        nnx.nn.linear.canonicalize_padding([1], rank=2)
