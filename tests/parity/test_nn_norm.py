"""Parity of the normalisations with the reference: parameters, results, gradients, statistics."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import normal
from tests.parity.layers import (
    assert_equal_results,
    ref,
)

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")  # of the reference
def test_statistics_keep_their_dtype_as_in_the_reference():
    x = normal(4, 6).astype(np.float64)
    with jax.enable_x64(True):
        ours, theirs = (lib.BatchNorm(6, rngs=lib.Rngs(0)) for lib in (nnx, ref))
        for layer in (ours, theirs):
            assert layer(x).dtype == np.float64
            assert layer.mean.dtype == layer.var.dtype == F32
        np.testing.assert_allclose(ours.var.get_value(), theirs.var.get_value(), rtol=1e-6)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "InstanceNorm"])
def test_without_parameters_any_number_of_features_does(name):
    options = {"use_scale": False} | ({} if name == "RMSNorm" else {"use_bias": False})
    x = jnp.asarray(normal(2, 4, 6))
    ours, theirs = (getattr(lib, name)(3, rngs=lib.Rngs(0), **options) for lib in (nnx, ref))
    assert_equal_results(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm"])
def test_bad_input_raises_what_the_reference_raises(name):
    bad = {
        "BatchNorm": [
            (lambda lib: lib.BatchNorm(6, use_running_average=None, rngs=lib.Rngs(0)), (3, 6))
        ],
        "LayerNorm": [(lambda lib: lib.LayerNorm(6, rngs=lib.Rngs(0)), (3, 7))],
        "GroupNorm": [
            (lambda lib: lib.GroupNorm(6, 4, rngs=lib.Rngs(0)), (3, 6)),
            (lambda lib: lib.GroupNorm(6, None, rngs=lib.Rngs(0)), (3, 6)),
            (lambda lib: lib.GroupNorm(6, 2, rngs=lib.Rngs(0)), (3, 7)),
        ],
        "InstanceNorm": [
            (lambda lib: lib.InstanceNorm(6, feature_axes=0, rngs=lib.Rngs(0)), (6, 3))
        ],
    }
    for build, shape in bad[name]:
        kinds = []
        for lib in (nnx, ref):
            with pytest.raises((ValueError, TypeError)) as caught:
                build(lib)(jnp.ones(shape))
            kinds.append(caught.type)
        assert kinds[0] is kinds[1]


# Normalisation of weights -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "RMSNorm", "InstanceNorm"])
def test_parameters_of_another_size_can_be_loaded(name):
    x = jnp.asarray(normal(2, 3, 4))
    results = []
    for lib in (nnx, ref):
        layer, wider = (getattr(lib, name)(n, rngs=lib.Rngs(0)) for n in (2, 4))
        lib.update(layer, lib.state(wider))
        results.append(layer(x))
    assert_equal_results(*results)


MASKED = {
    "BatchNorm": ((4,), {}),
    "LayerNorm": ((4,), {}),
    "RMSNorm": ((4,), {}),
    "GroupNorm": ((4, 2), {}),
    "InstanceNorm": ((4,), {"use_fast_variance": False}),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_results_are_those_of_the_reference_bit_for_bit(name):
    """Masks of all shapes that the reference takes, also traced: the programs are the same."""
    args, options = MASKED[name]
    ours = getattr(nnx, name)(*args, **options, rngs=nnx.Rngs(0))
    theirs = getattr(ref, name)(*args, **options, rngs=ref.Rngs(0))
    x, full = jnp.asarray(normal(2, 3, 4)), normal(2, 3, 4, seed=1) < 0.5
    full[..., 0] = True
    for sizes in itertools.product((True, False), (True, False), (True, False)):
        mask = full[tuple(slice(None) if whole else slice(1) for whole in sizes)]
        if name == "GroupNorm" and mask.shape[-1] == 1:
            continue  # of which the reference cannot make groups
        for keep in (mask, mask[0], mask[0, 0]):
            y, z = ours(x, mask=jnp.asarray(keep)), theirs(x, mask=jnp.asarray(keep))
            assert np.isfinite(y).all()
            np.testing.assert_array_equal(y, np.where(np.isnan(z), y, z))  # NaN: of no elements
    for a, b in zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(ref.state(theirs))):
        np.testing.assert_array_equal(a, np.where(np.isnan(b), a, b))
