"""Normalisation of activations: against numpy, in every mode, over devices, under masks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn import formulas
from tests.nn.quick import normal

X = normal(4, 5, 6) * 3 + 1


def normalized(x, axes, epsilon, mask=None):
    return formulas.norm(np.asarray(x, np.float64), axes, epsilon, None, None, mask=mask)


NORMS = {  # class: arguments
    nnx.BatchNorm: (6,),
    nnx.LayerNorm: (6,),
    nnx.RMSNorm: (6,),
    nnx.GroupNorm: (6, 3),
    nnx.InstanceNorm: (6,),
}
every_norm = pytest.mark.parametrize("kind", NORMS)


def test_the_slow_variance_keeps_its_digits_where_the_mean_is_large():
    x = jnp.asarray(normal(8, 64) + 1e4)
    wanted = normalized(x, (1,), 1e-6)
    slow = nnx.LayerNorm(64, use_fast_variance=False, rngs=nnx.Rngs(0))(x)
    fast = nnx.LayerNorm(64, rngs=nnx.Rngs(0))(x)
    np.testing.assert_allclose(slow, wanted, atol=5e-3)
    assert np.abs(fast - wanted).max() > 0.1


# BatchNorm ------------------------------------------------------------------------------------


def test_a_captured_layer_can_be_used_inside_a_transform_when_it_does_not_train():
    layer = nnx.BatchNorm(6, use_running_average=True, rngs=nnx.Rngs(0))
    assert jax.jit(lambda x: layer(x))(jnp.asarray(X)).shape == X.shape
    with pytest.raises(nnx.TraceContextError, match="BatchStat"):
        jax.jit(lambda x: layer(x, use_running_average=False))(jnp.asarray(X))


def test_running_averages_carry_no_gradient():
    def average(x):
        layer = nnx.BatchNorm(6, rngs=nnx.Rngs(0))
        layer(x)
        return layer.mean.value.sum() + layer.var.value.sum()

    np.testing.assert_array_equal(jax.grad(average)(jnp.asarray(X)), np.zeros_like(X))


# Over devices and named axes ------------------------------------------------------------------


def over_devices(layer, x, mask=None, **options):
    """The layer applied to each part of `x` along its first axis, with a named axis over it."""
    graphdef, state = nnx.split(layer)

    def one(x, mask):
        layer = nnx.merge(graphdef, state, copy=True)
        y = layer(x, mask=mask)
        return y, nnx.to_pure_dict(nnx.state(layer, nnx.BatchStat))

    axes = (0, None if mask is None else 0)
    return jax.vmap(one, in_axes=axes, axis_name="devices", **options)(x, mask)


def test_moments_are_those_of_all_devices():
    x = jnp.asarray(X.reshape(2, 2, 5, 6))
    layer = nnx.BatchNorm(6, axis_name="devices", rngs=nnx.Rngs(0))
    alone = nnx.BatchNorm(6, rngs=nnx.Rngs(0))
    y, stats = over_devices(layer, x)
    np.testing.assert_allclose(y, alone(jnp.asarray(X)).reshape(x.shape), rtol=1e-4, atol=1e-5)
    for name in ("mean", "var"):
        np.testing.assert_allclose(stats[name], [getattr(alone, name).value] * 2, rtol=1e-5)


@pytest.mark.parametrize("fast", [True, False])
def test_masked_moments_count_the_elements_of_all_devices(fast):
    # Devices keep different numbers of elements.  The reference averages the means of the devices,
    # which gives each device the same weight; the mean of the data is another number.
    x = jnp.asarray(X.reshape(2, 2, 5, 6))
    mask = np.ones(x.shape, bool)
    mask[1, :, 1:] = False
    layer = nnx.BatchNorm(6, axis_name="devices", use_fast_variance=fast, rngs=nnx.Rngs(0))
    y, _ = over_devices(layer, x, jnp.asarray(mask))
    wanted = normalized(X, (0, 1), 1e-5, mask.reshape(X.shape))
    np.testing.assert_allclose(y.reshape(X.shape), wanted, rtol=1e-4, atol=1e-5)


def test_groups_of_devices_have_their_own_moments():
    layer = nnx.BatchNorm(
        6, axis_name="devices", axis_index_groups=[[0, 1], [2, 3]], rngs=nnx.Rngs(0)
    )
    graphdef, state = nnx.split(layer)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("devices",))
    spec = jax.sharding.PartitionSpec("devices")
    run = jax.jit(
        jax.shard_map(
            lambda x: nnx.merge(graphdef, state, copy=True)(x),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    x = normal(8, 6)
    wanted = np.concatenate([normalized(x[:4], (0,), 1e-5), normalized(x[4:], (0,), 1e-5)])
    np.testing.assert_allclose(run(jnp.asarray(x)), wanted, rtol=1e-4, atol=1e-5)


# Bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
@every_norm
def test_moments_of_no_elements_make_no_nan(kind, fast):
    """An example of padding only has a finite result, not magnified, and a finite gradient."""
    norm = kind(*NORMS[kind], use_fast_variance=fast, rngs=nnx.Rngs(0))
    x = jnp.asarray(normal(2, 3, 6))
    nothing = jnp.zeros((2, 3, 1), bool)
    np.testing.assert_allclose(norm(x, mask=nothing), x, rtol=1e-5)
    part = nothing.at[0].set(True)
    grads = nnx.grad(lambda norm, x: (norm(x, mask=part) ** 2).sum(), argnums=(0, 1))(norm, x)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_a_batch_without_elements_leaves_the_running_averages():
    norm = nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
    norm(jnp.array([[1.0, 2.0], [3.0, 6.0]]))
    norm(jnp.zeros((0, 2)))
    norm(jnp.ones((3, 2)), mask=jnp.zeros((3, 1), bool))
    assert (norm.mean.value.tolist(), norm.var.value.tolist()) == ([1.0, 2.0], [1.0, 2.5])
    norm(jnp.full((2, 2), 9.0), mask=jnp.array([True, False]))  # of the first feature only
    assert (norm.mean.value.tolist(), norm.var.value.tolist()) == ([5.0, 2.0], [0.5, 2.5])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_running_averages_keep_their_precision_in_half_precision(dtype):
    """In float16 a variance of 1e6 is infinite, and 1000.4 is 1000.5."""
    norm = nnx.BatchNorm(2, dtype=dtype, use_running_average=True, rngs=nnx.Rngs(0))
    norm.mean.value, norm.var.value = jnp.array([1e5, 100.4]), jnp.array([1e6, 1.0])
    y = norm(jnp.array([[1024, 101]], dtype))
    assert y.dtype == dtype
    np.testing.assert_allclose(y.astype(jnp.float32), [[-98.976, 0.6]], rtol=4e-3)


def test_running_averages_of_float32_do_not_round_inputs_of_float64():
    norm = nnx.BatchNorm(1, epsilon=0.0, use_running_average=True, rngs=nnx.Rngs(0))
    norm.var.value = jnp.array([3.0])
    with jax.enable_x64(True):
        y = norm(jnp.ones((1, 1), "float64"))
    np.testing.assert_allclose(y, [[1 / np.sqrt(3)]], rtol=1e-15)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_averages_that_were_cast_go_on_in_float32(dtype):
    """In bfloat16, a momentum of 0.99 stopped them on the way."""
    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    nnx.cast(norm, dtype)
    x = jnp.full((4, 2), 3, dtype)
    norm.eval()
    assert norm(x).dtype == norm.mean.dtype == dtype
    norm.train()
    for _ in range(500):
        norm(x)
    np.testing.assert_allclose(norm.mean[...], 3 * (1 - 0.99**500), rtol=1e-4)
    np.testing.assert_allclose(norm.var[...], 0.99**500, rtol=1e-4)
    assert norm.mean.dtype == norm.var.dtype == jnp.float32
