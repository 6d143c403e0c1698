"""Normalisation of weights: norms and singular values, what is kept, and what is written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import QUICK, normal, quick

X = jnp.asarray(normal(2, 3))


def linear(**kwargs):
    return nnx.Linear(3, 4, **QUICK, **kwargs, rngs=nnx.Rngs(0))


class Block(nnx.Module):
    """A module with parameters of one, two and three dimensions, and state of its own."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 5, **QUICK, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.layers = [nnx.Linear(5, 2, **QUICK, rngs=rngs)]
        self.table = nnx.Param(jnp.asarray(normal(2, 3, 4)))
        self.statistic = nnx.BatchStat(jnp.ones((2, 2)))

    def __call__(self, x):
        return self.layers[0](self.norm(self.first(x)))


def weights(layer):
    return {path: v.value for path, v in nnx.to_flat_state(nnx.state(layer.layer_instance))}


# SpectralNorm -----------------------------------------------------------------------------------


def test_all_parameters_of_two_or_more_dimensions_have_estimates_by_path():
    layer = nnx.SpectralNorm(Block(), n_steps=40, rngs=nnx.Rngs(0))
    paths = {("first", "kernel"): 5, ("layers", 0, "kernel"): 2, ("table",): 4}
    assert set(layer.batch_stats) == {(*p, n) for p in paths for n in ("u", "sigma")}
    for path, columns in paths.items():
        assert layer.batch_stats[(*path, "u")].shape == (1, columns)
        assert isinstance(layer.batch_stats[(*path, "sigma")], nnx.BatchStat)
    before = weights(layer)
    layer(X)
    after = weights(layer)
    for path in paths:
        norm = np.linalg.norm(np.asarray(after[path]).reshape(-1, after[path].shape[-1]), 2)
        np.testing.assert_allclose(norm, 1.0, rtol=1e-4)
    for path in (("first", "bias"), ("norm", "scale"), ("statistic",)):
        assert after[path] is before[path]
    assert after[("norm", "mean")] is not before[("norm", "mean")]


def test_estimates_are_kept_only_when_asked_and_in_training():
    # In the reference the mode has the opposite sense, so that eval() switches updates on.
    layer = nnx.SpectralNorm(linear(), rngs=nnx.Rngs(0))
    frozen = nnx.SpectralNorm(linear(), update_stats=False, rngs=nnx.Rngs(0))

    def updates(layer, *args):
        before = [stat.value for stat in layer.batch_stats.values()]
        layer(X, *args)
        (changed,) = {a is not b.value for a, b in zip(before, layer.batch_stats.values())}
        return changed

    assert updates(layer) and not updates(layer, False)
    assert updates(frozen, True) and not updates(frozen)
    layer.eval()
    assert not updates(layer)
    layer.train()
    assert updates(layer) and not updates(nnx.view(layer, use_running_average=True))
    layer.set_view()
    assert layer.use_running_average is False


def test_the_estimates_keep_the_dtype_of_their_variables():
    layer = nnx.SpectralNorm(linear(), rngs=nnx.Rngs(0))
    nnx.cast(layer, "bfloat16")
    layer(X)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(layer))} == {jnp.dtype("bfloat16")}


# WeightNorm -------------------------------------------------------------------------------------


def test_calling_twice_changes_nothing_more_whatever_the_sign_of_the_scale():
    # The reference stores the product, so that a negative scale turns the weight round every time.
    layer, scales = nnx.WeightNorm(linear(), rngs=nnx.Rngs(0)), np.array([2.0, -3.0, 0.0, 1.0])
    start = np.asarray(layer.layer_instance.kernel.value)
    layer.scales[("kernel",)].value = jnp.asarray(scales)
    kernel = start / np.linalg.norm(start, axis=0) * scales
    wanted = X @ kernel + layer.layer_instance.bias.value
    for _ in range(3):
        np.testing.assert_allclose(layer(X), wanted, rtol=1e-4, atol=1e-6)
    lengths = np.linalg.norm(layer.layer_instance.kernel.value, axis=0)
    np.testing.assert_allclose(lengths[[0, 1, 3]], [2.0, 3.0, 1.0], rtol=1e-5)


def test_scales_are_drawn_unless_they_are_constants():
    rngs = nnx.Rngs(0)
    nnx.WeightNorm(linear(), rngs=rngs)  # ones
    assert int(rngs.default.count.value) == 0
    layer = nnx.WeightNorm(linear(), scale_init=quick, param_dtype=jnp.bfloat16, rngs=rngs)
    assert int(rngs.default.count.value) == 1
    wanted = quick(nnx.Rngs(0)(), (4,), jnp.bfloat16)
    np.testing.assert_array_equal(layer.scales[("kernel",)].value, wanted)


def test_further_arguments_reach_the_module():
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    layer = nnx.WeightNorm(norm, variable_filter=None, rngs=nnx.Rngs(0))
    mean = norm.mean.value
    layer(X, True, mask=None)
    assert norm.mean.value is mean
    layer(X, use_running_average=False)
    assert norm.mean.value is not mean


def test_shared_weights_are_normalised_once():
    class Tied(nnx.Module):
        def __init__(self):
            self.a = linear()
            self.b = nnx.Linear(3, 4, rngs=nnx.Rngs(1))
            self.b.kernel = self.a.kernel

        def __call__(self, x):
            return self.a(x) + self.b(x)

    for kind, kept in ((nnx.SpectralNorm, "batch_stats"), (nnx.WeightNorm, "scales")):
        layer = kind(Tied(), rngs=nnx.Rngs(0))
        assert {path[0] for path in getattr(layer, kept)} == {"a"}
        layer(X)
        assert layer.layer_instance.a.kernel is layer.layer_instance.b.kernel


@pytest.mark.parametrize("value", [1e-4, 0.0, 300.0])
@pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
def test_weights_of_half_precision_are_normalized_in_float32(wrapper, value):
    """Squares in float16 overflow above 255, and vanish below 2e-4, together with epsilon."""
    layer = linear(param_dtype=jnp.float16)
    layer.kernel.value = jnp.full((3, 4), value, jnp.float16)
    norm = wrapper(layer, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    for _ in range(3):
        norm(X.astype(jnp.float16))
    kernel = np.asarray(layer.kernel.value)
    assert kernel.dtype == np.float16
    size = np.linalg.norm(kernel.astype(np.float32)[:, 0])
    if wrapper is nnx.SpectralNorm:
        size *= np.sqrt(kernel.shape[1])
    np.testing.assert_allclose(size, 1.0 if value else 0.0, rtol=2e-3)
